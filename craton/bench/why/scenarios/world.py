"""A simulated training: ranks in lock-step, the machines below them, and the effect of a fault on both.

No verdict is predefined. A rank works (data, compute, optimizer), then waits for the slowest rank in a collective that
takes time itself; machine counters follow. A fault changes a cause, such as a clock, and the simulation does the rest:
the slow GPU makes all steps longer and is the one that waits least. `files` writes what the agents of such a run would
have written, `series` what the exporters would have served.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WORK = ("data", "compute", "optimizer")
GPU_WATTS, GPU_CLOCK_MHZ = 700.0, 1980.0
COUNTER_SECONDS = 480.0  # for which counters were scraped
USUAL_LOAD = 12.0


@dataclass(frozen=True)
class Signal:
    """A metric: its level (for a counter, its rate per second) before and after the onset of a fault."""

    before: float
    after: float | None = None  # None: as before
    is_counter: bool = False
    swing: float = 0.0  # noise, as a share of the level
    onset_seconds: float | None = None  # before now; None: when the world became slow
    total: float | None = None  # of a counter: its value at the start of the window
    burst: float = 0.0  # of a counter: increase at the onset

    @property
    def last(self) -> float:
        return self.before if self.after is None else self.after


@dataclass(frozen=True)
class Death:
    rank: int
    code: int
    during: str = "productive"
    seconds_ago: float = 20.0


@dataclass
class Slowdown:
    """More time in one phase of some ranks, for the last steps."""

    ranks: frozenset[int]
    phase: str
    factor: float = 1.0
    seconds: float = 0.0
    swing: float = 0.0
    last_steps: int | None = None  # None: since the first step


Key = tuple[str, str, tuple[tuple[str, str], ...]]  # (metric, node, its other labels)


@dataclass
class World:
    """One run and its machines. Faults change it before its files are written by means of `simulate`."""

    chance: random.Random
    now: float = 0.0
    prefix: str = "n"  # of node names: unique in one Prometheus
    num_nodes: int = 3
    ranks_per_node: int = 4
    leaf_nodes: int = 2
    pipeline: int = 1
    steps: int = 100
    step_seconds: float = 6.0
    is_measured: bool = True  # by exporters that a Prometheus scrapes
    has_status: bool = True
    has_logs: bool = True
    state: str = "running"  # starting, running, done, stopped, failed, lost; of the files, not of a verdict
    fatal: str = ""
    plan_error: float = 1.0  # predicted over actual time of a healthy step
    swing: float = 0.008  # noise of one rank's work from step to step
    common_swing: float = 0.01  # noise common to all ranks
    outliers: float = 0.01  # share of steps in which one rank takes much longer
    warm_up: float = 4.0  # factor of the first step
    network_factor: float = 1.0
    network_last_steps: int | None = 0
    silence_seconds: float = 0.0  # since the last step, beyond the current one
    kinds: dict[int, str] = field(default_factory=dict)  # rank → its activity, if not productive
    stopped: set[int] = field(default_factory=set)
    deaths: list[Death] = field(default_factory=list)
    lost_nodes: dict[str, float] = field(default_factory=dict)  # node → seconds since its last heartbeat
    slowdowns: list[Slowdown] = field(default_factory=list)
    signals: dict[Key, Signal] = field(default_factory=dict)
    logs: dict[int, list[str]] = field(default_factory=dict)
    old_logs: dict[int, list[str]] = field(default_factory=dict)  # at the beginning
    loss_after: dict[int, float | None] = field(default_factory=dict)  # steps before the end → loss; None: NaN
    norm_factor: dict[int, tuple[int, float]] = field(default_factory=dict)  # rank → (last steps, factor)
    saves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # tier → outcome of its newest saves
    # Steps since a generation began → the rank that ended the previous one, and its message, oldest first.
    breaks: dict[int, tuple[int, str]] = field(default_factory=dict)
    spares: dict[str, float] = field(default_factory=dict)  # spare node → age of its heartbeat
    kind: str = "pretrain"
    queue: Callable[[float], tuple[int, int]] | None = None  # of a server: seconds ago → running and waiting requests
    recordings: dict[int, dict[str, object]] = field(default_factory=dict)  # flight recorder dumps
    job_state: str = "RUNNING"
    job_reason: str = "None"
    checkpoint_now: bool = False
    age_seconds: float = 0.0  # since the launch; 0: its first step is the run's first

    def __post_init__(self) -> None:
        self.nodes = [f"{self.prefix}-{number}" for number in range(self.num_nodes)]
        compute = self.chance.uniform(0.68, 0.8)
        optimizer = self.chance.uniform(0.03, 0.07)
        data = self.chance.uniform(0.004, 0.015)
        self.base = {"data": data, "compute": compute, "optimizer": optimizer}
        self.base["communication"] = 1.0 - sum(self.base.values())
        self.base = {phase: share * self.step_seconds for phase, share in self.base.items()}
        self.speed = {rank: self.chance.gauss(1.0, 0.004) for rank in range(self.world)}  # no two GPUs are equal
        self._wire()

    @property
    def world(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def generation_of(self, left: int) -> int:
        """Return the generation of a step, counted from the end."""
        return sum(left <= since for since in self.breaks)

    @property
    def generation(self) -> int:
        return len(self.breaks)

    def node_of(self, rank: int) -> str:
        return self.nodes[rank // self.ranks_per_node]

    def ranks_of(self, node: str) -> list[int]:
        first = self.nodes.index(node) * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))

    def leaf_of(self, node: str) -> str:
        return f"{self.prefix}-leaf-{self.nodes.index(node) // self.leaf_nodes}"

    def leaf_members(self, leaf: str) -> list[str]:
        return [node for node in self.nodes if self.leaf_of(node) == leaf]

    def draw_rank(self) -> int:
        return self.chance.randrange(self.world)

    def draw_node(self) -> str:
        return self.chance.choice(self.nodes)

    def shrink(self, num_nodes: int, ranks_per_node: int) -> None:
        """Resize the world, before any fault is injected."""
        self.num_nodes, self.ranks_per_node = num_nodes, ranks_per_node
        self.signals.clear()
        self.__post_init__()

    # -- what faults do ------------------------------------------------------------------------------------------------

    def slow(
        self, ranks: Iterable[int], phase: str, factor: float = 1.0, seconds: float = 0.0, swing: float = 0.0
    ) -> int:
        """Slow a phase for a random number of last steps; return that number."""
        last = self.chance.randint(26, 60)
        self.slowdowns.append(Slowdown(frozenset(ranks), phase, factor, seconds, swing, last))
        return last

    def congest(self, low: float, high: float) -> None:
        """Slow all collectives, by a share of the step between these limits."""
        extra = self.chance.uniform(low, high) * self.step_seconds
        self.network_factor = 1.0 + extra / self.base["communication"]
        self.network_last_steps = self.chance.randint(26, 60)

    def hang(self, kinds: Mapping[int, str] | None = None, seconds: float | None = None) -> None:
        self.silence_seconds = seconds or self.chance.uniform(600.0, 1500.0)
        self.kinds |= kinds or {}

    def die(self, rank: int, code: int, lines: Iterable[str] = (), during: str = "productive", echo: str = "") -> None:
        """End one rank; the others lose their peer and end too."""
        self.deaths.append(Death(rank, code, during, self.chance.uniform(20.0, 60.0)))
        self.logs.setdefault(rank, []).extend(lines)
        self.state, self.fatal = "failed", f"rank {rank} on {self.node_of(rank)} ended with code {code}"
        after = self.deaths[0].seconds_ago
        for other in range(self.world):
            if other == rank:
                continue
            self.deaths.append(Death(other, 1 if self.chance.random() < 0.6 else -15, "productive", after - 2.0))
            if echo and self.deaths[-1].code == 1:
                self.logs.setdefault(other, []).append(echo)

    def set(self, metric: str, node: str, after: float, onset_seconds: float | None = None, /, **labels: str) -> None:
        """Set the level of a metric after the onset."""
        key = (metric, node, tuple(sorted(labels.items())))
        old = self.signals[key]
        self.signals[key] = Signal(old.before, after, old.is_counter, old.swing, onset_seconds, old.total, old.burst)

    def show(self, metric: str, node: str, signal: Signal, /, **labels: str) -> None:
        self.signals[(metric, node, tuple(sorted(labels.items())))] = signal

    def hide(self, node: str, metric: str = "", /, **labels: str) -> None:
        """Stop serving these series."""
        wanted = set(labels.items())
        for key in [key for key in self.signals if key[1] == node and wanted <= set(key[2])]:
            if not metric or key[0] == metric:
                del self.signals[key]

    # -- the steps -----------------------------------------------------------------------------------------------------

    def simulate(self) -> list[dict[int, dict[str, float]]]:
        """Return for each step: rank → seconds by phase, and `step`."""
        result = []
        for step in range(self.steps):
            left = self.steps - step  # 1: the newest
            common = self.chance.lognormvariate(0.0, self.common_swing)
            is_new = not self.age_seconds
            warm = 1.0 + (self.warm_up - 1.0) * (is_new and step == 0) + 0.4 * (is_new and step in (1, 2))
            if left in self.breaks:
                warm = self.warm_up
            late = self.draw_rank() if self.chance.random() < self.outliers else -1
            parts = {rank: self._work(rank, left, common * warm, rank == late) for rank in range(self.world)}
            parts = {rank: {**part, "checkpoint": self._saving(left)} for rank, part in parts.items()}
            slow = self.network_last_steps is None or left <= self.network_last_steps
            collective = self.base["communication"] * self.chance.lognormvariate(0.0, 0.02)
            collective *= self.network_factor if slow else 1.0
            longest = max(sum(part.values()) for part in parts.values())
            for part in parts.values():
                part["communication"] = longest - sum(part.values()) + collective
                part["step"] = sum(part.values())
            result.append(parts)
        return result

    def _work(self, rank: int, left: int, factor: float, is_late: bool) -> dict[str, float]:
        stage = rank * self.pipeline // self.world
        own = {"data": self.base["data"] * self.chance.lognormvariate(0.0, 0.3)}
        own["compute"] = self.base["compute"] * self.speed[rank] * self.chance.lognormvariate(0.0, self.swing) * factor
        own["optimizer"] = self.base["optimizer"] * self.chance.lognormvariate(0.0, self.swing)
        if stage:
            own["compute"] *= 1.0 + 0.12 * stage  # the last stage has the head of the model
        if is_late:
            own["compute"] *= self.chance.uniform(1.2, 1.8)
        for slowdown in self.slowdowns:
            if rank in slowdown.ranks and (slowdown.last_steps is None or left <= slowdown.last_steps):
                swing = self.chance.lognormvariate(0.0, slowdown.swing) if slowdown.swing else 1.0
                own[slowdown.phase] = (own[slowdown.phase] * slowdown.factor + slowdown.seconds) * swing
        return own

    def _saving(self, left: int) -> float:
        """Return the time a checkpoint blocks the step: only the copy into memory."""
        return 0.25 * self.chance.lognormvariate(0.0, 0.2) if (self.steps - left) % 20 == 19 else 0.0

    # -- healthy machines ----------------------------------------------------------------------------------------------

    def _wire(self) -> None:
        for node in self.nodes:
            self._wire_host(node)
            for gpu in range(self.ranks_per_node):
                self._wire_gpu(node, str(gpu))
            for device in range(4):
                self._wire_network(node, f"rdmap{device}s0")

    def _wire_gpu(self, node: str, gpu: str) -> None:
        draw = self.chance.uniform
        gauges = {
            "DCGM_FI_DEV_SM_CLOCK": (GPU_CLOCK_MHZ - draw(0, 45), 0.004),
            "DCGM_FI_DEV_MAX_SM_CLOCK": (GPU_CLOCK_MHZ, 0.0),
            "DCGM_FI_DEV_GPU_UTIL": (draw(96, 100), 0.01),
            "DCGM_FI_DEV_GPU_TEMP": (draw(48, 66), 0.02),
            "DCGM_FI_DEV_POWER_USAGE": (draw(0.78, 0.93) * GPU_WATTS, 0.03),
            "DCGM_FI_DEV_POWER_MGMT_LIMIT": (GPU_WATTS, 0.0),
            "DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF": (GPU_WATTS, 0.0),
            "DCGM_FI_DEV_ROW_REMAP_FAILURE": (0.0, 0.0),
            "DCGM_FI_DEV_ROW_REMAP_PENDING": (0.0, 0.0),
            "craton_gpu_nvlink_links": (18.0, 0.0),
            "craton_gpu_nvlink_active_links": (18.0, 0.0),
            "DCGM_FI_DEV_PCIE_LINK_WIDTH": (16.0, 0.0),
            "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": (16.0, 0.0),
        }
        for metric, (level, swing) in gauges.items():
            self.show(metric, node, Signal(level, swing=swing), gpu=gpu)
        for reason in ("sw_power_cap", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"):
            self.show("craton_gpu_clocks_held", node, Signal(0.0), gpu=gpu, reason=reason)
        counters = {
            "DCGM_FI_DEV_THERMAL_VIOLATION": 0.0,
            "DCGM_FI_DEV_RELIABILITY_VIOLATION": 0.0,
            "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION": 0.0,
            "DCGM_FI_DEV_POWER_VIOLATION": draw(0, 2e6),  # a busy GPU reaches its limit now and then
            "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 0.0,
            "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 0.0,
            "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 0.0,
            "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 0.0,
            "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 0.0,
            "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 0.0,
            "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 0.0,
        }
        for metric, rate in counters.items():
            self.show(metric, node, Signal(rate, is_counter=True, total=0.0), gpu=gpu)

    def _wire_network(self, node: str, device: str) -> None:
        labels = {"device": device, "port": "1"}
        sent = self.chance.uniform(4.6e9, 5.4e9)
        again = sent * self.chance.uniform(0.0, 4e-6)
        for metric, rate in {
            "node_amazonefa_tx_bytes": sent,
            "node_amazonefa_rx_bytes": sent * self.chance.uniform(0.98, 1.02),
            "node_amazonefa_retrans_bytes": again,
            "node_amazonefa_rx_drops": self.chance.choice((0.0, 0.0, 0.02)),
            "node_amazonefa_rdma_read_wr_err": 0.0,
            "node_amazonefa_rdma_write_wr_err": 0.0,
            "node_amazonefa_unresponsive_remote_events": 0.0,
            "node_amazonefa_impaired_remote_conn_events": 0.0,
        }.items():
            self.show(metric, node, Signal(rate, is_counter=True, swing=0.02, total=rate * 3600.0), **labels)
        self.show("node_infiniband_state_id", node, Signal(4.0), **labels)

    def _wire_host(self, node: str) -> None:
        for cpu in range(4):
            for mode, share in (("idle", 0.72), ("user", 0.27), ("steal", 0.0)):
                self.show("node_cpu_seconds_total", node, Signal(share, is_counter=True), cpu=str(cpu), mode=mode)
        total = 2e12
        gauges = {
            "node_load1": (USUAL_LOAD / 10.0, 0.1),  # of 4 CPUs: ranks, loaders
            "node_memory_MemTotal_bytes": (total, 0.0),
            "node_memory_MemAvailable_bytes": (total * self.chance.uniform(0.5, 0.8), 0.01),
            "node_timex_offset_seconds": (self.chance.uniform(-2e-4, 2e-4), 0.2),
        }
        for metric, (level, swing) in gauges.items():
            self.show(metric, node, Signal(level, swing=swing))
        counters = {
            "node_pressure_cpu_waiting_seconds_total": self.chance.uniform(0.005, 0.03),
            "node_pressure_memory_stalled_seconds_total": 0.0,
            "node_pressure_io_stalled_seconds_total": self.chance.uniform(0.0, 0.004),
            "node_vmstat_pswpin": 0.0,
            "node_vmstat_pswpout": 0.0,
            "node_vmstat_oom_kill": 0.0,
        }
        for metric, rate in counters.items():
            self.show(metric, node, Signal(rate, is_counter=True, swing=0.1, total=rate * 3600.0))
        for mount, kind, size, full in (
            ("/fsx", "lustre", 5e13, 0.55),
            ("/scratch", "xfs", 3e13, 0.2),
            ("/", "ext4", 2e11, 0.4),
        ):
            labels = {"device": f"{kind}-device", "fstype": kind, "mountpoint": mount}
            share = full * self.chance.uniform(0.8, 1.2)
            for metric, level in {
                "node_filesystem_size_bytes": size,
                "node_filesystem_avail_bytes": size * (1.0 - share),
                "node_filesystem_files": 1e9,
                "node_filesystem_files_free": 9e8,
                "node_filesystem_readonly": 0.0,
                "node_filesystem_device_error": 0.0,
            }.items():
                self.show(metric, node, Signal(level), **labels)
        requests = self.chance.uniform(80.0, 200.0)
        for target in ("fsx-OST0000-osc", "fsx-OST0001-osc"):
            labels = {"component": "client", "target": target}
            seconds = requests * self.chance.uniform(0.0015, 0.003)
            self.show("craton_lustre_requests_total", node, Signal(requests, is_counter=True, total=0.0), **labels)
            self.show(
                "craton_lustre_request_seconds_total", node, Signal(seconds, is_counter=True, total=0.0), **labels
            )
            self.show("craton_lustre_connected", node, Signal(1.0), **labels)
        for metric in ("lustre_read_bytes_total", "lustre_write_bytes_total"):
            self.show(
                metric, node, Signal(requests * 1e6, is_counter=True, swing=0.2), component="client", target="fsx"
            )
