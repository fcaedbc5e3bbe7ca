"""`ps`, `top`, the web page, `craton why` and the alert say the same about a run, whatever its agents report."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from simulated_runs import write_run

from craton.cli.views.run_table import run_cells
from craton.formatting import UNKNOWN
from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.observability.web.readers import Nodes, read_member
from craton.observability.web.sources import CachedVerdict, agreeing
from craton.observability.web.sources.verdicts import answer_of
from craton.observability.web.terminal import TONES, TopView
from craton.orchestration import Standing
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.node import NodeStatus, RankStatus, write_status
from craton.telemetry.progress import activities_of, stuck_after, usual_stays

ALERT_SECONDS = 60.0  # RunHung: beyond the longest limit of any rank
STALE = CachedVerdict("healthy", "llama runs well.")


def reported(draw: random.Random, number: int) -> RankStatus:
    kind = draw.choice(["productive", "productive", "productive", "data", "checkpoint", "evaluate", "redo"])
    age = draw.choice([0.1, 1.0, 4.0, 8.0, 40.0, 400.0, 1500.0])
    return RankStatus(
        number,
        1,
        kind,
        (),
        draw.choice([10, 10, 10, 11]),
        age,
        draw.choice([0.2, 2.0]),
        is_stopped=draw.random() < 0.1,
        progress_limit_seconds=draw.choice([4.0, 300.0]),
        slowest_seconds=draw.choice([0.3, 3.0]),
        starved_seconds=draw.choice([0.0, 0.0, 0.5 * age]),
        phase_seconds=draw.choice([{}, {"checkpoint": 20.0, "data": 0.1}]),
        process_state=draw.choice(["", "S", "R"]),
        frame=draw.choice(["", "source.py:14 in read: time.sleep(60)"]),
        is_waiting=draw.random() < 0.3,
    )


def alerts(statuses: list[NodeStatus], now: float) -> bool:
    """RunHung, as Prometheus would evaluate it over what the agents export."""
    ranks = activities_of(statuses, now)
    limits = [max(one.limit_seconds, stuck_after(one, usual_stays(ranks)) + one.starved_seconds) for one in ranks]
    return any(one.age_seconds > max(limits) + ALERT_SECONDS for one in ranks)


@pytest.mark.parametrize("seed", range(24))
def test_no_view_contradicts_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    run: RunDirectory = write_run(tmp_path, "llama", nodes=2, ranks_per_node=2, steps=10)
    standing = Standing("running", job="7", nodes=("node-0", "node-1"))
    monkeypatch.setattr("craton.observability.diagnosis.collect.snapshot.standing_of", lambda run: standing)
    now = time.time()
    statuses = [
        NodeStatus(now, 0, f"node-{node}", (reported(draw, 2 * node), reported(draw, 2 * node + 1))) for node in (0, 1)
    ]
    for status in statuses:
        write_status(run, status)
    summary = summarize(run, now)
    verdict = diagnose(take_snapshot(run, now=now, look_here=False))
    is_stuck = summary.movement.is_stuck
    assert (verdict.condition == "hung") == is_stuck, (summary.movement, verdict.sentence)
    if is_stuck:
        assert verdict.since == summary.movement.since
        if summary.movement.stands_out and len(summary.movement.ranks) == 1:
            assert verdict.rank == summary.movement.ranks[0]
    cells = run_cells(summary)
    assert (cells[1] == "stuck") == is_stuck
    assert not is_stuck or (cells[5], cells[7], cells[8]) == (UNKNOWN, UNKNOWN, UNKNOWN)
    look = TopView(run, examine=lambda run, prometheus: answer_of(verdict)).look(wait_for_verdict=True)
    assert look.verdict is not None
    assert (look.verdict.condition == "hung") == look.summary.movement.is_stuck
    assert not is_stuck or TONES[look.verdict.condition] != "green"
    stale = agreeing(STALE, summary.movement)  # a verdict from before the run stopped
    assert stale is not None
    assert (stale.condition == "hung") == is_stuck
    views = Nodes(run).look(read_member(run), (), (), summary.movement)
    stuck_nodes = {view.node for view in views if view.health in ("stuck", "stopped")}
    stopped = {status.node for status in statuses if any(rank.is_stopped for rank in status.ranks)}
    assert stuck_nodes == (set(summary.movement.nodes) if is_stuck else set()) | stopped
    if alerts(statuses, now) and not any(one.age_seconds < ALERT_SECONDS for one in activities_of(statuses, now)):
        assert is_stuck, summary.movement
