"""Pre-flight of an allocation: run `craton doctor --json` on every node in parallel, and find unfit nodes.

With `--compute` the results are compared over all nodes: only other nodes reveal a GPU that is always wrong in the same
way. A node that fails is excluded but not drained: draining is up to the cluster's administrators. Each node's report
stays in RUN/preflight.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from craton.formatting import setting
from craton.orchestration.errors import SchedulerError
from craton.orchestration.preflight import COMPUTE_SECONDS, PreflightFinding, check_compute
from craton.orchestration.slurm.life import IMAGE_SECONDS
from craton.orchestration.slurm.script import SCRIPT_FILE
from craton.orchestration.slurm.step import SlurmStep, doctor_command, end_step
from craton.orchestration.slurm.tools import cancel_steps
from craton.telemetry import RunDirectory
from craton.telemetry.files import paths_in, read_regular

CHECK_SECONDS = 120.0
EARLIER = "earlier"  # folder of the previous start's reports
HOST_LAYER = "infrastructure"  # layer of findings about a node and its hardware
SHOWN = 3  # findings per node in a message


def failed_hosts(
    step: SlurmStep,
    hosts: Sequence[str],
    run: RunDirectory,
    compute: bool = False,
    seconds: float | None = None,
    job: str = "",
) -> dict[str, str]:
    """Return host → why the run may not use it. A check that cannot run is logged and excludes no node; one that hangs,
    while others end, excludes its node. Hanging checks are cancelled as steps of this Slurm job, so that the agents do
    not wait for them."""
    seconds = seconds or check_seconds(step, compute)
    reports = run.path / "preflight"
    reports.mkdir(exist_ok=True)
    _put_aside(reports)
    hung = False
    try:
        checks = subprocess.Popen(doctor_command(step, hosts, reports, compute), stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"craton: pre-flight could not run: {error}", file=sys.stderr, flush=True)
        return {}
    try:
        checks.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        hung = True
        _end(checks, job)
    failures = failures_of(documents_of(run))
    reasons = {host: _in_words(failed) for host, failed in failures.items()}
    if hung and reasons:
        reasons |= {host: f"pre-flight did not end within {setting(seconds)}" for host in hosts if host not in reasons}
    elif hung:
        print(f"craton: pre-flight did not end on any node within {setting(seconds)}", file=sys.stderr, flush=True)
    return {host: reasons[host] for host in hosts if reasons.get(host)}


def check_seconds(step: SlurmStep, compute: bool) -> float:
    """Return the time limit of pre-flight, including pulling its image."""
    return CHECK_SECONDS + (COMPUTE_SECONDS if compute else 0.0) + (IMAGE_SECONDS if step.image else 0.0)


def documents_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the reports of the newest start; damaged or empty ones are skipped."""
    return _read(paths_in(run.path / "preflight", "*.json"))


def _read(reports: Iterable[Path]) -> list[dict[str, Any]]:
    result = []
    for path in sorted(reports):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            document = json.loads(read_regular(path).decode(errors="replace"))
            if isinstance(document, dict) and document.get("nodes") and "findings" in document:
                result.append(document)
    return result


def failures_of(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return node → failures, by its own report and by comparison with others; empty lists for healthy nodes."""
    result = {
        str(document["nodes"][0]["node"]): [entry for entry in document["findings"] if entry.get("severity") == "fail"]
        for document in documents
    }
    for finding in gang_findings(documents):
        if finding.severity != "fail":
            continue
        # Without a majority it is unknown which node is wrong, so none of them can be trusted.
        for node in [finding.node] if finding.node else computing_nodes(documents):
            if finding.evidence not in {item.get("evidence") for item in result[node]}:
                result[node] = [*result[node], finding.to_json()]
    return result


def gang_findings(documents: Sequence[Mapping[str, Any]]) -> list[PreflightFinding]:
    """Compare the devices of all nodes; empty if none has computed."""
    results = {
        str(entry["node"]): entry.get("compute") or [] for document in documents for entry in document["nodes"][:1]
    }
    try:
        return check_compute({node: devices for node, devices in results.items() if devices})
    except (KeyError, TypeError) as error:  # an image may hold another version of Craton with another report
        print(f"craton: the results of the nodes cannot be compared: {error!r}", file=sys.stderr, flush=True)
        return []


def computing_nodes(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(entry["node"]) for document in documents for entry in document["nodes"][:1] if entry.get("compute")]


def gang_in_words(run: RunDirectory) -> str:
    """Return the result of the comparison, for the run's events; empty if nothing was computed."""
    return "; ".join(finding.evidence for finding in gang_findings(documents_of(run)))


def software_failure(run: RunDirectory) -> str:
    """Return the software failure that all reporting nodes, at least two, have in common: other nodes would report the
    same. A single node is compared with the one of the previous start. Empty if there is no failure, if nodes differ,
    or if no second node confirms it."""
    documents = documents_of(run)
    if len(documents) == 1:
        alone = documents[0]["nodes"][0]["node"]
        documents += [element for element in _read(_earlier(run)) if element["nodes"][0]["node"] != alone]
    messages = [
        [
            finding
            for finding in document["findings"]
            if finding.get("severity") == "fail" and finding.get("layer") != HOST_LAYER
        ]
        for document in documents
    ]
    common = (
        set.intersection(*({entry["what"] for entry in failed} for failed in messages)) if len(messages) > 1 else set()
    )
    return _in_words([item for item in messages[0] if item["what"] in common]) if common else ""


def _put_aside(reports: Path) -> None:
    """Move the previous start's reports aside to make room for new ones."""
    earlier = reports / EARLIER
    earlier.mkdir(exist_ok=True)
    for old in earlier.iterdir():
        old.unlink()
    for report in reports.glob("*.*"):
        report.rename(earlier / report.name)


def _earlier(run: RunDirectory) -> list[Path]:
    """Return the previous start's reports, of the same submission only: since an earlier one it may have been fixed."""
    with contextlib.suppress(OSError):
        submitted = (run.path / SCRIPT_FILE).stat().st_mtime
        paths = (run.path / "preflight" / EARLIER).glob("*.json")
        return [path for path in paths if path.stat().st_mtime > submitted]
    return []


def _end(checks: subprocess.Popen[bytes], job: str) -> None:
    """End the step. srun forwards the signal but may exit before the nodes get it, so Slurm cancels the steps too."""
    end_step(checks)
    if job:
        try:
            cancel_steps(job)
        except SchedulerError as error:
            print(f"craton: the hanging pre-flight cannot be cancelled: {error}", file=sys.stderr, flush=True)


def _in_words(failed: Sequence[Mapping[str, str]]) -> str:
    return "; ".join(f"{item.get('what', 'a check')}: {item.get('evidence', 'failed')}" for item in failed[:SHOWN])
