"""The writer of one tier: a separate thread and process group on every rank, so that a slow tier delays no other tier
and no step. Saves of one tier run one after the other; all ranks get the same ones in the same order.

A save without enough room removes what `keep` does not require and is retried once. A failed save costs only that save:
its files are removed, earlier steps stay, and the report says what happened and what to do.
"""

from __future__ import annotations

import errno
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from craton import formatting
from craton.errors import CratonError
from craton.job.sections import RESCUE
from craton.ml.training.checkpoint.checksums import METADATA, FileSum, Seal
from craton.ml.training.checkpoint.read import checked_spans
from craton.ml.training.checkpoint.staging import LocalDataPlanner, SavingRanks, forget_plan
from craton.ml.training.checkpoint.tiers import StepFiles, StepWriter, Tier, make_room, retain
from craton.ml.training.checkpoint.writer import CheckedWriter, ignore_single_process_warning
from craton.ml.training.measure import resolved
from craton.telemetry.rank import going_on

Outcome = Literal["saved", "failed", "skipped", "moved"]


@dataclass(frozen=True)
class SaveReport:
    """Result of one save of one tier; `moved` is a copy of a step from a faster tier."""

    step: int
    tier: str
    folder: str
    bytes: int
    seconds: float  # in the background
    error: str | None = None
    outcome: Outcome = "saved"
    lacks_room: bool = False  # the error is a full disk or quota
    removed: tuple[str, ...] = ()  # removed to make room


@dataclass(frozen=True)
class Problem:
    """Why a save failed."""

    text: str
    lacks_room: bool = False


@dataclass(frozen=True)
class Save:
    """One save to be written."""

    step: int
    tensors: dict[str, Tensor]  # for their shapes and placements
    data: Mapping[str, Tensor]  # this rank's part of each
    copied: Callable[[], None]  # waits until the data is complete
    counters: dict[str, Any]
    tiers: tuple[str, ...]  # all tiers that this state is meant for


