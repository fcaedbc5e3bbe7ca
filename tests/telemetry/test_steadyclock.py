"""Ages and books that do not follow a wall clock that jumps."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from craton.telemetry import RunDirectory, Summarizer, summarize, summary
from craton.telemetry.node import LOST_SECONDS, Heartbeat, read_heartbeat, touch_heartbeat, write_heartbeat
from craton.telemetry.rank import STEADY, LedgerReader, monotonic_clock_id, wall_offset
from craton.telemetry.rank.steady_clock import SteadyClock

HOUR = 3600.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")


def set_clock(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + shift)


def beat_of(run: RunDirectory) -> Heartbeat:
    beat = read_heartbeat(run, "a")
    assert beat is not None
    return beat


@pytest.mark.parametrize("shift", [HOUR, -HOUR])
def test_a_steady_clock_does_not_jump_and_its_labels_do(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    clock = SteadyClock()
    before = clock.now()
    assert clock.to_wall(before) == before
    set_clock(monkeypatch, shift)
    assert 0.0 <= clock.now() - before < HOUR / 2
    assert clock.to_wall(before) == pytest.approx(before + shift, abs=0.1)
    assert clock.to_monotonic(clock.now()) == pytest.approx(time.monotonic(), abs=HOUR / 2)


@pytest.mark.skipif(not monotonic_clock_id(), reason="this system does not name its monotonic clock")
@pytest.mark.parametrize("shift", [HOUR, -HOUR])
def test_a_reader_of_the_same_boot_sees_the_true_age(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    offset = write_heartbeat(run, "a", Heartbeat(0, "running", 1, 0))
    old = time.time() - LOST_SECONDS - 5.0
    set_clock(monkeypatch, shift)
    assert not beat_of(run).is_lost()
    touch_heartbeat(run, "a", offset)
    assert beat_of(run).age_seconds() < LOST_SECONDS
    os.utime(run.heartbeat_path("a"), (old, old))
    assert beat_of(run).is_lost()
    assert beat_of(run).age_seconds() < HOUR / 2


def test_a_reader_elsewhere_has_only_the_wall_clock(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write_heartbeat(run, "a", Heartbeat(0, "running", 1, 0))
    path = run.heartbeat_path("a")
    path.write_text(json.dumps({**json.loads(path.read_text()), "clock": "another boot"}))
    assert not beat_of(run).is_lost()
    set_clock(monkeypatch, HOUR)
    assert beat_of(run).is_lost()


def test_a_reader_elsewhere_that_looks_again_trusts_a_heartbeat_that_changes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clocks are an hour apart. The change time of the file shows that the agent is alive, unless the file server
    has the agent's clock."""
    run.launch_path.write_text(json.dumps({"generation": 0, "nodes": ["a"], "num_nodes": 1, "ranks_per_node": 1}))
    path, moment = run.heartbeat_path("a"), time.time() - HOUR
    write_heartbeat(run, "a", Heartbeat(0, "running", 1, 0))
    path.write_text(json.dumps({**json.loads(path.read_text()), "clock": "another boot"}))
    os.utime(path, (moment, moment))
    assert Summarizer(run).summary().state == "starting"
    assert beat_of(run).clock_error == pytest.approx(-HOUR, abs=60.0)

    def read(run: RunDirectory, node: str) -> Heartbeat | None:
        beat = read_heartbeat(run, node)
        return beat and replace(beat, changed=beat.moment)

    monkeypatch.setattr(summary, "read_heartbeat", read)
    reader = Summarizer(run)
    assert reader.summary().state == "lost"
    os.utime(path, (moment + 1.0, moment + 1.0))
    assert reader.summary().state == "starting"
    assert Summarizer(run).summary().state == "lost"


def test_a_later_heartbeat_of_this_boot_keeps_the_steady_clock(run: RunDirectory) -> None:
    write_heartbeat(run, "a", Heartbeat(0, "stopped", 1, 0, clock=monotonic_clock_id(), steady_offset=5.0))
    assert beat_of(run).steady_offset == (5.0 if monotonic_clock_id() else STEADY.offset)
    write_heartbeat(run, "a", Heartbeat(0, "stopped", 1, 0, clock="another boot", steady_offset=5.0))
    assert beat_of(run).steady_offset == STEADY.offset
    assert beat_of(run).clock_offset == pytest.approx(wall_offset(), abs=HOUR)


def test_the_newest_step_is_the_last_written_whatever_its_label(run: RunDirectory) -> None:
    lines = [
        {"time": moment, "step": step, "generation": generation, "rank": 0, "run_loss": float(step)}
        for moment, step, generation in ((5000.0, 1, 0), (5001.0, 2, 0), (1401.0, 3, 0))
    ]
    run.metrics_path("a").write_text("".join(json.dumps(line) + "\n" for line in lines))
    late = {"time": 900.0, "step": 4, "generation": 1, "rank": 0, "run_loss": 4.0}
    run.metrics_path("b").write_text(json.dumps(late) + "\n")
    assert (summarize(run).step, summarize(run).loss) == (4, 4.0)
    run.metrics_path("b").unlink()
    assert summarize(run).step == 3


def test_books_with_senseless_times_are_left_out(run: RunDirectory) -> None:
    good = {"time": 1000.0, "step": 1, "generation": 0, "rank": 0, "seconds": {"productive": 1.0}}
    wrong = [{**good, "time": 1e12}, {**good, "time": -5.0}, {**good, "time": float("nan")}]
    odd = {**good, "time": 1001.0, "seconds": {"productive": 1.0, "data": float("nan"), "idle": 1e18}}
    lines = [good, *wrong, odd]
    run.ledger_path("a").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert LedgerReader(run).totals() == {"productive": pytest.approx(2.0)}
