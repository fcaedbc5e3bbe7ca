"""KV cache blocks and the prefix cache, a tree that keeps the blocks of earlier requests.

Each node of the tree is one full block; the path to it is the tokens before it, so requests with a common prefix share
nodes. The tree is the only index of cached blocks. A root belongs to one version of the weights and one adapter. On
every path, nodes on the device come before those in host memory. Unused leaf nodes are evicted in LRU order, in
constant time: to host memory while it has room, else they are dropped.

The last, partly filled block of an ended request is a node, too: a leaf with a shorter key, dropped when it is evicted.
Requests never share such a block. One whose next tokens are the first tokens of any cached block copies that block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Root = tuple[int, str | None]  # version of the weights, adapter
DUMMY = 0  # the block that padding requests read and write
MIN_COPIED_TOKENS = 2  # of a block: many texts have the same first token, which is not worth a copy


class BlockPool:
    """Allocates block numbers in constant time. A block is free, or has a reference count of holders (requests and
    nodes of the prefix tree); only a single holder may write to it."""

    def __init__(self, count: int) -> None:
        assert count > 1, "one block is the dummy"
        self.count = count - 1  # that can be held
        self._free = list(range(count - 1, DUMMY, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Allocate a free block with one holder."""
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a holder."""
        assert self._holders[block], f"block {block} is free"
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Remove a holder; without holders the block is free."""
        assert self._holders[block], f"block {block} is already free"
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that every block has exactly the holders in `held`, and that all others are free, once each."""
        counts = [0] * len(self._holders)
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "holders and counts differ"
        assert sorted(self._free) == [block for block in range(1, len(counts)) if not counts[block]]


@dataclass(frozen=True, slots=True)
class Move:
    """A block copy to make before the next step; moves run in order."""

    kind: Literal["out", "in", "copy"]  # device to host, host to device, device to device
    source: int
    target: int


def independent_moves(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Split moves, which run in order, into groups whose moves can run at once: copies that no other one of the group
    reads or writes the target of. Other moves are alone."""
    group: list[Move] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for move in moves:
        is_free = move.kind == "copy" and not {move.source, move.target} & targets and move.target not in sources
        if group and not (is_free and group[0].kind == "copy"):
            yield group
            group, sources, targets = [], set(), set()
        group.append(move)
        sources.add(move.source)
        targets.add(move.target)
    if group:
        yield group


class PrefixNode:
    """One block of tokens. `block` is its number on the device, `host` that in host memory; one of them is set."""

    __slots__ = ("block", "children", "has_draft", "host", "key", "on_device", "parent", "sorted_keys", "users")

    def __init__(self, parent: PrefixNode | None, key: tuple[int, ...], block: int | None) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.host: int | None = None
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.sorted_keys: list[tuple[int, ...]] = []  # of the children
        self.on_device = 0  # number of children on the device
        self.has_draft = False  # the draft model has computed the block, too
        self.users = 0  # running requests with this block in their prefix


