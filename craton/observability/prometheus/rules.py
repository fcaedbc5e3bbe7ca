"""Recording and alert rules as data, from rules/LAYER.toml, and the documents that Prometheus and its operator read.

`ALERTS` and `RECORDINGS` hold every rule. In an expression XIDS_action stands for the codes of that action in the XID
table of the probes and SHARED_KINDS for the exporter's kinds of shared file systems, so that those tables are the one
place that knows them. How many GPUs and EFA devices a node should have is no rule of a file but comes from a cluster:
`rule_groups` writes it into the rules it returns.

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
# The health actions, and what people do about the rest: ask `craton why`, look there, mend it, free space, add servers.
ACTIONS = (*HEALTH_ACTIONS, "diagnose", "check", "repair", "free", "scale")
FILES = ("device", "fabric", "storage", "host", "framework", "serving", "scheduler")
RUNBOOKS = "docs/runbooks"
SEVERAL_HOSTS = "u-"  # how the catalog's units of several hosts are called, UltraServers: a node is one of those
EXPECTED_GPUS = "craton:node_gpus_expected"
EXPECTED_FABRIC_DEVICES = "craton:node_fabric_devices_expected"
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
        """Its place in this project."""
        return f"{RUNBOOKS}/{self.runbook_page}"

    @property
    def runbook_page(self) -> str:
        """The same within the folder of runbooks."""
        return f"{self.group}.md#{self.name.lower()}"

    def document(self, runbooks: str | None = None) -> dict[str, Any]:
        """As Prometheus reads it. Tools make a link of runbook_url: it is there when `runbooks` says where the folder
        is served, else the annotation `runbook` names the file."""
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
    """The groups of a rule file. With `gpus_per_node` and `efa_per_node`, nodes are held to these numbers of cards and
    of EFA devices, else to the most they showed within a day. `evaluate_every` is not that of slow rules. `runbooks` is
    the URL of the folder of runbooks."""
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
    """How many EFA devices each node of a cluster has; None: not known, or its network is another."""
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
    """Without a slash at its end."""
    if url is not None and not url.startswith(("http://", "https://")):
        raise ObserveError(f"--runbooks is {url!r}; give the URL at which {RUNBOOKS} of Craton is served, https://…")
    return url.rstrip("/") if url else None


def _rules(file: str, runbooks: str | None, *, slow: bool) -> list[dict[str, Any]]:
    recordings = [entry.document() for entry in RECORDINGS if entry.group == file and entry.slow == slow]
    alerts = [item.document(runbooks) for item in ALERTS if item.group == file and item.slow == slow]
    return [*recordings, *alerts]


def _expected_gpus(gpus_per_node: int | None) -> dict[str, Any]:
    """A node that shows no card any more keeps its expectation for a day. The cluster's number holds for nodes that
    showed a card, or have one on the bus: a login node has an exporter too."""
    shown = "max by (node) (max_over_time(craton:node_gpus[1d]))"
    if gpus_per_node is not None:
        shown = f"0 * ({shown} or max by (node) (craton_gpus_on_bus > 0)) + {gpus_per_node}"
    return {"record": EXPECTED_GPUS, "expr": shown}


def _expected_fabric_devices(efa_per_node: int | None) -> dict[str, Any]:
    """The cluster's number is for nodes with cards that have any device: a login node may have an EFA of its own, and
    smaller instances are started without one."""
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
    assert codes, f"no XID asks for {action!r}"
    return "|".join(map(str, codes))


RECORDINGS, ALERTS = _read()
