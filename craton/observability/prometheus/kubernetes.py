"""Objects of the Prometheus operator: what to scrape (PodMonitor, ServiceMonitor) and the rules (PrometheusRule).

The same labels as `scrape` makes: run, node, leaf, rank of the agents' own, node of the pod, run of the pod's labels.
"""

from __future__ import annotations

from typing import Any

from craton.infrastructure import GANG_CONTROLLERS
from craton.observability.prometheus.rules import rule_groups
from craton.observability.prometheus.scrape import AGENTS, POD_OF_RUN, SERVERS

Manifest = dict[str, Any]
API = "monitoring.coreos.com/v1"
NAMESPACE = "monitoring"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
_NODE = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
_RUN = {"sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"], "targetLabel": "run"}
_EVERYWHERE = {"any": True}


def operator_objects(cluster: str, gang: str = "none", gpus_per_node: int | None = None) -> dict[str, Manifest]:
    """File name → object."""
    found = {
        "prometheusrule.yaml": _object("PrometheusRule", "craton", cluster, {"groups": rule_groups(gpus_per_node)}),
        "podmonitor-runs.yaml": _pods(
            AGENTS, cluster, {"app.kubernetes.io/managed-by": "craton"}, port="metrics", relabel=[_RUN], own_labels=True
        ),
        "podmonitor-servers.yaml": _pods(
            SERVERS,
            cluster,
            {"app.kubernetes.io/managed-by": "craton", "app.kubernetes.io/component": "serve"},
            port="http",
            relabel=[_RUN],
        ),
        "podmonitor-exporter.yaml": _pods(
            "craton-node", cluster, {"app.kubernetes.io/name": "craton-exporter"}, port="metrics", own_labels=True
        ),
        "podmonitor-node-exporter.yaml": _pods(
            "node", cluster, {"app.kubernetes.io/name": "prometheus-node-exporter"}, port="metrics"
        ),
        "servicemonitor-dcgm.yaml": _dcgm(cluster),
    }
    if gang in GANG_CONTROLLERS:
        namespace, name = GANG_CONTROLLERS[gang]
        found[f"servicemonitor-{name}.yaml"] = _controller(cluster, namespace, name)
    return found


def _object(kind: str, name: str, cluster: str, spec: Manifest) -> Manifest:
    labels = {"app.kubernetes.io/part-of": "craton", "craton/cluster": cluster}
    return {
        "apiVersion": API,
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": spec,
    }


def _pods(
    job: str,
    cluster: str,
    labels: dict[str, str],
    *,
    port: str,
    relabel: list[Manifest] | None = None,
    own_labels: bool = False,
) -> Manifest:
    endpoint: Manifest = {
        "port": port,
        "path": "/metrics",
        **({"honorLabels": True} if own_labels else {}),
        "relabelings": [*(relabel or []), _NODE, {"targetLabel": "job", "replacement": job}],
    }
    spec = {
        "namespaceSelector": _EVERYWHERE,
        "selector": {"matchLabels": labels},
        "podMetricsEndpoints": [endpoint],
    }
    return _object("PodMonitor", job, cluster, spec)


def _dcgm(cluster: str) -> Manifest:
    """The GPU operator's Service, or that of dcgm-exporter's own chart. Its own pod label is the job's: it wins."""
    names = {"key": "app", "operator": "In", "values": ["nvidia-dcgm-exporter", "dcgm-exporter"]}
    endpoint = {
        "targetPort": 9400,
        "path": "/metrics",
        "honorLabels": True,
        "relabelings": [_NODE, {"targetLabel": "job", "replacement": "dcgm"}],
        "metricRelabelings": [
            {"sourceLabels": ["node", "Hostname"], "regex": ";(.+)", "targetLabel": "node"},
            {"sourceLabels": ["run", "pod"], "regex": f";{POD_OF_RUN}", "targetLabel": "run"},
        ],
    }
    spec = {"namespaceSelector": _EVERYWHERE, "selector": {"matchExpressions": [names]}, "endpoints": [endpoint]}
    return _object("ServiceMonitor", "dcgm", cluster, spec)


def _controller(cluster: str, namespace: str, name: str) -> Manifest:
    endpoint = {
        "port": "https",
        "path": "/metrics",
        "scheme": "https",
        "bearerTokenFile": TOKEN,
        "tlsConfig": {"insecureSkipVerify": True},
        "relabelings": [{"targetLabel": "job", "replacement": name}],
    }
    spec = {
        "namespaceSelector": {"matchNames": [namespace]},
        "selector": {"matchLabels": {"control-plane": "controller-manager"}},
        "endpoints": [endpoint],
    }
    return _object("ServiceMonitor", name, cluster, spec)
