"""Recording and alert rules as data, from rules/LAYER.toml, and the documents that Prometheus and its operator read.

`ALERTS` and `RECORDINGS` hold every rule. In an expression XIDS_action is replaced by the codes with that action in the
probes' XID table, and SHARED_KINDS by the exporter's types of shared file systems, so each table exists once. The
expected number of GPUs and EFA devices per node depends on the cluster: `rule_groups` adds a rule for each.

Every file is one rule group, evaluated at the scrape interval. Rules with long ranges, or over every GPU and rank, are
marked `slow` and form a second group, evaluated every SLOWLY: a group that takes longer than its interval misses
evaluations, including those of hang alerts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib import resources
from typing import Any, Literal, get_args

from craton.infrastructure import CatalogError
from craton.infrastructure.catalog import instance
from craton.infrastructure.probes import HEALTH_ACTIONS, xid_facts
from craton.job.cluster import ClusterFile
from craton.observability.exporter import SHARED_KINDS
from craton.observability.prometheus.errors import ObserveError

Severity = Literal["page", "ticket", "info"]
Layer = Literal["scheduler", "device", "fabric", "collective", "framework", "storage", "host"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
LAYERS: tuple[Layer, ...] = get_args(Layer)
# The health actions, and those of other alerts: run `craton why`, check, repair, free space, add servers.
ACTIONS = (*HEALTH_ACTIONS, "diagnose", "check", "repair", "free", "scale")
FILES = ("device", "fabric", "storage", "host", "framework", "posttraining", "serving", "scheduler")
RUNBOOKS = "docs/runbooks"
SEVERAL_HOSTS = "u-"  # name prefix of the catalog's multi-host units (UltraServers): a node is one host of them
EXPECTED_GPUS = "craton:node_gpus_expected"
EXPECTED_FABRIC_DEVICES = "craton:node_fabric_devices_expected"
# Less than Prometheus' lookback of five minutes, so that a recorded value never goes stale between evaluations.
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
    hardware_only: bool = False  # reads metrics that no run on a plain machine exports
    action_from_series: bool = False  # the series' label `action` wins; `action` is then the minimum
    slow: bool = False  # evaluated every SLOWLY

    @property
    def runbook(self) -> str:
        """Path of its runbook in this repository."""
        return f"{RUNBOOKS}/{self.runbook_page}"

    @property
    def runbook_page(self) -> str:
        """Path of its runbook within the runbook folder."""
        return f"{self.group}.md#{self.name.lower()}"

    def document(self, runbooks: str | None = None) -> dict[str, Any]:
        """Return the rule as Prometheus reads it. With `runbooks`, the URL of the served folder, the annotation is
        runbook_url, which tools show as a link; otherwise the annotation `runbook` has the file's path."""
        place = {"runbook_url": f"{runbooks}/{self.runbook_page}"} if runbooks else {"runbook": self.runbook}
        action = "{{ $labels.action }}" if self.action_from_series else self.action
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": self.for_} if self.for_ else {}),
            "labels": {"severity": self.severity, "layer": self.layer, "action": action},
            "annotations": {"summary": self.summary, "description": self.description, **place},
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


def rule_groups(
    gpus_per_node: int | None = None,
    evaluate_every: str | None = None,
    *,
    efa_per_node: int | None = None,
    runbooks: str | None = None,
) -> list[dict[str, Any]]:
    """Return the groups of a rule file. `gpus_per_node` and `efa_per_node` are the expected numbers of GPUs and EFA
    devices; without them, the maximum of the last day is expected. `evaluate_every` does not apply to slow rules.
    `runbooks` is the URL of the runbook folder."""
    base = checked_runbooks(runbooks)
    groups = []
    for file in FILES:
        interval = {"interval": evaluate_every} if evaluate_every else {}
        groups.append({"name": f"craton-{file}", **interval, "rules": _rules(file, base, slow=False)})
        slow = _rules(file, base, slow=True)
        if file == "device":
            slow.insert(0, _expected_gpus(gpus_per_node))
        if file == "fabric":
            slow.append(_expected_fabric_devices(efa_per_node))
        if slow:
            groups.append({"name": f"craton-{file}-slow", "interval": SLOWLY, "rules": slow})
    return groups


