"""What a run suffers from, seen from the outside: waiting, starting, hung, dead, wrong, slow, or nothing at all.

Judged in that order, because a run that does not move has no speed. Healthy and merely busy runs must stay quiet: the
first steps, steps that compile, save or evaluate, and steps that swing are no symptoms.
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
STOPPED_STEPS = 3.0  # that a stopped rank must have missed
NEWEST_LOSSES, MIN_LOSSES = 5, 24
_HANG = re.compile(r"rank (\d+) (?:on \S+ )?(hangs in|is stopped by a signal)")
_VICTIM = re.compile(r"rank (\d+) on ([\w.-]+)")


def symptoms_of(snapshot: Snapshot) -> Symptoms:
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
        return Symptoms((Symptom("starting", f"comes back: its ranks {back[0].kind}"),))
    return Symptoms((Symptom("healthy"),))


def straggler_of(snapshot: Snapshot) -> Symptom | None:
    """The ranks that cost the others most, for `craton why` and for the page alike; None where nobody does, or where
    the run suffers from something in which ranks are not compared: a hang, a death."""
    return next((symptom for symptom in symptoms_of(snapshot).of("slow") if symptom.ranks), None)


def _by_state(snapshot: Snapshot) -> Symptom | None:
    """What the run's own markers and its scheduler say; None when it moves, or should."""
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
                "unknown", scheduler.sentence or "its scheduler cannot be asked, and no node shows a sign of life"
            )
        return _death(snapshot, run.message)
    return None


def _death(snapshot: Snapshot, message: str) -> Symptom:
    """The run is over, or a part of it is gone."""
    first = _first_dead(snapshot)
    told_lost = lost_by_word(snapshot)
    lost = [*_lost_nodes(snapshot), *told_lost]
    broke_with_it = first is not None and first.node not in lost and bool(told_lost)
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


def lost_by_word(snapshot: Snapshot) -> dict[str, str]:
    """Node → how its agent was lost, as the others said when the run ended for it; it may have been started anew since,
    and look well."""
    losses = reversed(LOST.findall(snapshot.run.message))  # the first word of a node is why, others follow from it
    lost = {node: how for node, how in losses if node in snapshot.run.nodes}
    return {} if len(lost) == len(snapshot.run.nodes) else lost


def _fell_silent_before(snapshot: Snapshot, lost: Sequence[str], first: SnapshotRank) -> bool:
    """Whether ranks elsewhere died because a node was gone: their connections to it broke."""
    if not lost or first.node in lost or first.ended_at is None:
        return False
    ages = [node.heartbeat_age_seconds for node in snapshot.nodes if node.name in lost]
    beats = [snapshot.moment - age for age in ages if age is not None]
    return bool(beats) and min(beats) <= first.ended_at + threshold("early_margin_seconds")


def _ended_for_a_hang(snapshot: Snapshot, message: str) -> Symptom | None:
    """The agents ended all ranks because none moved: how each ended says nothing, what it was in when it did may."""
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
    """Somebody died and the run has not ended: nobody has begun to come back from it."""
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
    """Nodes whose agent should beat and does not."""
    limit = threshold("heartbeat_lost_seconds")
    return [
        node.name
        for node in snapshot.nodes
        if node.heartbeat_state in ("running", "spare")
        and ((node.heartbeat_age_seconds or 0.0) > limit or node.agent_is_alive is False)
        and node.name in (snapshot.run.nodes or (node.name,))
        and not (snapshot.run.storage and node.agent_is_alive)  # a disk that takes no heartbeat makes all of them old
    ]


# -- hung ----------------------------------------------------------------------------------------------------------


def _hung(snapshot: Snapshot) -> Symptom | None:
    moving = [
        rank
        for rank in snapshot.ranks
        if rank.is_alive is not False and rank.kind != "idle" and rank.progress_age_seconds is not None
    ]
    # One that is let go again at once is slow, not hung; steps still come.
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
    # Who stopped moving at the same moment may be what the others wait for: the most patient of them is asked.
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
        f"has not moved for {whole_duration(seconds)}{at}",
        tuple(evidence),
        ranks=tuple(rank.rank for rank in culprits),
        nodes=_nodes(culprits),
        lost_share=1.0,
    )


