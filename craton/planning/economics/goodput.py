"""Goodput: the share of wall time that makes progress, given node failures and checkpoint overhead.

Failures of a job are a Poisson process of rate λ (many independent nodes; `failure_rate`). Saving to one tier blocks
training for δ seconds after every interval of τ productive seconds; the saved state is complete L seconds later (an
asynchronous write in flight). A failure costs D seconds to detect, restart and restore, plus the work since the last
complete state. Then, exactly:

    goodput(τ) = λ τ · exp(-λ (D + L)) / (exp(λ (τ + δ)) - 1)

The time X from the end of one recovery to the next failure is exponential with mean 1/λ. The j-th checkpoint after the
recovery counts if X ≥ j (τ + δ) + L. On average exp(-λ L) / (exp(λ (τ + δ)) - 1) of them count (the sum of these
probabilities over j), each worth τ. A recovery that a new failure interrupts starts again: it takes (exp(λ D) - 1) / λ
on average, and a whole cycle exp(λ D) / λ. The ratio is the line above; with L = 0 it is Daly's
(doi:10.1016/j.future.2004.11.016). To first order in λ it becomes Meta RSC's expected ETTR,
(1 - λ (D + τ/2)) / (1 + δ/τ) (arXiv:2410.21680), which falls below zero where this falls to zero: 0.68 against 0.72 on
16,000 GPUs with hourly checkpoints.

The best τ solves λ τ = 1 - exp(-λ (τ + δ)), near Young's √(2 δ / λ).

Several tiers: a failure destroys some of them (a lost node its memory and NVMe, a switch perhaps a neighbour's copy
too), and the job recovers from one that is left. Each tier handles its own part of the failures, and the goodputs
multiply. This is an approximation; the simulations of the tests stay within 1% of it.

Guarantees: 0 ≤ low ≤ goodput ≤ high ≤ 1; more failures, slower recovery or larger checkpoints never raise goodput, as
long as the job's checkpoint intervals are feasible. An interval shorter than its write is stretched, with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from craton.formatting import duration, percent, setting
from craton.infrastructure import Cluster
from craton.planning.economics.storage import TIERS, recovery_facts
from craton.planning.result import GoodputPlan, RecoveryPlan, TierPlan

SECONDS_PER_DAY = 86400.0
Z80 = 1.2816  # an 80% interval is ±1.28 standard deviations
CURVE_POINTS = 40

_FAILURES = recovery_facts()["failures"]
_RECOVERY = recovery_facts()["recovery"]
_STORAGE = recovery_facts()["storage"]
_PEER_COST_SHARE: float = recovery_facts()["peer"]["cost_share"]

DEFAULT_PER_NODE_DAY: float = _FAILURES["per_node_day"]["value"]
REFERENCE_RUN_SECONDS: float = _FAILURES["repeat_offenders"]["reference_days"] * SECONDS_PER_DAY

# Kinds of failures by what is lost; sets of kinds are bits, in this order.
_KINDS = ("process", "node", "fabric")
_PROCESS, _NODE, _FABRIC = (1 << bit for bit in range(len(_KINDS)))
_ALL = _PROCESS | _NODE | _FABRIC
_COUNTS = [_FAILURES["kinds"][kind] for kind in _KINDS]
_SHARES = [sum(n for bit, n in enumerate(_COUNTS) if bits >> bit & 1) / sum(_COUNTS) for bits in range(_ALL + 1)]
_SURVIVES = {"peer": _PROCESS | _NODE, "nvme": _PROCESS, "shared": _ALL, "object": _ALL, "start": _ALL}
_DURABLE = ("shared", "object")


@dataclass(frozen=True)
class FailureRate:
    """Mean failures of the whole job per day over its run, with an 80% interval."""

    per_day: float
    low: float
    high: float


def failure_rate(cluster: Cluster, num_nodes: int, run_seconds: float = REFERENCE_RUN_SECONDS) -> FailureRate:
    """Return how often a job on `num_nodes` of the cluster is interrupted.

    The published rates are means over months on 8-GPU nodes; the default is scaled to the node's GPUs, a rate from the
    cluster file is used unchanged. About 1 node in 21 is a repeat offender that fails 30 times as often as the others.
    Nodes are replaced when they fail, so a run starts above the published rate (with all repeat offenders) and ends
    below it.

    The interval combines the spread between fleets (2.3 to 6.5 per 1,000 node-days) with the chance of how many repeat
    offenders this job gets. Below 2,048 GPUs its upper end is the 23.7 that Meta measured at 1,024, which does not
    match Meta's own rate.
    """
    per_node_day = cluster.failures_per_node_day
    if per_node_day == DEFAULT_PER_NODE_DAY:
        per_node_day *= cluster.instance.num_gpus / _FAILURES["per_node_day"]["gpus_per_node"]
    per_day = per_node_day * num_nodes * _repeat_offender_factor(run_seconds / SECONDS_PER_DAY)

    small = num_nodes * cluster.instance.num_gpus < _FAILURES["small_job"]["below_gpus"]
    highest = _FAILURES["small_job" if small else "per_node_day"]["high"]
    offenders = Z80 * math.sqrt(math.log1p(_NODE_RATE_VARIANCE / num_nodes))
    low = math.hypot(math.log(DEFAULT_PER_NODE_DAY / _FAILURES["per_node_day"]["low"]), offenders)
    high = math.hypot(math.log(highest / DEFAULT_PER_NODE_DAY), offenders)
    return FailureRate(per_day, per_day * math.exp(-low), per_day * math.exp(high))


def tier_goodput(
    failures_per_second: float, interval_seconds: float, blocked_seconds: float, lost_seconds: float
) -> float:
    """The formula at the top of this file: λ, τ, δ and D + L."""
    cycle = failures_per_second * (interval_seconds + blocked_seconds)
    if cycle > 700.0:  # exp would overflow; nothing is ever saved
        return 0.0
    share = interval_seconds / (interval_seconds + blocked_seconds)
    return share * (cycle / math.expm1(cycle) if cycle > 0.0 else 1.0) * math.exp(-failures_per_second * lost_seconds)


def best_interval(
    failures_per_second: float, blocked_seconds: float, shortest_seconds: float, longest_seconds: float
) -> float:
    """Return the τ with the highest `tier_goodput` between two bounds: Newton's method from Young's √(2 δ / λ)."""
    if failures_per_second <= 0.0:
        return max(shortest_seconds, longest_seconds)
    blocked = failures_per_second * blocked_seconds
    y = min(math.sqrt(2.0 * blocked), 1.0)  # y = λ τ solves y = 1 - exp(-(y + λ δ))
    for _ in range(20):
        kept = math.exp(-(y + blocked))
        slope = 1.0 - kept
        if slope <= 0.0:
            break
        step = (y - 1.0 + kept) / slope
        y -= step
        if abs(step) < 1e-12:
            break
    return max(shortest_seconds, min(y / failures_per_second, longest_seconds))


def expected_goodput(
    cluster: Cluster,
    num_nodes: int,
    tiers: Sequence[TierPlan],
    *,
    step_seconds: float,
    run_seconds: float = REFERENCE_RUN_SECONDS,
    peer: bool = True,
    replicate: int = 1,
) -> float:
    """Return `goodput_plan(...).goodput` only, for searches."""
    run = _run(cluster, num_nodes, step_seconds, run_seconds, replicate)
    return _goodput(run, _job_tiers(run, tiers, peer), run.rate.per_day)[0]


def goodput_plan(
    cluster: Cluster,
    num_nodes: int,
    tiers: Sequence[TierPlan],
    *,
    step_seconds: float,
    run_seconds: float = REFERENCE_RUN_SECONDS,
    peer: bool = True,
    replicate: int = 1,
) -> GoodputPlan:
    """Return the goodput with the job's own checkpoints, and with recovery from each tier alone.

    `tiers` comes from `storage_plan`: those with an interval are the job's. Peer memory without one (`peer: auto`) is
    written at the best interval, for at most 2% of the time, and not at all with `peer` False. `run_seconds` is the run
    without failures. With `replicate` > 1 another node holds a copy of every shard, so NVMe survives a lost node.
    """
    run = _run(cluster, num_nodes, step_seconds, run_seconds, replicate)
    goodput, used = _goodput(run, _job_tiers(run, tiers, peer), run.rate.per_day)
    low, high = _interval(run, used)
    chosen = max(used, key=lambda item: item.share)
    return GoodputPlan(
        goodput=goodput,
        goodput_low=low,
        goodput_high=high,
        method=chosen.tier,
        interval_seconds=chosen.interval_seconds,
        failures_per_day=run.rate.per_day,
        mean_hours_between_failures=24.0 / run.rate.per_day if run.rate.per_day > 0 else math.inf,
        recoveries=_recoveries(run, tiers),
        curve=[(run_seconds, goodput)] if chosen.tier == "start" else _curve(run, used, chosen),
        failures_per_day_low=run.rate.low,
        failures_per_day_high=run.rate.high,
        warnings=_warnings(run, tiers, used, goodput),
    )


@dataclass(frozen=True)
class _Run:
    """Job parameters that all functions below need."""

    cluster: Cluster
    num_nodes: int
    step_seconds: float
    run_seconds: float
    replicate: int
    rate: FailureRate


@dataclass(frozen=True)
class _Saved:
    """One tier in terms of the formula."""

    tier: str
    survives: int  # kinds of failures, as bits
    interval_seconds: float  # τ; 0: the best one, or never written if it serves no failure
    shortest_seconds: float  # minimum τ: below it the next checkpoint would start before the last is written
    blocked_seconds: float  # δ
    in_flight_seconds: float  # L
    detect_seconds: float
    start_seconds: float
    restore_seconds: float
    share: float = 0.0  # of the failures recovered from this tier

    @property
    def lost_seconds(self) -> float:
        """D + L"""
        return self.detect_seconds + self.start_seconds + self.restore_seconds + self.in_flight_seconds

    @property
    def redo_seconds(self) -> float:
        return (self.interval_seconds + self.blocked_seconds) / 2.0 + self.in_flight_seconds


def _run(cluster: Cluster, num_nodes: int, step_seconds: float, run_seconds: float, replicate: int) -> _Run:
    rate = failure_rate(cluster, num_nodes, run_seconds)
    return _Run(cluster, num_nodes, step_seconds, run_seconds, replicate, rate)


def _job_tiers(run: _Run, tiers: Sequence[TierPlan], peer: bool) -> list[_Saved]:
    """Return the tiers the job writes to, at its own intervals; peer memory without one at the best."""
    saved = []
    for tier in tiers:
        automatic = tier.tier == "peer" and tier.every_seconds is None
        if (tier.every_seconds is None and not automatic) or (tier.tier == "peer" and (not peer or run.num_nodes < 2)):
            continue
        cost = _saved(run, tier)
        interval = 0.0 if tier.every_seconds is None else max(tier.every_seconds, cost.shortest_seconds)
        saved.append(replace(cost, interval_seconds=interval))
    return saved


def _saved(run: _Run, tier: TierPlan) -> _Saved:
    """Return a tier with its recovery times, written at the best interval."""
    how = _RECOVERY["in_place" if tier.tier == "peer" else "restart"]
    hang = _RECOVERY["hang_share"]
    requeue = _RECOVERY["requeue_seconds"]
    scheduled = how.get("regroup_seconds") or requeue.get(run.cluster.scheduler, requeue["other"])
    ranks = run.num_nodes * run.cluster.instance.num_gpus
    shortest = max(tier.write_seconds, run.step_seconds)
    if tier.tier == "peer" and tier.every_seconds is None:
        shortest = max(shortest, tier.blocked_seconds / _PEER_COST_SHARE)
    copied = tier.tier == "nvme" and run.replicate > 1  # another replica's node has the same shard on its own disk
    return _Saved(
        tier=tier.tier,
        survives=_SURVIVES["peer" if copied else tier.tier],
        interval_seconds=0.0,
        shortest_seconds=shortest,
        blocked_seconds=tier.blocked_seconds,
        in_flight_seconds=tier.write_seconds - tier.blocked_seconds,
        detect_seconds=(1.0 - hang) * how["crash_detect_seconds"] + hang * how["hang_detect_seconds"],
        start_seconds=scheduled + how["process_start_seconds"] + ranks * _RECOVERY["collective_init_seconds_per_rank"],
        restore_seconds=tier.read_seconds,
    )


def _from_start(run: _Run) -> _Saved:
    """Return recovery without a checkpoint: the job starts over, like a checkpoint interval as long as the run."""
    return replace(_saved(run, TierPlan("start", None, 0.0, 0.0, 0.0)), interval_seconds=run.run_seconds)


def _goodput(run: _Run, saved: Sequence[_Saved], failures_per_day: float) -> tuple[float, list[_Saved]]:
    """Return the goodput and the tiers used for it.

    Every kind of failure is assigned to a tier that survives it, for the highest goodput; tiers without an interval get
    the best one for the failures they serve.
    """
    per_second = failures_per_day / SECONDS_PER_DAY
    tiers = list(saved)
    choices = [[index for index, tier in enumerate(saved) if tier.survives >> kind & 1] for kind in range(len(_KINDS))]
    if not all(choices):
        tiers.append(_from_start(run))
        choices = [choice or [len(saved)] for choice in choices]
    values = [_values(tier, per_second, run.run_seconds) for tier in tiers]
    best, chosen = -1.0, [0] * len(tiers)
    for assignment in product(*choices):
        bits = [0] * len(tiers)
        for kind, index in enumerate(assignment):
            bits[index] |= 1 << kind
        goodput = 1.0
        for of_tier, served in zip(values, bits, strict=True):
            goodput *= of_tier[served][0]
        if goodput > best:
            best, chosen = goodput, bits
    used = [
        replace(tier, interval_seconds=of_tier[bits][1], share=_SHARES[bits])
        for tier, of_tier, bits in zip(tiers, values, chosen, strict=True)
        if bits or tier.interval_seconds
    ]
    return best * math.exp(-per_second * _wait_seconds(run.cluster, run.num_nodes, failures_per_day)), used


def _values(tier: _Saved, per_second: float, run_seconds: float) -> dict[int, tuple[float, float]]:
    """Return goodput and interval of one tier for every set of kinds it may serve; 1 if it is not needed."""
    values = {}
    lost = tier.lost_seconds
    for bits, share in enumerate(_SHARES):
        if bits & ~tier.survives:
            continue
        interval = tier.interval_seconds
        if not interval and bits:
            interval = best_interval(share * per_second, tier.blocked_seconds, tier.shortest_seconds, run_seconds)
        goodput = tier_goodput(share * per_second, interval, tier.blocked_seconds, lost) if interval else 1.0
        values[bits] = (goodput, interval)
    return values


def _wait_seconds(cluster: Cluster, num_nodes: int, failures_per_day: float) -> float:
    """Return the mean seconds a failure waits for a node: none while a spare is free, else the start of a new instance.

    Nodes under repair are Poisson with mean (node failures per second) x (repair time); an elastic cluster continues
    with the others, and loses one node's share of the throughput instead.
    """
    load = failures_per_day / SECONDS_PER_DAY * _SHARES[_NODE] * _RECOVERY["repair_node_seconds"]
    term, below = math.exp(-load), 0.0
    for spare in range(cluster.spare_nodes):
        below += term
        term *= load / (spare + 1)
    wait: float = _SHARES[_NODE] * max(0.0, 1.0 - below) * _RECOVERY["replace_node_seconds"]
    elastic = 0 < cluster.min_nodes < num_nodes
    return wait / num_nodes if elastic else wait


def _interval(run: _Run, used: Sequence[_Saved]) -> tuple[float, float]:
    """Return the 80% interval: failure rate and recovery time have independent multiplicative uncertainties.

    Lost seconds per productive second, 1 / goodput - 1, are about their product, so the deviations of their logarithms
    add in quadrature; checkpoint intervals stay those of the estimate.
    """

    def lost(per_day: float, times: Sequence[_Saved]) -> float:
        return 1.0 / max(_goodput(run, times, per_day)[0], 1e-300) - 1.0

    rate = run.rate
    middle = lost(rate.per_day, used)
    if middle <= 0.0:
        return 1.0, 1.0
    slow = [_scaled(entry, _RECOVERY["time_high"], slow_storage=True) for entry in used]
    fast = [_scaled(item, _RECOVERY["time_low"], slow_storage=False) for item in used]
    more = math.hypot(math.log(lost(rate.high, used) / middle), math.log(lost(rate.per_day, slow) / middle))
    less = math.hypot(math.log(lost(rate.low, used) / middle), math.log(lost(rate.per_day, fast) / middle))
    return 1.0 / (1.0 + middle * math.exp(min(more, 700.0))), 1.0 / (1.0 + middle * math.exp(-less))


def _scaled(saved: _Saved, time_factor: float, *, slow_storage: bool) -> _Saved:
    """Return the tier with faster or slower recovery, and its storage at the slow end of measurements."""
    slow = slow_storage and saved.tier in _DURABLE
    return replace(
        saved,
        detect_seconds=saved.detect_seconds * time_factor,
        start_seconds=saved.start_seconds * time_factor,
        restore_seconds=saved.restore_seconds / (_STORAGE["slow_read_share"] if slow else 1.0),
        in_flight_seconds=saved.in_flight_seconds / (_STORAGE["slow_write_share"] if slow else 1.0),
    )


def _recoveries(run: _Run, tiers: Sequence[TierPlan]) -> list[RecoveryPlan]:
    """Return each tier at its best interval; failures it does not survive use the shared tier, else the object one."""
    plans = {tier.tier: _saved(run, tier) for tier in tiers if tier.tier != "peer" or run.num_nodes > 1}
    wait = _wait_seconds(run.cluster, run.num_nodes, run.rate.per_day)
    rows = []
    for name in (name for name in TIERS if name in plans):
        below = [] if name in _DURABLE else [plans[other] for other in _DURABLE if other in plans][:1]
        own = _values(plans[name], run.rate.per_day / SECONDS_PER_DAY, run.run_seconds)[plans[name].survives][1]
        main = replace(plans[name], interval_seconds=own)
        goodput, used = _goodput(run, [main, *below], run.rate.per_day)
        low, high = _interval(run, used)
        restore = sum(saved_tier.share * saved_tier.restore_seconds for saved_tier in used)
        rows.append(
            RecoveryPlan(
                method=name,
                interval_seconds=own,
                detect_seconds=sum(element.share * element.detect_seconds for element in used),
                restart_seconds=sum(entry.share * entry.start_seconds for entry in used) + wait + restore,
                redo_seconds=sum(item.share * item.redo_seconds for item in used),
                goodput=goodput,
                goodput_low=low,
                goodput_high=high,
                restore_seconds=restore,
            )
        )
    return rows


def _curve(run: _Run, used: Sequence[_Saved], chosen: _Saved) -> list[tuple[float, float]]:
    """Return goodput over the interval of the chosen tier, others unchanged; its own interval is one of the points."""
    shortest = chosen.shortest_seconds
    best = best_interval(
        chosen.share * run.rate.per_day / SECONDS_PER_DAY, chosen.blocked_seconds, shortest, run.run_seconds
    )
    longest = 10.0 * max(10.0 * shortest, chosen.interval_seconds, best)
    ratio = (longest / shortest) ** (1.0 / (CURVE_POINTS - 2))
    intervals = sorted({*(shortest * ratio**step for step in range(CURVE_POINTS - 1)), chosen.interval_seconds})
    points = []
    for interval in intervals:
        moved = [replace(item, interval_seconds=interval) if item is chosen else item for item in used]
        points.append((interval, _goodput(run, moved, run.rate.per_day)[0]))
    return points


def _warnings(run: _Run, tiers: Sequence[TierPlan], used: Sequence[_Saved], goodput: float) -> list[str]:
    planned = {item.tier: item for item in used}
    result = [
        f"a checkpoint to {tier.tier} takes {duration(tier.write_seconds)} and a step "
        f"{duration(run.step_seconds)}: planned every {setting(planned[tier.tier].interval_seconds)} "
        f"instead of every {setting(tier.every_seconds)}"
        for tier in tiers
        if tier.tier in planned and (tier.every_seconds or math.inf) < planned[tier.tier].shortest_seconds
    ]
    if "start" in planned:
        result.append(
            f"{percent(planned['start'].share)} of the failures leave no checkpoint, so the run starts over: "
            "add a shared or object tier to the job's checkpoint settings"
        )
    if run.cluster.spare_nodes == 0:
        spared = _goodput(replace(run, cluster=replace(run.cluster, spare_nodes=1)), used, run.rate.per_day)[0]
        if spared - goodput > 0.005:
            result.append(
                "no spare node, so recovery waits for a replacement: one spare would raise goodput from "
                f"{percent(goodput)} to {percent(spared)}"
            )
    return result


def _renewal_rates(mean_per_day: float) -> tuple[float, float, float]:
    """Return the failure rate of a new node, of a node after a long run, and the decay rate between them (per day).

    Repeat offenders are a share p of the nodes with a share s of the failures: rates a = s/p and b = (1 - s)/(1 - p) of
    the mean.
    A failed node is replaced by a new random one. Times between replacements are then hyperexponential, and the renewal
    rate of such a process is r(t) = r∞ + (r0 - r∞) exp(-γ t) with r∞ = 1 / (p/a + (1-p)/b) and γ = (1-p) a + p b.
    """
    p, s = _FAILURES["repeat_offenders"]["node_share"], _FAILURES["repeat_offenders"]["failure_share"]
    a, b = s / p * mean_per_day, (1.0 - s) / (1.0 - p) * mean_per_day
    return mean_per_day, 1.0 / (p / a + (1.0 - p) / b), (1.0 - p) * a + p * b


def _mean_rate(fresh: float, worn: float, per_day: float, days: float) -> float:
    """Return the mean of r(t) over a run; t → 0 gives the rate of new nodes."""
    passed = per_day * days
    return worn + (fresh - worn) * (-math.expm1(-passed) / passed if passed > 0.0 else 1.0)


def _fresh_rate() -> float:
    """Return the rate of new nodes whose mean over the reference run is the published rate, by bisection."""
    days = _FAILURES["repeat_offenders"]["reference_days"]
    low, high = DEFAULT_PER_NODE_DAY, 100.0 * DEFAULT_PER_NODE_DAY
    for _ in range(60):
        middle = (low + high) / 2.0
        if _mean_rate(*_renewal_rates(middle), days) < DEFAULT_PER_NODE_DAY:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


_LEMONS = _renewal_rates(_fresh_rate())
# Relative variance of one node's rate: s²/p + (1-s)²/(1-p) - 1.
_NODE_RATE_VARIANCE = (
    _FAILURES["repeat_offenders"]["failure_share"] ** 2 / _FAILURES["repeat_offenders"]["node_share"]
    + (1.0 - _FAILURES["repeat_offenders"]["failure_share"]) ** 2 / (1.0 - _FAILURES["repeat_offenders"]["node_share"])
    - 1.0
)


def _repeat_offender_factor(days: float) -> float:
    """Return the mean failure rate of a run this long over the published one, with repeat offenders replaced at the
    default rate."""
    return _mean_rate(*_LEMONS, days) / DEFAULT_PER_NODE_DAY
