"""Render a cluster file into all files that create its cluster on AWS. Pure: no queries, nothing is created."""

from __future__ import annotations

from dataclasses import dataclass

from craton.infrastructure.aws.eks import eks_stack
from craton.infrastructure.aws.hyperpod import hyperpod_eks, hyperpod_slurm
from craton.infrastructure.aws.interfaces import level_labels
from craton.infrastructure.aws.nodes import device_plugins, health_checks, karpenter, shared_volume
from craton.infrastructure.aws.parallelcluster import parallelcluster
from craton.infrastructure.aws.pcs import pcs
from craton.infrastructure.aws.queues import machine_label, namespace_object, queue_objects, topology_name
from craton.infrastructure.aws.site import SLURM_TARGETS, AwsSite, site_of
from craton.job.cluster import ClusterFile

ASSET_TAG = "/sys/devices/virtual/dmi/id/board_asset_tag"  # holds the instance id, on Nitro


@dataclass(frozen=True)
class Provisioning:
    """Files for the user to review and apply: name → text; `notes` are to be read first."""

    target: str
    files: dict[str, str]
    notes: tuple[str, ...]
    steps: tuple[str, ...]  # what to do with the files, in order


def provision(file: ClusterFile, target: str) -> Provisioning:
    """Render all files that `target` needs for the cluster; ProvisionError lists everything that is missing."""
    site = site_of(file, target)
    files = _files(site, target)
    notes, steps = (*site.notes, *_notes(site, target)), _steps(site, target, files)
    files["README.md"] = _readme(site, target, notes, steps)
    return Provisioning(target, files, notes, steps)


def _files(site: AwsSite, target: str) -> dict[str, str]:
    machine = machine_label(site, target)
    files = {
        "parallelcluster": parallelcluster,
        "hyperpod-slurm": hyperpod_slurm,
        "pcs": pcs,
        "hyperpod-eks": hyperpod_eks,
        "eks": eks_stack,
    }[target](site)
    if target not in SLURM_TARGETS:
        files |= namespace_object(site)
        if target == "eks":
            files |= device_plugins(site, machine) | karpenter(site)
        files |= queue_objects(site, machine) | shared_volume(site) | health_checks(site, machine)
    return files


def _notes(site: AwsSite, target: str) -> list[str]:
    notes = []
    if target not in SLURM_TARGETS:
        stated = site.file.levels
        levels = any(level and level.label for level in (stated.leaf, stated.spine, stated.zone))
        if not levels and not site.node_pool:
            level_names = {name: label for name, label in level_labels(site).items() if name in ("leaf", "spine")}
            labels = ", ".join(f"{name}: {{label: {label}}}" for name, label in level_names.items())
            notes.append(f"for `placement: {{within: leaf}}` add to the cluster file: levels: {{{labels}}}")
        if not (site.file.scheduler and site.file.scheduler.image):
            notes.append("no health check was written: it runs in scheduler.image, which the cluster file does not set")
        if site.file.scheduler is None or site.file.scheduler.gang == "none":
            notes.append("scheduler.gang is none: no queues were written, and jobs get no gang scheduling")
    if site.aws.capacity_reservation and not site.aws.placement_group:
        notes.append(
            "no placement group is created: a reservation fixes the placement; if it was made in a placement "
            "group, set aws.placement_group to its name"
        )
    if site.node_pool:
        topology = "Kueue got no topology, " if site.file.scheduler and site.file.scheduler.gang == "kueue" else ""
        notes.append(
            f"Karpenter does not know a node's switch or huge pages before the node exists: {topology}"
            "`placement` within a leaf or spine is not guaranteed, and pods get no huge pages"
        )
    if site.node_pool and site.own_placement_group:
        notes.append("Karpenter takes a placement group by name only: create one and set aws.placement_group")
    if site.node_pool and not site.aws.karpenter_role:
        notes.append(
            f"Karpenter's nodes get the role KarpenterNodeRole-{site.name}: create it before the stack, whose access "
            "entry names it, or set aws.karpenter_role"
        )
    if not site.aws.capacity_block and not site.aws.capacity_reservation and not site.aws.training_plan:
        notes.append("no reserved capacity is set: nodes are on-demand and may be unavailable")
    if not site.lustre.file_system and not site.lustre.data:
        notes.append("the file system is not linked to S3 data: set storage.object.path or aws.data")
    return notes


