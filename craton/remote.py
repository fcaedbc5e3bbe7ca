"""Models behind a URL, for the job file: its lowest layer must read a config.json, and only a higher one knows stores.

craton.infrastructure is loaded when the first URL is met. What was read once stays so as long as the process, so that a
job means one thing in it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path


def is_url(place: str | Path) -> bool:
    """`s3://...`, and not a path."""
    return "://" in str(place)


@cache
def remote_config(url: str) -> Path:
    """The config.json of the model folder at a URL, on this machine."""
    folder: Path = import_module("craton.infrastructure.storage").mirror(url, lambda name: name == "config.json")
    return folder / "config.json"


@cache
def remote_weights(url: str) -> Path | None:
    """The local folder that stands for the model folder at a URL, where that has weights; they come when they are
    read."""
    folder = import_module("craton.infrastructure.storage").CachedFolder(url)
    return folder.root if any(name.endswith(".safetensors") for name in folder.listing) else None
