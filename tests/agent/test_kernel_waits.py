"""Looks at threads that sleep in the kernel, on a folder laid out as /proc is, and at real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from waiting import wait_until

from craton.agent.processes.kernel_waits import LOOK_SECONDS, MIN_LOOKS, WINDOW_SECONDS, KernelWaits
from craton.telemetry.node import sleeps_for

RANK, CHILD = 700, 701
TURN_SECONDS = 2 * LOOK_SECONDS


def thread(proc: Path, process: int, number: int, state: str, channel: str, children: str = "") -> None:
    task = proc / f"{process}/task/{number}"
    task.mkdir(parents=True, exist_ok=True)
    (task / "stat").write_text(f"{number} (py (thon) {state} 1 700 700 0 -1 4194304\n")
    (task / "wchan").write_text(channel)
    (task / "children").write_text(children)


def looked(proc: Path, looks: int = MIN_LOOKS) -> KernelWaits:
    waits = KernelWaits(proc)
    for number in range(looks):
        waits.look(RANK, 1000.0 + number * TURN_SECONDS)
    return waits


@pytest.mark.parametrize(
    ("state", "channel", "files", "memory"),
    [
        ("D", "folio_wait_bit_common", 1.0, 0.0),
        ("D", "rpc_wait_bit_killable", 1.0, 0.0),
        ("D", "0", 1.0, 0.0),  # a kernel that hides the function: most sleeps of this kind are for files
        ("D", "mem_cgroup_oom_synchronize", 0.0, 1.0),
        ("D", "__refrigerator", 0.0, 0.0),
        ("D", "wait_for_vfork_done", 0.0, 0.0),
        ("S", "folio_wait_bit_common", 0.0, 0.0),
        ("R", "0", 0.0, 0.0),
    ],
)
def test_a_thread_is_judged_by_its_state_and_the_function_it_sleeps_in(
    tmp_path: Path, state: str, channel: str, files: float, memory: float
) -> None:
    thread(tmp_path, RANK, RANK, "S", "futex_wait_queue")
    thread(tmp_path, RANK, RANK + 50, state, channel)
    waits = looked(tmp_path)
    assert (waits.file_share, waits.memory_share) == (files, memory)


def test_children_count_and_few_looks_give_no_share(tmp_path: Path) -> None:
    thread(tmp_path, RANK, RANK, "S", "do_wait", children=str(CHILD))
    thread(tmp_path, CHILD, CHILD, "D", "io_schedule")
    assert looked(tmp_path, MIN_LOOKS - 1).file_share == 0.0
    assert looked(tmp_path).file_share == 1.0


def test_old_looks_are_forgotten_and_another_process_restarts(tmp_path: Path) -> None:
    thread(tmp_path, RANK, RANK, "D", "io_schedule")
    waits = looked(tmp_path)
    thread(tmp_path, RANK, RANK, "R", "0")
    for number in range(2 * MIN_LOOKS):
        waits.look(RANK, 1000.0 + 2 * WINDOW_SECONDS + number * TURN_SECONDS)
    assert waits.file_share == 0.0
    thread(tmp_path, CHILD, CHILD, "D", "io_schedule")
    waits.look(CHILD, 1100.0)
    assert waits.file_share == 0.0, "one look says nothing"


def test_a_process_that_a_signal_stops_and_that_ends() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def state() -> str:
        return Path(f"/proc/{busy.pid}/stat").read_text().rpartition(")")[2].split()[0]

    waits = KernelWaits()
    try:
        wait_until(lambda: state() == "R", "it runs")
        for number in range(MIN_LOOKS):
            waits.look(busy.pid, number * TURN_SECONDS)
        assert (waits.memory_share, waits.stopped_share) == (0.0, 0.0)
        busy.send_signal(signal.SIGSTOP)
        wait_until(lambda: state() == "T", "it is stopped")
        for number in range(MIN_LOOKS):
            waits.look(busy.pid, WINDOW_SECONDS + number * TURN_SECONDS)
        assert waits.stopped_share >= 0.5
    finally:
        busy.kill()
        busy.wait()
    for number in range(3 * MIN_LOOKS):
        waits.look(busy.pid, 100.0 + number * TURN_SECONDS)
    assert (waits.file_share, waits.memory_share, waits.stopped_share) == (0.0, 0.0, 0.0), "it has ended"


SLEEPS = ["/bin/sh", "-c", f"{sys.executable} -c 'import time; time.sleep(600)'; true"]
LISTENS = [sys.executable, "-c", "import socket; socket.create_server(('127.0.0.1', 0)).accept()"]


@pytest.mark.parametrize(("command", "what"), [(SLEEPS, "a timer"), (LISTENS, "")])
def test_what_the_main_thread_of_a_command_sleeps_for(command: list[str], what: str) -> None:
    process = subprocess.Popen(command, start_new_session=True)
    waits, turns = KernelWaits(), count()

    def channel() -> str:
        for _ in range(MIN_LOOKS):
            waits.look(process.pid, next(turns) * TURN_SECONDS)
        return waits.sleeps_in

    try:
        wait_until(channel, "it sleeps")
        wait_until(lambda: sleeps_for(channel()) == what, lambda: f"it sleeps in {channel()}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert channel() == "", "it has ended"


def test_rare_looks_at_many_ranks_give_a_share(tmp_path: Path) -> None:
    thread(tmp_path, RANK, RANK, "D", "io_schedule")
    waits = KernelWaits(tmp_path)
    for number in range(MIN_LOOKS):
        waits.look(RANK, number * WINDOW_SECONDS)
    assert waits.file_share == 1.0
