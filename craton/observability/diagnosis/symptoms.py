"""Symptoms of a run: waiting, dead, hung, wrong, slow, starting or healthy.

They are checked in this order, because a run without progress has no speed. Healthy and busy runs must raise no alarm:
the first steps, noisy steps, and steps that compile, save or evaluate are not symptoms.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from craton.formatting import counted, duration, duration_range, percent, whole_duration
from craton.observability.diagnosis.phases import Straggling, find_slowness, find_straggling, is_on_processors
from craton.observability.diagnosis.restart_history import LOST, find_loop
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotRank
from craton.observability.diagnosis.tables import hung_in, threshold
from craton.observability.diagnosis.verdict import OVERLOAD, RESTARTS, UNSAVED, Symptom, Symptoms

STEPPING = ("productive", "redo", "")
COMING_BACK = ("detect", "regroup", "restore")
STOPPED_STEPS = 3.0  # minimum number of steps that a stopped rank has missed
NEWEST_LOSSES, MIN_LOSSES = 5, 24
_HANG = re.compile(r"rank (\d+) (?:on \S+ )?(hangs in|is stopped by a signal)")
_VICTIM = re.compile(r"rank (\d+) on ([\w.-]+)")


def symptoms_of(snapshot: Snapshot) -> Symptoms:
    """Return all symptoms of the run, most severe first."""
    outside = _by_state(snapshot)
    if outside is not None:
        return Symptoms((outside,))
    died = _dead_ranks(snapshot)
    hangs = _hung(snapshot)
    wrong = _wrong(snapshot)
    if died is not None:
        return Symptoms((died, *wrong))
    if hangs is not None:
        return Symptoms((hangs, *wrong))
    slow = _slow(snapshot)
    if wrong or slow:
        return Symptoms((*wrong, *slow))
    if snapshot.run.state == "starting":
        return Symptoms((Symptom("starting"),))
    back = [rank for rank in snapshot.ranks if rank.kind in COMING_BACK]
    if back:
        return Symptoms((Symptom("starting", f"is recovering from a failure (its ranks are in {back[0].kind})"),))
    return Symptoms((Symptom("healthy"),))


def straggler_of(snapshot: Snapshot) -> Symptom | None:
    """Return the ranks that cost the others the most time, for `craton why` and the web page. None if there are none,
    or if the run hangs or is dead, where ranks are not compared."""
    return next((symptom for symptom in symptoms_of(snapshot).of("slow") if symptom.ranks), None)


def _by_state(snapshot: Snapshot) -> Symptom | None:
    """Return the symptom by the run's state and its scheduler; None if the run should be making progress."""
    run, scheduler = snapshot.run, snapshot.scheduler
    if run.unsaved:
        return Symptom("waiting", run.unsaved, sign=UNSAVED)
    if run.state == "waiting" or (scheduler.condition == "waiting" and run.state not in ("failed", "done")):
        return Symptom("waiting", scheduler.sentence or run.message)
    if run.state == "done":
        return Symptom("done")
    if run.state == "stopped":
        return Symptom("stopped", run.message)
    if run.state == "failed":
        return _death(snapshot, run.message)
    if run.state == "lost":
        if scheduler.condition == "unknown":
            return Symptom(
                "unknown", scheduler.sentence or "the scheduler does not respond, and no node sends a heartbeat"
            )
        return _death(snapshot, run.message)
    return None


def _death(snapshot: Snapshot, message: str) -> Symptom:
    """Return the symptom of a run that ended, or that lost ranks or nodes."""
    first = _first_dead(snapshot)
    reported_lost = reported_losses(snapshot)
    lost = [*_lost_nodes(snapshot), *reported_lost]
    broke_with_it = first is not None and first.node not in lost and bool(reported_lost)
    if first is not None and not broke_with_it and not _fell_silent_before(snapshot, lost, first):
        return _ended_for_a_hang(snapshot, message) or Symptom(
            "dead", message, ranks=(first.rank,), nodes=(first.node,), moment=first.ended_at
        )
    if lost:
        return Symptom("dead", message, nodes=tuple(dict.fromkeys(lost)))
    match = _VICTIM.search(message)
    if match:
        return Symptom("dead", message, ranks=(int(match[1]),), nodes=(match[2],))
    return Symptom("dead", message)


