"""A stand-in for the engine: a thread that speaks its messages over a real connection and answers from a script.

It computes nothing: tests of the front end say which tokens come, in which pieces, and see what the front end asked
for. The real engine has tests of its own; those of both together are elsewhere.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from openai import OpenAI
from waiting import PATIENCE_SECONDS

from craton.ml.serving.messages import (
    Abort,
    Alternatives,
    Control,
    EngineReply,
    Failed,
    OutputDelta,
    Ready,
    Reply,
    Request,
    Submit,
)
from craton.ml.serving.wire import MessageLine

SECONDS = PATIENCE_SECONDS
VOCABULARY = 320
MAX_LENGTH = 1024
NEVER = 1 << 30
ADMIN_KEY = "the-admin-key-of-these-tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}

Kind = TypeVar("Kind", Submit, Abort, Control)


@dataclass
class Script:
    """What one copy of a request gets: `tokens`, so many in a piece, and how it ends."""

    tokens: Sequence[int] = ()
    in_piece: int = 1
    finish: Any = "stop"
    stop_token: int | None = None
    error: str = ""
    cached_tokens: int = 0
    hold_at: int = NEVER  # from this token on nothing comes until the engine is released
    version: int = 7

    sent: int = field(default=0, init=False)
    taken: float = field(default_factory=time.monotonic, init=False)


class ScriptedEngine:
    """`answer` says what each request gets; `received` is all that came, in order."""

    def __init__(
        self, answer: Callable[[Submit], Script], adapters: tuple[str, ...] = (), is_ready: bool = True
    ) -> None:
        self.answer = answer
        self.control: Callable[[Control], EngineReply] = controlled
        self.received: list[Request] = []
        self.is_held = True
        self.ready = Ready("scripted", VOCABULARY, MAX_LENGTH, adapters, page=16, kv_precision="fp8", memory=0.8)
        here, there = socket.socketpair()
        self.far_end = there.detach()
        self._connection = MessageLine(Connection(here.detach()))
        self._changed = threading.Condition()
        self._running: dict[tuple[int, int], tuple[Submit, Script]] = {}
        self._wake, self._waker = os.pipe()
        self._outbox: list[Reply] = []
        self._is_closed = False
        if is_ready:
            self.send(self.ready)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, reply: Reply) -> None:
        with self._changed:
            self._outbox.append(reply)
        os.write(self._waker, b"x")

    def fail(self, reason: str) -> None:
        self.send(Failed(reason))

    def release(self) -> None:
        """What is held goes on."""
        self.is_held = False
        os.write(self._waker, b"x")

    def close(self) -> None:
        self._is_closed = True
        os.write(self._waker, b"x")
        self._thread.join(SECONDS)

    def wait_for(self, kind: type[Kind], count: int = 1, seconds: float = SECONDS) -> list[Kind]:
        """The messages of a kind, once there are so many."""

        def found() -> list[Kind]:
            return [message for message in self.received if isinstance(message, kind)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, seconds), f"{len(found())} of {count} {kind}"
            return found()

    def forget(self) -> None:
        """Begins a new test."""
        with self._changed:
            self.received.clear()
            self._running.clear()
        self.is_held = True

    def _run(self) -> None:
        while not self._is_closed:
            can_step = any(script.sent < script.hold_at or not self.is_held for _, script in self._running.values())
            readable, _, _ = select.select([self._connection, self._wake], [], [], 0 if can_step else None)
            if self._wake in readable:
                os.read(self._wake, 4096)
            with self._changed:
                outbox, self._outbox = self._outbox, []
            try:
                for reply in outbox:
                    self._connection.send(reply)
                if self._connection in readable:
                    self._take(self._connection.recv())
                pieces = [piece for key in list(self._running) if (piece := self._step(*key)) is not None]
                if pieces:
                    self._connection.send(pieces)
            except (EOFError, OSError):
                break
        self._connection.close()

    def _take(self, message: Request) -> None:
        with self._changed:
            self.received.append(message)
            self._changed.notify_all()
        if isinstance(message, Submit):
            for copy in range(message.copies):
                self._running[message.id, copy] = (message, self.answer(message))
        elif isinstance(message, Abort):
            for number, copy in list(self._running):
                if number == message.id and message.index in (None, copy):
                    del self._running[number, copy]
        else:
            self._connection.send(self.control(message))

    def _step(self, number: int, copy: int) -> OutputDelta | None:
        submit, script = self._running[number, copy]
        if script.sent >= script.hold_at and self.is_held:
            return None
        sampling = submit.sampling
        wanted = list(script.tokens[: sampling.max_tokens])
        tokens = wanted[script.sent : script.sent + script.in_piece]
        piece = OutputDelta(number, copy, tokens, [-0.5] * len(tokens), versions=[script.version] * len(tokens))
        if sampling.logprobs is not None:
            piece.alternatives = [beside(token, sampling.logprobs) for token in tokens]
        if sampling.prompt_logprobs is not None and not script.sent:
            count = sampling.prompt_logprobs
            piece.prompt_logprobs = [None, *(beside(token, count) for token in submit.prompt[1:])]
        piece.cached_tokens = script.cached_tokens
        if not script.sent:
            piece.admitted = script.taken
        script.sent += len(tokens)
        if script.sent >= len(wanted):
            is_cut = len(wanted) < len(script.tokens)
            piece.finish, piece.error = "length" if is_cut else script.finish, script.error
            piece.stop_token = None if is_cut else script.stop_token
            del self._running[number, copy]
        return piece


def beside(token: int, count: int) -> Alternatives:
    """The token with log-prob −0.5, and so many likelier and less likely ones."""
    others = [(token + place) % VOCABULARY for place in range(1, count + 1)]
    return Alternatives((token, *others), (-0.5, *(-0.25 * place for place in range(1, count + 1))))


def controlled(control: Control) -> EngineReply:
    """All controls succeed; a wake says what is still asleep."""
    result: dict[str, Any] = {"name": control.name}
    if control.name == "wake":
        missing = {
            part: "asleep" for part in ("weights", "kv_cache") if part not in control.arguments.get("tags", (part,))
        }
        result |= {"state": "asleep" if missing else "running", "missing": missing}
    return EngineReply(control.id, result)


class Served:
    """A real front end on a real port, with a scripted engine behind it."""

    def __init__(self, engine: ScriptedEngine, *options: str, environment: dict[str, str] | None = None) -> None:
        self.engine = engine
        if "--admin" in options:
            environment = {"CRATON_ADMIN_KEY": ADMIN_KEY, **(environment or {})}
        arguments = ["--connection", str(engine.far_end), "--port", "0", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "craton.ml.serving.server", *arguments],
            pass_fds=[engine.far_end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        os.close(engine.far_end)
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        assert line.startswith("listening on "), self.stop()
        self.url = line.removeprefix("listening on ").strip()

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=SECONDS)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Its exit status, and what it said."""
        _, said = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, said

    def stop(self) -> str:
        """Ends it at once."""
        self.process.kill()
        _, said = self.process.communicate(timeout=SECONDS)
        self.engine.close()
        return said


def tokens_of(folder: Path, text: str) -> list[int]:
    from craton.ml.data import load_tokenizer

    return list(load_tokenizer(folder).encode(text, add_special_tokens=False).ids)
