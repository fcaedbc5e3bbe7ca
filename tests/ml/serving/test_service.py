"""The engine's loop while somebody asks for what takes long: it takes requests, hears aborts, shows that it lives."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from model_pairs import LONGEST, Answer, expect_greedy, pair
from torch import Tensor
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.processes import free_port
from craton.ml.models import WeightsError
from craton.ml.serving.device import EngineRank, StepResult, TensorParallelGroup
from craton.ml.serving.device.weights import send_weights
from craton.ml.serving.engine import EngineProcess, build_runner, join_engine
from craton.ml.serving.engine import engine_process as service_module
from craton.ml.serving.heartbeat import CONTROL_SECONDS, EngineHeartbeat
from craton.ml.serving.messages import Abort, Control, EngineReply, OutputDelta, Ready, Sampling, Stats, Submit
from craton.ml.serving.schedule import StepInput
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.wire import MessageLine
from craton.telemetry.rank import RankPage

SECONDS = PATIENCE_SECONDS
KEY = b"a key of these tests"
PROMPT = (5, 17, 2, 80, 33, 9, 41)
GREEDY = Sampling(max_tokens=8, temperature=0.0)
LONG = Sampling(max_tokens=200, temperature=0.0)


class Gate:
    """Lets steps through, up to a number: then it holds them as a device does that never comes back."""

    def __init__(self, gang: TensorParallelGroup) -> None:
        self._gang = gang
        self._steps_left = 1 << 30
        self._is_open = threading.Event()
        self.holds = threading.Event()

    def hold_after(self, steps: int) -> None:
        self._steps_left = steps

    def open(self) -> None:
        self._is_open.set()

    def execute(self, work: StepInput) -> StepResult:
        if not self._steps_left:
            self.holds.set()
            assert self._is_open.wait(SECONDS)
        else:
            self._steps_left -= 1
        return self._gang.execute(work)


class Live:
    """A service on a thread, and the front end's side of its line."""

    def __init__(self) -> None:
        model = copy.deepcopy(pair("llama")[1])
        settings = EngineSettings(
            max_length=LONGEST, blocks=200, max_running=2, page=4, chunk_tokens=32, graphs="always"
        )
        runner, settings, _ = build_runner(model, settings)
        gang = TensorParallelGroup(EngineRank(runner, secret=KEY))
        self.gate = Gate(gang)
        self.engine = join_engine(self.gate, runner, settings, LONGEST)
        self.page = RankPage.make()
        self.front, theirs = map(MessageLine, Pipe())
        self.replies: list[Any] = []
        self._changed = threading.Condition()
        service = EngineProcess("little", self.engine, gang, theirs, EngineHeartbeat(self.page))
        self._threads = [threading.Thread(target=target) for target in (service.run, self._read)]
        for thread in self._threads:
            thread.start()

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.front.send(message)

    def pieces(self, number: int) -> list[OutputDelta]:
        return [piece for reply in self.replies if isinstance(reply, list) for piece in reply if piece.id == number]

    def finish(self, number: int) -> str | None:
        pieces = self.pieces(number)
        return pieces[-1].finish if pieces else None

    def wait_for_end(self, number: int) -> None:
        self.wait(lambda: self.finish(number), f"request {number} ends")

    def answer(self, number: int) -> EngineReply | None:
        found = [each for each in self.replies if isinstance(each, EngineReply) and each.id == number]
        return found[0] if found else None

    def answered(self, number: int) -> EngineReply:
        self.wait(lambda: self.answer(number), f"control {number} is answered")
        found = self.answer(number)
        assert found is not None
        return found

    def stats(self) -> list[Stats]:
        return [reply for reply in self.replies if isinstance(reply, Stats)]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, SECONDS), what

    def next_stats(self) -> Stats:
        """The next report, made after everything that was sent has been heard."""
        seen = len(self.stats()) + 1  # the one after the one that may be under way
        self.wait(lambda: len(self.stats()) > seen, "it tells how it does")
        return self.stats()[seen]

    def close(self) -> None:
        self.gate.open()
        self.front.close()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

    def _read(self) -> None:
        try:
            while True:
                if self.front.poll(0.05):
                    reply = self.front.recv()
                    with self._changed:
                        self.replies.append(reply)
                        self._changed.notify_all()
        except (OSError, EOFError):
            return


@contextmanager
def live() -> Iterator[Live]:
    made = Live()
    try:
        yield made
    finally:
        made.close()


def send_when_it_listens(address: str, tensors: list[tuple[str, Tensor]]) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return send_weights(address, KEY, tensors, version=7)
        except WeightsError as error:
            if "cannot connect" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def reports_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STATS_SECONDS", 0.05)