class PrefixTree:
    """The prefix cache; it holds each cached block once. `moves` are the copies to make before the next step."""

    def __init__(self, pool: BlockPool, page: int, host: BlockPool | None = None) -> None:
        self.page = page
        self.moves: list[Move] = []
        self._pool = pool
        self._host = host
        self._roots: dict[Root, PrefixNode] = {}
        self._unused: OrderedDict[PrefixNode, None] = OrderedDict()  # leaves on the device, least recently used first
        self._unused_host: OrderedDict[PrefixNode, None] = OrderedDict()
        self._held = 0  # unused nodes on the device

    @property
    def evictable(self) -> int:
        """Return the number of unused blocks on the device, which eviction could free."""
        return self._held

    def root(self, root: Root) -> PrefixNode:
        return self._roots.setdefault(root, PrefixNode(None, (), None))

    def match(self, root: Root, tokens: Sequence[int]) -> list[PrefixNode]:
        """Return the longest path that is a prefix of these tokens, leaving one or more tokens to compute."""
        node = self.root(root)
        prefix_nodes: list[PrefixNode] = []
        for begin in range(0, len(tokens) - self.page, self.page):
            child = node.children.get(tuple(tokens[begin : begin + self.page]))
            if child is None:
                break
            prefix_nodes.append(child)
            node = child
        return prefix_nodes

    def most_similar(self, parent: PrefixNode, tokens: Sequence[int]) -> tuple[PrefixNode, int] | None:
        """Return the child on the device whose block begins with most of these tokens, and with how many of them,
        leaving one or more tokens to compute; None if no copy is worthwhile."""
        key = tuple(tokens[: min(self.page, len(tokens) - 1)])
        place = bisect_left(parent.sorted_keys, key)  # no key shares more tokens than the two beside this place
        best, most = None, MIN_COPIED_TOKENS - 1
        for other in parent.sorted_keys[max(0, place - 1) : place + 1]:
            child, common = parent.children[other], _common_tokens(key, other)
            if common > most and child.block is not None:
                best, most = child, common
        return None if best is None else (best, most)

    def use(self, node: PrefixNode) -> None:
        """Add a user of a node, which protects its block from eviction."""
        if not node.users and node.block is not None:
            self._held -= 1
        node.users += 1
        self._unused.pop(node, None)
        self._unused_host.pop(node, None)

    def leave(self, nodes: Sequence[PrefixNode]) -> None:
        """Remove a user of a path: its request ended or was preempted."""
        for node in reversed(nodes):
            assert node.users, "the node has no users"
            node.users -= 1
            if not node.users:
                if node.block is not None:
                    self._held += 1
                self._list(node)

    def insert(self, parent: PrefixNode, key: tuple[int, ...], block: int) -> PrefixNode:
        """Cache a computed block; return its node, or the existing node of the same tokens, with the caller as user.

        A key of fewer tokens than a block has is that of a last, partly filled one."""
        node = parent.children.get(key)
        if node is None:
            node = PrefixNode(parent, key, None)
            parent.children[key] = node
            insort(parent.sorted_keys, key)
            self._pool.hold(block)
            self._place(node, block)
        elif node.block is None:
            self._give_up_host(node)
            self._pool.hold(block)
            self._place(node, block)
            node.has_draft = False
        self.use(node)
        return node

    def load(self, node: PrefixNode, block: int) -> None:
        """Move a node from host memory to a device block, which the tree holds from now on."""
        assert node.block is None
        assert node.host is not None
        assert self._host is not None
        self.moves.append(Move("in", node.host, block))
        self._give_up_host(node)
        self._place(node, block)

    def evict(self) -> bool:
        """Evict the least recently used block on the device; return False if all are in use."""
        if not self._unused:
            return False
        node = next(iter(self._unused))
        assert node.block is not None
        host = self._host_block() if len(node.key) == self.page else None
        self._unused.pop(node)
        if host is None:
            self._remove(node)
        else:
            self.moves.append(Move("out", node.block, host))
            self._displace(node)
            node.host = host
            self._list(node)
        return True

    def forget_roots(self, chosen: Callable[[Root], bool]) -> None:
        """Drop everything below some roots; running requests keep their blocks."""
        for root in [root for root in self._roots if chosen(root)]:
            for node in list(_below(self._roots.pop(root))):
                self._unused.pop(node, None)
                self._unused_host.pop(node, None)
                if node.block is not None:
                    self._displace(node)
                if node.host is not None:
                    self._give_up_host(node)
                node.children.clear()
                node.sorted_keys.clear()
                node.parent = None

    def held(self) -> list[int]:
        """Return the device blocks that the tree holds."""
        return [node.block for root in self._roots.values() for node in _below(root) if node.block is not None]

    def held_on_host(self) -> list[int]:
        return [node.host for root in self._roots.values() for node in _below(root) if node.host is not None]

    def check(self) -> None:
        """Assert the invariants of every node."""
        held = 0
        for root in self._roots.values():
            for node in _below(root):
                assert (node.block is None) != (node.host is None), "a node is in one tier"
                assert node.parent is not None
                assert node.sorted_keys == sorted(node.children)
                assert len(node.key) == self.page or (node.host is None and not node.children)
                is_top = node.parent is root
                if node.block is not None:
                    assert is_top or node.parent.block is not None, "nodes on the device come first"
                    held += not node.users
                    assert node.on_device == sum(child.block is not None for child in node.children.values())
                    assert (node in self._unused) == (not node.users and not node.on_device)
                else:
                    assert (node in self._unused_host) == (not node.users and not node.children)
        assert held == self._held

    def _place(self, node: PrefixNode, block: int) -> None:
        node.block = block
        self._held += not node.users
        if node.parent is not None:
            node.parent.on_device += 1
            self._unused.pop(node.parent, None)

    def _displace(self, node: PrefixNode) -> None:
        """Release the tree's hold on a node's block; its parent may be a leaf now."""
        assert node.block is not None
        self._pool.release(node.block)
        node.block = None
        self._held -= not node.users
        if node.parent is not None:
            node.parent.on_device -= 1
            self._list(node.parent, is_recent=False)

    def _list(self, node: PrefixNode, is_recent: bool = True) -> None:
        """Add an unused leaf to the LRU list of its tier."""
        if node.users or node.parent is None:
            return
        if node.block is not None and not node.on_device:
            unused = self._unused
        elif node.host is not None and not node.children:
            unused = self._unused_host
        else:
            return
        if node not in unused:
            unused[node] = None
            unused.move_to_end(node, last=is_recent)

    def _host_block(self) -> int | None:
        if self._host is None:
            return None
        if not self._host.free and self._unused_host:
            self._remove(next(iter(self._unused_host)))
        return self._host.take() if self._host.free else None

    def _remove(self, node: PrefixNode) -> None:
        """Remove an unused node from the tree, with all nodes below it, which are in host memory."""
        for item in [*_below(node), node]:
            self._unused.pop(item, None)
            self._unused_host.pop(item, None)
            if item.block is not None:
                self._displace(item)
            elif item.host is not None:
                self._give_up_host(item)
        assert node.parent is not None
        del node.parent.children[node.key]
        del node.parent.sorted_keys[bisect_left(node.parent.sorted_keys, node.key)]
        self._list(node.parent, is_recent=False)

    def _give_up_host(self, node: PrefixNode) -> None:
        assert self._host is not None
        assert node.host is not None
        self._unused_host.pop(node, None)
        self._host.release(node.host)
        node.host = None


def _common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (first, second) in pairs if first != second), min(len(one), len(other)))


def _below(node: PrefixNode) -> Iterator[PrefixNode]:
    pending = list(node.children.values())
    while pending:
        child = pending.pop()
        yield child
        pending.extend(child.children.values())
