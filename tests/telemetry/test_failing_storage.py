"""Files and output of a run on a real disk that is full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mounting import make_read_only, make_writable

from craton.telemetry import RunDirectory
from craton.telemetry.files import SafeOutput, replace_text, storage_problem
from craton.telemetry.node import Heartbeat, read_heartbeat, write_heartbeat


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with open(filler, "ab", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return filler


def test_a_replacement_on_a_full_disk_leaves_the_old_text_and_no_other_file(small_disk: Path) -> None:
    path = small_disk / "launch.json"
    replace_text(path, '{"generation": 1}\n')
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        replace_text(path, json.dumps({"generation": 2, "text": "x" * 5000}))
    assert path.read_text() == '{"generation": 1}\n'
    assert sorted(each.name for each in small_disk.iterdir()) == ["filler", "launch.json"]
    filler.unlink()
    replace_text(path, '{"generation": 2}\n')
    assert path.read_text() == '{"generation": 2}\n'


def test_a_heartbeat_is_written_on_a_full_disk(small_disk: Path) -> None:
    run = RunDirectory.create(small_disk, "run")
    write_heartbeat(run, "node-0", Heartbeat(3, "running", 17, 9000, address="127.0.0.1:1", host="a" * 60))
    fill(small_disk)
    for state, trouble in (("running", "the disk is full " * 10), ("stopped", "")):
        write_heartbeat(run, "node-0", Heartbeat(3, state, 17, 9000, trouble=trouble))
        found = read_heartbeat(run, "node-0")
        assert found is not None
        assert (found.state, found.trouble) == (state, trouble)


def test_a_marker_on_a_full_disk_is_set_without_half_a_text(small_disk: Path) -> None:
    run = RunDirectory.create(small_disk, "run")
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        run.mark("FATAL", "rank 3 " * 1000)
    assert run.has("FATAL")
    assert run.marker_text("FATAL") == ""
    filler.unlink()
    run.mark("FATAL", "rank 3")
    assert run.marker_text("FATAL") == "rank 3\n"


def test_what_is_wrong_with_the_storage_is_said_with_the_remedy(small_disk: Path, tmp_path: Path) -> None:
    assert storage_problem(tmp_path) == ""
    assert f"{tmp_path / 'gone'} is gone" in storage_problem(tmp_path / "gone")
    fill(small_disk)
    said = storage_problem(small_disk)
    assert said == f"the file system of {small_disk} is full: 0 B are free; remove files or enlarge it"
    make_read_only(small_disk)
    assert f"{small_disk} is read-only" in storage_problem(small_disk)
    make_writable(small_disk)


def test_a_process_whose_log_is_on_a_full_disk_prints_on(small_disk: Path) -> None:
    code = """
import sys, warnings
from craton.telemetry.files import protect_output
protect_output()
print("first", file=sys.stderr, flush=True)
print("ready", flush=True)
sys.stdin.readline()
for number in range(1000):
    print(f"line {number}", file=sys.stderr, flush=True)
warnings.warn("a warning")
print("printed", flush=True)
sys.stdin.readline()
print("last", file=sys.stderr, flush=True)
"""
    log = small_disk / "log"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    filler = fill(small_disk)
    process.stdin.write("on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "printed\n"
    filler.unlink()
    process.communicate("on\n", timeout=30.0)
    assert process.returncode == 0
    printed = log.read_text().splitlines()
    assert (printed[0], printed[-1]) == ("first", "last")
    assert [line for line in printed if line.startswith("line ")] == [f"line {number}" for number in range(1000)]


def test_output_that_waits_is_bounded_and_says_how_much_was_dropped(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, open(tmp_path / "log", "wb") as log:
        output = SafeOutput(full.fileno(), most_bytes=100)
        for number in range(100):
            output.write(b"line %2d\n" % number)
        assert output.waiting_bytes == 100
        output._descriptor = log.fileno()  # the disk has room again
        output.write(b"last\n")
    text = (tmp_path / "log").read_text()
    assert text.startswith("\n[craton: 700 bytes of output were dropped")
    assert text.endswith("line 99\nlast\n")