def _limit(rank: SnapshotRank, snapshot: Snapshot) -> float:
    steps = threshold("hung_steps") * (rank.step_seconds or 0.0)
    own = rank.progress_limit_seconds or 0.0  # a command is silent while it evaluates, and says for how long it may be
    hung = hung_in(rank.kind)
    if rank.kind in STEPPING or hung is None:
        if not rank.step_seconds:  # its pace is not known yet: it may be compiling
            return hung_in("compile") or 0.0
        return max(threshold("hung_seconds"), steps, own)
    if rank.kind == "checkpoint":
        usual = max((tier.usual_seconds or 0.0 for tier in snapshot.tiers), default=0.0)
        return max(hung, 5.0 * usual)
    return max(hung, steps)


def _culprits(ranks: Sequence[SnapshotRank]) -> list[SnapshotRank]:
    """Whom the others wait for; none where nothing sets anybody apart."""
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
        return running  # the others sleep until they are sent something; those that wait for a GPU would run as well
    oldest = max(_age(rank) for rank in ranks)
    usual = statistics.median(rank.step_seconds or 0.0 for rank in ranks)
    margin = max(threshold("early_margin_seconds"), 0.25 * usual)
    early = [rank for rank in ranks if _age(rank) > oldest - margin]
    if 2 * len(early) <= len(ranks):
        return early
    return []


def _silent(snapshot: Snapshot) -> Symptom | None:
    """Nobody tells what the ranks do; only that no metric comes any more."""
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
        text = f"computes something else on rank {names} than on the others"
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
        evidence = (f"the {quantity} is not a number since step {since}",)
        text = f"computes no numbers any more: its {quantity} is not finite"
        result.append(Symptom("wrong", text, evidence, lost_share=1.0, sign="not_a_number"))
    elif (left := _left_its_way(losses)) is not None:
        sign, text = left
        # What is computed after a jump may be as good as ever; after the others it is not.
        lost = 0.0 if sign == "loss_spike" else 1.0
        result.append(Symptom("wrong", text, (f"its newest losses are {_short(losses)}",), lost_share=lost, sign=sign))
    return result


def _odd_ranks(snapshot: Snapshot) -> list[SnapshotRank]:
    """Ranks whose state differs from its copies, or whose gradients are far from their own and the others' usual."""
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
        return (
            f"the state of rank {rank.rank} on {rank.node} has another checksum than that of the ranks it should equal"
        )
    norm, usual = rank.gradient_norm or 0.0, rank.gradient_norm_usual
    against = f", usually {usual:.3g}" if usual else ""
    return f"rank {rank.rank} on {rank.node} has a gradient norm of {norm:.3g}{against}; the other ranks are as usual"


def _ends_badly(values: Sequence[float]) -> bool:
    """Most of the newest are not finite: one bad step that was skipped is no fault."""
    newest = values[-NEWEST_LOSSES:]
    return bool(newest) and 2 * sum(not math.isfinite(value) for value in newest) > len(newest)


def _left_its_way(values: Sequence[float]) -> tuple[str, str] | None:
    """(sign, words) of losses that grow."""
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
        return "diverged", f"diverges: its loss was {level:.3g} and is {newest:.3g}"
    before = statistics.median(losses[-quarter - NEWEST_LOSSES : -NEWEST_LOSSES])
    if newest > before * threshold("spike_ratio") and newest - before > far:
        return "loss_spike", f"has a loss that jumped from {before:.3g} to {newest:.3g}"
    return None


# -- slow ----------------------------------------------------------------------------------------------------------


