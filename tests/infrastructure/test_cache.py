"""A folder in S3 read through this machine's cache: fetched once, again when torn or changed, within its bounds."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from s3 import FaultProxy, S3Server

from craton.infrastructure import StorageError
from craton.infrastructure.errors import ObjectMissingError
from craton.infrastructure.storage import CachedFolder, mirror, open_store
from craton.infrastructure.storage import cache as cache_module

KILO = 1000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CRATON_CACHE_BYTES", raising=False)
    monkeypatch.setattr(CachedFolder, "_held", {})
    return tmp_path / "cache"


def contents(seed: int, count: int, size: int = 10 * KILO) -> dict[str, bytes]:
    chance = random.Random(seed)
    return {f"sub/file-{number}" if number % 2 else f"file-{number}": chance.randbytes(size) for number in range(count)}


def filled(url: str, files: dict[str, bytes]) -> str:
    store = open_store(url)
    for name, content in files.items():
        store.put(name, content)
    return url


def downloads(faults: FaultProxy, name: str) -> int:
    return sum(method == "GET" and path.endswith(f"/{name}") for method, path in faults.seen)


def test_files_come_when_they_are_used_and_once(bucket: str, faults: FaultProxy) -> None:
    files = contents(1, 6)
    url = filled(f"{bucket}/data", files)
    folder = mirror(url, lambda name: name == "file-0")
    assert (folder / "file-0").read_bytes() == files["file-0"]
    assert not (folder / "sub").exists()
    found = CachedFolder.of(folder / "sub")
    assert found is not None
    cached, inside = found
    with cached.open(f"{inside}file-1") as file:
        assert file.read() == files["sub/file-1"]
    again = CachedFolder(url)
    again.open("sub/file-1").close()
    mirror(url, lambda name: name == "file-0")
    assert downloads(faults, "sub/file-1") == 1
    assert downloads(faults, "file-0") == 1
    assert CachedFolder.of(folder.parent) is None


READER = """
import sys, zlib
from craton.infrastructure.storage import CachedFolder
cached = CachedFolder(sys.argv[1])
sys.stdin.readline()
for name in sys.argv[2:]:
    with cached.open(name) as file:
        print(name, zlib.crc32(file.read()))
