"""What goes wrong with storage is tried again where that can help, and then told in one line with what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import make_read_only
from s3 import FaultProxy, Kind, S3Server

from craton.infrastructure import StorageError
from craton.infrastructure.errors import ObjectMissingError
from craton.infrastructure.storage import Store, open_store

CONTENT = b"0123456789" * 100
PART_BYTES = 5 * 2**20  # the smallest that S3 takes
LARGE = bytes(PART_BYTES + 1)


@pytest.fixture
def store(bucket: str, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("craton.infrastructure.storage.s3.PART_BYTES", PART_BYTES)
    monkeypatch.setattr("craton.infrastructure.storage.s3.PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    monkeypatch.setenv("AWS_TIMEOUT", "700ms")
    store = open_store(f"{bucket}/x")
    store.put("there", CONTENT)
    return store


def _write_large(store: Store) -> None:
    with store.create("large") as writer:
        writer.write(LARGE)


ACTIONS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("there"),
    "put": lambda store: store.put("new", CONTENT),
    "list": lambda store: store.list(),
    "create": _write_large,
    "delete": lambda store: store.delete(["there"]),
}


@pytest.mark.parametrize("kind", ["500", "503", "drop", "refuse", "truncate", "stall"])
def test_a_fault_that_passes_is_not_noticed(store: Store, faults: FaultProxy, kind: Kind) -> None:
    for action, method in (("read", "GET"), ("put", "PUT"), ("list", "GET"), ("create", "PUT")):
        faults.fail(kind, times=1 if kind == "stall" else 2, method=method, seconds=1.5)
        result = ACTIONS[action](store)
        faults.heal()
        if action == "read":
            assert result == CONTENT
    assert store.read("new") == CONTENT
    assert store.read("large") == LARGE


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("500", r"S3 returned 500.* \(3 attempts\); the service is down"),
        ("503", r"S3 returned 503.* \(3 attempts\); the service is down or overloaded: try later"),
        ("403", r"S3 returned 403.*AWS_ACCESS_KEY_ID"),
        ("drop", r"the connection was dropped.*AWS_ENDPOINT_URL"),
        ("refuse", r"the connection was dropped.*\(3 attempts\)"),
    ],
)
def test_a_fault_that_stays_is_told(
    store: Store, faults: FaultProxy, s3_server: S3Server, bucket: str, kind: Kind, message: str
) -> None:
    faults.fail(kind)
    for name, action in ACTIONS.items():
        with pytest.raises(StorageError, match=message) as caught:
            action(store)
        assert store.url in str(caught.value), name
        assert "\n" not in str(caught.value)
    faults.heal()
    assert s3_server.objects(bucket.removeprefix("s3://")) == ["x/there"]
    assert store.read("there") == CONTENT


def test_a_clock_that_is_wrong_is_told(store: Store, faults: FaultProxy) -> None:
    faults.fail("skewed")
    for name in ("put", "list", "create", "delete"):
        with pytest.raises(StorageError, match=r"RequestTimeTooSkewed; this machine's clock is wrong: synchronise it"):
            ACTIONS[name](store)


def test_time_outs_and_answers_that_are_cut_are_told(store: Store, faults: FaultProxy) -> None:
    faults.fail("stall", seconds=3)
    with pytest.raises(StorageError, match=r"timed out \(3 attempts\).*AWS_TIMEOUT"):
        store.put("new", CONTENT)
    faults.heal()
    faults.fail("truncate", method="GET")
    with pytest.raises(StorageError, match="received 500 bytes instead of 1000, 3 times"):
        store.read("there")


def test_an_upload_that_fails_in_the_middle_is_given_up(
    store: Store, faults: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    faults.fail("500", method="PUT", holding="partNumber=2")
    with pytest.raises(StorageError, match="500"):
        _write_large(store)
    assert s3_server.open_uploads(bucket.removeprefix("s3://")) == []
    assert store.info("large") is None


def test_an_object_that_changes_while_it_is_read(store: Store, s3_server: S3Server, bucket: str) -> None:
    info = store.info("there")
    assert info is not None
    s3_server.replace(bucket.removeprefix("s3://"), "x/there", b"x" * 1000)
    with pytest.raises(StorageError, match="changed during the read"):
        b"".join(store.stream(info))


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    missing = open_store("s3://another-bucket/x")
    for name in ("read", "put", "list", "create"):
        with pytest.raises(StorageError, match="there is no bucket another-bucket; create it"):
            ACTIONS[name](missing)


def test_an_endpoint_that_is_no_s3(store: Store, faults: FaultProxy) -> None:
    faults.fail("404")
    for name in ("put", "create"):
        with pytest.raises(StorageError, match=r"a write returned 404.*AWS_ENDPOINT_URL is not an S3"):
            ACTIONS[name](store)


def test_a_check_does_not_wait_as_long_as_work_does(
    store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "24h")  # a check that waited this long would never end
    store.check_writable(seconds=60)
    faults.fail("stall", seconds=86400)
    with pytest.raises(StorageError, match="timed out"):
        store.check_writable(seconds=0.4)


def test_nobody_listens(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with pytest.raises(StorageError, match=r"S3 cannot be reached \(2 attempts\); check AWS_ENDPOINT_URL"):
        open_store(bucket).list()


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_TIMEOUT", "soon"), ("AWS_MAX_ATTEMPTS", "0"), ("AWS_ENDPOINT_URL", "not a url")]
)
def test_settings_that_cannot_be_used(bucket: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=r"AWS_"):
        open_store(bucket).put("a", "b")


def test_credentials_of_a_profile(
    bucket: str, faults: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match="no credentials for S3: set AWS_ACCESS_KEY_ID"):
        open_store(bucket).list()
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[team]\naws_access_key_id = A\naws_secret_access_key = B\n")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageError, match="AWS_PROFILE is nobody, which has no credentials"):
        open_store(bucket).list()
    monkeypatch.setenv("AWS_PROFILE", "team")
    open_store(bucket).put("a", "b")
    assert open_store(bucket).read("a") == b"b"


def test_without_the_client_the_error_names_the_extra(bucket: str) -> None:
    code = f"""
