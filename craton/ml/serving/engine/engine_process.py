"""The engine's process: receives requests from the front end, runs steps, and sends outputs back.

One iteration of the loop is one step; admin controls are handled between steps. A control may take minutes (requests
that must finish first, weights still to be sent). The loop then continues, without steps while the ranks are busy, so
requests and aborts are accepted and heartbeats continue. It ends with the front end, or with an error.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from craton.errors import CratonError
from craton.ml.serving.device import RECEIVE_SECONDS, MixedWeightsError, TensorParallelGroup
from craton.ml.serving.engine.engine import Engine, State
from craton.ml.serving.engine.measurements import Latencies
from craton.ml.serving.heartbeat import CONTROL_SECONDS, EngineHeartbeat
from craton.ml.serving.messages import Abort, Control, EngineReply, Failed, Fork, Ready, Stats, Submit
from craton.ml.serving.settings import ServingError
from craton.ml.serving.wire import MessageLine, WireError

IDLE_SECONDS = 0.05  # between two polls when there is nothing to compute
COMPILING_SECONDS = 0.002  # and when all requests wait for their grammars
BUSY_SECONDS = 0.005  # and while the ranks execute a control
STATS_SECONDS = 0.5
PARTS = ("weights", "kv_cache")  # what sleep frees
NO_WEIGHTS = (
    "sleep level 2 discarded the weights; send new ones with POST /update_weights (a folder, or the address of a "
    "trainer that sends them), or restart the server"
)


@dataclass(frozen=True)
class Call:
    """A method call on every rank, yielded by a control; the `yield` returns its result."""

    method: str
    arguments: tuple[Any, ...] = ()


Steps = Generator[Call | None, Any, Any]  # of a control: a call, or None to wait one iteration; returns its result


@dataclass
class Task:
    """A control that takes more than one iteration."""

    id: int
    steps: Steps
    call: Future[Any] | None = None  # that it waits for
    began: float = 0.0  # when the call began
    is_cancelled: bool = False  # its client is gone


class EngineProcess:
    """Runs an engine behind one connection to a front end. `record` gets its statistics twice a second."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        group: TensorParallelGroup,
        front: MessageLine,
        heartbeat: EngineHeartbeat,
        record: Callable[[Stats, Latencies], None] | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._group = group
        self._front = front
        self._heartbeat = heartbeat
        self._record = record
        self._latencies = Latencies()
        self._next_stats = 0.0
        self._awake = set(PARTS)
        self._before_sleep: State = "running"
        self._turns = 0  # how often the engine was paused or resumed at once
        self._waiting: list[Task] = []  # tasks that wait for the next iteration
        self._calling: Task | None = None  # the task whose call the ranks execute
        self._later: deque[Control] = deque()  # controls received meanwhile, executed in order
        self._controls: dict[str, Callable[..., Any]] = {
            "pause": self._pause,
            "resume": self._resume,
            "sleep": self._sleep,
            "wake": self._wake,
            "reset_prefix_cache": self._forget,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "update_weights": self._update_weights,
            "weights_version": lambda: engine.version,
        }

    def run(self) -> None:
        """Serve until the front end closes the connection."""
        with self._heartbeat, contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
            self._serve()

    def _serve(self) -> None:
        engine = self._engine
        settings = engine.settings
        self._front.send(
            Ready(
                self._name,
                engine.vocabulary,
                engine.max_length,
                tuple(engine.adapters),
                engine.version,
                settings.page,
                settings.kv_precision,
                settings.memory,
            )
        )
        while True:
            self._hear()
            self._send(engine.step() if self._calling is None else engine.take_ended())
            self._go_on()
            now = time.monotonic()
            if self._calling is None or now - self._calling.began < CONTROL_SECONDS:
                self._heartbeat.beat()
            if now >= self._next_stats:
                self._next_stats = now + STATS_SECONDS
                stats = engine.stats()
                self._front.send(stats)
                if self._record is not None:
                    self._record(stats, self._latencies)

    def _hear(self) -> None:
        """Receive all pending messages; wait briefly if there is nothing to do."""
        engine = self._engine
        seconds = 0.0
        if self._calling is not None:
            seconds = BUSY_SECONDS
        elif engine.state != "running" or engine.is_idle:
            seconds = IDLE_SECONDS
        elif engine.is_still:
            seconds = COMPILING_SECONDS
        while self._front.poll(seconds):
            seconds = 0.0
            message = self._front.recv()
            if isinstance(message, Submit):
                self._latencies.begin(message.id, time.monotonic())
                engine.submit(message)
            elif isinstance(message, Fork):
                for branch in message.branches:
                    self._latencies.begin(branch.id, time.monotonic())
                engine.start_branches(message)
            elif isinstance(message, Abort):
                engine.abort(message)
                self._cancel(message.id)
            elif isinstance(message, Control):
                self._later.append(message)
                self._begin()
            else:
                raise WireError(f"the front end sent a {type(message).__name__}; only an engine may send that")

    # -- controls -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start pending controls in order of arrival, while the ranks are free."""
        while self._later and self._calling is None:
            control = self._later.popleft()
            action = self._controls.get(control.name)
            if action is None:
                names = ", ".join(self._controls)
                self._front.send(EngineReply(control.id, error=f"unknown control {control.name!r}; allowed: {names}"))
            else:
                self._advance(Task(control.id, _steps(action, control.arguments)))

    def _cancel(self, number: int) -> None:
        """Drop a control whose client is gone, or let it wait no longer for weights that will not come."""
        self._later = deque(control for control in self._later if control.id != number)
        if self._calling is not None and self._calling.id == number:
            self._calling.is_cancelled = True

    def _go_on(self) -> None:
        """Continue tasks that wait for this iteration or for a finished call."""
        if self._calling is not None:
            assert self._calling.call is not None
            if not self._calling.call.done():
                if self._calling.is_cancelled:
                    self._group.rank.cancel_receiving()
                return
            task, self._calling = self._calling, None
            self._advance(task)
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._advance(task)
        self._begin()

    def _advance(self, task: Task) -> None:
        """Run a control until it waits again, or is done and answered."""
        call, task.call = task.call, None
        try:
            if call is None:
                wanted = next(task.steps)
            elif (error := call.exception()) is not None:
                wanted = task.steps.throw(error)
            else:
                wanted = task.steps.send(call.result())
        except StopIteration as end:
            self._front.send(EngineReply(task.id, end.value))
        except (CratonError, TypeError) as error:
            self._front.send(EngineReply(task.id, error=str(error)))
        else:
            if wanted is None:
                self._waiting.append(task)
                return
            self._send(self._engine.finish_in_flight())
            task.call, task.began = self._group.start(wanted.method, *wanted.arguments), time.monotonic()
            self._calling = task

    def _pause(self, mode: str = "keep") -> Steps:
        if mode not in ("abort", "wait", "keep"):
            raise ServingError(f"unknown mode {mode!r}; allowed: abort, wait, keep")
        engine = self._engine
        if mode != "wait":
            self._turns += 1
            self._send(engine.pause(mode))  # type: ignore[arg-type]
            return
        turn = self._turns
        engine.stop_admitting()
        while not engine.is_drained and engine.state == "running" and turn == self._turns:
            yield None
        if not engine.is_drained:  # another control paused or resumed it meanwhile
            raise ServingError(f"the pause was interrupted: the engine is {engine.state}, and requests are unfinished")
        if engine.state == "running":
            self._send(engine.pause("keep"))

    def _resume(self) -> None:
        self._engine.resume()
        self._turns += 1

    def _sleep(self, level: int = 1) -> Steps:
        engine = self._engine
        if engine.state == "asleep":
            raise ServingError("the engine is already asleep")
        self._before_sleep = engine.state
        if engine.state == "running":
            self._send(engine.pause("keep"))
        self._send(engine.release())
        yield Call("sleep", (level,))
        engine.state = "asleep"
        self._awake.clear()
        if level > 1:
            self._send(engine.refuse(NO_WEIGHTS))

    def _wake(self, tags: Sequence[str] = PARTS) -> Steps:
        """Return the state and what is still missing, with the remedy."""
        if self._engine.state != "asleep":
            raise ServingError(f"the engine is {self._engine.state}, not asleep")
        if unknown := set(tags) - set(PARTS):
            raise ServingError(f"unknown tags {', '.join(sorted(unknown))}; allowed: {', '.join(PARTS)}")
        yield Call("wake", (tuple(tags),))
        self._awake.update(tags)
        if self._awake == set(PARTS):
            self._engine.state = self._before_sleep
        missing = {part: f"asleep; POST /wake_up?tags={part}" for part in PARTS if part not in self._awake}
        if self._engine.refusal:
            missing["weights"] = self._engine.refusal
        return {"state": self._engine.state, "missing": missing}

    def _forget(self) -> None:
        if self._engine.state == "asleep":
            raise ServingError("the engine is asleep and has no prefix cache; wake it first")
        self._engine.forget()

    def _load_adapter(self, name: str, folder: str) -> Steps:
        self._expect_weights()
        if name == self._name:
            raise ServingError(f"{name!r} is the name of the model; give the adapter another one")
        slot: int = yield Call("load_adapter", (name, folder))
        self._engine.adapters[name] = slot
        self._engine.forget_adapter(name)
        return slot

    def _unload_adapter(self, name: str) -> Steps:
        self._expect_weights()
        if name not in self._engine.adapters:
            raise ServingError(f"adapter {name!r} is not loaded; loaded: {', '.join(self._engine.adapters) or 'none'}")
        self._send(self._engine.drop_adapter(name))
        yield Call("unload_adapter", (name,))

    def _update_weights(
        self,
        folder: str | None = None,
        address: str | None = None,
        version: int | None = None,
        recompute: bool = False,
        wait_seconds: float = RECEIVE_SECONDS,
    ) -> Steps:
        """Update the weights in place, from a folder or from a sender at an address; CUDA graphs stay valid."""
        self._expect_weights()
        if (folder is None) == (address is None):
            raise ServingError("give either a folder, or an address to receive the weights at")
        try:
            if folder is not None:
                yield Call("update_from_folder", (folder,))
            else:
                version = yield Call("receive_weights", (address, wait_seconds))
        except MixedWeightsError as error:
            self._send(self._engine.refuse(str(error)))
            raise
        self._send(self._engine.change_version(version, recompute))
        return {"version": self._engine.version}

    def _expect_weights(self) -> None:
        if "weights" not in self._awake:
            raise ServingError("the engine is asleep; wake it, or only its weights, first (POST /wake_up?tags=weights)")

    def _send(self, pieces: list[Any]) -> None:
        if pieces:
            self._latencies.note(pieces, time.monotonic())
            self._front.send(pieces)


def _steps(action: Callable[..., Any], arguments: Mapping[str, Any]) -> Steps:
    """Return an action as steps, also if it is done at once."""
    done = action(**arguments)
    return (yield from done) if isinstance(done, Generator) else done


def tell_failure(front: MessageLine, reason: str) -> None:
    """Report an engine failure to the front end, if it still listens."""
    try:
        front.send(Failed(reason))
    except OSError:
        return
