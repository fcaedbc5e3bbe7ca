"""Saving and restoring the training state, with the events and log lines about it.

Only rank 0 records and prints what concerns all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from craton.formatting import duration
from craton.ml.training.checkpoint import CheckpointError
from craton.ml.training.measure import record_missing
from craton.ml.training.parts import MissingWeightsError, Parts

SAVE_EVENTS = {
    "saved": "checkpoint_saved",
    "failed": "checkpoint_failed",
    "skipped": "checkpoint_skipped",
    "moved": "checkpoint_moved",
}


class Saves:
    """Created by every rank; all ranks call its methods in the same order."""

    def __init__(self, parts: Parts, reached: int, broke_at: float) -> None:
        """`reached` is the last step that an earlier generation recorded, `broke_at` when that generation broke
        (monotonic clock), if it did."""
        self.parts = parts
        self._reached, self._broke_at = reached, broke_at

    @property
    def restored_tier(self) -> str:
        report = self.parts.checkpointer.restored
        return report.tier if report else "no tier"

    def tensors(self) -> dict[str, Tensor]:
        """Return the contents of a checkpoint, under names that depend on neither layout nor precision: trained weights
        (fp32 masters if there are any), the model's buffers, and the optimizer state."""
        optimizer, model = self.parts.optimizer, self.parts.model
        state = optimizer.state()
        weights = {name: state.pop(f"master.{name}", value) for name, value in optimizer.parameters.items()}
        persistent = model.state_dict().keys()
        buffers = {name: value for name, value in model.named_buffers() if name in persistent}
        return {
            **{f"model.{name}": value.detach() for name, value in {**weights, **buffers}.items()},
            **{f"optimizer.{name}": value for name, value in state.items()},
        }

    def complete_records(self, counters: Mapping[str, Any] | None) -> None:
        """Record the steps whose records were lost with a rank or an agent although their state was not."""
        if self.parts.ranks.rank != 0 or self.parts.directory is None or not counters:
            return
        try:
            steps = record_missing(self.parts.directory, self.parts.recorder, counters.get("records") or [])
        except OSError as error:
            self.say(f"step {counters['step']}: the metrics cannot be read ({error.strerror}); some may be missing")
            return
        if steps:
            self.event("records_completed", counters["step"], steps=steps)

    def reserve(self, step: int) -> None:
        self.parts.checkpointer.reserve(self.tensors(), step)

    def restore(self, before: int | None = None, trust_peer: bool = True) -> dict[str, Any] | None:
        """Restore the newest usable checkpoint into model and optimizer; return its counters."""
        with self.parts.clock.kind("restore"):
            counters = self.parts.checkpointer.restore(self.tensors(), before, trust_peer, ("next_sample",))
            if counters is None and self.parts.missing_weights:
                raise MissingWeightsError(self.parts.missing_weights)
            if counters is not None:
                self.parts.optimizer.loaded(counters["step"] * self.parts.job.updates_per_step)
                report = self.parts.checkpointer.restored
                for reason in report.passed_over if report else ():
                    self.event("checkpoint_passed_over", counters["step"], reason=reason)
                self.event("restored", counters["step"], tier=self.restored_tier, next_sample=counters["next_sample"])
        return counters

    def check_kept(self, counters: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError if a stop could not save its state and every copy in memory is gone. Stopping with an
        older state would hide the loss."""
        page, directory = self.parts.clock.page, self.parts.directory
        step = counters["step"] if counters else 0
        if "unsaved" in page.beside and directory is not None and directory.has("STOP") and step < self._reached:
            page.set_beside("unsaved", False)
            source = f"step {step:,}" if step else "the beginning"
            raise CheckpointError(
                f"the state of step {self._reached:,} was only in memory, and no copy of it is left; "
                f"`craton resume {directory.name}` resumes from {source}"
            )

    def save(self, counters: Mapping[str, Any]) -> None:
        """Save a checkpoint in the background; a failure costs only that checkpoint."""
        step = counters["step"]
        try:
            with self.parts.clock.kind("checkpoint"):
                self.parts.checkpointer.save(step, self.tensors(), counters)
        except CheckpointError as error:
            self.say(f"step {step}: {error}; training continues, and the next save retries")

    def keep(self, counters: Mapping[str, Any], nodes: Sequence[str]) -> bool:
        """Keep the state of this step in peer memory for the next generation, on these nodes; False if that is not
        possible."""
        with self.parts.clock.kind("checkpoint"):
            return self.parts.checkpointer.keep(counters["step"], self.tensors(), counters, nodes)

    def report(self, is_quiet: bool = False) -> None:
        """Report the saves that ended; with `is_quiet`, only the successful ones."""
        for report in self.parts.checkpointer.reports():
            if is_quiet and report.error:
                continue
            fields = {"tier": report.tier, "bytes": report.bytes, "seconds": report.seconds, "reason": report.error}
            if report.removed:
                names = ", ".join(report.removed)
                self.event("checkpoint_removed", report.step, tier=report.tier, reason=f"{names} removed for room")
            self.event(SAVE_EVENTS[report.outcome], report.step, **fields)
        for note in self.parts.checkpointer.notes():
            self.event(note.event, note.step, **note.fields)
            self.say(f"step {note.step}: {note.text}")

    def report_recovery(self, step: int, check: Callable[[], None]) -> None:
        """After the first step since a generation broke, report what the failure cost. `check` raises if this one
        broke too."""
        if not self._broke_at:
            return
        if self.parts.ranks.device.type == "cuda":  # otherwise the step is only launched, not done
            torch.cuda.synchronize(self.parts.ranks.device)
            check()
        report = self.parts.checkpointer.restored
        restored = report.step if report else 0
        seconds = time.monotonic() - self._broke_at
        tier = report.tier if report else "the beginning"
        lost = max(0, self._reached - restored)
        fields = {"seconds": seconds, "lost_steps": lost, "restored_from": tier, "restored_step": restored}
        self.event("recovered", step, **fields)
        self.say(f"step {step}: resumed {duration(seconds)} after the failure, from step {restored} of {tier}")
        self._broke_at = 0.0

    def event(self, name: str, step: int, **fields: Any) -> None:
        if self.parts.ranks.rank == 0:
            self.parts.recorder.event(name, step=step, **fields)

    def say(self, text: str) -> None:
        if self.parts.ranks.rank == 0:
            print(text, flush=True)
