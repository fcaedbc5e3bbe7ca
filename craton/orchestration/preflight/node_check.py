"""Pre-flight: check that a node meets the job's expectations before the first step.

`examine` probes a node and judges it. `preflight` does so for a run about to start here and records the findings in the
run's events. `diagnose` is `craton doctor` on one machine, alone or as a node of a run. All checks (`gpus`, `network`,
`host`, `software`) are pure functions of the probe report, so the image of a node is judged like the node.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from craton.agent import Launch, read_launch
from craton.formatting import counted
from craton.infrastructure import CatalogError, Instance, resolve_cluster
from craton.infrastructure.catalog import instance
from craton.infrastructure.probes import NodeReport, NodeRoot, probe_node, report_json
from craton.job import Job, load_job
from craton.job.cluster import ClusterFile, ClusterRef, StorageNumbers, load_cluster
from craton.ml.verifiers import probe_isolation
from craton.orchestration.errors import StartError
from craton.orchestration.preflight.finding import Expected, PreflightFinding, for_job, ordered, worst
from craton.orchestration.preflight.gpus import check_gpus
from craton.orchestration.preflight.host import check_host
from craton.orchestration.preflight.network import check_network
from craton.orchestration.preflight.selftest import run_bandwidth, run_compute
from craton.orchestration.preflight.several_nodes import check_bandwidth, check_compute
from craton.orchestration.preflight.software import check_isolation, check_software
from craton.planning.rates import pair_bytes_per_second
from craton.telemetry import RunDirectory
from craton.telemetry.files import LineWriter

SCHEMA = 1
MAX_LINKS = 8  # symbolic links in sequence in a storage path
MEASURED_BYTES = 256 * 2**20  # message size of the bandwidth test on GPUs


@dataclass(frozen=True)
class Diagnosis:
    """The result of `craton doctor` on one node or several."""

    findings: list[PreflightFinding]
    nodes: list[dict[str, Any]] = field(default_factory=list)  # node, instance, report, compute, compute_failed
    bandwidth: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON; within a schema keys are added, never changed."""
        return {
            "schema": SCHEMA,
            "worst": worst(self.findings),
            "findings": [finding.to_json() for finding in self.findings],
            "nodes": self.nodes,
            "bandwidth": self.bandwidth,
        }


def examine(
    root: NodeRoot, expected: Expected | None = None, environment: Mapping[str, str] | None = None
) -> tuple[NodeReport, list[PreflightFinding]]:
    """Probe a node and judge it, the most severe first. Without expectations the node's own type is expected."""
    report = probe_node(root)
    wanted = followed(expected, root, report) if expected is not None else Expected(instance_of(report))
    return report, judge(report, wanted, root.environment if environment is None else environment)


def judge(report: NodeReport, expected: Expected, environment: Mapping[str, str]) -> list[PreflightFinding]:
    return ordered(
        [
            *check_gpus(report, expected),
            *check_network(report, expected, environment),
            *check_host(report, expected, environment),
            *check_software(report, expected),
        ]
    )


def instance_of(report: NodeReport) -> Instance | None:
    """Return the catalog entry of this machine: EC2 sets the product name to the instance type."""
    try:
        return instance(report.host.product) if report.host.product else None
    except CatalogError:
        return None


def expected_of(cluster: str | None) -> Expected | None:
    """Return the expected node of a cluster file or catalog name; None without either."""
    if cluster is None:
        return None
    if not cluster.endswith((".yaml", ".yml")) and "/" not in cluster:
        return Expected(instance(cluster))
    file = load_cluster(cluster)
    if file.machine == "local":
        return Expected()
    machine = resolve_cluster(ClusterRef(instance=file.machine, num_nodes=1, file=file)).instance
    return with_storage(Expected(machine), file)


def preflight(run: RunDirectory, launch: Launch, node: str, root: NodeRoot | None = None) -> list[PreflightFinding]:
    """Run the quick checks on a node of a run before its agent starts, and record them as an event.

    The caller decides: a `fail` is a node to exclude. Nothing is measured, so a healthy node takes less than two
    seconds.
    """
    begin = time.monotonic()
    place = root or NodeRoot()
    job = load_job(run.job_path)
    _, examined = examine(place, expected_by(job, launch), {**place.environment, **launch.env})
    findings = [replace(finding, node=node) for finding in for_job(examined, job)]
    # The node's events file has one writer at a time: before its agent starts, that is this process.
    record_preflight(run, launch.generation, node, findings, time.monotonic() - begin)
    return findings


def expected_by(job: Job, launch: Launch) -> Expected:
    """Return what a run needs from each node; fewer processes than GPUs still use all GPUs. NVMe paths are checked only
    if a checkpoint tier uses them."""
    node_type = None if job.cluster.is_local else resolve_cluster(job.cluster, job.price).instance
    expected = Expected(node_type, launch.node_gpus if launch.gpus else 0, needs_network=launch.working_nodes > 1)
    if job.cluster.is_local or job.cluster.file is None:
        return expected
    expected = with_storage(expected, job.cluster.file)
    return expected if any(tier.to == "nvme" for tier in job.checkpoint.tiers) else replace(expected, nvme_path="")


