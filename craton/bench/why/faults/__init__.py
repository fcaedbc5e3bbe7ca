"""`craton bench why --live`: break real runs on this machine in many ways, and score the diagnosis of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.bench.why.faults.bench import run_faults
    from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
    from craton.bench.why.faults.healthy import HealthyRecord, run_healthy
    from craton.bench.why.faults.rubric import LiveScore, Tally, score
    from craton.bench.why.faults.split import FAMILIES, chosen_faults, family_faults
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
