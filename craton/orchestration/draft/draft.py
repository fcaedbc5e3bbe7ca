"""Step 5 of a start: draft what would be written and started. Nothing here touches a disk, a process or a network.

A returned draft can be launched: its backend exists, its plan fits in memory, and the training loop or serving engine
supports its layout. `--dry-run` prints a draft and a launch starts it; both use the same texts.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from craton.agent import Launch, launch_text
from craton.errors import CratonError
from craton.formatting import counted
from craton.infrastructure import (
    MEMORY_FRACTION,
    CatalogError,
    memory_fraction,
    nodes_per_gpu,
    resolve_cluster,
    visible_accelerators,
)
from craton.job import TRAINING_KINDS, FaultError, Job, dump_job
from craton.job.layout import LayoutSpec
from craton.job.sections import faults_of
from craton.limits import cpu_quota
from craton.orchestration.draft.check import check_job, check_packages, check_rollout_key
from craton.orchestration.draft.choose_backend import backend_name, check_backend
from craton.orchestration.draft.command import command_environment, command_fields, processes_of
from craton.orchestration.draft.members import (
    Members,
    check_no_member_faults,
    checked_members,
    member_jobs,
    report_launch,
)
from craton.orchestration.draft.plan_job import JobPlan, Progress, plan_job
from craton.orchestration.draft.sizes import Size, elastic_sizes
from craton.orchestration.errors import StartError
from craton.orchestration.member_nodes import node_zones
from craton.orchestration.process_commands import agent_command, manager_command
from craton.planning import Plan
from craton.planning.economics import billed_instances
from craton.planning.report import plan_to_json, serving_to_json
from craton.planning.serving import ServePlan
from craton.telemetry.members import MEMBERS_FOLDER, MemberSpec

IMAGE_PYTHON = "python3"  # the interpreter's name in images
TRAINING, POSTTRAINING = "craton.ml.training", "craton.ml.posttraining"
RANK_MODULES = {"serve": "craton.ml.serving", "dpo": POSTTRAINING, "grpo": POSTTRAINING, "eval": "craton.ml.evaluation"}
JOB_FOLDER = "CRATON_JOB_FOLDER"  # environment variable of the ranks: folder of the user's own functions
END_SECONDS = 15.0  # from the last response of a draining server to the end of its ranks
JAX_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the same for JAX
COPY = "CRATON_COPY"  # likewise: the number of this copy in a job with run.copies
STOP_AT = "CRATON_STOP_AT"  # likewise: the step after which the loop saves, sets the STOP marker and ends


@dataclass(frozen=True)
class Draft:
    """A job as it would run: its plan, and how its processes start."""

    job: Job
    plan: Plan | None  # None: a command, or a model given as a function
    launch: Launch
    note: str = ""  # why there is no plan, or how it differs from the best one
    sizes: list[Size] = field(default_factory=list)  # of an elastic job: all possible sizes, the largest last
    serving: ServePlan | None = None  # the plan of a server
    on: str = "local"  # the backend that starts it
    members: Members | None = None  # the runs that it owns

    @property
    def num_ranks(self) -> int:
        return self.launch.world_size

    @property
    def num_spares(self) -> int:
        return len(self.launch.nodes) - self.launch.working_nodes

    @property
    def scheduled_nodes(self) -> int:
        """Nodes that its scheduler's job has: its own, spares included, and those of its members."""
        own = len(self.launch.nodes)
        return own if self.members is None or self.on == "local" else node_zones(self.members.spec, own).total

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of all nodes, spares included; None if unknown."""
        return hourly_price(self.job, self.scheduled_nodes)

    def files(self) -> dict[str, str]:
        """Return name → text of every file that a launch writes into the run directory."""
        texts = {"job.yaml": dump_job(self.job)}
        if self.plan is not None:
            texts["plan.json"] = plan_text(self.plan)
        if self.serving is not None:
            texts["plan.json"] = json.dumps(serving_to_json(self.serving), indent=1) + "\n"
        texts |= {f"plans/{size.num_nodes}.json": plan_text(size.plan) for size in self.sizes if size.plan}
        texts["launch.json"] = launch_text(self.launch)
        return {**texts, **(self.members.files() if self.members else {})}


def plan_text(plan: Plan) -> str:
    return json.dumps(plan_to_json(plan), indent=1) + "\n"


def draft_run(
    job: Job,
    run: Path,
    *,
    on: str | None = None,
    generation: int = 0,
    stop_at: int | None = None,
    job_folder: Path | str = ".",
    port: int = 29500,
    progress: Progress | None = None,
    is_dry: bool = False,
    members: Members | None = None,
) -> Draft:
    """Plan the job and lay out its processes; StartError says why it cannot run as the directory `run`.

    `job_folder` holds the user's own functions; `port` is the ranks' rendezvous port; the run will own `members`, which
    are checked too; a first start owns those of its job file.
    """
    backend = backend_name(job, on)
    check_backend(job, backend)
    if members is None and generation == 0:
        members = member_jobs(job, run, backend)
        job = members.owner if members and members.owner else job
    if members is not None:
        job, members = checked_members(job, members)
        check_rollout_key(job, backend, os.environ)
        check_members(members, backend, run, is_dry)
        members = with_needs(members, backend)
    else:
        check_no_member_faults(job, run)
    if not is_dry:
        check_packages(job, backend, python_of(job, backend))
    check_job(job, backend, run, Path(job_folder), stop_at)
    only_reports = members is not None and members.spec.purpose == "sweep"
    if only_reports and stop_at is not None:
        raise StartError(
            f"{job.name} is a sweep, whose steps are those of its members; remove --stop-at, or stop a member: "
            f"`craton stop {job.name}/NAME`"
        )
    planned = JobPlan(note="no plan: its members have one each") if only_reports else plan_job(job, progress)
    training, serving, note = planned.training, planned.serving, planned.note
    if serving is not None and serving.ep > 1 and job.layout is None:  # a server's ranks read it from the job
        job = job.model_copy(update={"layout": LayoutSpec(tp=serving.tp, ep=serving.ep)})
    environment = {**job.run.env, JOB_FOLDER: str(Path(job_folder).absolute())}
    if stop_at is not None:
        environment[STOP_AT] = str(stop_at)
    if only_reports:
        launch = report_launch(job, run, generation, environment, port, backend, python_of(job, backend))
    else:
        launch = launch_of(job, training or serving, run, generation, environment, port, backend)
    if members is not None:
        launch = replace(launch, members=manager_command(run), starts_manager=backend != "slurm")
    sizes: list[Size] = []
    if launch.min_nodes and job.kind in TRAINING_KINDS:
        sizes, refused = elastic_sizes(job, launch.ranks_per_node, training, progress)
        note = "; ".join(filter(None, [note, elastic_note(job, sizes, refused)]))
        launch = replace(launch, min_nodes=min((size.num_nodes for size in sizes), default=0))
    layouts = {str(size.num_nodes): size.layout_json for size in sizes}
    if launch.min_nodes and job.kind == "command":  # a command has no layout and runs on any number of nodes
        layouts = {str(count): {} for count in range(launch.min_nodes, launch.working_nodes + 1)}
    launch = replace(launch, layouts=layouts)
    if backend != "local" and job.cluster.is_local and (training or serving):
        note = "; ".join(filter(None, [note, f"planned as if the nodes of {backend} were this machine"]))
    if backend == "slurm":
        note = "; ".join(filter(None, [note, check_gres(job, launch)]))
    launch = replace(launch, chaos=chaos_of(job, launch))
    draft = Draft(job, training, launch, note, sizes, serving, backend, members)
    if draft.scheduled_nodes > len(launch.nodes) and (hourly := draft.dollars_per_hour) is not None:
        draft = replace(draft, launch=replace(launch, dollars_per_day=24.0 * hourly))
    return draft


def draft_nodes(job: Job, run: Path, backend: str) -> Draft:
    """Draft a job only as far as its nodes and their GPUs: for members, which are planned when their turn comes. For a
    server that takes its plan, which chooses how many GPUs of a node it has."""
    serving = plan_job(job).serving if job.serve else None
    environment = {JOB_FOLDER: str(job.folder.absolute())}
    launch = launch_of(job, serving, run, 0, environment, Launch.master_port, backend)
    return Draft(job, None, launch, serving=serving, on=backend)


def check_members(members: Members, backend: str, run: Path, is_dry: bool) -> None:
    """Refuse members that cannot run, before anything starts; their memory is planned when each starts."""
    for name, job in members.jobs.items():
        try:
            check_backend(job, backend_name(job, backend))
            if not is_dry:
                check_packages(job, backend, python_of(job, backend))
            check_job(job, backend, run / MEMBERS_FOLDER / name, job.folder, None)
            if backend != "local" and member_jobs(job, run / MEMBERS_FOLDER / name) is not None:
                raise StartError(
                    f"it would own runs itself, which {backend} cannot do yet; run its `model: {{job: FILE}}` first, "
                    "as a run of its own, whose result is then used"
                )
        except CratonError as error:
            raise StartError(f"member {name}: {error}") from None


def with_needs(members: Members, backend: str) -> Members:
    """Return members that say how many nodes, GPUs and cores each takes of its owner's job; on this machine they share
    what there is."""
    if backend == "local" or not members.jobs:
        return members
    spec = members.spec
    sized = [_with_need(item, members.jobs[item.name], backend) for item in spec.members if item.name in members.jobs]
    others = [item for item in spec.members if item.name not in members.jobs]
    by_name = {item.name: item for item in [*sized, *others]}
    return replace(members, spec=replace(spec, members=[by_name[item.name] for item in spec.members]))


def _with_need(item: MemberSpec, job: Job, backend: str) -> MemberSpec:
    num_nodes, gpus_per_node, has_gpus = ranks_of(job, None, backend)
    processes = max(processes_of(job, gpus_per_node), gpus_per_node)
    threads = threads_of(job, None, num_nodes, processes, backend)
    return replace(
        item,
        nodes=1 if job.serve else num_nodes + job.spares,
        gpus=gpus_per_node if has_gpus else 0,
        cpus=processes * threads,
    )


def rank_command(job: Job, run: Path, python: str = sys.executable) -> list[str]:
    """Return the job's own command (a single string goes to the shell), else the training loop or serving engine."""
    if job.kind != "command":
        return [python, "-m", rank_module(job), str(run)]
    return ["/bin/sh", "-c", job.command[0]] if len(job.command) == 1 else list(job.command)


