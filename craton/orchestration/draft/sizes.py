"""Plan a job on other numbers of the same nodes: which sizes can be trained, and the plan of each.

A returned size can be trained: its layout divides the batch and fits in memory. A node does not change with their
number, so the nodes of a smaller run on this machine are no larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from craton.errors import CratonError
from craton.formatting import counted, memory
from craton.infrastructure import Cluster, resized_cluster
from craton.job import TRAINING_KINDS, Job, JobError, LayoutError, checked_layout
from craton.job.layout import Layout
from craton.orchestration.errors import StartError
from craton.planning import Plan, plan

STATES = ("parameters", "gradients", "optimizer states")  # parts of memory independent of the batch
GIBIBYTE = 2**30
NEAREST_TRIED = 64  # sizes tried on either side of one that is not possible


@dataclass(frozen=True)
class Size:
    """A job on this number of nodes."""

    num_nodes: int
    layout: Layout
    plan: Plan | None  # None: a model given as a function

    @property
    def step_seconds(self) -> float | None:
        return self.plan.step_seconds if self.plan else None

    @property
    def layout_json(self) -> dict[str, Any]:
        """The layout as in plan.json."""
        return asdict(self.layout)


def with_fitting_layout(job: Job, num_ranks: int) -> Job:
    """Return the job for another number of ranks, for `resize` and `resume`: with its own layout if that fits this
    number of ranks, else with one that the planner chooses."""
    try:
        checked_layout(job, num_ranks, trained=True)
    except JobError:
        return with_chosen_layout(job)
    return job


def with_chosen_layout(job: Job) -> Job:
    return job.model_copy(update={"layout": None})


def plan_size(job: Job, num_nodes: int, ranks_per_node: int, cluster: Cluster | None) -> Size:
    """Plan the job on `num_nodes` of its nodes; an error says why it cannot run there. Without a cluster there is no
    plan, as for a model that is a function."""
    if cluster is None:
        return Size(num_nodes, _unplanned_layout(job, num_nodes * ranks_per_node), None)
    size_plan = plan(job, cluster=resized_cluster(cluster, num_nodes, job.cluster.file))
    check_offload(job, size_plan)
    check_memory(job, size_plan)
    return Size(num_nodes, size_plan.layout, size_plan)


def elastic_sizes(
    job: Job, ranks_per_node: int, largest: Plan | None, progress: Callable[[int, int, str], None] | None = None
) -> tuple[list[Size], dict[int, str]]:
    """Return every size that an elastic job can run on, smallest first, and why others are not possible. The list is
    empty if only the largest is possible."""
    cluster = largest.cluster if largest else None
    most = cluster.num_nodes if cluster else job.cluster.num_nodes
    counts = range(job.cluster.min_nodes, most)
    sizes, refused = [], {}
    for done, count in enumerate(counts):
        if progress:
            progress(done, len(counts), counted(count, "node"))
        try:
            sizes.append(plan_size(job, count, ranks_per_node, cluster))
        except CratonError as error:
            refused[count] = str(error)
    if sizes and largest is not None:
        sizes.append(Size(most, largest.layout, largest))
    elif sizes:
        sizes.append(plan_size(job, most, ranks_per_node, None))
    return sizes, refused


def nearest_sizes(job: Job, wanted: int, ranks_per_node: int, cluster: Cluster | None) -> list[int]:
    """Return the nearest numbers of nodes below and above `wanted` on which the job can be trained."""
    below = range(wanted - 1, max(0, wanted - 1 - NEAREST_TRIED), -1)
    above = range(wanted + 1, wanted + 1 + NEAREST_TRIED)
    counts_found = (_first_possible(job, counts, ranks_per_node, cluster) for counts in (below, above))
    return [count for count in counts_found if count is not None]


def check_offload(job: Job, job_plan: Plan) -> None:
    if job_plan.layout.offload != "none":
        raise StartError(
            f"{job.where('layout', 'offload')}offload {job_plan.layout.offload} can be planned but not trained yet; "
            "write offload: none"
        )


def check_memory(job: Job, job_plan: Plan) -> None:
    """Refuse before launch a job that would run out of memory, and suggest changes."""
    if job_plan.fits:
        return
    largest = sorted(job_plan.memory_parts.items(), key=lambda part: -part[1])[:2]
    parts = " and ".join(f"{name} {memory(size)}" for name, size in largest)
    raise StartError(
        f"{job.where('layout' if job.layout else 'cluster')}{job.name} does not fit {job_plan.cluster.name}: a rank "
        f"needs {memory(job_plan.memory_bytes)} of {memory(job_plan.memory_limit_bytes)} ({parts}); use "
        f"{' or '.join(_relief(job, job_plan))}"
    )


def _first_possible(job: Job, counts: Iterable[int], ranks_per_node: int, cluster: Cluster | None) -> int | None:
    for count in counts:
        try:
            plan_size(job, count, ranks_per_node, cluster)
        except CratonError:
            continue
        return count
    return None


def _unplanned_layout(job: Job, world: int) -> Layout:
    """Return the layout that the training loop chooses without a plan."""
    assert job.kind in TRAINING_KINDS, f"kind {job.kind} has no layout"
    layout = job.fixed_layout(world) or Layout(fsdp=world, precision=job.precision)
    if layout.world != world or job.global_batch_sequences % (layout.data_parallel * layout.micro_batch):
        raise LayoutError(
            f"{job.where('layout')}{job.global_batch_sequences} sequences per step cannot be divided among {world} "
            f"ranks with {layout}"
        )
    return layout


def _relief(job: Job, job_plan: Plan) -> list[str]:
    """Return changes that would make the job fit, the smallest first."""
    fitting = [
        alternative.layout
        for alternative in job_plan.alternatives
        if alternative.fits and alternative.cluster == job_plan.cluster.name
    ]
    if fitting:
        return [f"the layout {fitting[0]}"]
    relief = []
    if sum(job_plan.memory_parts.get(name, 0.0) for name in STATES) < job_plan.memory_limit_bytes:
        if job_plan.layout.micro_batch > 1:
            relief.append("layout: {micro_batch: 1}")
        if job_plan.layout.recompute != "full":
            relief.append("layout: {recompute: full}")
        relief.append("a shorter data.sequence")
    sharers = job_plan.cluster.instance.nodes_per_gpu
    return [*relief, "a smaller model", "fewer ranks on each GPU" if sharers > 1 else "more or larger machines"]
