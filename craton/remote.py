"""Models at a URL, for the job file: `craton.job` must read a config.json, but only a higher layer knows object stores.

craton.infrastructure is loaded at the first URL. A file that was read once stays cached for the life of the process, so
that a job keeps one meaning.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path


def is_url(place: str | Path) -> bool:
    """Whether this is a URL (`s3://...`) and not a path."""
    return "://" in str(place)


@cache
def remote_config(url: str) -> Path:
    """Return the local copy of the config.json of the model folder at a URL."""
    folder: Path = import_module("craton.infrastructure.storage").mirror(url, lambda name: name == "config.json")
    return folder / "config.json"


@cache
def remote_weights(url: str) -> Path | None:
    """Return the local cache folder of the model folder at a URL if it has weights; they are fetched when read."""
    folder = import_module("craton.infrastructure.storage").CachedFolder(url)
    return folder.root if any(name.endswith(".safetensors") for name in folder.listing) else None