class TierLane:
    """All ranks create one for each tier and give it the same work in the same order."""

    def __init__(self, tier: Tier, rank: int, nodes: Sequence[str | None], threads: int) -> None:
        """`nodes` has the node of every rank."""
        self.tier, self.rank = tier, rank
        self.is_local = tier.folder.node is not None
        self._leads = rank == (nodes.index(nodes[rank]) if self.is_local else 0)  # seals, removes and retains
        self._nodes, self._world = tuple(nodes), len(nodes)
        self._ranks = SavingRanks(self._world)
        self._writer = CheckedWriter(threads, tier.folder.name)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: deque[Future[SaveReport]] = deque()
        self._plan_key = uuid.uuid4().hex
        self._is_saving = False

    @property
    def name(self) -> str:
        return self.tier.folder.name

    @property
    def outstanding(self) -> int:
        """Number of saves being written or waiting."""
        return sum(not job.done() for job in self._jobs)

    @property
    def written(self) -> tuple[int, int]:
        """Bytes that this rank has written of the save in progress, and those it has to write; 0 if there is none."""
        return (self._writer.written_bytes, self._writer.own_bytes) if self._is_saving else (0, 0)

    def save(self, save: Save, then: Callable[[], None], report: Callable[[SaveReport], None]) -> None:
        """Save in the background; call `then` when the data is no longer needed."""
        self._submit(lambda: self._save_beside(save), then, report)

    def move(self, step: int, source: StepFiles, seal: Seal, report: Callable[[SaveReport], None]) -> None:
        """Copy a step of another tier in the background; `source` is what this rank sees of it."""
        self._submit(lambda: self._move(step, source, seal), lambda: None, report)

    def finished(self, wait: bool) -> tuple[list[SaveReport], list[str]]:
        """Return the reports since the last call, and other errors; with `wait`, of all work given so far."""
        reports, broken = [], []
        while self._jobs and (wait or self._jobs[0].done()):
            try:
                reports.append(self._jobs.popleft().result())
            except RuntimeError as error:
                broken.append(f"a checkpoint was abandoned because ranks lost contact: {error}")
        return reports, broken

    def has_room(self) -> bool:
        """Whether the tier now has room for the previous save; known where saves are coordinated, on a shared file
        system."""
        try:
            free = self.tier.write(0).free_bytes()
        except (OSError, CratonError):
            return False
        return free is not None and free >= self._writer.needed_bytes > 0

    def abandon(self, seconds: float) -> bool:
        """Wait for the save in progress, which can no longer succeed; return whether it has ended."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        ended = not wait_for_all(self._jobs, seconds).not_done
        if ended:
            self._writer.close()
        forget_plan(self._plan_key)
        return ended

    def close(self) -> None:
        self._executor.shutdown()
        self._writer.close()
        forget_plan(self._plan_key)

    def _submit(
        self, work: Callable[[], SaveReport], then: Callable[[], None], notify: Callable[[SaveReport], None]
    ) -> None:
        def run() -> SaveReport:
            report = None
            try:
                report = work()
            finally:
                if report is None or report.error:
                    forget_plan(self._plan_key)  # not all ranks may have cached the plan of a failed save
                then()
            notify(report)
            return report

        self._jobs.append(self._executor.submit(run))

    def _save_beside(self, save: Save) -> SaveReport:
        with going_on("saving"):
            return self._save(save)

    def _save(self, save: Save) -> SaveReport:
        save.copied()
        report = self._attempt(save)
        if report.lacks_room and (removed := self._make_room(save.step)):
            forget_plan(self._plan_key)  # not all ranks may have cached the plan of a failed save
            report = replace(self._attempt(save), removed=removed)
        return report

    def _make_room(self, step: int) -> tuple[str, ...]:
        """Return the names of what was removed on any node."""
        removed: list[str] = []
        if self._leads:
            missing = self._writer.needed_bytes - self._writer.free_bytes if self._writer.free_bytes is not None else 0
            try:
                removed = make_room(self.tier, step, missing)
            except (OSError, CratonError) as failure:
                warnings.warn(f"tier {self.name}: cannot make room: {failure}", stacklevel=2)
        return tuple(sorted({name for names in self._ranks.gather(removed) for name in names}))

    def _attempt(self, save: Save) -> SaveReport:
        began = time.perf_counter()
        target = self.tier.write(save.step)
        self._writer.aim(target)
        self._is_saving = True
        try:
            error = self._write_shards(target, save)
        finally:
            self._is_saving = False
        files: dict[str, FileSum] = {}
        for part in self._ranks.gather(self._writer.sums):
            files.update(part)
        size = sum(file.bytes for file in files.values())
        about = {"step": save.step, "world": self._world, "counters": resolved(save.counters), "bytes": size}
        about |= {"tiers": list(save.tiers), "save": uuid.uuid4().hex, "time": time.time()}
        seal = Seal(self._ranks.of_rank_0(about), files)
        metadata = self._ranks.of_rank_0(self._writer.metadata) if self.is_local else b""
        error = self._end(target, seal, error, metadata)
        return self._report(save.step, target, size, began, error, "saved")

    def _report(
        self, step: int, target: StepWriter, size: int, began: float, problem: Problem | None, outcome: Outcome
    ) -> SaveReport:
        seconds = time.perf_counter() - began
        if problem is None:
            return SaveReport(step, self.name, target.where, size, seconds, outcome=outcome)
        return SaveReport(step, self.name, target.where, size, seconds, problem.text, "failed", problem.lacks_room)

    def _write_shards(self, target: StepWriter, save: Save) -> Problem | None:
        ignore_single_process_warning()
        try:
            dcp.save(
                save.tensors,
                storage_writer=self._writer,
                planner=LocalDataPlanner(save.data, self._plan_key),
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        except CheckpointException as failure:
            return self._explain(target, {rank: error for rank, (error, _) in failure.failures.items()})
        return None

    def _end(self, target: StepWriter, seal: Seal, error: Problem | None, metadata: bytes) -> Problem | None:
        """Seal the step, or remove its files; the same result on all ranks."""
        if error is None and self._leads:
            try:
                if self.is_local and self.rank != 0:  # every node has the description of the whole step
                    with target.create(METADATA) as file:
                        file.write(metadata)
                target.finish(seal)
            except (OSError, CratonError) as failure:
                error = self._explain(target, {self.rank: failure})
        errors = [entry for entry in self._ranks.gather(error) if entry]
        if self._leads:
            try:
                if errors:
                    target.abandon()
                    if self.is_local and error is None:  # another node's part is missing
                        self.tier.remove(int(seal.about["step"]))
                else:
                    retain(self.tier, int(seal.about["step"]))
            except (OSError, CratonError) as failure:
                warnings.warn(f"tier {self.name}: a checkpoint could not be removed: {failure}", stacklevel=2)
        lacks_room = any(item.lacks_room for item in errors)
        agreed: Problem | None = self._ranks.of_rank_0(replace(errors[0], lacks_room=lacks_room) if errors else None)
        return agreed  # the same on every rank

    def _move(self, step: int, source: StepFiles, seal: Seal) -> SaveReport:
        """Copy each file on one rank that sees it, in parallel on the nodes that hold some."""
        began = time.perf_counter()
        target = self.tier.write(step)
        held = {name for name, file in seal.files.items() if source.size(name) == file.bytes}
        error = None
        try:
            if self._leads:
                target.begin(leads=True)
        except (OSError, CratonError) as failure:
            error = self._explain(target, {self.rank: failure})
        holders = self._ranks.gather((error, held))  # also a barrier: no rank writes before the place exists
        errors = [entry for entry, _ in holders if entry]
        if not errors:
            mine = _share(self.rank, [held for _, held in holders], seal.files)
            errors = [item for item in self._ranks.gather(self._copy(target, source, seal, mine)) if item]
        error = self._end(target, seal, errors[0] if errors else None, b"")
        size = sum(file.bytes for file in seal.files.values())
        return self._report(step, target, size, began, error, "moved")

    def _copy(self, target: StepWriter, source: StepFiles, seal: Seal, names: Sequence[str]) -> Problem | None:
        try:
            for name in names:
                expected = seal.files[name]
                with target.create(name) as file:
                    for data in checked_spans(source, name, expected):
                        file.write(data)
        except (OSError, CratonError) as failure:
            return self._explain(target, {self.rank: failure})
        return None

    def _explain(self, target: StepWriter, errors: Mapping[int, BaseException]) -> Problem:
        """Return the error for all ranks: rank 0's message, if it has one."""
        step = target.where.rpartition("step-")[2].lstrip("0") or "0"
        numbers = {error.errno for error in errors.values() if isinstance(error, OSError)}
        needed, free = self._writer.needed_bytes, self._writer.free_bytes
        is_short = free is not None and needed > free
        if is_short or numbers & {errno.ENOSPC, errno.EDQUOT}:
            return Problem(
                f"step {step} was not saved: {self._full(target, is_short, errors)}{self._kept()}", lacks_room=True
            )
        messages = {
            rank: str(error) if isinstance(error, CratonError) else f"{type(error).__name__}: {error}"
            for rank, error in sorted(errors.items())
        }
        ranks: dict[str, list[int]] = {}
        for rank, text in messages.items():
            ranks.setdefault(text, []).append(rank)
        message = f"tier {self.name}: step {step} was not saved to {target.where}: "
        message += "; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items())
        if errno.ENOENT in numbers:
            message += "; the tier's folder is gone: check that its file system is mounted"
        elif errno.EROFS in numbers:
            message += "; make it writable again, or use another folder"
        return Problem(f"{message}{self._kept()}")

    def _full(self, target: StepWriter, is_short: bool, ranks: Iterable[int]) -> str:
        """Return which place is full, what the save needs there and what to do; `is_short`: detected before writing."""
        folder = target.where.rpartition("/step-")[0]
        where = "the run directory" if self.name == RESCUE else f"tier {self.name}"
        if not folder.startswith(self.name):
            where += f" ({folder})"
        if self.is_local:
            where += f" on {', '.join(sorted({str(self._nodes[rank]) for rank in ranks}))}"
        needed, free = formatting.stored(self._writer.needed_bytes), formatting.stored(self._writer.free_bytes)
        if is_short:
            room = f"is full: the save needs {needed}, {free} are free"
        else:
            before = f", {free} were free when it began" if self._writer.free_bytes is not None else ""
            room = f"became full during the save, which needs {needed}{before}"
        advice = "" if self.name == RESCUE else "; free space there, keep fewer checkpoints or use another folder"
        return f"{where} {room}{advice}"

    def _kept(self) -> str:
        try:
            complete = self.tier.complete_steps()
        except (OSError, CratonError):
            return "; the tier's checkpoints cannot be listed now"
        return f"; the checkpoint of step {complete[0]} is intact" if complete else ""


def _share(rank: int, held: Sequence[set[str]], files: Mapping[str, FileSum]) -> list[str]:
    """Return the files that this rank copies: the largest first, each to the rank with the least work of those that see
    it. A file that no rank sees goes to rank 0, which reports it."""
    load, mine = [0] * len(held), []
    for name in sorted(files, key=lambda name: (-files[name].bytes, name)):
        able = [other for other, names in enumerate(held) if name in names] or [0]
        chosen = min(able, key=lambda other: (load[other], other))
        load[chosen] += files[name].bytes
        if chosen == rank:
            mine.append(name)
    return mine
