"""The load of a machine is read from /proc as Linux writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from craton.infrastructure.load import (
    IDLE,
    CpuTicks,
    MachineLoad,
    cpu_ticks,
    current_load,
    load_text,
    state_and_session,
    steal_share,
)

STAT = """cpu  22609 0 3536 66332 624 0 75 20 0 0
cpu0 14038 0 2284 29727 511 0 43 10 0 0
cpu1 8571 0 1251 36605 112 0 32 10 0 0
intr 235858 0 14628 65517
ctxt 1045566
btime 1794983468
"""


PROCESS = "{pid} ({name}) {state} 1 {group} {session} 0 -1 4194304 120 0 0 0 5 2 0 0 20 0 1 0 100 1000 10\n"


def machine(
    root: Path,
    *processes: str,
    autogroup: str = "1\n",
    stat: str = STAT,
    cgroup: str = "0::/\n",
    in_container: bool = False,
) -> Path:
    proc, kernel = root / "proc", root / "proc" / "sys" / "kernel"
    kernel.mkdir(parents=True)
    (proc / "stat").write_text(stat)
    (kernel / "sched_autogroup_enabled").write_text(autogroup)
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text(cgroup)
    if in_container:
        (root / "sys" / "fs" / "cgroup").mkdir(parents=True)
        (root / "sys" / "fs" / "cgroup" / "cpu.weight").write_text("100\n")
    for process in processes:
        pid = process.partition(" ")[0]
        folder = proc / pid / "task" / pid
        folder.mkdir(parents=True)
        (folder / "stat").write_text(process)
    return root


def process(pid: int, state: str, session: int, name: str = "python") -> str:
    return PROCESS.format(pid=pid, name=name, state=state, group=pid, session=session)


def test_state_and_session_behind_any_name() -> None:
    text = "28674 (sd (pam) x) R 28255 28254 7 0 -1 4194304 3051 0 0 0 1631 5 0 0 20 0 2 0 276800 168718336 12929"
    assert state_and_session(text) == ("R", 7)


def test_ticks_and_steal() -> None:
    before = cpu_ticks(STAT)
    assert before == CpuTicks(total=22609 + 3536 + 66332 + 624 + 75 + 20, steal=20)
    after = cpu_ticks(STAT.replace("66332 624 0 75 20", "66392 624 0 75 60"))
    assert steal_share(before, after) == 0.4
    assert steal_share(before, before) == 0.0, "no time has passed"
    with pytest.raises(ValueError, match="not the first line"):
        cpu_ticks("intr 1 2 3\n")


def test_sessions_or_processes_that_run(tmp_path: Path) -> None:
    others = [
        process(100, "R", 7),
        process(101, "R", 7, "a (strange) name"),
        process(102, "R", 8),
        process(103, "S", 9),
        process(104, "R", 0, "kdamond.0"),
        process(os.getpid(), "R", 10),
    ]
    per_session, per_process = tmp_path / "sessions", tmp_path / "processes"
    per_session.mkdir()
    per_process.mkdir()
    assert current_load(machine(per_session, *others)) == MachineLoad(runnable=2.0)
    expected = MachineLoad(runnable=3.0, is_per_session=False)
    assert current_load(machine(per_process, *others, autogroup="0\n")) == expected


@pytest.mark.parametrize(
    "where",
    [
        {"in_container": True},
        {"cgroup": "0::/system.slice/agent.service\n"},
        {"cgroup": "4:memory:/\n2:cpu,cpuacct:/job\n"},
    ],
)
def test_in_a_cgroup_threads_count(tmp_path: Path, where: dict[str, Any]) -> None:
    found = current_load(machine(tmp_path, process(100, "R", 7), process(101, "R", 7), **where))
    assert found == MachineLoad(runnable=2.0, is_per_session=False)


def test_a_quiet_machine(tmp_path: Path) -> None:
    quiet = current_load(machine(tmp_path, process(103, "S", 9)))
    assert quiet == IDLE
    assert not quiet.is_busy
    assert quiet.slowdown(ranks=2, threads=1, cores=2) == 1.0
    assert quiet.slowdown(ranks=4, threads=1, cores=2) == 2.0, "more ranks than cores"


def test_a_busy_machine_shares_its_cores() -> None:
    busy = MachineLoad(runnable=2.0)
    assert busy.is_busy
    assert (busy.slowdown(2, 1, 2), busy.slowdown(1, 1, 2), busy.slowdown(2, 1, 16)) == (2.0, 1.5, 1.0)
    assert busy.slowdown(1, 2, 2) == 3.0, "two threads divide the share of their session"
    assert MachineLoad(runnable=2.0, is_per_session=False).slowdown(1, 2, 2) == 2.0
    assert load_text(busy) == "2.0 other sessions run"


def test_stolen_time_slows_down() -> None:
    stolen = MachineLoad(steal_share=0.2, is_per_session=False)
    assert stolen.slowdown(2, 1, 2) == pytest.approx(1.25)
    assert load_text(stolen) == "0.0 other threads run, 20% of the CPU time is stolen"


@pytest.mark.parametrize("stat", ["", "cpu 1 2 3\n"])
def test_a_machine_that_does_not_say_counts_as_idle(tmp_path: Path, stat: str) -> None:
    assert current_load(machine(tmp_path, process(100, "R", 7), stat=stat)) == IDLE
    assert current_load(tmp_path / "none") == IDLE


def test_the_real_machine() -> None:
    found = current_load()
    assert found.runnable >= 0.0
    assert 0.0 <= found.steal_share <= 1.0
