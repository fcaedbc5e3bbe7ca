"""A draft as a Kubernetes cluster gets it: everything that the emitters write down, checked and settled.

What comes back can be emitted: names are ones that Kubernetes takes, the run directory is at a place that all pods see,
and whatever the ranks read is there too. Nothing here asks a cluster.
"""

from __future__ import annotations

import os.path
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from craton.infrastructure import Instance, resolve_cluster
from craton.job import TRAINING_KINDS, Job
from craton.job.cluster import SchedulerSettings, StorageNumbers
from craton.job.sections import RecoverSection, place_of
from craton.orchestration.draft import JOB_FOLDER, Draft
from craton.orchestration.errors import StartError
from craton.orchestration.kubernetes.names import (
    check_image,
    check_label_key,
    check_label_value,
    check_name,
    check_path,
    object_name,
)
from craton.remote import is_url

RUN_FILES = "/etc/craton/run"  # where a pod finds the files of a run whose directory it has to make
RUN_CODE = "/etc/craton/code"  # and the code of a command, packed
CODE_FILE = "code.tar.gz"
PLACES_FILE = "nodes.json"
RUN_NODES = "/etc/craton/nodes"  # and where the cluster's nodes are
SECRETS = "/etc/craton/secrets"  # a file for each secret variable
SCRATCH = "/craton"  # a folder of the pod itself, gone with it
CLUSTER_SECRET = "craton-secrets"  # what holds the secrets that the caller's shell does not have
USABLE_SHARE = 0.9  # of a node's cores and memory: the rest is the kubelet's, the system's and the daemon sets'
HUGE_PAGES = "5120Mi"  # AWS's own manifests for EFA ask for as much (EKS user guide, "EFA", 2026-08)
MAX_FILE_BYTES = 900_000  # of a ConfigMap, which etcd limits to 1 MiB
METRICS_PORT = 29400
SUBMISSION_VARIABLE = "CRATON_SUBMISSION"  # by which a pod knows what it was handed in with
KILL_MARGIN_SECONDS = 30  # after the ranks' grace, for the agent's last words
WAIT_FOR_NODE_SECONDS = 3600.0  # a node that is made anew, or mended, takes a quarter of an hour and more
DEFAULT_LABELS = {"node": "kubernetes.io/hostname", "zone": "topology.kubernetes.io/zone"}


@dataclass(frozen=True)
class PodMount:
    """A folder of storage, at the same path in every pod."""

    name: str
    path: str
    claim: str = ""  # "": the node's own folder of that path


@dataclass(frozen=True)
class Near:
    """How close together the pods must be."""

    level: str  # node, leaf, spine or zone
    label: str  # of the nodes
    tier: int | None
    is_required: bool


@dataclass(frozen=True)
class KubernetesTarget:
    run: str
    name: str  # of the objects
    kind: str  # of the job
    submission: str  # tells one handing over of the run from the next
    namespace: str  # "": that of the caller's context
    gang: str
    image: str
    num_pods: int
    gang_pods: int  # without so many of them it does not start
    directory: str  # the run's, in the pods
    mounts: tuple[PodMount, ...]
    resources: dict[str, str]
    limits: dict[str, str]
    grace_seconds: int
    restarts: int
    give_up_seconds: float
    is_scratch: bool = False  # the run directory is the pod's own, and gone with it
    files: dict[str, str] = field(default_factory=dict)  # of a run directory that the first pod makes
    code: bytes = b""  # packed, of a command whose run directory the first pod makes
    drafted_at: str = ""  # what the files call the run directory
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)  # variable → name of the Secret that holds it
    queue: str = ""
    priority: str = ""
    topology: str = ""  # name of Kueue's or KAI's Topology
    near: Near | None = None
    service_account: str = ""
    node_pool: str = ""
    tolerations: tuple[str, ...] = ()
    instance_types: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    time_limit: int | None = None
    save_before: int = 0
    shared_memory_bytes: int = 0  # 0: as much as Kubernetes gives
    uses_efa: bool = False
    pins_memory: bool = False  # that the cards and the network's adapters share
    server_port: int = 0
    is_open: bool = False  # the server listens for others than its own pod
    user: tuple[int, int] | None = None  # None: that of the image
    is_non_root: bool = False  # that is promised of the user, whoever it is

    @property
    def is_ordered(self) -> bool:
        """Whether its pods put themselves in order by where they are. A server's first pod is the one that is asked."""
        return self.num_pods > 1 and self.kind != "serve"

    @property
    def nodes_map(self) -> str:
        return nodes_map_of(self.name)

    @property
    def own_secret(self) -> str:
        return f"{self.name}-secrets"

    @property
    def own_secrets(self) -> list[str]:
        """The variables whose values are the caller's."""
        return [name for name, secret in self.secrets.items() if secret == self.own_secret]


