"""Craton predicts, runs, measures and mends foundation-model jobs.

`from craton import load_job, plan, run` is the same face the command line uses. Names are loaded when first asked for,
so that `import craton` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from craton.version import VERSION

if TYPE_CHECKING:
    from craton.job import CratonError, Job, Layout, ModelShape, load_job, model_preset
    from craton.orchestration import run
    from craton.planning import Plan, plan

__version__ = VERSION
__all__ = ["CratonError", "Job", "Layout", "ModelShape", "Plan", "load_job", "model_preset", "plan", "run"]

_HOMES = {
    "CratonError": "craton.job",
    "Job": "craton.job",
    "Layout": "craton.job",
    "ModelShape": "craton.job",
    "load_job": "craton.job",
    "model_preset": "craton.job",
    "Plan": "craton.planning",
    "plan": "craton.planning",
    "run": "craton.orchestration",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'craton' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
