"""Packages whose names are loaded when first asked for (PEP 562), so that a quick verb pays only for what it uses.

A package says `if TYPE_CHECKING: from … import …` for type checkers and `else: __getattr__ = loader(__name__, …)` for
everybody else; its `__all__` stays its whole face.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def loader(
    package: str, homes: Mapping[str, Sequence[str]], other_names: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """The `__getattr__` of a package: `homes` has the names in each of its files, `other_names` what a name is called
    there where that differs."""
    home_of = {name: f"{package}.{file}" for file, names in homes.items() for name in names}
    renamed = other_names or {}

    def load(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home_of))}")
        return getattr(import_module(home_of[name]), renamed.get(name, name))

    return load
