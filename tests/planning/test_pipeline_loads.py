"""What is alive in a pipeline: counted by playing a schedule through, and what the published formulas say."""

from __future__ import annotations

import pytest

from craton.job.layout import Layout, Schedule
from craton.job.model import model_preset
from craton.planning.calibration import STACKS, UNKNOWN
from craton.planning.memory import memory
from craton.planning.step import Workload, pipeline_loads
from craton.planning.step.schedule_loads import ROUNDS, Load

EIGHT_B = model_preset("llama-3.1-8b")


def most(schedule: Schedule, pp: int, vpp: int, micro_batches: int, rank: int) -> tuple[int, int]:
    """(activations, activations and what waits for weight gradients), in passes of a chunk."""
    loads = pipeline_loads(schedule, pp, vpp, micro_batches, rank)
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
    loads = pipeline_loads("1f1b", 4, 1, 4, 0)
    assert Load("forward", 4, 0, 0, False, True, False, False) in loads  # all are forward before any comes back
    assert any(load.kind == "after backward" and load.starts_sum and load.passes == 3 for load in loads)
    longer = pipeline_loads("1f1b", 4, 1, 8, 0)
    assert Load("forward", 4, 0, 1, True, True, False, False) in longer
    assert not any(load.summed or load.starts_sum for load in pipeline_loads("1f1b", 4, 1, 1, 0))


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_more_rounds_hold_nothing_more(schedule: Schedule, vpp: int) -> None:
    for rank in range(4):
        few, many = (pipeline_loads(schedule, 4, vpp, rounds * 4, rank) for rounds in (ROUNDS, 10 * ROUNDS))
        assert few == many
        fewer = pipeline_loads(schedule, 4, vpp, (ROUNDS - 1) * 4, rank)
        assert set(fewer) == set(few)


def test_late_weight_gradients_take_the_place_of_recomputed_activations() -> None:
    """Full recompute saves little where the inputs of all products wait for the gradients of weights."""

    def bytes_of(schedule: Schedule) -> float:
        layout = Layout(pp=4, fsdp=4, recompute="full", schedule=schedule)
        return memory(Workload(EIGHT_B, layout, 8192, 64), STACKS[UNKNOWN]).total_bytes

    assert bytes_of("zero-bubble") > 1.8 * bytes_of("1f1b")
