"""Tasks in forked children, whose results are on disk, as compiled kernels are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from craton.ml.kernels.triton.compile_ahead import ForkedTasks


def compiling(file: Path) -> Callable[[], int]:
    """A task that returns the process that did the work, now or before."""

    def compiled() -> int:
        if not file.exists():
            file.write_text(str(os.getpid()))
        return int(file.read_text())

    return compiled


def test_children_do_the_work_once_and_this_process_finds_it(tmp_path: Path) -> None:
    pool = ForkedTasks(3)
    futures = [pool.submit(compiling(tmp_path / str(number))) for number in range(8)]
    assert not any(future.done() for future in futures)
    pool.finish()
    workers = {future.result() for future in futures}
    assert len(workers) == 3
    assert os.getpid() not in workers


def test_an_error_reaches_whoever_asks_and_the_other_tasks_are_done(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("out of shared memory")

    pool = ForkedTasks(1)
    failing, fine = pool.submit(fail), pool.submit(compiling(tmp_path / "fine"))
    pool.finish()
    assert fine.result() != os.getpid()
    with pytest.raises(ValueError, match="out of shared memory"):
        failing.result()


def test_a_child_that_hangs_is_killed_and_its_task_done_here(tmp_path: Path) -> None:
    parent = os.getpid()

    def hang() -> int:
        while os.getpid() != parent:
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(1.0)
        return parent

    pool = ForkedTasks(2, child_seconds=1.0)
    hanging = pool.submit(hang)
    fine = pool.submit(compiling(tmp_path / "fine"))
    pool.finish()
    assert hanging.result() == parent
    assert fine.result() > 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_without_tasks_there_is_nothing_to_do() -> None:
    ForkedTasks(4).finish()
