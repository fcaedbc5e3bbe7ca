"""A rank with a real engine's loop and a device that never comes back from its first step; in its second life it does.

Before it is asked for anything its first life has nothing to do for longer than a step may take.
"""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from typing import Any

import torch

from craton.ml.serving.device import StepResult
from craton.ml.serving.engine import EngineProcess
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.engine.engine_process import STATS_SECONDS
from craton.ml.serving.heartbeat import EngineHeartbeat
from craton.ml.serving.messages import Sampling, Stats, Submit
from craton.ml.serving.schedule import StepInput
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.wire import MessageLine
from craton.telemetry.rank import own_page

PATIENCE_SECONDS = 3.0  # several times as long as a busy machine keeps a process from running
IDLE_REPORTS = int(2 * PATIENCE_SECONDS / STATS_SECONDS)


class Device:
    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs

    def execute(self, work: StepInput) -> StepResult:
        if self._hangs:
            threading.Event().wait()
        count = len(work.sampled)
        return StepResult(torch.zeros(count, dtype=torch.int64), torch.zeros(count), None, [])


def main() -> None:
    page = own_page()
    assert page is not None
    hangs = os.environ["CRATON_GENERATION"] == "0"
    settings = EngineSettings(max_running=1, chunk_tokens=8, page=4)
    engine = Engine(Device(hangs), settings, vocabulary=4, max_length=32, blocks=20)
    front, ours = map(MessageLine, Pipe())
    no_gang: Any = None  # nobody sends controls
    service = EngineProcess("little", engine, no_gang, ours, EngineHeartbeat(page, PATIENCE_SECONDS))
    threading.Thread(target=_ask, args=(front, IDLE_REPORTS if hangs else 0)).start()
    service.run()


def _ask(front: Any, idle_reports: int) -> None:
    reports = 0
    while reports < idle_reports:
        reports += isinstance(front.recv(), Stats)
    print(f"asked after {reports} reports", flush=True)
    front.send(Submit(1, (1, 2, 3), Sampling(max_tokens=4)))
    while True:
        reply = front.recv()
        if isinstance(reply, list) and reply[-1].finish:
            front.close()
            return


if __name__ == "__main__":
    main()
