"""Grafana dashboards: cluster, run, node, serving, storage, network, cost and goodput.

`BOARDS` holds them as data, down to every query; `all_dashboards` makes Grafana's JSON of them, which needs the extra
`observe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.observability.dashboards.boards import BOARDS
    from craton.observability.dashboards.grafana import all_dashboards
    from craton.observability.dashboards.model import Board, Panel, PanelQuery, PanelRow, Variable
else:
    __getattr__ = loader(
        __name__,
        {
            "boards": ("BOARDS",),
            "grafana": ("all_dashboards",),
            "model": ("Board", "Panel", "Query", "Row", "Variable"),
        },
    )

__all__ = ["BOARDS", "Board", "Panel", "PanelQuery", "PanelRow", "Variable", "all_dashboards"]
