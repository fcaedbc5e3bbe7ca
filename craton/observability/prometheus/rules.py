"""Recording and alert rules as data, from rules/LAYER.toml, and the documents that Prometheus and its operator read.

`ALERTS` and `RECORDINGS` hold every rule. In an expression XIDS_action stands for the codes of that action in the XID
table of the probes, so that the table is the one place that knows them. How many GPUs a node should have is no rule of
a file but comes from a cluster: `rule_groups` writes it into the rules it returns.

Every file is a group that is evaluated as often as Prometheus scrapes. Rules that look back for long, or at every card
and rank, are marked `slow` and are a second group of the file, evaluated every SLOWLY: a group that takes longer than
its interval leaves evaluations out, those of hangs too.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib import resources
from typing import Any, Literal, get_args

from craton.infrastructure import HEALTH_ACTIONS, xid_facts

Severity = Literal["page", "ticket", "info"]
Layer = Literal["scheduler", "device", "fabric", "collective", "framework", "storage", "host"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
LAYERS: tuple[Layer, ...] = get_args(Layer)
# The health actions, and what people do about the rest: ask `craton why`, look there, mend it, free space, add servers.
ACTIONS = (*HEALTH_ACTIONS, "diagnose", "check", "repair", "free", "scale")
FILES = ("device", "fabric", "storage", "host", "framework", "serving", "scheduler")
RUNBOOKS = "docs/runbooks"
EXPECTED_GPUS = "craton:node_gpus_expected"
# Less than the five minutes for which Prometheus takes a recorded value for the present one.
SLOWLY = "1m"
_XIDS = re.compile(r"XIDS_([a-z]+)")


@dataclass(frozen=True)
class AlertRule:
    name: str
    group: str  # the file it is from, and its runbook page
    expr: str
    for_: str  # how long it must hold; "": at once
    severity: Severity
    layer: Layer
    action: str  # one of ACTIONS
    summary: str
    description: str
    source: str
    date: date
    hardware_only: bool = False  # no run on this machine serves what it reads
    action_from_series: bool = False  # the series say themselves what to do; `action` is the least of it
    slow: bool = False  # evaluated every SLOWLY

    @property
    def runbook(self) -> str:
        return f"{RUNBOOKS}/{self.group}.md#{self.name.lower()}"

    def document(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        action = "{{ $labels.action }}" if self.action_from_series else self.action
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": self.for_} if self.for_ else {}),
            "labels": {"severity": self.severity, "layer": self.layer, "action": action},
            "annotations": {"summary": self.summary, "description": self.description, "runbook_url": self.runbook},
        }


@dataclass(frozen=True)
class RecordingRule:
    name: str
    group: str
    expr: str
    help: str
    slow: bool = False

    def document(self) -> dict[str, Any]:
        return {"record": self.name, "expr": self.expr}


def rule_groups(gpus_per_node: int | None = None, evaluate_every: str | None = None) -> list[dict[str, Any]]:
    """The groups of a rule file. With `gpus_per_node`, nodes are held to that number of cards, else to the most they
    showed within a day. `evaluate_every` is not that of slow rules."""
    groups = []
    for file in FILES:
        interval = {"interval": evaluate_every} if evaluate_every else {}
        groups.append({"name": f"craton-{file}", **interval, "rules": _rules(file, slow=False)})
        slow = _rules(file, slow=True)
        if file == "device":
            slow.insert(0, _expected_gpus(gpus_per_node))
        if slow:
            groups.append({"name": f"craton-{file}-slow", "interval": SLOWLY, "rules": slow})
    return groups


def _rules(file: str, *, slow: bool) -> list[dict[str, Any]]:
    rules: list[RecordingRule | AlertRule] = [*RECORDINGS, *ALERTS]
    return [each.document() for each in rules if each.group == file and each.slow == slow]


def _expected_gpus(gpus_per_node: int | None) -> dict[str, Any]:
    """A node that shows no card any more keeps its expectation for a day. The cluster's number holds for nodes that
    showed a card, or have one on the bus: a login node has an exporter too."""
    shown = "max by (node) (max_over_time(craton:node_gpus[1d]))"
    if gpus_per_node is not None:
        shown = f"0 * ({shown} or max by (node) (craton_gpus_on_bus > 0)) + {gpus_per_node}"
    return {"record": EXPECTED_GPUS, "expr": shown}


def _read() -> tuple[tuple[RecordingRule, ...], tuple[AlertRule, ...]]:
    recordings, alerts = [], []
    folder = resources.files("craton.observability.prometheus").joinpath("rules")
    for file in FILES:
        table = tomllib.loads(folder.joinpath(f"{file}.toml").read_text(encoding="utf-8"))
        recordings += [RecordingRule(group=file, **_with_expr(each)) for each in table.get("record", ())]
        alerts += [
            AlertRule(group=file, for_=each.pop("for", ""), **_with_expr(each)) for each in table.get("alert", ())
        ]
    return tuple(recordings), tuple(alerts)


def _with_expr(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "expr": _XIDS.sub(lambda match: _codes(match[1]), row["expr"].strip())}


def _codes(action: str) -> str:
    found = sorted(code for code, fact in xid_facts().items() if fact.action == action)
    assert found, f"no XID asks for {action!r}"
    return "|".join(map(str, found))


RECORDINGS, ALERTS = _read()
