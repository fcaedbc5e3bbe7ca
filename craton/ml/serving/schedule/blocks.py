"""Who holds which block of keys and values. A block is free, or has as many holders as its count says.

Holders are requests and nodes of the prefix tree; a block may have several, and only its single holder may write to it.
Block 0 belongs to nobody: padding reads and writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

DUMMY = 0


class BlockPool:
    """Numbers of blocks, handed out and taken back in constant time."""

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
