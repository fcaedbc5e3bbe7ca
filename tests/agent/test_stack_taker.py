"""The agent asks a rank for its stacks by an order, and by a signal only if the rank does not read its orders."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from craton.agent.processes import RankProcess
from craton.agent.stacks import RankStack, StackTaker, StuckRank
from craton.telemetry import RunDirectory

PROGRAM = """
import json, sys, threading, time
from craton.telemetry.rank import answer_stack_requests, dump_stacks

def listen():
    for line in sys.stdin:
        document = json.loads(line)
        print("order", *document, flush=True)
        if "dump" in document:
            dump_stacks()

def wait_for_data():
    while True:
        time.sleep(0.01)

assert answer_stack_requests()
if {reads}:
    threading.Thread(target=listen, daemon=True).start()
print("ready", flush=True)
wait_for_data()
"""

Start = Callable[[bool], StuckRank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a rank that makes no progress; its output goes to `log`."""
    started: list[subprocess.Popen[bytes]] = []
    stacks: list[RankStack] = []

    def start_rank(reads: bool) -> StuckRank:
        stack = RankStack()
        stacks.append(stack)
        log = tmp_path / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(reads=reads)],
                env={**os.environ, "CRATON_STACKS": str(stack.descriptor)},
                pass_fds=(stack.descriptor,),
                stdin=subprocess.PIPE,
                stdout=output,
            )
        started.append(process)
        wait_until(lambda: b"ready" in log.read_bytes(), "the rank works")
        assert process.stdin is not None
        rank = RankProcess("rank 0", process.pid, log, 0, 0.0, orders=process.stdin.fileno())
        return StuckRank(stack, rank, 1.0, "productive", 7, 3.0, is_due=True)

    yield start_rank
    for process in started:
        process.kill()
        process.communicate()
    for stack in stacks:
        os.close(stack.descriptor)


def take(rank: StuckRank, run: RunDirectory) -> None:
    seen: list[str] = []
    taker = StackTaker(run, lambda name, *_arguments, **_fields: seen.append(name))

    def is_taken() -> bool:
        taker.look([rank], time.monotonic())
        return rank.stack.is_taken

    wait_until(is_taken, "the stack is taken")
    assert "in wait_for_data" in rank.stack.frame
    assert seen == ["rank_stuck"]


def test_a_rank_that_reads_its_orders_is_asked_for_its_stacks_and_then_its_collectives(
    start: Start, tmp_path: Path
) -> None:
    rank = start(True)
    take(rank, RunDirectory.create(tmp_path, "run"))
    log = rank.process.log_path
    wait_until(lambda: "order record" in log.read_text(), "it is asked for its collectives")
    assert log.read_text().splitlines() == ["ready", "order dump", "order record"]


def test_a_rank_that_does_not_read_its_orders_gets_a_signal(start: Start, tmp_path: Path) -> None:
    rank = start(False)
    take(rank, RunDirectory.create(tmp_path, "run"))
    assert rank.stack.signalled_at > rank.stack.asked_at


def test_a_rank_that_is_about_to_be_killed_gets_the_signal_sooner(start: Start, tmp_path: Path) -> None:
    rank = start(False)
    StackTaker(RunDirectory.create(tmp_path, "run"), lambda *_arguments, **_fields: None).take_now(rank)
    assert rank.stack.is_taken
    assert rank.stack.signalled_at > rank.stack.asked_at
