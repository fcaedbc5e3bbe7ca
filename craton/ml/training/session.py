"""The life of a rank process: one generation after another, in one process.

An agent tells a rank which generations to enter. When a generation breaks because a rank died, hangs or raised, the
survivors drop everything they built, but keep Python, the device and compiled code. They enter the next generation like
a restarted rank: build, restore the newest complete state, continue. Without an agent there is one generation, from the
environment.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from craton.agent.processes import EXIT_FINAL
from craton.errors import CratonError
from craton.ml.data import DataError
from craton.ml.functions import FunctionError
from craton.ml.meshes import forget_meshes
from craton.ml.training.build import RankIdentity, build
from craton.ml.training.loop import Trainer
from craton.ml.training.orders import Order, Orders, RegroupError
from craton.ml.training.parts import Parts
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.error_reports import ErrorReport, report_exception
from craton.telemetry.rank import LedgerClock, Recorder, answer_stack_requests

EXIT_FAILED = 1
BLAME_SECONDS = 2.0  # an error of ours may be caused by another rank's death: how long to wait for that news
ORDER_SECONDS = 3600.0  # a rank whose generation broke waits this long for the next one
LOOK_SECONDS = 0.2
MAX_REASON = 600  # characters of an error in an event
WRITING_SECONDS = 10.0  # for files of the previous generation that are still being written

Build = Callable[[RunDirectory, RankIdentity, Recorder, LedgerClock, Order | None], Parts]


def main(arguments: list[str], program: str = "craton.ml.training", build: Build = build) -> int:
    """Train the run named on the command line; return the exit code."""
    if len(arguments) != 1:
        print(f"usage: python -m {program} RUN", file=sys.stderr)
        return 2
    return RankSession(RunDirectory(arguments[0]), build).run()


def import_everything() -> None:
    """Import what torch and the training code import lazily."""
    import importlib

    for name in (
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "craton.ml.kernels",
        "craton.ml.training.checkpoint.objects",
        "craton.telemetry.summary",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class RankSession:
    """`build` makes what each generation trains with; it differs by kind of training."""

    def __init__(self, directory: RunDirectory, build: Build = build) -> None:
        self.directory = directory
        self.build = build
        self.clock = LedgerClock()
        self.recorder = Recorder.from_environment(directory)
        self.orders = Orders.from_environment()
        self.trainer: Trainer | None = None
        self.stop_asked = False
        self.order: Order | None = None
        signal.signal(signal.SIGTERM, self._on_stop)
        answer_stack_requests()

    def run(self) -> int:
        """Return the exit code of this rank. A rank that exits with 0 and is not `idle` has ended too early."""
        code = self._run()
        if code == 0:
            self.clock.switch("idle")
        return code

    def _run(self) -> int:
        while True:
            if self.orders is not None:
                self.order = self._next_order(self.orders)
                if self.order is None:
                    return 0 if self.stop_asked else EXIT_FAILED
                if self.order.is_last:
                    return 0
                if self.clock.current in ("detect", "waiting"):
                    self.clock.switch("regroup")
            code = self._generation()
            if code is not None:
                return code
            self._leave()

    def _next_order(self, orders: Orders) -> Order | None:
        """Return the next order. None if none came in time, or if a stop was requested with nothing to save. A state
        that no disk has taken is in peer memory: the next generation saves it."""
        deadline = time.monotonic() + ORDER_SECONDS
        while time.monotonic() < deadline:
            if (order := orders.next(LOOK_SECONDS)) is not None:
                return order
            if self.stop_asked and "unsaved" not in self.clock.page.beside:
                print("stopped while the run was broken: it resumes from the last checkpoint", flush=True)
                return None
        return None

    def _on_stop(self, number: int, _frame: Any) -> None:
        self.stop_asked = True
        if self.trainer is not None:
            self.trainer.stop()

    def _generation(self) -> int | None:
        """Return the exit code, or None if there is another generation to enter."""
        place = RankIdentity.from_environment() if self.order is None else RankIdentity.of(self.order)
        self.recorder.generation = self.clock.page.generation = place.generation
        self.clock.page.step_seconds = 0.0  # step times may change with other ranks
        self.recorder.rank = place.rank
        try:
            return self._train(place)
        except RegroupError:
            return None
        # sys.exit in user code also ends this rank before its work is done.
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 -- reported as an exit code
            return self._broken(error)

    def _train(self, place: RankIdentity) -> int | None:
        parts = self.build(self.directory, place, self.recorder, self.clock, self.order)
        reached = summarize(self.directory).step
        broke_at = 0.0
        if self.order is not None:
            reached = max(reached, self.order.generation.reached)
            broke_at = self.order.broke_at
        self.trainer = Trainer(parts, place.stop_at, reached=reached, broke_at=broke_at)
        if self.orders is not None:
            self.trainer.check = self.orders.check
            self.orders.when_planned(self.trainer.leave)
            self.orders.when_broken(self.trainer.seal)
        if self.stop_asked:
            self.trainer.stop()
        outcome = self.trainer.fit()
        if outcome == "left":
            return None
        if outcome == "stopped" and self.stop_asked:
            self.recorder.event("stop_signal", step=self.trainer.step, message="it received SIGTERM")
        if outcome == "stopped" and place.rank == 0 and not self.directory.has("STOP"):
            reason = f"stopped after step {self.trainer.step}, as requested"  # slurm.batch reads the last words
            try:
                self.directory.mark("STOP", reason)
            except OSError:  # the agent retries until the disk takes it
                self.recorder.event("stopped", step=self.trainer.step, reason=reason)
        print(f"training {outcome} at step {self.trainer.step}", flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0

    def _broken(self, error: BaseException) -> int | None:
        """Handle an error. One caused by another rank's death is resolved by the next generation. Any other is reported
        first, also when leaving for a planned generation: the other ranks wait for this one."""
        step = self.trainer.step if self.trainer is not None else 0
        is_ours, echo = isinstance(error, CratonError), _is_another_rank(error)
        report = self._report(error, step, echo)
        if self.orders is not None:
            if self.orders.is_broken_within(BLAME_SECONDS if is_ours else 0.0):
                return None
            is_leaving = self.orders.is_over
            if is_leaving and echo:  # the agent of the rank that is gone reports it
                return None
            if (is_leaving or not is_ours) and not _device_is_lost(error):
                if not echo:
                    traceback.print_exception(error)
                self.clock.break_off("detect")
                reason = "lost the connection to another rank" if echo else report.line[:MAX_REASON]
                self.recorder.event("broken", step=step, reason=reason, echo=echo, error=report.to_fields())
                return None
        if is_ours:
            self.recorder.event("failed", step=step, reason=str(error), error=report.to_fields())
            if isinstance(error, FunctionError | DataError) and error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            print(f"craton: {error}", file=sys.stderr, flush=True)
            return EXIT_FINAL if self.orders is not None else EXIT_FAILED
        self.recorder.event("failed", step=step, reason=report.line[:MAX_REASON], error=report.to_fields())
        traceback.print_exception(error)
        return EXIT_FAILED

    def _report(self, error: BaseException, step: int, echo: bool) -> ErrorReport:
        phase = "+".join((self.clock.current, *self.clock.page.beside))
        return report_exception(error, phase=phase, step=step, is_echo=echo)

    def _leave(self) -> None:
        """Drop everything built for a generation."""
        if self.clock.current not in ("detect", "waiting"):
            broke_at = self.orders.broke_at if self.orders is not None else 0.0
            self.clock.break_off("regroup", broke_at or None)
        trainer, self.trainer = self.trainer, None
        if trainer is not None and not trainer.abandon(WRITING_SECONDS):
            print("files of the last generation are still being written: restarting this rank", flush=True)
            # When leaving for the next generation, it has finished its work in the previous one.
            os._exit(0 if self.orders is not None and self.orders.is_over else EXIT_FAILED)
        del trainer
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        gc.collect()
        gc.enable()
        try:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            forget_meshes()
        except RuntimeError as error:
            print(f"the device cannot be used any more: restarting this rank ({error})", flush=True)
            os._exit(EXIT_FAILED)


def _device_is_lost(error: BaseException) -> bool:
    """After a device error, the device is unusable in this process."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def _is_another_rank(error: BaseException) -> bool:
    """Whether a collective failed: most likely because of the rank at its other end."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "rendezvous store"))


def run_and_exit(work: Callable[[list[str]], int], arguments: list[str]) -> None:
    """End the process with the exit code of its work, whatever it raises."""
    code = EXIT_FAILED
    try:
        code = work(arguments)
    except BaseException:  # noqa: BLE001 -- printed, and turned into the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # A failed rank must not wait in the destructor of a process group whose other ranks are still inside.
        os._exit(code)
