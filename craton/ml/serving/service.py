"""The engine's process: it takes what the front end sends, computes, and sends back what came of it.

One turn of the loop is one step. Whoever is in charge of the engine is heard between two steps. It ends when the front
end does, or with the reason why it cannot go on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from craton.errors import CratonError
from craton.ml.serving.engine import Engine, State
from craton.ml.serving.gang import Gang
from craton.ml.serving.messages import Abort, Answer, Control, Failed, Ready, Stats, Submit
from craton.ml.serving.settings import ServingError
from craton.ml.serving.weights import MixedWeightsError

IDLE_SECONDS = 0.05  # between two looks when there is nothing to compute
COMPILING_SECONDS = 0.002  # and when all there is waits for its grammar
STATS_SECONDS = 0.5
PARTS = ("weights", "kv_cache")  # of what sleeps


class Service:
    """An engine behind one line to a front end. `record` gets its numbers twice a second."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        gang: Gang,
        front: Connection,
        record: Callable[[Stats], None] | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._gang = gang
        self._front = front
        self._record = record
        self._next_stats = 0.0
        self._awake = set(PARTS)
        self._before_sleep: State = "running"
        self._pausing: int | None = None  # the control that waits for it
        self._controls: dict[str, Callable[..., Any]] = {
            "pause": self._pause,
            "resume": engine.resume,
            "sleep": self._sleep,
            "wake": self._wake,
            "reset_prefix_cache": self._forget,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "update_weights": self._update_weights,
            "weights_version": lambda: engine.version,
        }

    def run(self) -> None:
        """Until the front end is gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
            self._serve()

    def _serve(self) -> None:
        engine = self._engine
        self._front.send(
            Ready(self._name, engine.vocabulary, engine.max_length, tuple(engine.adapters), engine.version)
        )
        while True:
            self._hear()
            self._send(engine.step())
            if self._pausing is not None and engine.is_drained:
                self._front.send(self._control(Control(self._pausing, "pause", {"mode": "keep"})))
                self._pausing = None
            now = time.monotonic()
            if now >= self._next_stats:
                self._next_stats = now + STATS_SECONDS
                stats = engine.stats()
                self._front.send(stats)
                if self._record is not None:
                    self._record(stats)

    def _hear(self) -> None:
        """Takes in all that has come; waits a little when there is nothing to do."""
        engine = self._engine
        seconds = 0.0
        if engine.state != "running" or engine.is_idle:
            seconds = IDLE_SECONDS
        elif engine.is_still:
            seconds = COMPILING_SECONDS
        while self._front.poll(seconds):
            seconds = 0.0
            message = self._front.recv()
            if isinstance(message, Submit):
                engine.submit(message)
            elif isinstance(message, Abort):
                engine.abort(message)
            else:
                assert isinstance(message, Control)
                waits = message.name == "pause" and message.arguments.get("mode") == "wait"
                if waits and engine.state == "running" and self._pausing is None:
                    engine.stop_admitting()
                    self._pausing = message.id  # answered when all that was let in has ended
                else:
                    self._front.send(self._control(message))

    def _control(self, control: Control) -> Answer:
        action = self._controls.get(control.name)
        if action is None:
            return Answer(control.id, error=f"{control.name!r} is not known; there are: {', '.join(self._controls)}")
        try:
            return Answer(control.id, action(**control.arguments))
        except (CratonError, TypeError) as error:
            return Answer(control.id, error=str(error))
        except torch.OutOfMemoryError as error:
            return Answer(control.id, error=f"the device has not enough free memory: {str(error).splitlines()[0]}")

    def _pause(self, mode: str = "keep") -> None:
        if mode not in ("abort", "wait", "keep"):
            raise ServingError(f"mode {mode!r} is not known; allowed: abort, wait, keep")
        self._send(self._engine.pause(mode))  # type: ignore[arg-type]

    def _sleep(self, level: int = 1) -> None:
        engine = self._engine
        if engine.state == "asleep":
            raise ServingError("the engine is asleep already")
        self._before_sleep = engine.state
        if engine.state == "running":
            self._pause("keep")
        self._send(engine.release())
        self._gang.every("sleep", level)
        engine.state = "asleep"
        self._awake.clear()
        if level > 1:
            self._send(engine.refuse("the weights were let go in a deep sleep; update them first"))

    def _wake(self, tags: Sequence[str] = PARTS) -> None:
        if self._engine.state != "asleep":
            raise ServingError(f"the engine is {self._engine.state}, not asleep")
        if unknown := set(tags) - set(PARTS):
            raise ServingError(f"{', '.join(sorted(unknown))}: not a part of an engine; allowed: {', '.join(PARTS)}")
        self._gang.every("wake", tuple(tags))
        self._awake.update(tags)
        if self._awake == set(PARTS):
            self._engine.state = self._before_sleep

    def _forget(self) -> None:
        if self._engine.state == "asleep":
            raise ServingError("the engine is asleep and keeps nothing")
        self._engine.forget()

    def _load_adapter(self, name: str, folder: str) -> int:
        self._expect_weights()
        if name == self._name:
            raise ServingError(f"{name!r} is the model's own name; give the adapter another one")
        slot = int(self._gang.every("load_adapter", name, folder))
        self._engine.adapters[name] = slot
        self._engine.forget_adapter(name)
        return slot

    def _unload_adapter(self, name: str) -> None:
        self._expect_weights()
        if name not in self._engine.adapters:
            raise ServingError(
                f"adapter {name!r} is not loaded; there are: {', '.join(self._engine.adapters) or 'none'}"
            )
        self._send(self._engine.drop_adapter(name))
        self._gang.every("unload_adapter", name)

    def _update_weights(
        self, folder: str | None = None, address: str | None = None, version: int | None = None, recompute: bool = False
    ) -> Mapping[str, int]:
        """New weights in place, from a folder or from whoever sends them to an address; graphs stay valid."""
        self._expect_weights()
        if (folder is None) == (address is None):
            raise ServingError("give a folder, or an address at which the weights are to be received")
        self._send(self._engine.finish_flights())
        try:
            if folder is not None:
                self._gang.every("update_from_folder", folder)
            else:
                version = self._gang.every("receive_weights", address)
        except MixedWeightsError as error:
            self._send(self._engine.refuse(str(error)))
            raise
        self._send(self._engine.change_version(version, recompute))
        return {"version": self._engine.version}

    def _expect_weights(self) -> None:
        if "weights" not in self._awake:
            raise ServingError("the engine is asleep; wake it, or its weights alone, before they are changed")

    def _send(self, pieces: list[Any]) -> None:
        if pieces:
            self._front.send(pieces)


def tell_failure(front: Connection, reason: str) -> None:
    """The last word of an engine that cannot go on."""
    try:
        front.send(Failed(reason))
    except OSError:
        return
