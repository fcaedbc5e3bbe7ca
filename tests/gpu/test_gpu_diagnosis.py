"""Collectives that hang or wait, between ranks that share one GPU over NCCL: what recordings, RAS, PyTorch's watchdog
and `why` report of them.

Ranks take turns on the GPU, without MPS, because some of them are killed; the last test, of `craton doctor`, uses MPS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from fake_snapshots import healthy, hung
from gang import Gang
from rehearsed import events, last_words, losses, wait_until

from craton.bench.recovery.rehearsal import Rehearsal, running
from craton.formatting import bandwidth
from craton.job import parse_fault
from craton.ml.training.flight_recorder import begin_recording, write_recording
from craton.ml.training.orders import abort_groups
from craton.observability.diagnosis import Verdict, diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.observability.diagnosis.collect.collectives import (
    ask_ras,
    communicators_of,
    read_collectives,
    read_dumps,
    stuck_collectives,
)
from craton.observability.diagnosis.collect.records import read_logs
from craton.observability.diagnosis.rules import examine_collectives
from craton.observability.diagnosis.snapshot import Collectives, Communicator, StuckCollective
from craton.observability.diagnosis.symptoms import symptoms_of
from craton.orchestration.changes import arm_faults
from craton.orchestration.preflight import check_bandwidth
from craton.orchestration.preflight.selftest import EndedSelftest, run_bandwidth, run_processes
from craton.telemetry import RunDirectory

RANKS = 4
TOGETHER = 3  # collectives before the one that hangs
PAUSE_SECONDS = 1.0  # between two queries of RAS
SLOW_SECONDS = 0.2  # that a slow rank works longer than the others, in every step
ODD_STEP = 7  # in which a rank calls another collective
WATCHDOG_SECONDS = 12  # PyTorch's timeout of a collective
RUN: dict[str, Any] = {
    "nodes": RANKS,
    "ranks_per_node": 1,
    "shares_gpus": True,
    "batch": 12,
    "steps": 100_000,
    "layout": {"fsdp": RANKS, "micro_batch": 3},
}

OWN_OBJECTIVES = f'''
"""Objectives of a user, each with a fault on one rank."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

TOKENS = Path(__file__).with_name("tokens.pt")
calls = 0


def slow(log_probs, batch):
    if dist.get_rank() == 2:
        time.sleep({SLOW_SECONDS})
    return -(batch.weight * log_probs).sum(), {{}}


def odd(log_probs, batch):
    """On rank 1, tokens of one step lead to a collective that no other rank calls: in every generation the same."""
    global calls
    calls += 1
    loss = -(batch.weight * log_probs).sum()
    if dist.get_rank() == 1:
        tokens = batch.tokens.cpu()
        if calls == {ODD_STEP} and not TOKENS.exists():
            torch.save(tokens, TOKENS)
        if TOKENS.exists() and torch.equal(torch.load(TOKENS), tokens):
            total = loss.detach().repeat(1 << 22)
            dist.all_reduce(total)
            print("sum over all ranks:", total[0].item())
    return loss, {{}}
