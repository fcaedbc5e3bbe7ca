"""Alertmanager's configuration: routes, receivers and inhibition rules.

A page is sent within seconds and repeated every hour, a ticket twice a day; `info` alerts are shown but never sent.
Alerts that follow from a more serious one of the same node, GPU or run are inhibited.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from craton.observability.prometheus.errors import ObserveError

NULL, WEBHOOK = "null", "webhook"  # receivers; the first sends nothing, as in kube-prometheus
# (source matcher, target matcher, labels that must be equal): the source is the more serious alert.
INHIBITED = (
    ('alertname="GpuRecoveryWanted"', 'alertname=~"GpuXid.*"', ("node", "gpu")),
    ('alertname=~"GpuXid(Replace|Reboot|Reset)"', 'alertname=~"GpuXid(Restart|Observe|Unknown)"', ("node", "gpu")),
    ('alertname="RunLost"', 'alertname="NodeDown"', ("run",)),
    # Not by NodeDown: a run that continues without a lost node can still hang.
    ('alertname="RunLost"', 'alertname="RunHung"', ("run",)),
    ('alertname=~"NodeDown|RunLost"', 'alertname=~"StepSlowerThanPlan|StragglerRank|CheckpointStale"', ("run",)),
    ('alertname="RunHung"', 'alertname=~"CheckpointStale|GoodputLow"', ("run",)),
    ('alertname="LossNotFinite"', 'alertname=~"LossSpike|GradientSpike|StepsSkipped"', ("run",)),
    ('alertname="LustreDisconnected"', 'alertname=~"LustreSlow|LustreStalled|StorageStalls"', ("node",)),
)


def alertmanager_config(webhook: str | None = None, first_wait: str = "10s") -> dict[str, Any]:
    """Return the whole configuration. Without a webhook, alerts are shown but not sent."""
    if webhook is not None and not webhook.startswith(("http://", "https://")):
        raise ObserveError(f"--webhook is {webhook!r}; give the http(s) URL of an Alertmanager webhook, http://…")
    receiver = WEBHOOK if webhook else NULL
    receivers: list[dict[str, Any]] = [{"name": NULL}]
    if webhook:
        receivers.append({"name": WEBHOOK, "webhook_configs": [{"url": webhook, "send_resolved": True}]})
    return {
        "route": {
            "receiver": receiver,
            # Not by node: a failed switch or server gives one notification, although every node reports it.
            "group_by": ["alertname", "run", "leaf"],
            "group_wait": first_wait,
            "group_interval": "1m",
            "repeat_interval": "12h",
            "routes": [
                {"matchers": ['severity="info"'], "receiver": NULL},
                {
                    "matchers": ['severity="page"'],
                    "receiver": receiver,
                    "group_wait": first_wait,
                    "repeat_interval": "1h",
                },
            ],
        },
        "receivers": receivers,
        "inhibit_rules": [
            {"source_matchers": [source], "target_matchers": [target], "equal": list(labels)}
            for source, target, labels in INHIBITED
        ],
    }


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600: a webhook's URL is often the only secret needed to post to it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # also when the file existed before
        file.write(text)
