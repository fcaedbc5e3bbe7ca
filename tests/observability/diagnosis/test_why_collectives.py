"""NCCL's RAS and PyTorch's flight recorder: what is read of them, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_snapshots import healthy, hung
from waiting import PATIENCE_SECONDS

from craton.agent import Launch
from craton.agent.processes.process import common_environment
from craton.observability.diagnosis.collect import collectives
from craton.observability.diagnosis.collect.collectives import (
    RasFormatError,
    RefusedPickle,
    ask_ras,
    communicators_of,
    read_collectives,
    read_dump,
    read_dumps,
    stuck_collectives,
)
from craton.observability.diagnosis.rules import examine_collectives
from craton.observability.diagnosis.symptoms import symptoms_of
from craton.telemetry import RunDirectory


def ras_answer(counts: dict[int, int], missing: tuple[int, ...] = ()) -> dict[str, Any]:
    """As NCCL 2.28 writes it (src/ras/client_support.cc)."""
    ranks = [
        {
            "rank": rank,
            "host": "10.0.0.1",
            "pid": 100 + rank,
            "cuda_dev": rank,
            "nvml_dev": rank,
            "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False},
            "collective_counts": {"Broadcast": 2, "AllReduce": count - 2},
        }
        for rank, count in counts.items()
    ]
    gone = [{"rank": rank, "status": {"unresponsive": True, "considered_dead": False}} for rank in missing]
    world = {"hash": "0xabc", "secondary_hash": "0x1:0x2", "size": len(counts) + len(missing), "ranks": ranks}
    alone = {"hash": "0xdef", "secondary_hash": "0x3:0x4", "size": 1, "ranks": ranks[:1], "missing_ranks": []}
    return {"nccl_version": "2.28.7", "communicators": [alone, {**world, "missing_ranks": gone}]}


@contextmanager
def ras_server(
    answer: str, greeting: str = "SERVER PROTOCOL 3\n", formats: str = "OK\n"
) -> Iterator[tuple[str, list[str]]]:
    """A socket that speaks as RAS does: a line for a line, then the document and the end."""
    heard: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rwb") as lines:
                for line in lines:
                    heard.append(line.decode().strip())
                    if heard[-1].lower().endswith("status"):
                        lines.write(answer.encode())
                        return
                    lines.write((greeting if heard[-1].startswith("CLIENT") else formats).encode())
                    lines.flush()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", heard
        thread.join(PATIENCE_SECONDS)


def test_ras_is_asked_for_json() -> None:
    with ras_server(json.dumps(ras_answer({0: 100, 1: 98}))) as (address, heard):
        told = ask_ras(address)
    assert heard == ["CLIENT PROTOCOL 2", "SET FORMAT json", "VERBOSE STATUS"]
    assert told is not None
    (world,) = communicators_of(told, told, 2.0)
    assert (world.size, world.counts, world.counts_before) == (2, {0: 100, 1: 98}, {0: 100, 1: 98})


def test_ras_that_speaks_no_json_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose NCCL is older knows no SET FORMAT; whether it was asked at all must not look the same."""
    with ras_server("Job summary\n===") as (address, _):
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        run = RunDirectory.create(tmp_path, "made")
        found, note = read_collectives(run, {}, asks_ras=True, since=0.0, is_local=False)
    assert not found.ras_asked
    assert "responds in plain text (JSON since 2.28.7)" in note
    with ras_server("{}", formats="ERROR: Unknown command\n") as (address, _), pytest.raises(RasFormatError):
        ask_ras(address)


@pytest.mark.parametrize(("answer", "greeting"), [("{}", "ERROR: who?\n"), ("[1, 2]", "SERVER PROTOCOL 2\n")])
def test_who_is_not_ras_says_nothing(answer: str, greeting: str) -> None:
    with ras_server(answer, greeting) as (address, _):
        assert ask_ras(address) is None


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert ask_ras(address) is None


def test_ranks_that_do_not_answer_are_missing() -> None:
    told = ras_answer({0: 5, 2: 5}, missing=(1,))
    (world,) = communicators_of(told, told, 2.0)
    assert world.missing == (1,)


# -- flight recorder --------------------------------------------------------------------------------------------


def entry(sequence: int, state: str = "completed", name: str = "nccl:all_reduce", size: int = 4) -> dict[str, Any]:
    """As torch 2.13 records one (torch.distributed.flight_recorder reads the same keys)."""
    return {
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "state": state,
        "is_p2p": False,
        "frames": [{"name": "backward", "filename": "train.py", "line": 42}],
    }


def recording(entries: list[dict[str, Any]], world: int = 4) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(range(world)))}}
    return {"version": "2.10", "entries": entries, "pg_config": config, "pg_status": {}}


def dumped(folder: Path, recordings: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    for rank, document in recordings.items():
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(document))
    found, failed = read_dumps([folder / "trace_"])
    assert failed == []
    return found