def rank_module(job: Job) -> str:
    """Return the module of a rank. A training that evaluates a suite generates answers, as post-training does."""
    has_suite = job.train is not None and bool(job.suites)
    return POSTTRAINING if has_suite else RANK_MODULES.get(job.kind, TRAINING)


def fork_server_command(job: Job, run: Path, python: str = sys.executable) -> list[str]:
    """Return the command of the fork server, which imports the training loop once, or the serving engine if a server
    wants a standby; empty for other jobs."""
    command = [python, "-m", "craton.ml.fork_server", str(run)]
    if job.serve is not None:
        return [*command, "--serving"] if job.serve.standby else []
    if job.kind not in TRAINING_KINDS:
        return []
    return [*command, "--posttraining"] if rank_module(job) == POSTTRAINING else command


def python_of(job: Job, backend: str) -> str:
    """Return the Python of the ranks: this interpreter, or the image's."""
    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    image = job.run.image or (scheduler.image if scheduler else None)
    return IMAGE_PYTHON if backend != "local" and image else sys.executable


def launch_of(
    job: Job,
    plan: Plan | ServePlan | None,
    run: Path,
    generation: int,
    environment: Mapping[str, str],
    port: int,
    backend: str = "local",
) -> Launch:
    """Build the launch: nodes, ranks and their command."""
    sharers, sharing = sharing_of(job)
    num_nodes, gpus_per_node, gpus = ranks_of(job, plan, backend, sharers)
    ranks_per_node = processes_of(job, gpus_per_node)
    spares = 0 if job.serve else job.spares
    fork_server = fork_server_command(job, run, python_of(job, backend))
    return Launch(
        generation=generation,
        nodes=[f"node-{number}" for number in range(num_nodes + spares)],
        ranks_per_node=ranks_per_node,
        command=rank_command(job, run, python_of(job, backend)),
        env={**command_environment(job, gpus_per_node if gpus else 0), **sharing, **environment},
        master_address="127.0.0.1",
        master_port=port,
        threads_per_rank=threads_of(job, plan, num_nodes, max(ranks_per_node, gpus_per_node), backend),
        gpus=gpus,
        track=list(job.track),
        metrics_port=0,
        stop_grace_seconds=job.serve.drain + END_SECONDS if job.serve else Launch.stop_grace_seconds,
        early_seconds=0.0
        if job.serve or job.eval
        else Launch.early_seconds,  # an engine reports a fatal error by its exit code
        num_nodes=num_nodes,
        min_nodes=job.cluster.min_nodes if job.cluster.min_nodes < num_nodes else 0,
        nursery=[] if job.serve else fork_server,
        standby=fork_server if job.serve else [],
        tries=job.recover.tries,
        spare_seconds=job.recover.spare_wait,
        give_up_seconds=job.recover.give_up,
        agent_command=agent_command(run) if backend == "local" else [],  # elsewhere the node restarts it
        nodes_per_gpu=sharers,
        dollars_per_day=daily_price(job, plan, num_nodes + spares),
        **command_fields(job, run, num_nodes, gpus_per_node),
    )


