"""From slots to tensors: which saves the keepers of all nodes hold together, and how ranks restore from one.

A save is complete if every layout of its ranks is held somewhere: by the rank's own keeper, as a copy at another, or by
a replica. Ranks sharded as at the save copy the bytes directly; otherwise DCP reshards. What a node lacks comes from a
rank whose node has it. Every block is checked. A damaged slot is excluded, and if the rest is still complete, the same
save is tried again.

All ranks call all functions in the same order and get the same results.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from craton.agent import KeeperError
from craton.agent.memory import BLOCK_BYTES as SLOT_BLOCK_BYTES
from craton.agent.memory import HEADER_BYTES, Holding, KeeperClient
from craton.ml.training.checkpoint.checksums import BLOCK_BYTES, CheckpointError, FileSum, Seal, combine
from craton.ml.training.checkpoint.find import FoundStep, some
from craton.ml.training.checkpoint.peer.layout import SlotLayout, layout_of, metadata_of, parse_layout
from craton.ml.training.checkpoint.peer.memory_tier import PEER, PeerMemory
from craton.ml.training.checkpoint.peer.pages import map_pages, page_locked
from craton.ml.training.checkpoint.read import READS_IN_FLIGHT, SPAN_BYTES, CheckedReader, check_blocks
from craton.ml.training.checkpoint.restore import check_names, load_with
from craton.ml.training.checkpoint.staging import SavingRanks, local_data

assert SLOT_BLOCK_BYTES == BLOCK_BYTES, "keepers and readers must sum the same blocks"


@dataclass
class HeldFile:
    """What one rank saved, and which nodes hold it."""

    layout: str
    bytes: int
    nodes: set[str] = field(default_factory=set)


@dataclass
class PeerSave:
    """One save in the memory of all nodes together."""

    save: str
    step: int
    course: list[int]
    base: int
    complete: str | None  # the previous save that every rank was known to have
    counters: dict[str, Any]
    layouts: list[str]  # of all ranks that made it
    files: dict[str, HeldFile] = field(default_factory=dict)
    slots: dict[str, Holding] = field(default_factory=dict)  # those on this node

    @property
    def missing(self) -> list[int]:
        """The ranks whose state is lost."""
        held = {file.layout for file in self.files.values() if file.nodes}
        return [rank for rank, layout in enumerate(self.layouts) if layout not in held]

    @property
    def bytes(self) -> int:
        """Bytes of the whole state, each layout once."""
        return sum({file.layout: file.bytes for file in self.files.values()}.values())

    def leave_out(self, node: str, name: str, is_here: bool) -> None:
        self.files[name].nodes.discard(node)
        if is_here:
            self.slots.pop(name, None)


def find_saves(
    memory: PeerMemory, ranks: SavingRanks, before: int | None
) -> tuple[list[PeerSave], list[str], list[str]]:
    """Return the complete saves of the current course (of steps `before` one), newest first; other problems; and what
    was lost, if there was a complete save that no longer is."""
    setup = memory.setup
    holdings: list[Holding] = []
    problem = None
    try:
        holdings = memory.client.holdings()
    except KeeperError as error:
        problem = f"tier {PEER} cannot be read on {setup.node}: {error}"
    leads = list(setup.nodes).index(setup.node) == memory.rank
    answers = ranks.gather(([_about(holding) for holding in holdings] if leads else [], setup.node, problem))
    problems = list(dict.fromkeys(text for _, _, text in answers if text))
    saves: dict[str, PeerSave] = {}
    for abouts, node, _ in answers:
        for about, name, file in abouts:
            save = saves.setdefault(about["save"], PeerSave(**about))
            save.files.setdefault(name, HeldFile(*file)).nodes.add(node)
    for holding in holdings:
        if (save_name := holding.manifest["save"]) in saves:
            saves[save_name].slots.setdefault(_file_name(holding), holding)
    current = [
        save for save in saves.values() if not _is_abandoned(save, saves) and (before is None or save.step < before)
    ]
    whole = [save for save in current if not save.missing]
    lost: list[str] = []
    if current and not whole:
        newest = max(current, key=lambda save: (save.step, save.course))
        ranks_text = ", ".join(map(str, newest.missing[:8]))
        text = f"tier {PEER}: step {newest.step} is incomplete: no node has the state of ranks {ranks_text}"
        had_state = newest.complete is not None or newest.base > 0  # otherwise the very first save was interrupted
        (lost if had_state and before is None else problems).append(text)
    return sorted(whole, key=lambda save: (save.step, save.course), reverse=True), problems, lost


def load_save(
    memory: PeerMemory, ranks: SavingRanks, save: PeerSave, tensors: Mapping[str, Tensor]
) -> tuple[bool, list[str]]:
    """Fill the tensors; return whether that succeeded, and which slots were found damaged."""
    names: list[str] = []
    layout = layout_of(tensors)
    while not save.missing:
        files = PeerFiles(memory.client, save)
        held = {file.layout for file in save.files.values() if file.nodes}
        if all(ranks.gather(layout.digest in held)):
            problems, damaged = _copy(memory, ranks, save, files, layout, tensors)
        else:
            problems, damaged = _reshard(memory, ranks, save, files, tensors)
        if not problems:
            return True, names
        bad_slots = sorted({(memory.setup.nodes[rank], name) for item in ranks.gather(damaged) for rank, name in item})
        names.append(f"tier {PEER}: step {save.step}: {some(problems)}")
        if not bad_slots:
            break
        for node, name in bad_slots:
            save.leave_out(node, name, node == memory.setup.node)
    return False, names


class PeerFiles:
    """The slots of a save on this node, each as a file, read in place."""

    def __init__(self, client: KeeperClient, save: PeerSave) -> None:
        self.where = f"memory of the nodes, save {save.save}"
        self._client, self._slots = client, dict(save.slots)
        self._views: dict[str, memoryview] = {}

    def size(self, name: str) -> int | None:
        return int(self._slots[name].manifest["bytes"]) if name in self._slots else None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        view = self._views.get(name)
        if view is None:
            view = self._views.setdefault(name, self._map(name))
        return view[begin:end]

    def map_slot(self, name: str) -> mmap.mmap:
        """Map a slot with its header, to be read only: it is the slot itself, so that it can be page-locked."""
        return self._open(name, mmap.ACCESS_WRITE)

    def _map(self, name: str) -> memoryview:
        # private, so that changes do not reach the slot
        return memoryview(self._open(name, mmap.ACCESS_COPY))[HEADER_BYTES:]

    def _open(self, name: str, access: int) -> mmap.mmap:
        slot = self._slots[name]
        try:
            descriptor = self._client.open(slot.slot)
        except KeeperError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error
        try:
            return mmap.mmap(descriptor, HEADER_BYTES + slot.manifest["bytes"], access=access)
        finally:
            os.close(descriptor)


def _copy(
    memory: PeerMemory,
    ranks: SavingRanks,
    save: PeerSave,
    files: PeerFiles,
    layout: SlotLayout,
    tensors: Mapping[str, Tensor],
) -> tuple[list[str], set[tuple[int, str]]]:
    """Every rank finds its own chunks unchanged in one file."""
    own = f"rank-{memory.rank:05d}"
    fitting = [name for name, file in save.files.items() if file.layout == layout.digest and file.nodes]
    chosen = min(fitting, key=lambda name: (files.size(name) is None, name != own, name))
    sums = {name: _sum_of(holding) for name, holding in save.slots.items()}
    wanted = {name for name in ranks.gather(None if chosen in sums else chosen) if name}
    if wanted:
        for answer in ranks.gather({name: sums[name] for name in wanted if name in sums}):
            sums |= {name: item for name, item in answer.items() if name == chosen}
    if not wanted:  # every rank has its file on its own node
        problem, damaged = None, set()
        try:
            fill_from_slot(files, chosen, sums[chosen], layout, local_data(tensors))
        except CheckpointError as error:
            problem, damaged = str(error), {(memory.rank, chosen)}
        return list(dict.fromkeys(text for text in ranks.gather(problem) if text)), damaged
    metadata = metadata_of([(chosen, layout)])
    reader = CheckedReader(files, metadata, sums, ranks)
    reader.set_up_storage_reader(metadata, False)
    problem = None
    try:
        reader.read_data(LoadPlan([chunk.read_item() for chunk in layout.chunks]), _Parts(local_data(tensors)))
    except CheckpointError as error:
        problem = str(error)
    return list(dict.fromkeys(text for text in ranks.gather(problem) if text)), reader.damaged


@torch.no_grad()
def fill_from_slot(
    files: PeerFiles, name: str, expected: FileSum, layout: SlotLayout, local: Mapping[str, Tensor]
) -> None:
    """Copy the chunks of a slot into the tensors while threads check its blocks; CheckpointError if one is wrong: then
    the tensors have to be filled from elsewhere."""
    slot = torch.frombuffer(files.map_slot(name), dtype=torch.uint8)
    device = next((tensor.device for tensor in local.values() if tensor.is_cuda), None)
    if device is None:  # page-locking maps them too
        map_pages(slot.data_ptr(), slot.nbytes)
    data = slot[HEADER_BYTES:]
    blocks = data.numpy().data

    def check(begin: int) -> None:
        check_blocks(name, blocks[begin : begin + SPAN_BYTES], expected, begin)

    with ThreadPoolExecutor(READS_IN_FLIGHT, thread_name_prefix="check-slot") as pool:
        checks = [pool.submit(check, begin) for begin in range(0, expected.bytes, SPAN_BYTES)]
        with nullcontext() if device is None else page_locked(slot, device):
            for chunk in layout.chunks:
                local[chunk.name].copy_(chunk.view(data), non_blocking=True)
            if device is not None:
                torch.cuda.synchronize(device)
        for done in checks:
            done.result()


def _reshard(
    memory: PeerMemory, ranks: SavingRanks, save: PeerSave, files: PeerFiles, tensors: Mapping[str, Tensor]
) -> tuple[list[str], set[tuple[int, str]]]:
    """DCP plans which rank needs which part of which chunk; one file per layout is read."""
    chosen: dict[str, str] = {}
    for name, file in sorted(save.files.items()):
        if file.nodes:
            chosen.setdefault(file.layout, name)
    nodes = list(memory.setup.nodes)
    mine = {}
    for name in chosen.values():
        first = min(save.files[name].nodes, key=nodes.index)
        if nodes.index(first) == memory.rank and name in save.slots:
            holding = save.slots[name]
            mine[name] = (zlib.compress(holding.manifest["tensors"].encode(), 1), _sum_of(holding))
    layouts_by_name: dict[str, tuple[bytes, FileSum]] = {}
    for answer in ranks.gather(mine):
        layouts_by_name |= answer
    layouts = [
        (name, parse_layout(zlib.decompress(text).decode())) for name, (text, _) in sorted(layouts_by_name.items())
    ]
    seal = Seal(
        {"save": save.save, "step": save.step, "counters": save.counters},
        {n: s for n, (_, s) in layouts_by_name.items()},
    )
    saved = FoundStep(save.step, PEER, files, seal, metadata_of(layouts))
    check_names(ranks, saved, tensors)
    reader = CheckedReader(files, saved.metadata, seal.files, ranks if ranks.world > 1 else None)
    return load_with(ranks, reader, tensors), reader.damaged


class _Parts(DefaultLoadPlanner):
    """Returns the target of a chunk that is needed as is."""

    def __init__(self, local: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._local = local

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index: MetadataIndex = read_item.dest_index
        return self._local[index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: it was filled in place."""


def _about(holding: Holding) -> tuple[dict[str, Any], str, tuple[str, int]]:
    manifest = holding.manifest
    about = {name: manifest[name] for name in ("save", "step", "course", "base", "complete", "counters", "layouts")}
    return about, _file_name(holding), (manifest["layout"], manifest["bytes"])


def _file_name(holding: Holding) -> str:
    return f"rank-{holding.manifest['rank']:05d}"


def _is_abandoned(save: PeerSave, saves: Mapping[str, PeerSave]) -> bool:
    """Whether a later course began before this step: then the save belongs to an abandoned course."""
    return any(other.course > save.course and other.base < save.step for other in saves.values())


def _sum_of(holding: Holding) -> FileSum:
    size, blocks = holding.manifest["bytes"], holding.manifest["sums"]
    whole = blocks[0] if blocks else 0
    for index, block in enumerate(blocks[1:], 1):
        whole = combine(whole, block, min(BLOCK_BYTES, size - index * BLOCK_BYTES))
    return FileSum(whole, size, tuple(blocks))
