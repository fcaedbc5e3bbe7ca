"""Remote write to Amazon Managed Prometheus, and provisioning files for Grafana: data sources, dashboard provider."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from craton.observability.prometheus.errors import ObserveError

# The plugin to which Grafana moved SigV4. Grafana does not bundle it; Amazon Managed Grafana has it since version 12.
SIGNING_PLUGIN = "grafana-amazonprometheus-datasource"
DATA_SOURCE = "craton-prometheus"  # uid that the dashboards reference
# Source: docs.aws.amazon.com, PrometheusMonitoringConfiguration, pattern of remoteWriteUrl, 2026-11-16
_WORKSPACE = re.compile(
    r"(?P<base>https://aps-workspaces\.(?P<region>[a-z]{2}-[a-z-]{1,20}-[1-9])\.amazonaws(?:\.[0-9A-Za-z]{2,4})+"
    r"/workspaces/(?P<id>[-_.0-9A-Za-z]{1,100}))(?:/api/v1/remote_write)?/?"
)


@dataclass(frozen=True)
class Workspace:
    """A workspace of Amazon Managed Prometheus."""

    url: str  # without a trailing slash
    region: str
    id: str

    @property
    def remote_write(self) -> dict[str, Any]:
        """Entry of remote_write: signed with the machine's IAM role, batch sizes as AWS recommends."""
        return {
            "url": f"{self.url}/api/v1/remote_write",
            "sigv4": {"region": self.region},
            "queue_config": {"max_samples_per_send": 1000, "max_shards": 200, "capacity": 2500},
        }


def workspace_of(url: str) -> Workspace:
    match = _WORKSPACE.fullmatch(url)
    if match is None:
        raise ObserveError(
            f"--amp is {url!r}; give the workspace endpoint, "
            "https://aps-workspaces.REGION.amazonaws.com/workspaces/ws-ID"
        )
    return Workspace(match["base"], match["region"], match["id"])


def data_sources(prometheus_url: str, alertmanager_url: str, workspace: Workspace | None) -> dict[str, Any]:
    """Return Grafana's provisioning/datasources file: the workspace if given, otherwise the local Prometheus."""
    if workspace is not None:
        source = {
            "name": "Craton",
            "uid": DATA_SOURCE,
            "type": SIGNING_PLUGIN,
            "access": "proxy",
            "url": f"{workspace.url}/",
            "isDefault": True,
            "jsonData": {
                "httpMethod": "POST",
                "sigV4Auth": True,
                "sigV4AuthType": "default",  # the credentials of Grafana's own machine
                "sigV4Region": workspace.region,
            },
        }
        return {"apiVersion": 1, "datasources": [source]}
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Craton",
                "uid": DATA_SOURCE,
                "type": "prometheus",
                "access": "proxy",
                "url": prometheus_url,
                "isDefault": True,
                "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
            },
            {
                "name": "Craton alerts",
                "uid": "craton-alertmanager",
                "type": "alertmanager",
                "access": "proxy",
                "url": alertmanager_url,
                "jsonData": {"implementation": "prometheus"},
            },
        ],
    }


def dashboard_provider() -> dict[str, Any]:
    """Return Grafana's provisioning/dashboards file, for dashboards copied to /var/lib/grafana/dashboards/craton."""
    provider = {
        "name": "craton",
        "folder": "Craton",
        "type": "file",
        "allowUiUpdates": True,
        "options": {"path": "/var/lib/grafana/dashboards/craton"},
    }
    return {"apiVersion": 1, "providers": [provider]}
