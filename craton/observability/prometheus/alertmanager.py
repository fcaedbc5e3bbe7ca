"""Alertmanager's configuration: who is told of what, and what goes without saying.

A page is told within seconds and again every hour, a ticket within a minute and again twice a day; what is only worth
knowing is shown and sent to nobody. What follows from a graver alert of the same node, card or run is held back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from craton.observability.prometheus.errors import ObserveError

NOBODY, WEBHOOK = "nobody", "webhook"
# (what holds back, what is held back, labels they must share): the graver one tells more.
INHIBITED = (
    ('alertname="GpuRecoveryWanted"', 'alertname=~"GpuXid.*"', ("node", "gpu")),
    ('alertname=~"GpuXid(Replace|Reboot|Reset)"', 'alertname=~"GpuXid(Restart|Observe|Unknown)"', ("node", "gpu")),
    ('alertname="RunLost"', 'alertname="NodeDown"', ("run",)),
    # A node may be down for long in a run that goes on without it: that run can hang all the same.
    ('alertname="RunLost"', 'alertname="RunHung"', ("run",)),
    ('alertname=~"NodeDown|RunLost"', 'alertname=~"StepSlowerThanPlan|StragglerRank|CheckpointStale"', ("run",)),
    ('alertname="RunHung"', 'alertname=~"CheckpointStale|GoodputLow"', ("run",)),
    ('alertname="LossNotFinite"', 'alertname=~"LossSpike|GradientSpike|StepsSkipped"', ("run",)),
    ('alertname="LustreDisconnected"', 'alertname=~"LustreSlow|LustreStalled|StorageStalls"', ("node",)),
)


def alertmanager_config(webhook: str | None = None, first_wait: str = "10s") -> dict[str, Any]:
    """The whole file. Without a webhook alerts are shown and sent to nobody."""
    if webhook is not None and not webhook.startswith(("http://", "https://")):
        raise ObserveError(f"--webhook is {webhook!r}; give a URL that takes Alertmanager's POST, http://…")
    receiver = WEBHOOK if webhook else NOBODY
    receivers: list[dict[str, Any]] = [{"name": NOBODY}]
    if webhook:
        receivers.append({"name": WEBHOOK, "webhook_configs": [{"url": webhook, "send_resolved": True}]})
    return {
        "route": {
            "receiver": receiver,
            # Not by node: a switch or a server that fails is one thing to be told, though every node notices.
            "group_by": ["alertname", "run", "leaf"],
            "group_wait": first_wait,
            "group_interval": "1m",
            "repeat_interval": "12h",
            "routes": [
                {"matchers": ['severity="info"'], "receiver": NOBODY},
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
    """Readable for its owner alone: the address of a webhook is often all that a stranger needs to write to it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # of a file that was there before, too
        file.write(text)