def reported_losses(snapshot: Snapshot) -> dict[str, str]:
    """Return node → how its agent was lost, as the other agents reported when the run ended. The agent may have been
    restarted since, and look healthy."""
    losses = reversed(LOST.findall(snapshot.run.message))  # the first report on a node is the reason
    lost = {node: how for node, how in losses if node in snapshot.run.nodes}
    return {} if len(lost) == len(snapshot.run.nodes) else lost


def _fell_silent_before(snapshot: Snapshot, lost: Sequence[str], first: SnapshotRank) -> bool:
    """Return whether a node was lost before ranks elsewhere failed because their connections to it broke."""
    if not lost or first.node in lost or first.ended_at is None:
        return False
    ages = [node.heartbeat_age_seconds for node in snapshot.nodes if node.name in lost]
    beats = [snapshot.moment - age for age in ages if age is not None]
    return bool(beats) and min(beats) <= first.ended_at + threshold("early_margin_seconds")


def _ended_for_a_hang(snapshot: Snapshot, message: str) -> Symptom | None:
    """Return the symptom if the agents ended all ranks for lack of progress. Exit codes then say nothing; the activity
    in which a rank ended may."""
    match = _HANG.search(message)
    if match is None:
        return None
    if match[2] == "is stopped by a signal":
        ranks = [rank for rank in snapshot.ranks if rank.rank == int(match[1])]
        return Symptom("dead", message, ranks=(int(match[1]),), nodes=_nodes(ranks), sign="stopped")
    kinds = Counter(rank.ended_in.partition("+")[0] for rank in snapshot.ranks if rank.ended_in)
    usual = kinds.most_common(1)[0][0] if kinds else ""
    odd = [rank for rank in snapshot.ranks if rank.ended_in and rank.ended_in.partition("+")[0] != usual]
    odd = odd if 2 * len(odd) < len(snapshot.ranks) else []
    return Symptom("dead", message, ranks=tuple(rank.rank for rank in odd), nodes=_nodes(odd), sign="hung")


def _dead_ranks(snapshot: Snapshot) -> Symptom | None:
    """Return the symptom if a rank or node failed, the run has not ended, and recovery has not begun."""
    lost = _lost_nodes(snapshot)
    first = _first_dead(snapshot)
    if first is None and not lost:
        return None
    if first is not None and any(rank.kind in COMING_BACK for rank in snapshot.ranks):
        return None
    return _death(snapshot, snapshot.run.message)


def _first_dead(snapshot: Snapshot) -> SnapshotRank | None:
    dead = [rank for rank in snapshot.ranks if rank.is_alive is False and rank.exit_code not in (0, None)]
    return min(dead, key=lambda rank: (rank.ended_at is None, rank.ended_at or 0.0, rank.rank), default=None)


def _lost_nodes(snapshot: Snapshot) -> list[str]:
    """Return nodes whose agent should send heartbeats and does not."""
    limit = threshold("heartbeat_lost_seconds")
    return [
        node.name
        for node in snapshot.nodes
        if node.heartbeat_state in ("running", "spare")
        and ((node.heartbeat_age_seconds or 0.0) > limit or node.agent_is_alive is False)
        and node.name in (snapshot.run.nodes or (node.name,))
        and not (snapshot.run.storage and node.agent_is_alive)  # heartbeats cannot be stored, and look old
    ]


# -- hung ----------------------------------------------------------------------------------------------------------


def _hung(snapshot: Snapshot) -> Symptom | None:
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
        and min(_age(rank), snapshot.moment - (rank.recorded_at or 0.0))
        >= max(threshold("stopped_seconds"), STOPPED_STEPS * (rank.step_seconds or 0.0))
    ]
    if stopped:
        return _hang(snapshot, stopped, max(_age(rank) for rank in stopped))
    if not moving:
        return _silent(snapshot)
    oldest = max(_age(rank) for rank in moving)
    # Ranks that stopped at the same moment may be waiting for each other: the longest limit among them counts.
    first = [rank for rank in moving if _age(rank) >= oldest - threshold("early_margin_seconds")]
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
        nodes=_nodes(culprits),
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
    oldest = max(_age(rank) for rank in ranks)
    usual = statistics.median(rank.step_seconds or 0.0 for rank in ranks)
    margin = max(threshold("early_margin_seconds"), 0.25 * usual)
    early = [rank for rank in ranks if _age(rank) > oldest - margin]
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


