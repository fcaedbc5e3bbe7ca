"""One rank: `python -m craton.ml.training RUN`.

Exits 0 when the last step is done, or when it was asked to stop (SIGTERM) and all ranks have saved their state; 1 with
one line that says what to do when the job, its data or its memory is at fault, a user's own traceback above it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import torch.distributed as dist

from craton.errors import CratonError
from craton.ml.data import DataError
from craton.ml.functions import FunctionError
from craton.ml.training.build import Place, build
from craton.ml.training.loop import Trainer
from craton.telemetry import LedgerClock, Recorder, RunDirectory, summarize


def main(arguments: list[str]) -> int:
    """Trains the run named on the command line."""
    if len(arguments) != 1:
        print("usage: python -m craton.ml.training RUN", file=sys.stderr)
        return 2
    clock = LedgerClock()
    run = RunDirectory(arguments[0])
    recorder = Recorder.from_environment(run)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    try:
        place = Place.from_environment()
        trainer = Trainer(build(run, place, recorder, clock), place.stop_at, reached=summarize(run).step)
        signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
        if asked:
            trainer.stop()
        outcome = trainer.fit()
        if outcome == "stopped" and place.rank == 0 and not run.has("STOP"):
            run.mark("STOP", f"stopped after step {trainer.step}, as asked")
    except CratonError as error:
        recorder.event("failed", reason=str(error))
        if isinstance(error, FunctionError | DataError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"craton: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"training {outcome} at step {trainer.step}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    except BaseException:  # noqa: BLE001 -- shown, and turned into the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # A rank that failed must not wait in the destructor of a process group whose other ranks are still inside.
        os._exit(code)