def test_the_rank_that_never_entered_is_missing(tmp_path: Path) -> None:
    waiting = recording([entry(1), entry(2), entry(3, "started")])
    dumps = dumped(tmp_path, {0: waiting, 1: waiting, 2: recording([entry(1), entry(2)]), 3: waiting})
    (stuck,) = stuck_collectives(dumps, set(dumps))
    assert (stuck.sequence, stuck.missing, stuck.silent, stuck.mismatch) == (3, (2,), (), "")
    assert stuck.stack == ("backward (train.py:42)",)


def test_a_rank_without_a_recording_is_silent(tmp_path: Path) -> None:
    waiting = recording([entry(1), entry(2, "started")])
    (stuck,) = stuck_collectives(dumped(tmp_path, {0: waiting, 1: waiting, 3: waiting}), {0, 1, 2, 3})
    assert (stuck.sequence, stuck.missing, stuck.silent) == (2, (), (2,))


def test_ranks_that_call_different_collectives(tmp_path: Path) -> None:
    others, odd = (
        recording([entry(1), entry(2, "started")]),
        recording([entry(1), entry(2, "started", "nccl:broadcast")]),
    )
    (stuck,) = stuck_collectives(dumped(tmp_path, {0: others, 1: odd, 2: others, 3: others}), set())
    assert stuck.mismatched == (1,)
    assert "rank 1 calls nccl:broadcast" in stuck.mismatch


def test_on_a_gpu_ranks_wait_in_the_first_collective_that_is_not_over(tmp_path: Path) -> None:
    """They launch the others of the step, and wait for the device."""
    ahead = recording([entry(1), entry(2), *(entry(number, "scheduled") for number in range(3, 9))])
    (stuck,) = stuck_collectives(dumped(tmp_path, {0: ahead, 1: ahead, 3: ahead}), {0, 1, 2, 3})
    assert (stuck.sequence, stuck.missing, stuck.silent) == (3, (), (2,))


def test_a_recording_from_before_lacks_what_others_have_finished(tmp_path: Path) -> None:
    """Of a rank that was stuck once, went on, and is stopped by a signal now, so that it writes no other."""
    waiting = recording([entry(number) for number in range(1, 9)] + [entry(9, "started")])
    dumps = dumped(tmp_path, {0: waiting, 1: waiting, 2: recording([entry(1), entry(2)]), 3: waiting})
    (stuck,) = stuck_collectives(dumps, set(dumps))
    assert (stuck.sequence, stuck.missing) == (9, (2,))
    sent = [entry(number, name="nccl:broadcast") for number in (1, 2)]  # one that sends does not wait for the others
    dumps = dumped(tmp_path, {0: recording(sent), 1: recording(sent[:1]), 2: recording(sent), 3: recording(sent)})
    (stuck,) = stuck_collectives(dumps, set(dumps))
    assert (stuck.sequence, stuck.missing) == (2, (1,))


def test_members_that_one_rank_does_not_know_are_those_that_another_knows(tmp_path: Path) -> None:
    """On NCCL PyTorch knows them only for the first default group of a process."""
    waiting = recording([entry(1), entry(2, "started")])
    survivor = {**waiting, "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[]"}}}
    (stuck,) = stuck_collectives(dumped(tmp_path, {0: survivor, 1: waiting, 3: survivor}), {0, 1, 2, 3})
    assert (stuck.expected, stuck.silent) == ((0, 1, 2, 3), (2,))


def test_of_a_mismatch_the_line_that_called_the_other_collective_is_shown(tmp_path: Path) -> None:
    inner = {"name": "all_reduce", "filename": "/v/site-packages/torch/distributed/distributed_c10d.py", "line": 3068}
    usual = [inner, {"name": "forward", "filename": "model.py", "line": 7}]
    odd = [inner, {"name": "loss", "filename": "mine.py", "line": 21}]
    others = recording([{**entry(1, "started", "nccl:_all_gather_base"), "frames": usual}])
    mine = recording([{**entry(1, "started"), "frames": odd}])
    (stuck,) = stuck_collectives(dumped(tmp_path, {0: others, 1: others, 2: mine, 3: others}), set())
    assert (stuck.mismatched, stuck.stack) == ((2,), ("loss (mine.py:21)",))


def test_all_that_has_ended_is_no_hang(tmp_path: Path) -> None:
    done = recording([entry(1), entry(2)])
    forgotten = recording([entry(2)])  # its buffer is shorter
    assert stuck_collectives(dumped(tmp_path, {0: done, 1: forgotten, 2: done, 3: done}), set()) == ()


def test_on_gloo_what_is_over_is_retired(tmp_path: Path) -> None:
    over = recording([{**entry(1, "scheduled"), "retired": True}])
    assert stuck_collectives(dumped(tmp_path, {0: over, 1: over}), set()) == ()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose ranks record where its agents tell them to, as nobody said anything."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(collectives, "OLD_DUMP_PREFIX", str(tmp_path / "old" / "nccl_trace_rank_"))
    return RunDirectory.create(tmp_path / "runs", "made")