def target_of(
    draft: Draft,
    run: Path,
    *,
    submission: str,
    shell_variables: Collection[str] = (),
    user: tuple[int, int] | None = None,
    code: bytes = b"",
) -> KubernetesTarget:
    """`shell_variables` are those of the caller, `user` is who owns a run directory that exists, `code`
    what a command runs in, packed."""
    job, launch = draft.job, draft.launch
    scheduler = (job.cluster.file.scheduler if job.cluster.file else None) or SchedulerSettings(kind="kubernetes")
    if job.run.copies > 1:
        raise StartError(
            f"{job.where('run', 'copies')}run.copies is an array of Slurm; on Kubernetes start each with its own --name"
        )
    if job.kind == "serve" and job.run.time_limit:
        where = job.where("run", "time_limit")
        raise StartError(
            f"{where}run.time_limit: a server on Kubernetes is started again whenever it ends, so a limit would end it "
            "again and again; leave it out, `craton stop` ends the server"
        )
    mounts = mounts_of(job)
    directory, is_scratch = directory_of(job, run, mounts, len(launch.nodes))
    check_visible(job, mounts)
    check_functions(job, launch.env.get(JOB_FOLDER, ""), mounts)
    exists = str(run) == directory
    files = {} if exists else draft.files()
    if sum(len(text.encode()) for text in files.values()) > MAX_FILE_BYTES:
        raise StartError(
            f"the files of this run are more than the {MAX_FILE_BYTES:,} bytes of a ConfigMap; start it where the "
            "cluster's shared storage is mounted, with CRATON_RUNS on it"
        )
    if scheduler.non_root and exists and user is not None and user[0] == 0:
        raise StartError(
            f"the cluster file says `non_root:`, and the pods of a run run as whoever made {run}, which is root; start "
            "it as another user"
        )
    instance = None if job.cluster.is_local else _instance(draft)
    num_gpus = launch.node_gpus if instance and launch.gpus else 0
    is_spread = len(launch.nodes) > 1 and num_gpus > 0
    uses_efa = instance is not None and instance.efa_version > 0 and is_spread
    network = network_of(instance, scheduler) if instance is not None and is_spread else {}
    requests, limits = resources_of(instance, num_gpus, network)
    return KubernetesTarget(
        run=job.name,
        name=object_name(job.name),
        kind=job.kind,
        submission=submission,
        namespace=_named(job, job.run.namespace or scheduler.namespace, "namespace"),
        gang=scheduler.gang,
        image=image_of(job, scheduler),
        num_pods=len(launch.nodes),
        gang_pods=launch.min_nodes or launch.working_nodes,
        directory=directory,
        mounts=mounts,
        resources=requests,
        limits=limits,
        grace_seconds=round(launch.stop_grace_seconds) + KILL_MARGIN_SECONDS,
        restarts=job.run.restarts,
        give_up_seconds=give_up_of(job),
        is_scratch=is_scratch,
        files=files,
        code=b"" if exists else code,
        drafted_at=str(run),
        env=dict(job.run.env),
        secrets=secrets_of(job, shell_variables),
        queue=queue_of(job, scheduler),
        priority=_labelled(job, job.run.priority or scheduler.priority, "priority"),
        topology=check_name(scheduler.topology, "the cluster file's topology") if scheduler.topology else "",
        near=near_of(job, scheduler),
        service_account=check_name(scheduler.service_account, "the cluster file's service_account")
        if scheduler.service_account
        else "",
        node_pool=check_label_value(scheduler.node_pool, "the cluster file's node_pool") if scheduler.node_pool else "",
        tolerations=tuple(check_label_key(key, "scheduler.tolerations") for key in scheduler.tolerations),
        instance_types=instance_types_of(job),
        exclude=tuple(check_label_value(node, "run.exclude", job.where("run", "exclude")) for node in job.run.exclude),
        time_limit=round(job.run.time_limit) if job.run.time_limit else None,
        save_before=round(min(job.run.save_before, (job.run.time_limit or 0) / 2)),
        shared_memory_bytes=int(limits_bytes(instance, num_gpus) // 2),
        uses_efa=uses_efa,
        pins_memory=bool(network),
        server_port=job.serve.port if job.serve else 0,
        is_open=job.serve is not None and job.serve.host not in ("127.0.0.1", "localhost", "::1"),
        user=user if exists else None,
        is_non_root=scheduler.non_root,
    )


def nodes_map_of(name: str) -> str:
    """What the ConfigMap is called that says where the cluster's nodes are, for the run of that object."""
    return f"{name}-nodes"


def mounts_of(job: Job) -> tuple[PodMount, ...]:
    """The shared storage always, a node's own disks only where the job keeps something there."""
    storage = job.cluster.file.storage if job.cluster.file else None
    if storage is None:
        return ()
    mounts = []
    if storage.shared is not None and storage.shared.path and not is_url(storage.shared.path):
        mounts.append(_mount("shared", storage.shared))
    uses_nvme = job.kind in TRAINING_KINDS and any(tier.to == "nvme" for tier in job.checkpoint.tiers)
    if storage.nvme is not None and storage.nvme.path:
        uses_nvme = uses_nvme or any(_is_inside(path, storage.nvme.path) for path in _paths(job))
        if uses_nvme:
            mounts.append(_mount("nvme", storage.nvme))
    return tuple(mounts)


def directory_of(job: Job, run: Path, mounts: tuple[PodMount, ...], num_pods: int) -> tuple[str, bool]:
    """(the run directory in the pods, whether it is gone with the pod)."""
    shared = next((mount for mount in mounts if mount.name == "shared"), None)
    if shared is None:
        if num_pods > 1:
            raise StartError(
                f"{job.where('cluster')}{num_pods} pods need a folder that all of them see, for the run directory and "
                "checkpoints: give the cluster file `storage: {shared: {path: /fsx, claim: NAME}}`"
            )
        return f"{SCRATCH}/runs/{job.name}", True
    if _is_inside(str(run), shared.path):
        return str(run), False
    stated = job.cluster.file.runs if job.cluster.file else None
    root = f"{shared.path.rstrip('/')}/runs" if stated is None or is_url(stated) else stated.rstrip("/")
    if not _is_inside(root, shared.path):
        raise StartError(
            f"the cluster file keeps runs in {root}, which is not below the shared storage {shared.path}: no other "
            "folder is seen by all pods"
        )
    return f"{root}/{job.name}", False


def check_visible(job: Job, mounts: tuple[PodMount, ...]) -> None:
    """Refuse what the ranks could not read: files of this machine that no pod sees."""
    mounted = [mount.path for mount in mounts]
    for path in _paths(job):
        if not any(_is_inside(path, place) for place in mounted):
            places = (
                f"below {' or '.join(mounted)}"
                if mounted
                else "on storage that the cluster file mounts (storage.shared)"
            )
            raise StartError(
                f"{job.where('data')}{path} is not seen by the pods; keep it {places}, or in S3. Text is tokenized "
                "into CRATON_CACHE: set that to a folder there too"
            )


def check_functions(job: Job, folder: str, mounts: tuple[PodMount, ...]) -> None:
    """Refuse a user's own functions in a folder of this machine that no pod sees. What is not in the job's folder is
    looked for in the image, as Python does."""
    mounted = [mount.path for mount in mounts]
    if not folder or any(_is_inside(folder, place) for place in mounted):
        return
    model = job.model if isinstance(job.model, str) and job.model_shape is None else None
    named = {"model": model, "objective": job.objective, "reward": job.reward, "data.source": job.data.source}
    for key, function in named.items():
        if function is None:
            continue
        module = Path(folder, *function.partition(":")[0].split(".")[:1])
        if module.is_dir() or module.with_suffix(".py").is_file():
            places = f"below {' or '.join(mounted)}" if mounted else "on storage that the cluster file mounts"
            raise StartError(
                f"{job.where(*key.split('.'))}{key}: {function} is in {folder}, which is not seen by the pods; keep "
                f"the job file and its functions {places}, or install them in the image"
            )


def network_of(instance: Instance, scheduler: SchedulerSettings) -> dict[str, str]:
    """What a pod asks for so that its node's adapters are seen in it.

    Karpenter makes no node for a pod that asks for huge pages, for no instance type has them before it is there
    (https://github.com/aws/karpenter-provider-aws/issues/3315): on its pools EFA does without.
    """
    resources = {}
    if instance.efa_version:
        resources["vpc.amazonaws.com/efa"] = str(instance.network_interfaces)
        if not scheduler.node_pool:
            resources["hugepages-2Mi"] = HUGE_PAGES
    return resources | {name: str(count) for name, count in scheduler.resources.items()}


def resources_of(
    instance: Instance | None, num_gpus: int, network: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(requests, limits) of a pod: a node, or the share of it that a server takes. Cores are not limited: a rank that
    is throttled makes all others wait."""
    if instance is None:
        return {"cpu": "1", "memory": "1Gi"}, {}
    devices = {**({"nvidia.com/gpu": str(num_gpus)} if num_gpus else {}), **network}
    requests, limits = {}, {}
    if instance.vcpus:
        requests["cpu"] = str(max(1, int(instance.vcpus * USABLE_SHARE * _share(instance, num_gpus))))
    if memory := int(limits_bytes(instance, num_gpus) // 2**30):
        requests["memory"] = limits["memory"] = f"{memory}Gi"
    return {**requests, **devices}, {**limits, **devices}


def limits_bytes(instance: Instance | None, num_gpus: int) -> float:
    """Memory of a pod; 0 where the node's is not known."""
    return instance.host_memory_bytes * USABLE_SHARE * _share(instance, num_gpus) if instance else 0.0


def near_of(job: Job, scheduler: SchedulerSettings) -> Near | None:
    """`placement: {within: leaf}` in the cluster's own words."""
    if job.placement is None:
        return None
    level = job.placement.within
    numbers = getattr(job.cluster.file.levels, level) if job.cluster.file else None
    label = (numbers.label if numbers else None) or DEFAULT_LABELS.get(level, "")
    tier = numbers.tier if numbers else None
    where = job.where("placement", "within")
    if scheduler.gang == "volcano":
        if tier is None:
            raise StartError(
                f"{where}placement within {level}: Volcano knows levels by their tier; give the cluster file "
                f"`levels: {{{level}: {{tier: 1}}}}`, 1 being the closest"
            )
    elif not label:
        raise StartError(
            f"{where}placement within {level}: the cluster file has no label for it; give it `levels: {{{level}: "
            "{label: topology.k8s.aws/network-node-layer-3}}`, or let `craton cluster discover` find them"
        )
    if scheduler.gang == "kai" and not scheduler.topology:
        raise StartError(
            f"{where}placement within {level}: KAI needs the name of a Topology; give the cluster file `scheduler: "
            "{topology: NAME}`"
        )
    # None of them can wait for a while and then take what there is: a place that may be waited for is a wish.
    near = Near(
        level, check_label_key(label, f"levels.{level}.label") if label else "", tier, job.placement.wait is None
    )
    if scheduler.node_pool:
        check_can_be_made(near, scheduler, where)
    return near


def check_can_be_made(near: Near, scheduler: SchedulerSettings, where: str) -> None:
    """Refuse a place for which a pool of Karpenter may never have the nodes."""
    pool = f"{where}placement within {near.level}: Karpenter makes the nodes of {scheduler.node_pool}"
    if scheduler.gang == "kueue":
        raise StartError(
            f"{pool} for jobs that Kueue has admitted, and Kueue finds a place only on nodes that are there; leave "
            "`placement:` out, or the cluster file's `node_pool:`"
        )
    if near.is_required and near.level not in DEFAULT_LABELS:
        raise StartError(
            f"{pool}, and cannot know their {near.level} before they are there, so such a place may never come; make "
            "it a wish with `wait:`, or leave the cluster file's `node_pool:` out"
        )


def secrets_of(job: Job, shell_variables: Collection[str]) -> dict[str, str]:
    """Variable → the Secret that holds it: the run's own for what the caller has, else the cluster's."""
    of_server = [job.serve.api_keys, job.serve.admin_key] if job.serve else []
    wanted = [*job.run.secrets, *(name for name in of_server if name)]
    own = f"{object_name(job.name)}-secrets"
    return {name: own if name in shell_variables else CLUSTER_SECRET for name in wanted}


def queue_of(job: Job, scheduler: SchedulerSettings) -> str:
    queue = job.run.queue or scheduler.queue or ""
    if scheduler.gang in ("kueue", "kai") and not queue:
        raise StartError(
            f"{job.where('run')}{scheduler.gang} admits jobs by queue, and none is named; give `run: {{queue: NAME}}`, "
            "or the cluster file's scheduler a `queue:`"
        )
    if scheduler.gang == "none" and queue:
        raise StartError(
            f"{job.where('run', 'queue')}queue {queue}: nobody keeps queues where `gang:` is none; give the cluster "
            "file's scheduler a `gang:` (kueue, kai or volcano), or leave `queue:` out"
        )
    return _labelled(job, queue, "queue")


def give_up_of(job: Job) -> float:
    """How long a lost node is waited for: as the job says, else longer than where it would be back at once."""
    stated = job.recover.give_up
    return WAIT_FOR_NODE_SECONDS if stated == RecoverSection().give_up else stated


def image_of(job: Job, scheduler: SchedulerSettings) -> str:
    image = job.run.image or scheduler.image
    if not image:
        raise StartError(
            f"{job.where('run')}a pod needs an image, with Python and Craton in it; give `run: {{image: ...}}`, or the "
            "cluster file's scheduler an `image:`"
        )
    return check_image(image, job.where("run", "image"))


def instance_types_of(job: Job) -> tuple[str, ...]:
    """Names of AWS, as nodes are labelled with them; HyperPod puts `ml.` before."""
    file = job.cluster.file
    name = file.instance if file else (None if job.cluster.is_local else job.cluster.instance)
    return (name, f"ml.{name}") if name and "." in name and name == name.lower() else ()


def _instance(draft: Draft) -> Instance:
    plan = draft.plan or draft.serving
    cluster = plan.cluster if plan else resolve_cluster(draft.job.cluster, draft.job.price)
    return cluster.instance


def _share(instance: Instance, num_gpus: int) -> float:
    """Of a node: a server that takes a few of its GPUs leaves the rest to others."""
    return num_gpus / instance.num_gpus if 0 < num_gpus < instance.num_gpus else 1.0


def _mount(name: str, numbers: StorageNumbers) -> PodMount:
    path = check_path(numbers.path or "", f"storage.{name}.path")
    claim = check_name(numbers.claim, f"the cluster file's storage.{name}.claim") if numbers.claim else ""
    return PodMount(name, path, claim)


def _paths(job: Job) -> list[str]:
    """The files of this machine that the ranks would read or write."""
    written = [path for path, _ in (*job.data.mixture, *job.data.validation_mixture)]
    written += [entry for entry in (job.data.tokenizer, job.model) if isinstance(entry, str)]
    written += list(job.serve.adapters.values()) if job.serve else []
    if job.kind in TRAINING_KINDS:
        storage = job.cluster.file.storage if job.cluster.file else None
        located = [place_of(tier, storage, Path(SCRATCH, job.name)) for tier in job.checkpoint.tiers]
        written += [item.place for item in located if not item.is_inside_run and not item.is_node_local]
    return [path for path in written if path.startswith("/")]


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([os.path.normpath(path), os.path.normpath(folder)]) == os.path.normpath(folder)


def _named(job: Job, value: str | None, key: str) -> str:
    return check_name(value, f"run.{key}", job.where("run", key)) if value else ""


def _labelled(job: Job, value: str | None, key: str) -> str:
    return check_label_value(value, f"run.{key}", job.where("run", key)) if value else ""


def first_host(target: KubernetesTarget) -> str:
    """The first pod's name in the cluster's DNS, whichever pod it is at the time."""
    if target.kind == "serve":
        return f"{target.name}-0.{target.name}"
    infix = {"kueue": "-node-0", "kai": "-node-0", "volcano": "-node", "none": ""}[target.gang]
    return f"{target.name}{infix}-0.{target.name}"


def settled_env(target: KubernetesTarget) -> Mapping[str, str]:
    """What a pod's container finds in its environment, but for secrets; the job's own word comes last."""
    names = {
        SUBMISSION_VARIABLE: target.submission,
        "CRATON_FIRST_POD": first_host(target),
        "CRATON_GIVE_UP_SECONDS": f"{target.give_up_seconds:g}",
        "CRATON_RUNS": os.path.dirname(target.directory),
        "CRATON_METRICS_PORT": str(METRICS_PORT),
    }
    if target.files:
        names |= {"CRATON_RUN_FILES": RUN_FILES, "CRATON_DRAFTED_AT": target.drafted_at}
    if target.code:
        names["CRATON_RUN_CODE"] = f"{RUN_CODE}/{CODE_FILE}"
    if target.secrets:
        names["CRATON_SECRETS"] = SECRETS
    if target.is_ordered:
        names["CRATON_RUN_NODES"] = f"{RUN_NODES}/{PLACES_FILE}"
    if target.time_limit:
        names["CRATON_STOP_AFTER"] = str(max(1, target.time_limit - target.save_before))
    if target.user is not None:  # who may be unknown in the image, and without a home there
        names |= {"HOME": "/tmp", "USER": "craton"}
    if target.uses_efa:
        # A missing EFA fails loudly; the interfaces named are not for NCCL's bootstrap (AWS EFA cheat sheet, 2026-07).
        names |= {"FI_PROVIDER": "efa", "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
    if target.uses_efa and "hugepages-2Mi" not in target.resources:
        names["FI_EFA_USE_HUGE_PAGE"] = "0"
    return {**names, **target.env}
