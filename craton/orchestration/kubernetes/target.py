"""Resolve a draft for a Kubernetes cluster: everything that the emitters write, checked and with defaults applied.

A returned target can be emitted: its names are valid in Kubernetes, all pods see the run directory, and all files that
the ranks read are visible too. Nothing here contacts a cluster.
"""

from __future__ import annotations

import os.path
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from craton.infrastructure import Instance, resolve_cluster
from craton.job import TRAINING_KINDS, Job, files_of_suites, functions_of_suites
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

RUN_FILES = "/etc/craton/run"  # mount of the files of a run whose directory the first pod creates
RUN_CODE = "/etc/craton/code"  # mount of a command's packed code
CODE_FILE = "code.tar.gz"
PLACES_FILE = "nodes.json"
RUN_NODES = "/etc/craton/nodes"  # mount of the topology of the cluster's nodes
SECRETS = "/etc/craton/secrets"  # a file for each secret variable
SCRATCH = "/craton"  # a folder of the pod, deleted with it
CLUSTER_SECRET = "craton-secrets"  # the Secret for variables that the caller's shell does not have
USABLE_SHARE = 0.9  # of a node's cores and memory; the rest is for kubelet, system and daemon sets
HUGE_PAGES = "5120Mi"  # AWS's own manifests for EFA request as much (EKS user guide, "EFA", 2026-08)
MAX_FILE_BYTES = 900_000  # of a ConfigMap, which etcd limits to 1 MiB
METRICS_PORT = 29400
SUBMISSION_VARIABLE = "CRATON_SUBMISSION"  # the pod's submission ID
SLOT_VARIABLE = "CRATON_SLOT"  # the group of the pod's slot, for a member
KILL_MARGIN_SECONDS = 30  # after the ranks' grace period, for the agent's last records
WAIT_FOR_NODE_SECONDS = 3600.0  # replacing or repairing a node takes 15 minutes and more
DEFAULT_LABELS = {"node": "kubernetes.io/hostname", "zone": "topology.kubernetes.io/zone"}


@dataclass(frozen=True)
class PodMount:
    """A folder of storage, at the same path in every pod."""

    name: str
    path: str
    claim: str = ""  # "": a hostPath of the same path


@dataclass(frozen=True)
class Near:
    """The topology constraint of the pods."""

    level: str  # node, leaf, spine or zone
    label: str  # of the nodes
    tier: int | None
    is_required: bool


