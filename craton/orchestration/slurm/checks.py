"""Pre-flight of an allocation: `craton doctor --json` on every node at once, and which of them may not be used.

A node that fails takes no part and is left as it is: draining it is the business of whoever runs the cluster. What each
node said stays in RUN/preflight.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from craton.orchestration.slurm.step import Step, doctor_command
from craton.telemetry import RunDirectory

CHECK_SECONDS = 120.0
SHOWN = 3  # of the findings of one node


def failed_hosts(step: Step, hosts: Sequence[str], run: RunDirectory, instance: str = "") -> dict[str, str]:
    """Host → why it may not be used, as a node of the catalog's `instance`. A check that cannot be run is said and
    stops nobody."""
    reports = run.path / "preflight"
    reports.mkdir(exist_ok=True)
    for report in reports.glob("*.json"):
        report.unlink()
    try:
        subprocess.run(
            doctor_command(step, hosts, reports, instance), stdin=subprocess.DEVNULL, timeout=CHECK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"craton: pre-flight could not be run: {error}", file=sys.stderr, flush=True)
        return {}
    return {host: why for host in hosts if (why := failure_of(reports / f"{host}.json"))}


def failure_of(report: Path) -> str:
    """What is wrong with a node by its own report; nothing where all is well, or where there is no report to judge."""
    try:
        document = json.loads(report.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return ""
    findings = document.get("findings") if isinstance(document, Mapping) else document
    if not isinstance(findings, list):
        return ""
    failed = [each for each in findings if isinstance(each, Mapping) and each.get("severity") == "fail"]
    return "; ".join(f"{each.get('what', 'a check')}: {each.get('evidence', 'failed')}" for each in failed[:SHOWN])
