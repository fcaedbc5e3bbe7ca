"""Pods find out where they are and put themselves in order, before the agents of a run start.

A pod's number is given before anyone knows where it goes. So the first pod calls, the others answer with the node of
the cluster that they are on, and the first writes the run's nodes in the order in which their ranks should be
neighbours. Names stay with the pods (pod 3 is node-3); what changes is the order in launch.json, which is that of
ranks. Answers lie in RUN/hosts, one file a pod; one to an earlier call does not count.

The call is over when all have answered, or enough to begin and a moment has passed. A run that could not begin without
the missing ones loses nothing by it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from craton.agent import Launch
from craton.errors import CratonError
from craton.infrastructure import resolve_cluster
from craton.infrastructure.topology import natural
from craton.job import load_job
from craton.job.layout import Layout
from craton.orchestration.kubernetes.places import Places
from craton.orchestration.kubernetes.podfile import write_whole
from craton.orchestration.placement import audit, layout_of, order_nodes
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import LineWriter

LOOK_SECONDS = 0.2
STRAGGLER_SECONDS = 20.0  # that pods beyond those needed are waited for: spares, the rest of an elastic run


def node_of(launch: Launch, index: int) -> str | None:
    """The name of a pod's node, which does not depend on the order of ranks."""
    names = sorted(launch.nodes, key=natural)
    return names[index] if index < len(names) else None


def answer(run: RunDirectory, index: int, call: str, host: str) -> None:
    write_whole(run.path / "hosts" / f"{index}.json", json.dumps({"call": call, "host": host}) + "\n")


def gather(run: RunDirectory, launch: Launch, call: str, waiting: Callable[[int, int], bool]) -> dict[str, str] | None:
    """Node of the run → node of the cluster. `waiting` is told how many of how many are there, and whether to go on
    waiting is its answer; None when it was not."""
    needed = launch.min_nodes or launch.working_nodes
    enough_since: float | None = None
    while True:
        hosts = answers(run, launch, call)
        if len(hosts) == len(launch.nodes):
            return hosts
        if len(hosts) < needed:
            enough_since = None
        elif enough_since is None:
            enough_since = time.monotonic()
        if enough_since is not None and time.monotonic() - enough_since >= STRAGGLER_SECONDS:
            return hosts
        if not waiting(len(hosts), needed):
            return None
        time.sleep(LOOK_SECONDS)


def answers(run: RunDirectory, launch: Launch, call: str) -> dict[str, str]:
    result = {}
    for index in range(len(launch.nodes)):
        document = read_json(run.path / "hosts" / f"{index}.json")
        if document.get("call") == call and (node := node_of(launch, index)):
            result[node] = str(document.get("host", ""))
    return result


def in_order(launch: Launch, hosts: Mapping[str, str], places: Places, layout: Layout | None) -> Launch:
    """Neighbours in the order of ranks are neighbours in the network. Who has not answered comes last."""
    addresses = {node: places.addresses.get(host, ()) for node, host in hosts.items()}
    ordered = order_nodes(addresses, layout, launch.ranks_per_node)
    missing = sorted(set(launch.nodes) - set(ordered), key=natural)
    leaf = places.levels.index("leaf") if "leaf" in places.levels else None
    leaves = {} if leaf is None else {node: path[leaf] for node, path in addresses.items() if path}
    return replace(launch, nodes=[*ordered, *missing], leaves=leaves)


def sentences(run: RunDirectory, launch: Launch, hosts: Mapping[str, str], places: Places) -> list[str]:
    """The placement that was asked for beside the one that was got, and what the plan says of the difference."""
    working = {node: hosts[node] for node in launch.nodes[: launch.working_nodes] if node in hosts}
    new = dict.fromkeys(host for host in working.values() if host not in places.addresses)
    layout = layout_of(read_json(run.plan_path))
    try:
        job = load_job(run.job_path)
        result = audit(
            {node: places.addresses.get(host, ()) for node, host in working.items()},
            job.placement,
            layout,
            launch.ranks_per_node,
            levels=places.levels,
            job=job,
            cluster=None if job.cluster.is_local or layout is None else resolve_cluster(job.cluster, job.price),
        ).sentences()
    except CratonError as error:
        result = [f"what was got cannot be compared with what was asked for: {error}"]
    if new:
        result.append(f"where {', '.join(new)} is was not known when the run was handed in")
    return result


def tell(run: RunDirectory, generation: int, event: str, message: str) -> None:
    """For people, in the events of the run."""
    line = {
        "time": time.time(),
        "step": 0,
        "generation": generation,
        "node": "kubernetes",
        "rank": None,
        "event": event,
        "message": message,
    }
    writer = LineWriter(run.events_path("kubernetes"))
    writer.append([json.dumps(line).encode()])
    writer.close()
