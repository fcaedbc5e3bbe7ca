"""Shards in an object store read as they do from a folder, each file fetched when it is first read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from counted_shards import MakeShards
from s3 import FaultProxy

from craton.infrastructure import StorageError
from craton.infrastructure.storage import copy_down, mirror, open_store
from craton.ml.data import Shards, preparing
from craton.ml.data.shards import INDEX


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))


def test_shards_come_one_by_one(make_shards: MakeShards, bucket: str, faults: FaultProxy) -> None:
    here = make_shards([70, 80, 90, 60, 100, 50], shard_tokens=100)
    copy_down(here.folder, f"{bucket}/tokens", seal=INDEX)
    there = Shards(mirror(f"{bucket}/tokens", lambda name: name == INDEX))

    def fetched() -> list[str]:
        got = {path.rpartition("/")[2] for method, path in faults.seen if method == "GET" and "tokens/" in path}
        return sorted(got - {INDEX})

    assert there.tokens == here.tokens
    assert len(there.index.shards) > 2
    assert fetched() == []
    np.testing.assert_array_equal(there.read(10, 60), here.read(10, 60))
    assert fetched() == ["shard-00000.tokens"]
    np.testing.assert_array_equal(there.boundaries(0, here.tokens), here.boundaries(0, here.tokens))
    np.testing.assert_array_equal(there.read(0, here.tokens), here.read(0, here.tokens))
    there.verify()
    assert len(fetched()) == 2 * len(here.index.shards)


def test_a_folder_is_listed_once_whatever_it_holds(make_shards: MakeShards, bucket: str, faults: FaultProxy) -> None:
    open_store(f"{bucket}/text").put("a.txt", "some text")
    copy_down(make_shards([70, 80], shard_tokens=100).folder, f"{bucket}/tokens", seal=INDEX)
    for name, expected in (("text", ["a.txt"]), ("tokens", [INDEX])):
        begin = len(faults.seen)
        folder = Path(preparing._mirror(f"{bucket}/{name}"))
        assert sorted(path.name for path in folder.iterdir() if path.is_file()) == expected
        assert sum("list-type" in path for _, path in faults.seen[begin:]) == 1


def test_a_damaged_shard_is_told(make_shards: MakeShards, bucket: str) -> None:
    here = make_shards([70, 80], shard_tokens=100)
    tokens = here.folder / "shard-00000.tokens"
    content = bytearray(tokens.read_bytes())
    content[10] ^= 1
    tokens.write_bytes(content)
    copy_down(here.folder, f"{bucket}/tokens", seal=INDEX)
    there = Shards(mirror(f"{bucket}/tokens", lambda name: name == INDEX))
    with pytest.raises(StorageError, match=r"shard-00000\.tokens does not match the checksum of its folder"):
        there.read(0, 10)
