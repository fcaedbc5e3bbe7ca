"""Hangs: the run makes no progress (`telemetry.progress`). The culprits are the ranks that the others wait for."""

from __future__ import annotations

from math import inf

from craton.formatting import counted, whole_duration
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotRank
from craton.observability.diagnosis.symptoms.naming import nodes_of, odd_by_output, progress_age
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import IDLE, LINGERS, SILENT, STALLED, Symptom
from craton.telemetry.progress import (
    FIRST_SECONDS,
    STUCK_STAYS,
    STUCK_STEPS,
    Progress,
    RankActivity,
    assess_progress,
    first_seconds,
)


def find_hang(snapshot: Snapshot) -> Symptom | None:
    if snapshot.serving is not None and snapshot.serving.is_silent:
        text = "does not answer HTTP requests"
        return Symptom("hung", text, (text,), lost_share=1.0, sign=SILENT)
    if stalled := _stalled(snapshot):
        return stalled
    if left := _lingering(snapshot):
        return left
    if not _activities(snapshot):
        return _silent(snapshot)
    progress = progress_of(snapshot)
    return _hang(snapshot, progress) if progress.is_stuck else None


def _stalled(snapshot: Snapshot) -> Symptom | None:
    """Return a server whose engine does nothing although requests run: it waits for something else."""
    serving = snapshot.serving
    if serving is None or not serving.running or serving.stall_seconds < threshold("server_stall_seconds"):
        return None
    used = [rank.resources for rank in snapshot.ranks if rank.resources is not None]
    if not used or min(resources.idle_seconds for resources in used) < threshold("server_stall_seconds"):
        return None
    text = f"computes no token for {counted(serving.running, 'running request')}"
    evidence = (f"{text}, for {whole_duration(serving.stall_seconds)}", "its engine uses no CPU")
    return Symptom("hung", evidence[0], evidence, lost_share=1.0, sign=STALLED)


def _lingering(snapshot: Snapshot) -> Symptom | None:
    """Return ranks of a command that neither end nor work, long after others have ended with 0."""
    ended = [rank for rank in snapshot.ranks if rank.is_alive is False and rank.exit_code == 0 and rank.ended_at]
    left = [rank for rank in snapshot.ranks if rank.is_alive is not False]
    idle = [rank.resources.idle_seconds if rank.resources is not None else 0.0 for rank in left]
    last = max((rank.ended_at or 0.0 for rank in ended), default=0.0)
    seconds = min([snapshot.moment - last, *idle])
    if snapshot.run.kind != "command" or not ended or not left or seconds < threshold("lingers_seconds"):
        return None
    if any(rank.step and progress_age(rank) < threshold("lingers_seconds") for rank in left):
        return None
    numbers = tuple(rank.rank for rank in left)
    ago = whole_duration(snapshot.moment - last)
    text = f"does not end: {len(ended)} of its {len(snapshot.ranks)} ranks ended {ago} ago"
    return Symptom("hung", text, (text,), numbers, nodes_of(left), lost_share=1.0, sign=LINGERS)


def progress_of(snapshot: Snapshot) -> Progress:
    """Return whether the run makes progress, as `ps`, `top` and the web page show it."""
    run = snapshot.run
    return assess_progress(
        _activities(snapshot),
        snapshot.moment,
        plan_step_seconds=run.plan.get("step_seconds") or 0.0,
        is_restarted=bool(run.recent_restarts) or run.previous_began is not None,
    )


def _activities(snapshot: Snapshot) -> list[RankActivity]:
    return [
        RankActivity(
            rank=rank.rank,
            kind=rank.kind,
            step=rank.step or 0,
            age_seconds=progress_age(rank),
            node=rank.node,
            step_seconds=rank.step_seconds or 0.0,
            slowest_seconds=rank.slowest_seconds or 0.0,
            starved_seconds=rank.starved_seconds or 0.0,
            patience_seconds=rank.patience_seconds or 0.0,
            limit_seconds=rank.progress_limit_seconds or 0.0,
            phase_seconds=_phase_seconds(rank, snapshot),
            is_stopped=bool(rank.is_stopped),
            is_eager=bool(rank.is_eager),
            process_state=rank.process_state,
            frame=rank.frame,
            is_waiting=bool(rank.is_waiting),
            sleeps_in=rank.resources.sleeps_in if rank.resources is not None else "",
            idle_seconds=rank.resources.idle_seconds if rank.resources is not None else 0.0,
        )
        for rank in snapshot.ranks
        if rank.is_alive is not False and rank.progress_age_seconds is not None
    ]


