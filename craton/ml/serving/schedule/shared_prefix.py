"""Groups of decoding requests that begin with the same KV cache blocks: attention reads these once for a whole group.

Such requests have a common path in the prefix tree: copies of a request, branches of a fork, and requests with the same
system prompt. A node counts its running requests, and the counts never grow along a path. So the longest path that
a request shares is found by bisection, and grouping a batch takes O(requests · log(blocks of a request)), less where
it is as long as it was. It is done again only when the batch, or what its requests share, has changed.

Running requests with a common node hold the same block there (`Scheduler.commit` sees to it), and hold it until they
end or are preempted. So no group refers to a freed block, also after an eviction or an update of the weights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from craton.ml.serving.schedule.prefix import PrefixNode
from craton.ml.serving.schedule.sequence import Sequence
from craton.ml.serving.settings import SharingCosts

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

MAX_GROUPS = 32  # of a step: the kernels are compiled for this many
# The costs of a group, in tokens of KV cache that could be read instead, each 4 KiB per layer
MEMBER_TOKENS = 64  # a member's partial results: up to 8 splits × 32 heads × 130 numbers × 4 bytes, written and read
GROUP_TOKENS = 1024  # a shorter prefix has less work than it takes to find and to merge


def is_worthwhile(members: int, tokens: int) -> bool:
    """Whether reading `tokens` of KV cache once for this many requests saves more than it costs:

    (members - 1) · tokens > MEMBER_TOKENS · members + GROUP_TOKENS
    """
    return (members - 1) * tokens > MEMBER_TOKENS * members + GROUP_TOKENS


@dataclass(frozen=True)
class PrefixGroups:
    """Groups of the decoding requests of a step. `members` are indices in the batch, one group after another."""

    members: Integers
    ends: Integers  # [groups], where each group's members end
    rows: Integers  # [groups], a row of the block table that begins with the shared blocks
    tokens: Integers  # [groups], shared by the members of each group

    @cached_property
    def saved_tokens(self) -> int:
        """Tokens of KV cache that a step does not read again."""
        sizes = np.diff(self.ends, prepend=0)
        return int(((sizes - 1) * self.tokens).sum())


class PrefixGrouping:
    """Finds the groups of a step, and remembers them for the next steps of the same requests."""

    def __init__(self, page: int, costs: SharingCosts) -> None:
        self._page, self._costs = page, costs
        self._sequences: list[Sequence] = []
        self._changes = -1
        self._groups: PrefixGroups | None = None

    def groups(self, sequences: list[Sequence], changes: int) -> PrefixGroups | None:
        """Return the groups of these decoding requests; None if they are not worthwhile. `changes` counts what may
        change the blocks that running requests share."""
        if changes != self._changes or sequences != self._sequences:
            self._sequences, self._changes = sequences, changes
            self._groups = group_by_prefix(sequences, self._page)
        if self._groups is None or not self._costs.step:
            return self._groups
        saved = self._groups.saved_tokens
        rest = sum(sequence.computed for sequence in sequences) - saved
        return self._groups if saved > self._costs.step + self._costs.share * rest else None


def group_by_prefix(sequences: Several[Sequence], page: int) -> PrefixGroups | None:
    """Group decoding requests by the beginning of their paths; a request is in one group at most.

    Of the paths that a request shares with others, it takes the one with the largest saving per member. Of too many
    groups those are kept that save most.
    """
    chosen: dict[PrefixNode, tuple[PrefixNode, int] | None] = {}  # last shared node → node of the group, its depth
    found: dict[PrefixNode, list[int]] = {}
    depths: dict[PrefixNode, int] = {}
    for index, sequence in enumerate(sequences):
        nodes, shared = sequence.nodes, sequence.num_shared
        is_same = shared <= len(nodes) and (not shared or nodes[shared - 1].users > 1)
        if not is_same or (shared < len(nodes) and nodes[shared].users > 1):
            shared = sequence.num_shared = _num_shared(nodes, 2)
        if not shared:
            continue
        last = nodes[shared - 1]
        if last not in chosen:
            chosen[last] = _choose(nodes, shared, page)
        if (choice := chosen[last]) is not None:
            node, depths[node] = choice
            found.setdefault(node, []).append(index)
    groups = [
        (members, depths[node] * page)
        for node, members in found.items()
        if is_worthwhile(len(members), depths[node] * page)  # others that share the node may not decode in this step
    ]
    if not groups:
        return None
    groups = sorted(groups, key=lambda group: (1 - len(group[0])) * group[1])[:MAX_GROUPS]
    return PrefixGroups(
        np.asarray([member for members, _ in groups for member in members], np.int32),
        np.cumsum([len(members) for members, _ in groups], dtype=np.int32),
        np.asarray([sequences[members[0]].row for members, _ in groups], np.int32),
        np.asarray([tokens for _, tokens in groups], np.int32),
    )


def _num_shared(nodes: Several[PrefixNode], users: int) -> int:
    """Return how many leading nodes have at least this many running requests."""
    return bisect_left(nodes, True, key=lambda node: node.users < users)


def _choose(nodes: Several[PrefixNode], shared: int, page: int) -> tuple[PrefixNode, int] | None:
    """Return the node among the first `shared` whose requests save most each by sharing the path to it, and its
    depth."""
    best, largest = None, 0.0
    while shared:
        node = nodes[shared - 1]
        saved = shared * page * (1 - 1 / node.users)
        if saved > largest and is_worthwhile(node.users, shared * page):
            best, largest = (node, shared), saved
        shared = _num_shared(nodes, node.users + 1)
    return best
