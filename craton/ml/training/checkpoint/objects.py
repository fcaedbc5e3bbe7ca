"""The steps of a run in S3: objects under PREFIX/RUN/step-00000200/, where COMPLETE is written last and deleted
first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

from craton.errors import CratonError
from craton.infrastructure.storage import ObjectWriter, Store, open_store
from craton.ml.training.checkpoint.checksums import COMPLETE, CheckpointError, Seal
from craton.ml.training.checkpoint.tiers import (
    OWNER,
    StepFiles,
    StepWriter,
    TierFolder,
    check_owner,
    step_name,
    step_of,
)

QUESTIONS_IN_FLIGHT = 8


class ObjectTier:
    """Steps under one prefix."""

    def __init__(self, folder: TierFolder) -> None:
        self.folder = folder
        self._store = open_store(str(folder.path))

    def prepare(self) -> None:
        self._store.check_writable()
        if self.folder.owner is not None:
            there = self._store.read(OWNER).decode() if self._store.exists(OWNER) else None
            if check_owner(self.folder, there):
                self._store.put(OWNER, self.folder.owner)

    def steps(self) -> list[int]:
        return self._steps()[0]

    def complete_steps(self) -> list[int]:
        return self.steps()

    def open(self, step: int) -> list[StepFiles]:
        return [ObjectFiles(self._store, step_name(step))]

    def write(self, step: int) -> StepWriter:
        return ObjectStepWriter(self._store, step_name(step))

    def remove(self, step: int) -> None:
        remove_step(self._store, step_name(step))

    def remove_leftovers(self) -> list[str]:
        left = [step_name(step) for step in self._steps()[1]]
        for name in left:
            self._store.delete_tree(name)
        return left

    def _steps(self) -> tuple[list[int], list[int]]:
        """Return (finished, unfinished), newest first."""
        steps = sorted((step for name in self._store.folders() if (step := step_of(name)) is not None), reverse=True)
        with ThreadPoolExecutor(QUESTIONS_IN_FLIGHT) as pool:
            whole = list(pool.map(lambda step: self._store.exists(f"{step_name(step)}/{COMPLETE}"), steps))
        finished = [step for step, is_whole in zip(steps, whole, strict=True) if is_whole]
        return finished, [step for step in steps if step not in finished]


class ObjectFiles:
    """The objects of one step, listed once."""

    def __init__(self, store: Store, name: str) -> None:
        self.where = store.where(name)
        self._store = store
        try:
            self._objects = {info.name.rpartition("/")[2]: info for info in store.list(name)}
        except CratonError as error:
            raise CheckpointError(f"{self.where} cannot be listed: {error}") from error

    def size(self, name: str) -> int | None:
        return self._objects[name].bytes if name in self._objects else None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        info = self._objects[name]
        try:
            return self._store.read_range(info, begin, info.bytes if end is None else min(end, info.bytes))
        except CratonError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error


class ObjectStepWriter:
    """Objects of a step that exists only once COMPLETE does."""

    def __init__(self, store: Store, name: str) -> None:
        self.where = store.where(name)
        self._store, self._name = store, name

    def begin(self, leads: bool) -> None:
        if leads:  # must not be mixed with the same step of an abandoned course
            remove_step(self._store, self._name)

    def create(self, name: str) -> AbstractContextManager[ObjectWriter]:
        return self._store.create(f"{self._name}/{name}")

    def free_bytes(self) -> int | None:
        return None

    def finish(self, seal: Seal) -> None:
        there = {info.name.rpartition("/")[2]: info.bytes for info in self._store.list(self._name)}
        for name, expected in seal.files.items():
            if there.get(name) != expected.bytes:
                raise CheckpointError(f"{name} has {there.get(name, 0):,} bytes instead of {expected.bytes:,} in S3")
        for name, text in seal.texts().items():
            self._store.put(f"{self._name}/{name}", text)

    def abandon(self) -> None:
        with suppress(CratonError):  # the rest is removed when the run starts again
            remove_step(self._store, self._name)


def remove_step(store: Store, name: str) -> None:
    """Delete COMPLETE first, which ends the step's existence."""
    store.delete([f"{name}/{COMPLETE}"])
    store.delete_tree(name)
