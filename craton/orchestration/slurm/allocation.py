"""Slurm's allocation: the host of each node of the run, its place in the network topology, and its address.

Nodes of a run keep their names (node-0, node-1, …) over all allocations, so that their files continue; the hosts behind
them change. RUN/allocation.json has the current mapping.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from craton.infrastructure.topology import expand as expand_hosts
from craton.orchestration.slurm.records import NodeRecord, SwitchRecord
from craton.telemetry import RunDirectory, read_json

if TYPE_CHECKING:
    from craton.job.layout import Layout

ALLOCATION_FILE = "allocation.json"


@dataclass(frozen=True)
class AllocatedHost:
    """One node of the run and its current host."""

    name: str  # node-3
    host: str  # Slurm's name
    address: str  # at which other nodes reach it
    leaf: str = ""  # its leaf switch; "": unknown
    path: tuple[str, ...] = ()  # its switches, broadest first


@dataclass(frozen=True)
class Allocation:
    job: str
    restarts: int
    nodes: tuple[AllocatedHost, ...]  # in the order of ranks
    others: tuple[AllocatedHost, ...] = ()  # further nodes of the job, for members of the run

    @property
    def hosts(self) -> list[str]:
        return [node.host for node in self.nodes]

    @property
    def all_hosts(self) -> list[str]:
        return [node.host for node in (*self.nodes, *self.others)]

    def part(self, names: Sequence[str], hosts: Sequence[str]) -> Allocation:
        """Return the allocation of a member: its nodes have these names, on these hosts."""
        places = {node.host: node for node in (*self.nodes, *self.others)}
        nodes = tuple(replace(places[host], name=name) for name, host in zip(names, hosts, strict=True))
        return Allocation(self.job, self.restarts, nodes)

    @property
    def leaves(self) -> dict[str, str]:
        return {node.name: node.leaf for node in self.nodes if node.leaf}


def allocate(
    job: str,
    restarts: int,
    names: Sequence[str],
    hosts: Iterable[str],
    nodes: Iterable[NodeRecord],
    switches: Iterable[SwitchRecord],
    layout: Layout | None = None,
    ranks_per_node: int = 1,
) -> Allocation:
    """Assign the hosts, ordered by topology, to the run's node names."""
    from craton.orchestration.placement import order_nodes

    addresses = {node.name: node.address for node in nodes}
    paths = switch_paths(switches)
    ordered = order_nodes({host: paths.get(host, ()) for host in hosts}, layout, ranks_per_node)
    assert len(ordered) >= len(names), f"{len(names)} nodes are needed, {len(ordered)} were given"
    further = [f"node-{number}" for number in range(len(names), len(ordered))]
    placed = tuple(
        AllocatedHost(name, host, addresses.get(host, host), (paths.get(host) or ("",))[-1], paths.get(host, ()))
        for name, host in zip([*names, *further], ordered, strict=True)
    )
    return Allocation(job, restarts, placed[: len(names)], placed[len(names) :])


def job_number(environment: Mapping[str, str]) -> str:
    """Return the ID of the Slurm job that this process belongs to."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def switch_paths(switches: Iterable[SwitchRecord]) -> dict[str, tuple[str, ...]]:
    """Return host → the switches above it, broadest first."""
    levels: dict[str, list[tuple[int, str]]] = {}
    for switch in switches:
        for host in expand_hosts(switch.nodes):
            levels.setdefault(host, []).append((switch.level, switch.name))
    return {host: tuple(name for _, name in sorted(above, reverse=True)) for host, above in levels.items()}


def write_allocation(run: RunDirectory, allocation: Allocation) -> None:
    path = run.path / ALLOCATION_FILE
    fresh = path.with_name(f".{ALLOCATION_FILE}.{os.getpid()}")
    fresh.write_text(json.dumps(asdict(allocation), indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def read_allocation(run: RunDirectory) -> Allocation | None:
    """Read allocation.json; None before the first start of the run."""
    document = read_json(Path(run.path) / ALLOCATION_FILE)
    try:
        nodes, others = (
            tuple(AllocatedHost(**{**node, "path": tuple(node.get("path", ()))}) for node in listed)
            for listed in (document["nodes"], document.get("others", ()))
        )
        return Allocation(str(document["job"]), int(document["restarts"]), nodes, others)
    except (KeyError, TypeError, ValueError):
        return None
