"""`craton bench why`: inject faults with known root causes, run the diagnosis, and score it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.bench.why.benchmark import seed_of_today, simulated_outcomes
    from craton.bench.why.live import live_outcomes
    from craton.bench.why.scorer import Score, score
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
