"""The dashboards as files, if the extra `observe` is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec


def dashboard_files(runbooks: str | None) -> dict[str, str]:
    """Return file name → text; empty without the extra `observe`. `runbooks` is the URL of the runbook folder."""
    if find_spec("grafana_foundation_sdk") is None:
        return {}
    from craton.observability.dashboards.grafana import all_dashboards

    return {
        f"grafana/dashboards/{name}.json": json.dumps(item, indent=1) for name, item in all_dashboards(runbooks).items()
    }