def hourly_price(job: Job, num_nodes: int) -> float | None:
    """Return dollars per hour; None if the nodes have no price."""
    if job.cluster.is_local:
        return None
    cluster = resolve_cluster(job.cluster, job.price)
    price = cluster.price
    return None if price is None else price.dollars_per_hour * billed_instances(cluster.instance, num_nodes)


def daily_price(job: Job, plan: Plan | ServePlan | None, num_nodes: int) -> float | None:
    """Return dollars per day, from the plan if there is one."""
    if isinstance(plan, Plan):
        return plan.cost.dollars_per_day if plan.cost else None
    hourly = plan.dollars_per_hour if isinstance(plan, ServePlan) else hourly_price(job, num_nodes)
    return None if hourly is None else 24.0 * hourly


def elastic_note(job: Job, sizes: list[Size], refused: Mapping[int, str]) -> str:
    """Return why an elastic job cannot run on some of its sizes."""
    if not refused:
        return ""
    why = next(iter(refused.values())).removeprefix(job.where("cluster"))
    if not sizes:
        return f"not elastic: fewer than {counted(job.cluster.num_nodes, 'node')} cannot train this job: {why}"
    return f"elastic, but not on {', '.join(map(str, refused))} nodes: {why}"


def chaos_of(job: Job, launch: Launch) -> list[str]:
    """Return the job's faults, each checked against these nodes."""
    try:
        faults = faults_of(
            job.chaos,
            world=launch.world_size,
            nodes=launch.nodes,
            spares=job.spares,
            tiers=tier_names(job),
            steps=job.steps,
            trains=job.kind in TRAINING_KINDS,
            watched=launch.watched_rank,
            parts=job.fault_parts,
        )
    except FaultError as error:
        raise StartError(f"{job.where('chaos')}{error}") from None
    return [fault.text for fault in faults]