"""


def readers(url: str, names: list[str], count: int) -> list[dict[str, int]]:
    """What several processes read that begin at the same time."""
    command = [sys.executable, "-c", READER, url, *names]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(count)]  # type: ignore[call-overload]
    results = []
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        out, error = process.communicate()
        assert process.returncode == 0, error
        results.append({name: int(crc32) for name, crc32 in (line.split() for line in out.splitlines())})
    return results


def test_processes_that_ask_at_once_download_once(bucket: str, faults: FaultProxy) -> None:
    files = contents(2, 4, 300 * KILO)
    url = filled(f"{bucket}/data", files)
    expected = {name: zlib.crc32(content) for name, content in files.items()}
    assert readers(url, list(files), 3) == [expected] * 3
    assert [downloads(faults, name) for name in files] == [1] * len(files)


@pytest.mark.parametrize("damage", ["shortened", "emptied", "flipped", "removed", "state torn", "state removed"])
def test_what_is_torn_is_fetched_again(bucket: str, damage: str) -> None:
    files = contents(3, 1)
    folder = mirror(filled(f"{bucket}/data", files))
    path, state = folder / "file-0", folder / ".state" / "files" / "file-0.json"
    content = files["file-0"]
    if damage == "shortened":
        path.write_bytes(content[:500])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(content[:500] + bytes([content[500] ^ 4]) + content[501:])
    elif damage == "removed":
        path.unlink()
    elif damage == "state torn":
        state.write_text('{"tag": "x", "by')
    else:
        state.unlink()
    assert (mirror(f"{bucket}/data") / "file-0").read_bytes() == content


def test_a_download_that_was_cut_off_goes_on(bucket: str, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("craton.infrastructure.storage.store.STREAM_BYTES", 4 * KILO)
    monkeypatch.setattr("craton.infrastructure.storage.store.READS_IN_FLIGHT", 2)
    files = contents(4, 1, 50 * KILO)
    url = filled(f"{bucket}/data", files)
    before = len(faults.seen)
    faults.fail("slow", times=5, method="GET", holding="file-0", seconds=0)  # these come through
    faults.fail("500", method="GET", holding="file-0")
    with pytest.raises(StorageError, match="500"):
        mirror(url)
    part = CachedFolder(url).root / ".state" / "files" / "file-0.part"
    came = part.stat().st_size
    assert 0 < came < 50 * KILO
    faults.heal()
    middle = len(faults.seen)
    assert (mirror(url) / "file-0").read_bytes() == files["file-0"]
    first = sum("file-0" in path and method == "GET" for method, path in faults.seen[before:middle])
    rest = sum("file-0" in path and method == "GET" for method, path in faults.seen[middle:])
    assert rest == -(-(50 * KILO - came) // (4 * KILO)), "only what was missing"
    assert first >= 5


def test_a_part_of_another_version_is_thrown_away(bucket: str, s3_server: S3Server) -> None:
    old, new = contents(5, 1), contents(6, 1)
    cached = CachedFolder(filled(f"{bucket}/data", old))
    info = cached.store.info("file-0")
    assert info is not None
    state = cached.root / ".state" / "files"
    state.mkdir()
    (state / "file-0.json").write_text(
        f'{{"tag": {info.tag.replace(chr(34), "")!r}, "bytes": 10000}}'.replace("'", '"')
    )
    (state / "file-0.part").write_bytes(old["file-0"][:4000])
    s3_server.replace(bucket.removeprefix("s3://"), "data/file-0", new["file-0"])
    with cached.open("file-0") as file:
        assert file.read() == new["file-0"]


def test_a_changed_object_is_noticed(bucket: str, s3_server: S3Server) -> None:
    files = contents(7, 2)
    url = filled(f"{bucket}/data", files)
    folder = mirror(url)
    s3_server.replace(bucket.removeprefix("s3://"), "data/file-0", b"new")
    s3_server.delete(bucket.removeprefix("s3://"), "data/sub/file-1")
    assert mirror(url) == folder
    assert (folder / "file-0").read_bytes() == b"new"
    assert not (folder / "sub" / "file-1").exists(), "gone there, gone here"


def test_a_known_checksum_spares_asking_and_is_checked(bucket: str, faults: FaultProxy) -> None:
    files = contents(8, 1)
    url = filled(f"{bucket}/data", files)
    crc32 = zlib.crc32(files["file-0"])
    with pytest.raises(StorageError, match="does not match the checksum of its folder"):
        CachedFolder(url).open("file-0", crc32 ^ 1)
    CachedFolder(url).open("file-0", crc32).close()
    asked = len(faults.seen)
    CachedFolder(url).open("file-0", crc32).close()
    assert len(faults.seen) == asked


def test_the_least_recently_used_goes_first_and_never_what_is_in_use(
    bucket: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = contents(9, 6)
    cached = CachedFolder(filled(f"{bucket}/data", files))
    monkeypatch.setenv("CRATON_CACHE_BYTES", str(35 * KILO))

    def use(name: str) -> None:
        cached.open(name).close()
        now = time.time_ns() + len(used)
        os.utime(cached.root / ".state" / "files" / f"{name}.json", ns=(now, now))
        used.append(name)

    def here() -> list[str]:
        return sorted(name for name in files if (cached.root / name).exists())

    used: list[str] = []
    for name in ("file-0", "sub/file-1", "file-2", "file-0"):
        use(name)
    assert here() == ["file-0", "file-2", "sub/file-1"]
    use("sub/file-3")
    assert here() == ["file-0", "file-2", "sub/file-3"], "sub/file-1 was used longest ago"

    with cached.open("file-2") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    kept = cached.path("file-0")
    use("file-4")
    use("sub/file-5")
    assert here() == ["file-0", "file-2", "sub/file-5"], "what is mapped or given out as a path stays"
    assert mapped[:] == files["file-2"]
    assert kept.read_bytes() == files["file-0"]

    monkeypatch.setenv("CRATON_CACHE_BYTES", str(25 * KILO))
    with pytest.raises(StorageError, match=r"limited to 25,000, of which 20,000 are in use; raise CRATON_CACHE_BYTES"):
        cached.open("file-4")
    mapped.close()
    use("file-4")
    assert here() == ["file-0", "file-4"]
    used_bytes = sum(path.stat().st_size for path in cache.rglob("file-*") if path.suffix not in (".json", ".lock"))
    assert used_bytes <= 25 * KILO


def test_room_for_files_that_come_together_is_looked_for_once(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = filled(f"{bucket}/data", contents(11, 6))
    looked, entries = [], cache_module._entries

    def counted(objects: Path) -> list[cache_module._Entry]:
        looked.append(objects)
        return entries(objects)

    monkeypatch.setattr(cache_module, "_entries", counted)
    monkeypatch.setenv("CRATON_CACHE_BYTES", str(60 * KILO))
    mirror(url)
    mirror(url)
    assert len(looked) == 1
    with pytest.raises(StorageError, match=r"file-0 and 1 more of its files: 20,000 bytes needed, .* 60,000 are in"):
        mirror(filled(f"{bucket}/other", contents(12, 2)))


def test_files_that_are_here_do_not_make_room_for_the_rest_of_their_folder(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, files = filled(f"{bucket}/old", contents(13, 1)), contents(14, 3)
    url = filled(f"{bucket}/data", files)
    CachedFolder(url).open("file-0").close()
    CachedFolder(old).open("file-0").close()  # used later, and still it is the one that goes
    monkeypatch.setenv("CRATON_CACHE_BYTES", str(30 * KILO))
    folder = mirror(url)
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert not (CachedFolder(old).root / "file-0").exists()


def test_any_name_may_be_in_the_store(bucket: str) -> None:
    files = {"source/a": b"1", "source.json": b"2", "files/source": b"3", "source.lock": b"4"}
    folder = mirror(filled(f"{bucket}/data", files))
    assert {name: (folder / name).read_bytes() for name in files} == files
    found = CachedFolder.of(folder / "source")
    assert found is not None
    assert (found[0].url, found[1]) == (f"{bucket}/data", "source/")


MANY = """
import resource, sys
from craton.infrastructure.storage import mirror
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64 if sys.argv[2] == "few" else hard))
print(sum(path.is_file() for path in mirror(sys.argv[1]).glob("*")))
"""


def test_more_files_than_the_usual_limit_of_open_ones(bucket: str) -> None:
    url = filled(f"{bucket}/data", {f"file-{number}": b"x" for number in range(80)})
    started = [sys.executable, "-c", MANY, url]
    many = subprocess.run([*started, "many"], capture_output=True, text=True, check=False)
    assert (many.stdout, many.returncode) == ("80\n", 0), many.stderr
    few = subprocess.run([*started, "few"], capture_output=True, text=True, check=False)
    assert few.returncode == 1
    assert "Too many open files; raise the limit of open files (ulimit -n)" in few.stderr.splitlines()[-1]


def test_what_cannot_be_used(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectMissingError, match="nothing found; correct the path"):
        mirror(f"{bucket}/nothing")
    url = filled(f"{bucket}/data", contents(10, 1))
    with pytest.raises(ObjectMissingError, match="file-7 does not exist"):
        CachedFolder(url).open("file-7")
    monkeypatch.setenv("CRATON_CACHE_BYTES", "a lot")
    with pytest.raises(StorageError, match="set it to a whole number of bytes"):
        mirror(url)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="set CRATON_CACHE to a folder that can be written"):
        mirror(url)
