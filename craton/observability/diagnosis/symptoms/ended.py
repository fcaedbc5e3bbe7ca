"""Symptoms by the run's state: waiting, done, stopped or dead."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from craton.observability.diagnosis.first_hand import first_error
from craton.observability.diagnosis.restart_history import LOST
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotBadStep, SnapshotRank
from craton.observability.diagnosis.symptoms.naming import nodes_of, odd_by_output
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import CANCELLED, SUSPENDED, UNSAVED, Symptom

COMING_BACK = ("detect", "regroup", "restore")
_HANG = re.compile(r"rank (\d+) (?:on \S+ )?(hangs in|is stopped by a signal)|all \d+ ranks hang in")
_VICTIM = re.compile(r"rank (\d+) on ([\w.-]+)")


def symptom_by_state(snapshot: Snapshot) -> Symptom | None:
    """Return the symptom by the run's state and its scheduler; None if the run should be making progress."""
    run, scheduler = snapshot.run, snapshot.scheduler
    if run.unsaved:
        return Symptom("waiting", run.unsaved, sign=UNSAVED)
    if run.state == "waiting" or (scheduler.condition == "waiting" and run.state not in ("failed", "done")):
        lost = next((event.text for event in reversed(snapshot.events) if event.name == "nodes_lost"), "")
        after = f", after it lost {lost}" if lost and scheduler.restarts else ""
        return Symptom("waiting", (scheduler.sentence or run.message) + after)
    if scheduler.is_suspended:
        return Symptom("hung", "is suspended by its scheduler", (scheduler.sentence,), lost_share=1.0, sign=SUSPENDED)
    if run.state == "done":
        return Symptom("done")
    if run.state == "stopped":
        return _stop(snapshot)
    if run.state == "failed":
        return _death(snapshot, run.message)
    if run.state == "lost":
        if scheduler.condition == "unknown":
            return Symptom(
                "unknown", scheduler.sentence or "the scheduler does not respond, and no node sends a heartbeat"
            )
        return _death(snapshot, run.message)
    return None


def _stop(snapshot: Snapshot) -> Symptom:
    """Return a stop; if a signal from elsewhere than its agent made a rank stop, with that rank."""
    victims = [rank for rank in snapshot.ranks if rank.rank in snapshot.run.signalled]
    is_foreign = bool(victims) and len(victims) < len(snapshot.ranks)
    scheduler = snapshot.scheduler
    is_cancelled = scheduler.condition == "ended" and "CANCEL" in scheduler.reason
    if (is_cancelled or snapshot.run.is_stopped_by_scheduler) and not snapshot.run.is_stopped_by_user:
        return Symptom("stopped", snapshot.run.message, sign=CANCELLED)
    numbers = tuple(rank.rank for rank in victims) if is_foreign else ()
    nodes = nodes_of(victims) if is_foreign else ()
    return Symptom("stopped", snapshot.run.message, ranks=numbers, nodes=nodes, sign="signal" if is_foreign else "")


def _death(snapshot: Snapshot, message: str) -> Symptom:
    """Return the symptom of a run that ended, or that lost ranks or nodes."""
    if last_bad_step(snapshot) is not None:
        return Symptom("dead", message, sign="not_a_number")  # all ranks judged the same numbers: none failed first
    first = _first_dead(snapshot)
    reported_lost = reported_losses(snapshot)
    lost = [*_lost_nodes(snapshot), *reported_lost]
    hang = _ended_for_a_hang(snapshot, message)
    if hang is not None and not reported_lost and not (lost and _fell_silent_before(snapshot, lost, first)):
        return hang
    error = None if lost else first_error(snapshot)
    if error is not None:
        ranks = (error.rank,) if error.rank is not None and error.num_ranks == 1 else ()
        return Symptom("dead", message, ranks=ranks, nodes=(error.node,) if ranks else (), moment=error.moment)
    broke_with_it = first is not None and first.node not in lost and bool(reported_lost)
    if first is not None and not broke_with_it and not _fell_silent_before(snapshot, lost, first):
        return Symptom("dead", message, ranks=(first.rank,), nodes=(first.node,), moment=first.ended_at)
    if lost:
        return Symptom("dead", message, nodes=tuple(dict.fromkeys(lost)))
    match = _VICTIM.search(message)
    if match:
        return Symptom("dead", message, ranks=(int(match[1]),), nodes=(match[2],))
    return Symptom("dead", message)


def last_bad_step(snapshot: Snapshot) -> SnapshotBadStep | None:
    """Return the bad step that ended the run: its policy was to stop, or no rollback helped."""
    if snapshot.run.state != "failed":
        return None
    said = [snapshot.run.message, *(event.text for event in snapshot.events if event.name == "failed")]
    newest = (bad for bad in reversed(snapshot.bad_steps) if bad.is_not_finite)
    return next((bad for bad in newest if any(f"step {bad.step}:" in text for text in said)), None)


def reported_losses(snapshot: Snapshot) -> dict[str, str]:
    """Return node → how its agent was lost, as the other agents reported when the run ended. The agent may have been
    restarted since, and look healthy."""
    losses = reversed(LOST.findall(snapshot.run.message))  # the first report on a node is the reason
    lost = {node: how for node, how in losses if node in snapshot.run.nodes}
    return {} if len(lost) == len(snapshot.run.nodes) else lost


def _fell_silent_before(snapshot: Snapshot, lost: Sequence[str], first: SnapshotRank | None) -> bool:
    """Return whether a node was lost before ranks elsewhere failed because their connections to it broke."""
    if first is None:
        return bool(lost)
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
        return Symptom("dead", message, ranks=(int(match[1]),), nodes=nodes_of(ranks), sign="stopped")
    stuck = {rank.rank for rank in snapshot.run.stuck}
    culprits = [rank for rank in snapshot.ranks if rank.rank in stuck]
    if len(snapshot.ranks) == 1:
        culprits = list(snapshot.ranks)
    if culprits:
        numbers = tuple(rank.rank for rank in culprits) if len(culprits) < max(2, len(snapshot.ranks)) else ()
        return Symptom("dead", message, ranks=numbers, nodes=nodes_of(culprits) if numbers else (), sign="hung")
    reporting = [rank for rank in snapshot.ranks if rank.step]
    if snapshot.run.kind == "command" and len(reporting) <= 1:  # the others may be to blame, and report no steps
        odd = odd_by_output(snapshot)
        return Symptom("dead", message, ranks=tuple(rank.rank for rank in odd), nodes=nodes_of(odd), sign="hung")
    kinds = Counter(rank.ended_in.partition("+")[0] for rank in snapshot.ranks if rank.ended_in)
    usual = kinds.most_common(1)[0][0] if kinds else ""
    odd = [rank for rank in snapshot.ranks if rank.ended_in and rank.ended_in.partition("+")[0] != usual]
    odd = [rank for rank in odd if rank.ended_in not in COMING_BACK]  # it noticed the failure of another rank
    odd = odd if 2 * len(odd) < len(snapshot.ranks) else []
    return Symptom("dead", message, ranks=tuple(rank.rank for rank in odd), nodes=nodes_of(odd), sign="hung")


def find_dead_ranks(snapshot: Snapshot) -> Symptom | None:
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
