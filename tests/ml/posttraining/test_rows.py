"""Rows of sampled sequences: nothing is lost, every rank has as many micro-batches, and values come back unpacked."""

from __future__ import annotations

import numpy as np
import pytest

from craton.job.layout import Layout
from craton.ml.posttraining.rows import RowPlan, TrainedSequence, micro_batches, num_slots, row_sample, unpacked

CAPACITY = 20


def sequences_of(seed: int, count: int) -> list[TrainedSequence]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length, prompt = int(random.integers(4, CAPACITY + 1)), int(random.integers(1, 4))
        weight = np.ones(length - 1, np.float32)
        weight[: prompt - 1] = 0
        values = {"advantage": random.normal(size=length - 1).astype(np.float32)}
        found.append(TrainedSequence(random.integers(0, 259, length), weight, values))
    return found


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 3}, {"replicate": 2, "pp": 2}, {"fsdp": 2, "pp": 3, "micro_batch": 4}])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_every_sequence_is_in_one_row_of_one_rank(sizes: dict[str, int], count: int) -> None:
    layout, sequences = Layout(precision="fp32", **sizes), sequences_of(0, count)
    plan = RowPlan.of([sequence.places for sequence in sequences], CAPACITY, layout)
    assert sorted(index for row in plan.rows for index in row) == list(range(count))
    assert sorted(row for share in plan.shares for row in share if row >= 0) == list(range(len(plan.rows)))
    slots = num_slots(count, CAPACITY)
    batches = [
        micro_batches(plan, sequences, ["advantage"], rank, layout, CAPACITY, slots)
        for rank in range(layout.data_parallel)
    ]
    assert len({len(share) for share in batches}) == 1
    assert len(batches[0]) % layout.pp == 0
    assert len(batches[0]) >= layout.pp
    total = sum(float(arrays["weight"].sum()) for share in batches for arrays in share)
    assert total == sum(float(sequence.weight.sum()) for sequence in sequences)
    starts = sum(float(arrays["sequence_start"].sum()) for share in batches for arrays in share)
    assert starts == count


def test_ranks_have_about_the_same_number_of_tokens() -> None:
    lengths = [sequence.places for sequence in sequences_of(1, 60)]
    plan = RowPlan.of(lengths, CAPACITY, Layout(fsdp=4, precision="fp32"))
    tokens = [sum(lengths[index] for row in share if row >= 0 for index in plan.rows[row]) for share in plan.shares]
    assert max(tokens) - min(tokens) <= CAPACITY


def test_a_row_says_where_its_sequences_are() -> None:
    first, second = sequences_of(2, 2)
    first, second = (
        TrainedSequence(s.tokens[:8], s.weight[:7], {"advantage": s.values["advantage"][:7]}) for s in (first, second)
    )
    row = row_sample([first, second], ["advantage"], CAPACITY, 5)
    assert row.tokens[:7].tolist() == first.tokens[:-1].tolist()
    assert row.labels[7:14].tolist() == second.tokens[1:].tolist()
    assert row.extra["sequence"].tolist() == [0] * 7 + [1] * 7 + [-1] * 6
    assert row.extra["sequence_tokens"].tolist() == [first.weight.sum(), second.weight.sum(), 0, 0, 0]
    assert row.positions[7] == 0
    assert row.weight[14:].sum() == 0


def test_values_of_rows_come_back_to_their_sequences() -> None:
    sequences = sequences_of(3, 23)
    lengths = [sequence.places for sequence in sequences]
    plan = RowPlan.of(lengths, CAPACITY, Layout(precision="fp32"))
    values = np.zeros((len(plan.rows), CAPACITY), np.float32)
    for number, row in enumerate(plan.rows):
        values[number] = row_sample([sequences[index] for index in row], ["advantage"], CAPACITY, 30).extra["advantage"]
    for sequence, found in zip(sequences, unpacked(plan, lengths, values), strict=True):
        assert np.array_equal(found, sequence.values["advantage"])


@pytest.mark.parametrize("samples", [1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 1000])
def test_slots_are_never_taken_for_tokens(samples: int) -> None:
    assert num_slots(samples, CAPACITY) != CAPACITY
    assert num_slots(samples, CAPACITY) >= min(samples, CAPACITY)
