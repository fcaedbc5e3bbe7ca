"""The Python API: start, list, follow and change runs; serve models. The command line takes the same path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.api.run_handle import Run, run, runs
    from craton.api.server import Server, serve
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