def _slow(snapshot: Snapshot) -> list[Symptom]:
    symptoms: list[Symptom] = []
    straggling = find_straggling(snapshot)
    symptoms += [_straggles(snapshot, entry) for entry in straggling]
    held_up = sum(item.lost_share for item in straggling)
    slowness = find_slowness(snapshot)
    for element in slowness:
        # What stragglers cost is in the step too; only what is beyond that is another symptom.
        rest = element.lost_share - (held_up if element.is_first else 0.0)
        is_theirs = element.phase in [one.phase for one in straggling]
        if straggling and (rest < threshold("straggler_step_share") or is_theirs):
            continue
        if any(symptom.phase == element.phase and not symptom.ranks for symptom in symptoms):
            continue
        against = since = "planned" if element.against == "plan" else "before"
        if element.against == "plan":
            low, high = snapshot.run.step_seconds_low, snapshot.run.step_seconds_high
            against += f", {duration_range(low, high)} at most" if low and high else ""
        text = f"takes {duration(element.step_seconds)} a step ({duration(element.reference_seconds)} {against})"
        evidence = (
            text,
            f"{element.phase} owns most of it: {duration(element.phase_seconds)} "
            f"({duration(element.phase_reference)} {since})",
        )
        is_old = element.against == "plan" and not any(other.against == "earlier" for other in slowness)
        symptoms.append(Symptom("slow", text, evidence, phase=element.phase, lost_share=rest, since_start=is_old))
    if not any(symptom.phase == "checkpoint" for symptom in symptoms):
        symptoms += _blocked_by_saves(snapshot)
    symptoms += [*_breaks_again(snapshot), *_overloaded(snapshot)]
    return sorted(symptoms, key=lambda symptom: -(symptom.lost_share or 0.0))


def _blocked_by_saves(snapshot: Snapshot) -> list[Symptom]:
    """Saves come in lumps, which medians of steps do not show; the ledger does."""
    ledger, plan = snapshot.run.ledger, snapshot.run.plan
    saving = ledger.get("checkpoint", 0.0)
    wall = saving + sum(ledger.get(kind, 0.0) for kind in ("productive", "data"))
    if wall < threshold("checkpoint_share_seconds"):
        return []
    planned = plan.get("checkpoint_seconds", 0.0) / plan["step_seconds"] if plan.get("step_seconds") else 0.0
    limit = threshold("checkpoint_share_cpu" if is_on_processors(snapshot) else "checkpoint_share")
    if saving / wall < max(limit, 3.0 * planned):
        return []
    text = f"stands still for its checkpoints {percent(saving / wall)} of the time ({percent(planned)} planned)"
    return [Symptom("slow", text, (text,), phase="checkpoint", lost_share=saving / wall - planned)]


def _breaks_again(snapshot: Snapshot) -> list[Symptom]:
    loop = find_loop(snapshot)
    if loop is None:
        return []
    times, ranks = len(loop.restarts), (loop.rank,) if loop.rank is not None else ()
    text = (
        f"came back {times} times in {whole_duration(loop.seconds)}, which took {percent(loop.lost_share)} of that time"
    )
    nodes = (loop.node,) if loop.node else ()
    return [
        Symptom("slow", text, (text,), ranks=ranks, nodes=nodes, lost_share=loop.lost_share, sign=RESTARTS),
    ]


def _overloaded(snapshot: Snapshot) -> list[Symptom]:
    """More requests wait than are computed, and there was no moment without: the wait is a whole service time or more
    (Little's law)."""
    serving = snapshot.serving
    if serving is None or not serving.least_waiting or serving.waiting <= serving.running:
        return []
    first = serving.first_token_seconds
    text = f"lets {counted(serving.waiting, 'request')} wait while it computes {serving.running}"
    evidence = (text, *([f"the median request has its first token after {duration(first)}"] if first else []))
    return [Symptom("slow", text, evidence, phase="queue", sign=OVERLOAD)]


def _straggles(snapshot: Snapshot, straggling: Straggling) -> Symptom:
    ranks = [rank for rank in snapshot.ranks if rank.rank in straggling.ranks]
    others = "others" if 2 * len(ranks) < len(snapshot.ranks) else "fast ones"
    one = len(ranks) == 1
    message = (
        f"{_who(ranks)} {'spends' if one else 'spend'} {straggling.ratio:.2f} times as long on the work of a step as "
        f"the {others}, most of it in {straggling.phase}, and {'waits' if one else 'wait'} least"
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
    """The leaf whose nodes all have slow ranks, when there are several and no other leaf has any."""
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
        return f"{counted(len(ranks), 'rank')} of {nodes[0]}"
    return f"{len(ranks)} ranks of {', '.join(nodes[:3])}" + (
        f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else ""
    )


def _nodes(ranks: Iterable[SnapshotRank]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rank.node for rank in ranks))


def _age(rank: SnapshotRank) -> float:
    return rank.progress_age_seconds or 0.0


def _short(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values[-4:])