def _steps(site: AwsSite, target: str, files: dict[str, str]) -> tuple[str, ...]:
    region, name = f"--region {site.region}", site.name
    deploy = f"aws cloudformation deploy {region} --stack-name {{}} --template-file {{}} --capabilities CAPABILITY_IAM"
    outputs = f"aws cloudformation describe-stacks {region} --stack-name {{}} --query 'Stacks[0].Outputs'"
    gang = site.file.scheduler.gang if site.file.scheduler else "none"
    steps = []
    if any(path.startswith("scripts/") for path in files):
        if not site.aws.package:
            steps.append(
                "pip wheel --no-deps --wheel-dir scripts CLONE  # CLONE: your clone of Craton, or set aws.package"
            )
        steps.append(f"aws s3 cp --recursive scripts {site.scripts} {region}")
    if "storage.yaml" in files:
        steps.append(deploy.format(f"{name}-storage", "storage.yaml"))
        steps.append(
            outputs.format(f"{name}-storage") + "  # copy to aws.file_system and aws.file_system_mount; render again"
        )
    if target == "parallelcluster":
        steps.append(f"pcluster create-cluster {region} --cluster-name {name} --cluster-configuration cluster.yaml")
    elif target in ("pcs", "eks"):
        steps.append(deploy.format(name, "cluster.yaml"))
    else:
        steps.append(f"aws sagemaker create-cluster {region} --cli-input-json file://create-cluster.json")
    if target == "eks" and not site.lustre.file_system:
        steps.append(
            outputs.format(name) + "  # copy to aws.file_system and aws.file_system_mount; render again for the volume"
        )
    if target in ("eks", "hyperpod-eks"):
        cluster = (site.aws.eks_cluster or name).rsplit("/", 1)[-1] if target == "hyperpod-eks" else name
        steps.append(f"aws eks update-kubeconfig {region} --name {cluster}")
        charts = [name for name in (gang, "karpenter" if site.node_pool else "") if name not in ("", "none")]
        if charts:
            steps.append(
                f"# install {' and '.join(charts)} with {'their' if len(charts) > 1 else 'its'} Helm "
                f"chart{'s' if len(charts) > 1 else ''}, then:"
            )
        # the configuration of Volcano's scheduler and controller already exists and belongs to its Helm chart
        force = " --force-conflicts" if gang == "volcano" else ""
        steps.append(f"kubectl apply --server-side{force} -f manifests/")
    steps += _discovery(site, target, gang)
    steps.append(
        "craton observe render --cluster CLUSTER --out observe  # CLUSTER: the file that this was rendered from"
    )
    return tuple(steps)


def _discovery(site: AwsSite, target: str, gang: str) -> list[str]:
    """Return the commands that discover the topology. ParallelCluster and PCS set no topology in Slurm, and EC2 does
    not know Slurm's node names: each node reports its name and, on Nitro, its instance id. Nodes of a pool do not exist
    yet."""
    if site.node_pool:
        return []
    if target == "hyperpod-slurm":
        return ["craton cluster discover --from slurm --write slurm-tree"]
    if target in SLURM_TARGETS:
        pair = f"""'printf "\\"%s\\": \\"%s\\"\\n" "$(tr -d "[:space:]" < {ASSET_TAG})" "$SLURMD_NODENAME"'"""
        command = f"srun --partition={site.queue} --nodes={site.num_nodes} --ntasks-per-node=1 sh -c {pair}"
        return [
            "# on the cluster, once all nodes are up: list the instance id of each node",
            f"{command} | paste -sd, - | sed 's/.*/{{&}}/' > instances.json",
            f"craton cluster discover --from ec2 --region {site.region} --names instances.json --write slurm-tree",
        ]
    form = f"{gang} --name {topology_name(site)}" if gang in ("kueue", "kai") else gang if gang != "none" else "levels"
    return [f"craton cluster discover --from kubernetes --write {form}"]


def _readme(site: AwsSite, target: str, notes: tuple[str, ...], steps: tuple[str, ...]) -> str:
    lines = [
        f"# {site.name} for {target}",
        "",
        f"{site.num_nodes} x {site.instance.name} in {site.region}. Rendered by Craton; nothing was created.",
        "",
        *([*(f"- {note}" for note in notes), ""] if notes else []),
        "Read the files, then:",
        "",
        "```",
        *steps,
        "```",
    ]
    return "\n".join(lines) + "\n"
