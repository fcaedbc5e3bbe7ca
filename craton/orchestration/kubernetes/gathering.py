"""Order the ranks by topology, once the pods know their nodes and before the agents of a run start.

A pod's index is fixed before the pod is scheduled. So the first pod issues a call, the others answer with their cluster
node, and the first orders the run's nodes so that neighbouring ranks are close in the network. Names stay with the pods
(pod 3 is node-3); only the order in launch.json, which is the order of ranks, changes. Answers are in RUN/hosts, one
file per pod; an answer to an earlier call does not count.

The call ends when all pods have answered, or when enough have and a short wait has passed. A run that cannot start
without the missing pods loses nothing by waiting.
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
STRAGGLER_SECONDS = 20.0  # wait for pods beyond the minimum: spares, the rest of an elastic run


def node_of(launch: Launch, index: int) -> str | None:
    """Return the name of a pod's node, which does not depend on the order of ranks."""
    names = sorted(launch.nodes, key=natural)
    return names[index] if index < len(names) else None


def answer(run: RunDirectory, index: int, call: str, host: str) -> None:
    write_whole(run.path / "hosts" / f"{index}.json", json.dumps({"call": call, "host": host}) + "\n")


def gather(run: RunDirectory, launch: Launch, call: str, waiting: Callable[[int, int], bool]) -> dict[str, str] | None:
    """Return node of the run → node of the cluster. `waiting` gets the number of answers and the number needed, and
    returns whether to keep waiting; None if it stopped the wait."""
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
    """Order the nodes so that neighbouring ranks are close in the network. Pods without an answer come last."""
    addresses = {node: places.addresses.get(host, ()) for node, host in hosts.items()}
    ordered = order_nodes(addresses, layout, launch.ranks_per_node)
    missing = sorted(set(launch.nodes) - set(ordered), key=natural)
    leaf = places.levels.index("leaf") if "leaf" in places.levels else None
    leaves = {} if leaf is None else {node: path[leaf] for node, path in addresses.items() if path}
    return replace(launch, nodes=[*ordered, *missing], leaves=leaves)


def sentences(run: RunDirectory, launch: Launch, hosts: Mapping[str, str], places: Places) -> list[str]:
    """Compare the requested placement with the actual one, with the cost of the difference by the plan."""
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
        result = [f"the placement cannot be compared with the requested one: {error}"]
    if new:
        result.append(f"the topology of {', '.join(new)} was unknown when the run was submitted")
    return result


def record_event(run: RunDirectory, generation: int, event: str, message: str) -> None:
    """Write an event with a message to the run's events."""
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