@dataclass(frozen=True)
class KubernetesTarget:
    run: str
    name: str  # of the objects
    kind: str  # of the job
    submission: str  # identifies one submission of the run
    namespace: str  # "": the namespace of the caller's context
    gang: str
    image: str
    num_pods: int
    gang_pods: int  # minimum number of pods for the gang to start
    directory: str  # the run directory in the pods
    mounts: tuple[PodMount, ...]
    resources: dict[str, str]
    limits: dict[str, str]
    grace_seconds: int
    restarts: int
    give_up_seconds: float
    is_scratch: bool = False  # the run directory is in the pod, and deleted with it
    files: dict[str, str] = field(default_factory=dict)  # of a run directory that the first pod creates
    code: bytes = b""  # packed, of a command whose run directory the first pod creates
    drafted_at: str = ""  # the run directory's path in the files
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
    shared_memory_bytes: int = 0  # 0: Kubernetes' default
    uses_efa: bool = False
    pins_memory: bool = False  # memory shared by GPUs and network adapters
    server_port: int = 0
    is_open: bool = False  # the server listens beyond its own pod
    user: tuple[int, int] | None = None  # None: the image's user
    is_non_root: bool = False  # the cluster file declares that the user is not root
    has_slots: bool = False  # for its members, in the same JobSet
    slot: str = ""  # of a slot for members: the name of its replicated job; all else is of the run that owns them

    @property
    def is_ordered(self) -> bool:
        """Whether the pods are ordered by topology. A server's pods are not: its first pod takes the requests. Nor are
        those of members, which start later."""
        return self.num_pods > 1 and self.kind != "serve" and not self.slot

    @property
    def nodes_map(self) -> str:
        return nodes_map_of(self.name)

    @property
    def own_secret(self) -> str:
        return f"{self.name}-secrets"

    @property
    def own_secrets(self) -> list[str]:
        """The variables whose values come from the caller's shell."""
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
    """Build the target. `shell_variables` are the caller's, `user` is the owner of an existing run directory, `code` is
    a command's packed code."""
    job, launch = draft.job, draft.launch
    scheduler = (job.cluster.file.scheduler if job.cluster.file else None) or SchedulerSettings(kind="kubernetes")
    if job.run.copies > 1:
        raise StartError(
            f"{job.where('run', 'copies')}run.copies needs Slurm's job arrays; on Kubernetes start each copy with its "
            "own --name"
        )
    if job.kind == "serve" and job.run.time_limit:
        where = job.where("run", "time_limit")
        raise StartError(
            f"{where}run.time_limit: Kubernetes restarts a server whenever it exits, so a limit would only end it "
            "repeatedly; leave it out, and end the server with `craton stop`"
        )
    mounts = mounts_of(job)
    directory, is_scratch = directory_of(job, run, mounts, len(launch.nodes))
    check_visible(job, mounts)
    check_functions(job, launch.env.get(JOB_FOLDER, ""), mounts)
    exists = str(run) == directory
    files = {} if exists else draft.files()
    if sum(len(text.encode()) for text in files.values()) > MAX_FILE_BYTES:
        raise StartError(
            f"the files of this run exceed the {MAX_FILE_BYTES:,} bytes of a ConfigMap; start it on a machine that "
            "mounts the cluster's shared storage, with CRATON_RUNS on it"
        )
    if scheduler.non_root and exists and user is not None and user[0] == 0:
        raise StartError(
            f"the cluster file sets `non_root:`, but the pods would run as the owner of {run}, which is root; start it "
            "as another user"
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
    """Return the name of the ConfigMap with the topology of the cluster's nodes."""
    return f"{name}-nodes"


def mounts_of(job: Job) -> tuple[PodMount, ...]:
    """Return the mounts: shared storage always, a node's NVMe only if the job uses it."""
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
    """Return (the run directory in the pods, whether it is deleted with the pod)."""
    shared = next((mount for mount in mounts if mount.name == "shared"), None)
    if shared is None:
        if num_pods > 1:
            raise StartError(
                f"{job.where('cluster')}{num_pods} pods need shared storage for the run directory and checkpoints; add "
                "`storage: {shared: {path: /fsx, claim: NAME}}` to the cluster file"
            )
        return f"{SCRATCH}/runs/{job.name}", True
    if _is_inside(str(run), shared.path):
        return str(run), False
    stated = job.cluster.file.runs if job.cluster.file else None
    root = f"{shared.path.rstrip('/')}/runs" if stated is None or is_url(stated) else stated.rstrip("/")
    if not _is_inside(root, shared.path):
        raise StartError(
            f"the cluster file's `runs:` is {root}, which is not below the shared storage {shared.path}; all pods must "
            "see it"
        )
    return f"{root}/{job.name}", False


def check_visible(job: Job, mounts: tuple[PodMount, ...]) -> None:
    """Refuse files of this machine that no pod sees, and so no rank could read."""
    mounted = [mount.path for mount in mounts]
    for location, path in files_of_suites(job):
        if not any(_is_inside(path, place) for place in mounted):
            places = f"below {' or '.join(mounted)}" if mounted else "on storage that the cluster file mounts"
            raise StartError(
                f"{job.where(*location)}{'.'.join(location)}: {path} is not visible in the pods; keep suites and their "
                f"problems {places}, or use a built-in suite"
            )
    for path in _paths(job):
        if not any(_is_inside(path, place) for place in mounted):
            places = (
                f"below {' or '.join(mounted)}"
                if mounted
                else "on storage that the cluster file mounts (storage.shared)"
            )
            raise StartError(
                f"{job.where('data')}{path} is not visible in the pods; keep it {places}, or in S3. Text is tokenized "
                "into CRATON_CACHE: set that to a folder there too"
            )


def check_functions(job: Job, folder: str, mounts: tuple[PodMount, ...]) -> None:
    """Refuse a user's own functions in a folder that no pod sees. Functions outside the job's folder are imported from
    the image."""
    mounted = [mount.path for mount in mounts]
    if not folder or any(_is_inside(folder, place) for place in mounted):
        return
    for location, function in (*job.functions.items(), *functions_of_suites(job)):
        key = ".".join(str(part) for part in location)
        module = Path(folder, *function.partition(":")[0].split(".")[:1])
        if module.is_dir() or module.with_suffix(".py").is_file():
            places = f"below {' or '.join(mounted)}" if mounted else "on storage that the cluster file mounts"
            raise StartError(
                f"{job.where(*location)}{key}: {function} is in {folder}, which is not visible in the pods; keep "
                f"the job file and its functions {places}, or install them in the image"
            )


def network_of(instance: Instance, scheduler: SchedulerSettings) -> dict[str, str]:
    """Return the resource requests that make the node's network adapters visible in a pod.

    Karpenter creates no node for a pod that requests huge pages, because no instance type offers them in advance
    (https://github.com/aws/karpenter-provider-aws/issues/3315): on its pools EFA runs without them.
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
    """Return (requests, limits) of a pod: a node, or the share of it that a server takes. CPU has no limit: a throttled
    rank makes all others wait."""
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
    """Return the memory of a pod in bytes; 0 if the node's is unknown."""
    return instance.host_memory_bytes * USABLE_SHARE * _share(instance, num_gpus) if instance else 0.0


def near_of(job: Job, scheduler: SchedulerSettings) -> Near | None:
    """Translate `placement: {within: leaf}` into the cluster's label or tier."""
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
                f"{where}placement within {level}: Volcano identifies levels by tier; add `levels: {{{level}: "
                "{tier: 1}}` to the cluster file, 1 being the closest"
            )
    elif not label:
        raise StartError(
            f"{where}placement within {level}: the cluster file has no label for it; add `levels: {{{level}: "
            "{label: topology.k8s.aws/network-node-layer-3}}`, or run `craton cluster discover`"
        )
    if scheduler.gang == "kai" and not scheduler.topology:
        raise StartError(
            f"{where}placement within {level}: KAI needs the name of a Topology; add `scheduler: {{topology: NAME}}` "
            "to the cluster file"
        )
    # No scheduler can wait for a while and then relax: with `wait:` the placement is only preferred.
    near = Near(
        level, check_label_key(label, f"levels.{level}.label") if label else "", tier, job.placement.wait is None
    )
    if scheduler.node_pool:
        check_can_be_made(near, scheduler, where)
    return near