# -- wrong ---------------------------------------------------------------------------------------------------------


def _wrong(snapshot: Snapshot) -> list[Symptom]:
    result = []
    ranks = _odd_ranks(snapshot)
    if ranks:
        names = ", ".join(str(rank.rank) for rank in ranks)
        text = f"computes different values on rank {names} than on the other ranks"
        result.append(
            Symptom(
                "wrong",
                text,
                tuple(_oddity(rank) for rank in ranks),
                tuple(rank.rank for rank in ranks),
                _nodes(ranks),
                lost_share=1.0,
                sign="odd_rank",
            )
        )
    losses = [value for _, value in snapshot.series.loss]
    norms = [value for _, value in snapshot.series.gradient_norm]
    if _ends_badly(losses) or _ends_badly(norms):
        quantity = "loss" if _ends_badly(losses) else "gradient norm"
        series = snapshot.series.loss if quantity == "loss" else snapshot.series.gradient_norm
        since = next((step for step, value in series if not math.isfinite(value)), None)
        evidence = (f"the {quantity} has been NaN or Inf since step {since}",)
        text = f"has a {quantity} that is NaN or Inf"
        result.append(Symptom("wrong", text, evidence, lost_share=1.0, sign="not_a_number"))
    elif (left := _left_its_way(losses)) is not None:
        sign, text = left
        # Training may recover from a spike; after NaN or divergence it is lost.
        lost = 0.0 if sign == "loss_spike" else 1.0
        result.append(Symptom("wrong", text, (f"latest losses: {_short(losses)}",), lost_share=lost, sign=sign))
    return result


def _odd_ranks(snapshot: Snapshot) -> list[SnapshotRank]:
    """Return ranks whose state differs from its replicas, or whose gradient norm is far off its usual value."""
    differ = [rank for rank in snapshot.ranks if rank.differs_from_copies]
    if differ:
        return differ if 2 * len(differ) <= len(snapshot.ranks) or len(differ) == 1 else []
    measured = [rank for rank in snapshot.ranks if rank.gradient_norm is not None]
    broken = [rank for rank in measured if not math.isfinite(rank.gradient_norm or 0.0)]
    if broken and 2 * len(broken) < len(measured):
        return broken
    ratios = {
        rank.rank: (rank.gradient_norm or 0.0) / rank.gradient_norm_usual
        for rank in measured
        if rank.gradient_norm_usual and math.isfinite(rank.gradient_norm or 0.0)
    }
    if len(ratios) < 3:
        return []
    usual = statistics.median(ratios.values())
    limit = threshold("gradient_ratio")
    odd = [rank for rank in measured if usual > 0 and ratios.get(rank.rank, usual) / usual > limit]
    return odd if 2 * len(odd) < len(measured) else []


def _oddity(rank: SnapshotRank) -> str:
    if rank.differs_from_copies:
        return f"the state of rank {rank.rank} on {rank.node} has a different checksum than its replicas on other ranks"
    norm, usual = rank.gradient_norm or 0.0, rank.gradient_norm_usual
    against = f", usually {usual:.3g}" if usual else ""
    return f"rank {rank.rank} on {rank.node} has a gradient norm of {norm:.3g}{against}; the other ranks are normal"


def _ends_badly(values: Sequence[float]) -> bool:
    """Return whether most of the newest values are not finite: one bad step that was skipped is not a fault."""
    newest = values[-NEWEST_LOSSES:]
    return bool(newest) and 2 * sum(not math.isfinite(value) for value in newest) > len(newest)


def _left_its_way(values: Sequence[float]) -> tuple[str, str] | None:
    """Return (sign, sentence) if the losses grow."""
    losses = [value for value in values if math.isfinite(value)]
    if len(losses) < MIN_LOSSES:
        return None
    newest = statistics.median(losses[-NEWEST_LOSSES:])
    quarter = len(losses) // 4
    parts = [losses[first : first + quarter] for first in range(0, 4 * quarter, quarter)]
    best = min(parts[:-1], key=statistics.median)
    level = statistics.median(best)
    spread = statistics.median(abs(value - level) for value in best)
    far = max(threshold("spike_spreads") * spread, 0.05)
    last = statistics.median(parts[-1])
    if last > level * threshold("diverged_ratio") and last - level > far and newest >= last * 0.98:
        return "diverged", f"diverges: its loss rose from {level:.3g} to {newest:.3g}"
    before = statistics.median(losses[-quarter - NEWEST_LOSSES : -NEWEST_LOSSES])
    if newest > before * threshold("spike_ratio") and newest - before > far:
        return "loss_spike", f"has a loss spike from {before:.3g} to {newest:.3g}"
    return None


