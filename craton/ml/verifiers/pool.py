"""The pool of verifiers: samples in, verdicts out. No sample can stop it, harm the machine or take more than its limit.

The pool itself is a thread that waits for a supervisor process (`supervisor.py`), which starts, limits and replaces the
workers. A supervisor that is killed is started again, and its samples are verified once more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from craton.ml.verifiers.answers import UnreadableReferenceError
from craton.ml.verifiers.environment import Turn
from craton.ml.verifiers.errors import IsolationError, VerifierError
from craton.ml.verifiers.members import python_command
from craton.ml.verifiers.terms import TermCall, call_of, check_terms, group_of, term_names, weighted_sum
from craton.ml.verifiers.verdict import SampleVerdict, VerifierSample
from craton.ml.verifiers.wire import READ_BYTES, Inbox, framed

if TYPE_CHECKING:
    from craton.job.sections.posttraining import RewardTerm, VerifySection

JUDGE_WORKERS = 16  # at least, where a judge is asked: they wait for a server and need no core
SILENT_SECONDS = 60.0  # a supervisor says every few seconds that it works; one that does not is replaced
ATTEMPTS = 2  # of a sample whose supervisor died
DEATHS = 5  # of the supervisor without a result between them, after which the pool gives up
CLOSE_SECONDS = 10.0
CLOSED = "the pool was closed"


@dataclass
class _Pending:
    """A message that the supervisor has not answered, and whose answer completes what."""

    message: tuple[Any, ...]
    owner: _Sample | Episode
    call: TermCall | None = None
    attempts: int = 1


@dataclass
class _Sample:
    """A sample whose terms are being verified."""

    calls: list[TermCall]
    future: Future[SampleVerdict] = field(default_factory=lambda: _promised())
    values: dict[str, float | None] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, call: TermCall | None, reply: Mapping[str, Any], seconds: float) -> None:
        assert call is not None
        value, error = call.value(reply)
        self.values[call.name] = value
        self.errors += [error] if error else []
        self.seconds = max(self.seconds, seconds)
        if len(self.values) == len(self.calls):
            reward = weighted_sum(self.calls, self.values)
            if reward is None and not self.errors:
                self.errors.append("the weighted sum of the rewards is not finite")
            parts = {call.name: self.values[call.name] for call in self.calls}
            self.future.set_result(SampleVerdict(reward, parts, "; ".join(self.errors), self.seconds))


class Episode:
    """One episode of the environment, in a process of its own. Close it, or use it as a context manager."""

    def __init__(self, pool: VerifierPool, number: int, name: str) -> None:
        self._pool = pool
        self._name = name
        self.number = number
        self.messages: list[bytes] = []
        self.replies: list[Mapping[str, Any]] = []
        self._future: Future[Turn] = _promised()

    def reset(self, row: Mapping[str, Any]) -> Future[Turn]:
        """Begin: the turn has the prompt, None where the row's own is meant."""
        return self._ask({"what": "reset", "name": self._name, "row": dict(row)})

    def step(self, completion: str) -> Future[Turn]:
        """Answer a completion: the turn has the next text, or is the last one."""
        return self._ask({"what": "step", "name": self._name, "completion": completion})

    def close(self) -> None:
        """End the process of the episode; without effect after the first time."""
        self._pool._end_episode(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any]) -> Future[Turn]:
        assert len(self.messages) == len(self.replies), "one step of an episode at a time"
        self._future = _promised()
        self._pool._step_episode(self, pickle.dumps(request))
        return self._future

    def take(self, call: TermCall | None, reply: Mapping[str, Any], seconds: float) -> None:
        self.replies.append(reply)
        error = f"{self._name}: {reply['error']}" if reply.get("error") else ""
        is_last = bool(error) or bool(reply.get("is_last"))
        self._future.set_result(Turn(reply.get("text"), reply.get("reward"), is_last, error, seconds))


