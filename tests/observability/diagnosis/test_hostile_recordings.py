"""Flight recordings and RAS answers that are broken or meant to hurt: a note, never a hang or an error."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from craton.observability.diagnosis.collect import collectives
from craton.observability.diagnosis.collect.collectives import ask_ras, read_collectives, read_dumps, stuck_collectives
from craton.telemetry import RunDirectory


def entry(number: Any = 7, **changes: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "process_group": ("0", "default"),
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "state": "started",
        "frames": [{"name": "step", "filename": "train.py", "line": 3}],
        **changes,
    }


def write(folder: Path, rank: int, document: Any) -> None:
    (folder / f"trace_{rank}").write_bytes(pickle.dumps(document))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    monkeypatch.setattr(collectives, "OLD_DUMP_PREFIX", str(tmp_path / "nowhere" / "trace_"))
    monkeypatch.setattr(collectives, "CACHED_DUMP_PREFIX", "nowhere/trace_")
    return RunDirectory.create(tmp_path / "runs", "made")


def noted(run: RunDirectory) -> str:
    found, note = read_collectives(run, {}, asks_ras=False, since=0.0)
    assert found.recorders_read == 0
    return note


def test_a_pipe_is_not_waited_for(run: RunDirectory, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace_0")
    assert "trace_0 is a FIFO, not a regular file" in noted(run)


def test_links_are_not_followed(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(pickle.dumps({"entries": [entry()]}))
    (tmp_path / "trace_0").symlink_to(tmp_path / "real")
    (tmp_path / "trace_1").symlink_to(tmp_path / "gone")
    assert noted(run).startswith("2 flight recorder files could not be read: trace_0: ")


def test_files_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 0, {"entries": [entry()]})
    found, failed = read_dumps([tmp_path / "trace_"], owners={os.getuid() + 1})
    assert (found, len(failed)) == ({}, 1)
    assert "who does not own the run" in failed[0]


@pytest.mark.parametrize(
    "broken",
    [
        {"entries": [entry("seven"), entry(None), 3, entry(1, state="completed")]},
        {"entries": [], "pg_config": {"0": {"ranks": "[0, 1"}, "1": {"ranks": [[0], "x"]}, "2": 5}},
        {"entries": [], "pg_config": "x"},
    ],
)
def test_missing_and_wrong_keys_are_left_out(tmp_path: Path, broken: dict[str, Any]) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, broken)
    found, failed = read_dumps([tmp_path / "trace_"])
    assert (stuck_collectives(found, set()), failed) == ((), [])


@pytest.mark.parametrize("broken", [{"process_group": ["0", "x"]}, entry(frames=5), entry(input_sizes=[["x"]])])
def test_a_recording_of_which_nothing_can_be_read_is_noted(run: RunDirectory, tmp_path: Path, broken: Any) -> None:
    write(tmp_path, 0, {"entries": [broken]})
    assert "none of its entries can be read" in noted(run)


def test_numbers_that_are_far_apart_take_no_time(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, {"entries": [entry(3, state="completed"), entry(10**15)]})
    (stuck,) = stuck_collectives(read_dumps([tmp_path / "trace_"])[0], set())  # counting up to it would take weeks
    assert stuck.sequence == 10**15


# -- RAS -----------------------------------------------------------------------------------------------------------


@contextmanager
def ras(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Greets as RAS does, and then answers so."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                try:
                    for reply in (b"SERVER PROTOCOL 2\n", b"OK\n"):
                        connection.recv(64)
                        connection.sendall(reply)
                    connection.recv(64)
                    answer(connection)
                except OSError:
                    continue

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        server.join()


def test_an_answer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "RAS_SECONDS", 0.4)

    def trickle(connection: socket.socket) -> None:
        while True:  # until the other side hangs up
            connection.sendall(b" ")
            time.sleep(0.05)

    with ras(trickle) as address:
        assert ask_ras(address) is None  # it would trickle for ever


@pytest.mark.parametrize(
    "said",
    [
        b'{"communicators": [{"size": 2, "missing_ranks": [1]}]}',
        b'{"communicators": [{"size": 2, "ranks": [{"collective_counts": {"a": 1}}]}]}',
        b'{"communicators": 7}',
    ],
)
def test_an_answer_without_its_keys_is_noted(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(collectives, "RAS_PAUSE_SECONDS", 0.0)
    with ras(lambda connection: connection.sendall(said)) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        found, note = read_collectives(run, {}, asks_ras=True, since=0.0)
    assert found.communicators == ()
    assert "the response of NCCL RAS is not a status" in note


def test_brackets_without_end_are_no_answer() -> None:
    with ras(lambda connection: connection.sendall(b"[" * 200_000)) as address:
        assert ask_ras(address) is None
