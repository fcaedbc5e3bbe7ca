"""Presets of published models, read from presets.toml, which documents how far its numbers were verified."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from craton.job.errors import ModelError
from craton.job.model.shape import MlaShape, ModelShape
from craton.nearest import did_you_mean


def model_presets() -> dict[str, ModelShape]:
    """Return every preset by name, in the order of the file, without aliases."""
    return {name: _shape(name, entry) for name, entry in _entries().items()}


def model_preset(name: str) -> ModelShape:
    """Return a preset by name or alias, case-insensitive; ModelError if there is none."""
    shape = find_preset(name)
    if shape is None:
        allowed = [*_entries(), *_aliases()]
        raise ModelError(
            f"{name!r} is not a model preset; allowed: {', '.join(_entries())}{did_you_mean(name, allowed)}"
        )
    return shape


def find_preset(name: str) -> ModelShape | None:
    """Return a preset by name or alias; None if there is none."""
    key = name.lower()
    key = _aliases().get(key, key)
    entry = _entries().get(key)
    return _shape(key, entry) if entry else None


def preset_names() -> list[str]:
    """Return all names and aliases."""
    return [*_entries(), *_aliases()]


def published_parameters() -> dict[str, int]:
    """Return the published parameter count of each model, to three digits; presets.toml gives its source."""
    return {name: int(entry["parameters"]) for name, entry in _entries().items()}


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))


@cache
def _aliases() -> dict[str, str]:
    return {alias: name for name, entry in _entries().items() for alias in entry.get("aliases", ())}


def _shape(name: str, entry: dict[str, Any]) -> ModelShape:
    numbers = {key: value for key, value in entry.items() if key not in ("aliases", "parameters", "mla")}
    numbers.setdefault("kv_heads", numbers["heads"])
    numbers.setdefault("head_dim", numbers["hidden"] // numbers["heads"])
    mla = MlaShape(**entry["mla"]) if "mla" in entry else None
    return ModelShape(name=name, mla=mla, **numbers)
