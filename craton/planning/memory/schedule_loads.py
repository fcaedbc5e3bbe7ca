"""Live activations and gradients on one pipeline rank, from the order of its actions; many ranks in one call.

Counted in chunks: a chunk's forward pass of one micro-batch holds one unit of activations until its backward pass, and
with zero-bubble another kind of unit until its weight gradients exist. Gradients of a chunk are accumulated unsharded
from its first backward pass to its last one, where they are reduced. The schedules that a search compares have closed
forms, evaluated only where a count changes; zero-bubble with several chunks a rank is counted action by action.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from craton.job.layout import Action, Schedule, schedule_actions

ROUNDS = 4  # rounds of pp micro-batches to count: later ones repeat
FORWARD, BACKWARD, AFTER_BACKWARD, WEIGHT, AFTER_WEIGHT = range(5)  # instants

Integers = NDArray[np.int64]


class PipelineRank(NamedTuple):
    """A rank of a pipeline and what it does in a step."""

    schedule: Schedule
    pp: int
    vpp: int
    micro_batches: int
    rank: int

    @property
    def chunk_with_tables(self) -> int:
        """The chunk with the embedding or the head; -1: none."""
        return {0: 0, self.pp - 1: self.vpp - 1}.get(self.rank, -1)


class Loads(NamedTuple):
    """Live memory at the instants of ranks: [loads], sorted by rank and time."""

    owner: Integers  # position of the rank among those asked for
    time: Integers
    instant: Integers  # one of the constants above
    passes: Integers  # forward passes of chunks whose activations are alive; includes the current one until `after`
    late: Integers  # backward passes that wait for their weight gradients
    summed: Integers  # chunks with accumulated unsharded gradients before this action
    tables: Integers  # 1: gradients of embedding or head are among them
    has_tables: Integers  # 1: the current chunk has the embedding or the head
    starts_sum: Integers  # 1: this action creates the first gradients of its chunk
    reduces: Integers  # or the last


_FIELDS = Loads._fields.index("passes")  # the first count


def pipeline_loads(ranks: Sequence[PipelineRank]) -> Loads:
    """Return the loads of a step that no other load of the same rank and instant covers: none has counts that are all
    as large."""
    short = [rank._replace(micro_batches=min(rank.micro_batches, ROUNDS * rank.pp)) for rank in ranks]
    missing = [rank for rank in dict.fromkeys(short) if rank not in _known]
    if missing:
        _known.update(zip(missing, _uncovered_loads(missing), strict=True))
    rows = [_known[rank] for rank in short]
    loads = np.concatenate(rows)
    loads[:, 0] = np.repeat(np.arange(len(rows)), [len(of_rank) for of_rank in rows])
    return Loads(*loads.T)


# A search asks for the same ranks again and again, with every kind of activation checkpointing.
_known: dict[PipelineRank, Integers] = {}


def _uncovered_loads(ranks: Sequence[PipelineRank]) -> list[Integers]:
    """Return [loads, fields of `Loads`] of each rank."""
    by_form: dict[Any, list[int]] = {}
    for owner, rank in enumerate(ranks):
        is_zero_bubble = rank.schedule == "zero-bubble"
        form = _one_forward_one_backward if not is_zero_bubble else _zero_bubble if rank.vpp == 1 else _simulated
        by_form.setdefault(form, []).append(owner)
    rows = [form([ranks[owner] for owner in owners], np.array(owners)) for form, owners in by_form.items()]
    loads = _uncovered(np.concatenate(rows))
    return np.split(loads, np.searchsorted(loads[:, 0], np.arange(1, len(ranks))))


def loads_of_actions(actions: Sequence[Action], rank: PipelineRank, owner: int = 0) -> Integers:
    """Return the loads of any order of a rank's actions, with the micro-batches of a chunk in order."""
    kinds = np.array([action.kind for action in actions])
    chunks, numbers = np.array([(action.chunk, action.micro_batch) for action in actions]).T
    has_tables = chunks == rank.chunk_with_tables
    is_forward, is_weight, is_input = kinds == "forward", kinds == "weight", kinds == "input"
    frees, gives = is_input | (kinds == "backward"), is_weight | (kinds == "backward")
    reduces = gives & (numbers == rank.micro_batches - 1)
    starts = gives & (numbers == 0) & ~reduces
    ends = reduces & (rank.micro_batches > 1)
    passes = np.cumsum(is_forward) - np.cumsum(frees)  # after the action, as the next one
    late = np.cumsum(is_input) - np.cumsum(is_weight)
    summed = np.cumsum(starts) - np.cumsum(ends) - starts + ends  # before the action, as the next one
    with_gradients = has_tables & ~is_forward
    tables = np.cumsum(with_gradients) > with_gradients
    time = 2 * np.arange(len(actions))
    others = (summed, tables, has_tables, starts, reduces)
    rows = [
        (FORWARD, is_forward, time, passes, late),
        (BACKWARD, frees, time, passes + 1, late - is_input),
        (AFTER_BACKWARD, frees, time + 1, passes, late),
        (WEIGHT, is_weight, time, passes, late + 1),
        (AFTER_WEIGHT, is_weight, time + 1, passes, late),
    ]
    return np.concatenate(
        [
            _rows(owner, when[at], instant, *(counts[at] for counts in (*alive, *others)))
            for instant, at, when, *alive in rows
        ]
    )