def write_recordings(prefix: str | Path, ranks: Iterable[int], document: dict[str, Any]) -> None:
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        Path(f"{prefix}{rank}").write_bytes(pickle.dumps(document))


@pytest.mark.parametrize(
    ("recorded", "broken", "silent"),
    [
        (range(8), (), ()),  # the other node's are not to be seen from here
        ((*range(8), 8, 9, 11, 12, 13, 14, 15), (), (10,)),
        ((*range(8), 8, 9, 11, 12, 13, 14), (15,), ()),  # what cannot be read may be anything
    ],
)
def test_silence_counts_only_where_something_could_be_heard(
    run: RunDirectory, recorded: Iterable[int], broken: tuple[int, ...], silent: tuple[int, ...]
) -> None:
    write_recordings(run.recording_prefix, recorded, recording([entry(47), entry(48, "started")], world=16))
    for rank in broken:
        Path(f"{run.recording_prefix}{rank}").write_bytes(b"broken")
    found, note = read_collectives(run, {}, asks_ras=False, since=0.0, ranks_per_node=8)
    assert found.stuck[0].silent == silent
    assert bool(note) == bool(broken)
    snapshot = replace(hung(healthy(2)), collectives=found)
    accused = [each.rank for each in examine_collectives(snapshot, symptoms_of(snapshot))]
    assert accused == list(silent)


def test_the_first_ranks_are_read_and_the_others_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MAX_DUMPS", 11)
    write_recordings(tmp_path / "trace_", range(12), recording([entry(1)]))
    found, failed = read_dumps([tmp_path / "trace_"])
    assert list(found) == list(range(11))  # by number: as texts, 10 and 11 come before 2
    assert failed == ["trace_11 and later ones: too many to read"]


def test_recordings_are_looked_for_where_ranks_write_them(run: RunDirectory, tmp_path: Path) -> None:
    launch = Launch(0, nodes=["a"], ranks_per_node=2, command=["x"])
    told = common_environment(run, launch, "a")["TORCH_FR_DUMP_TEMP_FILE"]
    places = [
        tmp_path / "old" / "nccl_trace_rank_",
        tmp_path / "home" / ".cache" / "torch" / "comm_lib_trace_rank_",
        told,
    ]
    for number, prefix in enumerate(places, 2):  # each counts before those that came before it
        write_recordings(prefix, range(2), recording([entry(1), entry(number, "started")], world=2))
        found, note = read_collectives(run, {}, asks_ras=False, since=0.0)
        assert (found.recorders_read, found.stuck[0].sequence, note) == (2, number, "")


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_a_place_that_the_user_chose_stays(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    launch = Launch(0, nodes=["a"], ranks_per_node=2, command=["x"], env={name: "/scratch/trace_"})
    environment = common_environment(run, launch, "a")
    assert [environment.get(each) for each in collectives.RECORDING_VARIABLES].count("/scratch/trace_") == 1
    assert str(run.recording_prefix) not in environment.values()
    monkeypatch.setenv(name, "/scratch/trace_")
    assert str(run.recording_prefix) not in common_environment(run, replace(launch, env={}), "a").values()


REAL = """
import os, sys, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
rank, folder = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if rank == 0:
    waiting = dist.all_reduce(torch.ones(4), async_op=True)
open(f"{folder}/trace_{rank}", "wb").write(_dump_fr_trace())
os._exit(0)
"""


@pytest.mark.slow
def test_real_recordings_of_torch(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", REAL, str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    assert [rank.wait(PATIENCE_SECONDS) for rank in ranks] == [0, 0]
    found, failed = read_dumps([tmp_path / "trace_"])
    assert failed == []
    (stuck,) = stuck_collectives(found, set(found))
    assert (stuck.sequence, stuck.operation, stuck.missing) == (4, "gloo:all_reduce", (1,))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_recording_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [Evil(tmp_path / "made")]}))
    with pytest.raises(RefusedPickle, match=r"loads posix\.mkdir; only plain data is allowed"):
        read_dump(tmp_path / "trace_0")
    assert not (tmp_path / "made").exists()
    found, failed = read_dumps([tmp_path / "trace_"])
    assert found == {}
    assert failed[0].startswith("trace_0: it loads posix.mkdir")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", pickle.dumps([1]), b"not a pickle", pickle.dumps({"entries": 3})])
def test_what_is_no_recording_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "trace_7").write_bytes(data)
    found, failed = read_dumps([tmp_path / "trace_"])
    assert found == {}
    assert len(failed) == 1


def test_recordings_of_another_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(pickle.dumps(recording([entry(1)])))
    old = (tmp_path / "trace_0").stat().st_mtime
    assert read_dumps([tmp_path / "trace_"], since=old + 10.0) == ({}, [])
