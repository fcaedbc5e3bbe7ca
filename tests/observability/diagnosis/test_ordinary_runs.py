"""Ordinary situations that the rules for commands, servers, quotas and losses must leave alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_snapshots import MOMENT, healthy, with_rank, with_run
from sick_runs import TRAINING

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect.records import read_serving
from craton.observability.diagnosis.snapshot import Series, Snapshot, SnapshotRank, TrainingFacts
from craton.observability.diagnosis.symptoms import odd_by_output, symptoms_of
from craton.telemetry import RunDirectory
from craton.telemetry.node import ProcessResources


def command(*ranks: SnapshotRank) -> Snapshot:
    return replace(with_run(healthy(len(ranks), 1), kind="command"), ranks=ranks)


def idle_rank(number: int, **changes: Any) -> SnapshotRank:
    base = healthy(3, 1).ranks[number]
    resources = ProcessResources(cpus=8, node_cpus=8, idle_seconds=40.0)
    silent = {"kind": "start", "step": None, "progress_age_seconds": 0.0}
    return replace(
        base, resources=resources, recent={}, earlier={}, num_recent=0, num_earlier=0, **{**silent, **changes}
    )


def test_the_rank_that_alone_prints_steps_is_not_odd() -> None:
    lines = ["step 80 loss 0.1", "rank 1 ready", "rank 2 ready"]
    ranks = [idle_rank(number, last_line=line) for number, line in enumerate(lines)]
    ranks[0] = replace(ranks[0], step=80)
    assert odd_by_output(command(*ranks)) == []


def test_a_rank_that_still_reports_steps_does_not_linger() -> None:
    works = idle_rank(0, kind="productive", step=30, progress_age_seconds=0.8, patience_seconds=900.0)
    ended = idle_rank(1, is_alive=False, exit_code=0, ended_at=MOMENT - 60.0)
    assert (
        symptoms_of(command(works, ended, idle_rank(2, is_alive=False, exit_code=0, ended_at=None))).condition != "hung"
    )


def test_a_command_without_steps_that_prints_is_not_idle() -> None:
    quiet = replace(command(idle_rank(0), idle_rank(1)), series=Series())
    assert diagnose(quiet).cause == "command_idle"
    prints = diagnose(replace(quiet, ranks=(idle_rank(0, printed_seconds=1.0), idle_rank(1))))
    assert prints.condition == "unknown"
    assert "print" in prints.sentence


def test_what_a_run_learned_is_judged_after_its_end() -> None:
    flat = with_run(replace(healthy(4), training=TRAINING), state="done")
    assert diagnose(flat).sentence.endswith(" is done")
    masked = replace(flat, series=replace(flat.series, label_share=tuple(enumerate([0.6] * 100 + [0.0] * 20))))
    verdict = diagnose(masked)
    assert (verdict.condition, verdict.cause, verdict.others[0].cause) == ("done", "", "labels_masked")
    assert verdict.sentence.endswith(diagnose(with_run(masked, state="running")).action[1:] + ".")


def test_a_command_that_saves_for_some_seconds_is_not_stuck() -> None:
    saves = idle_rank(
        0, kind="productive", step=30, progress_age_seconds=18.0, patience_seconds=900.0, step_seconds=0.2
    )
    saves = replace(saves, resources=ProcessResources(cpus=8, node_cpus=8, idle_seconds=17.0))
    assert symptoms_of(command(saves, idle_rank(1), idle_rank(2))).condition != "hung"


@pytest.mark.parametrize(
    "losses",
    [
        [1.0 - 0.5 * step for step in range(200)],  # the negative of a return that grows
        [3.0 - 0.07 * step for step in range(200)],  # of a density
        [5.0 / (1 + step) for step in range(60)] + [0.0] * 40,  # a hinge loss that has converged
    ],
)
def test_losses_of_users_may_be_negative_or_zero(losses: list[float]) -> None:
    facts = TrainingFacts(objective="mine:loss", vocabulary=512)
    series = Series(loss=tuple(enumerate(losses, start=1)))
    assert symptoms_of(replace(healthy(1, 1), training=facts, series=series)).condition != "wrong"


def test_a_server_that_was_restarted_or_has_less_load_is_not_wrong_or_slow(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "metrics").mkdir()
    before = [(10.0 + second, 1000 + second, 0, 16, 0.4) for second in range(20)]
    after = [(40.0 + 0.5 * number, 3 * number, 0, 1, 0.05) for number in range(20)]
    names = ("time", "serve_ended", "serve_failed", "serve_running", "serve_roofline")
    lines = [{**dict(zip(names, line, strict=True)), "serve_waiting": 0} for line in (*before, *after)]
    run.metrics_path("node-0").write_text("".join(json.dumps(line) + "\n" for line in lines))
    serving = read_serving(run, ["node-0"], 50.0)
    assert serving is not None
    assert (serving.num_ended, serving.num_failed, serving.roofline) == (57, 0, None)


def test_a_quota_that_costs_little_is_not_slow() -> None:
    limited = ProcessResources(cpus=8, quota_cpus=2.5, throttled_share=0.95, throttled_time_share=0.17)
    run = with_run(healthy(1, 1), is_accelerated=False)
    assert symptoms_of(with_rank(run, 0, resources=limited)).condition == "healthy"
