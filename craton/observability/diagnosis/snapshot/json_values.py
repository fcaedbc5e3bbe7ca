"""Dataclasses as JSON and back. JSON has no NaN or infinity: they are written as strings."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any


def plain_values(value: Any) -> Any:
    """Return the value as JSON can represent it."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): plain_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value


def made_from(kind: Any, value: Any) -> Any:
    """Convert a JSON value to this annotated type."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise TypeError(f"{kind.__name__} must be an object, got {value!r}")
        hints = hints_of(kind)
        return kind(**{name: made_from(hints[name], content) for name, content in value.items() if name in hints})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return made_from(next(argument for argument in arguments if argument is not types.NoneType), value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(made_from(arguments[0], element) for element in value)
        return tuple(made_from(entry, part) for entry, part in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is not an object")
        return {arguments[0](key): made_from(arguments[1], item) for key, item in value.items()}
    if kind is float:
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}
