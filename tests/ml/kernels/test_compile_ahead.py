"""Tasks in forked children, whose results are on disk, as compiled kernels are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import _async_compile

from craton.ml.kernels.triton import compile_ahead
from craton.ml.kernels.triton.compile_ahead import ForkedTasks, compiling_ahead

DEADLINE = 60.0


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


def test_a_child_that_hangs_is_killed_and_its_task_done_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, started = os.getpid(), tmp_path / "pid"
    # time passes once the child hangs
    seconds = count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds) if started.exists() else 0, sleep=time.sleep)
    monkeypatch.setattr(compile_ahead, "time", clock)

    def hang() -> int:
        while os.getpid() != parent:
            started.write_text(str(os.getpid()))
            time.sleep(1.0)
        return parent

    pool = ForkedTasks(2, child_seconds=1.0)
    hanging = pool.submit(hang)
    fine = pool.submit(compiling(tmp_path / "fine"))
    pool.finish()
    assert hanging.result() == parent
    assert fine.result() > 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.parametrize("may_fork", [True, False])
def test_an_error_of_a_step_is_not_lost_in_a_wait_for_its_kernels(may_fork: bool) -> None:
    """Out of memory, say: a start that fails must say so."""
    compiled: list[int] = []
    errors: list[Exception] = []

    def fail() -> None:
        try:
            with compiling_ahead(may_fork):
                mode = _async_compile.active_mode.get()
                assert mode is not None
                mode.submit("kernel", lambda: 5, compiled.append, lambda _: None)
                raise ValueError("out of memory")
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=fail, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert [str(error) for error in errors] == ["out of memory"]
    assert compiled == [5]


def test_without_tasks_there_is_nothing_to_do() -> None:
    ForkedTasks(4).finish()
