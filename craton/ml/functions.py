"""User code, named in the job file as `package.module:function`.

The folder of the job file is searched first, so a model, an objective or a data source can be a file beside the job.
Errors inside it are reported with the function, its file and the line.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from craton.errors import CratonError


class FunctionError(CratonError):
    """A user's function could not be loaded, or raised."""


def search_folder(folder: Path) -> None:
    """Search this folder for modules from now on, before any other."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def load_function(name: str) -> Callable[..., Any]:
    """Return the function named by `package.module:function`."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise FunctionError(f"{name}: {module_name} could not be imported: {error}{_place(error)}") from error
        raise FunctionError(
            f"{name}: no module {error.name!r} in {sys.path[0]} or elsewhere on the Python path; give the "
            "name of a file beside the job file, without its .py"
        ) from None
    except Exception as error:
        raise FunctionError(f"{name}: {module_name} raised {_describe(error)} on import{_place(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = sorted(
            item for item, value in vars(module).items() if inspect.isfunction(value) and not item.startswith("_")
        )
        raise FunctionError(
            f"{name}: {module.__file__} has no function {attribute!r}; it has {', '.join(functions) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


@contextmanager
def user_code(function: Callable[..., Any], name: str) -> Iterator[None]:
    """Add the function, its file and line to any exception raised inside. An out-of-memory error is not the author's
    fault and passes unchanged."""
    try:
        yield
    except (CratonError, MemoryError):
        raise
    except Exception as error:
        if "memory" in str(error).lower():
            raise
        raise FunctionError(f"{name} raised {_describe(error)}{_place(error, function)}") from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place(error: Exception, function: Callable[..., Any] | None = None) -> str:
    """Return ` (file.py:12)`: the deepest line in the user's own file, else where the function is defined."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if code is not None:
        own = [frame for frame in frames if frame.filename == code.co_filename]
        return f" ({own[-1].filename}:{own[-1].lineno})" if own else f" ({code.co_filename}:{code.co_firstlineno})"
    outside = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f" ({outside[-1].filename}:{outside[-1].lineno})" if outside else ""
