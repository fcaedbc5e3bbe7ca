"""Discover a topology from Slurm's scontrol, a Kubernetes API, EC2, or a file.

Without a named source, only Slurm or Kubernetes are queried, if one is available here. EC2 is queried read-only with
the user's own credentials.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craton.extras import install_command, install_package_command, missing_text
from craton.infrastructure.errors import TopologyError
from craton.infrastructure.topology.read import read_ec2, read_kubernetes, read_slurm, read_topology
from craton.infrastructure.topology.topology import Topology

SOURCES = ("slurm", "kubernetes", "ec2")
SCONTROL_SECONDS = 30
_BY_HAND = (
    "get the file with `aws ec2 describe-instance-topology --filters "
    "Name=instance-type,Values=p5.48xlarge --output json > topology.json` and give --from topology.json"
)


def discover(source: str | None, names: Mapping[str, str] | None = None, region: str | None = None) -> Topology:
    """Return the topology from `source`: slurm, kubernetes, ec2 or the path of a file; None: what is available here."""
    source = source or _what_is_here()
    if source == "slurm":
        return read_slurm(_scontrol())
    if source == "kubernetes":
        return read_kubernetes(_kubernetes_nodes())
    if source == "ec2":
        return read_ec2({"Instances": _ec2_instances(region)}, names)
    try:
        text = Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = ", ".join(SOURCES)
        raise TopologyError(f"--from {source}: cannot be read ({error}); allowed: {allowed}, or a file") from None
    try:
        return read_topology(text, names)
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from None


def _what_is_here() -> str:
    if shutil.which("scontrol"):
        return "slurm"
    if os.environ.get("KUBECONFIG") or (Path.home() / ".kube" / "config").is_file():
        return "kubernetes"
    raise TopologyError(
        "found neither scontrol nor a kubeconfig; give --from slurm, kubernetes, ec2 or a file with the output of "
        "`scontrol show topology` or `kubectl get nodes -o json`"
    )


def _scontrol() -> str:
    command = ["scontrol", "show", "topology"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False)
    except FileNotFoundError:
        raise TopologyError("scontrol not found; run this on a node of the cluster, or give --from FILE") from None
    except subprocess.TimeoutExpired:
        raise TopologyError(f"scontrol did not answer in {SCONTROL_SECONDS} s; is slurmctld up?") from None
    if done.returncode != 0:
        raise TopologyError(f"scontrol show topology failed: {done.stderr.strip() or done.stdout.strip()}")
    if "Name=" not in done.stdout:
        raise TopologyError(
            "Slurm has no topology (TopologyPlugin is flat); discover it --from kubernetes, ec2 or a file and "
            "write it with --write slurm-tree"
        )
    return done.stdout


def _kubernetes_nodes() -> list[Mapping[str, Any]]:
    try:
        from kr8s.objects import Node
    except ImportError:
        raise TopologyError(
            f"{missing_text('--from kubernetes', ['kr8s'], install_command('kubernetes'))}; or give --from FILE with "
            "the output of `kubectl get nodes -o json`"
        ) from None
    try:
        return [node if isinstance(node, dict) else node.raw for node in Node.list()]
    except Exception as error:  # noqa: BLE001 - for any error of the client the user can only check the same things
        raise TopologyError(f"cannot list the Kubernetes nodes ({error}); check KUBECONFIG and permissions") from None


def _ec2_instances(region: str | None) -> list[Mapping[str, Any]]:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        need = missing_text("--from ec2", ["boto3"], install_package_command("boto3"))
        raise TopologyError(f"{need}; or {_BY_HAND}") from None
    try:
        session = boto3.session.Session(region_name=region)
        if session.get_credentials() is None:
            raise TopologyError(f"no AWS credentials found; sign in (`aws configure`), or {_BY_HAND}")
        if session.region_name is None:
            raise TopologyError("no AWS region is known; give --region, or set AWS_REGION")
        pages = session.client("ec2").get_paginator("describe_instance_topology").paginate()
        return [instance for page in pages for instance in page["Instances"]]
    except (BotoCoreError, ClientError) as error:
        raise TopologyError(
            f"EC2 DescribeInstanceTopology failed: {error}; check the region and this permission"
        ) from None
