"""Objects of the Prometheus operator: scrape targets (PodMonitor, ServiceMonitor) and rules (PrometheusRule).

Labels are the same as in `scrape`: run, node, leaf and rank from the agents themselves, node from the pod, run from the
pod's labels, leaf from a label of its node.
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
EXPORTER_LABELS = {"app.kubernetes.io/name": "craton-exporter"}  # labels of Craton's exporter pods
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
# Port name of node_exporter: the first in its own chart, the second in kube-prometheus-stack.
NODE_EXPORTER_PORTS = ("metrics", "http-metrics")
_NODE = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
_RUN = {"sourceLabels": [RUN], "targetLabel": "run"}
_EVERYWHERE = {"any": True}
# The operator adds the exporter's own pod to every series; on GPU series `pod` must be the pod that uses the GPU.
_NO_POD = {"action": "labeldrop", "regex": "pod"}


@dataclass(frozen=True)
class MonitoredCluster:
    """The properties of a cluster that its operator objects depend on."""

    name: str
    gang: str = "none"
    leaf_label: str = ""  # node label with the leaf switch; "": not known
    labels: Mapping[str, str] = field(default_factory=dict)  # that the cluster's Prometheus selects objects by

    @property
    def place(self) -> list[Manifest]:
        """Relabelings that set node and leaf of a target."""
        return [
            _NODE,
            *([{"sourceLabels": [node_meta(self.leaf_label)], "targetLabel": "leaf"}] if self.leaf_label else []),
        ]

    @property
    def object_labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/part-of": "craton", "craton/cluster": self.name, **self.labels}

    @property
    def attached(self) -> Manifest:
        """Setting of a monitor that attaches node labels to its targets."""
        return {"attachMetadata": {"node": True}} if self.leaf_label else {}


def operator_objects(cluster: MonitoredCluster, groups: list[dict[str, Any]]) -> dict[str, Manifest]:
    """Return file name → object."""
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
    """Return a PodMonitor. `ports`: the names that the pods' port may have."""
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
    """Return a ServiceMonitor for the GPU operator's Service or that of dcgm-exporter's chart. Its label `pod` names
    the pod that uses the GPU, so labels are honored."""
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
