"""Craton predicts, runs, measures and repairs foundation-model jobs.

`from craton import load_job, plan, run` is the API that the command line itself calls. Names load on first use, so that
`import craton` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names
from craton.version import VERSION

if TYPE_CHECKING:
    from craton.errors import CratonError as CratonError
    from craton.job.jobfile import Job as Job
    from craton.job.jobfile import load_job as load_job
    from craton.job.layout.layout import Layout as Layout
    from craton.job.model.presets import model_preset as model_preset
    from craton.job.model.shape import ModelShape as ModelShape
    from craton.orchestration.start.python import run as run
    from craton.planning.planner import plan as plan
    from craton.planning.result import Plan as Plan
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)

__version__ = VERSION
