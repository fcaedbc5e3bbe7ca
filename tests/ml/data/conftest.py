"""A small trained tokenizer, and folders of shards made of documents that a test can recognise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from counted_shards import VOCAB, MakeShards

from craton.ml.data import Shards
from craton.ml.data.shards import TokenizerMark
from craton.ml.data.tokenizer import train_bpe
from craton.ml.data.writer import ShardWriter


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """`make_shards(lengths)`: documents of these lengths; tokens count up through all of them, modulo VOCAB."""

    def make(lengths: Sequence[int], name: str = "shards", shard_tokens: int = 1 << 20, first: int = 0) -> Shards:
        mark = TokenizerMark("counting", VOCAB, "fingerprint", "sha")
        writer = ShardWriter(tmp_path / name, mark, shard_tokens=shard_tokens)
        for length in lengths:
            tokens = (np.arange(first, first + length) % VOCAB).astype(np.uint32)
            writer.append(tokens, np.array([length]))
            first += length
        writer.close()
        return Shards(tmp_path / name)

    return make


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    text = "The quick brown fox says hello to the world. What is 2 + 2? It is 4. def f(x): return x\n"
    train_bpe([text] * 4, 300, folder)
    return folder
