"""A process dumps its stacks on a signal, also while it is blocked, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from craton.telemetry.rank import STACK_SIGNAL, is_answering, make_stack_file, read_stacks

SOURCE = """
import sys, time
def read():
    {line}
print("ready", flush=True)
read()
print("done", flush=True)
"""
HEAD = "from craton.telemetry.rank import answer_stack_requests\nassert answer_stack_requests()\n"


Start = Callable[..., tuple[subprocess.Popen[bytes], int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program that says "ready" and runs a line; kill what is left of it."""
    started = []

    def start_program(line: str, head: str = HEAD) -> tuple[subprocess.Popen[bytes], int]:
        program = tmp_path / "source.py"
        program.write_text(head + SOURCE.format(line=line))
        descriptor = make_stack_file()
        process = subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, "CRATON_STACKS": str(descriptor)},
            pass_fds=(descriptor,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append((process, descriptor))
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process, descriptor

    yield start_program
    for process, descriptor in started:
        process.kill()
        process.communicate()
        os.close(descriptor)


@pytest.mark.parametrize("line", ["sys.stdin.read()", "while not sys.stdin.read(): pass"])
def test_a_blocked_process_shows_where_it_is_and_goes_on(start: Start, line: str) -> None:
    process, descriptor = start(line)
    assert is_answering(process.pid)

    def is_read() -> bool:
        """Whether a new dump, which replaces the one before, shows the process in `read`."""
        os.ftruncate(descriptor, 0)
        os.kill(process.pid, STACK_SIGNAL)
        wait_until(lambda: read_stacks(os.pread(descriptor, 1 << 16, 0).decode()).frame is not None, what="the dump")
        frame = read_stacks(os.pread(descriptor, 1 << 16, 0).decode()).frame
        assert frame is not None
        assert frame.is_user
        return frame.with_source() == f"source.py:6 in read: {line}"

    wait_until(is_read, what="the process in read")
    assert is_read()
    assert process.communicate(b"x")[0] == b"done\n"
    assert process.returncode == 0


def test_a_process_that_removed_the_handler_is_left_alone(start: Start) -> None:
    head = f"{HEAD}import signal\nsignal.signal({int(STACK_SIGNAL)}, signal.SIG_DFL)\n"
    process, _ = start("sys.stdin.read()", head)
    assert not is_answering(process.pid)  # the signal would kill it
    process.communicate(b"")
    assert process.returncode == 0


DUMP = """Thread 0x01 (most recent call first):
  File "/job/source.py", line 10 in make
  File "CRATON/ml/data/loader.py", line 96 in _fill

Thread 0x02 (most recent call first):
  File "/job/background.py", line 3 in log

Current thread 0x03 (most recent call first):
  File "/usr/lib/python3.11/site-packages/x/queue.py", line 180 in get
  File "CRATON/ml/data/loader.py", line 80 in _take
""".replace("CRATON", str(Path(__file__).parents[2] / "craton"))


def test_the_frame_of_user_code_is_found_in_the_thread_that_called_it() -> None:
    frame = read_stacks(DUMP).frame
    assert str(frame) == "source.py:10 in make"


def test_a_rank_in_a_collective_waits_unless_user_code_is_inside() -> None:
    lines = DUMP[: DUMP.index("Current")].splitlines()
    inside = '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 3252 in all_reduce'
    own = '  File "/job/model.py", line 7 in forward'
    head = "Current thread 0x03 (most recent call first):"
    assert read_stacks("\n".join([*lines, head, inside, own])).is_waiting
    assert not read_stacks("\n".join([*lines, head, own, inside])).is_waiting
    assert not read_stacks(DUMP).is_waiting
    device = '  File "/venv/lib/python3.12/site-packages/torch/cuda/streams.py", line 108 in synchronize'
    assert read_stacks("\n".join([*lines, head, device])).is_waiting, "collectives are kernels there"
    assert not read_stacks("\n".join([*lines, head, own, device])).is_waiting


def test_py_spy_and_what_a_tool_added() -> None:
    by_py_spy = (
        'Process 7: python\n\nThread 7 (idle): "MainThread"\n    read (job/source.py:14)\n    run (job/main.py:2)\n'
    )
    assert str(read_stacks(by_py_spy).frame) == "source.py:14 in read"
    assert str(read_stacks(f"\n\nby py-spy:\n{by_py_spy}").frame) == "source.py:14 in read"
    assert str(read_stacks(f"{DUMP}\n\nby gdb:\nThread 1 (LWP 7):\n#0 poll ()\n").frame) == "source.py:10 in make"
    assert read_stacks("garbage\x00").frame is None
