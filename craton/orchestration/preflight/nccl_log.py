"""Which network NCCL really uses, from what it prints with NCCL_DEBUG=INFO: variables are wishes, this is the truth."""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from craton.agent import read_launch
from craton.job import load_job
from craton.orchestration.errors import StartError
from craton.orchestration.preflight.finding import Expected, PreflightFinding, lowered, ordered
from craton.orchestration.preflight.node_check import Diagnosis, expected_by, expected_of
from craton.telemetry import find_run
from craton.telemetry.files import open_regular, paths_in

MAX_LINE_CHARACTERS = 1 << 20  # a longer line is read in parts
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


def diagnose_nccl_log(log: str, cluster: str | None = None) -> Diagnosis:
    """One log against `cluster`, or all logs of a run against what its own job says of its nodes."""
    path = Path(log)
    if path.is_file():
        with open(path, "rb") as file:
            lines = nccl_lines(file)
        return Diagnosis(check_nccl_logs({path.stem: lines}, expected_of(cluster) or Expected()))
    run = find_run(log)
    logs = {item.stem: _lines_of(item) for item in paths_in(run.path / "logs", "rank-*.log")}
    if not logs:
        raise StartError(f"{run.name} has no logs of ranks yet; start it, with NCCL_DEBUG=INFO under run.env")
    expected = expected_of(cluster)
    if expected is None:
        expected = expected_by(load_job(run.job_path), read_launch(run))
    return Diagnosis(check_nccl_logs(logs, expected))


def nccl_lines(log: BinaryIO) -> str:
    """What NCCL wrote into a log, which may hold gigabytes of other things."""
    text = io.TextIOWrapper(log, encoding="utf-8", errors="replace")
    lines = iter(lambda: text.readline(MAX_LINE_CHARACTERS), "")
    return "".join(line for line in lines if "NCCL" in line)


def _lines_of(path: Path) -> str:
    with open_regular(path) as log:
        return nccl_lines(log)


def check_nccl_logs(logs: Mapping[str, str], expected: Expected) -> list[PreflightFinding]:
    """Name → text; one finding for all logs that say the same, with their names where not all do."""
    alike: dict[PreflightFinding, list[str]] = defaultdict(list)
    for name, text in logs.items():
        for finding in check_nccl_log(text, expected):
            alike[finding].append(name)
    if len(alike) == 1:
        return list(alike)
    return ordered(
        replace(finding, evidence=f"{_listed(names)}: {finding.evidence}") for finding, names in alike.items()
    )


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


def check_nccl_log(text: str, expected: Expected) -> list[PreflightFinding]:
    """Whether NCCL took the network that the node has."""
    findings = _judged(text, expected)
    return findings if expected.needs_network else lowered(findings, "this run stays on one node")


def _judged(text: str, expected: Expected) -> list[PreflightFinding]:
    log, instance = read_nccl_log(text), expected.instance
    if not log.is_told:
        return [
            PreflightFinding(
                "ML software", "nccl_network", "note", "the log does not tell", "start with NCCL_DEBUG=INFO"
            )
        ]
    fast = "EFA" if instance and instance.efa_version else "InfiniBand"
    has_fast = instance is not None and instance.gpu.generation != "cpu"
    wanted = "libfabric" if fast == "EFA" else "ib"
    message = f"NCCL {log.version or ''} uses {', '.join(log.networks)}".replace("  ", " ")
    if has_fast and not any(wanted in name.lower() for name in log.networks):
        why = "; it did not find its plugin" if log.plugin_missing else ""
        remedy = "`craton doctor` on the node tells which part is missing; stop the run, it crawls"
        return [PreflightFinding("ML software", "nccl_network", "fail", f"{message} instead of {fast}{why}", remedy)]
    if log.provider and log.provider != "efa" and fast == "EFA" and has_fast:
        problem, remedy = f"{message} by the provider {log.provider}, not efa", "export FI_PROVIDER=efa"
        return [PreflightFinding("ML software", "nccl_network", "fail", problem, remedy)]
    if log.num_nics and instance and log.num_nics < instance.network_interfaces:
        problem = f"{message}, on {log.num_nics} of {instance.network_interfaces} interfaces"
        remedy = "give the container all of its EFA devices"
        return [PreflightFinding("ML software", "nccl_network", "fail", problem, remedy)]
    if has_fast and _crosses_nodes(text) and not log.gpudirect:
        remedy = "load nvidia_peermem, or NVIDIA's open kernel modules; unset NCCL_NET_GDR_LEVEL"
        return [
            PreflightFinding("ML software", "nccl_network", "warn", f"{message}, but without GPUDirect RDMA", remedy)
        ]
    return [PreflightFinding("ML software", "nccl_network", "ok", message)]


def _listed(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}"


def _crosses_nodes(text: str) -> bool:
    return _CHANNEL.search(text) is not None


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
