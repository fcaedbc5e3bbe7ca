"""Which prompt indices are generated, and which groups form the next batch: pure functions, the same on every rank.

A group has a deadline. The batch of the step that makes version t + 1 is trained on weights of version t, so a group
whose oldest token is of version o has a staleness of t - o there, and must be trained while t <= o + staleness.

`choose_batch` takes the finished groups with the earliest deadlines, and waits while a later deadline could not be met.
With at most `capacity` groups under way this is always possible. The P = `prompts` groups with the earliest deadlines,
finished or not, leave at most (d - t) P groups with deadlines up to d, if there were at most (d - t + 1) P before. No
deadline is after t + staleness, where capacity itself is the bound. So no batch waits for a group that has time left,
unless too many groups have the same deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupState:
    """What the choice of a batch needs to know of a group."""

    index: int
    oldest: int | None = None  # version of its oldest token; None: it has not begun
    is_finished: bool = False


@dataclass(frozen=True)
class Frontier:
    """Which prompt indices are settled (trained or filtered out): those below `next_index` that are not pending."""

    next_index: int = 0
    pending: tuple[int, ...] = ()  # ascending

    def filled(self, capacity: int) -> Frontier:
        """Return the frontier with new indices, until `capacity` are pending."""
        count = max(0, capacity - len(self.pending))
        end = self.next_index + count
        return Frontier(end, (*self.pending, *range(self.next_index, end)))

    def without(self, indices: Iterable[int]) -> Frontier:
        """Return the frontier after these pending indices are settled."""
        settled = set(indices)
        assert settled <= set(self.pending), f"{sorted(settled - set(self.pending))} are not pending"
        return Frontier(self.next_index, tuple(index for index in self.pending if index not in settled))

    def can_become(self, later: Frontier, settled: Iterable[int]) -> bool:
        """Whether settling exactly these indices, and opening new ones, leads to a later frontier: then none of them is
        lost, and none is trained twice."""
        opened = range(self.next_index, later.next_index)
        known = [*self.pending, *opened]
        return later.next_index >= self.next_index and sorted([*settled, *later.pending]) == sorted(known)


def capacity_of(version: int, prompts: int, staleness: int, steps: int) -> int:
    """Return how many groups may be under way before the batch of the next step: those of this step and of as many
    later ones as weights may be behind, but none beyond the last step."""
    return prompts * max(0, min(staleness + 1, steps - version))


def choose_batch(
    groups: Iterable[GroupState], version: int, prompts: int, staleness: int | None
) -> tuple[int, ...] | None:
    """Return the indices of the next batch, trained on weights of `version`; None: wait for more groups to finish.

    `staleness`: the bound; None: there is none, because the weights that generate never change."""
    known = list(groups)
    finished = [group for group in known if group.is_finished]
    finished.sort(key=lambda group: (group.oldest or 0, group.index))
    if len(finished) < prompts:
        return None
    chosen = finished[:prompts]
    if staleness is not None:
        left = Counter(group.oldest for group in known if group.oldest is not None)
        left.subtract(group.oldest for group in chosen if group.oldest is not None)
        count = 0
        for oldest in sorted(left):
            count += left[oldest]
            if count > max(0, oldest + staleness - version) * prompts:
                return None
    return tuple(sorted(group.index for group in chosen))


def overdue(groups: Iterable[GroupState], version: int, prompts: int, staleness: int) -> list[int]:
    """Return the indices whose generations are too old to be trained in time: they have to be generated again. There
    are none, unless a run resumes with another number of prompts or another bound."""
    kept: list[GroupState] = []
    dropped = []
    begun = [group for group in groups if group.oldest is not None]
    for group in sorted(begun, key=lambda group: (group.oldest or 0, group.index)):
        assert group.oldest is not None
        if len(kept) < (group.oldest + staleness - version + 1) * prompts:
            kept.append(group)
        else:
            dropped.append(group.index)
    return dropped
