"""The network that NCCL actually uses, from its log with NCCL_DEBUG=INFO."""

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
    """NCCL's network according to a log; empty where the log does not show it."""

    version: str
    networks: tuple[str, ...]  # NCCL's names: AWS Libfabric, Libfabric, IB, Socket; the most used first
    provider: str  # of libfabric
    num_nics: int
    plugin_version: str
    plugin_missing: bool
    gpudirect: bool  # whether channels to other nodes use GPUDirect RDMA

    @property
    def is_told(self) -> bool:
        return bool(self.networks)


def diagnose_nccl_log(log: str, cluster: str | None = None) -> Diagnosis:
    """Check one log against `cluster`, or all logs of a run against its job's nodes."""
    path = Path(log)
    if path.is_file():
        with open(path, "rb") as file:
            lines = nccl_lines(file)
        return Diagnosis(check_nccl_logs({path.stem: lines}, expected_of(cluster) or Expected()))
    run = find_run(log)
    logs = {item.stem: _lines_of(item) for item in paths_in(run.path / "logs", "rank-*.log")}
    if not logs:
        raise StartError(f"{run.name} has no rank logs yet; start it with NCCL_DEBUG=INFO under run.env")
    expected = expected_of(cluster)
    if expected is None:
        expected = expected_by(load_job(run.job_path), read_launch(run))
    return Diagnosis(check_nccl_logs(logs, expected))


def nccl_lines(log: BinaryIO) -> str:
    """Return NCCL's lines of a log, which may hold gigabytes of other output."""
    text = io.TextIOWrapper(log, encoding="utf-8", errors="replace")
    lines = iter(lambda: text.readline(MAX_LINE_CHARACTERS), "")
    return "".join(line for line in lines if "NCCL" in line)


def _lines_of(path: Path) -> str:
    with open_regular(path) as log:
        return nccl_lines(log)


def check_nccl_logs(logs: Mapping[str, str], expected: Expected) -> list[PreflightFinding]:
    """Check logs (name → text): one finding for all logs with the same result, with names if results differ."""
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
    """Check whether NCCL uses the node's fast network."""
    findings = _judged(text, expected)
    return findings if expected.needs_network else lowered(findings, "this run stays on one node")


def _judged(text: str, expected: Expected) -> list[PreflightFinding]:
    log, instance = read_nccl_log(text), expected.instance
    if not log.is_told:
        return [
            PreflightFinding(
                "ML software", "nccl_network", "note", "the log does not show it", "start with NCCL_DEBUG=INFO"
            )
        ]
    fast = "EFA" if instance and instance.efa_version else "InfiniBand"
    has_fast = instance is not None and instance.gpu.generation != "cpu"
    wanted = "libfabric" if fast == "EFA" else "ib"
    message = f"NCCL {log.version or ''} uses {', '.join(log.networks)}".replace("  ", " ")
    if has_fast and not any(wanted in name.lower() for name in log.networks):
        why = "; it did not find its plugin" if log.plugin_missing else ""
        remedy = "run `craton doctor` on the node to find the missing part; stop the run, it is far too slow"
        return [PreflightFinding("ML software", "nccl_network", "fail", f"{message} instead of {fast}{why}", remedy)]
    if log.provider and log.provider != "efa" and fast == "EFA" and has_fast:
        problem, remedy = f"{message} with the provider {log.provider}, not efa", "export FI_PROVIDER=efa"
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
