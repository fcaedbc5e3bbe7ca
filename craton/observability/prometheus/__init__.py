"""Prometheus and Alertmanager: rules as data, scrape targets, both programs as local processes, rendered files.

`ALERTS` holds the alert rules, `Observer` is `craton observe up`, and `render` returns the files for an existing
Prometheus, Alertmanager and Grafana.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.prometheus.alertmanager import write_private
    from craton.observability.prometheus.observer import Observed, Observer, ObserverSettings, TargetKeeper
    from craton.observability.prometheus.processes import find_program, start_prometheus
    from craton.observability.prometheus.remote import DATA_SOURCE
    from craton.observability.prometheus.rendering import NO_DASHBOARDS, NO_EXPORTER, lacks_exporter, render
    from craton.observability.prometheus.rules import ALERTS
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
