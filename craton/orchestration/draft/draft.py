"""From a job to what would be written and started: nothing here touches a disk, a process or a network.

A draft that comes back is one that may be launched: its backend exists, its plan fits the memory and its layout is one
that the training loop, or the serving engine, knows. `--dry-run` prints a draft and a launch starts it; both use the
same texts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from craton.agent import Launch
from craton.digits import counted
from craton.http_guard import is_loopback
from craton.infrastructure import resolve_cluster, visible_accelerators
from craton.job import (
    TRAINING_KINDS,
    ContentError,
    FaultError,
    Job,
    JobError,
    check_here,
    check_trackers,
    dump_job,
    parse_fault,
)
from craton.job.document import check_name
from craton.job.sections import STANDARD_LIBRARY, faults_of, place_of
from craton.limits import cpu_quota
from craton.ml import TRAINED_PRECISIONS
from craton.nearest import did_you_mean
from craton.orchestration.draft.command import command_environment, command_fields, processes_of
from craton.orchestration.draft.sizes import Size, check_memory, check_offload, elastic_sizes
from craton.orchestration.errors import StartError
from craton.planning import Plan, plan
from craton.planning.economics import billed_instances
from craton.planning.report import plan_to_json, serving_to_json
from craton.planning.serving import ServePlan, plan_serving
from craton.remote import is_url

BACKENDS = ("local", "slurm", "kubernetes")
KINDS = ("pretrain", "sft", "serve", "command")
IMAGE_PYTHON = "python3"  # as images have it
JOB_FOLDER = "CRATON_JOB_FOLDER"  # environment of the ranks: where a user's own functions are looked for
END_SECONDS = 15.0  # from the last answer of a server that drains to the end of its ranks
COPY = "CRATON_COPY"  # and, of a job with run.copies, which of them this is
STOP_AT = "CRATON_STOP_AT"  # and the step after which the loop saves, sets the STOP marker and ends

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Draft:
    """A job as it would run: the plan it was given, and how its processes are started."""

    job: Job
    plan: Plan | None  # None: a command, or a model whose numbers only its author knows
    launch: Launch
    note: str = ""  # why there is no plan, or what had to differ from the best one
    sizes: list[Size] = field(default_factory=list)  # of an elastic job: all it may run on, the largest last
    serving: ServePlan | None = None  # the plan of a server
    on: str = "local"  # the backend that starts it

    @property
    def num_ranks(self) -> int:
        return self.launch.world_size

    @property
    def num_spares(self) -> int:
        return len(self.launch.nodes) - self.launch.working_nodes

    @property
    def dollars_per_hour(self) -> float | None:
        """Of all nodes, spares included; None where they have no price."""
        return hourly_price(self.job, len(self.launch.nodes))

    def files(self) -> dict[str, str]:
        """Name → text of every file that a launch writes into the run directory."""
        texts = {"job.yaml": dump_job(self.job)}
        if self.plan is not None:
            texts["plan.json"] = plan_text(self.plan)
        if self.serving is not None:
            texts["plan.json"] = json.dumps(serving_to_json(self.serving), indent=1) + "\n"
        texts |= {f"plans/{size.num_nodes}.json": plan_text(size.plan) for size in self.sizes if size.plan}
        texts["launch.json"] = json.dumps(asdict(self.launch), indent=1) + "\n"
        return texts


def plan_text(found: Plan) -> str:
    return json.dumps(plan_to_json(found), indent=1) + "\n"


def named_job(job: Job, name: str | None) -> Job:
    """The job under another name."""
    if name is None:
        return job
    try:
        check_name(name)  # a copy is not checked
    except ValueError as error:
        raise StartError(f"--name: {error}") from None
    return job.model_copy(update={"name": name})


def with_chaos(job: Job, faults: Sequence[str]) -> Job:
    """The job with more that is broken on purpose."""
    if not faults:
        return job
    if not isinstance(job.chaos, tuple):
        raise StartError(f"{job.where('chaos')}the job draws its faults from a seed; give no others, or list them all")
    for text in faults:
        parse_fault(text)
    return job.model_copy(update={"chaos": (*job.chaos, *faults)})


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
) -> Draft:
    """Plan the job and lay out its processes, or say what keeps it from running as the directory `run`.

    `job_folder` is where a user's own functions are looked for; `port` is that of the ranks' rendezvous.
    """
    backend = backend_name(job, on)
    check_backend(job, backend)
    check_precision(job)
    check_optimizer(job)
    check_weights(job)
    check_tiers(job, run)
    check_needs(job, backend, Path(job_folder))
    check_is_closed(job)
    if backend != "kubernetes":  # where the cluster may hold what this shell does not have
        check_secrets(job, os.environ)
    if stop_at is not None:
        check_stop(job, stop_at)
    found, serving, note = None, None, ""
    if job.kind == "serve":
        serving = plan_serving(job)
        check_room(job, serving)
    elif job.kind == "command":
        note = "a command is run as it is, without a plan"
    elif job.model_shape is None:
        note = "no plan: the model is a function, whose numbers only its author knows"
    else:
        found = plan(job, progress=progress)
        check_offload(job, found)
        check_memory(job, found)
    environment = {**job.run.env, JOB_FOLDER: str(Path(job_folder).absolute())}
    if stop_at is not None:
        environment[STOP_AT] = str(stop_at)
    launch = launch_of(job, found or serving, run, generation, environment, port, backend)
    sizes: list[Size] = []
    if launch.min_nodes and job.kind in TRAINING_KINDS:
        sizes, refused = elastic_sizes(job, launch.ranks_per_node, found, progress)
        note = "; ".join(filter(None, [note, elastic_note(job, sizes, refused)]))
        launch = replace(launch, min_nodes=min((size.num_nodes for size in sizes), default=0))
    layouts = {str(size.num_nodes): size.layout_json for size in sizes}
    if launch.min_nodes and job.kind == "command":  # which has no layout, and runs on any number
        layouts = {str(count): {} for count in range(launch.min_nodes, launch.working_nodes + 1)}
    launch = replace(launch, layouts=layouts)
    if backend != "local" and job.cluster.is_local and (found or serving):
        note = "; ".join(filter(None, [note, f"planned as if the nodes of {backend} were this machine"]))
    if backend == "slurm":
        note = "; ".join(filter(None, [note, check_gres(job, launch)]))
    return Draft(job, found, replace(launch, chaos=chaos_of(job, launch)), note, sizes, serving, backend)


def agent_command(run: Path, node: int | None = None) -> list[str]:
    """The agent of a node; without one, all but the number, which is the last word."""
    number = [] if node is None else [str(node)]
    return [sys.executable, "-m", "craton.agent", str(run), "--node", *number]


def rank_command(job: Job, run: Path, python: str = sys.executable) -> list[str]:
    """A job's own command (a single text goes to the shell), else the training loop or the serving engine."""
    if job.kind != "command":
        module = "craton.ml.serving" if job.kind == "serve" else "craton.ml.training"
        return [python, "-m", module, str(run)]
    return ["/bin/sh", "-c", job.command[0]] if len(job.command) == 1 else list(job.command)


