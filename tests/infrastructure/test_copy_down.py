"""A finished folder moves down whole: checked on the way, sealed last, never over one that is complete."""

from __future__ import annotations

import json
import random
import threading
import zlib
from pathlib import Path

import pytest
from s3 import FaultProxy, S3Server

from craton.infrastructure import StorageError, copy_down, open_store


def step_folder(path: Path, seed: int = 1, files: int = 6) -> dict[str, bytes]:
    """A checkpoint's step as it lies on a file system."""
    chance = random.Random(seed)
    contents = {f"__{number}_0.distcp": chance.randbytes(20_000) for number in range(files)}
    contents[".metadata"] = chance.randbytes(500)
    table = {name: {"crc32": zlib.crc32(content), "bytes": len(content)} for name, content in contents.items()}
    contents["checksums.json"] = json.dumps({"files": table}).encode()
    contents["COMPLETE"] = json.dumps({"step": 1, "save": seed}).encode()
    for name, content in contents.items():
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return contents


def test_down_and_back_up(tmp_path: Path, bucket: str, faults: FaultProxy) -> None:
    contents = step_folder(tmp_path / "nvme" / "step-1")
    copied = copy_down(tmp_path / "nvme" / "step-1", f"{bucket}/run/step-1")
    assert (copied.files, copied.bytes) == (len(contents), sum(map(len, contents.values())))
    puts = [path.rpartition("/")[2] for method, path in faults.seen if method == "PUT"]
    assert puts[-2:] == ["checksums.json", "COMPLETE"]
    copy_down(f"{bucket}/run/step-1", tmp_path / "again")
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == contents
    assert copy_down(tmp_path / "nvme" / "step-1", f"{bucket}/run/step-1").files == 0


def test_a_copy_that_was_cut_off_goes_on(
    tmp_path: Path, bucket: str, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    contents = step_folder(tmp_path / "step-1")
    faults.fail("503", method="PUT", holding="__5_0")
    with pytest.raises(StorageError, match="503"):
        copy_down(tmp_path / "step-1", f"{bucket}/step-1")
    store = open_store(f"{bucket}/step-1")
    there = {info.name for info in store.list()}
    assert there
    assert not there & {"COMPLETE", "checksums.json", "__5_0.distcp"}
    faults.heal()
    before = len(faults.seen)
    copied = copy_down(tmp_path / "step-1", store)
    assert copied.files == len(contents) - len(there)
    assert not there & {path.rpartition("/")[2] for method, path in faults.seen[before:] if method == "PUT"}
    assert {info.name: bytes(store.read(info.name)) for info in store.list()} == contents


def test_stop_ends_between_files(tmp_path: Path) -> None:
    step_folder(tmp_path / "step-1")
    stop = threading.Event()
    stop.set()
    with pytest.raises(StorageError, match="the copy was stopped before"):
        copy_down(tmp_path / "step-1", tmp_path / "below", stop.is_set)
    assert not (tmp_path / "below" / "COMPLETE").exists()


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_what_is_damaged_is_not_passed_on(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    target = str(tmp_path / "below") if place == "folder" else f"{request.getfixturevalue('bucket')}/below"
    step_folder(tmp_path / "step-1")
    damaged = tmp_path / "step-1" / "__3_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[777] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(StorageError, match=r"__3_0\.distcp has another checksum than checksums\.json says"):
        copy_down(tmp_path / "step-1", target)
    store = open_store(target)
    assert not store.exists("COMPLETE")
    assert not store.exists("__3_0.distcp")
    damaged.unlink()
    with pytest.raises(StorageError, match=r"__3_0\.distcp is missing, though checksums\.json names it"):
        copy_down(tmp_path / "step-1", target)


def test_a_half_copied_file_of_another_save_is_replaced(tmp_path: Path, bucket: str, s3_server: S3Server) -> None:
    contents = step_folder(tmp_path / "step-1")
    s3_server.replace(bucket.removeprefix("s3://"), "step-1/__0_0.distcp", bytes(20_000))
    copy_down(tmp_path / "step-1", f"{bucket}/step-1")
    assert open_store(f"{bucket}/step-1").read("__0_0.distcp") == contents["__0_0.distcp"]


def test_a_complete_target_stays(tmp_path: Path) -> None:
    kept = step_folder(tmp_path / "below", seed=2)
    step_folder(tmp_path / "step-1", seed=1)
    with pytest.raises(StorageError, match="is complete and is of another save; remove it first"):
        copy_down(tmp_path / "step-1", tmp_path / "below")
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    (tmp_path / "step-1" / "extra").write_bytes(b"")
    with pytest.raises(StorageError, match="is complete and differs in extra"):
        copy_down(tmp_path / "step-1", tmp_path / "below")
    assert {path.name: path.read_bytes() for path in (tmp_path / "below").iterdir()} == kept


def test_what_was_never_finished_is_not_copied(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds nothing to copy"):
        copy_down(tmp_path / "nothing", tmp_path / "below")
    step_folder(tmp_path / "step-1")
    (tmp_path / "step-1" / "COMPLETE").unlink()
    with pytest.raises(StorageError, match="has no COMPLETE, so it was never finished"):
        copy_down(tmp_path / "step-1", tmp_path / "below")
