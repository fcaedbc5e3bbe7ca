"""Fabric metrics: EFA counters under the names of AWS's exporter, InfiniBand counters under those of node_exporter, and
the state of every port.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter.collector import Collector
from craton.observability.exporter.exposition import Sample
from craton.observability.exporter.families import FAMILIES

DEVICES = "sys/class/infiniband"
LOOK_SECONDS = 60.0  # between two scans for added or removed devices
# Files of ports/N/counters → (name after node_infiniband_, unit of one count). Data is counted in words of 4 bytes.
INFINIBAND = {
    "port_xmit_data": ("port_data_transmitted_bytes_total", 4),
    "port_rcv_data": ("port_data_received_bytes_total", 4),
    "port_xmit_packets": ("port_packets_transmitted_total", 1),
    "port_rcv_packets": ("port_packets_received_total", 1),
    "port_xmit_wait": ("port_transmit_wait_total", 1),
    "port_rcv_errors": ("port_errors_received_total", 1),
    "port_xmit_discards": ("port_discards_transmitted_total", 1),
    "port_rcv_constraint_errors": ("port_constraint_errors_received_total", 1),
    "port_xmit_constraint_errors": ("port_constraint_errors_transmitted_total", 1),
    "link_downed": ("link_downed_total", 1),
    "link_error_recovery": ("link_error_recovery_total", 1),
    "symbol_error": ("symbol_error_total", 1),
}
_STATE = re.compile(r"(\d+):")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


@dataclass(frozen=True)
class _Counter:
    name: str  # of the family
    labels: tuple[str, ...]
    path: str
    factor: int


@dataclass(frozen=True)
class _Port:
    labels: tuple[str, ...]
    folder: str


class FabricCollector(Collector):
    name = "fabric"

    def __init__(self, root: NodeRoot) -> None:
        self._root = root
        self._looked = float("-inf")
        self._ports: list[_Port] = []
        self._counters: list[_Counter] = []

    def collect(self, now: float) -> Iterator[Sample]:
        if now - self._looked >= LOOK_SECONDS:
            self._look()
            self._looked = now
        for port in self._ports:
            yield from self._state(port)
        read, gone = self._root.bytes_of, ""
        for counter in self._counters:
            content = read(counter.path)
            try:
                value = int(content)
            except ValueError:
                # A counter that the device lacks reads "N/A (no PMA)"; one that vanished is empty.
                if not content:
                    self.errors += 1
                    gone = gone or counter.path
                continue
            yield counter.name, counter.labels, value * counter.factor
        if gone:
            self.say(f"{gone} is gone or not readable")

    def _look(self) -> None:
        root = self._root
        self._ports, self._counters = [], []
        for device in root.names(DEVICES):
            is_efa = root.link(f"{DEVICES}/{device}/device/driver") == "efa"
            for number in root.names(f"{DEVICES}/{device}/ports"):
                port = _Port((device, number), f"{DEVICES}/{device}/ports/{number}")
                self._ports.append(port)
                self._counters += _efa(root, port) if is_efa else _infiniband(root, port)

    def _state(self, port: _Port) -> Iterator[Sample]:
        for file, name in (("state", "state_id"), ("phys_state", "physical_state_id")):
            if state := _STATE.match(self._root.read(f"{port.folder}/{file}")):
                yield f"node_infiniband_{name}", port.labels, int(state[1])
        if rate := _RATE.match(self._root.read(f"{port.folder}/rate")):
            yield "node_infiniband_rate_bytes_per_second", port.labels, float(rate[1]) * 1e9 / 8


def _efa(root: NodeRoot, port: _Port) -> list[_Counter]:
    folder = f"{port.folder}/hw_counters"
    named = ((f"node_amazonefa_{file}", file) for file in root.names(folder))
    return [_Counter(name, port.labels, f"{folder}/{file}", 1) for name, file in named if name in FAMILIES]


def _infiniband(root: NodeRoot, port: _Port) -> list[_Counter]:
    there = root.names(f"{port.folder}/counters")
    return [
        _Counter(f"node_infiniband_{name}", port.labels, f"{port.folder}/counters/{file}", factor)
        for file, (name, factor) in INFINIBAND.items()
        if file in there
    ]
