"""A finished folder is copied whole, sealed last, and never over one that is complete."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from s3 import FaultProxy, S3Server

from craton.infrastructure import StorageError
from craton.infrastructure.storage import copy_down, open_store

SEAL = "config.json"


def model_folder(path: Path, seed: int = 1, files: int = 6) -> dict[str, bytes]:
    """Two of different seeds have the same names and sizes, and the same seal."""
    chance = random.Random(seed)
    contents = {f"part-{number}": chance.randbytes(20_000) for number in range(files)}
    contents["below/empty"] = b""
    contents[SEAL] = b"{}"
    for name, content in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return contents


def test_there_and_back(tmp_path: Path, bucket: str, faults: FaultProxy) -> None:
    contents = model_folder(tmp_path / "model")
    copy_down(tmp_path / "model", f"{bucket}/model", SEAL)
    puts = [path.rpartition("/")[2] for method, path in faults.seen if method == "PUT"]
    assert puts[-1] == SEAL
    assert puts.count(SEAL) == 1
    copy_down(f"{bucket}/model", tmp_path / "again", SEAL)
    assert {name: (tmp_path / "again" / name).read_bytes() for name in contents} == contents


def test_a_copy_that_was_cut_off_is_made_again(
    tmp_path: Path, bucket: str, faults: FaultProxy, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    contents = model_folder(tmp_path / "model")
    faults.fail("503", method="PUT", holding="part-5")
    with pytest.raises(StorageError, match="503"):
        copy_down(tmp_path / "model", f"{bucket}/model", SEAL)
    store = open_store(f"{bucket}/model")
    there = {info.name for info in store.list()}
    assert there
    assert not there & {SEAL, "part-5"}
    faults.heal()
    s3_server.replace(bucket.removeprefix("s3://"), "model/part-0", bytes(20_000))  # of another attempt
    copy_down(tmp_path / "model", f"{bucket}/model", SEAL)
    assert {info.name: store.read(info.name) for info in store.list()} == contents


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_a_complete_target_stays(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    target = str(tmp_path / "below") if place == "folder" else f"{request.getfixturevalue('bucket')}/below"
    kept = model_folder(tmp_path / "first", seed=2)
    copy_down(tmp_path / "first", target, SEAL)
    model_folder(tmp_path / "second", seed=1)
    with pytest.raises(StorageError, match="below already has a complete copy; remove it first, or copy to"):
        copy_down(tmp_path / "second", target, SEAL)
    store = open_store(target)
    assert {info.name: store.read(info.name) for info in store.list()} == kept


def test_what_was_never_finished_is_not_copied(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is empty, so there is nothing to copy"):
        copy_down(tmp_path / "nothing", tmp_path / "below", SEAL)
    model_folder(tmp_path / "model")
    (tmp_path / "model" / SEAL).unlink()
    with pytest.raises(StorageError, match=r"has no config\.json, so it is incomplete"):
        copy_down(tmp_path / "model", tmp_path / "below", SEAL)
