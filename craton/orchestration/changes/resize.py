"""Change the number of nodes of a running run; the run's coordinator decides, moves and restores.

`draft_resize` plans the new size or names the nearest possible ones. `resize_run` writes the request (launch.json with
the names of new nodes, plans/N.json, and last resize.json, which the agents watch) and starts missing agents. On a
cluster a run keeps its allocated nodes: those without work are its spares.
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
    """A planned change of a run's number of nodes."""

    size: Size
    launch: Launch
    before: int  # nodes that work now


def draft_resize(run: RunDirectory, num_nodes: int) -> Resize:
    """Plan the run on this number of nodes; a StartError names the nearest possible numbers."""
    check_running(run, "resize")
    job, launch = load_job(run.job_path), read_launch(run)
    if job.kind not in TRAINING_KINDS:
        raise RunStateError(
            f"{run.name} is of kind {job.kind}, which Craton cannot resize in place; run `craton stop {run.name}`, "
            f"then `craton resume {run.name} --cluster '{job.cluster.instance} x {num_nodes}'`"
        )
    newest = newest_generation(run)
    before = len(newest.nodes) if newest else launch.working_nodes
    if num_nodes == before and resized_nodes(run) in (None, before):
        raise RunStateError(f"{run.name} already runs on {counted(before, 'node')}")
    is_local = read_submission(run).on == "local"
    check_is_seen(
        run,
        f"run `craton stop {run.name}`, then `craton resume {run.name} --cluster 'FILE x {num_nodes}'`, where FILE is "
        "the absolute path of its cluster file",
    )
    if is_local:
        check_within_cluster(job, num_nodes)
    else:
        check_within_allocation(run, launch, job, num_nodes)
    share_gpus = job.run.share_gpus
    cluster = resolve_cluster(job.cluster, job.price, share_gpus=share_gpus) if job.model_shape is not None else None
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
    """Request the new size. Return the nodes whose agents were started."""
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
        if run.plan_path.exists() and not present.exists():  # to resize back
            write_whole(present, read_regular_text(run.plan_path))
        if size.plan is not None:
            write_whole(plans / f"{size.num_nodes}.json", plan_text(size.plan))
        order = {"nodes": size.num_nodes, "layout": size.layout_json, "time": time.time()}
        write_whole(run.resize_path, json.dumps(order, indent=1) + "\n")
        return [agent.node for agent in start_agents(run, wanted.launch, added)] if added else []


def _missing_agents(run: RunDirectory, wanted: Resize) -> list[int]:
    """Return the positions of the nodes whose agents must be started for the new size."""
    if read_submission(run).on != "local":
        return []  # the agents of all its nodes already run
    living = {agent.node for agent in living_agents(run)}
    dead = [number for number, node in enumerate(wanted.launch.nodes) if node not in living]
    return dead[: max(0, wanted.size.num_nodes - len(living))]


def resized_nodes(run: RunDirectory) -> int | None:
    """Return the number of nodes that was last requested, or None."""
    nodes = read_json(run.resize_path).get("nodes")
    return nodes if isinstance(nodes, int) and nodes > 0 else None


def has_resized(run: RunDirectory, num_nodes: int, since: float) -> bool:
    """Whether a generation of this size has started since then and completed a step."""
    newest = newest_generation(run)
    if newest is None or len(newest.nodes) != num_nodes or newest.time < since:
        return False
    lines = tail_lines(run.metrics_path(newest.nodes[0]), TAIL_BYTES)
    return any(line.get("rank") == 0 and line.get("generation") == newest.number for line in lines)


def check_within_cluster(job: Job, num_nodes: int) -> None:
    if not job.cluster.is_local and num_nodes > 1:
        raise StartError(
            f"{counted(num_nodes, 'node')} of {job.cluster.instance} are more than this machine has; start the job "
            "with --on slurm or --on kubernetes"
        )


def check_within_allocation(run: RunDirectory, launch: Launch, job: Job, num_nodes: int) -> None:
    """Refuse more nodes than the scheduler allocated: it allocates a job's nodes once."""
    if num_nodes > len(launch.nodes):
        raise StartError(
            f"{run.name} has {counted(len(launch.nodes), 'node')} allocated, and a scheduler adds none to a running "
            f"job; run `craton stop {run.name}`, then `craton resume {run.name} --cluster "
            f"'{job.cluster.instance} x {num_nodes}'`"
        )


def among_nodes(launch: Launch, num_nodes: int) -> Launch:
    """Return a launch on the same nodes with `num_nodes` working. The others stay as spares: a pod that exits with 0 is
    never recreated, and without the first pod no other can start."""
    return replace(launch, num_nodes=num_nodes, min_nodes=min(launch.min_nodes, num_nodes))


def with_nodes(launch: Launch, num_nodes: int) -> Launch:
    """Return a launch with enough node names for `num_nodes` working nodes and the spares. No name is removed, because
    working nodes are among them."""
    more = num_nodes - launch.working_nodes
    if more <= 0:
        return launch
    names, number = list(launch.nodes), len(launch.nodes)
    while len(names) < len(launch.nodes) + more:
        if f"node-{number}" not in names:
            names.append(f"node-{number}")
        number += 1
    return replace(launch, nodes=names, num_nodes=num_nodes)
