"""Dashboards as data: boards, rows, panels and queries, and the variables that queries use.

Expressions use Grafana's variables: $run, $node and $leaf are regular expressions (`run=~"$run"`), and
$__rate_interval is a window of at least four scrapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "stat", "table", "bars"]
# Grafana's unit names (@grafana/data, valueFormats/categories), 2026-11-16.
Unit = Literal[
    "short",
    "s",
    "percentunit",
    "bytes",
    "Bps",
    "celsius",
    "watt",
    "kwatth",
    "hertz",
    "currencyUSD",
    "reqps",
    "ops",
    "dateTimeAsIso",
]
# Metrics that no laptop exports: GPUs, fabrics, Lustre, FSx, SMART logs, NCCL Inspector, Slurm and Kueue.
HARDWARE = re.compile(
    r"\b(?:DCGM_|craton_gpus?_|craton:gpu_|craton:node_gpus|craton_nvswitch_|node_amazonefa_|node_infiniband_|"
    r"lustre_|craton_lustre_|aws_fsx_|nvme_|nccl_|slurm_|kueue_)"
)


@dataclass(frozen=True)
class PanelQuery:
    """One expression. `legend` names its lines, or its column in a table."""

    expr: str
    legend: str
    is_plan: bool = False  # a prediction or a limit: drawn dashed
    unit: Unit | None = None  # of a column, if it differs from the panel's

    @property
    def hardware_only(self) -> bool:
        """Whether it reads metrics that only a cluster's hardware or scheduler exports."""
        return HARDWARE.search(self.expr) is not None


@dataclass(frozen=True)
class Panel:
    title: str
    description: str  # what it shows, and what to do
    queries: tuple[PanelQuery, ...]
    unit: Unit
    kind: Kind = "lines"
    width: int = 8  # of 24
    height: int = 7
    alerts: tuple[str, ...] = ()  # alerts whose runbooks are linked
    warn: float | None = None  # yellow from this value on; if `bad` is lower, below it
    bad: float | None = None  # red from this value on, or below it
    stacked: bool = False
    nothing: str = ""  # text without series: "0" where no series is good
    opens: str = ""  # dashboard that a table row links to; the label has the name of its variable


@dataclass(frozen=True)
class PanelRow:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A selection at the top of a board; `query` returns its values."""

    name: str
    label: str
    query: str
    has_all: bool = True
    multi: bool = True


@dataclass(frozen=True)
class Board:
    name: str  # of its file; the uid is craton-NAME
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[PanelRow, ...]
    since: str = "now-6h"

    @property
    def uid(self) -> str:
        return f"craton-{self.name}"

    @property
    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels

    @property
    def queries(self) -> Iterator[tuple[Panel, PanelQuery]]:
        for panel in self.panels:
            for query in panel.queries:
                yield panel, query


# Runs and servers; nodes by any exporter; leaf switches by the labels of nodes.
RUN = Variable("run", "Run", 'label_values(up{job=~"craton|craton-serve", run!=""}, run)')
SERVER = Variable("run", "Server", "label_values(vllm:num_requests_running, run)")
NODE = Variable("node", "Node", 'label_values(up{job=~"craton-node|dcgm|node|efa"}, node)')
LEAF = Variable("leaf", "Leaf", 'label_values({__name__=~"up|craton_exporter_info", leaf!=""}, leaf)')