# A layout needs several ranks of one schedule; one call orders all ranks.
_cached_actions = lru_cache(maxsize=64)(schedule_actions)


def _simulated(ranks: Sequence[PipelineRank], owners: Integers) -> Integers:
    return np.concatenate(
        [
            loads_of_actions(_cached_actions(*rank[:-1])[rank.rank], rank, owner)
            for rank, owner in zip(ranks, owners.tolist(), strict=True)
        ]
    )


def _one_forward_one_backward(ranks: Sequence[PipelineRank], owners: Integers) -> Integers:
    """Count 1F1B, interleaved if a rank holds several chunks, at the actions where a count or the chunk changes.

    Forward pass `warm_up` + j is followed by backward pass j. Both go through groups of pp micro-batches, and a group
    through a run of each chunk: forward from the first chunk on, backward from the last.
    """
    pp, vpp, micro_batches, place = np.array([rank[1:] for rank in ranks]).T
    with_tables = np.array([rank.chunk_with_tables for rank in ranks])
    total = micro_batches * vpp
    warm_up = np.minimum(np.where(vpp > 1, 2, 1) * (pp - place - 1) + (vpp - 1) * pp, total)
    steady = total - warm_up  # pairs of a forward and a backward pass
    first_size = np.minimum(pp, micro_batches)  # of the runs in the first group
    groups = -(-micro_batches // pp)
    last_group, last_size = (groups - 1) * pp * vpp, micro_batches - (groups - 1) * pp
    tables_run = np.where(with_tables >= 0, vpp - 1 - with_tables, -1)  # of a backward group
    tables_from = np.where(with_tables >= 0, tables_run * first_size, total)  # the first gradients of the tables

    def run_at(of: Integers, position: Integers) -> Integers:
        """Return the run in its group, which is the chunk of a forward pass."""
        size = np.where(position >= last_group[of], last_size[of], pp[of])
        return np.asarray(position % (pp * vpp)[of] // size)

    def summed_at(of: Integers, backward: Integers) -> Integers:
        started = np.minimum(-(-backward // first_size[of]), vpp[of])
        ended = np.clip((backward - last_group[of]) // last_size[of], 0, vpp[of])
        return np.asarray((started - ended) * (micro_batches > 1)[of])

    runs = groups * vpp
    of = np.repeat(np.arange(len(ranks)), runs)
    number = np.arange(len(of)) - np.repeat(np.cumsum(runs) - runs, runs)
    group, run = np.divmod(number, vpp[of])
    size = np.minimum(pp[of], micro_batches[of] - group * pp[of])
    start = group * (pp * vpp)[of] + run * size
    of_tables = run == with_tables[of]

    by, backward = _distinct(
        np.tile(of, 3), np.concatenate([start, np.minimum(start + 1, start + size - 1), start + size - 1])
    )
    # a forward pass before which nothing changes is covered by one before it, or in the warm-up by one after it
    also, paired = _distinct(
        np.concatenate([of, of, of[of_tables]]),
        np.concatenate([start, start + 1, (start - warm_up[of])[of_tables]]),
    )
    inside = (paired >= 0) & (paired < steady[also])
    also, paired = also[inside], paired[inside]
    early = np.concatenate([np.arange(len(ranks)), of[of_tables]])
    warm = np.minimum(np.concatenate([warm_up - 1, (start + size - 1)[of_tables]]), warm_up[early] - 1)
    early, warm = _distinct(early[warm >= 0], warm[warm >= 0])

    in_last = backward - last_group[by]
    reduces = (in_last >= 0) & (in_last % last_size[by] == last_size[by] - 1)
    starts = (backward < (first_size * vpp)[by]) & (backward % first_size[by] == 0) & ~reduces
    passes = np.minimum(warm_up[by] + 1, total[by] - backward)
    time = 2 * np.where(backward < steady[by], warm_up[by] + 2 * backward + 1, total[by] + backward)
    gradients = (summed_at(by, backward), backward > tables_from[by], run_at(by, backward) == tables_run[by])
    following = run_at(also, paired + warm_up[also]) == with_tables[also]
    counts = (warm_up[also] + 1, 0, summed_at(also, paired), paired > tables_from[also], following, 0, 0)
    return np.concatenate(
        [
            _rows(owners[early], 2 * warm, FORWARD, warm + 1, 0, 0, 0, run_at(early, warm) == with_tables[early], 0, 0),
            _rows(owners[also], 2 * (warm_up[also] + 2 * paired), FORWARD, *counts),
            _rows(owners[by], time, BACKWARD, passes, 0, *gradients, starts, reduces),
            _rows(owners[by], time + 1, AFTER_BACKWARD, passes - 1, 0, *gradients, starts, reduces),
        ]
    )


def _zero_bubble(ranks: Sequence[PipelineRank], owners: Integers) -> Integers:
    """Count ZB-H1 with one chunk a rank (arXiv:2401.10241, figure 3), where a count changes: forward passes until the
    first gradient arrives, pairs with gradients of inputs until pp micro-batches are alive, then weight gradients
    before each pair."""
    pp, _, micro_batches, place = np.array([rank[1:] for rank in ranks]).T[:, :, None]
    has_tables = np.array([[rank.chunk_with_tables == 0] for rank in ranks])
    warm_up = np.minimum(pp - place - 1, micro_batches)
    pairs = np.minimum(micro_batches, pp) - warm_up
    is_summed = micro_batches > 1

    def numbers(*columns: Integers) -> Integers:
        return np.clip(np.concatenate(columns, axis=1), 0, micro_batches - 1)

    def rows(
        instant: int, done: tuple[Integers, Integers, Integers], *alive: Integers, current: Any = None
    ) -> Integers:
        forwards, inputs, weights = done  # actions of each kind before this one
        time = 2 * (forwards + inputs + weights) + (instant in (AFTER_BACKWARD, AFTER_WEIGHT))
        first = last = np.zeros_like(time)
        if current is not None:
            last = current == micro_batches - 1
            first = (current == 0) & ~last
        summed = is_summed & (weights > 0)
        values = (*alive, summed, has_tables & (inputs > 0), has_tables, first, last)
        shape = time.shape
        flat = [np.broadcast_to(value, shape).ravel() for value in (owners[:, None], time, *values)]
        return _rows(flat[0], flat[1], instant, *flat[2:])

    k = numbers(warm_up - 1, warm_up, warm_up + pairs - 1, warm_up + pairs)
    inputs = np.maximum(0, k - warm_up)
    weights = np.maximum(0, k - warm_up - pairs + 1)
    found = [rows(FORWARD, (k, inputs, weights), k + 1 - inputs, inputs - weights)]

    k = numbers(0 * pp, 0 * pp + 1, pairs - 1, pairs, pairs + 1)
    forwards = np.minimum(warm_up + k + 1, micro_batches)
    weights = np.where(pairs > 0, np.maximum(0, k - pairs + 1), k)
    done = (forwards, k, weights)
    found.append(rows(BACKWARD, done, forwards - k, k - weights))
    found.append(rows(AFTER_BACKWARD, done, forwards - k - 1, k - weights + 1))

    k = numbers(0 * pp, 0 * pp + 1, micro_batches - 1)
    inputs = np.minimum(k + np.maximum(pairs, 1), micro_batches)
    forwards = np.minimum(warm_up + pairs + k, micro_batches)
    done = (forwards, inputs, k)
    found.append(rows(WEIGHT, done, forwards - inputs, inputs - k, current=k))
    found.append(rows(AFTER_WEIGHT, done, forwards - inputs, inputs - k - 1, current=k))
    return np.concatenate(found)


def _distinct(of: Integers, position: Integers) -> tuple[Integers, Integers]:
    """Return distinct pairs, sorted."""
    order = np.lexsort((position, of))
    of, position = of[order], position[order]
    is_new = np.ones(len(of), bool)
    is_new[1:] = (of[1:] != of[:-1]) | (position[1:] != position[:-1])
    return of[is_new], position[is_new]


def _rows(owner: Any, time: Integers, instant: int, *counts: Any) -> Integers:
    """Return [loads, fields of `Loads`]."""
    rows = np.empty((len(time), len(Loads._fields)), np.int64)
    for column, values in enumerate((owner, time, instant, *counts)):
        rows[:, column] = values
    return rows


def _uncovered(rows: Integers) -> Integers:
    """Return the loads that no other load of their rank and instant covers, in order; of equal loads the first."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 2], rows[:, 0]))]
    distance = 1
    while distance < len(rows):
        is_same = (rows[:-distance, 0] == rows[distance:, 0]) & (rows[:-distance, 2] == rows[distance:, 2])
        if not is_same.any():
            break
        more = rows[:-distance, _FIELDS:] - rows[distance:, _FIELDS:]
        by_former = is_same & (more.min(1) >= 0)
        is_covered = np.zeros(len(rows), bool)
        is_covered[distance:] = by_former
        is_covered[:-distance] |= is_same & (more.max(1) <= 0) & ~by_former
        if is_covered.any():
            rows, distance = rows[~is_covered], 1
        else:
            distance += 1
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]
