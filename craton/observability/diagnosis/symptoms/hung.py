"""Hangs: no rank makes progress. The culprits are the ranks that the others wait for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from craton.formatting import whole_duration
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotRank
from craton.observability.diagnosis.symptoms.naming import nodes_of, progress_age
from craton.observability.diagnosis.tables import hung_in, threshold
from craton.observability.diagnosis.verdict import Symptom

STEPPING = ("productive", "redo", "")
STOPPED_STEPS = 3.0  # minimum number of steps that a stopped rank has missed


def find_hang(snapshot: Snapshot) -> Symptom | None:
    moving = [
        rank
        for rank in snapshot.ranks
        if rank.is_alive is not False and rank.kind != "idle" and rank.progress_age_seconds is not None
    ]
    # A rank that is continued at once is slow, not hung: it still finishes steps.
    stopped = [
        rank
        for rank in snapshot.ranks
        if rank.is_stopped
        and rank.is_alive is not False
        and min(progress_age(rank), snapshot.moment - (rank.recorded_at or 0.0))
        >= max(threshold("stopped_seconds"), STOPPED_STEPS * (rank.step_seconds or 0.0))
    ]
    if stopped:
        return _hang(snapshot, stopped, max(progress_age(rank) for rank in stopped))
    if not moving:
        return _silent(snapshot)
    oldest = max(progress_age(rank) for rank in moving)
    # Ranks that stopped at the same moment may be waiting for each other: the longest limit among them counts.
    first = [rank for rank in moving if progress_age(rank) >= oldest - threshold("early_margin_seconds")]
    if oldest < max(_limit(rank, snapshot) for rank in first):
        return None
    return _hang(snapshot, _culprits(moving), oldest)


def _hang(snapshot: Snapshot, culprits: Sequence[SnapshotRank], seconds: float) -> Symptom:
    step = max((rank.step for rank in snapshot.ranks if rank.step is not None), default=snapshot.run.step)
    at = f" at step {step}" if step is not None else ""
    evidence = [f"no rank has made progress for {whole_duration(seconds)}{at}"]
    return Symptom(
        "hung",
        f"has made no progress for {whole_duration(seconds)}{at}",
        tuple(evidence),
        ranks=tuple(rank.rank for rank in culprits),
        nodes=nodes_of(culprits),
        lost_share=1.0,
    )


def _limit(rank: SnapshotRank, snapshot: Snapshot) -> float:
    steps = threshold("hung_steps") * (rank.step_seconds or 0.0)
    own = rank.progress_limit_seconds or 0.0  # a command may be silent while it evaluates, up to `progress.hang`
    hung = hung_in(rank.kind)
    if rank.kind in STEPPING or hung is None:
        if not rank.step_seconds:  # its step time is not known yet: it may be compiling
            return hung_in("compile") or 0.0
        return max(threshold("hung_seconds"), steps, own)
    if rank.kind == "checkpoint":
        usual = max((tier.usual_seconds or 0.0 for tier in snapshot.tiers), default=0.0)
        return max(hung, 5.0 * usual)
    return max(hung, steps)


def _culprits(ranks: Sequence[SnapshotRank]) -> list[SnapshotRank]:
    """Return the ranks that the others wait for; empty if no rank stands out."""
    asleep = [rank for rank in ranks if rank.process_state in ("D", "T", "Z")]
    if asleep and len(asleep) < len(ranks):
        return asleep
    steps = [rank.step for rank in ranks if rank.step is not None]
    if steps and min(steps) < max(steps):
        behind = [rank for rank in ranks if rank.step == min(steps)]
        apart = [rank for rank in behind if rank.kind not in STEPPING]
        return apart or behind
    apart = [rank for rank in ranks if rank.kind not in STEPPING]
    if apart and len(apart) < len(ranks):
        return apart
    running = [rank for rank in ranks if rank.process_state == "R"]
    if running and 2 * len(running) <= len(ranks) and all(rank.process_state in ("R", "S") for rank in ranks):
        return running  # the others sleep in a receive; ranks that wait for a GPU would be running too
    oldest = max(progress_age(rank) for rank in ranks)
    usual = statistics.median(rank.step_seconds or 0.0 for rank in ranks)
    margin = max(threshold("early_margin_seconds"), 0.25 * usual)
    early = [rank for rank in ranks if progress_age(rank) > oldest - margin]
    if 2 * len(early) <= len(ranks):
        return early
    return []


def _silent(snapshot: Snapshot) -> Symptom | None:
    """Return a hang by missing metrics alone, where no agent reports what the ranks are doing."""
    run = snapshot.run
    since = run.updated_at if run.updated_at is not None else run.generation_began
    if since is None or run.state not in ("running", "starting"):
        return None
    pace = max([rank.step_seconds or 0.0 for rank in snapshot.ranks], default=0.0) or run.plan.get("step_seconds", 0.0)
    limit = max(threshold("silent_seconds"), 3 * threshold("hung_steps") * pace)
    if run.updated_at is None:
        limit = max(limit, hung_in("start") or 0.0)
    age = snapshot.moment - since
    return _hang(snapshot, [], age) if age > limit else None
