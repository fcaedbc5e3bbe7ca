"""From what was found to what ails a node: findings of `craton doctor` and verdicts of `craton why` in one form. Pure.

Only what is a node's own becomes an issue. The software of a job, a slow file system or a bad plan would be the same
on another node, and no node is taken out for it.
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
    """One thing that is wrong with one node."""

    node: str  # as its scheduler calls it
    action: HealthAction
    what: str  # a stable word: `xid`, `gpu_lost`, ...
    evidence: str
    source: Source = "doctor"
    device: str = ""  # of several; "": the node as a whole
    run: str = ""  # in which it was seen
    confidence: float = 1.0
    is_urgent: bool = True  # False: it waits until nothing runs there
    moment: float | None = None  # epoch seconds when it happened or was measured; None: it is so now
    is_sample: bool = False  # a state that may pass: one look proves nothing
    stops_run: bool = False  # the run it was seen in does not move because of it


def of_doctor(document: Mapping[str, Any], measured: float | None = None) -> list[Issue]:
    """The issues in what `craton doctor --json` printed, and when. They are of no run: a pre-flight sees what was in
    the kernel log before it."""
    findings = document.get("findings")
    if not isinstance(findings, list):
        raise CratonError("this is not what `craton doctor --json` prints: it has no `findings`")
    issues = [_of_finding(finding, document, measured) for finding in findings if isinstance(finding, Mapping)]
    return [issue for issue in issues if issue is not None]


def of_verdict(verdict: Verdict, hosts: Mapping[str, str], run: str = "", ended: float | None = None) -> list[Issue]:
    """The issues of a run's nodes; `hosts` has what the scheduler calls each of them. `ended`: when the run ended,
    whose nodes may have been given to somebody else since."""
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
    """Of one node: what asks for most, and of those what is surest."""
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
        # An older Craton writes no action; of what the table does not know nobody says that the node is at fault.
        action = rules().findings.get(sign, "") if severity == "fail" else ""
    # An error that the program itself may have made is kept in mind: the same card under another job is suspect.
    is_told = severity in ("warn", "fail") or sign == "xid"
    if not node or not action or not is_told or (action == "observe" and sign != "xid"):
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
    """How old the newest XID that the evidence names was when it was read; 0 where the log does not tell."""
    named = _XID.search(evidence)
    try:
        reports = [item["report"] for item in document["nodes"] if item["node"] == node]
        ages = [
            float(xid["age_seconds"])
            for report in reports
            for xid in report["kernel_log"]["xids"]
            if named and xid["code"] == int(named[1]) and xid["bus_id"] in evidence and xid["age_seconds"] is not None
        ]
    except (KeyError, TypeError, ValueError):  # an older Craton, or somebody else's file
        return 0.0
    return min(ages, default=0.0)


def _device(evidence: str) -> str:
    match = _DEVICE.search(evidence)
    return f"GPU {match[1]}" if match else ""
