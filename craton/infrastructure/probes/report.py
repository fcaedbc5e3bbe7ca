"""All probes of one node at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from craton.infrastructure.probes.disks import Disks, probe_disks
from craton.infrastructure.probes.fabric import Fabric, probe_fabric
from craton.infrastructure.probes.gpus import Gpus, probe_gpus
from craton.infrastructure.probes.host import Host, probe_host
from craton.infrastructure.probes.kernel_log import KernelLog, probe_kernel_log
from craton.infrastructure.probes.root import NodeRoot
from craton.infrastructure.probes.software import Software, probe_software


@dataclass(frozen=True)
class NodeReport:
    host: Host
    gpus: Gpus
    fabric: Fabric
    disks: Disks
    kernel_log: KernelLog
    software: Software


def probe_node(root: NodeRoot) -> NodeReport:
    """Run all probes; on a healthy node in well under two seconds."""
    host, gpus, fabric = probe_host(root), probe_gpus(root), probe_fabric(root)
    return NodeReport(
        host=host,
        gpus=gpus,
        fabric=fabric,
        disks=probe_disks(root),
        kernel_log=probe_kernel_log(root),
        software=probe_software(root, gpus, fabric, host),
    )


def report_json(report: NodeReport) -> dict[str, Any]:
    """Return the report as JSON. Of the mounts only relevant ones: the table of a busy node is long and private."""
    document = asdict(report)
    document["disks"].pop("mounts")
    return document
