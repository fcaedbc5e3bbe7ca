"""How much of a step is alive on one rank of a pipeline, found by playing its schedule through.

Counted in chunks: a chunk's forward pass of one micro-batch holds one unit of activations until its backward pass, and
with zero-bubble another kind of unit until its weights have their gradients. Gradients of a chunk are summed whole from
its first backward pass to its last one, where they are reduced.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from craton.job.layout import Schedule, schedule_actions

ROUNDS = 4  # of as many micro-batches as there are ranks: what follows repeats itself

Kind = Literal["forward", "backward", "after backward", "weight", "after weight"]


class Load(NamedTuple):
    """What is alive during one action of a rank; `kind` tells which instant of it."""

    kind: Kind
    passes: int  # of a chunk, whose activations are kept; the one in work is among them until `after`
    late: int  # the same of those that wait for the gradients of their weights
    summed: int  # chunks whose gradients are whole sums of micro-batches before this action
    tables: bool  # whether those of embedding or head are among the sums
    has_tables: bool  # whether the chunk in work has the embedding or the head
    sums_anew: bool  # whether this action makes the first gradients of its chunk
    reduces: bool  # or the last

    def covers(self, other: Load) -> bool:
        """Whether nothing of the other is more."""
        return self.kind == other.kind and all(mine >= its for mine, its in zip(self[1:], other[1:], strict=True))


def pipeline_loads(schedule: Schedule, pp: int, vpp: int, micro_batches: int, rank: int) -> tuple[Load, ...]:
    """The loads of a step that no other one covers."""
    return _loads(schedule, pp, vpp, min(micro_batches, ROUNDS * pp), rank)


# A search asks for several ranks of one schedule; the order of all ranks is found at once.
_cached_actions = lru_cache(maxsize=64)(schedule_actions)


@lru_cache(maxsize=4096)
def _loads(schedule: Schedule, pp: int, vpp: int, micro_batches: int, rank: int) -> tuple[Load, ...]:
    last = micro_batches - 1
    with_tables = {0: 0, pp - 1: vpp - 1}.get(rank)  # the chunk with the embedding, or that with the head
    loads: list[Load] = []
    passes = late = 0
    summed: set[int] = set()
    tables = False

    def note(kind: Kind, chunk: int) -> None:
        anew = gives and not reduces and chunk not in summed
        load = Load(kind, passes, late, len(summed), tables, chunk == with_tables, anew, gives and reduces)
        if not any(other.covers(load) for other in loads):
            loads[:] = [other for other in loads if not load.covers(other)] + [load]

    for action in _cached_actions(schedule, pp, vpp, micro_batches)[rank]:
        gives, reduces = action.kind in ("backward", "weight"), action.micro_batch == last
        if action.kind == "forward":
            passes += 1
            note("forward", action.chunk)
            continue
        if action.kind == "weight":
            note("weight", action.chunk)
            late -= 1
            note("after weight", action.chunk)
        else:
            note("backward", action.chunk)
            passes -= 1
            late += action.kind == "input"
            note("after backward", action.chunk)
        if gives:
            (summed.discard if reduces else summed.add)(action.chunk)
        tables = tables or action.chunk == with_tables
    return tuple(loads)
