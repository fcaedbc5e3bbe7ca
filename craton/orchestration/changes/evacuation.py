"""A run leaves one of its nodes: for a spare of its own at the next step, else through its scheduler with a checkpoint.

- A spare is ready: the agents are asked to leave the node (RUN/avoid.json). A run that trains loses no step; a
  command is told to stop, and starts again.
- Slurm: the job saves, leaves and is requeued, as before its time limit. A node that is not drained is given again.
- Kubernetes: the pod on that node is told to end; the run saves and its pods are made again. The same holds there.
- This machine without a spare: there is nowhere to go.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from craton.agent import newest_generation, read_launch
from craton.agent.coordination import avoid_node, read_avoided, welcome_node
from craton.infrastructure.topology import natural
from craton.orchestration.backend import read_submission
from craton.orchestration.errors import RunStateError
from craton.orchestration.watching import check_running
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.node import read_heartbeat


@dataclass(frozen=True)
class Evacuation:
    """How a run leaves a node, or why it cannot."""

    run: str
    node: str  # the run's own name of it
    how: str  # spare, requeue, pod, or "" where it cannot
    sentence: str


def hosts_of(run: RunDirectory) -> dict[str, str]:
    """Node of the run → what the scheduler calls it; on this machine its own name. Those that are not known are not in
    it."""
    on = read_submission(run).on
    launch = read_launch(run)
    if on == "slurm":
        from craton.orchestration.slurm import read_allocation

        allocation = read_allocation(run)
        return {node.name: node.host for node in allocation.nodes} if allocation else {}
    if on == "kubernetes":
        answers = [
            str(read_json(run.path / "hosts" / f"{index}.json").get("host") or "") for index in range(len(launch.nodes))
        ]
        named = zip(sorted(launch.nodes, key=natural), answers, strict=True)  # pod 3 is node-3, whatever its rank
        return {node: host for node, host in named if host}
    return {node: node for node in launch.nodes}


def working_nodes(run: RunDirectory) -> list[str]:
    """The nodes whose ranks compute now."""
    newest, launch = newest_generation(run), read_launch(run)
    is_present = newest is not None and newest.number >= launch.generation
    return list(newest.nodes) if newest is not None and is_present else launch.nodes[: launch.working_nodes]


def spare_nodes(run: RunDirectory, bad: Collection[str] = ()) -> list[str]:
    """Nodes that are there, idle, not to be avoided, and not on one of these bad hosts."""
    launch, working, avoided = read_launch(run), working_nodes(run), read_avoided(run)
    hosts = hosts_of(run) if bad else {}
    idle = [node for node in launch.nodes if node not in working and node not in avoided and hosts.get(node) not in bad]
    beats = {node: read_heartbeat(run, node) for node in idle}
    return [
        node
        for node, beat in beats.items()
        if beat is not None
        and beat.state in ("running", "spare")  # one that came after the generation began has not heard that it idles
        and beat.generation == launch.generation
        and not beat.is_lost()
    ]


def plan_evacuation(run: RunDirectory, node: str, bad: Collection[str] = ()) -> Evacuation:
    """How the run would leave the node for one that is not on a bad host; nothing is done."""
    if node not in working_nodes(run):
        return Evacuation(run.name, node, "", f"{run.name} does not compute on {node}")
    promised = [
        working_node
        for working_node in working_nodes(run)
        if working_node in read_avoided(run) and working_node != node
    ]
    if spares := spare_nodes(run, bad)[len(promised) :]:
        cost = "no step is lost" if read_launch(run).nursery else "the command is told to stop, and starts again"
        return Evacuation(run.name, node, "spare", f"{spares[0]}, a spare, takes the place of {node}; {cost}")
    on = read_submission(run).on
    if on == "slurm":
        return Evacuation(run.name, node, "requeue", "it saves, leaves and is requeued to other nodes")
    if on == "kubernetes":
        return Evacuation(run.name, node, "pod", "it saves, and its pods are made again on other nodes")
    why = f"{run.name} has no spare to take the place of {node}; `recover: {{spares: 1}}` gives it one"
    return Evacuation(run.name, node, "", why)


def evacuate(run: RunDirectory, node: str, mark: str = "", bad: Collection[str] = ()) -> Evacuation:
    """Does it, under the mark of who wants it; RunStateError for a run that does not run, or has nowhere to go."""
    check_running(run, "move")
    way = plan_evacuation(run, node, bad)
    if way.how == "spare":
        working, avoided = working_nodes(run), read_avoided(run)
        for own, host in hosts_of(run).items():  # the agents choose among all spares that are not to be avoided
            if host in bad and own not in working and own not in avoided:
                avoid_node(run, own, mark)
        avoid_node(run, node, mark)
    elif way.how == "requeue":
        from craton.orchestration.slurm import warn

        warn(read_submission(run).job)
    elif way.how == "pod":
        from craton.orchestration.kubernetes import end_pods_on

        end_pods_on(run, hosts_of(run).get(node, ""))
    else:
        raise RunStateError(way.sentence)
    return way


def come_back(run: RunDirectory, mark: str) -> list[str]:
    """What was left under this mark may be used by the run again, as spares; these nodes."""
    nodes = [node for node, theirs in read_avoided(run).items() if theirs == mark]
    for node in nodes:
        welcome_node(run, node)
    return nodes
