"""Step times by phase, compared with the other ranks, the run's past and the plan; find stragglers and slow phases.

In lock-step training every rank's step takes the same time, because all ranks wait for the slowest in collectives. A
straggler therefore *works* longest (data, compute, optimizer, checkpoint) and *waits* least. The time of the
collectives themselves is the wait of the rank that waits least, since all others also wait for it. Ranks of different
pipeline stages have different work and are never compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from craton.observability.diagnosis.snapshot import STEP_PHASES, Snapshot, SnapshotRank
from craton.observability.diagnosis.tables import threshold

WORK = tuple(phase for phase in STEP_PHASES if phase != "communication")
FAST_SHARE = 0.25  # of the ranks; all ranks are compared with this quantile
FEW_RANKS, FEW_RANKS_MARGIN = 9, 0.07  # few ranks may differ for good reasons, and say little about their spread
BETWEEN_QUANTILES = 1.03  # standard deviations between the 10% and the 40% quantile of a normal distribution
NORMAL_DEVIATION = 1.48  # standard deviations in a median absolute deviation
MIN_SPREAD = 0.004  # of the work: GPU clocks differ by this share
ALSO_SHARE = 0.08  # of the step: minimum growth of a further phase
WAITS_LESS = 0.5  # share of the excess work that must show as less waiting


_Behind = tuple[float, float, SnapshotRank, list[SnapshotRank]]  # seconds behind, ratio, rank, the fast ranks


@dataclass(frozen=True)
class Straggling:
    """Ranks that all others wait for."""

    ranks: tuple[int, ...]  # slowest first
    phase: str
    ratio: float  # work of the slowest over that of the fast ranks
    seconds: float  # saved per step without them
    step_seconds: float
    since_start: bool

    @property
    def lost_share(self) -> float:
        return self.seconds / self.step_seconds


@dataclass(frozen=True)
class Slowness:
    """Steps that take longer than before, or than planned."""

    step_seconds: float
    reference_seconds: float
    against: str  # "plan" or "earlier"
    phase: str  # that grew
    phase_seconds: float
    phase_reference: float
    is_first: bool = True  # the phase that grew most

    @property
    def lost_share(self) -> float:
        """Return the lost share of the whole step, or for a further phase, of that phase alone."""
        if not self.is_first:
            return (self.phase_seconds - self.phase_reference) / self.step_seconds
        return max(0.0, 1.0 - self.reference_seconds / self.step_seconds)


def is_on_processors(snapshot: Snapshot) -> bool:
    """Return whether ranks compute on shared CPUs, so that their times are noisy."""
    if snapshot.run.is_accelerated is not None:
        return not snapshot.run.is_accelerated
    return snapshot.run.on == "local"


def measured_ranks(snapshot: Snapshot) -> list[SnapshotRank]:
    """Return the ranks with enough steps for a comparison."""
    return [
        rank
        for rank in snapshot.ranks
        if rank.num_recent >= threshold("few_steps") and {"step", "compute", "communication"} <= rank.recent.keys()
    ]


def find_straggling(snapshot: Snapshot, before: Collection[int] = ()) -> list[Straggling]:
    """Return the ranks that all others wait for; then those that they would wait for once the first are fixed. Ranks in
    `before` straggled until now: they must be clearly faster to count as well again."""
    ranks = measured_ranks(snapshot)
    if len(ranks) < 2:
        return []
    step_seconds = statistics.median(rank.recent["step"] for rank in ranks)
    behinds: list[_Behind] = []
    for stage in _stages(snapshot, ranks):
        behinds += _behind(stage, snapshot, before)
    if step_seconds <= 0:
        return []
    behinds.sort(key=lambda entry: -entry[0])
    groups: list[Straggling] = []
    leave = threshold("leave_share")
    while behinds and behinds[0][0] / step_seconds >= threshold("straggler_step_share") * (
        leave if behinds[0][2].rank in before else 1.0
    ):
        # Ranks nearly as slow as the slowest belong to its group; slightly slow ones do not.
        seconds = behinds[0][0]
        slowest = [item for item in behinds if item[0] >= 0.5 * seconds]
        behinds = behinds[len(slowest) :]
        groups.append(_group(slowest, step_seconds, behinds[0][0] if behinds else 0.0))
    return groups


def _group(stragglers: Sequence[_Behind], step_seconds: float, next_seconds: float) -> Straggling:
    """Return one group; fixing it saves its distance to the next group."""
    seconds, ratio, slowest, fast = stragglers[0]
    phase = max(WORK, key=lambda item: slowest.recent.get(item, 0.0) - _mean(fast, item))
    was = slowest.earlier.get(phase)
    before = [rank.earlier[phase] for rank in fast if phase in rank.earlier]
    since_start = was is not None and bool(before) and was - statistics.fmean(before) > 0.5 * seconds
    ranks = tuple(rank.rank for _, _, rank, _ in stragglers)
    return Straggling(ranks, phase, ratio, seconds - next_seconds, step_seconds, since_start)


def find_slowness(snapshot: Snapshot, before: Collection[str] = ()) -> list[Slowness]:
    """Return where the run exceeds its own past, or the plan. `before`: what it exceeded until now; it must be clearly
    faster to count as well again."""
    ranks = measured_ranks(snapshot)
    if not ranks:
        return _slowness_of_command(snapshot, before)
    on_processors = is_on_processors(snapshot)
    now = _typical(ranks, lambda rank: rank.recent, snapshot.run.collective_seconds)
    result = []
    with_past = [rank for rank in ranks if rank.num_earlier >= 2 * threshold("few_steps") and "step" in rank.earlier]
    if with_past:
        past = _typical(with_past, lambda rank: rank.earlier, snapshot.run.collective_seconds_before)
        ratio = _ratio("slower_ratio_cpu" if on_processors else "slower_ratio", "earlier" in before)
        if now["step"] > past["step"] * ratio:
            result += _owned(now, past, "earlier")
    plan = {phase: snapshot.run.plan.get(f"{phase}_seconds") for phase in (*STEP_PHASES, "step")}
    high = snapshot.run.step_seconds_high
    if high is not None and plan["step"]:
        limit = high * _ratio("plan_ratio_cpu" if on_processors else "plan_ratio", "plan" in before)
        is_new = "earlier" not in [element.against for element in result]
        is_usual = on_processors and is_new and _is_shared(snapshot)
        is_usual &= now["step"] < high * threshold("shared_ratio_cpu")
        if now["step"] > limit and not is_usual:
            result += _owned(now, {phase: value or 0.0 for phase, value in plan.items()}, "plan")
    return result


def _slowness_of_command(snapshot: Snapshot, before: Collection[str]) -> list[Slowness]:
    """Return steps of a command that take longer than before. Its phases are not known, and what it calls a step may
    vary: only a large change counts."""
    few = threshold("few_steps")
    ranks = [
        rank
        for rank in snapshot.ranks
        if rank.num_recent >= few and rank.num_earlier >= few and {"step"} <= rank.recent.keys() & rank.earlier.keys()
    ]
    if snapshot.run.kind != "command" or not ranks:
        return []
    now = statistics.median(rank.recent["step"] for rank in ranks)
    past = statistics.median(rank.earlier["step"] for rank in ranks)
    if now <= past * _ratio("slower_ratio_command", "earlier" in before):
        return []
    return [Slowness(now, past, "earlier", "", now, past)]


def is_crowded(snapshot: Snapshot) -> bool:
    """Return whether threads of a rank wait for a CPU much of the time."""
    limit = threshold("waited_share")
    return any(rank.resources is not None and rank.resources.waited_share > limit for rank in snapshot.ranks)


def _is_shared(snapshot: Snapshot) -> bool:
    """Return whether other processes use much of the CPUs that the ranks compute on; plans assume that none does."""
    hosts = [node.host for node in snapshot.nodes if node.host is not None]
    return is_crowded(snapshot) or any(
        (host.foreign_processor_share or 0.0) > threshold("foreign_processor_share") for host in hosts
    )


def _ratio(name: str, is_slow: bool) -> float:
    """Return a ratio of thresholds.toml; for what is slow already, the lower one at which it counts as well again."""
    return 1.0 + (threshold(name) - 1.0) * (threshold("leave_share") if is_slow else 1.0)


def _stages(snapshot: Snapshot, ranks: Sequence[SnapshotRank]) -> list[list[SnapshotRank]]:
    """Group ranks by pipeline stage: pp is the outermost dimension of a layout."""
    stages = max(1, snapshot.run.layout.get("pp", 1))
    size = max(1, -(-max(snapshot.run.world, len(ranks)) // stages))
    by_stage: dict[int, list[SnapshotRank]] = {}
    for rank in ranks:
        by_stage.setdefault(rank.rank // size, []).append(rank)
    return [stage for stage in by_stage.values() if len(stage) > 1]


def _behind(stage: Sequence[SnapshotRank], snapshot: Snapshot, before: Collection[int]) -> list[_Behind]:
    """Return (seconds behind, ratio, rank, the fast ranks) of ranks that are slower than the others and wait less."""
    ordered = sorted(stage, key=_work)
    fast = ordered[: max(1, round(2 * len(ordered) * FAST_SHARE))]
    usual = statistics.median(_work(rank) for rank in fast)
    if usual <= 0:
        return []
    spread = max(_spread(ordered), MIN_SPREAD * usual, statistics.median(map(_uncertainty, fast)))
    name = "straggler_ratio_cpu" if is_on_processors(snapshot) else "straggler_ratio"
    margin = FEW_RANKS_MARGIN if len(stage) < FEW_RANKS else 0.0
    waits = statistics.fmean(rank.recent["communication"] for rank in fast)
    result = []
    for rank in ordered:
        behind = _work(rank) - usual
        least = threshold("straggler_spreads") * max(spread, _uncertainty(rank))
        is_slow = _work(rank) > usual * (_ratio(name, rank.rank in before) + margin) and behind > least
        if is_slow and waits - rank.recent["communication"] >= WAITS_LESS * behind:
            result.append((behind, _work(rank) / usual, rank, fast))
    return result


def _uncertainty(rank: SnapshotRank) -> float:
    """Return the standard error of the median of a rank's work: ranks that share CPUs vary from step to step."""
    return 1.25 * NORMAL_DEVIATION * (rank.work_deviation_seconds or 0.0) / math.sqrt(max(1, rank.num_recent))


