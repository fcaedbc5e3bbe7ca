"""This machine is measured once, remembered, and measured again when the memory of it cannot be trusted."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

from craton.infrastructure import HostCosts, cache_path, local, local_machine, microbenchmark
from craton.infrastructure.load import IDLE
from craton.infrastructure.local import instance_of_machine, local_instance
from craton.infrastructure.microbenchmark import Measurement

START = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
FAKE = Measurement(100e9, 50e9, "torch, one thread a core", 20e9, 5e9, 0.1)


class Bench:
    """Counts measurements and records what was said; each measurement is a day after the one before."""

    def __init__(self, measurement: Measurement = FAKE) -> None:
        self.measurement = measurement
        self.runs = 0
        self.said: list[str] = []

    def measure(self) -> Measurement:
        self.runs += 1
        return self.measurement

    def now(self) -> datetime:
        return START + timedelta(days=self.runs - 1)

    def machine(self, again: bool = False, cache: Path | None = None) -> local.LocalMachine:
        return local_machine(again, self.measure, self.now, cache, self.said.append)


def test_measured_once_then_remembered() -> None:
    bench = Bench()
    first, second = bench.machine(), bench.machine()
    assert bench.runs == 1
    assert first == second
    assert (second.measurement, second.measured_at) == (FAKE, START)
    assert second.age_days(START + timedelta(days=3, hours=5)) == 3
    assert bench.said == ["measuring this machine (matmul, operations, collectives; up to 30 s, then cached) ..."]


def test_again_measures_and_remembers_the_new_date() -> None:
    bench = Bench()
    bench.machine()
    assert bench.machine(again=True).measured_at == START + timedelta(days=1)
    assert bench.machine().measured_at == START + timedelta(days=1)
    assert bench.runs == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"machines": 3}',
        lambda text: text.replace("100000000000.0", "-1.0"),
        lambda text: text.replace("100000000000.0", "NaN"),
        lambda text: text.replace("100000000000.0", '"fast"'),
        lambda text: text.replace('"fp32_flops"', '"fp33_flops"'),
        lambda text: text.replace("2026-11-15", "yesterday"),
    ],
)
def test_a_damaged_cache_is_measured_over(damage: Callable[[str], str]) -> None:
    bench = Bench()
    bench.machine()
    text = cache_path().read_text()
    cache_path().write_text(damage(text))
    assert cache_path().read_text() != text
    assert bench.machine().measurement == FAKE
    assert bench.runs == 2
    bench.machine()
    assert bench.runs == 2


def test_another_machine_in_the_same_home_keeps_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.machine()
    monkeypatch.setattr(local, "usable_cores", lambda: 999)
    bench.machine()
    assert bench.runs == 2
    assert len(json.loads(cache_path().read_text())["machines"]) == 2


@pytest.mark.parametrize("change", ["version", "numpy", "torch"])
def test_other_software_is_measured_again(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    bench = Bench()
    bench.machine()
    if change == "version":
        monkeypatch.setattr(local, "BENCHMARK_VERSION", 999)
    else:
        real = local.package_version
        monkeypatch.setattr(local, "package_version", lambda name: "9.9" if name == change else real(name))
    bench.machine()
    assert bench.runs == 2


def test_an_unwritable_cache_is_said_and_not_fatal(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    bench = Bench()
    machine = bench.machine(cache=blocked / "craton" / "local.json")
    assert machine.measurement == FAKE
    assert "not cached" in bench.said[-1]
    assert "XDG_CACHE_HOME" in bench.said[-1]


def test_a_torch_that_started_too_slowly_is_measured_again() -> None:
    bench = Bench(Measurement(1e9, 1e9, "fp32 rate: torch did not start within 30 s; measure again", 1e9, 1e9, 0.1))
    bench.machine()
    bench.machine()
    assert bench.runs == 2


COSTS = HostCosts(1e-5, 1e-5, 1e-9, 1e-9, 1e-5, 1e-4, 1e-4, 1e9)


def test_costs_of_operations_are_remembered() -> None:
    bench = Bench(replace(FAKE, host=COSTS))
    bench.machine()
    assert bench.machine().measurement.host == COSTS
    cache_path().write_text(cache_path().read_text().replace('"loop_seconds": 0.0001', '"loop_seconds": -1.0'))
    bench.machine()
    assert bench.runs == 2, "a cost that is not positive is measured again"


def test_falling_back_and_being_busy_are_said_aloud() -> None:
    bench = Bench(Measurement(1e9, 1e9, "fp32 rate: torch is not installed", 1e9, 1e9, 1e6))
    machine = bench.machine()
    assert machine.was_busy
    assert "bf16 uses the fp32 rate: torch is not installed" in bench.said
    assert "the machine was busy" in bench.said[-1]


def test_the_cache_is_readable_json_and_nothing_is_left_beside_it() -> None:
    Bench().machine()
    assert [path.name for path in cache_path().parent.iterdir()] == ["local.json"]
    assert cache_path().stat().st_mode & stat.S_IRUSR
    (record,) = json.loads(cache_path().read_text())["machines"].values()
    assert record["measurement"]["fp32_flops"] == 100e9


def test_a_rank_gets_whole_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "usable_cores", lambda: 3)
    machine = Bench(replace(FAKE, host=COSTS)).machine()
    half = instance_of_machine(machine, 2)
    assert half.gpu.cpu is not None
    assert (half.gpu.cpu.threads, half.gpu.cpu.serial_slowdown) == (1, 1.0)
    assert half.gpu.achievable_flops["fp32"] == pytest.approx(100e9 / 3)
    assert half.gpu.operation_seconds == COSTS.operation_seconds
    crowded = instance_of_machine(machine, 6)
    assert crowded.gpu.cpu is not None
    assert (crowded.gpu.cpu.threads, crowded.gpu.cpu.serial_slowdown) == (1, 2.0)


def test_local_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(local, "local_machine", Bench().machine)
    monkeypatch.setattr(local, "current_load", lambda: IDLE)
    node = local_instance()
    assert (node.name, node.num_gpus, node.nvlink_domain_gpus, node.efa_version) == ("local", 1, 1, 0)
    assert node.gpu.generation == "cpu"
    assert node.gpu.peak_flops("bf16") == 50e9
    assert node.network_bytes_per_second == 5e9
    assert node.gpu.memory_bytes == node.host_memory_bytes > 2**28


@pytest.mark.parametrize(
    ("own", "limit"),
    [
        ("0::/", "memory.max"),  # a container
        ("0::/system.slice/job_7/step_0", "system.slice/job_7/memory.max"),  # a batch job
        ("4:memory:/docker/ab12\n0::/", "memory/memory.limit_in_bytes"),  # a container, the older way
        ("3:cpuset:/\n2:memory:/job_7\n0::/", "memory/job_7/memory.limit_in_bytes"),
    ],
)
def test_memory_of_a_container_or_a_batch_job(tmp_path: Path, own: str, limit: str) -> None:
    group, groups = tmp_path / "cgroup", tmp_path / "groups"
    group.write_text(f"{own}\n")
    path = groups / limit
    path.parent.mkdir(parents=True)
    path.write_text("1073741824\n")
    assert local.machine_memory_bytes(groups, group) == 2**30
    path.write_text("max\n")
    whole = local.machine_memory_bytes(groups, group)
    assert whole == local.machine_memory_bytes(tmp_path / "none", tmp_path / "none") > 2**30


@pytest.mark.parametrize(
    ("own", "limit", "used", "cached"),
    [
        ("0::/system.slice/job_7/step_0", "system.slice/job_7/memory.max", "memory.current", "file {}\nshmem {}"),
        (
            "3:cpuset:/\n2:memory:/job_7",
            "memory/job_7/memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "cache 1\ntotal_cache {}\ntotal_shmem {}",
        ),
    ],
)
def test_free_memory_of_a_batch_job(tmp_path: Path, own: str, limit: str, used: str, cached: str) -> None:
    group, groups, meminfo = tmp_path / "cgroup", tmp_path / "groups", tmp_path / "meminfo"
    group.write_text(f"{own}\n")
    meminfo.write_text(f"MemTotal: {2**30} kB\nMemAvailable: {2**20} kB\n")
    path = groups / limit
    path.parent.mkdir(parents=True)
    path.write_text("1000000\n")
    path.with_name(used).write_text("900000\n")
    path.with_name("memory.stat").write_text(cached.format(500_000, 200_000) + "\n")
    assert local.free_memory_bytes(groups, group, meminfo) == 400_000, "a file may go, shared memory may not"
    path.write_text("max\n")
    assert local.free_memory_bytes(groups, group, meminfo) == min(2**30, local.machine_memory_bytes(groups, group))
    path.write_text("800000\n")
    path.with_name("memory.stat").unlink()
    assert local.free_memory_bytes(groups, group, meminfo) == 0


def test_the_real_microbenchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmark, "MATRIX_SIZE", 256)
    monkeypatch.setattr(microbenchmark, "PART_SECONDS", 0.1)
    monkeypatch.setattr(microbenchmark, "COPY_BYTES", 16 * 2**20)
    measured = microbenchmark.measure(budget_seconds=PATIENCE_SECONDS)  # torch may start slowly
    assert (measured.fp32_method, measured.bf16_method) == ("torch, one thread a core", "torch, one thread a core")
    assert 1e8 < measured.fp32_flops < 1e14
    assert 1e8 < measured.memory_bytes_per_second < 1e13
    assert 1e7 < measured.loopback_bytes_per_second < 1e12
    assert measured.bf16_flops > 0
    host = measured.host
    assert host is not None
    assert min(host.operation_seconds, host.backward_operation_seconds, host.collective_seconds) > 0
    assert host.collective_bytes_per_second > 0


def test_a_clock_that_stands_still_is_read_again() -> None:
    times = iter([1.0, 1.0, 1.0, 1.0, 2.0, 2.25])
    assert microbenchmark._best(lambda: None, 0.0, lambda: next(times)) == 0.25


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmark.importlib.util, "find_spec", lambda name: None)
    measured = microbenchmark.measure(budget_seconds=0.5)
    assert measured.fp32_method == "numpy, all cores"
    assert measured.bf16_method == "fp32 rate: torch is not installed"
    assert measured.bf16_flops == measured.fp32_flops > 1e8


def torch_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """A package called torch that runs `does` when it is imported, seen by this process and its children."""
    (tmp_path / "torch.py").write_text(does)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


def test_bf16_with_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_that(tmp_path, monkeypatch, "raise ImportError('libcudart.so.13: cannot open')")
    flops, host, method = microbenchmark.measure_torch(0.1, 20.0)
    assert flops is host is None
    assert method == "fp32 rate: torch is installed but failed: ImportError: libcudart.so.13: cannot open"


def test_bf16_with_a_torch_that_never_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_that(tmp_path, monkeypatch, "import threading; threading.Event().wait()")
    flops, host, method = microbenchmark.measure_torch(0.1, 0.5)
    assert flops is host is None
    assert "torch did not start within 500 ms" in method


def test_the_light_core_never_imports_torch() -> None:
    program = "import sys, craton.infrastructure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_host_of_gpus_is_measured_once() -> None:
    said: list[str] = []
    assert local.host_operation_seconds(lambda: 5e-6, said.append) == 5e-6
    assert local.host_operation_seconds(lambda: pytest.fail("it is cached"), said.append) == 5e-6
    assert len(said) == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"key": "x"}', "null"])
def test_a_damaged_record_of_the_host_is_measured_over(text: str) -> None:
    cache = cache_path().with_name("host.json")
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(text)
    assert local.host_operation_seconds(lambda: 5e-6, lambda line: None) == 5e-6
    assert local.host_operation_seconds(lambda: 6e-6, lambda line: None) == 5e-6


def test_a_host_that_cannot_be_measured_is_said_and_tried_again() -> None:
    said: list[str] = []
    assert local.host_operation_seconds(lambda: "torch is not installed", said.append) == 0.0
    assert said[1] == "not measured (torch is not installed); plans assume the host of an H200"
    assert local.host_operation_seconds(lambda: 5e-6, said.append) == 5e-6


def test_the_cost_of_an_operation_is_measured_alone() -> None:
    seconds = microbenchmark.measure_operation(PATIENCE_SECONDS)
    assert isinstance(seconds, float), seconds
    assert 1e-7 < seconds < 1e-2
