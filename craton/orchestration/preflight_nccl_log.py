"""Which network NCCL really uses, from what it prints with NCCL_DEBUG=INFO: variables are wishes, this is the truth."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from craton.orchestration.preflight_finding import Expected, Finding

_USING = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_CHANNEL = re.compile(r"NCCL INFO .*\bvia NET/([^/\s][^/\n]*)(/\S*)?")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (\S+?),?(?: fabric is \S+)? \(found (\d+) nics\)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_PLUGIN = re.compile(r"NET/OFI Initializing aws-ofi-nccl (?:v)?(\S+)")
_NO_PLUGIN = re.compile(r"NET/Plugin.*(?:[Nn]o plugin found|Could not find|Failed to open).*libnccl-net", re.MULTILINE)


@dataclass(frozen=True)
class NcclNetwork:
    """What a log says of NCCL's network; empty where it says nothing."""

    version: str
    networks: tuple[str, ...]  # as NCCL names them: AWS Libfabric, Libfabric, IB, Socket; the most used first
    provider: str  # of libfabric
    num_nics: int
    plugin_version: str
    plugin_missing: bool
    gpudirect: bool  # whether channels to other nodes go straight to GPU memory

    @property
    def is_told(self) -> bool:
        return bool(self.networks)


def read_nccl_log(text: str) -> NcclNetwork:
    channels = _CHANNEL.findall(text)
    named = Counter([*_USING.findall(text), *(network.strip() for network, _ in channels)])
    provider = _PROVIDER.search(text)
    return NcclNetwork(
        version=_first(_VERSION, text),
        networks=tuple(name for name, _ in named.most_common()),
        provider=provider[1].rstrip(",") if provider else "",
        num_nics=int(provider[2]) if provider else 0,
        plugin_version=_first(_PLUGIN, text),
        plugin_missing=_NO_PLUGIN.search(text) is not None,
        gpudirect=any("GDRDMA" in rest for _, rest in channels),
    )


def check_nccl_log(text: str, expected: Expected) -> list[Finding]:
    """Whether NCCL took the network that the node has."""
    found, instance = read_nccl_log(text), expected.instance
    if not found.is_told:
        return [Finding("ML software", "nccl_network", "note", "the log does not tell", "start with NCCL_DEBUG=INFO")]
    fast = "EFA" if instance and instance.efa_version else "InfiniBand"
    has_fast = instance is not None and instance.gpu.generation != "cpu"
    wanted = "libfabric" if fast == "EFA" else "ib"
    told = f"NCCL {found.version or ''} uses {', '.join(found.networks)}".replace("  ", " ")
    if has_fast and not any(wanted in name.lower() for name in found.networks):
        why = "; it did not find its plugin" if found.plugin_missing else ""
        remedy = "`craton doctor` on the node tells which part is missing; stop the run, it crawls"
        return [Finding("ML software", "nccl_network", "fail", f"{told} instead of {fast}{why}", remedy)]
    if found.provider and found.provider != "efa" and fast == "EFA" and has_fast:
        said, remedy = f"{told} by the provider {found.provider}, not efa", "export FI_PROVIDER=efa"
        return [Finding("ML software", "nccl_network", "fail", said, remedy)]
    if found.num_nics and instance and found.num_nics < instance.network_interfaces:
        said = f"{told}, on {found.num_nics} of {instance.network_interfaces} interfaces"
        remedy = "give the container all of its EFA devices"
        return [Finding("ML software", "nccl_network", "fail", said, remedy)]
    if has_fast and _crosses_nodes(text) and not found.gpudirect:
        remedy = "load nvidia_peermem, or NVIDIA's open kernel modules; unset NCCL_NET_GDR_LEVEL"
        return [Finding("ML software", "nccl_network", "warn", f"{told}, but without GPUDirect RDMA", remedy)]
    return [Finding("ML software", "nccl_network", "ok", told)]


def _crosses_nodes(text: str) -> bool:
    return _CHANNEL.search(text) is not None


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