def _spread(ordered: Sequence[SnapshotRank]) -> float:
    """Return the standard deviation of healthy ranks: among the faster ones, and of each rank against its own past.
    Slow ranks do not count, as long as they are a minority."""
    works = [_work(rank) for rank in ordered]
    before = sorted(_work_before(rank) for rank in ordered if {"step", "communication"} <= rank.earlier.keys())
    among = max(_between_quantiles(works), _between_quantiles(before))
    faster = ordered[: (len(ordered) + 1) // 2]
    changes = [_work(rank) - _work_before(rank) for rank in faster if {"step", "communication"} <= rank.earlier.keys()]
    middle = statistics.median(changes) if changes else 0.0
    against_past = statistics.median(abs(change - middle) for change in changes) if changes else 0.0
    spread = max(among, against_past * NORMAL_DEVIATION / math.sqrt(2.0))
    return spread * (1.0 + 6.0 / len(works))  # quantiles of few values are uncertain


def _between_quantiles(ordered: Sequence[float]) -> float:
    """Return a standard deviation from the faster ranks alone; 0 if there are too few."""
    if len(ordered) < FEW_RANKS:
        return 0.0
    last = len(ordered) - 1
    return (ordered[round(0.4 * last)] - ordered[round(0.1 * last)]) / BETWEEN_QUANTILES


def _work_before(rank: SnapshotRank) -> float:
    return rank.earlier["step"] - rank.earlier["communication"]


def _work(rank: SnapshotRank) -> float:
    return rank.recent["step"] - rank.recent["communication"]


def _mean(ranks: Sequence[SnapshotRank], phase: str) -> float:
    return statistics.fmean(rank.recent.get(phase, 0.0) for rank in ranks)


def _typical(
    ranks: Sequence[SnapshotRank], values: Callable[[SnapshotRank], dict[str, float]], collective: float | None
) -> dict[str, float]:
    """Return phase → seconds: medians, but for communication the minimum wait of any rank, step by step where known."""
    result = {}
    for phase in (*STEP_PHASES, "step"):
        seconds = [values(rank)[phase] for rank in ranks if phase in values(rank)]
        if seconds:
            result[phase] = statistics.median(seconds) if phase != "communication" else collective or min(seconds)
    return result


def _owned(now: dict[str, float], reference: dict[str, float], against: str) -> list[Slowness]:
    """Return the phase that grew most, and every other that grew much: two faults may slow two phases."""
    grown = {phase: now.get(phase, 0.0) - reference.get(phase, 0.0) for phase in STEP_PHASES}
    first = max(grown, key=lambda item: grown[item])
    chosen = [first, *(phase for phase in STEP_PHASES if phase != first and grown[phase] > ALSO_SHARE * now["step"])]
    return [
        Slowness(
            now["step"],
            reference["step"],
            against,
            phase,
            now.get(phase, 0.0),
            reference.get(phase, 0.0),
            phase == first,
        )
        for phase in chosen
    ]