import sys
sys.modules["obstore"] = None
from craton.infrastructure import StorageError
from craton.infrastructure.storage import open_store
for ask in ("list", "check_writable"):
    try:
        getattr(open_store({bucket!r}), ask)()
    except StorageError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == second
    assert re.fullmatch(rf"{bucket} needs obstore, which is not installed; run: .*\[s3\]'", first)


def test_a_full_disk(small_disk: Path) -> None:
    store = open_store(small_disk)
    store.put("old", CONTENT)
    with pytest.raises(StorageError, match="the disk is full; free some space"):
        store.put("new", bytes(2 * 2**20))
    assert [path.name for path in small_disk.iterdir()] == ["old"]
    store.put("new", CONTENT)
    assert store.read("old") == CONTENT


def test_a_read_only_file_system(small_disk: Path) -> None:
    store = open_store(small_disk)
    store.put("old", CONTENT)
    make_read_only(small_disk)
    with pytest.raises(StorageError, match="read-only; remount it writable"):
        store.check_writable()
    with pytest.raises(StorageError, match="read-only"):
        store.delete(["old"])
    assert store.read("old") == CONTENT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_someone_else(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="permission denied"):
        open_store(tmp_path / "theirs").put("a", "b")


def test_a_folder_that_vanishes_is_not_made_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "mounted")
    store.put("a", "b")
    store.delete_tree("")
    assert not (tmp_path / "mounted").exists()
    with pytest.raises(StorageError, match="vanished; is its file system still mounted"):
        store.put("a", "b")
    with pytest.raises(ObjectMissingError):
        store.read("a")
    assert store.list() == []


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"a part of this path is a file|exists"):
        open_store(tmp_path / "file" / "below").put("a", "b")
