"""Checkpoints: copy the state to host memory, write it to the tiers, restore it on any number of ranks.

`Checkpointer.save` copies this rank's tensors to CPU memory, which is all that training waits for. Every due tier
writes from that one copy, in the background and at its own pace. A tier that is two saves behind skips one and reports
it. A failed save costs only that save: earlier steps stay, training continues, and the next save retries the tier.
`restore` fills the given tensors, however they are sharded, from the newest step of the fastest tier that has it, and
checks every block of every file. It reports what it skips and takes the next copy or an older step instead. What a
lower tier missed is then copied down to it in the background.

A state that no lasting tier takes at the end of a run goes to the run directory (`rescue`), where a restore also finds
it.

The fastest tier is the memory of the nodes (`peer`), if there are keepers. It has its own interval and is for faults
only; a stop or the end saves to the tiers that last.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from craton.errors import CratonError
from craton.formatting import memory
from craton.job.sections import RESCUE
from craton.ml.training.checkpoint.checksums import CheckpointError, DifferentModelError, RanksLostError
from craton.ml.training.checkpoint.find import FoundStep, find_checkpoint, open_tier, read_tensors, some
from craton.ml.training.checkpoint.lane import Save, SaveReport, TierLane
from craton.ml.training.checkpoint.peer import PEER, Note, PeerMemory, PeerSave, PeerSetup, find_saves, load_save
from craton.ml.training.checkpoint.restore import check_names, find_together, load_together, open_together
from craton.ml.training.checkpoint.staging import (
    SavingRanks,
    Staging,
    file_threads,
    local_data,
    nothing,
    synchronize,
)
from craton.ml.training.checkpoint.tiers import Tier, TierFolder

OUTSTANDING_SAVES = 2  # per tier: one being written, one waiting

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DifferentModelError",
    "FoundStep",
    "PeerSetup",
    "RanksLostError",
    "RestoreReport",
    "SaveReport",
    "TierFolder",
    "find_checkpoint",
    "read_tensors",
]


@dataclass(frozen=True)
class RestoreReport:
    """Where the state came from, and which checkpoints were skipped and why."""

    step: int
    tier: str
    folder: str
    bytes: int
    seconds: float
    passed_over: tuple[str, ...]


class Checkpointer:
    """All ranks create one and call its methods in the same order with the same arguments (except their own shards)."""

    def __init__(
        self,
        tiers: Sequence[TierFolder],
        rank: int,
        world: int,
        peer: PeerSetup | None = None,
        rescue: TierFolder | None = None,
        continues: bool = False,
    ) -> None:
        """`rescue` is where a state goes that no lasting tier takes. `continues`: peer memory may hold the newest
        state, so an unusable tier is a warning, not an error."""
        assert len({tier.name for tier in tiers}) == len(tiers), "two tiers have the same name"
        self.tiers = tuple(tiers)
        self.rank, self.world = rank, world
        self.restored: RestoreReport | None = None
        self._tiers = [open_tier(folder) for folder in tiers]
        self._rescue = open_tier(rescue) if rescue is not None else None
        self._ranks = SavingRanks(world)
        nodes = {folder.name: self._ranks.gather(folder.node) for folder in tiers}
        self._prepare(nodes, continues)
        threads = file_threads()
        self._lanes = {tier.folder.name: TierLane(tier, rank, nodes[tier.folder.name], threads) for tier in self._tiers}
        self._staging = Staging()
        self._reports: deque[SaveReport] = deque()
        self._last_seconds: dict[str, float] = {}  # when a timed tier was last due
        self._due: tuple[int, tuple[str, ...]] = (-1, ())
        self._held: dict[str, int] = {}  # the step of the current course of training in each tier
        self._missed: set[str] = set()  # tiers whose last save failed or was skipped: they join the next one
        have_keeper = self._ranks.gather(peer is not None)
        self._peer = PeerMemory(peer, rank, self._ranks) if peer and all(have_keeper) else None
        if any(have_keeper) and not all(have_keeper) and rank == 0:
            without = [other for other, has in enumerate(have_keeper) if not has]
            warnings.warn(f"state is not kept in memory: ranks {without} have no keeper", stacklevel=2)
        self._peer_due = -1

    def due(self, step: int, now: float | None = None, last: bool = False) -> bool:
        """Whether a tier is due at this step; uses rank 0's clock, so that all ranks agree. `last`: a lasting save
        follows anyway."""
        now = time.monotonic() if now is None else now
        names = [tier.name for tier in self.tiers if tier.every_steps and step and step % tier.every_steps == 0]
        timed = [tier for tier in self.tiers if tier.every_seconds]
        if timed:
            late = [now - self._last_seconds.setdefault(tier.name, now) >= (tier.every_seconds or 0) for tier in timed]
            late = self._ranks.flags_of_rank_0(late)
            for tier in (tier for tier, is_late in zip(timed, late, strict=True) if is_late):
                self._last_seconds[tier.name] = now
                names.append(tier.name)
        self._due = (step, tuple(names))
        self._peer_due = step if self._peer is not None and self._peer.due(step) and not last else -1
        return bool(names) or self._peer_due == step

    def save(self, step: int, tensors: Mapping[str, Tensor], counters: Mapping[str, Any], wait: bool = False) -> float:
        """Save to the tiers that `due` found due for this step, otherwise to all; return the seconds that training was
        blocked. A tier that already has this state is skipped. With `wait`, return when the files are safe; this needs
        no memory for a copy.

        Raises CheckpointError if an earlier background save failed (this one continues), or with `wait` if this one
        failed and no tier that outlives the nodes has the state. Raises RanksLostError if other ranks are gone.
        """
        began = time.perf_counter()
        if self._peer is not None and self._peer_due == step and not wait:
            self._peer_due = -1
            self._peer.snapshot(step, tensors, counters)
            if self._due == (step, ()):  # no other tier is due
                self._due = (-1, ())
                return time.perf_counter() - began
        earlier = self._settle(wait)
        local = local_data(tensors)
        wanted, taken, in_memory = self._agree(step, local, wait)
        snapshot = self._staging.copy(local, len(taken)) if taken and in_memory else None
        if taken and snapshot is None:
            synchronize(local)
        data, copied, done = (snapshot.data, snapshot.wait, snapshot.done) if snapshot else (local, nothing, nothing)
        save = Save(step, dict(tensors), data, copied, dict(counters), wanted)
        for name in taken:
            self._lanes[name].save(save, done, self._reports.append)
        problem = self._settle(wait=True) if taken and snapshot is None else None
        if problem and wait and self._is_safe(step):
            earlier, problem = "\n".join(text for text in (earlier, problem) if text), None
        if earlier and wait:
            warnings.warn(earlier, stacklevel=2)
            earlier = None
        if problem or earlier:
            raise CheckpointError("\n".join(text for text in dict.fromkeys((earlier, problem)) if text))
        return time.perf_counter() - began

    def rescue(self, step: int, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Save a state that no lasting tier took to the run directory, and wait; CheckpointError if this fails too. The
        folder is created only now, so that runs with working tiers have none."""
        if self._rescue is None:
            raise CheckpointError("there is no other place to save it")
        problem = None
        if self.rank == 0:
            try:
                Path(self._rescue.folder.path).mkdir(exist_ok=True)  # not its parents: the run directory may be gone
                self._rescue.remove_leftovers()
            except OSError as error:
                problem = f"step {step} was not saved to {self._rescue.folder.path}: {error.strerror or error}"
        if problem := self._ranks.of_rank_0(problem):
            raise CheckpointError(problem)
        if RESCUE not in self._lanes:
            self._lanes[RESCUE] = TierLane(self._rescue, self.rank, [None] * self.world, file_threads())
        local = local_data(tensors)
        synchronize(local)
        wanted = tuple(tier.name for tier in self.tiers)
        save = Save(step, dict(tensors), local, nothing, dict(counters), wanted)
        self._lanes[RESCUE].save(save, nothing, self._reports.append)
        if problem := self._settle(wait=True):
            raise CheckpointError(problem)

    def progress(self) -> list[tuple[str, int, int]]:
        """Return the tiers that are being written, with this rank's bytes written so far and in all."""
        under_way = [(name, *lane.written) for name, lane in tuple(self._lanes.items())]
        return [(name, written, total) for name, written, total in under_way if total]

    def places_with_room(self) -> frozenset[str]:
        """Return the tiers that have room for a save that failed before, as rank 0 sees them."""
        return frozenset(name for name, lane in self._lanes.items() if lane.has_room())

    def agree(self, choice: bool) -> bool:
        """Return rank 0's choice on all ranks."""
        return self._ranks.flags_of_rank_0([choice])[0]

    def keep(self, step: int, tensors: Mapping[str, Tensor], counters: Mapping[str, Any], nodes: Sequence[str]) -> bool:
        """Store this state in peer memory, complete on return, for ranks that are about to be replaced without a
        failure. `nodes` are those that stay, as far as this rank knows. False: there is no such memory, or some of it
        leaves with its node, so `save` must be used."""
        if self._peer is None or not self._peer.keep(step, tensors, counters):
            return False
        messages = [set(item) for item in self._ranks.gather(tuple(nodes)) if item]
        return all(stay.issuperset(self._peer.setup.nodes) for stay in messages)

    def reserve(self, tensors: Mapping[str, Tensor], step: int = 0) -> None:
        """Allocate the memory of the copies now, so that the first saves do not block training longer than later ones:
        one copy being written, and one made meanwhile. On a GPU this goes on beside the first steps. `step` is the last
        one done."""
        staged = nothing
        if any(tier.every_steps or tier.every_seconds for tier in self.tiers):
            staged = self._staging.reserve(local_data(tensors), copies=2)
        if self._peer is not None:
            self._peer.reserve(step, tensors, staged)

    def measure_again(self) -> None:
        """Call when steps take another time than before: a measured interval of snapshots is measured again."""
        if self._peer is not None:
            self._peer.measure_again()

    def finish_copy(self) -> bool:
        """Call before the state changes: wait until a GPU's copies beside the computation are done. Return whether
        there was one."""
        in_slot = self._peer is not None and self._peer.finish_on_device()
        return self._staging.finish_on_device() or in_slot

    def wait(self) -> None:
        """Return when no save is in flight; CheckpointError if one failed, RanksLostError if ranks are gone."""
        if self._peer is not None:
            self._peer.settle()
        if problem := self._settle(wait=True):
            raise CheckpointError(problem)

    def reports(self) -> list[SaveReport]:
        """Return the saves that ended since the last call, including failed ones. Does not wait."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def notes(self) -> list[Note]:
        """Return the notes about peer memory since the last call; the same on all ranks."""
        return self._peer.notes() if self._peer is not None else []

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        before: int | None = None,
        trust_peer: bool = True,
        needed: Sequence[str] = (),
    ) -> dict[str, Any] | None:
        """Fill the tensors in place and return the counters they were saved with, and `step`; None if no tier has a
        checkpoint. `restored` reports the source. Peer memory, which has only the newest steps, is searched for a step
        `before` the given one. Without `trust_peer` it is not used from here on, and later steps in all tiers are
        removed. A step without one of the `needed` counters is skipped.

        Raises CheckpointError if there are checkpoints but none is usable: starting from scratch is the user's
        decision.
        """
        if problem := self._settle(wait=True):
            warnings.warn(problem, stacklevel=2)
        began = time.perf_counter()
        tiers = self._tiers_to_read
        steps_on_disk, passed_over = find_together(self._ranks, self.rank, tiers)
        distrusted = self.restored.step if self.restored is not None and not trust_peer else None
        if distrusted is not None:
            steps_on_disk = [(step, index) for step, index in steps_on_disk if step <= distrusted]
        saves, lost = self._find_in_memory(before, trust_peer)
        passed_over += lost
        steps_in_memory = [(save.step, -1) for save in saves]
        for step, index in sorted(steps_in_memory + steps_on_disk, key=lambda item: (-item[0], item[1])):
            if index < 0:
                if counters := self._restore_from_memory(saves.pop(0), tensors, passed_over, began):
                    return counters
                continue
            tier = tiers[index]
            saved, problems = open_together(self._ranks, self.rank, tier, step)
            missing = [name for name in needed if saved is not None and name not in saved.seal.about["counters"]]
            if missing:
                saved, problems = None, [f"COMPLETE has no counter {', '.join(missing)}"]
            if saved is not None:
                check_names(self._ranks, saved, tensors)
                problems = load_together(self._ranks, tier, saved, tensors)
            if saved is not None and not problems:
                size = sum(file.bytes for file in saved.seal.files.values())
                seconds = time.perf_counter() - began
                where = saved.files.where
                self.restored = RestoreReport(step, saved.tier, where, size, seconds, tuple(passed_over))
                self._held = {saved.tier: step}
                if self._peer is not None:
                    self._peer.restored(step, None)
                if distrusted is not None:
                    self._remove_after(distrusted)
                self._move_down(index, saved)
                return {**saved.seal.about["counters"], "step": step}
            passed_over.append(f"tier {tier.folder.name}: step {step} cannot be used: {some(problems)}")
            if self.rank == 0:
                warnings.warn(f"{passed_over[-1]}; trying an older checkpoint or another tier", stacklevel=2)
        if passed_over:
            raise CheckpointError(
                "no checkpoint is usable:\n  "
                + "\n  ".join(passed_over)
                + "\nrestore a good copy, or remove these folders to start from scratch"
            )
        return None

    def seal(self) -> None:
        """Call before communicators are aborted, from any thread: nothing that a device computes after that is kept.
        Other tiers need no such care: their saves count only once all ranks have agreed on them."""
        if self._peer is not None:
            self._peer.seal()

    def abandon(self, seconds: float) -> bool:
        """Abort what is in progress, because other ranks are gone. False if a thread still writes after this time and
        might corrupt what the next generation writes."""
        deadline = time.monotonic() + seconds
        users: list[TierLane | PeerMemory] = [*self._lanes.values(), *([self._peer] if self._peer else [])]
        ended = [user.abandon(max(0.0, deadline - time.monotonic())) for user in users]
        return self._staging.has_reserved(max(0.0, deadline - time.monotonic())) and all(ended)

    def close(self) -> None:
        """Wait for the last save, and release threads and memory."""
        try:
            self.wait()
        finally:
            if self._peer is not None:
                self._peer.close()
            for lane in self._lanes.values():
                lane.close()
            self._staging.has_reserved(None)
            self._staging = Staging()

    @property
    def _tiers_to_read(self) -> list[Tier]:
        return self._tiers if self._rescue is None else [*self._tiers, self._rescue]

    def _remove_after(self, step: int) -> None:
        """Remove later steps from every tier: they would be restored before better ones."""
        for tier in self._tiers_to_read:
            if self.rank == 0 or tier.folder.node is not None:
                with suppress(OSError, CratonError):  # the next save or restore reports it
                    for later in [item for item in tier.steps() if item > step]:
                        tier.remove(later)

    def _find_in_memory(self, before: int | None, trust: bool) -> tuple[list[PeerSave], list[str]]:
        """Return what peer memory holds, and what it has lost."""
        if self._peer is None:
            return [], []
        self._peer.settle()
        self._peer.distrusted |= not trust
        if self._peer.distrusted:
            return [], []
        saves, problems, lost = find_saves(self._peer, self._ranks, before)
        if self.rank == 0:
            for text in (*problems, *lost):
                warnings.warn(text, stacklevel=3)
        return saves, lost

    def _restore_from_memory(
        self, save: PeerSave, tensors: Mapping[str, Tensor], passed_over: list[str], began: float
    ) -> dict[str, Any] | None:
        assert self._peer is not None
        done, problems = load_save(self._peer, self._ranks, save, tensors)
        passed_over += problems
        if self.rank == 0:
            for problem in problems:
                warnings.warn(f"{problem}; trying another copy, an older one or another tier", stacklevel=3)
        if not done:
            return None
        where, seconds = f"memory of the nodes, save {save.save}", time.perf_counter() - began
        self.restored = RestoreReport(save.step, PEER, where, save.bytes, seconds, tuple(passed_over))
        self._held = {}
        self._peer.restored(save.step, save.save)
        return {**save.counters, "step": save.step}

    def _prepare(self, nodes: Mapping[str, list[str | None]], continues: bool) -> None:
        """Create the tiers' folders and remove unfinished saves. Runs before the lanes, while no rank can be writing
        yet."""
        problem = None
        if self._rescue is not None and self.rank == 0:
            with suppress(OSError):  # the next rescue, if any, retries
                self._rescue.remove_leftovers()
        for tier in self._tiers:
            of_ranks = nodes[tier.folder.name]
            if self.rank != of_ranks.index(of_ranks[self.rank]):
                continue
            try:
                tier.prepare()
                if left := tier.remove_leftovers():
                    warnings.warn(f"tier {tier.folder.name}: removed unfinished {', '.join(left)}", stacklevel=3)
            except OSError as error:
                problem = (
                    f"checkpoint tier {tier.folder.name} cannot be used: {tier.folder.path}: "
                    f"{error.strerror or error}; set checkpoint.tiers to a folder that every rank can write to"
                )
            except CratonError as error:
                problem = f"checkpoint tier {tier.folder.name} cannot be used: {error}"
        problems = list(dict.fromkeys(text for text in self._ranks.gather(problem) if text))
        if problems and not continues:
            raise CheckpointError("\n".join(problems))
        for text in problems if self.rank == 0 else ():
            warnings.warn(f"{text}; it joins the next save when it can be used again", stacklevel=3)

    def _agree(self, step: int, local: Mapping[str, Tensor], wait: bool) -> tuple[tuple[str, ...], list[str], bool]:
        """Return (tiers for this state, those written now, whether from a copy). Rank 0 decides, because the lanes of
        different ranks finish at different times. The copy needs room on every rank."""
        (due_step, due), self._due = self._due, (-1, ())  # the next save of this step is a stop: to all tiers
        names = [tier.name for tier in self.tiers]
        if due_step == step and due:
            names = [name for name in names if name in due or name in self._missed]
        names = [name for name in names if self._held.get(name) != step]
        late = [name for name in names if self._lanes[name].outstanding >= OUTSTANDING_SAVES]
        busy = any(lane.outstanding for lane in self._lanes.values())
        missing = 0.0 if wait else self._staging.missing_bytes(local)
        answers = self._ranks.gather((names, late, busy, missing))
        names, late, busy, _ = answers[0]
        missing = max(answer[3] for answer in answers)
        reasons = dict.fromkeys(late, "earlier saves are still being written")
        if missing and busy:
            message = f"another copy of the state needs {memory(missing)} more memory than a rank has free"
            reasons = {name: reasons.get(name, message) for name in names}
        for name, reason in reasons.items():
            where = str(self._lanes[name].tier.folder.path)
            self._reports.append(SaveReport(step, name, where, 0, 0.0, reason, "skipped"))
            self._missed.add(name)
        taken = [name for name in names if name not in reasons]
        if taken and missing and self.rank == 0:
            warnings.warn(
                f"a copy of the state needs {memory(missing)} more memory than a rank has free; training waits "
                "until the checkpoint is written",
                stacklevel=3,
            )
        return tuple(names), taken, not wait and not missing

    def _settle(self, wait: bool) -> str | None:
        """Process the saves that ended, or with `wait` all of them; return the errors, if any. RanksLostError if it
        waited for ranks that are gone."""
        problems = []
        for lane in self._lanes.values():
            reports, broken = lane.finished(wait)
            if broken and wait and self.world > 1:
                raise RanksLostError(broken[0])
            problems += broken
            for report in reports:
                if report.error is None:
                    self._held[report.tier] = report.step
                    self._missed.discard(report.tier)
                    if report.tier in self._lasting:
                        self._forget_rescued(report.step)
                else:
                    self._missed.add(report.tier)
                    problems.append(report.error)
        return "\n".join(dict.fromkeys(problems)) or None

    def _is_safe(self, step: int) -> bool:
        """Whether a tier that outlives the nodes has this state."""
        return any(self._held.get(name) == step for name in (*self._lasting, RESCUE))

    @property
    def _lasting(self) -> list[str]:
        return [tier.name for tier in self.tiers if tier.node is None]

    def _forget_rescued(self, step: int) -> None:
        """Remove this step and older ones from the rescue folder: a lasting tier has it."""
        if self._rescue is not None and self.rank == 0:
            with suppress(OSError):  # leftovers are harmless, and go with the next save
                for rescued in self._rescue.steps():
                    if rescued <= step:
                        self._rescue.remove(rescued)

    def _move_down(self, index: int, saved: FoundStep) -> None:
        """Copy this step in the background to lower tiers that it was meant for and that have nothing as new."""
        names = []
        if self.rank == 0:
            lower = self._tiers if saved.tier == RESCUE else self._tiers[index + 1 :]
            for tier in lower:
                with suppress(OSError, CratonError):  # an unreadable tier is retried with the next save
                    meant = tier.folder.node is None and tier.folder.name in saved.seal.about["tiers"]
                    if meant and max(tier.complete_steps(), default=-1) < saved.step:
                        names.append(tier.folder.name)
        for name in self._ranks.of_rank_0(names):
            self._lanes[name].move(saved.step, saved.files, saved.seal, self._reports.append)
