"""Shards on disk: what is whole opens, what is torn says which file and what to do."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from counted_shards import VOCAB, MakeShards

from craton.ml.data import DataError, Shards
from craton.ml.data.tokens import TokenSource


def test_a_stream_reads_the_same_across_shards(make_shards: MakeShards) -> None:
    lengths = [5, 9, 1, 30, 12, 3]
    one, many = make_shards(lengths, "one"), make_shards(lengths, "many", shard_tokens=8)
    assert len(one.index.shards) == 1
    assert len(many.index.shards) > 2
    for start in range(one.tokens):
        for stop in range(start + 1, one.tokens + 1):
            assert np.array_equal(one.read(start, stop), np.arange(start, stop))
            assert np.array_equal(many.read(start, stop), np.arange(start, stop))
            inside = [end - start for end in np.cumsum(lengths) if start < end < stop]
            assert one.boundaries(start, stop).tolist() == many.boundaries(start, stop).tolist() == inside


@pytest.mark.parametrize("suffix", [".tokens", ".documents"])
@pytest.mark.parametrize(("keep", "said"), [(0, "is empty"), (8, "is truncated"), (None, "is missing")])
def test_a_torn_file_is_named(make_shards: MakeShards, suffix: str, keep: int | None, said: str) -> None:
    path = make_shards([40, 60]).folder / f"shard-00000{suffix}"
    if keep is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=said) as caught:
        Shards(path.parent)
    assert str(path) in str(caught.value)
    assert "tokenize again" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 1, "kind": "text"}'])
def test_a_bad_index_is_named(make_shards: MakeShards, text: str) -> None:
    folder = make_shards([40]).folder
    (folder / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"index\.json"):
        Shards(folder)


def test_a_folder_without_an_index_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="craton data tokenize"):
        Shards(tmp_path)


def test_ids_beyond_the_models_vocabulary_are_refused_at_opening(make_shards: MakeShards) -> None:
    with pytest.raises(DataError, match=r"vocabulary of 512.*vocab: 1024"):
        TokenSource(make_shards([2000]), 16, seed=0, vocab=512)


def test_an_id_outside_the_vocabulary_is_found_where_it_is(make_shards: MakeShards) -> None:
    """A writer's bug: the checksum is right, the index claims less than what is there."""
    folder = make_shards([100, 100], shard_tokens=100).folder
    index = json.loads((folder / "index.json").read_text())
    tokens = np.fromfile(folder / "shard-00001.tokens", np.uint16)
    tokens[42] = VOCAB + 5
    tokens.tofile(folder / "shard-00001.tokens")
    shards = Shards(folder)
    shards.read(0, 140)
    with pytest.raises(DataError, match="checksum"):
        shards.read(140, 150)
    index["shards"][1]["crc32"][".tokens"] = zlib.crc32((folder / "shard-00001.tokens").read_bytes())
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"shard-00001\.tokens: position 42 holds token id 1,005.*vocabulary of 1,000"):
        Shards(folder).read(140, 150)


def test_damage_that_sizes_do_not_show_is_found_by_checksums(make_shards: MakeShards) -> None:
    shards = make_shards([100])
    shards.verify()
    path = shards.folder / "shard-00000.tokens"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="changed or damaged"):
        shards.verify()


def test_too_little_text_for_one_sample(make_shards: MakeShards) -> None:
    with pytest.raises(DataError, match=r"has 16 tokens.*shorter data\.sequence"):
        TokenSource(make_shards([16]), 16, seed=0)
