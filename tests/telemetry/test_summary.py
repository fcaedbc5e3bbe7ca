"""What `ps` shows of a run, from its directory alone."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from counted_calls import counted_calls

from craton.telemetry import RunDirectory, Summarizer, result_details, summarize
from craton.telemetry.node import Heartbeat, NodeStatus, RankStatus, write_heartbeat, write_status
from craton.telemetry.rank import Recorder

PLAN = {
    "steps": 100,
    "step_seconds": 0.5,
    "tokens_per_second": 1000.0,
    "mfu": 0.4,
    "memory_bytes": 1e9,
    "phases": {"data": 0.1, "compute": 0.4},
    "goodput": 0.99,
    "cost": {"cost_dollars": 12.0, "dollars_per_day": 8640.0},
    "cost_dollars": 12.0,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "a")
    run.plan_path.write_text(json.dumps(PLAN))
    run.launch_path.write_text(json.dumps({"nodes": ["x", "y"], "ranks_per_node": 2, "generation": 1}))
    return run


def record(run: RunDirectory, node: str, rank: int, step: int, **values: Any) -> None:
    recorder = Recorder(node, rank, 1, run=run)
    recorder.metrics(step, **values)
    recorder.close()


def beat(run: RunDirectory, node: str, state: Any, generation: int = 1) -> None:
    write_heartbeat(run, node, Heartbeat(generation, state, os.getpid(), 9100))


def test_a_run_that_was_started_again_has_no_speed_yet(run: RunDirectory) -> None:
    record(run, "x", 0, 1, run_loss=5.0, run_step_seconds=1.0, run_tokens_per_second=500.0)
    run.launch_path.write_text(json.dumps({"nodes": ["x", "y"], "ranks_per_node": 2, "generation": 2}))
    summary = summarize(run)
    assert (summary.state, summary.step, summary.loss) == ("starting", 1, 5.0)
    assert (summary.step_seconds, summary.tokens_per_second, summary.eta_seconds, summary.against_plan) == (None,) * 4


def test_numbers_of_a_running_run(run: RunDirectory) -> None:
    beat(run, "x", "running"), beat(run, "y", "running")
    for step in range(1, 31):
        slow = 100.0 if step in (3, 29) else 1.0  # one far back, one in the window: neither moves a median
        record(run, "x", 0, step, run_loss=5.0 - step / 10, run_step_seconds=slow, run_tokens_per_second=500.0)
        record(run, "x", 1, step, run_step_seconds=7.0, run_memory_bytes=3e8)
    record(run, "y", 2, 30, run_memory_bytes=5e8)
    Recorder("x", 0, 1, run=run).ledger(30, {"start": 10.0, "productive": 30.0})
    summary = summarize(run)
    assert (summary.state, summary.step, summary.steps, summary.progress) == ("running", 30, 100, 0.3)
    assert (summary.loss, summary.step_seconds, summary.eta_seconds) == (2.0, 1.0, 70.0)
    assert (summary.tokens_per_second, summary.mfu, summary.against_plan) == (500.0, None, 0.5)
    assert (summary.nodes, summary.ranks, summary.generation) == (2, 4, 1)
    assert (summary.goodput, summary.wall_seconds, summary.cost_dollars) == (0.75, 40.0, 4.0)
    assert summary.dollars_per_day == 8640.0
    assert summary.plan["data_seconds"] == 0.1
    assert summary.plan["cost_dollars"] == 12.0
    assert summary.measured["memory_bytes"] == 5e8
    run.mark("STOP")
    assert (summarize(run).state, summarize(run).eta_seconds) == ("stopping", None)  # the rest is not trained
    assert summary.metrics_ports == {"x": 9100, "y": 9100}


def test_a_run_without_a_plan_has_the_price_that_it_was_started_with(run: RunDirectory) -> None:
    Recorder("x", 0, 1, run=run).ledger(30, {"productive": 60.0})
    run.plan_path.unlink()
    assert (summarize(run).dollars_per_day, summarize(run).cost_dollars) == (None, None)
    launch = json.loads(run.launch_path.read_text())
    run.launch_path.write_text(json.dumps({**launch, "dollars_per_day": 1440.0}))
    assert (summarize(run).dollars_per_day, summarize(run).cost_dollars) == (1440.0, 1.0)


def test_a_loss_that_is_not_a_number_shows(run: RunDirectory) -> None:
    record(run, "x", 0, 1, run_loss=math.nan)
    loss = summarize(run).loss
    assert loss is not None
    assert math.isnan(loss)


def test_the_states_of_a_run(run: RunDirectory) -> None:
    assert summarize(run).state == "starting"  # launched a moment ago
    lost = summarize(run, now=time.time() + 60)
    assert (lost.state, lost.message) == ("lost", "no agent has started on x, y")
    beat(run, "x", "done", generation=0), beat(run, "y", "failed", generation=0)
    assert summarize(run).state == "starting"  # an earlier generation's heartbeat says nothing
    beat(run, "x", "running"), beat(run, "y", "running")
    assert summarize(run).state == "starting"
    record(run, "x", 0, 1, run_loss=1.0)
    assert summarize(run).state == "running"
    assert summarize(run, now=time.time() + 9).state == "running"
    assert summarize(run, now=time.time() + 12).state == "lost"
    run.mark("STOP")
    assert summarize(run).state == "stopping"
    beat(run, "y", "stopped")
    assert summarize(run).state == "stopping"
    beat(run, "x", "stopped")
    assert summarize(run, now=time.time() + 1e6).state == "stopped"
    run.unmark("STOP")
    beat(run, "x", "done"), beat(run, "y", "done")
    run.mark("DONE")
    assert summarize(run).state == "done"
    run.unmark("DONE")
    run.mark("FATAL", "rank 0 on x exited with code 1")
    beat(run, "x", "running")
    assert summarize(run).state == "stopping"  # its other ranks are being ended
    beat(run, "x", "failed")
    failed = summarize(run)
    assert (failed.state, failed.message, failed.eta_seconds) == ("failed", "rank 0 on x exited with code 1", None)
    beat(run, "y", "running")  # and then nothing more: what broke rank 0 is most likely that this node is gone
    gone = summarize(run, now=time.time() + 60)
    assert gone.state == "failed"
    assert gone.message.splitlines() == [
        "the agent of y exited without a report: killed, or its machine is gone",
        "rank 0 on x exited with code 1",
    ]


def test_a_command_that_tells_of_no_step_runs_when_its_ranks_do(run: RunDirectory) -> None:
    beat(run, "x", "running"), beat(run, "y", "running")

    def tell(kind: str, generation: int) -> None:
        write_status(run, NodeStatus(time.time(), generation, "x", (RankStatus(0, 7, kind, (), 0, 0.0, 0.0, False),)))

    tell("start", 1)
    assert summarize(run).state == "starting"
    tell("productive", 0)  # of before it was started again
    assert summarize(run).state == "starting"
    tell("productive", 1)
    assert summarize(run).state == "running"


def test_a_run_that_has_only_been_made(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    summary = summarize(run, now=time.time() + 1e6)  # its data may be tokenized for hours
    assert (summary.state, summary.step, summary.steps, summary.ranks) == ("starting", 0, None, 0)
    assert summary.goodput is None
    run.plan_path.write_text("{torn")
    run.launch_path.write_text("[]")
    assert summarize(run).plan == {}


def test_a_long_run_is_summarized_fast(run: RunDirectory) -> None:
    stamp = {"time": 1.0, "generation": 1, "node": "x"}
    with run.metrics_path("x").open("w") as metrics, run.ledger_path("x").open("w") as ledger:
        for step in range(1, 5001):
            for rank in (0, 1):
                line = {**stamp, "step": step, "rank": rank, "run_loss": 1.0, "run_step_seconds": 2.0, "pad": "x" * 200}
                metrics.write(json.dumps(line) + "\n")
            books = {**stamp, "time": 2.0 * step, "step": step, "rank": 0, "seconds": {"productive": 2.0}}
            ledger.write(json.dumps(books) + "\n")
    summarizer = Summarizer(run)
    with counted_calls() as calls_of_first:
        first = summarizer.summary()
    with counted_calls() as calls_of_second:
        second = summarizer.summary()
    assert (first.step, first.wall_seconds) == (second.step, second.wall_seconds)
    assert (first.step, first.wall_seconds) == (5000, pytest.approx(10_000.0))
    assert calls_of_first.number < 50 * 15_000  # 20 for each line
    assert calls_of_second.number < calls_of_first.number / 10, "what was read is not read again"


def test_rollouts_count_as_productive_and_rewards_show(run: RunDirectory) -> None:
    record(run, "x", 0, 1, run_loss=1.0, run_reward=0.1, run_rollout_seconds=3.0, run_validation_reward=0.4)
    record(run, "x", 0, 2, run_loss=1.0, run_reward=0.12, run_rollout_seconds=4.0, run_kl=float("nan"))
    seconds = {"start": 10.0, "productive": 10.0, "rollout": 15.0, "reward": 3.0, "sync": 2.0}
    Recorder("x", 0, 1, run=run).ledger(2, seconds)
    summary = summarize(run)
    assert summary.goodput == 0.75
    assert summary.results == {"reward": 0.12, "validation_reward": 0.4}
    assert summary.measured["rollout_seconds"] == 3.5


def test_failures_of_a_verifier_show_after_the_step(run: RunDirectory) -> None:
    for step, share in enumerate((0.0, 0.25, 0.05, 0.0), 1):
        record(run, "x", 0, step, run_loss=1.0, run_reward=0.1, run_verifier_failure_share=share)
    results = summarize(run).results
    assert results["verifier_failure_share"] == pytest.approx(0.075)
    assert results["worst_verifier_failure_share"] == 0.25
    assert result_details(results)[-1] == ("verifier failures", "7.5%, worst step 25%")
    calm = {"verifier_failure_share": 0.0, "worst_verifier_failure_share": 0.0}
    assert result_details(calm) == [("verifier failures", "0%")]
