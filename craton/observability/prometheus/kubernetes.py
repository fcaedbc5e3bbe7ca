"""Objects of the Prometheus operator: what to scrape (PodMonitor, ServiceMonitor) and the rules (PrometheusRule).

The same labels as `scrape` makes: run, node, leaf, rank of the agents' own, node of the pod, run of the pod's labels,
leaf of a label of its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from craton.observability.prometheus.scrape import KUEUE, KUEUE_NAMESPACE, RUN, dcgm_relabeling, node_meta
from craton.observability.prometheus.targets import AGENTS, SERVERS

Manifest = dict[str, Any]
API = "monitoring.coreos.com/v1"
NAMESPACE = "monitoring"
EXPORTER_LABELS = {"app.kubernetes.io/name": "craton-exporter"}  # of the pods of our own
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
# The node exporter's port has the first name in its own chart, the second in kube-prometheus-stack.
NODE_EXPORTER_PORTS = ("metrics", "http-metrics")
_NODE = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
_RUN = {"sourceLabels": [RUN], "targetLabel": "run"}
_EVERYWHERE = {"any": True}
# The operator puts the exporter's own pod on every series; `pod` of a card is the one that has it, or none.
_NO_POD = {"action": "labeldrop", "regex": "pod"}


@dataclass(frozen=True)
class MonitoredCluster:
    """What the objects of one cluster differ by from those of another."""

    name: str
    gang: str = "none"
    leaf_label: str = ""  # of nodes; "": it is not known on which switch they hang
    labels: Mapping[str, str] = field(default_factory=dict)  # by which the cluster's Prometheus finds what is for it

    @property
    def place(self) -> list[Manifest]:
        """node and leaf of a target."""
        return [
            _NODE,
            *([{"sourceLabels": [node_meta(self.leaf_label)], "targetLabel": "leaf"}] if self.leaf_label else []),
        ]

    @property
    def object_labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/part-of": "craton", "craton/cluster": self.name, **self.labels}

    @property
    def attached(self) -> Manifest:
        """What a monitor asks for so that targets know their nodes' labels."""
        return {"attachMetadata": {"node": True}} if self.leaf_label else {}


def operator_objects(cluster: MonitoredCluster, groups: list[dict[str, Any]]) -> dict[str, Manifest]:
    """File name → object."""
    ours = {"app.kubernetes.io/managed-by": "craton"}
    result = {
        "prometheusrule.yaml": _object("PrometheusRule", "craton", cluster, {"groups": groups}),
        "podmonitor-runs.yaml": _pods(AGENTS, cluster, ours, ports=("metrics",), relabel=[_RUN], own_labels=True),
        "podmonitor-servers.yaml": _pods(
            SERVERS, cluster, {**ours, "app.kubernetes.io/component": "serve"}, ports=("http",), relabel=[_RUN]
        ),
        "podmonitor-exporter.yaml": _pods(
            "craton-node", cluster, EXPORTER_LABELS, ports=("metrics",), relabel=[_NO_POD], own_labels=True
        ),
        "podmonitor-node-exporter.yaml": _pods(
            "node", cluster, {"app.kubernetes.io/name": "prometheus-node-exporter"}, ports=NODE_EXPORTER_PORTS
        ),
        "servicemonitor-dcgm.yaml": _dcgm(cluster),
    }
    if cluster.gang == KUEUE:
        result["servicemonitor-kueue.yaml"] = _kueue(cluster)
    return result


def _object(kind: str, name: str, cluster: MonitoredCluster, spec: Manifest) -> Manifest:
    return {
        "apiVersion": API,
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": cluster.object_labels},
        "spec": spec,
    }


def _pods(
    job: str,
    cluster: MonitoredCluster,
    labels: dict[str, str],
    *,
    ports: tuple[str, ...],
    relabel: list[Manifest] | None = None,
    own_labels: bool = False,
) -> Manifest:
    """`ports`: the names that the pods' port may have."""
    endpoint: Manifest = {
        "path": "/metrics",
        **({"honorLabels": True} if own_labels else {}),
        "relabelings": [*(relabel or []), *cluster.place, {"targetLabel": "job", "replacement": job}],
    }
    spec = {
        "namespaceSelector": _EVERYWHERE,
        "selector": {"matchLabels": labels},
        **cluster.attached,
        "podMetricsEndpoints": [{"port": port, **endpoint} for port in ports],
    }
    return _object("PodMonitor", job, cluster, spec)


def _dcgm(cluster: MonitoredCluster) -> Manifest:
    """The GPU operator's Service, or that of dcgm-exporter's own chart. Its own pod label is the job's: it wins."""
    names = {"key": "app", "operator": "In", "values": ["nvidia-dcgm-exporter", "dcgm-exporter"]}
    endpoint = {
        "targetPort": 9400,
        "path": "/metrics",
        "honorLabels": True,
        "relabelings": [_NO_POD, *cluster.place, {"targetLabel": "job", "replacement": "dcgm"}],
        "metricRelabelings": [
            {"sourceLabels": rule["source_labels"], "regex": rule["regex"], "targetLabel": rule["target_label"]}
            for rule in dcgm_relabeling(None)
        ],
    }
    spec = {
        "namespaceSelector": _EVERYWHERE,
        "selector": {"matchExpressions": [names]},
        **cluster.attached,
        "endpoints": [endpoint],
    }
    return _object("ServiceMonitor", "dcgm", cluster, spec)


def _kueue(cluster: MonitoredCluster) -> Manifest:
    endpoint = {
        "port": "https",
        "path": "/metrics",
        "scheme": "https",
        "bearerTokenFile": TOKEN,
        "tlsConfig": {"insecureSkipVerify": True},
        "relabelings": [{"targetLabel": "job", "replacement": KUEUE}],
    }
    spec = {
        "namespaceSelector": {"matchNames": [KUEUE_NAMESPACE]},
        "selector": {"matchLabels": {"control-plane": "controller-manager"}},
        "endpoints": [endpoint],
    }
    return _object("ServiceMonitor", KUEUE, cluster, spec)
