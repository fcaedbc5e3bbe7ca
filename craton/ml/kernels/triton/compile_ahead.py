"""Triton: compile kernels in parallel before their first launch, where launches one after the other would take as many
times longer as there are cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, JITFunction

MAX_THREADS = 16


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, a launch compiles its kernel in the background and does not run it: outputs are what their memory held.
    At the end all kernels are compiled."""
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, warmup=True, **options)

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool, AsyncCompileMode(pool):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
