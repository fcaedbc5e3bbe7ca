"""`python -m craton.ml.serving.grammar.worker FOLDER VOCABULARY STOP…`: checks grammars before the engine uses them.

A compiled grammar cannot be sent to another process, and a compilation cannot be stopped from inside its process. So
each grammar is first compiled here, in a child process with limits on time and memory that can be killed, and followed
for some tokens. The engine compiles only grammars that passed.

Requests are JSON lines: {"id", "source"}, or {"cancel": id}; replies are {"id", "seconds", "bytes"} or {"id", "error"}.
Two children run at a time: a quick lane for new grammars and a slow lane for those that take longer. So slow grammars
wait for each other, and quick ones do not wait for them.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craton.formatting import duration, setting
from craton.ml.serving.grammar.limits import (
    MAX_BYTES,
    MAX_MASK_SECONDS,
    MAX_SECONDS,
    MAX_WAIT_SECONDS,
    QUICK_CPU_SECONDS,
    QUICK_SECONDS,
    TRIED_TOKENS,
    parser_limits,
)

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NICENESS = 10  # the engine's steps come first
PR_SET_PDEATHSIG = 1  # linux/prctl.h
READ_BYTES = 1 << 16


@dataclass
class Trial:
    """The check of one grammar."""

    id: int
    source: str
    pid: int = 0
    pipe: int = -1
    check_at: float = 0.0
    deadline: float = 0.0
    answer: bytes = b""


class GrammarLane:
    """A queue of grammars that are checked one after the other, each for up to `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waiting: deque[Trial] = deque()
        self.running: Trial | None = None


class Worker:
    """Reads requests and checks grammars until its input ends."""

    def __init__(self, tokenizer: LLTokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._quick, self._slow = GrammarLane(QUICK_SECONDS), GrammarLane(MAX_WAIT_SECONDS)
        self._selector = selectors.DefaultSelector()
        self._input = b""

    def run(self) -> None:
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in self._selector.select(self._patience())}
            if 0 in ready and not self._read():
                break
            for lane in (self._quick, self._slow):
                trial = lane.running
                if trial is not None and trial.pipe in ready:
                    self._take(lane, trial)
                elif trial is not None and time.monotonic() >= trial.check_at:
                    self._check(lane, trial)
                if lane.running is None and lane.waiting:
                    self._begin(lane, lane.waiting.popleft())
        for lane in (self._quick, self._slow):
            if lane.running is not None:
                self._end(lane, lane.running)

    def _patience(self) -> float | None:
        checks = [lane.running.check_at for lane in (self._quick, self._slow) if lane.running is not None]
        return max(min(checks) - time.monotonic(), 0.0) if checks else None

    def _read(self) -> bool:
        """Read requests; return False at the end of the input."""
        data = os.read(0, READ_BYTES)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "cancel" in message:
                self._cancel(message["cancel"])
            else:
                self._quick.waiting.append(Trial(message["id"], message["source"]))
        return bool(data)

    def _cancel(self, number: int) -> None:
        for lane in (self._quick, self._slow):
            lane.waiting = deque(trial for trial in lane.waiting if trial.id != number)
            if lane.running is not None and lane.running.id == number:
                self._end(lane, lane.running)

    def _begin(self, lane: GrammarLane, trial: Trial) -> None:
        reading, writing = os.pipe()
        trial.pid = os.fork()
        if trial.pid == 0:
            try:
                os.close(reading)
                os.write(writing, json.dumps(self.try_out(trial.source)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        trial.pipe, trial.answer = reading, b""
        now = time.monotonic()
        trial.check_at, trial.deadline = now + lane.seconds, now + MAX_WAIT_SECONDS
        lane.running = trial
        self._selector.register(reading, selectors.EVENT_READ)

    def _take(self, lane: GrammarLane, trial: Trial) -> None:
        """Read a child's reply and forward it; a child that ends without one exceeded a limit."""
        data = os.read(trial.pipe, READ_BYTES)
        trial.answer += data
        if data:
            return
        answer = trial.answer
        status = self._end(lane, trial)
        if answer:
            _send({"id": trial.id, **json.loads(answer)})
            return
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        limit = f"{MAX_SECONDS} s of CPU time" if is_late else f"{MAX_BYTES >> 20} MiB of memory"
        _send({"id": trial.id, "error": f"compiling it takes more than {limit}; simplify it"})

    def _check(self, lane: GrammarLane, trial: Trial) -> None:
        """End a child whose time is over; in the quick lane, only once it has had QUICK_CPU_SECONDS of CPU time."""
        now = time.monotonic()
        if lane is self._quick and now < trial.deadline and _cpu_seconds(trial.pid) < QUICK_CPU_SECONDS:
            trial.check_at = now + QUICK_CPU_SECONDS
            return
        self._end(lane, trial)
        if lane is self._quick:
            self._slow.waiting.append(trial)
        else:
            _send({"id": trial.id, "error": f"compiling it takes more than {setting(MAX_WAIT_SECONDS)}; simplify it"})

    def _end(self, lane: GrammarLane, trial: Trial) -> int:
        """Kill the child if it still runs; return its exit status."""
        lane.running = None
        self._selector.unregister(trial.pipe)
        os.close(trial.pipe)
        os.kill(trial.pid, signal.SIGKILL)
        return os.waitpid(trial.pid, 0)[1]

    def try_out(self, source: str, limited: bool = True) -> dict[str, Any]:
        """In a child: compile the grammar and follow it for some tokens; return its cost or its error."""
        from llguidance import LLMatcher

        if limited:
            _limit_this_process()
        before = _memory_bytes()[1]
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=parser_limits())
        mask = (ctypes.c_int32 * -(-self._vocabulary // 32))()
        state = 1
        for _ in range(TRIED_TOKENS):
            if matcher.is_error():
                return {"error": matcher.get_error().strip()[:2000]}
            if matcher.is_stopped():
                break
            began = time.thread_time()
            matcher.unsafe_compute_mask_ptr(ctypes.addressof(mask), ctypes.sizeof(mask))
            if (seconds := time.thread_time() - began) > MAX_MASK_SECONDS:
                return {
                    "error": f"computing its next tokens takes {duration(seconds)}; the limit is "
                    f"{setting(MAX_MASK_SECONDS)}; simplify it"
                }
            allowed = [
                32 * word + bit for word, bits in enumerate(mask) if bits for bit in range(32) if bits >> bit & 1
            ]
            if not allowed:
                break
            state = state * 48271 % 2147483647  # a fixed sequence of choices
            matcher.try_consume_tokens([allowed[state % len(allowed)]])
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"seconds": used.ru_utime + used.ru_stime, "bytes": max(_memory_bytes()[1] - before, 0)}


def _limit_this_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    wanted = {
        resource.RLIMIT_AS: _memory_bytes()[0] + MAX_BYTES,
        resource.RLIMIT_CPU: MAX_SECONDS,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in wanted.items():
        hard = resource.getrlimit(kind)[1]
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lower, lower))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # keep out-of-memory messages out of the run's log


def _memory_bytes() -> tuple[int, int]:
    """Return (address space, resident memory) of this process."""
    size, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a child; infinite without /proc, so that only elapsed time counts."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _send(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def main(arguments: Sequence[str]) -> int:
    from llguidance import LLTokenizer

    from craton.ml.data import load_tokenizer

    folder, vocabulary, *stops = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the server ends its workers
    os.nice(NICENESS)
    text = load_tokenizer(Path(folder)).to_str()
    tokenizer = LLTokenizer(text, n_vocab=int(vocabulary), eos_token=[int(stop) for stop in stops])
    worker = Worker(tokenizer, int(vocabulary))
    worker.try_out(
        r'%llguidance {} start: "a"', limited=False
    )  # exclude the library's one-time setup from the first cost
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
