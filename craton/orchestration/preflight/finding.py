"""What a check of a node says: in which layer, what it looked at, how grave, what it saw, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from craton.infrastructure import Instance
from craton.infrastructure.probes import HealthAction
from craton.job import Job

Severity = Literal["ok", "note", "warn", "fail"]
Layer = Literal["infrastructure", "orchestration", "ML software", "observability"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warn", "fail")  # the gravest last

NETWORK_LIBRARIES = ("libfabric", "nccl_plugin")


@dataclass(frozen=True)
class PreflightFinding:
    """`fail`: a run here would fail, or lie, or crawl. `warn`: it costs something. `note`: worth knowing."""

    layer: Layer
    what: str  # stable: `gpu_count`, `nvlink`, ...
    severity: Severity
    evidence: str
    remedy: str = ""
    node: str = ""
    action: HealthAction | Literal[""] = ""  # what the health table asks for; "": it has no entry for this

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Expected:
    """What a node should be: an instance of the catalog or of a cluster file, or at least so many GPUs; and where the
    cluster file says that its storage is."""

    instance: Instance | None = None
    num_gpus: int = 0  # that a run needs on the node; 0: any
    needs_network: bool = True  # False for a run that stays on one node
    nvme_path: str = ""  # "": none is stated, as for the two below
    shared_path: str = ""
    shared_kind: str = ""  # lustre, nfs

    @property
    def gpus(self) -> int:
        """What a run needs, else what the instance has; 0: nothing is known."""
        if self.num_gpus or self.instance is None or self.instance.gpu.generation == "cpu":
            return self.num_gpus
        return self.instance.num_gpus

    @property
    def name(self) -> str:
        return self.instance.name if self.instance else "this run"


def worst(findings: Iterable[PreflightFinding]) -> Severity:
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")


def lowered(findings: Iterable[PreflightFinding], why: str, severity: Severity = "note") -> list[PreflightFinding]:
    """The same without a `fail`: what does not matter here is worth knowing and no more."""
    return [
        replace(finding, severity=severity, evidence=f"{finding.evidence} ({why})")
        if finding.severity == "fail"
        else finding
        for finding in findings
    ]


def for_job(findings: Sequence[PreflightFinding], job: Job) -> list[PreflightFinding]:
    """The findings of a node for a job, which may overrule some. A command need not run in the Python that Craton runs
    in, nor with torch: also an image may have several environments. But all that run in an image have its libraries for
    the network."""
    overruled = [finding for finding in findings if finding.what in job.run.preflight_ignore]
    kept = [finding for finding in findings if finding not in overruled]
    findings = ordered([*kept, *lowered(overruled, "overruled by run.preflight_ignore", "warn")])
    if job.kind != "command":
        return findings
    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    certain = NETWORK_LIBRARIES if job.run.image or (scheduler and scheduler.image) else ()
    ours = [finding for finding in findings if finding.layer == "ML software" and finding.what not in certain]
    others = [finding for finding in findings if finding not in ours]
    return ordered([*others, *lowered(ours, "a command may have an environment of its own")])


def ordered(findings: Iterable[PreflightFinding]) -> list[PreflightFinding]:
    """The gravest first, otherwise as they came."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