def check_can_be_made(near: Near, scheduler: SchedulerSettings, where: str) -> None:
    """Refuse a placement for which a Karpenter pool may never have the nodes."""
    pool = f"{where}placement within {near.level}: Karpenter creates the nodes of {scheduler.node_pool}"
    if scheduler.gang == "kueue":
        raise StartError(
            f"{pool} for jobs that Kueue has admitted, and Kueue places jobs only on existing nodes; remove "
            "`placement:`, or the cluster file's `node_pool:`"
        )
    if near.is_required and near.level not in DEFAULT_LABELS:
        raise StartError(
            f"{pool}, and their {near.level} is unknown in advance, so the placement may never be possible; make it "
            "preferred with `wait:`, or remove the cluster file's `node_pool:`"
        )


def secrets_of(job: Job, shell_variables: Collection[str]) -> dict[str, str]:
    """Return variable → its Secret: the run's own if the caller's shell has the variable, else the cluster's."""
    of_server = [job.serve.api_keys, job.serve.admin_key] if job.serve else []
    wanted = [*job.run.secrets, *(name for name in of_server if name)]
    own = f"{object_name(job.name)}-secrets"
    return {name: own if name in shell_variables else CLUSTER_SECRET for name in wanted}


def queue_of(job: Job, scheduler: SchedulerSettings) -> str:
    queue = job.run.queue or scheduler.queue or ""
    if scheduler.gang in ("kueue", "kai") and not queue:
        raise StartError(
            f"{job.where('run')}{scheduler.gang} admits jobs by queue, and none is set; set `run: {{queue: NAME}}`, or "
            "`queue:` under the cluster file's scheduler"
        )
    if scheduler.gang == "none" and queue:
        raise StartError(
            f"{job.where('run', 'queue')}queue {queue}: `queue:` requires a gang scheduler; set `gang:` to kueue, kai "
            "or volcano under the cluster file's scheduler, or remove `queue:`"
        )
    return _labelled(job, queue, "queue")