def tier_names(job: Job) -> list[str]:
    """Return the names of the checkpoint tiers, as faults use them; empty for a command."""
    if job.kind not in TRAINING_KINDS:
        return []
    return [*([] if job.checkpoint.peer == "off" else ["peer"]), *(tier.to for tier in job.checkpoint.places)]


def ranks_of(
    job: Job, plan: Plan | ServePlan | None, backend: str = "local", sharers: int = 1
) -> tuple[int, int, bool]:
    """Return (nodes, ranks per node, whether they have GPUs): one rank per GPU, or one per node without GPUs; for a
    server its tensor-parallel ranks."""
    if isinstance(plan, ServePlan):
        return 1, plan.tp, plan.cluster.instance.gpu.generation != "cpu"
    if job.eval is not None:  # one process, which has a GPU if it computes the model itself
        has_gpus = evaluation_gpus(job, backend) > 0 and job.eval.endpoint is None
        return 1, 1, has_gpus
    if plan is None and job.cluster.is_local and backend != "local":  # the nodes have what run.gres requests
        gpus = gres_gpus(job.run.gres) if backend == "slurm" else 0
        return job.cluster.num_nodes, max(1, gpus), gpus > 0
    if plan is None and job.cluster.is_local:  # without a plan there is no need to measure this machine
        if sharers > 1:
            return job.cluster.num_nodes, 1, True
        cards, num_nodes = len(visible_accelerators()), job.cluster.num_nodes
        if cards % num_nodes:
            sharing = "share GPUs with `run: {share_gpus: true}` or --share-gpus, " if num_nodes > cards else ""
            raise StartError(
                f"{job.where('cluster')}local x {num_nodes} cannot divide {counted(cards, 'GPU')} evenly; write "
                f"local x 1, {sharing}or set CUDA_VISIBLE_DEVICES= to use the CPU"
            )
        return num_nodes, max(1, cards // num_nodes), cards > 0
    cluster = plan.cluster if plan else resolve_cluster(job.cluster, job.price)
    return cluster.num_nodes, cluster.instance.num_gpus, cluster.instance.gpu.generation != "cpu"


def evaluation_gpus(job: Job, backend: str) -> int:
    """Return the GPUs of the node of an evaluation."""
    if job.cluster.is_local:
        return len(visible_accelerators()) if backend == "local" else gres_gpus(job.run.gres)
    instance = resolve_cluster(job.cluster, job.price).instance
    return instance.num_gpus if instance.gpu.generation != "cpu" else 0


def sharing_of(job: Job) -> tuple[int, dict[str, str]]:
    """Return how many nodes share each GPU of this machine (1: none), and the variables that bound the memory of their
    ranks. A command may use JAX, which would take three quarters of a GPU for each."""
    if not job.run.share_gpus:
        return 1, {}
    cards = visible_accelerators()
    try:
        sharers = nodes_per_gpu(cards, job.cluster.num_nodes)
        if sharers == 1:
            return 1, {}
        # A spare may replace a node of another GPU; on a single GPU it takes the memory of the node that it replaces.
        spares = math.ceil(job.spares / len(cards)) if len(cards) > 1 else 0
        fraction = f"{memory_fraction(cards, (sharers + spares) * processes_of(job, 1)):.4f}"
    except CatalogError as error:
        raise StartError(f"{job.where('cluster')}cluster: {error}") from None
    return sharers, {MEMORY_FRACTION: fraction, **({JAX_MEMORY_FRACTION: fraction} if job.command else {})}


def threads_of(job: Job, plan: Plan | ServePlan | None, num_nodes: int, ranks_per_node: int, backend: str) -> int:
    """Return the threads per rank: its share of a node's cores; local nodes share this machine's cores."""
    if backend == "local":
        return max(1, usable_cores() // (num_nodes * ranks_per_node))
    if plan is None and job.cluster.is_local:
        return 1
    cluster = plan.cluster if plan else resolve_cluster(job.cluster, job.price)
    return max(1, cluster.instance.vcpus // ranks_per_node)


def gres_gpus(gres: str | None) -> int:
    """Return the GPUs per node in a Slurm GRES: `gpu`, `gpu:8`, `gpu:h100:8`, comma-separated."""
    result = 0
    for name, *more in (word.split(":") for word in (gres or "").split(",")):
        if name == "gpu":
            result += int(more[-1]) if more and more[-1].isdecimal() else 1
    return result


def usable_cores() -> int:
    """Return the cores of this process's CPU affinity, limited by its cgroup CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, cpu_quota() or allowed))


def check_gres(job: Job, launch: Launch) -> str:
    """Refuse a GRES with another number of GPUs than the ranks need. For nodes planned as this machine, return a
    warning instead."""
    granted, needed = gres_gpus(job.run.gres), launch.node_gpus if launch.gpus else 0
    if granted == needed or not granted or ((job.serve or job.eval) and granted > needed > 0):
        return ""
    if job.cluster.is_local:
        used = f"{needed} of them" if needed else "none of them"
        return (
            f"run.gres requests {counted(granted, 'GPU')} per node, and its ranks use {used}; set cluster to the "
            "instance type, or to a cluster file with the hardware"
        )
    raise StartError(
        f"{job.where('run', 'gres')}run.gres {job.run.gres} requests {counted(granted, 'GPU')} per node, and the job "
        f"needs {needed} ({job.cluster}); remove run.gres, or use a cluster file whose hardware has num_gpus: {granted}"
    )
