"""Files of JSON lines survive readers in the middle of a write, killed writers and full disks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from craton.telemetry.files import LineWriter, UnsafeFileError, noting_unread, read_lines, tail_lines


def test_a_torn_last_line_is_left_for_the_next_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read_lines(path) == ([], 0)
    path.write_text('{"step":1}\n{"st')
    lines, offset = read_lines(path)
    assert lines == [{"step": 1}]
    with path.open("a") as handle:
        handle.write('ep":2}\n')
    assert read_lines(path, offset) == ([{"step": 2}], path.stat().st_size)


def test_what_is_not_a_json_object_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n[1]\nnull\n{"half\n\xff\xfe\n\n' + b'{"a":' * 100_000 + b'\n{"loss":NaN}\n')
    assert read_lines(path)[0] == [{"step": 1}, {"loss": None}]


def test_reading_in_pieces_gives_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    expected = [{"step": step, "text": "x" * (step % 50)} for step in range(200)]
    LineWriter(path).append([json.dumps(line).encode() for line in expected])
    found, offset = [], 0
    while True:
        lines, next_offset = read_lines(path, offset, max_bytes=100)
        found += lines
        if next_offset == offset:
            break
        offset = next_offset
    assert found == expected


def test_a_file_that_cannot_be_read_is_an_error_or_a_note(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.mkdir()
    with noting_unread() as unread:
        assert (read_lines(path, 7), tail_lines(path, 100)) == (([], 7), [])
        assert tail_lines(tmp_path / "absent", 100) == []
    assert {name: type(error) for name, error in unread.items()} == {path: UnsafeFileError}
    with pytest.raises(UnsafeFileError, match="is a folder, not a regular file"):
        tail_lines(path, 100)


@given(count=st.integers(0, 30), max_bytes=st.integers(1, 400))
@example(count=28, max_bytes=353)  # one byte less than the file
def test_a_tail_is_the_end_of_the_file(tmp_path_factory: object, count: int, max_bytes: int) -> None:
    path = Path(tmp_path_factory.mktemp("tail")) / "a.jsonl"  # type: ignore[attr-defined]
    lines = [{"step": step} for step in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, size = [], 0
    for line in reversed(lines):
        size += len(json.dumps(line)) + 1
        if size > max_bytes:
            break
        whole.insert(0, line)
    assert tail_lines(path, max_bytes) == whole


def test_a_writer_that_follows_a_killed_one_starts_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step":1}\n{"step":2,"lo')
    LineWriter(path).append([b'{"step":3}'])
    assert read_lines(path)[0] == [{"step": 1}, {"step": 3}]


def test_lines_that_a_full_disk_does_not_take_wait_and_are_written_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    # A file size limit makes the kernel take part of a write and then refuse, just as a full disk does.
    code = f"""
import resource
from pathlib import Path
from craton.telemetry.files import LineWriter
writer = LineWriter(Path({str(path)!r}))
lines = [b'{{"step":%d,"text":"' % step + b"x" * 80 + b'"}}' for step in range(5)]
resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
print([writer.append([line]) for line in lines[:4]], writer.waiting_lines, writer.lost_lines, writer.error.strerror)
print(Path({str(path)!r}).read_bytes().count(b"\\n"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(writer.append([lines[4]]), writer.waiting_lines, writer.lost_lines, writer.error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    waiting, on_disk, afterwards = result.stdout.splitlines()
    assert waiting in [f"[True, True, False, False] 2 0 {why}" for why in ("File too large", "No space left on device")]
    assert on_disk == "2"
    assert afterwards == "True 0 0 None"
    assert [line["step"] for line in read_lines(path)[0]] == [0, 1, 2, 3, 4]


def test_a_folder_that_is_not_there_makes_lines_wait_until_it_is(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "a.jsonl"
    writer = LineWriter(path)
    assert not writer.append([b'{"step":1}', b'{"step":2}'])
    assert isinstance(writer.error, FileNotFoundError)
    path.parent.mkdir()
    assert writer.flush()
    assert [line["step"] for line in read_lines(path)[0]] == [1, 2]


def test_what_waits_for_a_disk_is_bounded_and_the_newest_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "a.jsonl"
    writer = LineWriter(path, most_bytes=100)
    for step in range(50):
        writer.append([b'{"step":%2d}' % step])
    assert writer.waiting_lines + writer.lost_lines == 50
    path.parent.mkdir()
    assert writer.append([b'{"step":50}'])
    found = [line["step"] for line in read_lines(path)[0]]
    assert found == list(range(writer.lost_lines, 51))
    assert len(found) > 5
