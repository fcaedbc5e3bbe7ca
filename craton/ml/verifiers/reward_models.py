"""A reward model in a process of its own, which has torch: samples in, verdicts out. Nothing here needs torch.

The process scores all texts that wait together, and is started again when it dies; what it had not scored is sent
once more. One that scores nothing for the limit of a sample is replaced, and the sample has no verdict: a process that
hangs or cannot start costs each sample its limit, and its owner nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import selectors
import socket
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, Self

from craton.formatting import duration
from craton.ml.verifiers.errors import VerifierError
from craton.ml.verifiers.members import python_command
from craton.ml.verifiers.supervisor import signal_name
from craton.ml.verifiers.verdict import SampleVerdict, VerifierSample
from craton.ml.verifiers.wire import Channel

PROCESS_MODULE = "craton.ml.posttraining.reward_process"
ATTEMPTS = 2  # of a sample whose process died
START_SECONDS = 900.0  # for the weights of a large model
FIRST_PAUSE_SECONDS = 1.0  # before the third start in a row without a score between them, then twice as long each time
MAX_PAUSE_SECONDS = 60.0
END_SECONDS = 10.0  # that a kill may take
CLOSED = "the reward model was closed"

logger = logging.getLogger("craton.serving")


@dataclass(frozen=True)
class RewardModelSetup:
    """Where the model is and how it runs. `chat_folder`: with the chat template. `memory_share`: of the GPU's memory;
    None: it runs on the CPU, in fp32."""

    folder: str
    chat_folder: str | None = None
    limit_seconds: float = 10.0  # of a sample
    memory_share: float | None = None
    precision: Literal["fp32", "bf16"] = "bf16"  # on a GPU


@dataclass(eq=False)
class _Text:
    """A sample that has no score yet."""

    message: bytes
    future: Future[SampleVerdict]
    submitted: float  # monotonic
    attempts: int = 0


class RewardModelProcess:
    """Scores samples. Use it as a context manager: closing it ends the process. Only its thread changes its state."""

    def __init__(self, name: str, setup: RewardModelSetup, weight: float = 1.0) -> None:
        """Return once the model is loaded; VerifierError if it cannot be. `name`: in errors and verdicts."""
        self._name, self._setup, self._weight = name, setup, weight
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._new: deque[_Text] = deque()
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._texts: dict[int, _Text] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._is_ready = False
        self._started_at = self._start_at = 0.0
        self._scored_at = 0.0  # the last sign that it works
        self._num_deaths = 0  # without a score between them
        self._problem = ""  # why it was started again
        self._load_error = ""
        self._failure: VerifierError | None = None
        self._is_settled = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"reward model {name}", daemon=True)
        self._thread.start()
        self._is_settled.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    def submit(self, sample: VerifierSample) -> Future[SampleVerdict]:
        """Score a sample in the background. The future has a verdict whatever happens, and cannot be cancelled."""
        future: Future[SampleVerdict] = Future()
        future.set_running_or_notify_cancel()
        message = json.dumps({"prompt": sample.prompt, "completion": sample.completion}, default=str).encode()
        with self._lock:
            if not self._is_closed:
                self._new.append(_Text(message, future, time.monotonic()))
                self._wake()
                return future
        future.set_result(self._failed(CLOSED))
        return future

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def close(self) -> None:
        """End the process; what was not scored gets no verdict."""
        with self._lock:
            self._is_closed = True
            self._wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: it has ended
            self._waker.send(b"x")

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                if self._process is None and time.monotonic() >= self._start_at:
                    self._start()
                self._selector.select(self._timeout())
                self._receive()
                self._send_new()
                self._end_late(time.monotonic())
        finally:
            self._end_process(is_hung=True)
            with self._lock:
                self._is_closed = True
                unanswered = [*self._texts.values(), *self._new]
            for text in unanswered:
                text.future.set_result(self._failed(CLOSED))
            self._selector.close()
            self._wakes.close()
            self._waker.close()
            self._is_settled.set()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            command = python_command(PROCESS_MODULE, "start", theirs.fileno(), os.getpid(), asdict(self._setup))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        except OSError as error:  # the machine has no memory or no processes left
            ours.close()
            self._note_death(f"its process cannot be started: {error}", was_ready=False)
            return
        finally:
            theirs.close()
        self._channel, self._load_error = Channel(ours), ""
        self._selector.register(ours, selectors.EVENT_READ)
        self._started_at = time.monotonic()

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(1 << 12)
        if self._channel is None:
            return
        self._channel.flush()
        messages = self._channel.receive()
        for message in messages or ():
            self._take(json.loads(message))
        if messages is None:
            self._lose()

    def _take(self, message: dict[str, Any]) -> None:
        if "number" not in message:
            if error := message.get("error"):
                self._load_error = str(error)
                return
            self._is_ready, self._problem = True, ""
            self._is_settled.set()
            for waiting, sample in self._texts.items():
                self._send(waiting, sample)
            return
        self._scored_at, self._num_deaths = time.monotonic(), 0
        number = int(message["number"])
        if number not in self._texts:  # it was late
            return
        text = self._texts.pop(number)
        score = message.get("score")
        if score is None:
            text.future.set_result(self._failed(str(message.get("error"))))
        else:
            seconds = self._scored_at - text.submitted
            text.future.set_result(SampleVerdict(self._weight * score, {self._name: score}, "", seconds))

    def _send_new(self) -> None:
        with self._lock:
            texts = list(self._new)
            self._new.clear()
        for text in texts:
            number = next(self._numbers)
            self._texts[number] = text
            if self._is_ready:
                self._send(number, text)

    def _send(self, number: int, text: _Text) -> None:
        assert self._channel is not None
        text.attempts += 1
        self._channel.send(json.dumps({"number": number}).encode() + b"\n" + text.message)

    def _end_late(self, now: float) -> None:
        """Fail what has waited for its limit, and replace a process that hangs."""
        late = [number for number, text in self._texts.items() if self._deadline(text) <= now]
        was_sent = any(self._texts[number].attempts for number in late)
        reason = self._problem or ("its process hangs or is too slow" if self._is_ready else "its process is starting")
        for number in late:
            limit = duration(self._setup.limit_seconds)
            self._texts.pop(number).future.set_result(self._failed(f"no score within verify.limit, {limit}: {reason}"))
        is_stuck = not self._is_ready and now > self._started_at + START_SECONDS
        if self._process is not None and ((self._is_ready and was_sent) or is_stuck):
            waited = START_SECONDS if is_stuck else self._setup.limit_seconds
            self._lose(f"its process did not answer for {duration(waited)}")

    def _lose(self, problem: str = "") -> None:
        """End the process, or note its end; start another one."""
        was_ready = self._is_ready
        status = self._end_process(is_hung=bool(problem))
        ended = f"by {signal_name(-status)}" if status is not None and status < 0 else f"with status {status}"
        self._note_death(problem or self._load_error or f"its process ended {ended}", was_ready)

    def _note_death(self, problem: str, was_ready: bool) -> None:
        self._problem = problem
        self._num_deaths += 1
        if not self._is_settled.is_set():
            self._failure = VerifierError(f"{self._name}: {problem}")
            self._is_closed = True
            return
        pauses = max(0, self._num_deaths - 1) if was_ready else self._num_deaths
        pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (pauses - 1)) if pauses else 0.0
        self._start_at = time.monotonic() + pause
        logger.warning("reward model %s: %s; it is started again", self._name, problem)
        for number, text in list(self._texts.items()):
            if text.attempts >= ATTEMPTS:
                error = f"its process ended in {text.attempts} attempts; the last time, {problem}"
                self._texts.pop(number).future.set_result(self._failed(error))

    def _end_process(self, is_hung: bool) -> int | None:
        """Wait for the end of the process, or kill it; return its status, None if it does not end."""
        if self._channel is not None:
            self._selector.unregister(self._channel.connection)
            self._channel.close()
        process, self._process, self._channel, self._is_ready = self._process, None, None, False
        if process is None:
            return None
        if is_hung:
            process.kill()
        try:
            return process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return None

    def _deadline(self, text: _Text) -> float:
        return max(text.submitted, self._scored_at) + self._setup.limit_seconds

    def _timeout(self) -> float | None:
        """Return how long nothing has to be looked at."""
        moments = [self._deadline(text) for text in self._texts.values()]
        if self._process is None:
            moments.append(self._start_at)
        elif not self._is_ready:
            moments.append(self._started_at + START_SECONDS)
        if self._channel is not None and self._channel.has_unsent:
            moments.append(time.monotonic() + 0.01)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _failed(self, error: str) -> SampleVerdict:
        return SampleVerdict(None, {self._name: None}, f"{self._name}: {error}")
