"""A full, read-only or vanished run directory does not end a run; what it has to say is written when there is room."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_gang import Gang, is_alive
from mounting import bind_read_only
from waiting import PATIENCE_SECONDS, wait_until

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.telemetry import summarize
from craton.telemetry.files import read_lines
from craton.telemetry.node import read_heartbeat
from craton.telemetry.rank import LedgerReader

# A rank that records and prints steps until it is told to end; it dies of the first error, as most programs do. What it
# says to the test goes to a folder beside the disk.
STEPS = """
from craton.telemetry.rank import Recorder
HERE = pathlib.Path(os.environ["BESIDE"])
recorder = Recorder.from_environment()
step = 0
while not (HERE / "go").exists():
    step += 1
    recorder.metrics(step, run_loss=1.0 / step)
    print(f"step {step} is done", flush=True)
    if step in (10, 200):
        say("stepped", str(step))
    time.sleep(0.005)
say("last", str(step))
"""


class FullDisk:
    """A run whose directory is alone on a small file system, and a folder beside it."""

    def __init__(self, disk: Path, beside: Path) -> None:
        self.disk, self.beside = disk, beside
        self.gang = Gang(disk)
        self.run = self.gang.run
        self.gang.folder = beside  # for what the agent prints

    def start(self, **settings: object) -> subprocess.Popen[bytes]:
        self.gang.launch(STEPS, env={"BESIDE": str(self.beside)}, **settings)
        return self.gang.start()

    def said(self, name: str, text: str) -> None:
        path = self.beside / f"{name}-0"
        wait_until(lambda: path.exists() and path.read_text() == text, f"the rank says {name} {text}")

    def fill(self) -> None:
        with open(self.disk / "filler", "ab", buffering=0) as filler:
            while True:
                try:
                    filler.write(b"\0" * 4096)
                except OSError:
                    return

    def wait_for_trouble(self) -> None:
        """Until lines wait: at first they fit into blocks that files have already."""
        wait_until(
            lambda: (beat := read_heartbeat(self.run, "node-0")) and beat.trouble, "the heartbeat tells of the disk"
        )

    def make_room(self) -> None:
        (self.disk / "filler").unlink()

    def steps(self) -> list[int]:
        lines, _ = read_lines(self.run.metrics_path("node-0"))
        return [line["step"] for line in lines if line["rank"] == 0]


@pytest.fixture
def full(small_disk: Path, tmp_path: Path) -> Iterator[FullDisk]:
    beside = tmp_path / "beside"
    beside.mkdir()
    made = FullDisk(small_disk, beside)
    yield made
    made.gang.end()
    if (small_disk / "run").is_mount():
        subprocess.run(["umount", str(small_disk / "run")], check=True)


def test_a_run_outlives_a_full_disk_and_its_record_is_whole_afterwards(full: FullDisk) -> None:
    agent = full.start()
    full.said("stepped", "10")
    full.fill()
    full.said("stepped", "200")  # it records and prints all the while
    full.wait_for_trouble()
    summary = summarize(full.run)
    assert summary.state == "running"
    assert f"the file system of {full.run.path} is full: 0 B are free" in summary.storage
    assert "remove files" in summary.storage
    assert "wait in memory" in summary.storage
    assert agent.poll() is None
    full.make_room()
    (full.beside / "go").touch()
    assert agent.wait(PATIENCE_SECONDS) == 0
    assert full.run.has("DONE")
    last = int((full.beside / "last-0").read_text())
    assert full.steps() == list(range(1, last + 1))
    assert full.run.log_path(0).read_text() == "".join(f"step {step} is done\n" for step in range(1, last + 1))
    names = full.gang.event_names()
    assert names.index("storage_failed") < names.index("storage_restored") < names.index("agent_ended")
    assert full.gang.events()[-1]["lost_lines"] == 0
    assert summarize(full.run).storage == ""
    moments = [event["time"] for event in full.gang.events()]
    assert sum(LedgerReader(full.run).totals().values()) == pytest.approx(moments[-1] - moments[0], rel=0.02, abs=0.3)


def test_a_run_that_ends_on_a_full_disk_is_done_once_there_is_room(full: FullDisk) -> None:
    agent = full.start()
    full.said("stepped", "10")
    full.fill()
    full.wait_for_trouble()
    (full.beside / "go").touch()
    wait_until(lambda: (full.beside / "last-0").exists(), "the rank ends")
    rank = next(event["pid"] for event in full.gang.events() if event["event"] == "rank_started")
    wait_until(lambda: not is_alive(rank), "and is gone")
    wait_until(lambda: full.run.has("DONE"), "the marker needs no room")
    assert agent.poll() is None, "its last records wait"
    full.make_room()
    assert agent.wait(PATIENCE_SECONDS) == 0
    # There may be room again before the agent records its end.
    assert sorted(full.gang.event_names()[-2:]) == ["agent_ended", "storage_restored"]
    assert full.steps() == list(range(1, int((full.beside / "last-0").read_text()) + 1))
    assert summarize(full.run).state == "done"


def test_an_agent_that_waits_for_room_in_vain_ends_when_asked_and_says_what_was_lost(full: FullDisk) -> None:
    agent = full.start()
    full.said("stepped", "10")
    full.fill()
    full.wait_for_trouble()
    (full.beside / "go").touch()
    wait_until(lambda: full.run.has("DONE"), "the run is done")
    full.gang.agents[0].send_signal(signal.SIGTERM)
    agent.wait(PATIENCE_SECONDS)
    summary = summarize(full.run)
    assert summary.state == "done"
    assert f"the file system of {full.run.path} is full" in summary.storage


def test_what_a_killed_agent_said_of_its_disk_is_not_repeated_once_there_is_room(full: FullDisk) -> None:
    agent = full.start()
    full.said("stepped", "10")
    full.fill()
    full.wait_for_trouble()
    full.run.mark("STOP")  # its text finds no room
    agent.kill()
    agent.wait()
    later = os.stat(full.run.heartbeat_path("node-0")).st_mtime + 3600.0
    summary = summarize(full.run, now=later)
    assert summary.state == "stopped"
    assert summary.message == "the agent of node-0 exited without a report while the run stopped"
    assert f"the file system of {full.run.path} is full" in summary.storage
    full.make_room()
    for now in (None, later):
        told = summarize(full.run, now=now).storage
        assert "of the run's records were dropped while its disk accepted none" in told
        assert "full" not in told
        assert "goes on" not in told
    verdict = diagnose(take_snapshot(full.run, now=later))
    assert "full" not in verdict.sentence, verdict.sentence


def test_a_failure_on_a_full_disk_is_recovered_from_once_there_is_room(full: FullDisk) -> None:
    agent = full.start(early_seconds=0.0)
    full.said("stepped", "10")
    full.fill()
    full.wait_for_trouble()
    rank = next(event["pid"] for event in full.gang.events() if event["event"] == "rank_started")
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: not is_alive(rank), "the rank is gone")
    (full.beside / "stepped-0").unlink()
    wait_until(lambda: "cannot write generation 2" in full.gang.errors(), "the next generation waits")
    assert agent.poll() is None
    full.make_room()
    full.said("stepped", "10")
    assert full.run.generation_path(2).exists()
    (full.beside / "go").touch()
    assert agent.wait(PATIENCE_SECONDS) == 0
    assert "generation_unwritten" in full.gang.event_names()
    assert not list(full.run.path.glob("generations/.*")), "nothing half-written is left"


def test_a_read_only_run_directory_does_not_end_a_run(full: FullDisk) -> None:
    agent = full.start()
    full.said("stepped", "10")
    wait_until(lambda: summarize(full.run).state == "running", "the first steps are recorded")
    bind_read_only(full.run.path)
    full.said("stepped", "200")
    (full.beside / "go").touch()
    rank = next(event["pid"] for event in full.gang.events() if event["event"] == "rank_started")
    wait_until(lambda: not is_alive(rank), "the rank ends")
    summary = summarize(full.run, now=os.stat(full.run.heartbeat_path("node-0")).st_mtime + 3600.0)
    assert summary.state == "running", "the agent lives, however old its heartbeat is"
    assert "is read-only: make its file system writable again" in summary.storage
    assert agent.poll() is None
    subprocess.run(["umount", str(full.run.path)], check=True)
    assert agent.wait(PATIENCE_SECONDS) == 0
    assert summarize(full.run).state == "done"


def test_another_run_in_the_place_of_a_vanished_one_is_left_alone(gang: Gang) -> None:
    gang.launch('say("ready"); wait_for("never")')
    agent = gang.start()
    pid = int(gang.said("ready", 0))
    shutil.rmtree(gang.run.path)
    gang.run.path.mkdir()
    assert agent.wait(PATIENCE_SECONDS) == 1
    assert not is_alive(pid)
    assert list(gang.run.path.iterdir()) == []
    assert f"the run directory {gang.run.path} is gone" in gang.errors()


def test_the_log_of_an_agent_may_be_on_the_full_disk_too(full: FullDisk) -> None:
    full.gang.launch(STEPS, env={"BESIDE": str(full.beside)})
    full.gang.folder = full.run.path / "logs"
    agent = full.gang.start()
    full.said("stepped", "10")
    full.fill()
    full.wait_for_trouble()
    full.make_room()
    (full.beside / "go").touch()
    assert agent.wait(PATIENCE_SECONDS) == 0
    said = full.gang.errors()
    assert said.index("is full") < said.index("accepts records again")
