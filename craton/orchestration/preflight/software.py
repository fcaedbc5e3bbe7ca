"""Checks of a job's software: known-bad version pairs, torch for these GPUs, installed libraries."""

from __future__ import annotations

from craton.extras import install_command
from craton.formatting import counted
from craton.infrastructure.catalog import gpus
from craton.infrastructure.probes import NodeReport, bad_pairs
from craton.ml.verifiers import INSTALL_ISOLATION, IsolationReport
from craton.orchestration.preflight.finding import Expected, PreflightFinding, Severity
from craton.orchestration.preflight.gpus import is_model


def check_software(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    return [*check_versions(report, expected), *check_torch(report), *check_libraries(report)]


def check_versions(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    versions = report.software.versions
    instance = expected.instance.name if expected.instance else report.host.product
    pairs = [pair for pair in bad_pairs() if pair.holds(versions, _catalog_gpu(report), instance)]
    if pairs:
        return [
            _finding(
                "known_bad",
                pair.severity,
                f"{', '.join(f'{name} {versions[name]}' for name in pair.versions)}: {pair.problem}",
                f"{pair.remedy} ({pair.source})",
            )
            for pair in pairs
        ]
    message = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [_finding("versions", "ok", message)] if message else []


def check_torch(report: NodeReport) -> list[PreflightFinding]:
    version = report.software.libraries.get("torch", "")
    if not report.gpus.cards:
        return []
    if not version:
        return [_finding("torch", "note", "torch is not installed in this environment", install_command("train"))]
    if "+cpu" in version:
        remedy = "install the torch build for this driver's CUDA version"
        return [
            _finding(
                "torch", "fail", f"torch {version} cannot use the {counted(len(report.gpus.cards), 'GPU')} here", remedy
            )
        ]
    return [_finding("torch", "ok", f"torch {version}")]


def check_isolation(report: IsolationReport) -> list[PreflightFinding]:
    """Check how verifiers can confine code that a model wrote; only RL jobs with such verifiers need it."""
    if report.isolation is not None:
        return [_finding("isolation", "ok", report.describe())]
    return [_finding("isolation", "note", report.describe(), INSTALL_ISOLATION)]


def check_libraries(report: NodeReport) -> list[PreflightFinding]:
    libraries = {name: version for name, version in report.software.libraries.items() if name != "torch"}
    if not report.gpus.cards:
        return []
    there = [f"{name} {version}" for name, version in libraries.items() if version]
    missing = [name for name, version in libraries.items() if not version]
    findings = []
    if "triton" in missing:
        remedy = "install the GPU build of torch, which includes it"
        findings.append(_finding("triton", "warn", "triton is missing: fused kernels cannot run", remedy))
    if missing:
        message = f"not installed: {', '.join(missing)}" + (f"; installed: {', '.join(there)}" if there else "")
        findings.append(
            _finding("libraries", "note", message, "install what the job uses; Craton itself needs only triton")
        )
    return findings or [_finding("libraries", "ok", ", ".join(there))]


def _catalog_gpu(report: NodeReport) -> str:
    """Return the catalog's name of the node's GPUs; "" if the catalog has none."""
    if not report.gpus.cards:
        return ""
    return next((card.name for card in gpus() if is_model(report.gpus.cards[0].name, card)), "")


def _finding(check: str, severity: Severity, evidence: str, remedy: str = "") -> PreflightFinding:
    return PreflightFinding("ML software", check, severity, evidence, remedy)
