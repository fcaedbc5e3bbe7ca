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


def failed_hosts(
    step: Step, hosts: Sequence[str], run: RunDirectory, instance: str = "", seconds: float = CHECK_SECONDS
) -> dict[str, str]:
    """Host → why it may not be used, as a node of the catalog's `instance`. A check that cannot be run is said and
    stops nobody; one that never ends, where those of others did, is a node's own trouble."""
    reports = run.path / "preflight"
    reports.mkdir(exist_ok=True)
    for report in reports.glob("*.*"):
        report.unlink()
    hung = False
    try:
        subprocess.run(
            doctor_command(step, hosts, reports, instance), stdin=subprocess.DEVNULL, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        hung = True
    except OSError as error:
        print(f"craton: pre-flight could not be run: {error}", file=sys.stderr, flush=True)
        return {}
    said = {host: why for path in sorted(reports.glob("*.json")) for host, why in failure_of(path).items()}
    if hung and said:
        said |= {host: f"pre-flight did not end within {seconds:.0f} s" for host in hosts if host not in said}
    elif hung:
        print(f"craton: pre-flight ended on no node within {seconds:.0f} s", file=sys.stderr, flush=True)
    return {host: said[host] for host in hosts if said.get(host)}


def failure_of(report: Path) -> dict[str, str]:
    """Node → what is wrong with it by its own report, nothing where all is well; of no node where it cannot be read."""
    try:
        document = json.loads(report.read_text(encoding="utf-8", errors="replace"))
        findings, (node, *_) = document["findings"], [each["node"] for each in document["nodes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    failed = [each for each in findings if isinstance(each, Mapping) and each.get("severity") == "fail"]
    return {node: _in_words(failed)}


def _in_words(failed: Sequence[Mapping[str, str]]) -> str:
    return "; ".join(f"{each.get('what', 'a check')}: {each.get('evidence', 'failed')}" for each in failed[:SHOWN])