def give_up_of(job: Job) -> float:
    """Return how long to wait for a lost node: the job's value, else one hour."""
    stated = job.recover.give_up
    return WAIT_FOR_NODE_SECONDS if stated == RecoverSection().give_up else stated


def image_of(job: Job, scheduler: SchedulerSettings) -> str:
    image = job.run.image or scheduler.image
    if not image:
        raise StartError(
            f"{job.where('run')}a pod needs an image with Python and Craton; set `run: {{image: ...}}`, or `image:` "
            "under the cluster file's scheduler"
        )
    return check_image(image, job.where("run", "image"))


def instance_types_of(job: Job) -> tuple[str, ...]:
    """Return the AWS instance type as in node labels; HyperPod prefixes it with `ml.`."""
    file = job.cluster.file
    name = file.instance if file else (None if job.cluster.is_local else job.cluster.instance)
    return (name, f"ml.{name}") if name and "." in name and name == name.lower() else ()


def _instance(draft: Draft) -> Instance:
    plan = draft.plan or draft.serving
    cluster = plan.cluster if plan else resolve_cluster(draft.job.cluster, draft.job.price)
    return cluster.instance


def _share(instance: Instance, num_gpus: int) -> float:
    """Return the pod's share of a node: a server with some of its GPUs leaves the rest to others."""
    return num_gpus / instance.num_gpus if 0 < num_gpus < instance.num_gpus else 1.0


def _mount(name: str, numbers: StorageNumbers) -> PodMount:
    path = check_path(numbers.path or "", f"storage.{name}.path")
    claim = check_name(numbers.claim, f"the cluster file's storage.{name}.claim") if numbers.claim else ""
    return PodMount(name, path, claim)


def _paths(job: Job) -> list[str]:
    """Return the local paths that the ranks would read or write."""
    written = [path for path, _ in (*job.data.mixture, *job.data.validation_mixture)]
    written += [entry for entry in (job.data.tokenizer, job.model) if isinstance(entry, str)]
    if job.serve:
        written += [*job.serve.adapters.values(), *([job.serve.draft_model] if job.serve.draft_model else [])]
    if job.kind in TRAINING_KINDS:
        storage = job.cluster.file.storage if job.cluster.file else None
        located = [place_of(tier, storage, Path(SCRATCH, job.name)) for tier in job.checkpoint.tiers]
        written += [item.place for item in located if not item.is_inside_run and not item.is_node_local]
    written += [path for _, path in files_of_suites(job)]
    return [path for path in written if path.startswith("/")]


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([os.path.normpath(path), os.path.normpath(folder)]) == os.path.normpath(folder)


def _named(job: Job, value: str | None, key: str) -> str:
    return check_name(value, f"run.{key}", job.where("run", key)) if value else ""


def _labelled(job: Job, value: str | None, key: str) -> str:
    return check_label_value(value, f"run.{key}", job.where("run", key)) if value else ""


def first_host(target: KubernetesTarget) -> str:
    """Return the DNS name of the first pod, which stays the same when the pod is replaced."""
    if target.kind == "serve":
        return f"{target.name}-0.{target.name}"
    of_gang = {"kueue": "-node-0", "kai": "-node-0", "volcano": "-node", "none": ""}
    infix = "-node-0" if target.has_slots else of_gang[target.gang]
    return f"{target.name}{infix}-0.{target.name}"


def settled_env(target: KubernetesTarget) -> Mapping[str, str]:
    """Return the container's environment without secrets; the job's own variables take precedence."""
    names = {
        SUBMISSION_VARIABLE: target.submission,
        **({SLOT_VARIABLE: target.slot} if target.slot else {"CRATON_FIRST_POD": first_host(target)}),
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
    if target.user is not None:  # a user that may not exist in the image, and has no home there
        names |= {"HOME": "/tmp", "USER": "craton"}
    if target.uses_efa:
        # A missing EFA fails loudly; the interfaces named are not for NCCL's bootstrap (AWS EFA cheat sheet, 2026-07).
        names |= {"FI_PROVIDER": "efa", "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
    if target.uses_efa and "hugepages-2Mi" not in target.resources:
        names["FI_EFA_USE_HUGE_PAGE"] = "0"
    return {**names, **target.env}