def nursery_command(job: Job, run: Path, python: str = sys.executable) -> list[str]:
    """What imports the training loop once and forks ranks; servers and commands are started anew each time."""
    return [python, "-m", "craton.ml.fork_server", str(run)] if job.kind in TRAINING_KINDS else []


def python_of(job: Job, backend: str) -> str:
    """The Python that runs ranks: this one, or that of the image they are started in."""
    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    image = job.run.image or (scheduler.image if scheduler else None)
    return IMAGE_PYTHON if backend != "local" and image else sys.executable


def launch_of(
    job: Job,
    found: Plan | ServePlan | None,
    run: Path,
    generation: int,
    environment: Mapping[str, str],
    port: int,
    backend: str = "local",
) -> Launch:
    """Nodes, ranks and their command."""
    num_nodes, gpus_per_node, gpus = ranks_of(job, found, backend)
    ranks_per_node = processes_of(job, gpus_per_node)
    spares = 0 if job.serve else job.spares
    return Launch(
        generation=generation,
        nodes=[f"node-{number}" for number in range(num_nodes + spares)],
        ranks_per_node=ranks_per_node,
        command=rank_command(job, run, python_of(job, backend)),
        env={**command_environment(job, gpus_per_node if gpus else 0), **environment},
        master_address="127.0.0.1",
        master_port=port,
        threads_per_rank=threads_of(job, found, num_nodes, max(ranks_per_node, gpus_per_node), backend),
        gpus=gpus,
        track=list(job.track),
        metrics_port=0,
        stop_grace_seconds=job.serve.drain + END_SECONDS if job.serve else Launch.stop_grace_seconds,
        early_seconds=0.0 if job.serve else Launch.early_seconds,  # an engine says by its exit code what is final
        num_nodes=num_nodes,
        min_nodes=job.cluster.min_nodes if job.cluster.min_nodes < num_nodes else 0,
        nursery=nursery_command(job, run, python_of(job, backend)),
        tries=job.recover.tries,
        spare_seconds=job.recover.spare_wait,
        give_up_seconds=job.recover.give_up,
        agent_command=agent_command(run) if backend == "local" else [],  # elsewhere its node starts it again
        dollars_per_day=daily_price(job, found, num_nodes + spares),
        **command_fields(job, run, num_nodes, gpus_per_node),
    )


