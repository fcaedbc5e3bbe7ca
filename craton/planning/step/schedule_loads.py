"""Live activations and gradients on one pipeline rank, found by simulating its schedule.

Counted in chunks: a chunk's forward pass of one micro-batch holds one unit of activations until its backward pass, and
with zero-bubble another kind of unit until its weight gradients exist. Gradients of a chunk are accumulated unsharded
from its first backward pass to its last one, where they are reduced.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from craton.job.layout import Schedule, schedule_actions

ROUNDS = 4  # rounds of pp micro-batches to simulate: later ones repeat

Kind = Literal["forward", "backward", "after backward", "weight", "after weight"]


class Load(NamedTuple):
    """Live memory during one action of a rank; `kind` is the instant."""

    kind: Kind
    passes: int  # forward passes of chunks whose activations are alive; includes the current one until `after`
    late: int  # backward passes that wait for their weight gradients
    summed: int  # chunks with accumulated unsharded gradients before this action
    tables: bool  # whether gradients of embedding or head are among them
    has_tables: bool  # whether the current chunk has the embedding or the head
    starts_sum: bool  # whether this action creates the first gradients of its chunk
    reduces: bool  # or the last

    def covers(self, other: Load) -> bool:
        """Return whether no field of the other is larger."""
        return self.kind == other.kind and all(mine >= its for mine, its in zip(self[1:], other[1:], strict=True))


def pipeline_loads(schedule: Schedule, pp: int, vpp: int, micro_batches: int, rank: int) -> tuple[Load, ...]:
    """Return the loads of a step that no other load covers."""
    return _loads(schedule, pp, vpp, min(micro_batches, ROUNDS * pp), rank)


# A search needs several ranks of one schedule; one call orders all ranks.
_cached_actions = lru_cache(maxsize=64)(schedule_actions)


@lru_cache(maxsize=4096)
def _loads(schedule: Schedule, pp: int, vpp: int, micro_batches: int, rank: int) -> tuple[Load, ...]:
    last = micro_batches - 1
    with_tables = {0: 0, pp - 1: vpp - 1}.get(rank)  # the chunk with the embedding or the head
    loads: list[Load] = []
    passes = late = 0
    summed: set[int] = set()
    tables = False

    def note(kind: Kind, chunk: int) -> None:
        starts_sum = gives and not reduces and chunk not in summed
        load = Load(kind, passes, late, len(summed), tables, chunk == with_tables, starts_sum, gives and reduces)
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
