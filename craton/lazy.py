"""Packages whose public names load on first use (PEP 562), so that a fast command imports only what it needs.

An `__init__.py` lists its names once, as imports under `if TYPE_CHECKING:`. Type checkers and import-linter read that
block directly; at run time `lazy_names` reads the same block from the source and loads each module on first use.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

Face = tuple[list[str], Callable[[str], object], Callable[[], list[str]]]


def lazy_names(package: str, file: str) -> Face:
    """Return `__all__`, `__getattr__` and `__dir__` of a package, from the TYPE_CHECKING block of its `__init__.py`."""
    homes = face_names(Path(file).read_text(encoding="utf-8"))
    names = sorted(homes)

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        module, original = homes[name]
        return getattr(import_module(module), original)

    return names, load, lambda: names


def face_names(source: str) -> dict[str, tuple[str, str]]:
    """Exported name → (module, its name there), for every import under `if TYPE_CHECKING:`."""
    return {
        alias.asname or alias.name: (statement.module, alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }
