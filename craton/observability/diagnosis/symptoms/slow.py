"""Slow runs: stragglers, steps slower than before or planned, saves that block, restart loops, overload."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from craton.formatting import counted, duration, duration_range, percent, setting, whole_duration
from craton.observability.diagnosis.latencies import LATENCY_NAMES
from craton.observability.diagnosis.phases import (
    Slowness,
    Straggling,
    find_slowness,
    find_straggling,
    is_crowded,
    is_on_processors,
)
from craton.observability.diagnosis.restart_history import find_loop
from craton.observability.diagnosis.snapshot import Serving, Snapshot, SnapshotRank
from craton.observability.diagnosis.symptoms.naming import nodes_of, who
from craton.observability.diagnosis.symptoms.rewards import find_waiting_sides
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import ABANDONED, OVERLOAD, RESTARTS, SLO, Symptom
from craton.telemetry.rank import PRODUCTIVE_KINDS

FIRST_STEPS = 5  # of a run, which may compile, connect and fill caches
NEWEST_STEPS = 60  # recorded ones, among which there must be a pause


def find_slow(snapshot: Snapshot) -> list[Symptom]:
    symptoms: list[Symptom] = []
    straggling, slowness, began = _steadily(snapshot)
    symptoms += [_straggles(snapshot, entry) for entry in straggling]
    held_up = sum(item.lost_share for item in straggling)
    for element in slowness:
        # The step includes the cost of stragglers; only the rest is another symptom.
        rest = element.lost_share - (held_up if element.is_first else 0.0)
        is_theirs = element.phase in [one.phase for one in straggling]
        if straggling and (rest < threshold("straggler_step_share") or is_theirs):
            continue
        if any(symptom.phase == element.phase and not symptom.ranks for symptom in symptoms):
            continue
        against = since = "planned" if element.against == "plan" else "before"
        if element.against == "plan":
            low, high = snapshot.run.step_seconds_low, snapshot.run.step_seconds_high
            against += f", expected range {duration_range(low, high)}" if low and high else ""
        text = f"takes {duration(element.step_seconds)} per step ({duration(element.reference_seconds)} {against})"
        grown = "largest increase" if element.is_first else "also longer"
        evidence: tuple[str, ...] = (text,)
        if element.phase:
            before = f"({duration(element.phase_reference)} {since})"
            evidence += (f"{grown}: {element.phase}, {duration(element.phase_seconds)} {before}",)
        is_old = element.against == "plan" and not any(other.against == "earlier" for other in slowness)
        symptoms.append(Symptom("slow", text, evidence, phase=element.phase, lost_share=rest, since_start=is_old))
    symptoms = [replace(symptom, since=began) for symptom in symptoms]
    if not any(symptom.phase == "checkpoint" for symptom in symptoms):
        symptoms += _blocked_by_saves(snapshot)
    if not any(symptom.phase == "data" for symptom in symptoms):
        symptoms += _pauses_for_data(snapshot)
    symptoms += find_waiting_sides(snapshot, {symptom.phase for symptom in symptoms})
    symptoms += _evaluates(snapshot)
    symptoms += [*_breaks_again(snapshot), *_overloaded(snapshot), *_abandoned(snapshot), *_serves_slowly(snapshot)]
    symptoms += _misses_limits(snapshot)
    symptoms = symptoms or _throttled(snapshot)
    return sorted(symptoms, key=lambda symptom: -(symptom.lost_share or 0.0))


def _steadily(snapshot: Snapshot) -> tuple[list[Straggling], list[Slowness], float | None]:
    """Return stragglers, slow phases, and since when there are any. The earlier windows are judged first, and what was
    slow in one must be clearly faster in the next: a run close to a threshold does not flip."""
    straggling: list[Straggling] = []
    slowness: list[Slowness] = []
    since: float | None = None
    before: tuple[set[int], set[str]] = (set(), set())  # straggling ranks, what was slow, in the window before
    for moment, past in [*_earlier_windows(snapshot), (snapshot.moment, snapshot)]:
        before = {rank for group in straggling for rank in group.ranks}, {element.against for element in slowness}
        straggling = find_straggling(past, before[0])
        slowness = find_slowness(past, before[1])
        is_slow = bool(straggling or slowness)
        since = None if not is_slow else moment if since is None else since
    began = max((rank.windows[0].moment for rank in snapshot.ranks if rank.windows), default=None)
    since = began if since == snapshot.moment else since
    if is_on_processors(snapshot) and since is not None:
        # Shared with others: what is new may be gone in a moment, or, on crowded CPUs, in some seconds.
        seconds = snapshot.moment - since
        is_steady = seconds >= threshold("crowded_seconds") or not is_crowded(snapshot)
        is_old = seconds >= threshold("lasting_seconds")
        straggling = [
            group
            for group in straggling
            if (is_old or before[0] & set(group.ranks)) and (is_steady or group.phase == "data")
        ]
        slowness = [
            element
            for element in slowness
            if (is_old or element.against in before[1]) and (is_steady or element.phase == "data")
        ]
    return straggling, slowness, since


def _earlier_windows(snapshot: Snapshot) -> Iterator[tuple[float, Snapshot]]:
    """Yield the snapshot as it was some steps earlier, oldest first, with the moment at which those steps began."""
    num_windows = min((len(rank.windows) for rank in snapshot.ranks), default=0)
    for number in range(num_windows - 1, 0, -1):
        ranks = tuple(replace(rank, recent=rank.windows[number].seconds) for rank in snapshot.ranks)
        moment = min(rank.windows[number].moment for rank in snapshot.ranks)
        run = replace(snapshot.run, collective_seconds=None)
        yield moment, replace(snapshot, ranks=ranks, run=run)


def _blocked_by_saves(snapshot: Snapshot) -> list[Symptom]:
    """Return the time blocked by checkpoints, by the ledger: medians of steps do not show rare long saves."""
    ledger, plan = snapshot.run.ledger, snapshot.run.plan
    saving = ledger.get("checkpoint", 0.0)
    wall = saving + sum(ledger.get(kind, 0.0) for kind in (*PRODUCTIVE_KINDS, "data"))
    if wall < threshold("checkpoint_share_seconds"):
        return []
    planned = plan.get("checkpoint_seconds", 0.0) / plan["step_seconds"] if plan.get("step_seconds") else 0.0
    limit = threshold("checkpoint_share_cpu" if is_on_processors(snapshot) else "checkpoint_share")
    if saving / wall < max(limit, 3.0 * planned):
        return []
    text = f"is blocked by checkpoints {percent(saving / wall)} of the time ({percent(planned)} planned)"
    return [Symptom("slow", text, (text,), phase="checkpoint", lost_share=saving / wall - planned)]


def _pauses_for_data(snapshot: Snapshot) -> list[Symptom]:
    """Return rare long waits for data, such as at the beginning of an epoch, which medians of steps do not show."""
    waits = [seconds for _, seconds in snapshot.series.data_seconds[FIRST_STEPS:]]
    steps = [seconds for _, seconds in snapshot.series.step_seconds[FIRST_STEPS:]]
    if not waits or not steps or sum(steps) < threshold("data_pause_seconds"):
        return []
    limit = threshold("data_pause_ratio") * statistics.median(steps)
    long = [seconds for seconds in waits if seconds > limit]
    share = sum(long) / sum(steps)
    if len(long) < threshold("data_pauses") or share < threshold("data_pause_share"):
        return []
    if max(waits[-NEWEST_STEPS:]) <= limit:
        return []  # it is over
    text = f"waits for data {percent(min(share, 1.0))} of the time, in {counted(len(long), 'long pause')}"
    longest = f"the longest took {duration(max(long))}, a usual step takes {duration(statistics.median(steps))}"
    return [Symptom("slow", text, (text, longest), phase="data", lost_share=min(share, 1.0))]


def _evaluates(snapshot: Snapshot) -> list[Symptom]:
    """Return evaluation that takes most of the time, by the ledger."""
    ledger = snapshot.run.ledger
    evaluating = ledger.get("evaluate", 0.0)
    wall = evaluating + sum(ledger.get(kind, 0.0) for kind in (*PRODUCTIVE_KINDS, "data", "checkpoint"))
    if wall < threshold("evaluation_seconds") or evaluating / wall < threshold("evaluation_share"):
        return []
    text = f"spends {percent(evaluating / wall)} of its time on evaluation"
    return [Symptom("slow", text, (text,), phase="evaluate", lost_share=evaluating / wall)]


def _breaks_again(snapshot: Snapshot) -> list[Symptom]:
    loop = find_loop(snapshot)
    if loop is None:
        return []
    times, ranks = len(loop.restarts), (loop.rank,) if loop.rank is not None else ()
    text = (
        f"restarted {times} times in {whole_duration(loop.seconds)}, which cost {percent(loop.lost_share)} of that time"
    )
    nodes = (loop.node,) if loop.node else ()
    return [
        Symptom("slow", text, (text,), ranks=ranks, nodes=nodes, lost_share=loop.lost_share, sign=RESTARTS),
    ]


def _overloaded(snapshot: Snapshot) -> list[Symptom]:
    """Return overload: the queue is full and requests are refused, or more requests wait than run, and the queue was
    never empty, so the wait is at least one service time (Little's law)."""
    serving = snapshot.serving
    if serving is None:
        return []
    if _refuses(serving):
        done = serving.num_ended - serving.num_aborted - serving.num_failed
        text = f"refused {serving.num_refused} requests in the last half minute (429) and completed {done}"
        share = serving.num_refused / (serving.num_refused + serving.num_ended)
        return [Symptom("slow", text, (text,), phase="queue", lost_share=share, sign=OVERLOAD)]
    if not serving.least_waiting or serving.waiting <= serving.running:
        return []
    first = serving.first_token_seconds
    text = f"has {counted(serving.waiting, 'request')} waiting and {serving.running} running"
    evidence = (text, *([f"median time to first token: {duration(first)}"] if first else []))
    return [Symptom("slow", text, evidence, phase="queue", sign=OVERLOAD)]


def _refuses(serving: Serving) -> bool:
    """Return whether a server with a queue refuses many requests, in number and relative to those that ended."""
    limit = max(threshold("refused_requests"), threshold("refused_share") * serving.num_ended)
    return serving.waiting > 0 and serving.num_refused > limit


def _abandoned(snapshot: Snapshot) -> list[Symptom]:
    """Return requests that clients give up before they end: the server works in vain."""
    serving = snapshot.serving
    if serving is None or serving.num_ended < threshold("abandoned_requests"):
        return []
    share = serving.num_aborted / serving.num_ended
    if share < threshold("abandoned_share"):
        return []
    text = f"works in vain: clients gave up {serving.num_aborted} of the last {serving.num_ended} requests"
    return [Symptom("slow", text, (text,), phase="queue", lost_share=share, sign=ABANDONED)]


def _serves_slowly(snapshot: Snapshot) -> list[Symptom]:
    """Return steps of a server that take longer than those of the same size took before."""
    serving = snapshot.serving
    if serving is None or not serving.roofline or not serving.usual_roofline:
        return []
    ratio = serving.usual_roofline / serving.roofline
    if ratio < threshold("server_ratio_cpu" if is_on_processors(snapshot) else "server_ratio"):
        return []
    text = f"takes {ratio:.1f} times as long for a step as before"
    return [Symptom("slow", text, (text,), phase="compute", lost_share=1.0 - 1.0 / ratio)]


def _misses_limits(snapshot: Snapshot) -> list[Symptom]:
    """Return the latency limits of its job that a server misses, the furthest first; of a server with requests."""
    serving = snapshot.serving
    if serving is None or serving.latencies is None or not (serving.running or serving.num_ended):
        return []
    missed = sorted(serving.latencies.missed, key=lambda miss: -miss.seconds / miss.limit_seconds)
    lines = [
        f"{LATENCY_NAMES[miss.latency]} {miss.statistic} is {'' if miss.statistic == 'mean' else 'about '}"
        f"{duration(miss.seconds)}, above the limit of {setting(miss.limit_seconds)}"
        for miss in missed
    ]
    if not lines:
        return []
    count = f"over {counted(serving.latencies.num_requests, 'request')} since the engine was started"
    return [Symptom("slow", f"misses its latency limit: {lines[0]}", (*lines, count), sign=SLO)]


def _throttled(snapshot: Snapshot) -> list[Symptom]:
    """Return ranks on CPUs whose quota is used up nearly all the time: they could be faster, whatever came before."""
    hit = [
        rank
        for rank in snapshot.ranks
        if rank.is_alive is not False
        and rank.resources is not None
        and rank.resources.throttled_time_share > threshold("cpu_throttled_slow")
    ]
    if not hit or not is_on_processors(snapshot):
        return []
    worst = max(rank.resources.throttled_time_share for rank in hit if rank.resources is not None)
    text = f"waits for its CPU quota {percent(worst)} of the time"
    ranks = tuple(rank.rank for rank in hit) if len(hit) < len(snapshot.ranks) else ()
    return [Symptom("slow", text, (text,), ranks, nodes_of(hit) if ranks else (), phase="compute")]


def _straggles(snapshot: Snapshot, straggling: Straggling) -> Symptom:
    ranks = [rank for rank in snapshot.ranks if rank.rank in straggling.ranks]
    others = "others" if 2 * len(ranks) < len(snapshot.ranks) else "fast ranks"
    one = len(ranks) == 1
    message = (
        f"{who(ranks)} {'spends' if one else 'spend'} {straggling.ratio:.2f} times as long as the {others} on a step "
        f"outside collectives, mostly in {straggling.phase}, and {'waits' if one else 'wait'} least in collectives"
    )
    return Symptom(
        "slow",
        f"loses {percent(straggling.lost_share)} of every step to {who(ranks)}",
        (message,),
        straggling.ranks,
        nodes_of(ranks),
        _whole_leaf(snapshot, ranks),
        straggling.phase,
        straggling.lost_share,
        straggling.since_start,
    )


def _whole_leaf(snapshot: Snapshot, ranks: Sequence[SnapshotRank]) -> str:
    """Return the leaf whose nodes all have slow ranks, if it has several nodes and no other leaf is affected."""
    leaves = snapshot.run.leaves
    touched = {rank.node for rank in ranks}
    names = {leaves.get(node, "") for node in touched}
    if len(names) != 1 or len(touched) < 2 or len(set(leaves.values())) < 2:
        return ""
    (leaf,) = names
    return leaf if leaf and touched == {node for node, name in leaves.items() if name == leaf} else ""
