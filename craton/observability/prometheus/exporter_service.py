"""The services that start Craton's exporter on every node: a DaemonSet on Kubernetes, a systemd unit elsewhere.

Both only read the node. The container is nevertheless privileged: /dev/kmsg and the drives' SMART logs are devices,
which an unprivileged container cannot open.
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
PROGRAM = "/opt/craton/bin/craton"  # where the setup of provisioned nodes installs it
HOST = "/host"
PORT = EXPORTERS["craton-node"]
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
HAS_GPU = "nvidia.com/gpu.present"  # node label of NVIDIA's GPU feature discovery, part of its operator
# SYSLOG: kernel log; SYS_PTRACE: runs of the processes on GPUs; SYS_ADMIN: SMART; DAC_READ_SEARCH: run directories.
CAPABILITIES = ("CAP_SYSLOG", "CAP_SYS_PTRACE", "CAP_SYS_ADMIN", "CAP_DAC_READ_SEARCH")


def exporter_daemons(cluster: ClusterFile, monitored: MonitoredCluster, runs: str) -> Manifest | None:
    """Return a DaemonSet for all GPU nodes; None when the cluster file names no image. `runs` is the folder of run
    directories as jobs see it; "": there is none."""
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
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},  # reads all GPUs, requests none
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
        ],
        "ports": [{"name": "metrics", "containerPort": PORT}],
        # Privileged: /dev/kmsg and drives are devices of the node. No token, no writable file system.
        "securityContext": {"privileged": True, "runAsUser": 0, "readOnlyRootFilesystem": True},
        "volumeMounts": mounts,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
    }
    pod: Manifest = {
        "hostPID": True,  # to find the processes on GPUs, and their runs
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **_nodes(cluster),
        "tolerations": [{"operator": "Exists"}],  # cordoned and tainted nodes must be watched too
        "containers": [container],
        "volumes": volumes,
    }
    space = scheduler.namespace if claim else NAMESPACE  # only pods of its namespace can mount a claim
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
    """Return the systemd unit. `runs` is the folder of run directories on the nodes; "": there is none. No option here
    gives the service a private mount namespace: it exports which file systems of the node are read-only."""
    options = ["--listen=0.0.0.0", f"--port={PORT}", *([f"--runs={runs}"] if runs else [])]
    lines = [
        "[Unit]",
        "Description=Prometheus exporter for GPUs, network, file systems and drives (craton observe node)",
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
    """Return the PersistentVolumeClaim that holds the runs, and its mount path; None: nodes have them as host files."""
    shared = cluster.storage.shared
    if shared is None or not shared.claim or not shared.path:
        return None
    return (shared.claim, shared.path) if PurePosixPath(runs).is_relative_to(shared.path) else None


def _nodes(cluster: ClusterFile) -> Manifest:
    """Select nodes by instance type, a label of every node on AWS (HyperPod prepends `ml.`), else by NVIDIA's label."""
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
    """Quote a word for systemd.service(5), where %, $ and quotes are special."""
    for letter, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        text = text.replace(letter, written)
    return f'"{text}"' if any(letter.isspace() or letter in "'\"" for letter in text) else text
