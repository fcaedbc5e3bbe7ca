"""Samples and loaders: one order for any number of ranks, from any sample on."""

from __future__ import annotations

import traceback

import numpy as np
import pytest
from counted_shards import MakeShards

from craton.ml.data import DataError, Loader, Source, collate
from craton.ml.data.sample import IGNORED, Sample
from craton.ml.data.tokens import Mixture, TokenSource

SEQUENCE = 16


@pytest.fixture
def source(make_shards: MakeShards) -> Source:
    lengths = np.random.default_rng(0).integers(1, 40, 60).tolist()
    return TokenSource(make_shards(lengths, shard_tokens=200), SEQUENCE, seed=1)


def seen(source: Source, world: int, steps: int, start: int = 0, micro_batch: int = 1) -> tuple[list[bytes], int]:
    """What all ranks see, step by step and in the order of ranks, and the state they end with."""
    loaders = [Loader(source, 12, rank, world, micro_batch, start) for rank in range(world)]
    rows: list[bytes] = []
    for _ in range(steps):
        for loader in loaders:
            for batch in loader.next():
                assert batch["tokens"].shape == (micro_batch, SEQUENCE)
                rows += [tokens.tobytes() for tokens in batch["tokens"]]
    states = {loader.state for loader in loaders}
    for loader in loaders:
        loader.close()
    assert len(states) == 1
    return rows, states.pop()


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 3), (2, 1), (2, 6), (3, 2), (4, 3)])
def test_any_number_of_ranks_sees_the_same(source: Source, world: int, micro_batch: int) -> None:
    rows, state = seen(source, world, 4, micro_batch=micro_batch)
    assert rows == [source.sample(index).tokens.tobytes() for index in range(48)]
    assert state == 48


def test_a_restart_on_other_ranks_goes_on_exactly(source: Source) -> None:
    whole, _ = seen(source, 1, 9)
    first, state = seen(source, 4, 3)
    second, state = seen(source, 2, 2, start=state)
    third, _ = seen(source, 3, 4, start=state)
    assert first + second + third == whole


def test_a_step_half_taken_is_begun_again(source: Source) -> None:
    with Loader(source, 12, 0, 2, 2) as loader:
        loader.next()
        loader.next(2)
        assert loader.state == 12
        loader.next(1)
        assert loader.state == 24


def test_every_token_is_a_label_once_an_epoch(make_shards: MakeShards) -> None:
    lengths = [7, 20, 3, 50, 17]
    source = TokenSource(make_shards(lengths), SEQUENCE, seed=0)
    rows = [source.sample(index) for index in range(source.epoch_samples)]
    labels = sorted(int(label) for row in rows for label in row.labels if label != IGNORED)
    starts = {0, *np.cumsum(lengths).tolist()}
    assert labels == [token for token in range(1, source.epoch_samples * SEQUENCE + 1) if token not in starts]


def test_a_packed_row_is_its_documents_side_by_side(make_shards: MakeShards) -> None:
    """Tokens count up through the stream, so a row shows which documents it holds."""
    ends = np.cumsum([5, 1, 8, 30, 2, 2, 40])
    source = TokenSource(make_shards(np.diff(ends, prepend=0).tolist()), SEQUENCE, seed=0)
    for index in range(source.epoch_samples):
        row = source.sample(index)
        assert row.documents is not None
        owner = np.searchsorted(ends, row.tokens, "right")
        for number in range(row.documents.max() + 1):
            here = row.documents == number
            assert len(set(owner[here])) == 1
            assert row.positions[here].tolist() == list(range(here.sum()))
            inner = row.tokens[here]
            last_ends = inner[-1] + 1 in ends
            assert row.labels[here].tolist() == [*inner[1:], IGNORED if last_ends else inner[-1] + 1]
        assert len(set(owner)) == row.documents.max() + 1
        assert np.array_equal(row.weight, (row.labels != IGNORED).astype(np.float32))


def test_without_packing_a_row_is_one_text(make_shards: MakeShards) -> None:
    row = TokenSource(make_shards([10] * 10), SEQUENCE, seed=0, pack=False).sample(0)
    assert row.documents is None
    assert np.array_equal(row.labels, row.tokens + 1)
    assert np.array_equal(row.positions, np.arange(SEQUENCE))
    assert "documents" not in collate([row])


def test_a_mixture_draws_from_each_source_in_its_own_order(make_shards: MakeShards) -> None:
    low = TokenSource(make_shards([300], "low"), SEQUENCE, seed=1)
    high = TokenSource(make_shards([300], "high", first=500), SEQUENCE, seed=2)
    mixture = Mixture([low, high], [3, 1])
    rows = [mixture.sample(index).tokens[0] for index in range(400)]
    from_high = [int(token) for token in rows if token >= 500]
    assert len(from_high) == 100
    assert from_high == [int(high.sample(index).tokens[0]) for index in range(100)]
    assert mixture.epoch_samples == low.epoch_samples + high.epoch_samples


class Broken:
    sequence = SEQUENCE
    epoch_samples = None

    def sample(self, index: int) -> Sample:
        if index == 3:
            raise ZeroDivisionError("in the source")
        return Sample(*(np.zeros(SEQUENCE, np.int64) for _ in range(3)), np.ones(SEQUENCE, np.float32))


def test_what_a_source_raises_reaches_the_caller_with_its_traceback() -> None:
    with Loader(Broken(), 1, 0, 1, 1) as loader:
        for _ in range(3):
            loader.next()
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) as caught:
                loader.next()
        assert "in sample" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert loader.state == 3


def test_a_batch_that_cannot_be_shared_is_refused(source: Source) -> None:
    with pytest.raises(DataError, match="multiple of 8"):
        Loader(source, 12, 0, 4, 2)
