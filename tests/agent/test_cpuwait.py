"""Seconds for which a process was kept from running, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_gang import Gang
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.processes import CpuWait
from craton.agent.processes.cpuwait import MAX_SHARE

SPIN = "while True: pass"


@pytest.fixture
def schedstat() -> None:
    try:
        Path("/proc/self/schedstat").read_text()
    except OSError as error:
        pytest.skip(f"this kernel does not count waits for a CPU: {error}")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def test_a_process_without_a_cpu_is_starved_and_one_that_sleeps_is_not(schedstat: None) -> None:
    """Two share one CPU with a third that has all of it: one would run, the other sleeps."""
    cpu = min(os.sched_getaffinity(0))
    programs = [f"import time; print('ready', flush=True)\n{what}" for what in (SPIN, SPIN, "time.sleep(600)")]
    started = [subprocess.Popen([sys.executable, "-c", each], stdout=subprocess.PIPE) for each in programs]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        _, starving, sleeping = started
        wait_until(lambda: state_of(sleeping.pid) == "S", "it sleeps: only a process with a CPU gets that far")
        for process in started:
            os.sched_setaffinity(process.pid, {cpu})
        for process in (starving, sleeping):
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        progress = time.monotonic()
        waits = {starving.pid: CpuWait(), sleeping.pid: CpuWait()}
        found = dict.fromkeys(waits, 0.0)

        def starved() -> bool:
            now = time.monotonic()
            for pid, wait in waits.items():
                found[pid] = wait.seconds(pid, progress, 1.0, now)
            return waits[starving.pid]._waited_seconds > 1.5 and found[starving.pid] > 0

        wait_until(starved, "the process that has no CPU counts as starved")
        # Of their threads alone: on a busy machine this test, in the agent's place, may not have run for a while.
        waited = {pid: wait._waited_seconds for pid, wait in waits.items()}
        assert waited[sleeping.pid] < waited[starving.pid] / 2
        assert waits[starving.pid].seconds(starving.pid, time.monotonic(), 1.0, time.monotonic()) == 0.0
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_seconds_in_which_the_agent_itself_did_not_run_count(tmp_path: Path) -> None:
    wait = CpuWait(tmp_path)  # a /proc without processes
    assert wait.seconds(1, 10.0, 4.0, 10.1) == 0.0
    assert wait.seconds(1, 10.0, 4.0, 10.3) == 0.0
    assert wait.seconds(1, 10.0, 4.0, 70.3) == pytest.approx(60.0)
    assert wait.seconds(1, 10.0, 4.0, 70.5) == pytest.approx(60.0)
    assert wait.seconds(1, 70.6, 4.0, 70.7) == 0.0, "until there is progress"


def test_waits_of_threads_and_of_children_add_up(tmp_path: Path) -> None:
    """Files as the kernel writes them: a process with two threads, and a child of it."""

    def write(*nanoseconds: int, is_ready: bool = False) -> None:
        for pid, thread, total in zip((1, 1, 2), (1, 11, 2), nanoseconds, strict=True):
            task = tmp_path / str(pid) / "task" / str(thread)
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"5 {total} 7\n")
            (task / "stat").write_text(f"{thread} (a b) {'R' if is_ready else 'S'} 1 1\n")
            (task / "children").write_text("2 " if thread == 11 else "")

    wait = CpuWait(tmp_path)
    write(0, 0, 0)
    assert wait.seconds(1, 10.0, 4.0, 10.9) == 0.0
    assert wait.seconds(1, 10.0, 4.0, 11.2) == 0.0
    write(100_000_000, 200_000_000, 50_000_000)
    assert wait.seconds(1, 10.0, 4.0, 12.2) == pytest.approx(0.35)
    write(5_000_000_000, 5_000_000_000, 5_000_000_000)
    assert wait.seconds(1, 10.0, 4.0, 13.2) == pytest.approx(MAX_SHARE * 2.0)


def test_a_thread_that_is_ready_and_gets_no_cpu_at_all_waits_all_along(tmp_path: Path) -> None:
    """The kernel adds a wait when it ends: until then nothing changes but the clock."""
    task = tmp_path / "1" / "task" / "1"
    task.mkdir(parents=True)
    (task / "schedstat").write_text("5 0 7\n")
    (task / "stat").write_text("1 (rank) R 1 1\n")
    wait = CpuWait(tmp_path)
    assert wait.seconds(1, 10.0, 4.0, 11.1) == 0.0
    assert wait.seconds(1, 10.0, 4.0, 12.1) == pytest.approx(MAX_SHARE * 1.0)
    (task / "stat").write_text("1 (rank) S 1 1\n")
    assert wait.seconds(1, 10.0, 4.0, 13.1) == pytest.approx(1.0), "one that sleeps does not wait for a CPU"


STARVES = """
for step in range(1, 7):
    print(f"step {step}", flush=True)
    time.sleep(0.1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
end = time.monotonic() + 6.0
while time.monotonic() < end:
    pass
print("step 7", flush=True)
"""
NUM_HOGS = 8


def test_a_slow_step_of_a_rank_that_gets_no_cpu_is_no_hang(gang: Gang, schedstat: None) -> None:
    """A step of 6 s after steps of 0.1 s, where 4 s without progress are a hang. Other processes have the CPU, each in
    a session of its own: Linux may share a CPU between sessions first."""
    progress = {"patterns": [r"step (?P<step>\d+)"], "rank": 0, "has_steps": True, "hang_times": 3.0, "hang_seconds": 0}
    gang.launch(STARVES, progress=progress, tries=0)
    cpu = min(os.sched_getaffinity(0))
    command = [
        sys.executable,
        "-c",
        f"import os; os.sched_setaffinity(0, {{{cpu}}}); print('ready', flush=True)\n{SPIN}",
    ]
    hogs = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(NUM_HOGS)]
    try:
        for hog in hogs:
            assert hog.stdout is not None
            assert hog.stdout.readline() == b"ready\n"
        assert gang.start().wait(PATIENCE_SECONDS) == 0, gang.run.marker_text("FATAL")
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert gang.event_names().count("generation_started") == 1