def hourly_price(job: Job, num_nodes: int) -> float | None:
    """Dollars; None where the nodes have no price."""
    if job.cluster.is_local:
        return None
    cluster = resolve_cluster(job.cluster, job.price)
    price = cluster.price
    return None if price is None else price.dollars_per_hour * billed_instances(cluster.instance, num_nodes)


def daily_price(job: Job, found: Plan | ServePlan | None, num_nodes: int) -> float | None:
    """Dollars, by the plan where there is one."""
    if isinstance(found, Plan):
        return found.cost.dollars_per_day if found.cost else None
    hourly = found.dollars_per_hour if isinstance(found, ServePlan) else hourly_price(job, num_nodes)
    return None if hourly is None else 24.0 * hourly


def elastic_note(job: Job, sizes: list[Size], refused: Mapping[int, str]) -> str:
    """What keeps an elastic job from some of the sizes it asks for."""
    if not refused:
        return ""
    why = next(iter(refused.values())).removeprefix(job.where("cluster"))
    if not sizes:
        return f"not elastic: fewer than {counted(job.cluster.num_nodes, 'node')} cannot train this job: {why}"
    return f"elastic, but not on {', '.join(map(str, refused))} nodes: {why}"


def chaos_of(job: Job, launch: Launch) -> list[str]:
    """The faults that the job asks for, each one possible on these nodes."""
    try:
        faults = faults_of(
            job.chaos,
            world=launch.world_size,
            nodes=launch.nodes,
            spares=job.spares,
            tiers=tier_names(job),
            steps=job.steps,
            trains=job.kind in TRAINING_KINDS,
        )
    except FaultError as error:
        raise StartError(f"{job.where('chaos')}{error}") from None
    return [fault.text for fault in faults]


def tier_names(job: Job) -> list[str]:
    """Where the state of a job lives, by the names that faults use; nowhere for a command."""
    if job.kind not in TRAINING_KINDS:
        return []
    return [*([] if job.checkpoint.peer == "off" else ["peer"]), *(tier.to for tier in job.checkpoint.places)]


