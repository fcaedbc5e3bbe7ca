"""The Python API: start, list, follow and change runs; serve models. The command line calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.api.evaluation import comparison_of, eval_job, evaluate, evaluation_of
    from craton.api.run_handle import Run, runs
    from craton.api.server import Server, serve, server_job
    from craton.api.start import preview, run
    from craton.api.start_steps import StartWatch
    from craton.api.suite_plan import is_suite, suite_record
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