def test_a_pause_that_waits_hears_everybody_meanwhile() -> None:
    with live() as service:
        service.gate.hold_after(6)
        service.send(Submit(1, PROMPT, LONG), Submit(2, (7, 8), LONG))
        service.wait(lambda: service.pieces(1) and service.pieces(2), "both write")
        service.send(Control(10, "pause", {"mode": "wait"}), Control(11, "pause", {"mode": "wait"}))
        service.send(Submit(3, (9, 9, 4), GREEDY), Submit(4, (1, 2), GREEDY), Abort(2), Abort(4))
        service.send(Control(12, "weights_version"))
        service.gate.open()
        assert service.answered(12).result == 0
        service.wait(lambda: service.finish(2) and service.finish(4), "aborts are heard")
        order = [reply.id for reply in service.replies if isinstance(reply, EngineReply)]
        assert order[0] == 12, "the pause waits for what runs"
        for number in (10, 11):
            assert not service.answered(number).error
        assert (service.finish(1), service.finish(2), service.finish(4)) == ("length", "abort", "abort")
        paused = service.next_stats()
        assert (paused.state, paused.running, paused.waiting) == ("paused", 0, 1)
        assert not service.pieces(3), "what came meanwhile waits"
        service.send(Control(13, "resume"))
        service.wait(lambda: service.finish(3), "it is computed then")
        expect_greedy(pair("llama")[0], [9, 9, 4], Answer.of(service.pieces(3)))
        assert isinstance(service.replies[0], Ready)


def test_whoever_cannot_wait_ends_a_pause_that_waits() -> None:
    with live() as service:
        service.gate.hold_after(3)
        service.send(Submit(1, PROMPT, LONG))
        service.wait(lambda: service.pieces(1), "it writes")
        service.send(Control(10, "pause", {"mode": "wait"}), Control(11, "pause", {"mode": "abort"}))
        service.gate.open()
        for number in (10, 11):
            assert not service.answered(number).error
        assert service.next_stats().state == "paused"
        assert service.finish(1) == "abort"


@pytest.mark.parametrize("others", [pytest.param(["pause"], marks=pytest.mark.slow), ["pause", "resume"]])
def test_a_pause_that_waits_says_when_what_ran_has_not_ended(others: list[str]) -> None:
    with live() as service:
        service.gate.hold_after(3)
        service.send(Submit(1, PROMPT, LONG))
        service.wait(lambda: service.pieces(1), "it writes")
        controls = [Control(11 + place, name) for place, name in enumerate(others)]
        service.send(Control(10, "pause", {"mode": "wait"}), *controls, Submit(2, PROMPT, GREEDY))
        service.gate.open()
        assert "requests are unfinished" in service.answered(10).error
        assert service.finish(1) is None
        if others[-1] == "resume":
            service.wait_for_end(1)
            service.wait_for_end(2)


def test_weights_that_nobody_sends_yet_hold_up_nothing_but_steps() -> None:
    model = copy.deepcopy(pair("llama")[1])
    address = f"127.0.0.1:{free_port()}"
    with live() as service:
        service.gate.hold_after(6)
        service.send(Submit(1, PROMPT, LONG), Submit(2, (7, 8), LONG))
        service.wait(lambda: service.pieces(1) and service.pieces(2), "both write")
        service.send(Control(10, "update_weights", {"address": address}), Control(11, "weights_version"))
        service.gate.open()
        before = service.next_stats()
        service.send(Submit(3, (9, 9, 4), GREEDY), Submit(4, (1, 2), GREEDY), Abort(2), Abort(4), Submit(5, (), GREEDY))
        service.wait(lambda: service.finish(2) and service.finish(4) and service.finish(5), "aborts and refusals")
        assert (service.finish(2), service.finish(4), service.finish(5)) == ("abort", "abort", "error")
        beat = service.page.progress
        waiting = service.next_stats()
        assert (waiting.running, waiting.waiting, waiting.steps) == (1, 1, before.steps), "no step in between"
        assert service.page.progress > beat
        assert service.answer(10) is None
        assert service.answer(11) is None, "those who come later find what this one leaves"
        send_when_it_listens(address, [(name, each.detach()) for name, each in model.named_parameters()])
        assert service.answered(10).result == {"version": 7}
        assert service.answered(11).result == 7
        service.wait(lambda: service.finish(1) and service.finish(3), "and requests go on")
        for number, prompt in ((1, list(PROMPT)), (3, [9, 9, 4])):
            found = Answer.of(service.pieces(number))
            expect_greedy(pair("llama")[0], prompt, found)
        assert set(Answer.of(service.pieces(1)).versions) == {0, 7}
        assert set(Answer.of(service.pieces(3)).versions) == {7}


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_request_outlasts_a_sleep_that_keeps_the_weights(level: int) -> None:
    """On a GPU its graphs are captured again, on another thread than the one that replays them."""
    model = copy.deepcopy(pair("llama")[1])
    address = f"127.0.0.1:{free_port()}"
    with live() as service:
        service.gate.hold_after(6)
        service.send(Submit(1, PROMPT, LONG))
        service.wait(lambda: service.pieces(1), "it writes")
        service.send(Control(10, "sleep", {"level": level}), Submit(2, (9, 9, 4), GREEDY))
        service.gate.open()
        assert not service.answered(10).error
        asleep = service.next_stats()
        assert (asleep.state, asleep.running, asleep.waiting) == ("asleep", 0, 2 if level == 1 else 0)
        service.send(Submit(3, (1, 2), GREEDY))
        service.wait(lambda: service.finish(3) == "error", "one that comes while it is asleep is refused")
        if level == 2:
            assert (service.finish(1), service.finish(2)) == ("error", "error")
            service.send(Control(11, "wake", {"tags": ["weights"]}))
            service.send(Control(12, "update_weights", {"address": address}))
            send_when_it_listens(address, [(name, each.detach()) for name, each in model.named_parameters()])
        service.send(Control(13, "wake", {"tags": ["weights", "kv_cache"]}))
        assert not service.answered(13).error
        service.send(Submit(4, (9, 9, 4), GREEDY))
        numbers = {4: [9, 9, 4]} if level == 2 else {1: list(PROMPT), 2: [9, 9, 4], 4: [9, 9, 4]}
        for number, prompt in numbers.items():
            service.wait_for_end(number)
            expect_greedy(pair("llama")[0], prompt, Answer.of(service.pieces(number)))


