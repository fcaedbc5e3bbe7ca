"""A run on a machine whose wall clock jumps by an hour, forwards and back, with real agents and ranks.

Setting the clock of the machine would disturb everybody on it. So a `sitecustomize` in the environment of agents and
ranks adds to `time.time()` what a file says, which changes while they run; the test reads the run with the same clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_gang import Gang
from waiting import PATIENCE_SECONDS, wait_until

from craton.telemetry import summarize
from craton.telemetry.files import read_lines
from craton.telemetry.node import read_heartbeat
from craton.telemetry.rank import LedgerReader

HOUR = 3600.0
SITECUSTOMIZE = """
import os, time
_wall_time = time.time
def _shifted():
    with open(os.environ["CLOCK_SHIFT"]) as file:
        return _wall_time() + float(file.read())
time.time = _shifted
"""
RANK = """
say("ready")
wait_for("end")
"""


@pytest.fixture
def jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets by how much all clocks are off."""
    path, site = tmp_path / "shift", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("CLOCK_SHIFT", str(path))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    real = time.time

    def shift(seconds: float) -> None:
        (tmp_path / "shift.new").write_text(str(seconds))
        os.replace(tmp_path / "shift.new", path)

    shift(0.0)
    monkeypatch.setattr("time.time", lambda: real() + float(path.read_text()))
    return shift


def lives_through(gang: Gang, jump: Callable[[float], None], seconds: float) -> None:
    """Jumps, and looks until the agent has beaten and booked with the new clock: never is it lost."""
    book = gang.run.ledger_path("node-0")
    jump(seconds)
    beats, lines = {_moment(gang)}, len(read_lines(book)[0])

    def has_gone_on() -> bool:
        assert summarize(gang.run).state == "running"
        beats.add(_moment(gang))
        return len(beats) >= 3 and len(read_lines(book)[0]) >= lines + 2

    wait_until(has_gone_on, f"the run goes on after its clocks were set to {seconds:+.0f} s")


def _moment(gang: Gang) -> float:
    beat = read_heartbeat(gang.run, "node-0")
    assert beat is not None
    return beat.moment


def test_jumps_of_the_clock_lose_no_run_and_no_second(gang: Gang, jump: Callable[[float], None]) -> None:
    began = time.monotonic()
    gang.launch(RANK, tries=3)
    agent = gang.start()
    gang.said("ready", 0)
    ready = time.monotonic()
    wait_until(lambda: summarize(gang.run).state == "running", "the run is seen")
    lives_through(gang, jump, HOUR)
    lives_through(gang, jump, -HOUR)
    assert abs(_moment(gang) - time.time()) < HOUR / 2, "others see the clock as it is now"

    (gang.folder / "ready-0").unlink()
    agent.kill()
    killed = time.monotonic()
    agent.wait()
    jump(2 * HOUR)
    second = gang.start()
    gang.said("ready", 0)
    without_agent = time.monotonic() - killed
    lives_through(gang, jump, 0.0)
    least = time.monotonic() - ready - without_agent
    gang.tell("end")
    assert second.wait(PATIENCE_SECONDS) == 0
    elapsed = time.monotonic() - began

    totals = LedgerReader(gang.run).totals()
    assert least - 2.0 <= sum(totals.values()) <= elapsed, totals
    assert totals.get("idle", 0.0) < HOUR / 2
    booked = [sum(line["seconds"].values()) for line in read_lines(gang.run.ledger_path("node-0"))[0]]
    assert sum(booked) == pytest.approx(sum(totals.values()), abs=0.1)
    for path in (gang.run.path / "generations").glob("[0-9]*.json"):
        made = json.loads(path.read_text())
        if made["broke_at"]:
            assert 0.0 <= made["time"] - made["broke_at"] <= elapsed