class VerifierPool:
    """Verifies samples in processes. Use it as a context manager: closing ends all of them."""

    def __init__(
        self,
        rewards: Sequence[RewardTerm],
        verify: VerifySection,
        folder: Path | None = None,
        environment: str | None = None,
        num_pools: int = 1,
    ) -> None:
        """`folder`: searched for users' modules first. Terms with a reward model are the trainer's and ignored here.
        `num_pools`: of this node, which share its workers. VerifierError if a function cannot be loaded, or if this
        machine cannot isolate what needs isolation."""
        self._terms = [term for term in rewards if term.model is None]
        check_terms(self._terms)
        self._names = term_names(self._terms)
        self._environment = environment
        self._settings = _settings(self._terms, verify, folder, environment, num_pools)
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._episodes: dict[int, Episode] = {}
        self._pids: tuple[int, ...] = ()
        self._missing = set(self._settings["groups"])  # groups without a worker that is ready
        self._is_settled = threading.Event()
        self._failure: VerifierError | None = None
        self._is_closed = False
        self._num_deaths = 0
        self._connection, self._process = self._start_supervisor()
        self._thread = threading.Thread(target=self._listen, name="verifiers", daemon=True)
        self._thread.start()
        if self._missing:
            self._is_settled.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    def verify(self, samples: Sequence[VerifierSample]) -> list[SampleVerdict]:
        """Verify samples, as many at a time as there are workers; in their order."""
        return [future.result() for future in [self.submit(sample) for sample in samples]]

    def submit(self, sample: VerifierSample, only: int | None = None) -> Future[SampleVerdict]:
        """Verify a sample in the background, by all terms or by `only` one of them. The future has a verdict whatever
        the sample does."""
        chosen = slice(None) if only is None else slice(only, only + 1)
        terms, names = self._terms[chosen], self._names[chosen]
        try:
            calls = [call_of(term, name, sample) for term, name in zip(terms, names, strict=True)]
        except UnreadableReferenceError as error:
            return _decided(SampleVerdict(None, dict.fromkeys(names), str(error)))
        owner = _Sample(calls)
        if not calls:
            return _decided(SampleVerdict(0.0))
        with self._lock:
            for call in calls:
                number = next(self._numbers)
                self._ask(number, _Pending(("task", number, call.group, call.message, call.follow_up), owner, call))
        return owner.future

    def refusal(self, row: Mapping[str, Any], only: int) -> str:
        """Return why one of the terms cannot compare anything with a row; empty: it can."""
        try:
            call_of(self._terms[only], self._names[only], VerifierSample("", "", row))
        except UnreadableReferenceError as error:
            return str(error)
        return ""

    def start_episode(self) -> Episode:
        """Return a new episode of the environment that the pool was made with."""
        assert self._environment is not None, "the pool has no environment"
        with self._lock:
            number = next(self._numbers)
            self._episodes[number] = Episode(self, number, self._environment)
            return self._episodes[number]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The processes that are ready to verify or verify now; each ends with everything that it started."""
        return self._pids

    @property
    def supervisor_pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End all processes; what was not verified gets no verdict."""
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._connection.close()
        self._pids = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step_episode(self, episode: Episode, message: bytes) -> None:
        with self._lock:
            number = next(self._numbers)
            episode.messages.append(message)
            self._ask(number, _Pending(("episode", number, episode.number, message), episode))

    def _end_episode(self, episode: Episode) -> None:
        with self._lock:
            if self._episodes.pop(episode.number, None) is not None and not self._is_closed:
                self._send(("end_episode", episode.number))

    def _ask(self, number: int, pending: _Pending) -> None:
        if self._is_closed:
            pending.owner.take(pending.call, {"error": CLOSED}, 0.0)
            return
        self._pending[number] = pending
        self._send(pending.message)

    def _send(self, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # a supervisor that is gone is replaced, and everything is sent again
            self._connection.sendall(framed(pickle.dumps(message)))

    def _start_supervisor(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        try:
            command = python_command("craton.ml.verifiers.supervisor", "start", theirs.fileno(), os.getpid())
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        finally:
            theirs.close()
        ours.sendall(framed(pickle.dumps(("settings", self._settings))))
        return ours, process

    def _listen(self) -> None:
        """Take results until the pool is closed."""
        inbox = Inbox()
        while True:
            try:
                if not _is_readable(self._connection, SILENT_SECONDS):
                    self._process.kill()  # it is stopped, or hangs: another one takes over
                data = self._connection.recv(READ_BYTES)
            except (OSError, ValueError):
                data = b""
            for message in inbox.take(data):
                what, *arguments = pickle.loads(message)
                getattr(self, f"_on_{what}")(*arguments)
            if not data:
                if not self._replace_supervisor():
                    return
                inbox = Inbox()

    def _replace_supervisor(self) -> bool:
        """Start another supervisor after one has died; False once the pool is closed."""
        with self._lock:
            self._num_deaths += 1
            if not self._is_closed and (not self._is_settled.is_set() or self._num_deaths > DEATHS):
                self._process.kill()  # it may only have closed its connection
                status = self._process.wait()
                self._failure = VerifierError(
                    f"the supervisor of the verifiers ended with status {status}; see the log"
                )
                self._is_settled.set()
                self._is_closed = True
            if self._is_closed:
                unanswered, self._pending = self._pending, {}
            else:
                self._connection.close()
                self._process.kill()
                self._process.wait()
                self._connection, self._process = self._start_supervisor()
                for episode in self._episodes.values():
                    answered = list(episode.replies)
                    self._send(("restore_episode", episode.number, episode.messages[: len(answered)], answered))
                unanswered = {}
                for number, pending in list(self._pending.items()):
                    pending.attempts += 1
                    if pending.attempts > ATTEMPTS:
                        unanswered[number] = self._pending.pop(number)
                    else:
                        self._send(pending.message)
        reason = str(self._failure or CLOSED) if self._is_closed else f"the pool's supervisor died {ATTEMPTS} times"
        for pending in unanswered.values():
            pending.owner.take(pending.call, {"error": reason}, 0.0)
        return not self._is_closed

    def _on_result(self, number: int, reply: Mapping[str, Any], seconds: float) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
            self._num_deaths = 0
        if pending is not None:
            pending.owner.take(pending.call, reply, seconds)

    def _on_alive(self) -> None:
        """It says so every few seconds, and nothing else about itself."""

    def _on_ready(self, group: str) -> None:
        self._missing.discard(group)
        if not self._missing:
            self._is_settled.set()

    def _on_given_up(self, group: str, reason: str, is_isolation: bool = False) -> None:
        """A group cannot start: a mistake of the job or the machine at first; later, its samples get the reason."""
        if not self._is_settled.is_set():
            self._failure = (IsolationError if is_isolation else VerifierError)(reason)
            self._is_settled.set()

    def _on_pids(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)


def _settings(
    terms: Sequence[RewardTerm], verify: VerifySection, folder: Path | None, environment: str | None, num_pools: int
) -> dict[str, Any]:
    workers = open_workers = int(verify.workers or len(os.sched_getaffinity(0)))
    if verify.workers is None and any(term.verifier == "judge" for term in terms):
        open_workers = max(workers, JUDGE_WORKERS)
    groups = {group_of(term) for term in terms} | ({"open"} if environment else set())
    return {
        "groups": sorted(groups),
        "verifiers": sorted({term.verifier or "" for term in terms if group_of(term) == "sealed"}),
        "functions": list(dict.fromkeys(term.python for term in terms if term.python)),
        "is_called": any(group_of(term) == "open" for term in terms),
        "environment": environment,
        "folder": str(folder) if folder is not None else "",
        "limit": float(verify.limit),
        "memory_bytes": int(verify.memory),
        "workers": -(-workers // num_pools),
        "open_workers": -(-open_workers // num_pools),
        "sandbox": verify.sandbox,
    }


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    """Wait until there is something to read, or the connection is closed. `select.select` takes no descriptor above
    1,023, which a server with many clients has."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def _promised() -> Future[Any]:
    """Return a future that cannot be cancelled. A generation that breaks off cancels everything that it awaits, and the
    pool's thread must still be able to set the result."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _decided(verdict: SampleVerdict) -> Future[SampleVerdict]:
    future: Future[SampleVerdict] = Future()
    future.set_result(verdict)
    return future
