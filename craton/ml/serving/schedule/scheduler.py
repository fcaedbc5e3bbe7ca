"""The scheduler: which requests are in the next step's batch, and how many tokens of each.

Decode comes first, then prefill chunks of running requests, then new requests in order of priority and arrival. A new
request is admitted when there are blocks for it and for the expected growth of the running ones. If these run out, the
request with the largest priority number, of these the newest, is preempted: it frees its blocks and is recomputed
later. A waiting request never preempts a running one.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from craton.ml.serving.schedule.prefix import MIN_COPIED_TOKENS, BlockPool, Move, PrefixNode, PrefixTree, Root
from craton.ml.serving.schedule.sequence import Sequence
from craton.ml.serving.schedule.shared_prefix import PrefixGrouping, PrefixGroups
from craton.ml.serving.settings import SharingCosts

REMEMBERED = 64  # the last answers, whose mean length predicts the next ones
# Prefill makes a step longer for all decoding requests. So a step has no more prefill than needed:
MIN_STEP_TOKENS = 512  # with those, decode among them, a step is no longer bound by reading weights
PREFILL_STEPS = 12  # in which all waiting prompts would be prefilled
FIRST_OUTPUTS = 256.0  # expected output tokens of a request before any has ended
MAX_ENDED = 64  # ended requests that may stay in the heap of waiting ones, beside one for each waiting one


@dataclass(slots=True)
class ScheduledChunk:
    """The next `count` tokens of a sequence, from `begin` on. `samples`: a token is sampled after the last of them, and
    one before each of its `drafts`."""

    sequence: Sequence
    begin: int
    count: int
    samples: bool
    drafts: int = 0


@dataclass(slots=True)
class ScheduledStep:
    """A batch; sequences with a single token come first."""

    parts: list[ScheduledChunk]
    moves: list[Move] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)  # changes of the block table: row, column, block
    started: list[Sequence] = field(default_factory=list)  # sequences with a new row
    groups: PrefixGroups | None = None  # of the sequences with a single token

    @property
    def saved_tokens(self) -> int:
        """Tokens of KV cache that are not read again, because a group shares them."""
        return 0 if self.groups is None else self.groups.saved_tokens

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)


@dataclass(slots=True)
class StepBuilder:
    """Builds one step: its remaining token budget and its chunks."""

    budget: int
    parts: dict[Sequence, ScheduledChunk] = field(default_factory=dict)
    is_admitting: bool = False  # the running requests have their chunks


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    preemptions: int = 0
    queried_tokens: int = 0
    device_tokens: int = 0  # of the queried, found on the device
    host_tokens: int = 0  # of the queried, found in host memory


class Scheduler:
    """Assigns rows and KV cache blocks to sequences. `version` is that of the weights.

    `sharing`: a step has the groups of its decoding requests that begin with the same blocks, if they save more than
    this."""

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        max_running: int,
        chunk_tokens: int,
        sharing: SharingCosts | None = None,
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.page = tree.page
        self.chunk_tokens = max(chunk_tokens, 1)
        self.version = 0
        self.is_admitting = True
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.counters = Counters()
        self._queue: list[tuple[int, int, Sequence]] = []  # a heap of (priority, arrival, sequence); some have ended
        self._waiting: dict[Sequence, int] = {}  # those that have not, with their token counts on arrival
        self._waiting_tokens = 0
        self._arrivals = count()
        self._order: dict[Sequence, int] = {}  # arrival number of each sequence that has not ended
        self._rows = list(range(max_running - 1, -1, -1))
        self._table: list[tuple[int, int, int]] = []
        self._started: list[Sequence] = []
        self._outputs, self._ended = FIRST_OUTPUTS, 0  # mean output tokens; over how many requests
        self._grouping = None if sharing is None else PrefixGrouping(self.page, sharing)
        self._changes = 0  # of what running sequences share

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._order[sequence] = next(self._arrivals)
        self._wait(sequence)

    def schedule(self) -> ScheduledStep | None:
        """Return the next step; None if there is nothing to compute now."""
        builder = StepBuilder(self.chunk_tokens)
        prefills: list[Sequence] = []
        prefill_tokens, decoding = self._waiting_tokens, 0
        for sequence in list(self.running):
            pending = sequence.pending
            if pending != 1:
                prefills.append(sequence)
                prefill_tokens += pending
            elif builder.budget:
                decoding += self._continue(sequence, 1, builder)
        least = max(MIN_STEP_TOKENS - decoding, MIN_STEP_TOKENS // 2)
        builder.budget = min(builder.budget, max(least, prefill_tokens // PREFILL_STEPS))
        for sequence in prefills:
            if builder.budget and sequence.row >= 0:
                self._continue(sequence, _fitting(sequence, builder.budget), builder)
        builder.is_admitting = True
        while builder.budget and self.is_admitting and self._rows and (waiting := self._next_waiting()) is not None:
            if not self._admit(waiting) or not self._continue(waiting, _fitting(waiting, builder.budget), builder):
                break
        if not builder.parts:
            return None
        parts = sorted(builder.parts.values(), key=lambda part: part.count > 1)
        step = ScheduledStep(parts, self.tree.moves, self._table, self._started)
        if self._grouping is not None:
            step.groups = self._grouping.groups([part.sequence for part in parts if part.count == 1], self._changes)
        self.tree.moves, self._table, self._started = [], [], []
        return step

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child`, whose tokens are a prefix of the parent's, from the parent's blocks: it shares the full ones
        and copies the last. Without a free row it waits like any other request."""
        self._order[child] = next(self._arrivals)
        shared_tokens = min(parent.computed, len(child.tokens) - 1)
        full, rest = divmod(shared_tokens, self.page)
        copied = self._take() if rest and self._rows else None
        if parent.row < 0 or not self._rows or (rest and copied is None):
            self._wait(child)
            return
        child.version, child.is_private = parent.version, parent.is_private
        child.blocks = parent.blocks[:full]
        for block in child.blocks:
            self.pool.hold(block)
        child.nodes = parent.nodes[:full]
        for node in child.nodes:
            self.tree.use(node)
        if copied is not None:
            self.tree.moves.append(Move("copy", parent.blocks[full], copied))
            child.blocks.append(copied)
        child.computed = child.cached_tokens = shared_tokens
        child.draft_computed = min(parent.draft_computed, shared_tokens)
        self._start(child)

    def commit(self, sequence: Sequence) -> None:
        """Add the full blocks of a sequence to the prefix cache, as far as the host knows their tokens."""
        if sequence.is_private or sequence.row < 0:
            return
        full = min(sequence.computed, len(sequence.tokens)) // self.page
        while len(sequence.nodes) < full:
            node = self._insert(sequence, self.page)
            if self._grouping is not None:
                self._share(sequence, node)
            sequence.nodes.append(node)
        while sequence.draft_nodes < min(sequence.draft_computed // self.page, len(sequence.nodes)):
            node = sequence.nodes[sequence.draft_nodes]
            node.has_draft |= node.block == sequence.blocks[sequence.draft_nodes]  # not if computed twice at once
            sequence.draft_nodes += 1

    def finish(self, sequence: Sequence) -> None:
        """Free everything that a sequence holds."""
        if (
            sequence.finish != "error" and sequence.outputs
        ):  # an abort counts: it may be the front end's, on a stop string
            self._ended += 1
            self._outputs += (sequence.outputs - self._outputs) / min(self._ended, REMEMBERED)
        self._commit_last(sequence)
        self._release(sequence)
        self._order.pop(sequence, None)
        if sequence in self._waiting:
            self._stop_waiting(sequence)

    def preempt_all(self) -> None:
        """Preempt every running sequence."""
        for sequence in list(self.running):
            self._preempt(sequence)

    def change_version(self, version: int) -> None:
        """Switch to other weights and empty the prefix cache, also if the version number is the same."""
        self.version = version
        self.forget(lambda root: True)

    def reset(self) -> None:
        """Schedule the next requests as if there had been none before: without prefix cache and known lengths."""
        assert not self.running
        assert not self._waiting
        self.forget(lambda root: True)
        self._outputs, self._ended = FIRST_OUTPUTS, 0

    def forget(self, chosen: Callable[[Root], bool]) -> None:
        """Drop some roots from the prefix cache; running sequences below them keep their blocks as private ones."""
        for sequence in self.running:
            if chosen((sequence.version, sequence.adapter)):
                sequence.is_private = True
        self.tree.forget_roots(chosen)

    def check(self) -> None:
        """Assert that no block is lost or has a holder too many."""
        self.tree.check()
        self.pool.check([*(sequence.blocks for sequence in self.running), self.tree.held()])
        if self._grouping is not None:
            held: dict[PrefixNode, int] = {}
            for sequence in self.running:
                for node, block in zip(sequence.nodes, sequence.blocks, strict=False):
                    assert held.setdefault(node, block) == block, "sequences with a common node hold different blocks"
        assert len(self._rows) + len(self.running) == len(set(self._rows) | {item.row for item in self.running})
        assert len(self._order) == len(self.running) + len(self._waiting), "one neither runs nor waits, or does both"
        assert sum(self._waiting.values()) == self._waiting_tokens
        assert len(self._queue) <= 2 * len(self._waiting) + MAX_ENDED

    def _continue(self, sequence: Sequence, tokens: int, builder: StepBuilder) -> bool:
        """Schedule the next `tokens` tokens of a running sequence, if it is not at its limit and gets the blocks."""
        if sequence.row < 0 or sequence.is_at_limit:  # just preempted, or waiting for read-back
            return False
        begin = sequence.computed
        end = begin + tokens
        if end > len(sequence.blocks) * self.page and not self._room(sequence, end, builder):
            return False
        samples = end == len(sequence.tokens) + sequence.in_flight + len(sequence.drafts)
        builder.parts[sequence] = ScheduledChunk(
            sequence, begin, tokens, samples, len(sequence.drafts) if samples else 0
        )
        builder.budget -= tokens
        sequence.computed = end
        if samples and not sequence.drafts:
            sequence.in_flight += 1
        return True

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _insert(self, sequence: Sequence, tokens: int) -> PrefixNode:
        """Add the next block of a sequence to the prefix cache, which has this many tokens."""
        column = len(sequence.nodes)
        parent = sequence.nodes[-1] if sequence.nodes else self.tree.root((sequence.version, sequence.adapter))
        key = tuple(sequence.tokens[column * self.page : column * self.page + tokens])
        return self.tree.insert(parent, key, sequence.blocks[column])

    def _commit_last(self, sequence: Sequence) -> None:
        """Add the last, partly filled block of an ending sequence to the prefix cache. A step that has been started
        may still write behind its tokens, but not over them."""
        full, rest = divmod(min(sequence.computed, len(sequence.tokens)), self.page)
        follows = len(sequence.nodes) == full  # all blocks before it are in the prefix cache
        if follows and rest >= MIN_COPIED_TOKENS and not sequence.is_private:
            sequence.nodes.append(self._insert(sequence, rest))

    def _copy_similar(self, sequence: Sequence) -> int:
        """Copy the cached block that begins with the next tokens of a sequence; return how many of them it has."""
        parent = sequence.nodes[-1] if sequence.nodes else self.tree.root((sequence.version, sequence.adapter))
        next_tokens = sequence.tokens[sequence.computed : sequence.computed + self.page + 1]
        found = self.tree.most_similar(parent, next_tokens)
        if found is None:
            return 0
        node, tokens = found
        self.tree.use(node)
        block = self._take()
        self.tree.leave([node])
        if block is None:
            return 0
        assert node.block is not None
        self.tree.moves.append(Move("copy", node.block, block))
        sequence.blocks.append(block)
        return tokens

    def _share(self, sequence: Sequence, node: PrefixNode) -> None:
        """Replace the next block of a sequence by the one in the prefix cache, if another has computed it, too."""
        self._changes += node.users > 1
        column = len(sequence.nodes)
        own, shared = sequence.blocks[column], node.block
        assert shared is not None
        if shared == own:
            return
        self.pool.hold(shared)
        self.pool.release(own)
        sequence.blocks[column] = shared
        if not node.has_draft:  # the draft model has computed the other block only
            sequence.draft_computed = min(sequence.draft_computed, column * self.page)
        self._table.append((sequence.row, column, shared))

    def _take(self) -> int | None:
        while not self.pool.free:  # a fork may still hold an evicted block
            if not self.tree.evict():
                return None
        return self.pool.take()

    def _room(self, sequence: Sequence, length: int, builder: StepBuilder) -> bool:
        """Allocate blocks for `length` tokens of a sequence, preempting others if needed; return False if it was itself
        preempted."""
        needed = -(-length // self.page)
        while len(sequence.blocks) < needed:
            block = self._take()
            if block is not None:
                self._table.append((sequence.row, len(sequence.blocks), block))
                sequence.blocks.append(block)
                continue
            victim = sequence
            if not builder.is_admitting:
                victim = max(self.running, key=lambda item: (item.priority, self._order[item]))
            if (part := builder.parts.pop(victim, None)) is not None:  # it was already in this step
                builder.budget += part.count
                victim.in_flight -= int(part.samples and not part.drafts)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._release(sequence)
        sequence.computed = sequence.draft_computed = sequence.draft_nodes = 0
        sequence.is_private = False
        sequence.drafts.clear()
        self._wait(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._changes += 1
        self.tree.leave(sequence.nodes)
        for block in sequence.blocks:
            self.pool.release(block)
        sequence.nodes, sequence.blocks = [], []
        if sequence.row >= 0:
            del self.running[sequence]
            self._rows.append(sequence.row)
            # another sequence may get the row in the same step: drop table changes that would conflict with its own
            self._table = [change for change in self._table if change[0] != sequence.row]
            if sequence in self._started:
                self._started.remove(sequence)
            sequence.row = -1

    # -- waiting requests ---------------------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        heapq.heappush(self._queue, (sequence.priority, self._order[sequence], sequence))
        self._waiting[sequence] = len(sequence.tokens)
        self._waiting_tokens += len(sequence.tokens)

    def _stop_waiting(self, sequence: Sequence) -> None:
        self._waiting_tokens -= self._waiting.pop(sequence)
        if len(self._queue) > 2 * len(self._waiting) + MAX_ENDED:
            self._queue = [entry for entry in self._queue if entry[2] in self._waiting]
            heapq.heapify(self._queue)

    def _next_waiting(self) -> Sequence | None:
        while self._queue and self._queue[0][2] not in self._waiting:
            heapq.heappop(self._queue)
        if not self._queue:
            return None
        sequence = self._queue[0][2]
        return None if sequence.in_flight else sequence  # its last token must be read back first

    def _admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence if there are blocks for it: give it a row and its blocks of the prefix cache."""
        nodes: list[PrefixNode] = []
        uses_cache = sequence.sampling.prompt_logprobs is None or sequence.prompt_logprobs is not None
        if uses_cache:
            nodes = self.tree.match((self.version, sequence.adapter), sequence.tokens)
        for node in nodes:
            self.tree.use(node)
        on_device = sum(node.block is not None for node in nodes)
        needed = -(-sequence.length // self.page) - on_device
        growth = sum(self._growth(item) for item in self.running) + self._growth(sequence)
        if self.running and needed + growth > self.pool.free + self.tree.evictable:
            self.tree.leave(nodes)
            return False
        for index, node in enumerate(nodes):
            if node.block is None:
                block = self._take()
                if block is None:
                    self.tree.leave(nodes[index:])
                    nodes = nodes[:index]
                    break
                self.tree.load(node, block)
            assert node.block is not None
            self.pool.hold(node.block)
        sequence.nodes = nodes
        sequence.blocks = [node.block for node in nodes if node.block is not None]
        sequence.computed = len(nodes) * self.page
        sequence.draft_nodes = next((index for index, node in enumerate(nodes) if not node.has_draft), len(nodes))
        sequence.draft_computed = sequence.draft_nodes * self.page
        sequence.version = self.version
        copied_tokens = self._copy_similar(sequence) if uses_cache else 0
        sequence.computed += copied_tokens
        if sequence.is_new:
            sequence.cached_tokens = sequence.computed
            self.counters.queried_tokens += len(sequence.tokens)
            self.counters.device_tokens += min(on_device, len(nodes)) * self.page + copied_tokens
            self.counters.host_tokens += max(0, len(nodes) - on_device) * self.page
        heapq.heappop(self._queue)
        self._stop_waiting(sequence)
        self._start(sequence)
        return True

    def _start(self, sequence: Sequence) -> None:
        self._changes += 1
        sequence.row = self._rows.pop()
        sequence.admitted = sequence.admitted or time.monotonic()
        self.running[sequence] = None
        self._started.append(sequence)
        self._table.extend((sequence.row, column, block) for column, block in enumerate(sequence.blocks))

    def _growth(self, sequence: Sequence) -> int:
        """Estimate the blocks that a sequence will need beyond those of its present tokens."""
        expected = max(self._outputs, sequence.outputs + self.page)
        left = min(expected, sequence.sampling.max_tokens) - sequence.outputs
        return int(left // self.page) + 1


def _fitting(sequence: Sequence, budget: int) -> int:
    """Return how many tokens of a sequence fit the budget; drafts are dropped first."""
    if (over := sequence.pending - budget) > 0:
        sequence.drafts = sequence.drafts[: max(0, len(sequence.drafts) - over)]
    return min(sequence.pending, budget)
