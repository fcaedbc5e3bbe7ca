"""Whose a GPU is: real processes with the environment of ranks, and status files of runs."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from observability.exporter.exporting import exporting, scrape
from observability.exporter.run_files import status_of
from observability.exporter.stand_in_nvml import StandInNvml, eight_cards
from waiting import wait_until

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter import runs_here
from craton.observability.exporter.gpus import Occupants, occupants
from craton.observability.exporter.gpus.occupants import NO_OCCUPANT, GpuHolding, Occupant, one_label
from craton.observability.exporter.runs_here import SEEN_SECONDS, RankHere, RunsCollector, RunsHere
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, read_heartbeat

Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Processes that sleep, with these variables; `start(parent=True)` returns the number of a child of one."""
    running: list[subprocess.Popen[str]] = []

    def begin(**variables: str) -> int:
        process = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], **variables}, text=True)
        running.append(process)
        wait_until(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        return process.pid

    yield begin
    for process in running:
        process.kill()
        process.wait()


def test_two_jobs_on_one_node_have_their_own_labels(start: Start, tmp_path: Path) -> None:
    cards = eight_cards()[:3]
    cards[0].processes = [(start(CRATON_RUN="/runs/alpha", RANK="0", CRATON_NODE="node-0", SLURM_JOB_ID="41"), 5)]
    cards[1].processes = [(start(CRATON_RUN="/runs/beta", RANK="7", CRATON_NODE="node-1"), 6)]
    with exporting("/", StandInNvml(cards), runs_folder=tmp_path) as exporter:
        found = scrape(exporter)
    who = {labels["gpu"]: labels for labels, _ in found.rows("DCGM_FI_DEV_GPU_TEMP")}
    assert [who["0"].get(name) for name in ("run", "rank", "hpc_job")] == ["alpha", "0", "41"]
    assert [who["1"].get(name) for name in ("run", "rank", "hpc_job")] == ["beta", "7", None]
    assert "run" not in who["2"]
    assert found.value("craton_gpu_rank_memory_bytes", gpu="1", run="beta", rank="7", run_node="node-1") == 6


def test_two_ranks_on_one_card_leave_the_run_and_have_rows_of_their_own(start: Start, tmp_path: Path) -> None:
    card = eight_cards()[0]
    card.processes = [(start(CRATON_RUN="/runs/alpha", RANK=str(rank)), 100 + rank) for rank in (0, 1)]
    with exporting("/", StandInNvml([card]), runs_folder=tmp_path) as exporter:
        found = scrape(exporter)
    labels, _ = found.rows("DCGM_FI_DEV_GPU_TEMP")[0]
    assert labels.get("run") == "alpha"
    assert "rank" not in labels
    assert found.value("craton_gpu_rank_memory_bytes", run="alpha", rank="1") == 101


def test_what_occupants_have_in_common() -> None:
    alpha, beta = Occupant("alpha", "3", "node-0", "9"), Occupant("beta", "3", "node-0", "10")
    assert one_label([alpha]) == alpha
    assert one_label([alpha, beta]) == NO_OCCUPANT
    assert one_label([alpha, Occupant("alpha", "", "node-0", "9")]) == alpha, "a keeper is no second rank"
    assert one_label([alpha, NO_OCCUPANT]) == alpha
    assert one_label([]) == NO_OCCUPANT


def test_a_forked_rank_is_known_by_its_runs_status(start: Start, tmp_path: Path) -> None:
    """As the fork server makes them: the environment names the run, but not the rank."""
    run = RunDirectory.create(tmp_path / "elsewhere", "gamma")
    pid = start(CRATON_RUN=str(run.path), CRATON_NODE="node-0")
    here = RunsHere(tmp_path / "runs", socket.gethostname())
    here.look(1000.0)
    who = Occupants(NodeRoot(), here)
    assert who.of(pid, 1000.0) == Occupant("gamma", "", "node-0"), "no status yet"
    status_of(run, "node-0", {12: pid})
    here.look(1001.0)
    assert who.of(pid, 1001.0) == Occupant("gamma", "12", "node-0")


def test_without_permission_status_files_tell_also_for_children(tmp_path: Path) -> None:
    """An image of procfs in which no environment can be read: 77 is a child of rank 2's process 70."""
    for pid, parent in ((70, 1), (77, 70), (80, 1)):
        folder = tmp_path / "root" / "proc" / str(pid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (py (x)) S {parent} " + " ".join(["0"] * 17) + f" {pid * 100} 0 0")
    run = RunDirectory.create(tmp_path / "runs", "delta")
    status_of(run, "node-3", {2: 70}, host="here")
    status_of(run, "node-4", {3: 80}, host="there")
    here = RunsHere(tmp_path / "runs", "here")
    who = Occupants(NodeRoot(tmp_path / "root"), here)
    looked = here.look(1000.0)
    assert who.of(77, 1000.0) == Occupant("delta", "2", "node-3")
    assert who.of(80, 1000.0) == NO_OCCUPANT, "that number is a process of another host"
    assert looked.by_number == {70: RankHere("delta", "2", "node-3")}


def test_a_rank_in_a_container_is_known_by_its_number_there(tmp_path: Path) -> None:
    """Its agent knows neither the host's name nor its numbers, and the run is mounted elsewhere. 4001 is a child of the
    rank's process, 3000 the program outside that started the container."""
    of_pod = b"CRATON_RUN=/fsx/runs/eta\0CRATON_NODE=node-1\0"
    processes = {
        3000: (1, "3000", b"PATH=/bin\0"),
        4000: (3000, "4000\t17", of_pod),
        4001: (4000, "4001\t18", of_pod),
        4005: (3000, "4005\t30", of_pod),
        17: (1, "17", b"PATH=/bin\0"),
    }
    for pid, (parent, numbers, environment) in processes.items():
        folder = tmp_path / "root" / "proc" / str(pid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (py) S {parent} " + " ".join(["0"] * 17) + f" {pid} 0 0")
        (folder / "status").write_text(f"Name:\tpy\nNSpid:\t{numbers}\nThreads:\t1\n")
        (folder / "environ").write_bytes(environment)
    run = RunDirectory.create(tmp_path / "runs", "eta")
    status_of(run, "node-1", {12: 17, 13: 3000}, host="eta-0-1")
    status_of(run, "node-2", {14: 17}, host="eta-0-2")
    here = RunsHere(tmp_path / "runs", "the-exporter-s-pod")
    who, runs = Occupants(NodeRoot(tmp_path / "root"), here), RunsCollector(here)
    assert list(runs.collect(1000.0)) == [], "nobody has told yet that it is here"
    assert who.of(4000, 1000.0) == Occupant("eta", "", "node-1")
    assert list(runs.collect(1001.0)) == [("craton_node_run_ranks", ("eta", "node-1"), 2)]
    for pid in (4000, 4001):
        assert who.of(pid, 1001.0) == Occupant("eta", "12", "node-1")
    assert who.of(4005, 1001.0) == Occupant("eta", "", "node-1"), "what started the container is no rank"
    assert who.of(17, 1001.0) == NO_OCCUPANT, "the host's 17 is not the container's"
    later = 1000.0 + SEEN_SECONDS
    who.of(4000, later - 1.0)
    assert list(runs.collect(later + 1.0)), "as long as it is here"
    assert list(runs.collect(later + SEEN_SECONDS)) == [], "and no longer"


def test_a_number_given_to_another_process_is_asked_anew(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "70"
    folder.mkdir(parents=True)

    def process(began: int, run: str) -> None:
        (folder / "stat").write_text("70 (py) S 1 " + " ".join(["0"] * 17) + f" {began} 0 0")
        (folder / "environ").write_bytes(f"CRATON_RUN=/runs/{run}\0RANK=0\0".encode())

    here = RunsHere(tmp_path / "runs", "here")
    here.look(0.0)
    who = Occupants(NodeRoot(tmp_path), here)
    process(100, "first")
    assert who.of(70, 0.0).run == "first"
    process(200, "second")
    assert who.of(70, 1.0).run == "second"


def test_labels_outlive_the_job_that_an_error_ended() -> None:
    holding, rank = GpuHolding(), Occupant("alpha", "0")
    assert holding.labels("GPU-1", [rank], 100.0) == rank
    assert holding.labels("GPU-1", [], 100.0 + occupants.GRACE_SECONDS) == rank
    assert holding.labels("GPU-1", [], 101.0 + occupants.GRACE_SECONDS) == NO_OCCUPANT
    other = Occupant("beta", "0")
    assert holding.labels("GPU-1", [rank], 300.0) == rank
    assert holding.labels("GPU-1", [other], 301.0) == other, "who comes next has the card at once"


def test_runs_on_this_node_are_rows_without_any_gpu(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "epsilon")
    status_of(run, "node-0", {0: os.getpid(), 1: os.getpid() + 1})
    with exporting("/", mode="off", runs_folder=tmp_path) as exporter:
        assert scrape(exporter).value("craton_node_run_ranks", run="epsilon", run_node="node-0") == 2


def test_a_file_system_that_hangs_takes_no_gpu_s_series_away(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a file of a server that is gone, which no test can have: whoever reads it waits."""
    monkeypatch.setattr(occupants, "FIRST_LOOK_SECONDS", 0.05)
    run = RunDirectory.create(tmp_path, "zeta")
    card = eight_cards()[0]
    card.processes = [(start(CRATON_RUN=str(run.path), CRATON_NODE="node-0"), 7)]
    status_of(run, "node-0", {3: card.processes[0][0]})
    is_back = threading.Event()

    def waits(run: RunDirectory, node: str) -> Heartbeat | None:
        is_back.wait()
        return read_heartbeat(run, node)

    monkeypatch.setattr(runs_here, "read_heartbeat", waits)
    with exporting("/", StandInNvml([card]), runs_folder=tmp_path) as exporter:
        exporter._team._answer_seconds = 1.0
        found = scrape(exporter)
        is_back.set()
    assert found.value("craton_exporter_collector_stuck", collector="runs") == 1
    assert found.value("craton_exporter_collector_stuck", collector="gpu") == 0
    assert found.value("DCGM_FI_DEV_GPU_TEMP", gpu="0", run="zeta") == 51