# -- slow ----------------------------------------------------------------------------------------------------------


def _slow(snapshot: Snapshot) -> list[Symptom]:
    symptoms: list[Symptom] = []
    straggling = find_straggling(snapshot)
    symptoms += [_straggles(snapshot, entry) for entry in straggling]
    held_up = sum(item.lost_share for item in straggling)
    slowness = find_slowness(snapshot)
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
        evidence = (
            text,
            f"{grown}: {element.phase}, {duration(element.phase_seconds)} "
            f"({duration(element.phase_reference)} {since})",
        )
        is_old = element.against == "plan" and not any(other.against == "earlier" for other in slowness)
        symptoms.append(Symptom("slow", text, evidence, phase=element.phase, lost_share=rest, since_start=is_old))
    if not any(symptom.phase == "checkpoint" for symptom in symptoms):
        symptoms += _blocked_by_saves(snapshot)
    symptoms += [*_breaks_again(snapshot), *_overloaded(snapshot)]
    return sorted(symptoms, key=lambda symptom: -(symptom.lost_share or 0.0))


def _blocked_by_saves(snapshot: Snapshot) -> list[Symptom]:
    """Return the time blocked by checkpoints, by the ledger: medians of steps do not show rare long saves."""
    ledger, plan = snapshot.run.ledger, snapshot.run.plan
    saving = ledger.get("checkpoint", 0.0)
    wall = saving + sum(ledger.get(kind, 0.0) for kind in ("productive", "data"))
    if wall < threshold("checkpoint_share_seconds"):
        return []
    planned = plan.get("checkpoint_seconds", 0.0) / plan["step_seconds"] if plan.get("step_seconds") else 0.0
    limit = threshold("checkpoint_share_cpu" if is_on_processors(snapshot) else "checkpoint_share")
    if saving / wall < max(limit, 3.0 * planned):
        return []
    text = f"is blocked by checkpoints {percent(saving / wall)} of the time ({percent(planned)} planned)"
    return [Symptom("slow", text, (text,), phase="checkpoint", lost_share=saving / wall - planned)]


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
    """Return overload: more requests wait than run, and the queue was never empty, so the wait is at least one service
    time (Little's law)."""
    serving = snapshot.serving
    if serving is None or not serving.least_waiting or serving.waiting <= serving.running:
        return []
    first = serving.first_token_seconds
    text = f"has {counted(serving.waiting, 'request')} waiting and {serving.running} running"
    evidence = (text, *([f"median time to first token: {duration(first)}"] if first else []))
    return [Symptom("slow", text, evidence, phase="queue", sign=OVERLOAD)]


def _straggles(snapshot: Snapshot, straggling: Straggling) -> Symptom:
    ranks = [rank for rank in snapshot.ranks if rank.rank in straggling.ranks]
    others = "others" if 2 * len(ranks) < len(snapshot.ranks) else "fast ranks"
    one = len(ranks) == 1
    message = (
        f"{_who(ranks)} {'spends' if one else 'spend'} {straggling.ratio:.2f} times as long as the {others} on a step "
        f"outside collectives, mostly in {straggling.phase}, and {'waits' if one else 'wait'} least in collectives"
    )
    return Symptom(
        "slow",
        f"loses {percent(straggling.lost_share)} of every step to {_who(ranks)}",
        (message,),
        straggling.ranks,
        _nodes(ranks),
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


# -- words ---------------------------------------------------------------------------------------------------------


def _who(ranks: Sequence[SnapshotRank]) -> str:
    nodes = _nodes(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} on {ranks[0].node}"
    if len(nodes) == 1:
        return f"{counted(len(ranks), 'rank')} on {nodes[0]}"
    return f"{len(ranks)} ranks on {', '.join(nodes[:3])}" + (
        f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else ""
    )


def _nodes(ranks: Iterable[SnapshotRank]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rank.node for rank in ranks))


def _age(rank: SnapshotRank) -> float:
    return rank.progress_age_seconds or 0.0


def _short(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values[-4:])
