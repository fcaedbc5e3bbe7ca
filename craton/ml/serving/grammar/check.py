"""The engine's connection to the grammar checker process, which returns a grammar's cost or why it is refused."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from craton.ml.serving.grammar.limits import GrammarError

CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class GrammarCost:
    """The cost of compiling a grammar and following it for some tokens."""

    seconds: float  # of CPU time
    num_bytes: int


Reply = Callable[[GrammarCost | GrammarError], None]


class GrammarChecker:
    """Starts the process with the first grammar, and again after a crash. Thread-safe."""

    def __init__(self, tokenizer_folder: Path, vocabulary: int, stop_tokens: Sequence[int]) -> None:
        self._arguments = [str(tokenizer_folder), str(vocabulary), *(str(token) for token in stop_tokens)]
        self._lock = threading.Lock()
        self._waiting: dict[int, Reply] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, number: int, source: str, reply: Reply) -> None:
        """Check a grammar; `reply` gets the cost or the error, from another thread. `number`, a new one, cancels it."""
        with self._lock:
            process = self._process = self._running()
            self._waiting[number] = reply
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_read` sees the closed pipe and replies
                process.stdin.write(json.dumps({"id": number, "source": source}).encode() + b"\n")
                process.stdin.flush()

    def cancel(self, number: int) -> None:
        """Cancel a check; there is no reply."""
        with self._lock:
            if self._waiting.pop(number, None) is None or self._process is None or self._process.stdin is None:
                return
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps({"cancel": number}).encode() + b"\n")
                self._process.stdin.flush()

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            self._waiting.clear()
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        process = subprocess.Popen(
            [sys.executable, "-m", "craton.ml.serving.grammar.worker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It forks children, so libraries must not start threads in it.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._read, args=(process,), daemon=True, name="grammar-checker").start()
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            with self._lock:
                reply = self._waiting.pop(message["id"], None)
            if reply is not None and "error" in message:
                reply(GrammarError(message["error"]))
            elif reply is not None:
                reply(GrammarCost(message["seconds"], message["bytes"]))
        with self._lock:
            if self._process not in (process, None):
                return
            lost, self._waiting, self._process = self._waiting, {}, None
        for reply in lost.values():
            reply(GrammarError("the grammar checker process exited; send the request again"))
