"""Move a run off one of its nodes: to a spare at the next step, else through its scheduler with a checkpoint.

- A spare is ready: the agents leave the node (RUN/avoid.json). A training run loses no step; a command is stopped and
  restarted.
- Slurm: the job saves, exits and is requeued, as before its time limit. Slurm may allocate a node again unless it is
  drained.
- Kubernetes: the pod on that node is deleted; the run saves and its pods are recreated. Cordon the node to avoid it.
- This machine without a spare: the run cannot move.
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
    """How a run moves off a node, or why it cannot."""

    run: str
    node: str  # its name in the run
    how: str  # spare, requeue, pod, or "" if it cannot
    sentence: str


def hosts_of(run: RunDirectory) -> dict[str, str]:
    """Return node of the run → the scheduler's name for it, or its own name on this machine. Unknown nodes are left
    out."""
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
    """Return the nodes whose ranks compute now."""
    newest, launch = newest_generation(run), read_launch(run)
    is_present = newest is not None and newest.number >= launch.generation
    return list(newest.nodes) if newest is not None and is_present else launch.nodes[: launch.working_nodes]


def spare_nodes(run: RunDirectory, bad: Collection[str] = ()) -> list[str]:
    """Return nodes that are alive, idle, not excluded, and not on one of these bad hosts."""
    launch, working, avoided = read_launch(run), working_nodes(run), read_avoided(run)
    hosts = hosts_of(run) if bad else {}
    idle = [node for node in launch.nodes if node not in working and node not in avoided and hosts.get(node) not in bad]
    beats = {node: read_heartbeat(run, node) for node in idle}
    return [
        node
        for node, beat in beats.items()
        if beat is not None
        and beat.state in ("running", "spare")  # a node that joined late does not know yet that it is a spare
        and beat.generation == launch.generation
        and not beat.is_lost()
    ]


def plan_evacuation(run: RunDirectory, node: str, bad: Collection[str] = ()) -> Evacuation:
    """Plan how the run would move to a node that is not on a bad host; change nothing."""
    if node not in working_nodes(run):
        return Evacuation(run.name, node, "", f"{run.name} does not compute on {node}")
    promised = [
        working_node
        for working_node in working_nodes(run)
        if working_node in read_avoided(run) and working_node != node
    ]
    if spares := spare_nodes(run, bad)[len(promised) :]:
        cost = "no step is lost" if read_launch(run).nursery else "the command is stopped and restarted"
        return Evacuation(run.name, node, "spare", f"{spares[0]}, a spare, takes the place of {node}; {cost}")
    on = read_submission(run).on
    if on == "slurm":
        return Evacuation(run.name, node, "requeue", "it saves a checkpoint and is requeued on other nodes")
    if on == "kubernetes":
        return Evacuation(run.name, node, "pod", "it saves a checkpoint, and its pods are recreated on other nodes")
    why = f"{run.name} has no spare to take the place of {node}; `recover: {{spares: 1}}` gives it one"
    return Evacuation(run.name, node, "", why)


def evacuate(run: RunDirectory, node: str, mark: str = "", bad: Collection[str] = ()) -> Evacuation:
    """Move the run off a node, under the caller's mark; RunStateError if it does not run or cannot move."""
    check_running(run, "move")
    way = plan_evacuation(run, node, bad)
    if way.how == "spare":
        working, avoided = working_nodes(run), read_avoided(run)
        for own, host in hosts_of(run).items():  # the agents choose among all spares that are not excluded
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
    """Let the run use the nodes again, as spares, that it left under this mark; return them."""
    nodes = [node for node, theirs in read_avoided(run).items() if theirs == mark]
    for node in nodes:
        welcome_node(run, node)
    return nodes
