"""Files of runs that somebody else may have written: no reader waits, leaves the run, or fills the memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import (
    LineWriter,
    UnsafeFileError,
    append_regular,
    names_in,
    noting_unread,
    open_regular,
    paths_in,
    read_lines,
    read_regular,
    tail_lines,
)
from craton.telemetry.files import regular_files as limits
from craton.telemetry.node import read_heartbeat


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "planted")


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket has at most 108 characters
        try:
            listening.bind(path.name)
        finally:
            os.chdir(here)


PLANTS: dict[str, Callable[[Path], None]] = {
    "a FIFO": lambda path: os.mkfifo(path),
    "a socket": socket_at,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a symbolic link": lambda path: path.symlink_to("/etc/passwd"),
}


def check_refused(run: RunDirectory, kind: str, use: Callable[[Path], object]) -> Path:
    """Where something was planted that `use` refuses by its name."""
    path = run.events_path("node-0")
    PLANTS[kind](path)
    expected = "a symbolic link" if kind == "a device" else kind
    with pytest.raises(UnsafeFileError, match=f"node-0.jsonl is {expected}, not a regular file"):
        use(path)
    return path


@pytest.mark.parametrize("kind", PLANTS)
def test_only_regular_files_are_opened(run: RunDirectory, kind: str) -> None:
    path = check_refused(run, kind, open_regular)
    with noting_unread() as unread:
        assert read_lines(path) == ([], 0)
        assert tail_lines(path, 1 << 20) == []
    assert list(unread) == [path]


@pytest.mark.parametrize("kind", PLANTS)
def test_writers_append_to_regular_files_only(run: RunDirectory, kind: str) -> None:
    path = check_refused(run, kind, append_regular)
    writer = LineWriter(path)
    assert not writer.append([b"{}"])
    assert isinstance(writer.error, UnsafeFileError)


def test_a_device_is_not_read(run: RunDirectory) -> None:
    try:
        os.mknod(run.plan_path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root may make a device")
    with noting_unread() as unread:
        assert read_json(run.plan_path) == {}
    assert "a device" in str(unread[run.plan_path])


def test_no_link_below_the_run_is_followed_and_the_run_itself_may_be_one(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "node-0.jsonl").write_text('{"time": 1}\n')
    (run.path / "events").rmdir()
    (run.path / "events").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFileError, match="is inside events, which is a symbolic link, not a folder"):
        read_lines(run.events_path("node-0"))
    with pytest.raises(UnsafeFileError, match="is a symbolic link, not a folder"):
        names_in(run.path / "events")
    run.plan_path.write_text('{"steps": 3}')
    (tmp_path / "linked").symlink_to(run.path)
    assert read_json(RunDirectory(tmp_path / "linked").plan_path) == {"steps": 3}


def test_deeper_files_are_opened_component_by_component(run: RunDirectory, tmp_path: Path) -> None:
    step = run.checkpoints("shared") / "step-00000001"
    step.mkdir(parents=True)
    (step / "COMPLETE").write_text("{}")
    assert read_regular(step / "COMPLETE", below=run.path) == b"{}"
    (run.checkpoints("shared") / "step-00000002").symlink_to(step)
    with pytest.raises(UnsafeFileError, match="step-00000002, which is a symbolic link"):
        read_regular(run.checkpoints("shared") / "step-00000002" / "COMPLETE", below=run.path)
    for outside in (run.path / ".." / "secret", tmp_path / "secret"):
        with pytest.raises(UnsafeFileError, match="is not below"):
            read_regular(outside, below=run.path)


@pytest.mark.parametrize("node", ["../../other/heartbeat/node-0", "/etc/passwd", "..", ""])
def test_a_node_whose_name_is_a_path_leads_nowhere(run: RunDirectory, node: str) -> None:
    with pytest.raises(UnsafeFileError, match="leads out of the run directory"):
        read_heartbeat(run, node)


def test_documents_lines_and_folders_have_a_maximum(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(run.plan_path, "wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that takes no room
    with pytest.raises(UnsafeFileError, match="has more than 67,108,864 bytes"):
        read_regular(run.plan_path)
    assert read_json(run.plan_path) == {}
    monkeypatch.setattr("craton.telemetry.files.lines.MAX_LINE_BYTES", 100)
    path = run.events_path("node-0")
    path.write_bytes(b'{"a": 1}\n' + b"x" * 1000 + b"\n")
    assert read_lines(path, 0, 5) == ([{"a": 1}], 9)
    with pytest.raises(UnsafeFileError, match="has a line of more than 100 bytes"):
        read_lines(path, 9, 20)
    monkeypatch.setattr(limits, "MAX_NAMES", 3)
    for number in range(5):
        (run.path / "generations" / f"{number:06d}.json").touch()
    with pytest.raises(UnsafeFileError, match="has more than 3 files"):
        names_in(run.path / "generations")
    with noting_unread() as unread:
        assert paths_in(run.path / "generations") == []
    assert list(unread) == [run.path / "generations"]


def test_nested_json_is_not_an_object(run: RunDirectory) -> None:
    run.plan_path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert read_json(run.plan_path) == {}
    run.heartbeat_path("node-0").write_text("[" * 10_000)
    assert read_heartbeat(run, "node-0") is None


def test_a_marker_that_is_a_link_says_so(run: RunDirectory) -> None:
    (run.path / "FATAL").symlink_to("/etc/passwd")
    assert run.marker_text("FATAL") == f"{run.path / 'FATAL'} is a symbolic link, not a regular file"
