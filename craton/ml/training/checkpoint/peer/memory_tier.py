"""The peer tier: state in memory that outlives the ranks, the fastest checkpoint tier.

After every k-th step a rank copies its tensors into a slot of its node's keeper. The keeper computes the checksum,
copies the slot to another node's keeper, and confirms. Then the ranks agree, beside the training, that all of them have
this confirmation. Only after that does a rank overwrite its other slot. So two slots are enough: whenever a rank dies,
the previous save is complete everywhere, and it is not overwritten anywhere before the next one is complete. On a GPU
the copy overlaps with the next forward pass. The slot's header is cleared in the same stream, so that also happens
after everything the host has waited for.

An error turns off this tier on all ranks at once, with an event and a log line; training continues, unless ranks are
gone.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from craton.agent import KeeperError
from craton.agent.memory import HEADER_BYTES, KeeperClient, OwnSlot
from craton.formatting import memory, percent
from craton.infrastructure import free_memory_bytes
from craton.ml.training.checkpoint.checksums import RanksLostError
from craton.ml.training.checkpoint.peer.interval import MEASURED_SNAPSHOTS, Costs, SnapshotCost
from craton.ml.training.checkpoint.peer.layout import SlotLayout, layout_of
from craton.ml.training.checkpoint.peer.pages import page_lock
from craton.ml.training.checkpoint.staging import FREE_SHARE, SavingRanks, local_data, nothing
from craton.ml.training.measure import resolved
from craton.telemetry.rank import own_page

PEER = "peer"  # the tier's name
AGREE_TIMEOUT = timedelta(minutes=10)  # beyond what a keeper's commit may take
COPIES = 2  # slots of a rank, here and at its buddy node

_FAILED, _UNCOPIED, _WHOLE = 0, 1, 2  # outcome of a snapshot; the worst of all ranks counts


@dataclass(frozen=True)
class PeerSetup:
    """Where the memory is; created by the code that starts the ranks of a generation. With neither interval, snapshots
    are as frequent as a cost under 2% allows."""

    keeper: str  # name of this node's keeper
    node: str
    nodes: Sequence[str]  # of every rank
    keepers: Mapping[str, str]  # node → host:port where its keeper receives copies
    generation: int
    every_steps: int | None = None
    every_seconds: float | None = None


@dataclass(frozen=True)
class Note:
    """Something to record as an event and print to the log."""

    event: str
    step: int
    fields: dict[str, Any]
    text: str


@dataclass
class _OpenSlot:
    """A slot that this rank fills."""

    own: OwnSlot
    memory: mmap.mmap
    header: Tensor
    chunks: list[Tensor]
    save: str | None
    step: int


class PeerMemory:
    """Created by all ranks of a generation, which call its methods in the same order."""

    def __init__(self, setup: PeerSetup, rank: int, ranks: SavingRanks) -> None:
        self.setup, self.rank = setup, rank
        self.client = KeeperClient(setup.keeper)
        self.distrusted = False  # for restoring, in this generation
        self.off: str | None = "no slots are allocated"
        self._ranks = ranks
        self._agreeing = SavingRanks(ranks.world, AGREE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="peer-commit")
        self._interval = setup.every_steps
        self._layout = SlotLayout((), "[]")
        self._layouts: list[str] = []
        self._slots: list[_OpenSlot] = []
        self._token = ""
        self._buddy: str | None = None
        self._course, self._base = [setup.generation, 0], 0
        self._complete: str | None = None  # the newest save that every rank is known to have
        self._snapshots = 0  # of the current course
        self._last_step = 0
        self._to_reserve: Callable[[], Future[list[tuple[str | None, str]]]] | None = None
        self._reserving: Future[list[tuple[str | None, str]]] | None = None
        self._under_way: Future[tuple[int, list[str], float]] | None = None
        self._filling: _OpenSlot | None = None
        self._is_copied = True
        self._registered: list[int] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._last_copied: torch.cuda.Event | None = None
        self._intact: torch.cuda.Event | None = None  # the copy that was complete when communicators were aborted
        self._is_sealed = False
        self._zero: Tensor | None = None
        self._costs = Costs()
        self._notes: list[Note] = []

    def reserve(self, step: int, tensors: Mapping[str, Tensor], after: Callable[[], None] = nothing) -> None:
        """Allocate the slots, and choose the node that keeps a copy of this rank's. If one rank has no room, none gets
        a slot. On a GPU this takes seconds, most of them for page-locking, so it begins after the first step, once
        `after` has returned, and happens beside the next ones; until then no snapshot is due."""
        self._layout = layout_of(tensors)
        self._last_step = step
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        self._to_reserve = partial(self._thread.submit, self._reserve, device, after)
        if device is None:
            self._end_reserve()

    def _reserve(self, device: torch.device | None, after: Callable[[], None]) -> list[tuple[str | None, str]]:
        """In the thread: return the problem, if there is one, and the layout of every rank."""
        problem = None
        try:
            after()
            self._check_room()
        except Exception as error:  # noqa: BLE001 -- it turns the tier off on all ranks, which wait for this one
            problem = _described(error)
        try:
            without_room = [text for text in self._agreeing.gather(problem) if text]
            if not without_room:
                problem = self._take_slots(device)
            answers: list[tuple[str | None, str]] = self._agreeing.gather((problem, self._layout.digest))
        except RuntimeError as error:
            raise RanksLostError(f"the ranks could not agree on slots in memory: {error}") from error
        return answers

    def _take_slots(self, device: torch.device | None) -> str | None:
        try:
            self._token, slots = self.client.reserve(self.rank, self._layout.bytes, self.setup.generation)
            self._slots = [self._open(slot) for slot in slots]
            if device is not None:
                self._register(device)
        except Exception as error:  # noqa: BLE001 -- as above
            return _described(error)
        return None

    def _begin_reserve(self) -> None:
        if self._to_reserve is not None:
            self._reserving, self._to_reserve = self._to_reserve(), None

    def _end_reserve(self) -> None:
        """Wait for the slots. All ranks call it in the same step."""
        self._begin_reserve()
        work, self._reserving = self._reserving, None
        if work is None:
            return
        answers = work.result()
        self._layouts = [digest for _, digest in answers]
        self._buddy = self._choose_buddy()
        self.off = None
        self._turn_off(self._last_step, [text for text, _ in answers])

    @property
    def is_on(self) -> bool:
        return self.off is None

    def due(self, step: int) -> bool:
        """Whether a snapshot of this step is due; the same on all ranks."""
        self._begin_reserve()
        if self._reserving is not None and self._ranks.flags_of_rank_0([self._reserving.done()])[0]:
            self._end_reserve()
        if self.is_on and self._interval is None:
            self._costs.step_ended()
            if self._costs.snapshots >= MEASURED_SNAPSHOTS:
                self._choose_interval()
        return self.is_on and step - self._last_step >= (self._interval or 1)

    def measure_again(self) -> None:
        """Choose the interval again from the next snapshots, unless the job sets it."""
        if self.setup.every_steps is None:
            self.settle()
            self._interval, self._costs = None, Costs()

    def snapshot(self, step: int, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Copy the tensors into the slot that is not the newest complete one; the rest happens in the background."""
        began = time.perf_counter()
        self.settle()
        if not self.is_on:
            return
        settled = time.perf_counter()
        slot = min(self._slots, key=lambda item: (item.save == self._complete and item.save is not None, item.step))
        local = local_data(tensors)
        sources = [local[chunk.name] for chunk in self._layout.chunks]
        save = self._save_name(step)
        manifest = {
            "rank": self.rank,
            "world": self._ranks.world,
            "generation": self.setup.generation,
            "step": step,
            "save": save,
            "course": self._course,
            "base": self._base,
            "complete": self._complete,
            "counters": dict(counters),
            "bytes": self._layout.bytes,
            "layout": self._layout.digest,
            "layouts": self._layouts,
            "tensors": self._layout.text,
        }
        if (page := own_page()) is not None:
            page.set_beside("staging", True)
        copied = self._copy(slot, sources)
        slot.save, slot.step, self._filling, self._last_step = save, step, slot, step
        self._snapshots += 1
        frees = self._snapshots == 2  # the first one of this generation is complete everywhere
        if self._interval is None:
            self._costs.snapshot_taken(began, settled)
        self._under_way = self._thread.submit(self._commit, slot.own.slot, manifest, self._complete, copied, frees)

    def finish_on_device(self) -> bool:
        """Call before the state changes: the device finishes a copy first. Return whether there was one."""
        event, self._copied = self._copied, None
        if event is None:
            return False
        stream = torch.cuda.current_stream()
        if self._interval is not None:
            stream.wait_event(event)
            return True
        before = stream.record_event(torch.cuda.Event(enable_timing=True))
        stream.wait_event(event)
        self._costs.device_waits.append((before, stream.record_event(torch.cuda.Event(enable_timing=True))))
        return True

    def settle(self) -> None:
        """Wait until every rank knows the outcome of the last snapshot; RanksLostError if they cannot agree."""
        work, self._under_way = self._under_way, None
        if work is None:
            return
        assert self._filling is not None
        code, problems, seconds = work.result()
        if self._interval is None:
            self._costs.commits.append(seconds)
        if code == _FAILED:
            self._filling.save, self._filling.step = None, -1
            self._turn_off(self._last_step, problems)
            return
        self._complete = self._filling.save
        is_copied = code == _WHOLE
        if self._is_copied and not is_copied:
            fields = {"reason": "; ".join(problems)}
            self._note("peer_not_copied", fields, f"state in memory has no copy on another node: {fields['reason']}")
        self._is_copied = is_copied

    def restored(self, step: int, save: str | None) -> None:
        """Training continues from this step; `save` is the save it was restored from, if it was from here. Later saves
        belong to an abandoned course and must not be restored any more; nor what is not trusted."""
        self._end_reserve()
        if self._snapshots:
            self._course = [self._course[0], self._course[1] + 1]
        self._base, self._complete, self._last_step, self._snapshots = step, save, step, 0
        self._costs.step_began = 0.0
        after = -1 if self.distrusted else step
        for slot in self._slots:
            if slot.step > after:
                slot.save, slot.step = None, -1
        with suppress(KeeperError):  # a keeper that is gone has lost everything
            self.client.forget(after)

    def notes(self) -> list[Note]:
        """Return the notes since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def keep(self, step: int, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> bool:
        """Save this state, complete on all ranks on return; False if there is no memory for it."""
        self._end_reserve()
        if self.is_on and self._save_name(step) not in [slot.save for slot in self._slots]:
            self.snapshot(step, tensors, counters)
        self.settle()
        return self.is_on

    def seal(self) -> None:
        """Call before communicators are aborted, from any thread: what a device computes after that may be garbage, so
        a copy that is not complete by now is not announced."""
        last = self._last_copied
        with suppress(RuntimeError):  # the device may be lost
            self._intact = last if last is not None and last.query() else None
        self._is_sealed = True

    def abandon(self, seconds: float) -> bool:
        """Other ranks are gone: release the slots, unless the thread or the device still uses them after this time. The
        keeper commits on its own what it was informed of."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.client.interrupt()
        works: list[Future[Any]] = [work for work in (self._reserving, self._under_way) if work is not None]
        if wait(works, seconds).not_done:
            return False
        self._let_go()
        self.client.close()
        return True

    def close(self) -> None:
        """End the thread and release the slots, which stay with the keeper."""
        self._thread.shutdown(wait=True)
        self._let_go()
        self.client.close()

    def _copy(self, slot: _OpenSlot, sources: list[Tensor]) -> torch.cuda.Event | None:
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is None:
            slot.header.zero_()
            if (page := own_page()) is not None:
                page.spring()  # halfway
            if sources:
                torch._foreach_copy_(slot.chunks, sources)
            return None
        self._stream = self._stream or torch.cuda.Stream(device)
        self._zero = torch.zeros(1, dtype=torch.int64, device=device) if self._zero is None else self._zero
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            slot.header.copy_(self._zero, non_blocking=True)
            torch._foreach_copy_(slot.chunks, sources, non_blocking=True)
            self._copied = self._stream.record_event(torch.cuda.Event(blocking=True))  # the thread sleeps meanwhile
        self._last_copied = self._copied
        return self._copied

    def _commit(
        self, slot: int, manifest: dict[str, Any], keep: str | None, copied: torch.cuda.Event | None, frees: bool
    ) -> tuple[int, list[str], float]:
        """In the thread: return the outcome of the snapshot on all ranks together, and why it is not better."""
        began = time.perf_counter()
        code, problem = _WHOLE, None
        try:
            if copied is not None:
                copied.synchronize()
                if self._is_sealed and copied is not self._intact:
                    raise KeeperError("the generation broke before the state was copied")
            manifest["counters"] = resolved(manifest["counters"])
            answer = self.client.filled(slot, self._token, manifest, keep, self._buddy)
            if answer.problem is not None:
                code, problem = _UNCOPIED, answer.problem
            if frees:
                self.client.free(self.setup.generation)
        except (KeeperError, RuntimeError) as error:
            code, problem = _FAILED, str(error)
        try:
            worst = self._worst(code)
            problems = [text for text in self._agreeing.gather(problem) if text] if worst < _WHOLE else []
        except RuntimeError as error:
            raise RanksLostError(f"the ranks could not agree on the state in memory: {error}") from error
        finally:
            if (page := own_page()) is not None:
                page.set_beside("staging", False)
        return worst, list(dict.fromkeys(problems)), time.perf_counter() - began

    def _worst(self, code: int) -> int:
        if self._agreeing.group is None:
            return code
        tensor = torch.tensor([code])
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._agreeing.group)
        return int(tensor)

    def _check_room(self) -> None:
        """KeeperError if the slots of this node's ranks, and the copies it receives, do not fit into its memory."""
        places = 2 if len(set(self.setup.nodes)) > 1 else 1
        wanted = places * COPIES * self.setup.nodes.count(self.setup.node)
        there = self.client.status()["sizes"].count(self._layout.bytes)
        needed = max(0, wanted - there) * (HEADER_BYTES + self._layout.bytes)
        free = FREE_SHARE * free_memory_bytes()
        if needed > free:
            raise KeeperError(
                f"{self.setup.node} needs {memory(needed)} of memory for slots but has {memory(free)}; use more nodes, "
                "or write checkpoint: {peer: off}"
            )

    def _choose_buddy(self) -> str | None:
        """Return the next node's keeper; None if a rank of another node holds the same state anyway."""
        nodes = list(dict.fromkeys(self.setup.nodes))
        if len(nodes) == 1:
            return None
        if absent := [node for node in nodes if node not in self.setup.keepers]:
            reason = f"no keeper on {', '.join(absent)}"
            self._note("peer_not_copied", {"reason": reason}, f"state in memory may have no copy: {reason}")
        mine = self._layouts[self.rank]
        if any(
            layout == mine and self.setup.nodes[rank] != self.setup.node for rank, layout in enumerate(self._layouts)
        ):
            return None
        return self.setup.keepers.get(nodes[(nodes.index(self.setup.node) + 1) % len(nodes)])

    def _open(self, slot: OwnSlot) -> _OpenSlot:
        memory = mmap.mmap(slot.descriptor, HEADER_BYTES + self._layout.bytes)
        os.close(slot.descriptor)
        data = torch.frombuffer(memory, dtype=torch.uint8)
        chunks = [chunk.view(data[HEADER_BYTES:]) for chunk in self._layout.chunks]
        return _OpenSlot(slot, memory, data[:8].view(torch.int64), chunks, slot.save, slot.step)

    def _register(self, device: torch.device) -> None:
        """Page-lock the slots, so that a GPU copies into them asynchronously."""
        for slot in self._slots:
            address = slot.header.data_ptr()
            page_lock(address, HEADER_BYTES + self._layout.bytes, device)
            self._registered.append(address)

    def _let_go(self) -> None:
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered, self._slots = [], []

    def _turn_off(self, step: int, problems: Sequence[str | None]) -> bool:
        """Return whether any rank has a problem; if so, turn off this tier on all ranks."""
        messages = list(dict.fromkeys(text for text in problems if text))
        if not messages:
            return False
        self.off = "; ".join(messages)
        with suppress(KeeperError):
            self.client.give_back(self._token)
        self._let_go()
        self._last_step = step
        self._note("peer_off", {"reason": self.off}, f"state is not kept in memory: {self.off}")
        return True

    def _choose_interval(self) -> None:
        """Choose the interval once the first snapshots are measured: the slowest rank counts."""
        self.settle()
        if not self.is_on:
            return
        answers = self._ranks.gather(self._costs.measured())
        cost = SnapshotCost(*(max(answer) for answer in zip(*answers, strict=True)))
        self._interval = cost.steps_in(self.setup.every_seconds) if self.setup.every_seconds else cost.smallest_interval
        share = cost.share(self._interval)
        every = "every step" if self._interval == 1 else f"every {self._interval} steps"
        fields = {"steps": self._interval, "blocked_seconds": cost.blocked_seconds(self._interval), "share": share}
        self._note("peer_interval", fields, f"state is kept in memory {every} ({percent(share)} of the time)")

    def _save_name(self, step: int) -> str:
        generation, restores = self._course
        return f"{generation}.{restores}-{step}" if restores else f"{generation}-{step}"

    def _note(self, event: str, fields: dict[str, Any], text: str) -> None:
        self._notes.append(Note(event, self._last_step, fields, text))


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, KeeperError) else f"{type(error).__name__}: {error}"
