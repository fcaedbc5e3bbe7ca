"""`local`: this machine as an instance: its GPUs if it has any, else its CPU, measured once and cached.

The cache is one JSON file for all machines that share a home directory. A record is valid only for the machine, core
count, memory, numpy, torch and benchmark version it was measured with. A corrupt file is replaced, never fatal.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from craton.formatting import counted, setting
from craton.infrastructure.accelerators import Accelerator, catalog_gpu, visible_accelerators
from craton.infrastructure.catalog import entry
from craton.infrastructure.errors import CatalogError
from craton.infrastructure.hardware import CpuRank, Gpu, HostCosts, Instance
from craton.infrastructure.load import IDLE, MachineLoad, current_load, load_text, usable_cores
from craton.infrastructure.microbenchmark import (
    BUDGET_SECONDS,
    NOT_STARTED,
    Measurement,
    measure,
    measure_operation,
)
from craton.infrastructure.sharing import nodes_per_gpu

BENCHMARK_VERSION = 3
GIGA = 1e9
LOOPBACK_BYTES_PER_SECOND = 5e9  # between nodes of one GPU machine; assumed: nothing is measured on a machine with GPUs
# Of NCCL's sockets between ranks of one GPU: all-reduces of 134 MB among 2 to 8 ranks with MPS reached 2.6 to 3.0 GB/s
# per rank on an H200, NCCL 2.28.9, 2026-11-16 (docs/share-gpus.md).
SHARED_LOOPBACK_BYTES_PER_SECOND = 3e9


@dataclass(frozen=True)
class LocalMachine:
    """This machine with its measurement and the time of it."""

    cpu: str
    cores: int
    memory_bytes: float
    measurement: Measurement
    measured_at: datetime

    @property
    def was_busy(self) -> bool:
        """Whether another process used the CPU, so that the loopback, which depends on wall time, is too slow."""
        return self.measurement.load_average > self.cores / 2

    def age_days(self, now: datetime) -> int:
        return (now - self.measured_at).days


def local_instance(shares: int = 1, share_gpus: bool = False) -> Instance:
    """Return this machine as an instance, or one of `shares` equal parts for several local nodes.

    With GPUs each part has its share of them; without, it is one rank on its share of the CPU. With `share_gpus` there
    may be more parts than GPUs: each is one rank on its part of a GPU.
    """
    cards = visible_accelerators()
    if share_gpus and (sharers := nodes_per_gpu(cards, shares)) > 1:
        return instance_of_shared_gpus(cards, shares, sharers)
    if cards:
        return instance_of_gpus(cards, shares)
    machine = local_machine()
    return instance_of_machine(machine, shares, current_load() if machine.measurement.host else IDLE)


def instance_of_gpus(cards: list[Accelerator], shares: int = 1) -> Instance:
    """Return an equal share of this machine's GPUs, with the numbers of the catalog."""
    card = catalog_gpu(cards)
    if len(cards) % shares:
        sharing = "share GPUs with `run: {share_gpus: true}` or --share-gpus, " if shares > len(cards) else ""
        raise CatalogError(
            f"local x {shares} cannot split {counted(len(cards), 'GPU')} equally; use local x 1, which uses all of "
            f"them, {sharing}or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return _node_of_gpus(cards, card, len(cards) // shares, shares)


def instance_of_shared_gpus(cards: list[Accelerator], shares: int, sharers: int) -> Instance:
    """Return one of `shares` nodes, each with one rank on 1/`sharers` of a GPU; ranks talk over loopback sockets."""
    whole = catalog_gpu(cards)
    part = replace(
        whole,
        flops={name: rate / sharers for name, rate in whole.flops.items()},
        achievable_flops={name: rate / sharers for name, rate in whole.achievable_flops.items()},
        memory_bytes=whole.memory_bytes / sharers,
        memory_bytes_per_second=whole.memory_bytes_per_second / sharers,
        nvlink_bytes_per_second=0.0,
        power_watts=whole.power_watts / sharers,
    )
    node = _node_of_gpus(cards, part, 1, shares)
    return replace(
        node,
        host_link_bytes_per_second=node.host_link_bytes_per_second / sharers,
        network_bytes_per_second=SHARED_LOOPBACK_BYTES_PER_SECOND,
        nodes_per_gpu=sharers,
    )


def _node_of_gpus(cards: list[Accelerator], card: Gpu, num_gpus: int, shares: int) -> Instance:
    """Return one of `shares` nodes of this machine, with `num_gpus` of `card`."""
    link, disk = "pcie5", entry("storage", "local-disk")
    return Instance(
        name="local",
        gpu=card,
        num_gpus=num_gpus,
        nvlink_domain_gpus=num_gpus if card.nvlink_bytes_per_second else 1,
        host_link=link,
        host_link_bytes_per_second=entry("host_links", link).number("gigabytes_per_second") * GIGA,
        network_bytes_per_second=LOOPBACK_BYTES_PER_SECOND,
        network_interfaces=1,
        efa_version=0,
        vcpus=max(usable_cores() // shares, 1),
        host_memory_bytes=machine_memory_bytes() / shares,
        nvme_bytes=float(shutil.disk_usage(Path.cwd()).total) / shares,
        nvme_read_bytes_per_second=disk.number("client_read_gigabytes_per_second") * GIGA / shares,
        nvme_write_bytes_per_second=disk.number("client_write_gigabytes_per_second") * GIGA / shares,
        notes=(f"{len(cards)} x {cards[0].name} as nvidia-smi reports them",),
    )


def local_machine(
    again: bool = False,
    measure: Callable[[], Measurement] = measure,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    cache: Path | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> LocalMachine:
    """Return the cached measurement of this machine, or a new one (`again`: always measure)."""
    cache = cache or cache_path()
    cpu, cores, memory_bytes = cpu_model(), usable_cores(), machine_memory_bytes()
    key = machine_key(cpu, cores, memory_bytes)
    records = read_records(cache)
    if not again and key in records:
        measured_at, measurement = records[key]
        return LocalMachine(cpu, cores, memory_bytes, measurement, measured_at)
    report(
        f"measuring this machine (matmul, operations, collectives; up to {setting(BUDGET_SECONDS)}, then cached) ..."
    )
    machine = LocalMachine(cpu, cores, memory_bytes, measure(), now())
    if machine.measurement.bf16_method.startswith("fp32 rate"):
        report(f"bf16 uses the {machine.measurement.bf16_method}")
    if machine.was_busy:
        busy = f"load {machine.measurement.load_average:.1f} on {cores} cores"
        report(f"the machine was busy ({busy}), so rates may be low; run `craton catalog local --measure` when idle")
    if NOT_STARTED in machine.measurement.bf16_method:
        return machine  # the next plan measures again
    try:
        write_records(cache, {**records, key: (machine.measured_at, machine.measurement)})
    except OSError as error:
        report(f"not cached: {cache}: {error.strerror}; set XDG_CACHE_HOME to a writable folder")
    return machine


def host_operation_seconds(
    measure: Callable[[], float | str] = measure_operation,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> float:
    """Return what an operation costs on the host of this machine's GPUs, measured once; 0 if it cannot be measured."""
    cache = cache_path().with_name("host.json")
    key = machine_key(cpu_model(), usable_cores(), machine_memory_bytes())
    try:
        known = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    records = known if isinstance(known, dict) else {}
    cached = records.get(key)
    if isinstance(cached, float) and 0.0 < cached < 1.0:
        return cached
    report("measuring what an operation costs on the host of these GPUs (a few seconds, then cached) ...")
    seconds = measure()
    if isinstance(seconds, str):
        report(f"not measured ({seconds}); plans assume the host of an H200")
        return 0.0
    try:
        _replace_json(cache, {**records, key: seconds})
    except OSError as error:
        report(f"not cached: {cache}: {error.strerror}; set XDG_CACHE_HOME to a writable folder")
    return seconds


def instance_of_machine(machine: LocalMachine, shares: int = 1, load: MachineLoad = IDLE) -> Instance:
    """Return an equal share of the machine under this load; loopback stays whole because each node sees the same
    device."""
    assert shares >= 1
    measured = machine.measurement
    disk = entry("storage", "local-disk")
    flops = {"fp32": measured.fp32_flops / shares, "bf16": measured.bf16_flops / shares}
    threads = max(machine.cores // shares, 1)
    cpu_rank = None
    if measured.host:
        cpu_rank = CpuRank(measured.host, machine.cores, threads, shares, load)
    reached = shares * threads / machine.cores if cpu_rank else 1.0  # not 1 if cores are left over or shared
    cpu = Gpu(
        name=machine.cpu,
        generation="cpu",
        flops=flops,
        achievable_flops={name: rate * reached for name, rate in flops.items()},
        memory_bytes=machine.memory_bytes / shares,
        memory_bytes_per_second=measured.memory_bytes_per_second / shares,
        nvlink_bytes_per_second=0.0,
        power_watts=0.0,
        operation_seconds=measured.host.operation_seconds if measured.host else 0.0,
        cpu=cpu_rank,
    )
    notes = [f"measured on {machine.measured_at:%Y-%m-%d}; bf16: {measured.bf16_method}"]
    if shares > 1:
        notes.append(f"one of {shares} nodes on this machine, each with 1/{shares} of its cores and memory")
    if load.is_busy:
        notes.append(f"busy: {load_text(load)}")
    return Instance(
        name="local",
        gpu=cpu,
        num_gpus=1,
        nvlink_domain_gpus=1,
        host_link="memory",
        host_link_bytes_per_second=measured.memory_bytes_per_second / 2 / shares,
        network_bytes_per_second=measured.loopback_bytes_per_second,
        network_interfaces=1,
        efa_version=0,
        vcpus=threads,
        host_memory_bytes=machine.memory_bytes / shares,
        nvme_bytes=float(shutil.disk_usage(Path.cwd()).total) / shares,
        nvme_read_bytes_per_second=disk.number("client_read_gigabytes_per_second") * GIGA / shares,
        nvme_write_bytes_per_second=disk.number("client_write_gigabytes_per_second") * GIGA / shares,
        notes=tuple(notes),
    )


def cache_path(environment: Mapping[str, str] = os.environ) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "craton" / "local.json"


def machine_key(cpu: str, cores: int, memory_bytes: float) -> str:
    """Return the cache key of a measurement; memory in GiB, because kernels differ in the last MiB."""
    parts = (
        f"benchmark {BENCHMARK_VERSION}",
        cpu,
        f"{cores} cores",
        f"{round(memory_bytes / 2**30)} GiB",
        f"numpy {package_version('numpy')}",
        f"torch {package_version('torch')}",
    )
    return " | ".join(parts)


def read_records(path: Path) -> dict[str, tuple[datetime, Measurement]]:
    """Return every valid record of the cache; corrupt or foreign ones are left out."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    records = document.get("machines") if isinstance(document, dict) else None
    result = {}
    for key, record in (records if isinstance(records, dict) else {}).items():
        try:
            measured_at = datetime.fromisoformat(record["measured_at"]).astimezone(UTC)
            result[key] = (measured_at, _measurement(record["measurement"]))
        except (KeyError, TypeError, ValueError):
            continue
    return result


def write_records(path: Path, records: Mapping[str, tuple[datetime, Measurement]]) -> None:
    """Replace the cache atomically, so that a reader never sees half of it."""
    document = {
        "machines": {
            key: {"measured_at": measured_at.isoformat(), "measurement": asdict(measurement)}
            for key, (measured_at, measurement) in records.items()
        }
    }
    _replace_json(path, document)


def _replace_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "cpu"


def machine_memory_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the memory of the machine, or the limit of this process's container, service or batch job if smaller."""
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    texts = [path.read_text().strip() for path in _memory_limits(groups, own) if path.is_file()]
    return min([total, *(float(text) for text in texts if text.isdigit())])


def free_memory_bytes(
    groups: Path = Path("/sys/fs/cgroup"),
    own: Path = Path("/proc/self/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
) -> float:
    """Return how much of that memory is available now. Cached files can be evicted; tmpfs and shared memory, which
    cgroups count as cache, cannot."""
    free = [machine_memory_bytes(groups, own)]
    if meminfo.is_file():
        free.append(_numbers(meminfo)["MemAvailable:"] * 1024)
    for path in _memory_limits(groups, own):
        is_newer = path.name == "memory.max"
        used = path.with_name("memory.current" if is_newer else "memory.usage_in_bytes")
        if used.is_file() and path.is_file() and (limit := path.read_text().strip()).isdigit():
            held = _numbers(path.with_name("memory.stat"))
            prefix, cached = ("", "file") if is_newer else ("total_", "cache")
            reclaimable = held.get(f"{prefix}{cached}", 0) - held.get(f"{prefix}shmem", 0)
            free.append(int(limit) - int(used.read_text()) + reclaimable)
    return max(0.0, float(min(free)))


def _numbers(path: Path) -> dict[str, int]:
    """Parse a kernel file with a name and a number on each line; empty if it has none."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.is_file() else []
    return {words[0]: int(words[1]) for words in lines}


def _memory_limits(groups: Path, own: Path) -> Iterator[Path]:
    """Yield files that may hold a limit: of this process's cgroup and its parents, of either version (cgroups(7))."""
    for line in own.read_text().splitlines() if own.is_file() else ["0::/"]:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            folder, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = groups / controllers, "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(place)
        yield from (folder / item.relative_to("/") / name for item in (group, *group.parents))


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _measurement(record: dict[str, Any]) -> Measurement:
    """Parse a record of the cache; raise KeyError, TypeError or ValueError if it is invalid."""
    costs = record["host"]
    host = None if costs is None else HostCosts(**costs)
    rates = [record[name] for name in record if name not in ("fp32_method", "bf16_method", "load_average", "host")]
    rates += [] if costs is None else list(costs.values())
    if not all(isinstance(rate, float) and math.isfinite(rate) and rate > 0 for rate in rates):
        raise ValueError("a rate is not a positive number")
    texts = (record["fp32_method"], record["bf16_method"])
    if not all(isinstance(text, str) for text in texts) or not isinstance(record["load_average"], float):
        raise ValueError("a method or load_average has the wrong type")
    return Measurement(**{**record, "host": host})
