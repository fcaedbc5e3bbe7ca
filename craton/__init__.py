"""Craton predicts, runs, measures and repairs foundation-model jobs.

`from craton import load_job, plan, run` is the Python API; the command line calls it too. Names load on first use, so
that `import craton` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names
from craton.version import VERSION

if TYPE_CHECKING:
    from craton.api import Run as Run
    from craton.api import Server as Server
    from craton.api import run as run
    from craton.api import runs as runs
    from craton.api import serve as serve
    from craton.errors import CratonError as CratonError
    from craton.job import Job as Job
    from craton.job import load_job as load_job
    from craton.job.layout import Layout as Layout
    from craton.job.model import ModelShape as ModelShape
    from craton.job.model import model_preset as model_preset
    from craton.planning import Plan as Plan
    from craton.planning import plan as plan
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)

__version__ = VERSION