def with_storage(expected: Expected, file: ClusterFile) -> Expected:
    """Add the storage paths of the cluster file. Kubernetes itself ensures mounts by claim: no pod starts without."""

    def place(tier: StorageNumbers | None) -> str:
        stated = tier.path if tier and tier.path and not tier.claim else ""
        return stated.rstrip("/") if stated.startswith("/") else ""

    nvme, shared = file.storage.nvme, file.storage.shared
    kind = (shared and shared.kind) or ""
    return replace(expected, nvme_path=place(nvme), shared_path=place(shared), shared_kind=kind)


def followed(expected: Expected, root: NodeRoot, report: NodeReport) -> Expected:
    """Resolve symbolic links in storage paths, on the root disk only. Other mounts are not accessed: one whose server
    is gone would hang."""

    def real(path: str) -> str:
        for _ in range(MAX_LINKS):
            mount = report.disks.mount_of(path)
            parts = path.split("/") if mount is not None and mount.path == "/" else []
            above = ["/".join(parts[:count]) for count in range(2, len(parts) + 1)]
            link = next((item for item in above if root.target(item)), None)
            if link is None:
                break
            path = os.path.normpath(os.path.join(os.path.dirname(link), root.target(link)) + path[len(link) :])
        return path

    return replace(expected, nvme_path=real(expected.nvme_path), shared_path=real(expected.shared_path))


def record_preflight(
    run: RunDirectory, generation: int, node: str, findings: list[PreflightFinding], seconds: float
) -> None:
    """Record one event: worst severity, duration, and all findings that are not ok."""
    messages = [finding.to_json() for finding in findings if finding.severity != "ok"]
    line = {
        "time": time.time(),
        "step": 0,
        "generation": generation,
        "node": node,
        "event": "preflight",
        "worst": worst(findings),
        "seconds": round(seconds, 3),
        "checks": len(findings),
        "findings": messages,
    }
    writer = LineWriter(run.events_path(node))
    writer.append([json.dumps(line, separators=(",", ":")).encode()])
    writer.close()


def node_name(report: NodeReport, root: NodeRoot) -> str:
    """Return Slurm's name of the node if Slurm started this process, else the host name."""
    return root.environment.get("SLURMD_NODENAME") or report.host.name or root.path.name or socket.gethostname()


def diagnose(
    root: Path | None = None,
    cluster: str | None = None,
    *,
    run: RunDirectory | None = None,
    compute: bool = False,
    bandwidth: bool = False,
) -> Diagnosis:
    """Diagnose this machine or the image of a node, with self-tests on request. With a run, judge it as one of its
    nodes: by the needs of its job and launch, with the environment of its ranks."""
    if root is not None and (compute or bandwidth):
        raise StartError("--root reads the image of a node, which cannot compute; remove --compute and --bandwidth")
    if root is not None and not root.is_dir():
        raise StartError(f"--root {root} is not a folder; give the root of a node image (docs/doctor.md)")
    place = NodeRoot(root) if root is not None else NodeRoot()
    job, launch = (load_job(run.job_path), read_launch(run)) if run is not None else (None, None)
    wanted = expected_by(job, launch) if job is not None and launch is not None else expected_of(cluster)
    environment = {**place.environment, **(launch.env if launch is not None else {})}
    report, findings = examine(place, wanted, environment)
    if root is None:
        findings += check_isolation(probe_isolation())
    name = node_name(report, place)
    machine = wanted.instance if wanted is not None else instance_of(report)
    devices: list[dict[str, Any]] = []
    untested: list[PreflightFinding] = []
    measured = None
    count = len(report.gpus.cards)
    if compute:
        devices, died = run_compute()
        untested = died or check_tested(devices, count, place)
        findings += [*untested, *check_compute({name: devices})]
    if bandwidth:
        due = pair_bytes_per_second(machine, MEASURED_BYTES, between_nodes=False) if machine and count > 1 else 0.0
        measured, failed = run_bandwidth(count, due)
        findings += failed if measured is None else check_bandwidth(measured)
    node = {
        "node": name,
        "instance": machine.name if machine else None,
        "report": report_json(report),
        "compute": devices,
        "compute_failed": [finding.to_json() for finding in untested],
    }
    if job is not None:
        findings = for_job(findings, job)
    findings_in_order = ordered(replace(finding, node=finding.node or name) for finding in findings)
    return Diagnosis(findings_in_order, [node], measured)


def check_tested(devices: list[dict[str, Any]], num_gpus: int, root: NodeRoot) -> list[PreflightFinding]:
    """Check that the self-test used the GPUs and did not silently fall back to the CPU."""
    if not num_gpus or not devices or "CUDA_VISIBLE_DEVICES" in root.environment:
        return []
    num_tested = sum(device["device"] != "cpu" for device in devices)
    if num_tested >= num_gpus:
        return []
    remedy = "python -c 'import torch; torch.zeros(1, device=\"cuda\")' shows why; reboot the node if it is the driver"
    message = f"nvidia-smi shows {counted(num_gpus, 'GPU')}, and torch could use {num_tested}"
    return [PreflightFinding("infrastructure", "compute", "fail", message, remedy)]
