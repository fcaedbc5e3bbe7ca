"""Checkpoints: state leaves the training for a moment, the disk keeps it, any number of ranks takes it back.

`Checkpointer.save` copies this rank's tensors into CPU memory, which is all that training waits for, and writes them
in the background with `torch.distributed.checkpoint` over a process group of its own. A save that fails costs that
save: the checkpoints before it stay, training may go on, and the next call says what happened. `restore` fills the
given tensors, whatever they are sharded over, from the newest checkpoint of any tier whose every file has the checksum
it was written with; when it must pass one over it says so.
"""

from __future__ import annotations

import errno
import shutil
import time
import uuid
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import get_crc32_options, set_crc32_options

from craton.ml.training.checkpoint_files import (
    CheckedWriter,
    CheckpointError,
    DifferentModelError,
    FileSum,
    ThreadedReader,
    TierFolder,
    candidates,
    damage,
    ignore_single_process_warning,
    is_complete,
    partial_folder,
    read_seal,
    remove_leftovers,
    retain,
    seal,
    shapes_in,
    step_folder,
    steps_in,
)
from craton.ml.training.checkpoint_staging import LocalDataPlanner, Ranks, Staging, file_threads, local_data

LISTED_NAMES = 8  # of a different model; the rest are counted

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DifferentModelError",
    "RestoreReport",
    "SaveReport",
    "TierFolder",
    "find_checkpoint",
    "read_tensors",
]


@dataclass(frozen=True)
class SaveReport:
    """How one save of one tier went."""

    step: int
    tier: str
    folder: Path
    bytes: int
    seconds: float  # in the background
    error: str | None = None


@dataclass(frozen=True)
class RestoreReport:
    """Where the state came from, and which newer checkpoints were passed over and why."""

    step: int
    tier: str
    folder: Path
    bytes: int
    seconds: float
    passed_over: tuple[str, ...]


