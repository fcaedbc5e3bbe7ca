"""What a run recovered from, read from the files that its agents and ranks write."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from craton.agent import Generation
from craton.orchestration.watching import read_recoveries
from craton.orchestration.watching.recoveries import Recoveries, under_way
from craton.telemetry import RunDirectory
from craton.telemetry.rank import Recorder


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path, "demo")
    made.launch_path.write_text(json.dumps({"nodes": ["node-0"], "ranks_per_node": 2, "nursery": ["python"]}))
    return made


def begin(run: RunDirectory, number: int, reason: str = "start", **fields: Any) -> None:
    generation = Generation(number, ["node-0"], 2, "127.0.0.1:1", reason=reason, **fields)
    run.generation_path(number).write_text(json.dumps(asdict(generation)))


def recovered(run: RunDirectory, generation: int, seconds: float, parts: dict[str, float]) -> None:
    for rank in (0, 1):
        recorder = Recorder("node-0", rank, generation=generation, run=run)
        recorder.ledger(41, {**parts, "productive": 9.0})
        if rank == 0:
            recorder.event("recovered", step=40, seconds=seconds, lost_steps=0, restored_from="peer")
        recorder.close()


def test_a_recovery_says_why_when_and_where_its_time_went(run: RunDirectory) -> None:
    looking = Recoveries(run)
    begin(run, 0)
    assert looking.all() == []
    begin(run, 1, "rank 3 was killed", reached=39, broke_at=100.0, time=100.1)
    waiting = looking.all()
    assert [each.text for each in waiting] == ["rank 3 was killed at step 40, not back yet"]
    assert under_way(waiting) == waiting[0]
    recovered(run, 1, 1.4, {"detect": 0.1, "regroup": 0.4, "restore": 0.3, "redo": 0.6})
    found = looking.all()
    assert found[0].text == (
        "rank 3 was killed at step 40, back after 1.40 s: detect 100 ms · regroup 400 ms · restore 300 ms · redo 600 ms"
    )
    assert (found[0].lost_steps, found[0].restored_from, under_way(found)) == (0, "peer", None)
    assert read_recoveries(run) == found


def test_a_resize_is_no_recovery_and_a_second_failure_ends_the_first(run: RunDirectory) -> None:
    begin(run, 0)
    begin(run, 1, "grown from 1 to 2 nodes", is_planned=True, time=50.0)
    assert read_recoveries(run) == []
    begin(run, 2, "node-1 is lost", reached=9, broke_at=60.0, time=60.5)
    begin(run, 3, "rank 0 hangs in restore at step 10", reached=9, broke_at=61.0, time=66.0)
    recovered(run, 3, 7.0, {})
    found = read_recoveries(run)
    assert [each.text for each in found] == [
        "node-1 is lost at step 10, broke again on its way back",
        "rank 0 hangs in restore at step 10, back after 7.00 s",
    ]
    assert under_way(found) is None


def test_a_command_is_back_when_its_ranks_are_started(run: RunDirectory) -> None:
    run.launch_path.write_text(json.dumps({"nodes": ["node-0"], "ranks_per_node": 2}))
    begin(run, 1, "rank 1 exited with code 1", reached=4, broke_at=100.0, time=100.2)
    assert read_recoveries(run)[0].text == "rank 1 exited with code 1 at step 5, back after 200 ms"
    begin(run, 2, "rank 0 hangs in productive at step 7: no progress", reached=8, broke_at=110.0, time=110.2)
    assert "step 9" not in read_recoveries(run)[1].text, "one step in a sentence"


def test_the_step_of_a_command_that_reports_none_is_not_told(run: RunDirectory) -> None:
    run.launch_path.write_text(json.dumps({"nodes": ["node-0"], "ranks_per_node": 2}))
    begin(run, 1, "rank 1 exited with code 1", broke_at=100.0, time=100.2)
    assert read_recoveries(run)[0].text == "rank 1 exited with code 1, back after 200 ms"


def test_a_torn_generation_hides_no_other(run: RunDirectory) -> None:
    begin(run, 1, "rank 1 was killed", reached=4, broke_at=100.0)
    run.generation_path(2).write_text('{"number": 2')
    assert len(read_recoveries(run)) == 1
