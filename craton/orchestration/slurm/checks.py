"""Pre-flight of an allocation: `craton doctor --json` on every node at once, and which of them may not be used.

Where devices compute, their results are compared over all nodes: a card that is always wrong in the same way is found
by the others alone. A node that fails takes no part and is left as it is: draining it is the business of whoever runs
the cluster. What each node said stays in RUN/preflight.
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
from craton.orchestration.slurm.script import SCRIPT_FILE
from craton.orchestration.slurm.step import IMAGE_SECONDS, SlurmStep, doctor_command, end_step
from craton.orchestration.slurm.tools import cancel_steps
from craton.telemetry import RunDirectory
from craton.telemetry.files import paths_in, read_regular

CHECK_SECONDS = 120.0
EARLIER = "earlier"  # the folder of the reports of the start before
HOST_LAYER = "infrastructure"  # of findings about a node and its hardware
SHOWN = 3  # of the findings of one node


def failed_hosts(
    step: SlurmStep,
    hosts: Sequence[str],
    run: RunDirectory,
    compute: bool = False,
    seconds: float | None = None,
    job: str = "",
) -> dict[str, str]:
    """Host → why it may not be used as a node of the run. A check that cannot be run is said and stops nobody; one that
    never ends, where those of others did, is a node's own trouble. Nothing of it is left for the agents to wait for:
    what hangs on the nodes is ended, as steps of this job of Slurm."""
    seconds = seconds or check_seconds(step, compute)
    reports = run.path / "preflight"
    reports.mkdir(exist_ok=True)
    _put_aside(reports)
    hung = False
    try:
        checks = subprocess.Popen(doctor_command(step, hosts, reports, compute), stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"craton: pre-flight could not be run: {error}", file=sys.stderr, flush=True)
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
        print(f"craton: pre-flight ended on no node within {setting(seconds)}", file=sys.stderr, flush=True)
    return {host: reasons[host] for host in hosts if reasons.get(host)}


def check_seconds(step: SlurmStep, compute: bool) -> float:
    """How long pre-flight may take, with the image that it runs in."""
    return CHECK_SECONDS + (COMPUTE_SECONDS if compute else 0.0) + (IMAGE_SECONDS if step.image else 0.0)


def documents_of(run: RunDirectory) -> list[dict[str, Any]]:
    """What the nodes of the newest start said; one that is torn or empty says nothing."""
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
    """Node → what is wrong with it, by its own word and by that of the others; nothing where all is well."""
    result = {
        str(document["nodes"][0]["node"]): [entry for entry in document["findings"] if entry.get("severity") == "fail"]
        for document in documents
    }
    for finding in gang_findings(documents):
        if finding.severity != "fail":
            continue
        # Without a majority nobody knows who is wrong, and no training can be trusted to any of them.
        for node in [finding.node] if finding.node else computing_nodes(documents):
            if finding.evidence not in {item.get("evidence") for item in result[node]}:
                result[node] = [*result[node], finding.to_json()]
    return result


def gang_findings(documents: Sequence[Mapping[str, Any]]) -> list[PreflightFinding]:
    """The devices of all nodes together; nothing where none has computed."""
    results = {
        str(entry["node"]): entry.get("compute") or [] for document in documents for entry in document["nodes"][:1]
    }
    try:
        return check_compute({node: devices for node, devices in results.items() if devices})
    except (KeyError, TypeError) as error:  # an image may hold another Craton, which tells it in other words
        print(f"craton: the results of the nodes cannot be compared: {error!r}", file=sys.stderr, flush=True)
        return []


def computing_nodes(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(entry["node"]) for document in documents for entry in document["nodes"][:1] if entry.get("compute")]


def gang_in_words(run: RunDirectory) -> str:
    """What the comparison came to, for the run's events; empty where nothing was computed."""
    return "; ".join(finding.evidence for finding in gang_findings(documents_of(run)))


def software_failure(run: RunDirectory) -> str:
    """What is wrong with the job's own software by the word of every node that answered, and of two at least: another
    would say the same. A node that is alone is held against the one of the start before. Empty where there is nothing,
    where nodes differ, or where nobody bears a node out."""
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
    """Makes room for a start's reports; those of the one before are kept apart."""
    earlier = reports / EARLIER
    earlier.mkdir(exist_ok=True)
    for old in earlier.iterdir():
        old.unlink()
    for report in reports.glob("*.*"):
        report.rename(earlier / report.name)


def _earlier(run: RunDirectory) -> list[Path]:
    """Reports of the start before this one, of the same submission: since another, somebody may have mended it."""
    with contextlib.suppress(OSError):
        submitted = (run.path / SCRIPT_FILE).stat().st_mtime
        paths = (run.path / "preflight" / EARLIER).glob("*.json")
        return [path for path in paths if path.stat().st_mtime > submitted]
    return []


def _end(checks: subprocess.Popen[bytes], job: str) -> None:
    """srun passes on that it is to end, and may be gone before the nodes have heard; Slurm itself tells them too."""
    end_step(checks)
    if job:
        try:
            cancel_steps(job)
        except SchedulerError as error:
            print(f"craton: the pre-flight that hangs cannot be ended: {error}", file=sys.stderr, flush=True)


def _in_words(failed: Sequence[Mapping[str, str]]) -> str:
    return "; ".join(f"{item.get('what', 'a check')}: {item.get('evidence', 'failed')}" for item in failed[:SHOWN])
