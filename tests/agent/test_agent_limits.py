"""Agents and ranks with too few open files or too little memory, under real limits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent_gang import Gang
from waiting import PATIENCE_SECONDS

from craton.agent import Launch, read_launch
from craton.agent.processes.process import NCCL_POLICY, WAITING_POLICY, common_environment, waiting_policy
from craton.limits import number_after
from craton.telemetry import RunDirectory

LIMITED = """
import os, resource, sys
resource.setrlimit(resource.{limit}, ({soft}, {hard}))
os.execv(sys.argv[1], sys.argv[1:])
"""


def start_limited(gang: Gang, limit: str, soft: int, hard: int) -> int:
    agent = [sys.executable, "-m", "craton.agent", str(gang.run.path), "--node", "0"]
    program = LIMITED.format(limit=limit, soft=soft, hard=hard)
    with open(gang.folder / "agent-0.err", "ab") as errors:
        return subprocess.run(
            [sys.executable, "-c", program, *agent], stderr=errors, timeout=PATIENCE_SECONDS
        ).returncode


def test_an_agent_with_too_few_files_says_what_it_needs(gang: Gang) -> None:
    gang.launch("")
    assert start_limited(gang, "RLIMIT_NOFILE", 70, 70) == 2
    assert "this process may open 70 files (`ulimit -n`) and needs 74" in gang.errors()
    assert "`ulimit -n 65536` before the start" in gang.run.marker_text("FATAL")


def test_ranks_may_open_as_many_files_as_the_hard_limit_allows(gang: Gang) -> None:
    gang.launch("import resource\nsay('files', str(resource.getrlimit(resource.RLIMIT_NOFILE)))\n")
    assert start_limited(gang, "RLIMIT_NOFILE", 100, 500) == 0
    assert gang.said("files", 0) == "(500, 500)"


def test_a_rank_without_descriptors_fails_with_the_limit(gang: Gang) -> None:
    gang.launch(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))\n"
        "held = [open('/dev/null') for _ in range(60)]\n",
        tries=0,
    )
    assert gang.finish() == 1
    assert "it ran out of open files: this process may open" in gang.run.marker_text("FATAL")


def test_a_rank_without_memory_fails_with_the_limit(gang: Gang) -> None:
    gang.launch("held = bytearray(64 << 30)\n", tries=0)
    assert start_limited(gang, "RLIMIT_AS", 8 << 30, 8 << 30) == 1
    text = gang.run.marker_text("FATAL")
    assert "it ran out of memory: the limit of this process (`ulimit -v`) is 8.00 GiB; raise the limit" in text


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """One with 200 MiB of memory, and no swap where that can be said."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    for root, limit, swap in zip(
        roots, ("memory.limit_in_bytes", "memory.max"), ("memory.swappiness", "memory.swap.max"), strict=True
    ):
        made = root / f"craton-test-{os.getpid()}"
        try:
            made.mkdir()
            if not (made / limit).exists():
                raise OSError("no memory controller")
            (made / limit).write_text(str(200 << 20))
            (made / swap).write_text("0")
        except OSError as error:
            reason = error
            if made.exists():
                made.rmdir()
            continue
        yield made
        made.rmdir()
        return
    pytest.skip(f"no cgroup with a memory limit can be made here: {reason}")


def test_a_rank_that_the_kernel_kills_names_the_memory_limit(gang: Gang, cgroup: Path) -> None:
    gang.launch("held = bytearray(1 << 30)\nfor at in range(0, len(held), 4096): held[at] = 1\n", tries=0)
    killed = number_after(Path("/proc/vmstat"), "oom_kill")
    agent = [sys.executable, "-m", "craton.agent", str(gang.run.path), "--node", "0"]
    entering = ["/bin/sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *agent]
    with open(gang.folder / "agent-0.err", "ab") as errors:
        code = subprocess.run(entering, stderr=errors, timeout=PATIENCE_SECONDS).returncode
    if number_after(Path("/proc/vmstat"), "oom_kill") == killed:
        pytest.skip("this kernel does not count the processes that it kills for memory")
    assert code == 1
    text = gang.run.marker_text("FATAL")
    assert "the kernel's OOM killer has killed a process" in text
    assert f"the memory limit of the cgroup {cgroup} is 200 MiB; raise the limit (--mem in Slurm" in text


def test_threads_of_ranks_spin_only_briefly_unless_the_user_says_otherwise(gang: Gang) -> None:
    assert waiting_policy({}) == WAITING_POLICY
    assert waiting_policy({"OMP_WAIT_POLICY": "ACTIVE"}) == {}
    gang.launch("", threads_per_rank=3, env={"GOMP_SPINCOUNT": "7"})
    given = common_environment(gang.run, read_launch(gang.run), "node-0")
    assert (given["GOMP_SPINCOUNT"], given["OMP_NUM_THREADS"]) == ("7", "3")
    assert "KMP_BLOCKTIME" not in given
    gang.launch("", threads_per_rank=3, env={"OMP_NUM_THREADS": "2"})
    assert common_environment(gang.run, read_launch(gang.run), "node-0")["OMP_NUM_THREADS"] == "2"


def test_agents_handle_errors_of_nccl_unless_the_user_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path, "a")
    launch = Launch(generation=0, nodes=["node-0"], ranks_per_node=1, command=["x"], nursery=["y"])
    given = common_environment(run, launch, "node-0")
    assert {name: given[name] for name in NCCL_POLICY} == NCCL_POLICY
    of_a_command = common_environment(run, replace(launch, nursery=[]), "node-0")
    assert not NCCL_POLICY.keys() & of_a_command.keys(), "a command's own watchdog ends it"
    chosen = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert common_environment(run, replace(launch, env={chosen: "1"}), "node-0")[chosen] == "1"
    monkeypatch.setenv(chosen, "3")
    assert chosen not in common_environment(run, launch, "node-0")
