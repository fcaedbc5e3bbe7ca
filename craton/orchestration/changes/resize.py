"""Another number of nodes for a run while it runs; what decides, moves and restores is the run's coordinator.

`draft_resize` plans the new size or says which ones are near; `resize_run` writes the wish (launch.json with the names
of new nodes, plans/N.json, and last resize.json, which the agents look for) and starts the agents that are missing.
On a cluster a run keeps the nodes it was given: those that have no work are its spares.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

from craton.agent import Launch, newest_generation, read_launch, write_launch
from craton.errors import CratonError
from craton.formatting import counted
from craton.infrastructure import resolve_cluster
from craton.job import TRAINING_KINDS, Job, load_job
from craton.orchestration.backend import read_submission
from craton.orchestration.draft import Size, nearest_sizes, plan_size, plan_text, with_fitting_layout
from craton.orchestration.errors import RunStateError, StartError
from craton.orchestration.local import check_machine, living_agents, start_agents, with_cards
from craton.orchestration.preflight import check_local
from craton.orchestration.run_files import write_whole
from craton.orchestration.watching import check_is_seen, check_running, launching
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import read_regular_text, tail_lines

TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class Resize:
    """A run on another number of nodes, ready to be asked for."""

    size: Size
    launch: Launch
    before: int  # nodes that work now


def draft_resize(run: RunDirectory, num_nodes: int) -> Resize:
    """Plan the run on so many nodes; a StartError names the nearest numbers that are possible."""
    check_running(run, "resize")
    job, launch = load_job(run.job_path), read_launch(run)
    if job.kind not in TRAINING_KINDS:
        raise RunStateError(
            f"{run.name} is of kind {job.kind}, whose processes Craton cannot move; `craton stop {run.name}`, then "
            f"`craton resume {run.name} --cluster '{job.cluster.instance} x {num_nodes}'`"
        )
    newest = newest_generation(run)
    before = len(newest.nodes) if newest else launch.working_nodes
    if num_nodes == before and resized_nodes(run) in (None, before):
        raise RunStateError(f"{run.name} runs on {counted(before, 'node')} already")
    is_local = read_submission(run).on == "local"
    check_is_seen(
        run,
        f"`craton stop {run.name}`, then `craton resume {run.name} --cluster 'FILE x {num_nodes}'`, where FILE is the "
        "whole path of its cluster file",
    )
    if is_local:
        check_within_cluster(job, num_nodes)
    else:
        check_within_allocation(run, launch, job, num_nodes)
    cluster = resolve_cluster(job.cluster, job.price) if job.model_shape is not None else None
    job = with_fitting_layout(job, num_nodes * launch.ranks_per_node)
    try:
        size = plan_size(job, num_nodes, launch.ranks_per_node, cluster)
    except CratonError as error:
        near = nearest_sizes(job, num_nodes, launch.ranks_per_node, cluster)
        possible = f"; possible: {' or '.join(map(str, near))}" if near else ""
        raise StartError(f"{run.name} cannot run on {counted(num_nodes, 'node')}: {error}{possible}") from None
    grown = with_nodes(launch, num_nodes) if is_local else among_nodes(launch, num_nodes)
    if is_local:
        check_machine(grown)
    layouts = {**grown.layouts, str(num_nodes): size.layout_json}
    if planned := read_json(run.plan_path).get("layout"):
        layouts.setdefault(str(before), planned)
    ready = replace(grown, layouts=layouts)
    return Resize(size, with_cards(ready) if is_local else ready, before)


def resize_run(run: RunDirectory, wanted: Resize) -> list[str]:
    """Ask for the new size. Returns the nodes whose agents had to be started."""
    size = wanted.size
    with launching(run):
        check_running(run, "resize")
        added = _missing_agents(run, wanted)
        if added:
            names = [wanted.launch.nodes[number] for number in added]
            check_local(run, load_job(run.job_path), wanted.launch, nodes=names)
        write_launch(run, wanted.launch)
        plans = run.path / "plans"
        present = plans / f"{wanted.before}.json"
        if run.plan_path.exists() and not present.exists():  # for the way back
            write_whole(present, read_regular_text(run.plan_path))
        if size.plan is not None:
            write_whole(plans / f"{size.num_nodes}.json", plan_text(size.plan))
        order = {"nodes": size.num_nodes, "layout": size.layout_json, "time": time.time()}
        write_whole(run.resize_path, json.dumps(order, indent=1) + "\n")
        return [agent.node for agent in start_agents(run, wanted.launch, added)] if added else []


def _missing_agents(run: RunDirectory, wanted: Resize) -> list[int]:
    """The nodes, by their positions, whose agents must be started for the new size."""
    if read_submission(run).on != "local":
        return []  # the agents of all its nodes are there
    living = {agent.node for agent in living_agents(run)}
    dead = [number for number, node in enumerate(wanted.launch.nodes) if node not in living]
    return dead[: max(0, wanted.size.num_nodes - len(living))]


def resized_nodes(run: RunDirectory) -> int | None:
    """How many nodes were asked for last, if ever."""
    nodes = read_json(run.resize_path).get("nodes")
    return nodes if isinstance(nodes, int) and nodes > 0 else None


def has_resized(run: RunDirectory, num_nodes: int, since: float) -> bool:
    """Whether a generation of this size has begun since then and has done a step."""
    newest = newest_generation(run)
    if newest is None or len(newest.nodes) != num_nodes or newest.time < since:
        return False
    lines = tail_lines(run.metrics_path(newest.nodes[0]), TAIL_BYTES)
    return any(line.get("rank") == 0 and line.get("generation") == newest.number for line in lines)


def check_within_cluster(job: Job, num_nodes: int) -> None:
    if not job.cluster.is_local and num_nodes > 1:
        raise StartError(
            f"{counted(num_nodes, 'node')} of {job.cluster.instance} are more than this machine; start it with "
            "--on slurm or "
            "--on kubernetes"
        )


def check_within_allocation(run: RunDirectory, launch: Launch, job: Job, num_nodes: int) -> None:
    """A scheduler gives a job its nodes once."""
    if num_nodes > len(launch.nodes):
        raise StartError(
            f"{run.name} was given {counted(len(launch.nodes), 'node')}, and a scheduler gives no more to a job "
            "that runs; "
            f"`craton stop {run.name}`, then `craton resume {run.name} --cluster "
            f"'{job.cluster.instance} x {num_nodes}'`"
        )


def among_nodes(launch: Launch, num_nodes: int) -> Launch:
    """A launch of the same nodes, so many of which work. The others are kept as spares: a pod that ends well never
    comes back, not even the first, without which no other begins again."""
    return replace(launch, num_nodes=num_nodes, min_nodes=min(launch.min_nodes, num_nodes))


def with_nodes(launch: Launch, num_nodes: int) -> Launch:
    """A launch that names enough nodes for so many to work beside the spares; none is taken away, for those that work
    now are among them."""
    more = num_nodes - launch.working_nodes
    if more <= 0:
        return launch
    names, number = list(launch.nodes), len(launch.nodes)
    while len(names) < len(launch.nodes) + more:
        if f"node-{number}" not in names:
            names.append(f"node-{number}")
        number += 1
    return replace(launch, nodes=names, num_nodes=num_nodes)
