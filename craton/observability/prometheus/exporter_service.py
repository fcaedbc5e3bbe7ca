"""What starts our exporter on every node: a DaemonSet on Kubernetes, a unit of systemd elsewhere.

Both may read what a node tells and change nothing, as far as that can be said: /dev/kmsg and the drives' SMART logs are
devices, which a container opens only when it is privileged.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from craton.infrastructure import CatalogError
from craton.infrastructure.catalog import instance
from craton.job.cluster import ClusterFile
from craton.observability.prometheus.kubernetes import EXPORTER_LABELS, NAMESPACE, Manifest, MonitoredCluster
from craton.observability.prometheus.targets import EXPORTERS

NAME = "craton-exporter"
DAEMON_SET = f"daemonset-{NAME}.yaml"
UNIT = f"{NAME}.service"
PROGRAM = "/opt/craton/bin/craton"  # where the set-up of provisioned nodes puts it
HOST = "/host"
PORT = EXPORTERS["craton-node"]
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
HAS_GPU = "nvidia.com/gpu.present"  # NVIDIA's feature discovery, part of its operator, says so of a node
# SYSLOG: the kernel log; SYS_PTRACE: of whose run the processes on cards are; SYS_ADMIN: SMART; DAC_READ_SEARCH: runs.
CAPABILITIES = ("CAP_SYSLOG", "CAP_SYS_PTRACE", "CAP_SYS_ADMIN", "CAP_DAC_READ_SEARCH")


def exporter_daemons(cluster: ClusterFile, monitored: MonitoredCluster, runs: str) -> Manifest | None:
    """A pod on every node with GPUs; None where the cluster file names no image for it. `runs`: their folder, as jobs
    have it; "": they are in none."""
    scheduler = cluster.scheduler
    if scheduler is None or not scheduler.image:
        return None
    claim = _claim(cluster, runs)
    mounts = [{"name": "host", "mountPath": HOST, "readOnly": True, "mountPropagation": "HostToContainer"}]
    volumes: list[Manifest] = [{"name": "host", "hostPath": {"path": "/", "type": "Directory"}}]
    if claim:
        name, path = claim
        mounts.append({"name": "runs", "mountPath": path, "readOnly": True})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": name}})
    place = (runs if claim else HOST + runs).replace("$", "$$")  # Kubernetes replaces $(NAME)
    container = {
        "name": "exporter",
        "image": scheduler.image,
        "command": ["python3", "-m", "craton", "observe", "node"],
        "args": [
            f"--root={HOST}",
            "--listen=$(ADDRESS)",
            f"--port={PORT}",
            "--name=$(NODE)",
            f"--node-exporter=http://$(HOST):{EXPORTERS['node']}/metrics",
            *([f"--runs={place}"] if runs else []),
        ],
        "env": [
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},  # it looks at all cards and asks for none
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
        ],
        "ports": [{"name": "metrics", "containerPort": PORT}],
        # Privileged: /dev/kmsg and drives are devices of the node. It has no token, and may write nowhere.
        "securityContext": {"privileged": True, "runAsUser": 0, "readOnlyRootFilesystem": True},
        "volumeMounts": mounts,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
    }
    pod: Manifest = {
        "hostPID": True,  # processes on cards, and their runs
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **_nodes(cluster),
        "tolerations": [{"operator": "Exists"}],  # a node that takes no jobs is looked at all the more
        "containers": [container],
        "volumes": volumes,
    }
    space = scheduler.namespace if claim else NAMESPACE  # a claim is there for the pods of its namespace alone
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {
            "name": NAME,
            **({"namespace": space} if space else {}),
            "labels": {**monitored.object_labels, **EXPORTER_LABELS},
        },
        "spec": {
            "selector": {"matchLabels": EXPORTER_LABELS},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
            "template": {"metadata": {"labels": EXPORTER_LABELS}, "spec": pod},
        },
    }


def exporter_unit(runs: str) -> str:
    """`runs`: their folder on the nodes; "": they are in none. Nothing here gives the service mounts of its own: it
    tells which file systems are read-only, and would take its own for the node's."""
    options = ["--listen=0.0.0.0", f"--port={PORT}", *([f"--runs={runs}"] if runs else [])]
    lines = [
        "[Unit]",
        "Description=This node's GPUs, network, file systems and drives as metrics (craton observe node)",
        "Wants=network-online.target",
        "After=network-online.target remote-fs.target",
        "",
        "[Service]",
        f"ExecStart={PROGRAM} observe node {' '.join(map(_word, options))}",
        "Restart=always",
        "RestartSec=10",
        f"CapabilityBoundingSet={' '.join(CAPABILITIES)}",
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _claim(cluster: ClusterFile, runs: str) -> tuple[str, str] | None:
    """The claim that runs are on, and where jobs mount it; None: nodes have them in their own files."""
    shared = cluster.storage.shared
    if shared is None or not shared.claim or not shared.path:
        return None
    return (shared.claim, shared.path) if PurePosixPath(runs).is_relative_to(shared.path) else None


def _nodes(cluster: ClusterFile) -> Manifest:
    """By the instance type, which every node on AWS has as a label (HyperPod puts `ml.` before), else by NVIDIA's."""
    try:
        kind = instance(cluster.instance or "").name
    except CatalogError:
        kind = cluster.instance or ""
    if "." not in kind:
        return {"nodeSelector": {HAS_GPU: "true"}}
    kinds = {"key": INSTANCE_TYPE, "operator": "In", "values": [kind, f"ml.{kind}"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [kinds]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


def _word(text: str) -> str:
    """As systemd.service(5) reads it back: %, $ and quotes mean something there."""
    for letter, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        text = text.replace(letter, written)
    return f'"{text}"' if any(letter.isspace() or letter in "'\"" for letter in text) else text
