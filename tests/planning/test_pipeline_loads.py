"""What is alive in a pipeline: its closed form beside a played schedule, and what the published formulas say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.job.layout import Layout, Schedule, schedule_actions
from craton.job.model import model_preset
from craton.planning.calibration import STACKS, UNKNOWN
from craton.planning.memory import memory
from craton.planning.memory.schedule_loads import (
    AFTER_BACKWARD,
    FORWARD,
    ROUNDS,
    Loads,
    PipelineRank,
    loads_of_actions,
    pipeline_loads,
)
from craton.planning.step import Workload

EIGHT_B = model_preset("llama-3.1-8b")


class Load(NamedTuple):
    """One load, with the fields of `Loads` from the instant on."""

    instant: int
    passes: int
    late: int
    summed: int
    tables: int
    has_tables: int
    starts_sum: int
    reduces: int

    def covers(self, other: Load) -> bool:
        return self.instant == other.instant and all(mine >= its for mine, its in zip(self[1:], other[1:], strict=True))


def loads_of(schedule: Schedule, pp: int, vpp: int, micro_batches: int, rank: int) -> list[Load]:
    return listed(pipeline_loads([PipelineRank(schedule, pp, vpp, micro_batches, rank)]))[0]


def listed(loads: Loads) -> list[list[Load]]:
    """The loads of every rank, in order."""
    found: list[list[Load]] = [[] for _ in range(int(loads.owner.max()) + 1)]
    for owner, _, *fields in np.stack(loads, axis=1).tolist():
        found[owner].append(Load(*fields))
    return found


def played(rank: PipelineRank) -> list[Load]:
    """The loads of the schedule as the trainer runs it, action by action, without those that others cover."""
    number = min(rank.micro_batches, ROUNDS * rank.pp)
    actions = schedule_actions(rank.schedule, rank.pp, rank.vpp, number)[rank.rank]
    rows = loads_of_actions(actions, rank._replace(micro_batches=number))
    kept: list[Load] = []
    for _, _, *fields in rows[np.argsort(rows[:, 1], kind="stable")].tolist():
        load = Load(*fields)
        if not any(other.covers(load) for other in kept):
            kept = [other for other in kept if not load.covers(other)] + [load]
    return kept


@st.composite
def pipeline_ranks(draw: st.DrawFn) -> PipelineRank:
    schedule: Schedule = draw(st.sampled_from(["1f1b", "interleaved", "zero-bubble"]))
    pp = draw(st.integers(2, 9))
    vpp = draw(st.integers(2, 5)) if schedule == "interleaved" else 1
    return PipelineRank(schedule, pp, vpp, draw(st.integers(1, 5 * pp)), draw(st.integers(0, pp - 1)))


@settings(max_examples=60)
@given(ranks=st.lists(pipeline_ranks(), min_size=1, max_size=6))
def test_the_closed_form_holds_what_the_played_schedule_holds(ranks: list[PipelineRank]) -> None:
    """Of any mixture of ranks in one call, and in the same order."""
    assert listed(pipeline_loads(ranks)) == [played(rank) for rank in ranks]


def test_a_schedule_without_closed_form_is_played() -> None:
    ranks = [PipelineRank("zero-bubble", 4, 2, 8, rank) for rank in (0, 1, 3)]
    assert listed(pipeline_loads(ranks)) == [played(rank) for rank in ranks]


def most(schedule: Schedule, pp: int, vpp: int, micro_batches: int, rank: int) -> tuple[int, int]:
    """(activations, activations and what waits for weight gradients), in passes of a chunk."""
    loads = loads_of(schedule, pp, vpp, micro_batches, rank)
    return max(load.passes for load in loads), max(load.passes + load.late for load in loads)


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_holds_one_pass_for_each_rank_behind_and_its_own(rank: int) -> None:
    assert most("1f1b", 4, 1, 16, rank) == (4 - rank, 4 - rank)
    assert most("1f1b", 4, 1, 2, rank)[0] == min(2, 4 - rank)


@pytest.mark.parametrize(("pp", "vpp", "rank"), [(4, 2, 0), (4, 2, 3), (8, 3, 0), (8, 3, 5)])
def test_interleaving_holds_what_the_paper_says(pp: int, vpp: int, rank: int) -> None:
    assert most("interleaved", pp, vpp, 4 * pp, rank)[0] == 2 * (pp - rank - 1) + (vpp - 1) * pp + 1


@pytest.mark.parametrize("rank", range(4))
def test_zero_bubble_holds_as_much_on_every_rank_as_1f1b_on_the_first(rank: int) -> None:
    passes, together = most("zero-bubble", 4, 1, 16, rank)
    assert together == 4
    assert passes == 4 - rank


def test_gradients_are_whole_from_the_first_backward_pass_to_the_last() -> None:
    loads = loads_of("1f1b", 4, 1, 4, 0)
    assert Load(FORWARD, 4, 0, 0, 0, 1, 0, 0) in loads  # all are forward before any comes back
    assert any(load.instant == AFTER_BACKWARD and load.starts_sum and load.passes == 3 for load in loads)
    longer = loads_of("1f1b", 4, 1, 8, 0)
    assert Load(FORWARD, 4, 0, 1, 1, 1, 0, 0) in longer
    assert not any(load.summed or load.starts_sum for load in loads_of("1f1b", 4, 1, 1, 0))


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_more_rounds_hold_nothing_more(schedule: Schedule, vpp: int) -> None:
    for rank in range(4):
        few, many = (loads_of(schedule, 4, vpp, rounds * 4, rank) for rounds in (ROUNDS, 10 * ROUNDS))
        assert few == many
        fewer = loads_of(schedule, 4, vpp, (ROUNDS - 1) * 4, rank)
        assert set(fewer) == set(few)


def test_late_weight_gradients_take_the_place_of_recomputed_activations() -> None:
    """Full recompute saves little where the inputs of all products wait for the gradients of weights."""

    def bytes_of(schedule: Schedule) -> float:
        layout = Layout(pp=4, fsdp=4, recompute="full", schedule=schedule)
        return memory(Workload(EIGHT_B, layout, 8192, 64), STACKS[UNKNOWN]).total_bytes

    assert bytes_of("zero-bubble") > 1.8 * bytes_of("1f1b")
