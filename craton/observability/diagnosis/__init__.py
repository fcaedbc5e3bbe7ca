"""`craton why`: a snapshot of a run, examinations of it layer by layer, and one verdict.

`take_snapshot(run)` looks at everything there is to see; `diagnose(snapshot)` is pure, so that a snapshot can be saved,
sent to somebody and judged again. `diagnosis.building` makes snapshots of runs that never were, for tests and benches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.observability.diagnosis.bench import ScenarioOutcome, seed_of_today, simulated_outcomes
    from craton.observability.diagnosis.bench_live import LIVE, live_outcomes
    from craton.observability.diagnosis.bench_score import Score, score
    from craton.observability.diagnosis.judging import diagnose
    from craton.observability.diagnosis.snapshot import SnapshotRank, RunFacts, Snapshot, SnapshotError
    from craton.observability.diagnosis.symptoms import straggler_of
    from craton.observability.diagnosis.tables import LAYERS, Cause, causes
    from craton.observability.diagnosis.taking import chosen_run, read_snapshot, take_snapshot
    from craton.observability.diagnosis.verdict import Condition, Finding, Symptom, Verdict
else:
    __getattr__ = loader(
        __name__,
        {
            "bench": ("Outcome", "simulated_outcomes", "seed_of_today"),
            "bench_live": ("LIVE", "live_outcomes"),
            "bench_score": ("Score", "score"),
            "judging": ("diagnose",),
            "snapshot": ("Rank", "RunFacts", "Snapshot", "SnapshotError"),
            "symptoms": ("straggler_of",),
            "tables": ("LAYERS", "Cause", "causes"),
            "taking": ("chosen_run", "read_snapshot", "take_snapshot"),
            "verdict": ("Condition", "Finding", "Symptom", "Verdict"),
        },
    )

__all__ = [
    "LAYERS",
    "LIVE",
    "Cause",
    "Condition",
    "Finding",
    "ScenarioOutcome",
    "SnapshotRank",
    "RunFacts",
    "Score",
    "Snapshot",
    "SnapshotError",
    "Symptom",
    "Verdict",
    "causes",
    "chosen_run",
    "diagnose",
    "live_outcomes",
    "read_snapshot",
    "score",
    "seed_of_today",
    "simulated_outcomes",
    "straggler_of",
    "take_snapshot",
]
