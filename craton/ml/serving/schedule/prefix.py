"""Who holds which block of keys and values: requests, and the prefix tree, which keeps those of earlier tokens.

Each node of the tree is one full block; the path to it is the text before, so two requests that begin alike share
nodes. It is the only index of what is kept. A root belongs to one version of the weights and one adapter. Nodes on the
device come first on every path, those in host memory below them. What nobody uses is given up from the ends of paths,
least recently used first, in constant time: to host memory where there is room, else for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Root = tuple[int, str | None]  # version of the weights, adapter
DUMMY = 0  # the block that belongs to nobody: padding reads and writes it


class BlockPool:
    """Numbers of blocks, handed out and taken back in constant time. A block is free, or has as many holders (requests
    and nodes of the prefix tree) as its count says; only its single holder may write to it."""

    def __init__(self, count: int) -> None:
        assert count > 1, "one block is the dummy"
        self.count = count - 1  # that can be held
        self._free = list(range(count - 1, DUMMY, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block, with one holder."""
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder."""
        assert self._holders[block], f"block {block} is free"
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less; without any it is free."""
        assert self._holders[block], f"block {block} is free already"
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """That every block has exactly the holders that `held` lists, and that all others are free, once each."""
        counts = [0] * len(self._holders)
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "holders and counts differ"
        assert sorted(self._free) == [block for block in range(1, len(counts)) if not counts[block]]


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of one block that must be made before the next step, in the order in which they were asked for."""

    kind: Literal["out", "in", "copy"]  # device to host, host to device, device to device
    source: int
    target: int


class PrefixNode:
    """One full block of tokens. `block` is its place on the device, `host` that in host memory; it has one of them."""

    __slots__ = ("block", "children", "host", "key", "on_device", "parent", "users")

    def __init__(self, parent: PrefixNode | None, key: tuple[int, ...], block: int | None) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.host: int | None = None
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.on_device = 0  # children that are
        self.users = 0  # requests whose text goes through here


class PrefixTree:
    """Holds one share of each block it keeps. `moves` is what must be copied before the next step."""

    def __init__(self, pool: BlockPool, page: int, host: BlockPool | None = None) -> None:
        self.page = page
        self.moves: list[Move] = []
        self._pool = pool
        self._host = host
        self._roots: dict[Root, PrefixNode] = {}
        self._unused: OrderedDict[PrefixNode, None] = OrderedDict()  # ends of paths on the device, least recent first
        self._unused_host: OrderedDict[PrefixNode, None] = OrderedDict()
        self._held = 0  # nodes on the device that nobody uses

    @property
    def evictable(self) -> int:
        """Blocks on the device that could be had by giving up what nobody uses."""
        return self._held

    def root(self, root: Root) -> PrefixNode:
        return self._roots.setdefault(root, PrefixNode(None, (), None))

    def match(self, root: Root, tokens: Sequence[int]) -> list[PrefixNode]:
        """The longest path whose text is a beginning of these tokens, leaving at least one to be computed."""
        node = self.root(root)
        prefix_nodes: list[PrefixNode] = []
        for begin in range(0, len(tokens) - self.page, self.page):
            child = node.children.get(tuple(tokens[begin : begin + self.page]))
            if child is None:
                break
            prefix_nodes.append(child)
            node = child
        return prefix_nodes

    def use(self, node: PrefixNode) -> None:
        """A request goes through here: its block stays."""
        if not node.users and node.block is not None:
            self._held -= 1
        node.users += 1
        self._unused.pop(node, None)
        self._unused_host.pop(node, None)

    def leave(self, nodes: Sequence[PrefixNode]) -> None:
        """A request that went through this path has ended or given up its blocks."""
        for node in reversed(nodes):
            assert node.users, "nobody uses it"
            node.users -= 1
            if not node.users:
                if node.block is not None:
                    self._held += 1
                self._list(node)

    def insert(self, parent: PrefixNode, key: tuple[int, ...], block: int) -> PrefixNode:
        """Keeps a computed block; where the same text is kept already, that node. The caller uses what it gets."""
        node = parent.children.get(key)
        if node is None:
            node = PrefixNode(parent, key, None)
            parent.children[key] = node
            self._pool.hold(block)
            self._place(node, block)
        elif node.block is None:
            self._give_up_host(node)
            self._pool.hold(block)
            self._place(node, block)
        self.use(node)
        return node

    def load(self, node: PrefixNode, block: int) -> None:
        """Brings a node that is in host memory to a block of the device, which the tree holds from now on."""
        assert node.block is None
        assert node.host is not None
        assert self._host is not None
        self.moves.append(Move("in", node.host, block))
        self._give_up_host(node)
        self._place(node, block)

    def evict(self) -> bool:
        """Gives up the least recently used block on the device that nobody uses; False: there is none."""
        if not self._unused:
            return False
        host = self._host_block()
        node, _ = self._unused.popitem(last=False)
        assert node.block is not None
        if host is None:
            self._remove(node)
        else:
            self.moves.append(Move("out", node.block, host))
            self._displace(node)
            node.host = host
            self._list(node)
        return True

    def forget_roots(self, chosen: Callable[[Root], bool]) -> None:
        """Gives up all that is kept below some roots; blocks in use stay with their users."""
        for root in [root for root in self._roots if chosen(root)]:
            for node in list(_below(self._roots.pop(root))):
                self._unused.pop(node, None)
                self._unused_host.pop(node, None)
                if node.block is not None:
                    self._displace(node)
                if node.host is not None:
                    self._give_up_host(node)
                node.children.clear()
                node.parent = None

    def held(self) -> list[int]:
        """Blocks of the device that the tree holds."""
        return [node.block for root in self._roots.values() for node in _below(root) if node.block is not None]

    def held_on_host(self) -> list[int]:
        return [node.host for root in self._roots.values() for node in _below(root) if node.host is not None]

    def check(self) -> None:
        """What must be true of every node."""
        held = 0
        for root in self._roots.values():
            for node in _below(root):
                assert (node.block is None) != (node.host is None), "a node is in one tier"
                assert node.parent is not None
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
        """Gives the tree's share of a node's block back; its parent may be the end of a path now."""
        assert node.block is not None
        self._pool.release(node.block)
        node.block = None
        self._held -= not node.users
        if node.parent is not None:
            node.parent.on_device -= 1
            self._list(node.parent, is_recent=False)

    def _list(self, node: PrefixNode, is_recent: bool = True) -> None:
        """Puts a node that nobody uses among those that may be given up, if it is the end of a path."""
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
        """Takes a node that nobody uses out of the tree, with all below it, which is in host memory."""
        for item in [*_below(node), node]:
            self._unused.pop(item, None)
            self._unused_host.pop(item, None)
            if item.block is not None:
                self._displace(item)
            elif item.host is not None:
                self._give_up_host(item)
        assert node.parent is not None
        del node.parent.children[node.key]
        self._list(node.parent, is_recent=False)

    def _give_up_host(self, node: PrefixNode) -> None:
        assert self._host is not None
        assert node.host is not None
        self._unused_host.pop(node, None)
        self._host.release(node.host)
        node.host = None


def _below(node: PrefixNode) -> Iterator[PrefixNode]:
    pending = list(node.children.values())
    while pending:
        child = pending.pop()
        yield child
        pending.extend(child.children.values())
