"""Findings of node checks: layer, check, severity, evidence, remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from craton.infrastructure import Instance
from craton.infrastructure.probes import HealthAction
from craton.job import Job

Severity = Literal["ok", "note", "warn", "fail"]
Layer = Literal["infrastructure", "orchestration", "ML software", "observability"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warn", "fail")  # the most severe last

NETWORK_LIBRARIES = ("libfabric", "nccl_plugin")


@dataclass(frozen=True)
class PreflightFinding:
    """`fail`: a run here would fail, crawl or give wrong results. `warn`: it costs something. `note`: worth knowing."""

    layer: Layer
    what: str  # stable: `gpu_count`, `nvlink`, ...
    severity: Severity
    evidence: str
    remedy: str = ""
    node: str = ""
    action: HealthAction | Literal[""] = ""  # the action in the health table; "": it has no entry

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Expected:
    """The expected node: an instance of the catalog or cluster file, or a minimum number of GPUs, and the storage paths
    of the cluster file."""

    instance: Instance | None = None
    num_gpus: int = 0  # that a run needs per node; 0: any
    needs_network: bool = True  # False for a run that stays on one node
    nvme_path: str = ""  # "": not stated, as for the two below
    shared_path: str = ""
    shared_kind: str = ""  # lustre, nfs

    @property
    def gpus(self) -> int:
        """The GPUs that a run needs, else those of the instance; 0 if unknown."""
        if self.num_gpus or self.instance is None or self.instance.gpu.generation == "cpu":
            return self.num_gpus
        return self.instance.num_gpus

    @property
    def name(self) -> str:
        return self.instance.name if self.instance else "this run"


def worst(findings: Iterable[PreflightFinding]) -> Severity:
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")


def lowered(findings: Iterable[PreflightFinding], why: str, severity: Severity = "note") -> list[PreflightFinding]:
    """Lower each `fail` to `severity`, where it does not matter for this run."""
    return [
        replace(finding, severity=severity, evidence=f"{finding.evidence} ({why})")
        if finding.severity == "fail"
        else finding
        for finding in findings
    ]


def for_job(findings: Sequence[PreflightFinding], job: Job) -> list[PreflightFinding]:
    """Adjust a node's findings for a job, which may overrule some. A command may use another Python without torch, also
    in an image, which may have several environments. But all environments of an image share its network libraries."""
    overruled = [finding for finding in findings if finding.what in job.run.preflight_ignore]
    kept = [finding for finding in findings if finding not in overruled]
    findings = ordered([*kept, *lowered(overruled, "overruled by run.preflight_ignore", "warn")])
    if job.kind != "command":
        return findings
    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    certain = NETWORK_LIBRARIES if job.run.image or (scheduler and scheduler.image) else ()
    ours = [finding for finding in findings if finding.layer == "ML software" and finding.what not in certain]
    others = [finding for finding in findings if finding not in ours]
    return ordered([*others, *lowered(ours, "a command may use another environment")])


def ordered(findings: Iterable[PreflightFinding]) -> list[PreflightFinding]:
    """Sort the most severe first, otherwise keep the order."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