def efa_per_node(cluster: ClusterFile | None) -> int | None:
    """Return the number of EFA devices per node of a cluster; None: not known, or its network is not EFA."""
    if cluster is None:
        return None
    if own := cluster.hardware:
        return (own.network_interfaces or own.num_gpus) if own.efa_version else None
    try:
        machine = instance(cluster.instance or "")
    except CatalogError:
        return None
    return machine.network_interfaces if machine.efa_version and not machine.name.startswith(SEVERAL_HOSTS) else None


def checked_runbooks(url: str | None) -> str | None:
    """Return the URL without a trailing slash."""
    if url is not None and not url.startswith(("http://", "https://")):
        raise ObserveError(f"--runbooks is {url!r}; give the http(s) URL that serves Craton's {RUNBOOKS}, https://…")
    return url.rstrip("/") if url else None


def _rules(file: str, runbooks: str | None, *, slow: bool) -> list[dict[str, Any]]:
    recordings = [entry.document() for entry in RECORDINGS if entry.group == file and entry.slow == slow]
    alerts = [item.document(runbooks) for item in ALERTS if item.group == file and item.slow == slow]
    return [*recordings, *alerts]


def _expected_gpus(gpus_per_node: int | None) -> dict[str, Any]:
    """Return the rule for the expected GPUs of a node. A node whose GPUs are all gone keeps its value for a day. The
    cluster's number applies to nodes that showed a GPU or have one on the PCI bus: login nodes run an exporter too."""
    shown = "max by (node) (max_over_time(craton:node_gpus[1d]))"
    if gpus_per_node is not None:
        shown = f"0 * ({shown} or max by (node) (craton_gpus_on_bus > 0)) + {gpus_per_node}"
    return {"record": EXPECTED_GPUS, "expr": shown}


def _expected_fabric_devices(efa_per_node: int | None) -> dict[str, Any]:
    """Return the rule for the expected fabric devices of a node. The cluster's number applies to GPU nodes that showed
    any device: a login node may have its own EFA, and smaller instances start without one."""
    shown = "max by (node) (max_over_time(craton:node_fabric_devices[1d]))"
    if efa_per_node is not None:
        shown = f"0 * ({shown} and on (node) {EXPECTED_GPUS}) + {efa_per_node} or {shown}"
    return {"record": EXPECTED_FABRIC_DEVICES, "expr": shown}


def _read() -> tuple[tuple[RecordingRule, ...], tuple[AlertRule, ...]]:
    recordings, alerts = [], []
    folder = resources.files("craton.observability.prometheus").joinpath("rules")
    for file in FILES:
        table = tomllib.loads(folder.joinpath(f"{file}.toml").read_text(encoding="utf-8"))
        recordings += [RecordingRule(group=file, **_with_expr(entry)) for entry in table.get("record", ())]
        alerts += [
            AlertRule(group=file, for_=item.pop("for", ""), **_with_expr(item)) for item in table.get("alert", ())
        ]
    return tuple(recordings), tuple(alerts)


def _with_expr(row: Mapping[str, Any]) -> dict[str, Any]:
    expr = _XIDS.sub(lambda match: _codes(match[1]), row["expr"].strip())
    return {**row, "expr": expr.replace("SHARED_KINDS", "|".join(sorted(SHARED_KINDS)))}


def _codes(action: str) -> str:
    codes = sorted(code for code, fact in xid_facts().items() if fact.action == action)
    assert codes, f"no XID has the action {action!r}"
    return "|".join(map(str, codes))


RECORDINGS, ALERTS = _read()