def test_a_control_that_fails_is_told_and_the_next_is_heard(tmp_path: Path) -> None:
    with live() as service:
        service.send(
            Control(1, "update_weights", {"folder": str(tmp_path)}),
            Control(2, "update_weights"),
            Control(3, "sing"),
            Control(4, "wake", {"loudly": True}),
            Control(5, "load_adapter", {"name": "pirate", "folder": str(tmp_path)}),
            Control(6, "unload_adapter", {"name": "pirate"}),
            Control(7, "weights_version"),
        )
        service.answered(7)
        order = [reply.id for reply in service.replies if isinstance(reply, EngineReply)]
        assert order == [1, 2, 3, 4, 5, 6, 7]
        said = [
            str(tmp_path),
            "give either a folder",
            "unknown control 'sing'",
            "loudly",
            "max_adapters",
            "'pirate' is not loaded",
        ]
        for number, words in enumerate(said, 1):
            assert words in service.answered(number).error
        service.send(Submit(1, PROMPT, GREEDY))
        service.wait(lambda: service.finish(1), "requests go on")
        expect_greedy(pair("llama")[0], list(PROMPT), Answer.of(service.pieces(1)))


def test_only_a_step_that_never_returns_gives_no_sign_of_life() -> None:
    with live() as service:

        def expect_a_beat() -> None:
            last = service.page.progress
            wait_until(lambda: service.page.progress != last, "a sign of life", look_seconds=0.005)

        service.wait(service.stats, "it runs")
        expect_a_beat()  # with nothing to do
        service.gate.hold_after(5)
        last = service.page.progress
        service.send(Submit(1, PROMPT, LONG))
        assert service.gate.holds.wait(SECONDS)
        assert service.page.progress > last, "it worked before"
        last = service.page.progress
        time.sleep(0.3)  # six times as long as it looks at its line when it has nothing to do
        assert service.page.progress == last
        service.gate.open()
        service.wait(lambda: service.finish(1), "it goes on")
        expect_a_beat()


def test_a_control_that_never_ends_gives_no_sign_of_life_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "CONTROL_SECONDS", 0.3)
    address = f"127.0.0.1:{free_port()}"
    with live() as service:
        service.send(Control(1, "update_weights", {"address": address}))
        reports = len(service.stats()) + 12
        service.wait(lambda: len(service.stats()) > reports, "it tells how it does")
        last = service.page.progress
        service.next_stats()
        assert service.page.progress == last
        with pytest.raises(WeightsError, match="the update has no weights"):
            send_when_it_listens(address, [])
        assert "the update has no weights" in service.answered(1).error


def test_a_follower_may_take_long_for_a_control_only() -> None:
    page = RankPage.make()
    with EngineHeartbeat(page, 50.0) as heartbeat:
        assert page.patience == 50.0
        with heartbeat.patient():
            assert page.patience == CONTROL_SECONDS
        assert page.patience == 50.0
    assert page.patience == CONTROL_SECONDS, "the end of a process may take its time"