class Checkpointer:
    """All ranks make one and call its methods in the same order with the same arguments (but their own shards)."""

    def __init__(self, tiers: Sequence[TierFolder], rank: int, world: int) -> None:
        assert len({tier.name for tier in tiers}) == len(tiers), "two tiers have the same name"
        self.tiers = tuple(tiers)
        self.rank, self.world = rank, world
        self.restored: RestoreReport | None = None
        if rank == 0:  # before the groups below, so that no rank can be writing yet
            for tier in tiers:
                if left := remove_leftovers(tier.path):
                    warnings.warn(f"tier {tier.name}: removed unfinished {', '.join(left)}", stacklevel=2)
        threads = file_threads()
        self._ranks = Ranks(world)
        self._clock = Ranks(world)  # a group of its own: the other one belongs to the writing thread during a save
        self._staging = Staging()
        self._writer = CheckedWriter(threads)
        self._threads = threads
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[list[SaveReport]] | None = None
        self._reports: deque[SaveReport] = deque()
        self._last_seconds: dict[str, float] = {}  # when a timed tier was last found due
        self._due: tuple[int, tuple[str, ...]] = (-1, ())
        self._held: dict[str, int] = {}  # the step that the training's present course has in each tier
        self._plan_key = uuid.uuid4().hex

    def due(self, step: int, now: float | None = None) -> bool:
        """Whether a tier wants this step; a clock is rank 0's, so that all ranks answer the same."""
        now = time.monotonic() if now is None else now
        names = [tier.name for tier in self.tiers if tier.every_steps and step and step % tier.every_steps == 0]
        timed = [tier for tier in self.tiers if tier.every_seconds]
        if timed:
            late = [now - self._last_seconds.setdefault(tier.name, now) >= (tier.every_seconds or 0) for tier in timed]
            late = self._clock.flags_of_rank_0(late)
            for tier in (tier for tier, is_late in zip(timed, late, strict=True) if is_late):
                self._last_seconds[tier.name] = now
                names.append(tier.name)
        self._due = (step, tuple(names))
        return bool(names)

    def save(self, step: int, tensors: Mapping[str, Tensor], counters: Mapping[str, Any], wait: bool = False) -> float:
        """Saves to the tiers that `due` found due for this step, otherwise to all, and returns the seconds for which
        training was blocked. A tier that has this very state already is left alone. With `wait` it returns when the
        files are safe, and needs no memory for a copy.

        CheckpointError when this save failed, or an earlier one in the background did; this one goes on in that case.
        """
        began = time.perf_counter()
        earlier = self._finish()
        (due_step, due_names), self._due = self._due, (-1, ())  # the next save of this step is a stop: to all tiers
        wanted = [tier for tier in self.tiers if not (due_step == step and due_names) or tier.name in due_names]
        tiers = [tier for tier in wanted if self._held.get(tier.name) != step]
        problem = None
        if tiers:
            local = local_data(tensors)
            staged = None if wait else self._staging.copy(local)
            self._in_flight = self._executor.submit(
                self._write, tiers, step, dict(tensors), local if staged is None else staged, dict(counters)
            )
            if staged is None:
                problem = self._finish()
        if problem or (earlier and not wait):
            raise CheckpointError("\n".join(text for text in dict.fromkeys((earlier, problem)) if text))
        if earlier:
            warnings.warn(earlier, stacklevel=2)
        return time.perf_counter() - began

    def wait(self) -> None:
        """Returns when no save is in flight; CheckpointError when the last one failed."""
        if problem := self._finish():
            raise CheckpointError(problem)

    def reports(self) -> list[SaveReport]:
        """The saves that ended since the last call, failed ones too. Waits for nothing."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def restore(self, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Fills the tensors in place and returns the counters they were saved with, and `step`; None when no tier
        holds a checkpoint. `restored` says where they came from.

        CheckpointError when there are checkpoints and none can be used: to begin anew is for a person to decide.
        """
        if problem := self._finish():
            warnings.warn(problem, stacklevel=2)
        began = time.perf_counter()
        passed_over: list[str] = []
        for step, tier, folder in self._ranks.of_rank_0(candidates(self.tiers)):
            about, sums, problems = self._inspect(folder)
            if not problems:
                self._check_names(folder, tensors)
                problems = self._load(folder, tensors)
            if not problems:
                size = sum(file.bytes for file in sums.values())
                seconds = time.perf_counter() - began
                self.restored = RestoreReport(step, tier, folder, size, seconds, tuple(passed_over))
                self._held = {tier: step}
                return {**about["counters"], "step": step}
            passed_over.append(f"tier {tier}: step {step} cannot be used: {_some(problems)}")
            if self.rank == 0:
                warnings.warn(f"{passed_over[-1]}; trying an older checkpoint or another tier", stacklevel=2)
        if passed_over:
            raise CheckpointError(
                "no checkpoint can be used:\n  "
                + "\n  ".join(passed_over)
                + "\nput a good copy in place, or remove these folders to begin anew"
            )
        return None

    def close(self) -> None:
        """Waits for the last save, and gives threads and memory back."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._staging = Staging()

    def _finish(self) -> str | None:
        """Waits for the save in flight; what went wrong, if something did. The same on all ranks unless one died."""
        if self._in_flight is None:
            return None
        in_flight, self._in_flight = self._in_flight, None
        try:
            reports = in_flight.result()
        except RuntimeError as error:
            self._plan_key = uuid.uuid4().hex
            return f"a checkpoint was given up because the ranks could not talk to each other: {error}"
        self._held.update({report.tier: report.step for report in reports if report.error is None})
        problems = [report.error for report in reports if report.error is not None]
        if problems:
            self._plan_key = uuid.uuid4().hex  # ranks may not all have remembered the plan of a save that failed
        return "\n".join(problems) or None

    def _write(
        self,
        tiers: Sequence[TierFolder],
        step: int,
        tensors: dict[str, Tensor],
        data: Mapping[str, Tensor],
        counters: dict[str, Any],
    ) -> list[SaveReport]:
        """In the background: the same tiers on every rank, one after the other; one that fails stops no other."""
        reports = []
        for tier in tiers:
            began = time.perf_counter()
            folder = step_folder(tier.path, step)
            error = self._write_shards(tier, folder, tensors, data)
            sums = self._ranks.gather(self._writer.sums)
            size = 0
            if self.rank == 0:
                whole = {name: file for part in sums for name, file in part.items()}
                size = sum(file.bytes for file in whole.values())
                about = {"step": step, "world": self.world, "counters": counters, "bytes": size, "time": time.time()}
                error = error or self._seal(tier, folder, whole, about)
                if error:
                    shutil.rmtree(partial_folder(folder), ignore_errors=True)
            error, size = self._ranks.of_rank_0((error, size))  # also: no rank goes on before the folder is in order
            report = SaveReport(step, tier.name, folder, size, time.perf_counter() - began, error)
            reports.append(report)
            self._reports.append(report)
        return reports

    def _write_shards(
        self, tier: TierFolder, folder: Path, tensors: dict[str, Tensor], data: Mapping[str, Tensor]
    ) -> str | None:
        ignore_single_process_warning()
        archive_sums = get_crc32_options()
        set_crc32_options(False)  # ours are of the whole file, and three times as fast
        try:
            dcp.save(
                tensors,
                checkpoint_id=partial_folder(folder),
                storage_writer=self._writer,
                planner=LocalDataPlanner(data, self._plan_key),
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        except CheckpointException as failure:
            return self._explain(tier, folder, failure)
        finally:
            set_crc32_options(archive_sums)
        return None

    def _seal(self, tier: TierFolder, folder: Path, sums: dict[str, FileSum], about: dict[str, Any]) -> str | None:
        try:
            seal(folder, sums, about)
        except (OSError, CheckpointError) as error:
            return self._explain(tier, folder, CheckpointException("seal", {0: (error, None)}))  # type: ignore[dict-item]
        try:
            retain(tier.path, tier.keep)
        except OSError as error:
            warnings.warn(f"tier {tier.name}: an old checkpoint could not be removed: {error}", stacklevel=2)
        return None

    def _explain(self, tier: TierFolder, folder: Path, failure: CheckpointException) -> str:
        """Called where the failure is known; rank 0's words are the ones that all ranks say."""
        errors = {rank: error for rank, (error, _) in failure.failures.items()}
        full = any(
            isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) for error in errors.values()
        )
        short = self._writer.needed_bytes > self._writer.free_bytes > 0
        what = (
            f"tier {tier.name}: step {folder.name.removeprefix('step-').lstrip('0') or 0} was not saved to {folder}: "
        )
        what += "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(errors.items()))
        if full or short:
            what += (
                f"; the save needs {self._writer.needed_bytes:,} bytes and {self._writer.free_bytes:,} were free when "
                f"it began: make room there, keep fewer checkpoints or give the tier another folder"
            )
        complete = [step for step in steps_in(tier.path) if is_complete(step_folder(tier.path, step))]
        kept = (
            f"the checkpoint of step {complete[0]} is intact" if complete else "this tier holds no earlier checkpoint"
        )
        return f"{what}. The unfinished files were removed; {kept}"

    def _inspect(self, folder: Path) -> tuple[dict[str, Any], dict[str, FileSum], list[str]]:
        """What the checkpoint says of itself and what is wrong with it; every rank sums a part of the files."""
        seal_or_problem: tuple[dict[str, Any], dict[str, FileSum], list[str]] = ({}, {}, [])
        if self.rank == 0:
            try:
                seal_or_problem = (*read_seal(folder), [])
            except CheckpointError as error:
                seal_or_problem = ({}, {}, [str(error)])
        about, sums, problems = self._ranks.of_rank_0(seal_or_problem)
        if problems:
            return about, sums, problems
        by_size = sorted(sums, key=lambda name: (-sums[name].bytes, name))
        mine = {name: sums[name] for name in by_size[self.rank :: self.world]}
        return about, sums, [line for part in self._ranks.gather(damage(folder, mine, self._threads)) for line in part]

    def _check_names(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        saved = {name: shape for name, (shape, _) in shapes_in(folder).items()}
        wrong = [
            f"{name} is {list(tensor.shape)} here and {list(saved[name])} in the checkpoint"
            for name, tensor in tensors.items()
            if name in saved and tuple(tensor.shape) != saved[name]
        ]
        wrong += [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
        answers = self._ranks.gather((wrong, set(saved) - set(tensors)))
        everywhere = list(dict.fromkeys(line for lines, _ in answers for line in lines))
        unasked = set.intersection(*(names for _, names in answers))
        everywhere += [f"{name} is only in the checkpoint" for name in sorted(unasked)]
        if everywhere:
            raise DifferentModelError(
                f"{folder} is of another model or optimizer: {_some(everywhere)}; "
                f"resume with the job it was saved by, or start a run of another name"
            )

    def _load(self, folder: Path, tensors: Mapping[str, Tensor]) -> list[str]:
        ignore_single_process_warning()
        try:
            dcp.load(
                dict(tensors),
                storage_reader=ThreadedReader(folder, self._threads),
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        except CheckpointException as failure:
            return [f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in failure.failures.items()]
        return []


def find_checkpoint(tiers: Sequence[TierFolder], step: int | None = None) -> tuple[int, Path]:
    """The newest step with every file whole, or the given one; for whoever reads without ranks. Passes over bad ones
    as `Checkpointer.restore` does."""
    found = [(each, tier, folder) for each, tier, folder in candidates(tiers) if step in (None, each)]
    passed_over = []
    for each, tier, folder in found:
        try:
            problems = damage(folder, read_seal(folder)[1], file_threads())
        except CheckpointError as error:
            problems = [str(error)]
        if not problems:
            return each, folder
        passed_over.append(f"tier {tier}: step {each} cannot be used: {_some(problems)}")
        warnings.warn(passed_over[-1], stacklevel=2)
    if passed_over:
        raise CheckpointError("no checkpoint can be used:\n  " + "\n  ".join(passed_over))
    there = sorted({each for each, _, _ in candidates(tiers)})
    places = ", ".join(str(tier.path) for tier in tiers)
    if step is not None and there:
        raise CheckpointError(f"there is no checkpoint of step {step}; there are {', '.join(map(str, there))}")
    raise CheckpointError(f"there is no checkpoint yet in {places}")


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors from a checkpoint without ranks; the checkpoint may hold more than these."""
    saved = shapes_in(folder)
    if absent := [name for name in tensors if name not in saved]:
        raise DifferentModelError(f"{folder} does not hold {_some(absent)}; it is of another model")
    wrong = [
        f"{name} is {list(tensor.shape)} here and {list(saved[name][0])} there"
        for name, tensor in tensors.items()
        if tuple(tensor.shape) != saved[name][0]
    ]
    if wrong:
        raise DifferentModelError(f"{folder} is of another model: {_some(wrong)}")
    ignore_single_process_warning()
    try:
        dcp.load(dict(tensors), storage_reader=ThreadedReader(folder, file_threads()), no_dist=True)
    except CheckpointException as failure:
        raise CheckpointError(f"{folder} cannot be read: {next(iter(failure.failures.values()))[0]}") from None


def _some(lines: Sequence[str]) -> str:
    more = len(lines) - LISTED_NAMES
    return "; ".join(lines[:LISTED_NAMES]) + (f"; and {more} more" if more > 0 else "")
