"""Prometheus and Alertmanager: rules as data, what is scraped, both programs run on this machine, files for others'.

`ALERTS` and `RECORDINGS` are the rules, `rule_groups` the document made of them; `Observer` is `craton observe up`, and
`render` writes everything for a Prometheus, Alertmanager and Grafana that somebody else runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.observability.prometheus.alertmanager import alertmanager_config, write_private
    from craton.observability.prometheus.errors import ObserveError
    from craton.observability.prometheus.observer import FOLDER, Observed, Observer, ObserverSettings, TargetKeeper
    from craton.observability.prometheus.processes import ObserverProcess, find_program, start_prometheus
    from craton.observability.prometheus.remote import DATA_SOURCE
    from craton.observability.prometheus.rendering import NO_DASHBOARDS, NO_EXPORTER, lacks_exporter, render
    from craton.observability.prometheus.rules import (
        ACTIONS,
        ALERTS,
        LAYERS,
        RECORDINGS,
        SEVERITIES,
        AlertRule,
        RecordingRule,
        rule_groups,
    )
    from craton.observability.prometheus.scrape import dcgm_relabeling, prometheus_config
    from craton.observability.prometheus.targets import (
        EXPORTERS,
        ScrapedMachine,
        SearchedExporters,
        ScrapeTarget,
        look_at,
        write_targets,
    )
else:
    __getattr__ = loader(
        __name__,
        {
            "alertmanager": ("alertmanager_config", "write_private"),
            "errors": ("ObserveError",),
            "observer": ("FOLDER", "Observed", "Observer", "Settings", "TargetKeeper"),
            "processes": ("Service", "find_program", "start_prometheus"),
            "remote": ("DATA_SOURCE",),
            "rendering": ("NO_DASHBOARDS", "NO_EXPORTER", "lacks_exporter", "render"),
            "rules": (
                *("ACTIONS", "ALERTS", "LAYERS", "RECORDINGS", "SEVERITIES"),
                *("AlertRule", "RecordingRule", "rule_groups"),
            ),
            "scrape": ("dcgm_relabeling", "prometheus_config"),
            "targets": ("EXPORTERS", "Machine", "SearchedExporters", "Target", "look_at", "write_targets"),
        },
    )

__all__ = [
    "ACTIONS",
    "ALERTS",
    "DATA_SOURCE",
    "EXPORTERS",
    "FOLDER",
    "LAYERS",
    "NO_DASHBOARDS",
    "NO_EXPORTER",
    "RECORDINGS",
    "SEVERITIES",
    "AlertRule",
    "ScrapedMachine",
    "ObserveError",
    "Observed",
    "Observer",
    "RecordingRule",
    "SearchedExporters",
    "ObserverProcess",
    "ObserverSettings",
    "ScrapeTarget",
    "TargetKeeper",
    "alertmanager_config",
    "dcgm_relabeling",
    "find_program",
    "lacks_exporter",
    "look_at",
    "prometheus_config",
    "render",
    "rule_groups",
    "start_prometheus",
    "write_private",
    "write_targets",
]