'''

# With the defaults of PyTorch, as a job's own command would run; the last rank stays away from a collective.
LONELY = f"""
import datetime, sys, time
import torch
import torch.distributed as dist

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], {RANKS})
torch.cuda.set_device(0)
timeout = datetime.timedelta(seconds={WATCHDOG_SECONDS})
dist.init_process_group("nccl", store=store, rank=rank, world_size={RANKS}, timeout=timeout)
ones = torch.ones(1024, device="cuda")
for _ in range({TOGETHER}):
    dist.all_reduce(ones)
torch.cuda.synchronize()
if rank == {RANKS - 1}:
    time.sleep(600)
dist.all_reduce(ones)
torch.cuda.synchronize()
"""


@dataclass(frozen=True)
class OwnObjective(Rehearsal):
    """A run with an objective of the user."""

    objective: str = ""

    def job_text(self) -> str:
        return f"{super().job_text()}objective: {self.objective}\n"


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    ranks = Gang(RANKS, is_on_gpu=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def own_code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of ranks that find the user's objectives."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_objectives.py").write_text(OWN_OBJECTIVES, encoding="utf-8")
    return {"CRATON_JOB_FOLDER": str(folder)}


def _ask_twice() -> tuple[Communicator, ...]:
    first = ask_ras()
    assert first is not None, "RAS does not respond"
    time.sleep(PAUSE_SECONDS)
    second = ask_ras()
    assert second is not None, "RAS does not respond again"
    return communicators_of(first, second, PAUSE_SECONDS)


def _hang(folder: Path, kind: str, odd: int) -> tuple[Communicator, ...]:
    """In each rank: work together, then one of them stays away or calls something else. All write their recordings,
    rank 0 queries RAS, and the communicators are aborted, as at the end of a generation."""
    torch.cuda.set_device(0)
    begin_recording()
    rank, control = dist.get_rank(), dist.new_group(backend="gloo")
    ones, more = torch.ones(1024, device="cuda"), torch.ones(2048, device="cuda")
    for _ in range(TOGETHER):
        dist.all_reduce(ones)
    torch.cuda.synchronize()
    if rank != odd:
        dist.all_reduce(ones)
    elif kind == "size":
        dist.all_reduce(more)
    elif kind == "operation":
        dist.broadcast(ones, 0)
    dist.barrier(control)
    write_recording(folder / f"rank_{rank}")
    seen = _ask_twice() if rank == 0 else ()
    dist.barrier(control)
    abort_groups()
    return seen


def _recorded(folder: Path) -> StuckCollective:
    dumps, failed = read_dumps([folder / "rank_"])
    assert not failed
    assert sorted(dumps) == list(range(RANKS))
    assert all(len(dump["entries"]) <= TOGETHER + 1 for dump in dumps.values()), "entries of an earlier generation"
    (stuck,) = [one for one in stuck_collectives(dumps, set(dumps)) if one.description == "default_pg"]
    return stuck


def _accused(communicators: tuple[Communicator, ...], *stuck: StuckCollective) -> list[tuple[str, int | None]]:
    """The causes and ranks that `why` would name in a run that hangs."""
    snapshot = replace(hung(healthy(1, RANKS)), collectives=Collectives(communicators, stuck, True, RANKS))
    return [(finding.cause, finding.rank) for finding in examine_collectives(snapshot, symptoms_of(snapshot))]


def test_a_missing_rank_is_named_by_recordings_and_by_ras(
    gang: Gang, tmp_path: Path, summary: Callable[[str], None]
) -> None:
    communicators = gang.run(_hang, tmp_path, "missing", 3, ranks=RANKS)[0]
    stuck = _recorded(tmp_path)
    (world,) = [one for one in communicators if one.size == RANKS]
    can_reset = hasattr(c10d, "_reset_fr_recording_nccl")
    summary(f"missing rank: {stuck.operation} {stuck.sequence} lacks {stuck.missing}; RAS: {world.counts}")
    summary(f"PyTorch {'can' if can_reset else 'cannot'} forget recorded collectives")
    assert (stuck.sequence, stuck.missing, stuck.mismatch) == (TOGETHER + 1, (3,), "")
    assert stuck.expected == tuple(range(RANKS))
    assert world.counts == world.counts_before
    assert [world.counts[rank] for rank in range(3)] == [max(world.counts.values())] * 3
    assert world.counts[3] < world.counts[0]
    assert set(_accused((world,), stuck)) == {("rank_missing_in_collective", 3), ("ranks_behind", 3)}


@pytest.mark.parametrize(("kind", "called"), [("size", "nccl:all_reduce of [[2048]]"), ("operation", "nccl:broadcast")])
def test_mismatched_collectives_are_named_by_recordings(
    gang: Gang, tmp_path: Path, summary: Callable[[str], None], kind: str, called: str
) -> None:
    """In the same processes as the hang before: what they recorded there has the same groups and numbers."""
    communicators = gang.run(_hang, tmp_path, kind, 2, ranks=RANKS)[0]
    stuck = _recorded(tmp_path)
    summary(f"mismatch: {stuck.mismatch}; RAS: {[one.counts for one in communicators]}")
    assert (stuck.sequence, stuck.mismatched) == (TOGETHER + 1, (2,))
    assert f"rank 2 calls {called}" in stuck.mismatch
    assert any("_hang" in line for line in stuck.stack)
    assert _accused((), stuck) == [("collective_mismatch", 2)]


def _work_slowly(late: int, times: int) -> tuple[Communicator, ...]:
    torch.cuda.set_device(0)
    ones, rank = torch.ones(1024, device="cuda"), dist.get_rank()
    with ThreadPoolExecutor(1) as pool:
        seen = None
        for number in range(times):
            if rank == late:
                time.sleep(0.1)
            dist.all_reduce(ones)
            torch.cuda.synchronize()
            if rank == 0 and number == TOGETHER:
                seen = pool.submit(_ask_twice)
        return seen.result() if seen is not None else ()


def test_a_slow_rank_is_not_called_behind(gang: Gang, summary: Callable[[str], None]) -> None:
    """All wait for it, but the counters of RAS move."""
    communicators = gang.run(_work_slowly, 2, 60, ranks=RANKS)[0]
    worlds = [one for one in communicators if one.size == RANKS and len(one.counts) == RANKS]
    moving = [one for one in worlds if one.counts != one.counts_before]
    summary(f"slow rank: RAS {[(one.counts_before, one.counts) for one in moving]}")
    assert len(moving) == 1, worlds
    assert all(moving[0].counts[rank] > moving[0].counts_before[rank] for rank in range(RANKS))
    assert _accused((moving[0],)) == []


def verdict_of(run: RunDirectory) -> Verdict:
    return diagnose(take_snapshot(run))


def test_a_rank_that_is_slow_and_one_that_hangs_are_named(
    own_code: dict[str, str], tmp_path: Path, summary: Callable[[str], None]
) -> None:
    job = OwnObjective("slow", objective="own_objectives:slow", environment=own_code, **RUN)
    with running(tmp_path, job) as run:
        wait_until(lambda: max(losses(run), default=0) >= 24, "it trains", run)
        seen: list[Verdict] = []

        def is_named() -> bool:  # after a few steps the difference may not be clear yet
            seen.append(verdict_of(run))
            return (seen[-1].condition, seen[-1].rank) == ("slow", 2)

        wait_until(is_named, "the slow rank is named", run, 60.0)
        summary(f"slow rank: {seen[-1].sentence}")

        run.chaos_folder.mkdir(exist_ok=True)
        arm_faults(run, [parse_fault("hang rank=1,how=spin")])
        wait_until(lambda: len(events(run, "generation_started")) > 1, "the agents see that a rank hangs", run)
        first, second = events(run, "generation_started")[:2]
        dumps, failed = read_dumps([run.recording_prefix], since=first["time"])
        stuck = stuck_collectives(dumps, set(dumps))
        summary(f"hung rank: {second['reason']}; recordings: {[(one.operation, one.missing) for one in stuck]}")
        assert "rank 1 hangs" in second["reason"], last_words(run)
        assert (failed, sorted(dumps)) == ([], list(range(RANKS)))
        assert [(one.description, one.missing, one.mismatch) for one in stuck] == [("default_pg", (1,), "")]
        wait_until(lambda: events(run, "recovered"), "it goes on", run)


def test_a_run_whose_own_code_calls_another_collective_fails_with_the_cause(
    own_code: dict[str, str], tmp_path: Path, summary: Callable[[str], None]
) -> None:
    """It is restarted before that step twice, and hangs there again: each time the agents wait twice as long."""
    job = OwnObjective(
        "odd",
        objective="own_objectives:odd",
        environment=own_code,
        recover="{tries: 2}",
        # Without peer memory it returns to step 4, so that the step that hangs is not the first one of a generation.
        checkpoint="{peer: off, tiers: [{to: shared, every_steps: 4}]}",
        **RUN,
    )
    with running(tmp_path, job) as run:
        wait_until(lambda: run.has("FATAL"), "it fails", run, 180.0)
        text = run.marker_text("FATAL")
        summary(f"mismatch in own code: {text.strip()}")
        assert "all 4 ranks hang in productive" in text
        assert f"failure 3 in a row at step {ODD_STEP}" in text
        wait_until(lambda: verdict_of(run).condition == "dead", "it is dead", run, 60.0)
        verdict = verdict_of(run)
        summary(f"then: {verdict.sentence}")
        for line in verdict.evidence:
            summary(f"  · {line}")
        assert (verdict.cause, verdict.rank) == ("collective_mismatch", 1)
        assert "rank 1 calls nccl:all_reduce of [[4194304]]" in verdict.because
        assert any("own_objectives.py" in line for line in verdict.evidence)


def test_the_watchdog_of_pytorch_is_understood(tmp_path: Path, summary: Callable[[str], None]) -> None:
    """Of a command: its log and the recordings that PyTorch writes when a collective has timed out."""
    run = RunDirectory.create(tmp_path, "lonely")
    run.log_path(0).parent.mkdir(exist_ok=True)
    run.recording_prefix.parent.mkdir(exist_ok=True)
    shared = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "TORCH_FR_DUMP_TEMP_FILE": str(run.recording_prefix),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",  # else it waits for a minute before it ends
        "OMP_NUM_THREADS": "1",
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            command = [sys.executable, "-c", LONELY, str(rank), str(tmp_path / "store")]
            environment = {**os.environ, **shared, "NCCL_HOSTID": f"rank-{rank}"}
            with run.log_path(rank).open("wb") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [process.wait(120.0) for process in ranks[:-1]]
        paths = [Path(f"{run.recording_prefix}{rank}") for rank in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in paths), "all ranks have written their recordings", run, 60.0)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    lines = {match.pattern: match.line for match in read_logs(run, range(RANKS), 0.0, ())}
    found, note = read_collectives(run, {}, asks_ras=False, since=0.0, ranks_per_node=RANKS)
    summary(f"watchdog: exit codes {codes}; {lines.get('collective_timeout')}")
    summary(f"its recordings: {json.dumps([(one.operation, one.sequence, one.missing) for one in found.stuck])}")
    assert all(code != 0 for code in codes)
    assert "collective_timeout" in lines, lines
    assert note == ""
    assert [(one.sequence, one.missing) for one in found.stuck] == [(TOGETHER + 1, (RANKS - 1,))]


def test_every_pair_of_ranks_is_measured_over_nccl(
    mps: bool, monkeypatch: pytest.MonkeyPatch, summary: Callable[[str], None]
) -> None:
    """Of `craton doctor --bandwidth`, with four processes, each a host of its own for NCCL. Last, with MPS."""

    def run_on_hosts(
        commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], limit_seconds: float
    ) -> EndedSelftest:
        hosts = [{**item, "NCCL_HOSTID": f"rank-{item['RANK']}", "NCCL_NET": "Socket"} for item in environments]
        return run_processes(commands, hosts, limit_seconds)

    monkeypatch.setattr("craton.orchestration.preflight.selftest.run_processes", run_on_hosts)
    found, failed = run_bandwidth(RANKS)
    assert failed == []
    assert found is not None
    rates = {tuple(item["pair"]): item["bytes_per_second"] for rates in found["rounds"] for item in rates}
    words = ", ".join(f"{a} with {b} {bandwidth(rate)}" for (a, b), rate in sorted(rates.items()))
    summary(f"all-reduce of {found['size_bytes'] >> 20} MiB, {found['backend']}, MPS {'on' if mps else 'off'}: {words}")
    for finding in check_bandwidth(found):
        summary(f"doctor: {finding.severity} {finding.evidence}")
    assert found["backend"] == "nccl"
    assert len(found["names"]) == RANKS
    assert {(0, 1), (2, 3), (1, 2), (0, 3)} <= rates.keys()
    assert all(rate > 0 for rate in rates.values())
