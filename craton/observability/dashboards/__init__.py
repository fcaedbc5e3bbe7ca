"""Grafana dashboards: cluster, run, node, serving, storage, network, cost and goodput.

`BOARDS` holds them as data, down to every query; `all_dashboards` returns Grafana's JSON, which needs the extra
`observe`, and `dashboard_files` returns it as files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.dashboards.boards import BOARDS
    from craton.observability.dashboards.files import dashboard_files
    from craton.observability.dashboards.grafana import all_dashboards
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
