"""Files of a Hugging Face model folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"


def has_weights(folder: str | Path) -> bool:
    """Whether a folder holds all the safetensors files it speaks of."""
    folder = Path(folder)
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return all((folder / file).is_file() for file in set(index["weight_map"].values()))
    except FileNotFoundError:
        return any(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
