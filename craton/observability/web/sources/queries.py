"""Queries to Prometheus: firing alerts, and GPU metrics of every node.

A Prometheus that does not answer affects nothing else on the page, which shows the reason. The methods here block;
pages call them through `Background`.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from craton.errors import CratonError

VARIABLE = "CRATON_PROMETHEUS"
ANSWER_SECONDS = 3.0  # per read of an answer
DEADLINE_SECONDS = 6.0  # for all queries of one refresh
# A series for each rank on a GPU; only Craton's exporter has it.
CARDS_OF_RUNS = "craton_gpu_rank_memory_bytes"
MAX_BYTES = 32 << 20
# family → aggregation over the GPUs of a node, and its title in a table
GPU_FAMILIES = {
    "DCGM_FI_DEV_GPU_UTIL": ("min", "busy %"),
    "DCGM_FI_DEV_GPU_TEMP": ("max", "°C"),
    "DCGM_FI_DEV_POWER_USAGE": ("max", "W"),
    "DCGM_FI_DEV_SM_CLOCK": ("min", "MHz"),
}


@dataclass(frozen=True)
class Alert:
    name: str
    state: str  # firing or pending
    severity: str
    layer: str
    run: str
    node: str
    summary: str
    action: str
    since: str  # in Prometheus' format


@dataclass(frozen=True)
class Answered:
    """An answer; `trouble` is why there is none."""

    alerts: tuple[Alert, ...] = ()
    trouble: str = ""

    def of_run(self, run: str, nodes: Iterable[str]) -> list[Alert]:
        """Return the alerts of the run, and those of its nodes that belong to no other run."""
        members = set(nodes)
        return [alert for alert in self.alerts if alert.run == run or (not alert.run and alert.node in members)]


class Prometheus:
    """A Prometheus server, by its address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def alerts(self) -> Answered:
        try:
            data = self._get("/api/v1/alerts")
            alerts = [_alert(item) for item in data.get("alerts") or () if isinstance(item, dict)]
        except Exception as error:  # noqa: BLE001 - any program may listen there and answer anything
            return Answered(trouble=f"Prometheus at {self.url} does not answer: {_why(error)}")
        return Answered(tuple(sorted(alerts, key=lambda alert: (alert.state != "firing", alert.name, alert.node))))

    @property
    def late(self) -> Answered:
        """Return the placeholder until the first answer."""
        return Answered(trouble=f"Prometheus at {self.url} has not answered yet")

    def gpus(self, run: str, nodes: Iterable[str]) -> dict[str, dict[str, float]]:
        """Return node of a run → family → value of its worst GPU, of those with its ranks; by node names only, when no
        exporter maps ranks to GPUs. Empty without an answer."""
        wanted = set(nodes)
        try:
            if self._ask(f"count({CARDS_OF_RUNS})"):
                # Node names are specific to a run, and other runs may have ranks on the same machine.
                mine = f"0 * max by (node, gpu, run_node) ({CARDS_OF_RUNS}{{run={json.dumps(run)}}}) + 1"
                asked = (
                    "{worst} by (run_node) ({worst} by (node, gpu) ({family}) * on (node, gpu) group_right () ("
                    + mine
                    + "))"
                )
                return self._families(asked, "run_node", wanted)
            return self._families("{worst} by (node) ({family})", "node", wanted)
        except Exception:  # noqa: BLE001 - as above; the alerts show that it does not answer
            return {}

    def _families(self, expression: str, label: str, wanted: set[str]) -> dict[str, dict[str, float]]:
        result: dict[str, dict[str, float]] = {}
        for family, (worst, _) in GPU_FAMILIES.items():
            for sample in self._ask(expression.replace("{worst}", worst).replace("{family}", family)):
                node = sample.get("metric", {}).get(label, "")
                if node in wanted:
                    result.setdefault(node, {})[family] = float(sample["value"][1])
        return result

    def _ask(self, expression: str) -> list[dict[str, Any]]:
        result = self._get("/api/v1/query", query=expression).get("result")
        return [item for item in result if isinstance(item, dict)] if isinstance(result, list) else []

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        address = f"{self.url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as answer:
            document = json.loads(answer.read(MAX_BYTES))
        data = document.get("data") if isinstance(document, dict) else None
        if not isinstance(data, dict):
            raise ValueError("the response is not from Prometheus")
        return data


def prometheus_address(option: str | None) -> str | None:
    """Return the option, else $CRATON_PROMETHEUS; None without either. CratonError when it is not a URL."""
    address, name = (option, "--prometheus") if option else (os.environ.get(VARIABLE), f"${VARIABLE}")
    if not address:
        return None
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CratonError(f"{name} {address!r} is not an address; write e.g. http://127.0.0.1:9090")
    return address


def _alert(document: dict[str, Any]) -> Alert:
    labels = {str(key): str(value) for key, value in (document.get("labels") or {}).items()}
    texts = {str(key): str(value) for key, value in (document.get("annotations") or {}).items()}
    return Alert(
        name=labels.get("alertname", "alert"),
        state=str(document.get("state", "")),
        severity=labels.get("severity", ""),
        layer=labels.get("layer", ""),
        run=labels.get("run", ""),
        node=labels.get("node", ""),
        summary=texts.get("summary", ""),
        action=texts.get("action", "") or labels.get("action", ""),
        since=str(document.get("activeAt", "")),
    )


def _why(error: Exception) -> str:
    return str(error.reason) if isinstance(error, urllib.error.URLError) else str(error) or type(error).__name__
