"""Convert findings of `craton doctor` and verdicts of `craton why` to issues of nodes. Pure functions.

Only faults of a node itself become issues. A job's software, a slow file system or a bad plan would be the same on
another node, so no node is taken out for them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, cast

from craton.errors import CratonError
from craton.infrastructure.probes import HEALTH_ACTIONS, HealthAction
from craton.observability.diagnosis import Verdict

Source = Literal["doctor", "why"]
HOST_LAYER = "infrastructure"
_DEVICE = re.compile(r"\bGPU (\d+)\b")
_XID = re.compile(r"\bS?XID (\d+)\b")


@dataclass(frozen=True)
class Issue:
    """One fault of one node."""

    node: str  # name in the scheduler
    action: HealthAction
    what: str  # a stable identifier: `xid`, `gpu_lost`, ...
    evidence: str
    source: Source = "doctor"
    device: str = ""  # GPU of the node; "": the whole node
    run: str = ""  # in which it was observed
    confidence: float = 1.0
    is_urgent: bool = True  # False: wait until the node is idle
    moment: float | None = None  # epoch seconds of the event or measurement; None: a current state
    is_sample: bool = False  # a state that may be transient: one look is not enough
    stops_run: bool = False  # its run makes no progress because of it


def of_doctor(document: Mapping[str, Any], measured: float | None = None) -> list[Issue]:
    """Return the issues in the output of `craton doctor --json`, measured at this time. They belong to no run: a
    pre-flight check sees the kernel log from before it."""
    findings = document.get("findings")
    if not isinstance(findings, list):
        raise CratonError("not the output of `craton doctor --json`: it has no `findings`")
    issues = [_of_finding(finding, document, measured) for finding in findings if isinstance(finding, Mapping)]
    return [issue for issue in issues if issue is not None]


def of_verdict(verdict: Verdict, hosts: Mapping[str, str], run: str = "", ended: float | None = None) -> list[Issue]:
    """Return the issues of a run's nodes. `hosts`: node → its name in the scheduler. `ended`: when the run ended; its
    nodes may run other jobs since."""
    is_healthy = verdict.condition == "healthy"
    table = rules().causes | (rules().causes_of_healthy if is_healthy else {})
    evidence = verdict.because or "; ".join(verdict.evidence) or verdict.sentence
    hurts = not is_healthy or verdict.is_urgent
    messages = [(verdict.cause, verdict.health, verdict.node, evidence, verdict.confidence, verdict.moment, hurts)]
    for other in verdict.others:
        hurts = (other.symptom is not None and not is_healthy) or other.is_urgent
        messages.append((other.cause, other.health, other.node, other.sentence, other.strength, other.moment, hurts))
    issues: list[Issue] = []
    for number, (cause, health, node, evidence, confidence, moment, hurts) in enumerate(messages):
        action = health if health in HEALTH_ACTIONS else table.get(cause)
        if action is None or node not in hosts:
            continue
        stops = number == 0 and verdict.condition in ("dead", "hung")
        issues.append(
            Issue(
                hosts[node],
                action,
                cause,
                evidence,
                "why",
                _device(evidence),
                run,
                confidence,
                is_urgent=hurts and ended is None,
                moment=ended if moment is None else moment,
                is_sample=not health and not stops,
                stops_run=stops and ended is None,
            )
        )
    return issues


def gravest(issues: Iterable[Issue]) -> Issue:
    """Return the most severe issue of a node; of several, the most certain one."""
    return max(issues, key=lambda item: (HEALTH_ACTIONS.index(item.action), item.is_urgent, item.confidence))


@dataclass(frozen=True)
class Rules:
    findings: Mapping[str, HealthAction]
    causes: dict[str, HealthAction]
    causes_of_healthy: dict[str, HealthAction]
    min_confidence: float
    repeat_seconds: float
    repeat_incidents: int
    episode_seconds: float
    same_card_runs: int
    look_seconds: float
    looks: int
    looks_seconds: float
    undone_seconds: float
    report_seconds: float
    ended_seconds: float
    move_seconds: float


@lru_cache(maxsize=1)
def rules() -> Rules:
    text = resources.files("craton.observability.healing").joinpath("actions.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    numbers = table["rules"]
    return Rules(
        findings=table["finding"],
        causes=table["cause"],
        causes_of_healthy=table["cause_of_healthy"],
        min_confidence=float(numbers["min_confidence"]),
        repeat_seconds=float(numbers["repeat_days"]) * 86400.0,
        repeat_incidents=int(numbers["repeat_incidents"]),
        episode_seconds=float(numbers["episode_hours"]) * 3600.0,
        same_card_runs=int(numbers["same_card_runs"]),
        look_seconds=float(numbers["look_minutes"]) * 60.0,
        looks=int(numbers["looks"]),
        looks_seconds=float(numbers["looks_minutes"]) * 60.0,
        undone_seconds=float(numbers["undone_hours"]) * 3600.0,
        report_seconds=float(numbers["report_hours"]) * 3600.0,
        ended_seconds=float(numbers["ended_hours"]) * 3600.0,
        move_seconds=float(numbers["move_minutes"]) * 60.0,
    )


def _of_finding(finding: Mapping[str, Any], document: Mapping[str, Any], measured: float | None) -> Issue | None:
    severity, sign = finding.get("severity"), str(finding.get("what") or "")
    node, evidence = str(finding.get("node") or ""), str(finding.get("evidence") or "")
    action = str(finding.get("action") or "")
    if action not in HEALTH_ACTIONS:
        # An older Craton writes no action; a finding outside the table does not blame the node.
        action = rules().findings.get(sign, "") if severity == "fail" else ""
    # Record errors that the program may have caused: the same GPU with another job is suspect.
    is_reported = severity in ("warn", "fail") or sign == "xid"
    if not node or not action or not is_reported or (action == "observe" and sign != "xid"):
        return None
    if finding.get("layer") != HOST_LAYER and sign != "answer":
        return None
    if sign == "xid" and measured is not None:
        measured -= _xid_age_seconds(document, node, evidence)
    return Issue(
        node,
        cast(HealthAction, action),
        sign,
        evidence,
        "doctor",
        _device(evidence),
        is_urgent=severity == "fail",
        moment=measured,
    )


def _xid_age_seconds(document: Mapping[str, Any], node: str, evidence: str) -> float:
    """Return the age of the newest XID named in the evidence when it was read; 0 if the log has no time."""
    named = _XID.search(evidence)
    try:
        reports = [item["report"] for item in document["nodes"] if item["node"] == node]
        ages = [
            float(xid["age_seconds"])
            for report in reports
            for xid in report["kernel_log"]["xids"]
            if named and xid["code"] == int(named[1]) and xid["bus_id"] in evidence and xid["age_seconds"] is not None
        ]
    except (KeyError, TypeError, ValueError):  # an older Craton, or another tool's file
        return 0.0
    return min(ages, default=0.0)


def _device(evidence: str) -> str:
    match = _DEVICE.search(evidence)
    return f"GPU {match[1]}" if match else ""