def ranks_of(job: Job, found: Plan | ServePlan | None, backend: str = "local") -> tuple[int, int, bool]:
    """(nodes, ranks on each, whether they have GPUs): a rank for every GPU, one for a node without; of a server those
    that share its model."""
    if isinstance(found, ServePlan):
        return 1, found.tp, found.cluster.instance.gpu.generation != "cpu"
    if found is None and job.cluster.is_local and backend != "local":  # what the nodes have is what is asked for
        gpus = gres_gpus(job.run.gres) if backend == "slurm" else 0
        return job.cluster.num_nodes, max(1, gpus), gpus > 0
    if found is None and job.cluster.is_local:  # without a plan there is no need to measure this machine
        cards, num_nodes = len(visible_accelerators()), job.cluster.num_nodes
        if cards % num_nodes:
            raise StartError(
                f"{job.where('cluster')}local x {num_nodes} cannot share {counted(cards, 'GPU')} equally; write "
                "local x 1, or set "
                "CUDA_VISIBLE_DEVICES= to use the processor"
            )
        return num_nodes, max(1, cards // num_nodes), cards > 0
    cluster = found.cluster if found else resolve_cluster(job.cluster, job.price)
    return cluster.num_nodes, cluster.instance.num_gpus, cluster.instance.gpu.generation != "cpu"


def threads_of(job: Job, found: Plan | ServePlan | None, num_nodes: int, ranks_per_node: int, backend: str) -> int:
    """For each rank its share of a node's cores; all nodes of this machine share those it has."""
    if backend == "local":
        return max(1, usable_cores() // (num_nodes * ranks_per_node))
    if found is None and job.cluster.is_local:
        return 1
    cluster = found.cluster if found else resolve_cluster(job.cluster, job.price)
    return max(1, cluster.instance.vcpus // ranks_per_node)


def gres_gpus(gres: str | None) -> int:
    """GPUs of a node by the words of Slurm: `gpu`, `gpu:8`, `gpu:h100:8`, several with commas."""
    result = 0
    for name, *more in (word.split(":") for word in (gres or "").split(",")):
        if name == "gpu":
            result += int(more[-1]) if more and more[-1].isdecimal() else 1
    return result


def usable_cores() -> int:
    """Those this process may run on, and no more than its cgroup gives it the time of."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, cpu_quota() or allowed))


def backend_name(job: Job, on: str | None) -> str:
    """Where the job runs: as asked on the command line, else by the job, else by its cluster file, else here."""
    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    backend = on or job.run.on or (scheduler.kind if scheduler else "local")
    if backend not in BACKENDS:
        near = did_you_mean(backend, BACKENDS)
        raise StartError(f"--on {backend!r} is not a backend; allowed: {', '.join(BACKENDS)}{near}")
    return backend


def check_needs(job: Job, backend: str | None = None, job_folder: Path | None = None) -> None:
    """Refuse what this machine lacks, where the job runs here: it is asked to, or its cluster is local. Nodes of Slurm
    have this Python, unless in an image."""
    chosen = backend_name(job, backend)
    if chosen == "local" and (job.cluster.is_local or backend is not None):
        check_here(job, job_folder)
        check_data(job)
    elif chosen == "slurm" and not job.run.image:
        check_trackers(job)


def check_data(job: Job) -> None:
    """Refuse what holds no text, by its beginning; token shards and URLs are opened when the data is prepared."""
    if job.kind not in TRAINING_KINDS or not job.data.mixture:
        return
    from craton.ml import data

    problems = []
    for key, mixture in (("path", job.data.mixture), ("validation", job.data.validation_mixture)):
        for path, _ in mixture:
            if path == STANDARD_LIBRARY or is_url(path) or data.is_shard_folder(Path(path)):
                continue
            try:
                data.check_text(Path(path), is_chat=job.kind == "sft")
            except data.DataError as error:
                problems.append(f"{job.where('data', key)}data.{key}: {error}")
    if problems:
        raise ContentError(problems)


def check_backend(job: Job, backend: str) -> None:
    """Refuse what no backend runs yet, and what is more than the one that was chosen."""
    if job.kind not in KINDS:
        raise StartError(f"{job.where('kind')}kind {job.kind} cannot be run yet; {', '.join(KINDS)} can")
    if backend == "local" and not job.cluster.is_local and job.cluster.num_nodes > 1:
        raise StartError(
            f"{job.where('cluster')}{job.cluster} is more than this machine; `--on slurm` or `--on kubernetes` runs it "
            "there, e.g. `cluster: local x 2` runs it here in small, `craton plan` plans it"
        )


def check_gres(job: Job, launch: Launch) -> str:
    """Refuse to be given other GPUs than the ranks need. Nodes that were planned as this machine may have more: then
    what to know of it comes back."""
    given, needed = gres_gpus(job.run.gres), launch.node_gpus if launch.gpus else 0
    if given == needed or not given or (job.serve and given > needed > 0):
        return ""
    if job.cluster.is_local:
        used = f"{needed} of them" if needed else "none of them"
        return (
            f"run.gres gives {counted(given, 'GPU')} of a node, and its ranks use {used}; name the instance, or "
            "the hardware of a "
            "cluster file, under cluster"
        )
    raise StartError(
        f"{job.where('run', 'gres')}run.gres {job.run.gres} gives {counted(given, 'GPU')} of a node, and the job "
        f"needs {needed} "
        f"on each ({job.cluster}); remove run.gres, or give a cluster file whose hardware has num_gpus: {given}"
    )


def check_room(job: Job, found: ServePlan) -> None:
    """Refuse before launch a server without room for a single text, with what to change."""
    if found.fits:
        return
    weights, limit = found.memory_parts["weights"] / 2**30, found.memory_limit_bytes / 2**30
    advice = [] if found.tp >= found.cluster.instance.num_gpus else ["more ranks (layout: {tp: N})"]
    if found.precision != "fp8":
        advice.append("serve.precision: fp8")
    if weights < limit:
        advice += ["serve.kv_precision: fp8", "a larger serve.memory", "a shorter serve.max_length"]
    raise StartError(
        f"{job.where('model')}{job.served_name} does not fit {found.cluster.name}: its weights take {weights:.3g} of "
        f"{limit:.3g} GiB a rank, which leaves room for {found.kv_tokens:,} tokens of text where "
        f"{found.needed_tokens:,} are needed; use {', '.join([*advice, 'a smaller model'])}"
    )


def check_precision(job: Job) -> None:
    if job.kind in TRAINING_KINDS and job.precision not in TRAINED_PRECISIONS:
        raise StartError(
            f"{job.where('train', 'precision')}precision {job.precision} can be planned but not trained yet; "
            f"{', '.join(TRAINED_PRECISIONS)} can"
        )


def check_optimizer(job: Job) -> None:
    if job.train is not None and job.train.optimizer != "adamw":
        raise StartError(
            f"{job.where('train', 'optimizer')}optimizer {job.train.optimizer} can be planned but not trained yet; "
            "write optimizer: adamw"
        )


def check_weights(job: Job) -> None:
    """What the job starts from is on this machine: told before its data is prepared."""
    if job.kind in TRAINING_KINDS or job.serve:
        _ = job.weights_folder


def check_tiers(job: Job, run: Path) -> None:
    """Refuse here what the ranks would refuse, after the data is prepared and all of them have started."""
    storage = job.cluster.file.storage if job.cluster.file else None
    for number, tier in enumerate(job.checkpoint.tiers if job.kind in TRAINING_KINDS else ()):
        try:
            place_of(tier, storage, run)
        except JobError as error:
            raise StartError(f"{job.where('checkpoint', 'tiers', number)}{error}") from None


def check_secrets(job: Job, environment: Mapping[str, str]) -> None:
    missing = [name for name in job.run.secrets if name not in environment]
    if missing:
        raise StartError(
            f"{job.where('run', 'secrets')}run.secrets names {', '.join(missing)}, which this shell does not have; "
            f"`export {missing[0]}=...` and start again"
        )
    for key, several in (("api_keys", " (several with commas)"), ("admin_key", "")):
        name = getattr(job.serve, key, None)
        if name is not None and not environment.get(name, "").strip():
            raise StartError(
                f"{job.where('serve', key)}serve.{key} names {name}, which this shell does not have or is empty; "
                f"`export {name}=KEY`{several} and start again"
            )


def check_is_closed(job: Job) -> None:
    """Refuse a server that other machines could use without a key."""
    serve = job.serve
    if serve is not None and serve.api_keys is None and not is_loopback(serve.host):
        raise StartError(
            f"{job.where('serve', 'host')}serve.host {serve.host} can be reached from other machines, so clients need "
            "an API key: `export SERVE_KEYS=$(openssl rand -hex 24)` and give `api_keys: SERVE_KEYS` (--api-keys "
            "SERVE_KEYS), or listen at 127.0.0.1"
        )


def check_stop(job: Job, stop_at: int) -> None:
    if job.kind not in TRAINING_KINDS:
        raise StartError(f"--stop-at belongs to a job that trains; kind {job.kind} has no steps")
    last = (job.steps or stop_at + 1) - 1
    if not 1 <= stop_at <= last:
        raise StartError(
            f"--stop-at {stop_at} is not inside the job, which has {job.steps:,} steps; give a step from 1 to {last:,}"
        )
