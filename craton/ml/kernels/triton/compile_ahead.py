"""Triton: compile kernels on all cores before their first launch; launches compile one after the other.

Most of a compilation holds Python's lock, so threads gain little. Forked children compile into Triton's cache on disk,
and this process reads it. A child uses neither the GPU nor any lock of another thread that it does not take over. A
fork moves pages that a network adapter writes to on some kernels, so a rank of several uses threads.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from triton import AsyncCompileMode, JITFunction

MAX_WORKERS = 16
CHILD_SECONDS = 120.0  # a child that takes longer hangs, and this process compiles what it has not
POLL_SECONDS = 0.01


@contextmanager
def compiling_ahead(may_fork: bool) -> Iterator[None]:
    """Inside, a launch notes its kernel and does not run it: outputs are what their memory held. At the end all kernels
    are compiled, also those of a step that failed."""
    run, submit = JITFunction.run, JITFunction._do_compile
    workers = min(MAX_WORKERS, os.cpu_count() or 1)

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, warmup=True, **options)

    def submit_once(kernel: Any, key: Any, signature: Any, device: int, *others: Any) -> Any:
        """Until it is compiled, the cache has its future: a launch that finds none hashes the source again."""
        future = kernel.device_caches[device][0][key] = submit(kernel, key, signature, device, *others)
        return future

    with ForkedTasks(workers) if may_fork else ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool):
        JITFunction.run, JITFunction._do_compile = compile_only, submit_once
        try:
            yield
        finally:
            JITFunction.run, JITFunction._do_compile = run, submit
            if isinstance(pool, ForkedTasks):  # also after an error: the mode waits for what was submitted
                pool.finish()


class ForkedTasks(Executor):
    """Tasks that leave their result on disk: `finish` runs them in children, then here, where they find it."""

    def __init__(self, workers: int, child_seconds: float = CHILD_SECONDS) -> None:
        self._workers, self._child_seconds = workers, child_seconds
        self._tasks: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.append((lambda: task(*arguments, **options), future))
        return future

    def finish(self) -> None:
        tasks = [task for task, _ in self._tasks]
        children = [_fork(share) for start in range(self._workers) if (share := tasks[start :: self._workers])]
        deadline = time.monotonic() + self._child_seconds
        for child in children:
            _wait(child, deadline)
        for task, future in self._tasks:
            try:
                future.set_result(task())
            except Exception as error:  # noqa: BLE001 - `Future.result` raises it
                future.set_exception(error)
        self._tasks = []


def _fork(tasks: list[Callable[[], Any]]) -> int:
    """Return the process that runs these tasks. One that fails is left to this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, because there are other threads
        child = os.fork()
    if child:
        return child
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        for task in tasks:
            with suppress(Exception):
                task()
    finally:
        os._exit(0)


def _wait(child: int, deadline: float) -> None:
    """Wait until a child ends; kill it at the deadline."""
    with suppress(ChildProcessError):
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return
            time.sleep(POLL_SECONDS)