def _phase_seconds(rank: SnapshotRank, snapshot: Snapshot) -> dict[str, float]:
    """Return the longest recent stay in each phase. Most saves are written in the background, so that ranks stay in
    `checkpoint` for a moment only; the last one of a run takes as long as the background writes."""
    saves = max((tier.usual_seconds or 0.0 for tier in snapshot.tiers), default=0.0)
    stay = rank.phase_seconds.get("checkpoint", 0.0)
    if not saves:
        return dict(rank.phase_seconds)
    return {**rank.phase_seconds, "checkpoint": max(saves, stay or FIRST_SECONDS["checkpoint"] / STUCK_STAYS)}


def _hang(snapshot: Snapshot, progress: Progress) -> Symptom:
    step = max((rank.step for rank in snapshot.ranks if rank.step is not None), default=snapshot.run.step)
    at = f" at step {step}" if step is not None else ""
    evidence = [f"no rank has made progress for {whole_duration(progress.seconds)}{at}"]
    if progress.frame and progress.stands_out:
        evidence.append(f"rank {progress.ranks[0]} waits in {progress.frame}")
    ranks, nodes = (progress.ranks, progress.nodes) if progress.stands_out else ((), ())
    if not ranks and (odd := odd_by_output(snapshot)):
        ranks, nodes = tuple(rank.rank for rank in odd), nodes_of(odd)
        evidence.append(f"the last output of rank {ranks[0]} differs from that of the others: {odd[0].last_line}")
    return Symptom(
        "hung",
        f"has made no progress for {whole_duration(progress.seconds)}{at}",
        tuple(evidence),
        ranks=ranks,
        nodes=nodes,
        lost_share=1.0,
        since=progress.since,
    )


def find_silent(snapshot: Snapshot) -> Symptom | None:
    """Return what is known about a command that has never reported a step: whether it waits, or nothing."""
    run = snapshot.run
    is_silent = all(rank.step is None and not rank.progress_age_seconds for rank in snapshot.ranks)
    if run.kind != "command" or run.state != "running" or not snapshot.ranks or not is_silent or snapshot.series.loss:
        return None
    idle = [rank.resources.idle_seconds if rank.resources else 0.0 for rank in snapshot.ranks]
    who = "its only rank has" if len(idle) == 1 else f"its {len(idle)} ranks have"
    printed = min((rank.printed_seconds for rank in snapshot.ranks if rank.printed_seconds is not None), default=inf)
    if min(idle) > threshold("idle_seconds") and printed > threshold("idle_seconds"):
        text = f"has not reported a step, and {who} used no CPU for {whole_duration(min(idle))}"
        return Symptom("starting", text, (text,), sign=IDLE, since=snapshot.moment - min(idle))
    alive = "its ranks are alive" if printed > threshold("idle_seconds") else "its ranks are alive and print"
    text = f"{alive}, but it reports no steps, so whether it makes progress is not known"
    return Symptom("unknown", text, sign=IDLE)


def _silent(snapshot: Snapshot) -> Symptom | None:
    """Return a hang by missing metrics alone, where no agent reports what the ranks are doing."""
    run = snapshot.run
    since = run.updated_at if run.updated_at is not None else run.generation_began
    if since is None or run.state not in ("running", "starting"):
        return None
    pace = max([rank.step_seconds or 0.0 for rank in snapshot.ranks], default=0.0) or run.plan.get("step_seconds", 0.0)
    limit = max(threshold("silent_seconds"), 3 * STUCK_STEPS * pace)
    if run.updated_at is None:
        limit = max(limit, first_seconds("start", is_eager=False, plan_step_seconds=pace))
    age = snapshot.moment - since
    return _hang(snapshot, Progress("stuck", age, since, stands_out=False)) if age > limit else None
