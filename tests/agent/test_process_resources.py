"""The resources of a process: by the kernel of this machine, and by files of a machine that is written for the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from craton.agent.processes import ResourceReader

SPINS = "while True: pass"
SLEEPS = "import time; time.sleep(600)"
FORKS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        return started[-1].pid

    yield begin
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def test_a_process_that_sleeps_is_idle_and_one_that_computes_is_not(start: Callable[[str], int]) -> None:
    sleeping, computing, forking = start(SLEEPS), start(SPINS), start(FORKS)
    readers = {pid: ResourceReader() for pid in (sleeping, computing, forking)}

    def idle() -> dict[int, float]:
        now = time.monotonic()
        return {pid: reader.read(pid, now).idle_seconds for pid, reader in readers.items()}

    wait_until(lambda: idle()[sleeping] > 1.0, "the sleeping process is idle", look_seconds=0.2)
    wait_until(lambda: idle()[computing] == 0.0, "the computing process is busy", look_seconds=0.2)
    wait_until(lambda: idle()[forking] == 0.0, "so is the child of another one", look_seconds=0.2)


def test_affinity_and_priority_are_those_of_the_process(start: Callable[[str], int]) -> None:
    pid = start(SLEEPS)
    reader = ResourceReader()
    assert reader.read(pid, 1.0).cpus == len(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    os.setpriority(os.PRIO_PROCESS, pid, 7)
    assert reader.read(pid, 1.1).cpus == len(os.sched_getaffinity(0))  # read every other second
    resources = reader.read(pid, 4.0)
    assert (resources.cpus, resources.niceness) == (1, 7)


@pytest.fixture
def cpu_group() -> Iterator[Path]:
    """A cgroup that may use a tenth of a CPU."""
    root = Path("/sys/fs/cgroup")
    is_old = (root / "cpu").is_dir()
    group = (root / "cpu" if is_old else root) / f"craton-test-{os.getpid()}"
    try:
        group.mkdir()
        if is_old:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("10000")
        else:
            (group / "cpu.max").write_text("10000 100000")
    except OSError as error:
        pytest.skip(f"a cgroup with a CPU quota cannot be made: {error}")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "the cgroup is empty")
    group.rmdir()


def test_a_real_quota_and_its_throttling(cpu_group: Path, start: Callable[[str], int]) -> None:
    pid = start(SPINS)
    (cpu_group / "cgroup.procs").write_text(str(pid))
    reader = ResourceReader()
    assert reader.read(pid, time.monotonic()).quota_cpus == 0.1
    wait_until(lambda: reader.read(pid, time.monotonic()).throttled_share > 0.5, "it is throttled", look_seconds=0.2)


def test_a_process_that_has_ended_has_no_resources() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    resources = ResourceReader().read(process.pid, 1.0)
    assert (resources.cpus, resources.waited_share, resources.memory_share) == (0, 0.0, 0.0)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, ran: int, waited: int, throttled: int) -> None:
    """Process 7 in the cgroup `pod` of version 2."""
    write(root, "proc/7/stat", f"7 (python) R{' 0' * 15} 5{' 0' * 30}")
    write(root, "proc/7/cgroup", "0::/pod\n")
    write(root, "proc/7/task/7/schedstat", f"{ran} {waited} 1\n")
    write(root, "sys/fs/cgroup/pod/cpu.max", "50000 100000\n")
    write(root, "sys/fs/cgroup/pod/cpu.stat", f"nr_periods {2 * throttled}\nnr_throttled {throttled}\n")
    write(root, "sys/fs/cgroup/pod/memory.max", "1000\n")
    write(root, "sys/fs/cgroup/pod/memory.current", "990\n")
    write(root, "sys/fs/cgroup/pod/memory.stat", "anon 900\ninactive_file 40\nactive_file 10\n")


def test_limits_of_a_cgroup(tmp_path: Path) -> None:
    reader = ResourceReader(tmp_path)
    machine(tmp_path, ran=10**9, waited=0, throttled=0)
    first = reader.read(7, 10.0)
    assert (first.throttled_share, first.waited_share) == (0.0, 0.0)
    machine(tmp_path, ran=2 * 10**9, waited=3 * 10**9, throttled=10)
    resources = reader.read(7, 15.0)
    assert (resources.quota_cpus, resources.throttled_share, resources.niceness) == (0.5, 0.5, 5)
    assert (resources.waited_share, resources.memory_share, resources.memory_limit_bytes) == (0.75, 0.94, 1000)


def test_a_thread_that_is_new_does_not_bring_the_times_of_its_life(tmp_path: Path) -> None:
    reader = ResourceReader(tmp_path)
    machine(tmp_path, ran=1_000_000_000, waited=0, throttled=0)
    reader.read(7, 100.0)
    machine(tmp_path, ran=5_000_000_000, waited=1_000_000_000, throttled=0)
    write(tmp_path, "proc/7/task/9/schedstat", "900000000000 900000000000 1\n")
    assert reader.read(7, 105.0).wanted_cpus == 1.0


def test_pages_that_come_back_and_the_time_that_a_quota_takes(tmp_path: Path) -> None:
    reader = ResourceReader(tmp_path)
    machine(tmp_path, ran=0, waited=0, throttled=0)
    reader.read(7, 100.0)
    machine(tmp_path, ran=10, waited=0, throttled=20)
    write(tmp_path, "sys/fs/cgroup/pod/cpu.stat", "nr_periods 40\nnr_throttled 20\nthrottled_usec 3000000\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.stat", "anon 900\nworkingset_refault_file 5000\n")
    read = reader.read(7, 105.0)
    assert (read.refaults_per_second, read.throttled_share, read.throttled_time_share) == (1000.0, 0.5, 0.6)


def test_the_cpu_time_of_a_step(tmp_path: Path) -> None:
    reader = ResourceReader(tmp_path)
    ticks = os.sysconf("SC_CLK_TCK")

    def read(moment: float, step: int, used_seconds: int) -> tuple[float, float]:
        fields = " 0" * 10 + f" {used_seconds * ticks}" + " 0" * 34
        write(tmp_path, "proc/7/stat", f"7 (python) R{fields}")
        found = reader.read(7, moment, step)
        return found.step_cpu_seconds, found.usual_step_cpu_seconds

    for number in range(3):
        assert read(2.0 * number, 1 + 4 * number, 10 + 2 * number) == (0.0, 0.0), "too few changes of the step"
    assert read(6.0, 13, 16) == (0.5, 0.0)
    assert read(8.0, 13, 18) == (0.5, 0.0), "in the middle of a step"
    for number in range(1, 6):
        read(6.0 + 2.0 * number, 13 + 4 * number, 16 + 2 * number)
    assert read(18.0, 37, 28) == (0.5, 0.5)
    for number in range(1, 6):
        read(18.0 + 2.0 * number, 37 + number, 28 + 2 * number)
    assert read(30.0, 43, 40) == (2.0, 0.5), "each step does more"
    assert read(32.0, 22, 42) == (2.0, 0.5), "steps are repeated"


def test_memory_of_a_cgroup_of_version_1(tmp_path: Path) -> None:
    write(tmp_path, "proc/7/cgroup", "4:memory:/job\n")
    folder = "sys/fs/cgroup/memory"
    for name, text in (
        (f"{folder}/memory.limit_in_bytes", str(1 << 62)),
        (f"{folder}/job/memory.limit_in_bytes", "1000"),
        (f"{folder}/job/memory.usage_in_bytes", "950"),
        (f"{folder}/job/memory.stat", "inactive_file 0\ntotal_inactive_file 30\ntotal_active_file 20\n"),
    ):
        write(tmp_path, name, text)
    resources = ResourceReader(tmp_path).read(7, 1.0)
    assert (resources.memory_share, resources.memory_limit_bytes) == (0.9, 1000)
