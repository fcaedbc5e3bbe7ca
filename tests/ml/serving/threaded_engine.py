"""A real engine on a thread, behind the connection of a front end. It can be stopped in the middle."""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing.connection import Connection

from model_pairs import pair
from served_ranks import random_model
from waiting import PATIENCE_SECONDS

from craton.ml.serving.device import EngineRank, TensorParallelGroup
from craton.ml.serving.engine import EngineProcess, build_runner, join_engine
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.heartbeat import EngineHeartbeat
from craton.ml.serving.messages import OutputDelta
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.wire import MessageLine
from craton.telemetry.rank import RankPage

VOCABULARY, MAX_LENGTH = 320, 256
SETTINGS = EngineSettings(max_length=MAX_LENGTH, blocks=400, max_running=16, page=4, chunk_tokens=64)


def small_engine(settings: EngineSettings = SETTINGS) -> tuple[Engine, TensorParallelGroup]:
    model = random_model(pair("llama")[1].config, vocab=VOCABULARY)
    runner, settings, length = build_runner(model, settings)
    group = TensorParallelGroup(EngineRank(runner))
    return join_engine(group, runner, settings, length), group


class ThreadedEngine:
    """`hold` stops it in the middle of requests, until others have arrived."""

    def __init__(self) -> None:
        self.engine, group = small_engine()
        here, there = socket.socketpair()
        self.far_end = here.detach()
        self._held_at, self._awaited = 0, 0
        self._step = self.engine.step
        self.engine.step = self._allowed_step  # type: ignore[method-assign]
        line = MessageLine(Connection(there.detach()))
        self._process = EngineProcess("little", self.engine, group, line, EngineHeartbeat(RankPage.make()))
        self._thread = threading.Thread(target=self._process.run, daemon=True)
        self._thread.start()

    def hold(self, requests: int = 1000, tokens: int = 4) -> None:
        """Compute only up to so many tokens of each request, until there are so many requests, each copy counted."""
        self._held_at, self._awaited = tokens, requests

    def go_on(self) -> None:
        self._awaited = 0

    @property
    def num_requests(self) -> int:
        return sum(len(copies) for copies in self.engine._sequences.values())

    def close(self) -> None:
        self.go_on()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _allowed_step(self) -> list[OutputDelta]:
        if self.num_requests >= self._awaited:
            self._awaited = 0
        sequences = [sequence for copies in self.engine._sequences.values() for sequence in copies]
        is_held = all(sequence.outputs >= self._held_at for sequence in sequences)
        if self._awaited and sequences and is_held:
            time.sleep(0.002)
            return self.engine.take_ended() + self.engine.finish_in_flight()
        return self._step()
