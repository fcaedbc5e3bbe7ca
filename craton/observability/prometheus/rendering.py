"""`craton observe render`: files for a Prometheus, Alertmanager and Grafana that somebody else runs.

Pure: the same cluster file gives the same texts. What the files are for, and how they are put in place, stands in the
README.md among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from craton.infrastructure import to_yaml
from craton.job import ClusterFile
from craton.observability.exporter import dcgm_counters
from craton.observability.prometheus.alertmanager import alertmanager_config
from craton.observability.prometheus.kubernetes import MonitoredCluster, operator_objects
from craton.observability.prometheus.observer import FOLDER, gpus_per_node, leaf_label
from craton.observability.prometheus.remote import Workspace, dashboard_provider, data_sources, workspace_of
from craton.observability.prometheus.rules import rule_groups
from craton.observability.prometheus.scrape import (
    Job,
    file_jobs,
    kubernetes_jobs,
    own_job,
    prometheus_config,
    shared_file_jobs,
    slurm_jobs,
)
from craton.remote import is_url

DASHBOARDS = "craton.observability.dashboards"
NO_DASHBOARDS = "No dashboards are among these: they need the extra `observe` (`pip install 'craton[observe]'`)."
PROMETHEUS_URL, ALERTMANAGER_URL = "http://localhost:9090", "http://localhost:9093"


def render(
    cluster: ClusterFile | None = None,
    webhook: str | None = None,
    amp: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """File → text. `amp` is the endpoint of a workspace of Amazon Managed Prometheus; `labels` are for the objects of
    the Prometheus operator."""
    workspace = workspace_of(amp) if amp else None
    gpus = gpus_per_node(cluster)
    on_kubernetes = cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == "kubernetes"
    config = prometheus_config(
        [own_job(PROMETHEUS_URL.removeprefix("http://")), *_jobs(cluster)],
        alertmanager=ALERTMANAGER_URL.removeprefix("http://"),
        external_labels={"cluster": cluster.name} if cluster else None,
        remote_write=[workspace.remote_write] if workspace else [],
    )
    files = {
        "prometheus/prometheus.yml": to_yaml(config),
        "prometheus/rules/craton.yaml": to_yaml({"groups": rule_groups(gpus)}),
        "alertmanager/alertmanager.yml": to_yaml(alertmanager_config(webhook)),
        "dcgm/craton-counters.csv": dcgm_counters(),
        "dcgm/craton-counters-blackwell.csv": dcgm_counters(blackwell=True),
        "grafana/provisioning/datasources/craton.yaml": to_yaml(
            data_sources(PROMETHEUS_URL, ALERTMANAGER_URL, workspace)
        ),
        "grafana/provisioning/dashboards/craton.yaml": to_yaml(dashboard_provider()),
        **_dashboards(),
    }
    if cluster is None or on_kubernetes:
        gang = cluster.scheduler.gang if cluster and cluster.scheduler else "kueue"
        name = cluster.name if cluster else "craton"
        objects = operator_objects(MonitoredCluster(name, gang, leaf_label(cluster), labels or {}), gpus)
        files |= {f"kubernetes/{name}": to_yaml(manifest) for name, manifest in objects.items()}
        if workspace:
            files["kubernetes/prometheus-remote-write.yaml"] = to_yaml(_operator_patch(workspace))
    files["README.md"] = _readme(files, cluster, workspace, labels or {})
    return files


def _jobs(cluster: ClusterFile | None) -> list[Job]:
    """Runs and our exporter by the files that `craton observe up --targets` keeps, other exporters by the cluster's own
    means."""
    if cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == "kubernetes":
        return kubernetes_jobs(cluster.scheduler.gang, leaf_label=leaf_label(cluster))
    runs = cluster.runs.rstrip("/") if cluster and cluster.runs and not is_url(cluster.runs) else "runs"
    jobs = file_jobs(f"{runs}/{FOLDER}/targets")
    if cluster is None or cluster.scheduler is None or cluster.scheduler.kind != "slurm":
        return jobs
    shared = cluster.storage.shared.path if cluster.storage.shared else None
    exporters = shared_file_jobs(f"{shared.rstrip('/')}/prometheus") if shared else []
    told_by_nodes = {job["job_name"] for job in exporters}
    return [*(job for job in jobs if job["job_name"] not in told_by_nodes), *exporters, *slurm_jobs()]


def _dashboards() -> dict[str, str]:
    """Where the dashboards are part of this installation (they need an extra; without it README.md says so)."""
    if find_spec(DASHBOARDS) is None or find_spec("grafana_foundation_sdk") is None:
        return {}
    found = import_module(DASHBOARDS).all_dashboards()
    return {f"grafana/dashboards/{name}.json": json.dumps(each, indent=1) for name, each in found.items()}


def _operator_lines(labels: Mapping[str, str]) -> list[str]:
    stated = ", ".join(f"`{key}: {value}`" for key, value in labels.items())
    has = f"These have {stated}." if stated else "These have none for it: render with `--label release=NAME`."
    return [
        "",
        "Where the Prometheus operator runs, `kubectl apply -f kubernetes/` instead of `prometheus/`. A Prometheus",
        "takes the objects that its selectors name: that of kube-prometheus-stack those with the label",
        f"`release: NAME`, NAME being its Helm release. {has}",
        "What a node exporter says must not come twice: where kube-prometheus-stack scrapes it as well, set",
        "`prometheus-node-exporter.prometheus.monitor.enabled=false` there. `leaf` is of nodes' labels: Prometheus'",
        "account must be allowed to list and watch nodes. dcgm-exporter tells the run of every pod's cards where it",
        "runs with `--kubernetes-enable-pod-labels`; else that of runs whose pods' names tell it (docs/alerts.md).",
    ]


def _operator_patch(workspace: Workspace) -> dict[str, object]:
    """What is merged into the Prometheus object: the operator has its own spelling."""
    queue = {"maxSamplesPerSend": 1000, "maxShards": 200, "capacity": 2500}
    url = workspace.remote_write["url"]
    return {"spec": {"remoteWrite": [{"url": url, "sigv4": {"region": workspace.region}, "queueConfig": queue}]}}


def _readme(
    files: dict[str, str], cluster: ClusterFile | None, workspace: Workspace | None, labels: Mapping[str, str]
) -> str:
    where = f"the cluster {cluster.name}" if cluster else "any cluster"
    lines = [
        f"# Observing {where}",
        "",
        "Written by `craton observe render`; written anew, it is the same. Rules: docs/alerts.md of Craton.",
        "",
        "| file | what it is for |",
        "|---|---|",
        "| `prometheus/` | configuration and rules: copy to /etc/prometheus, then `systemctl reload prometheus` |",
        "| `alertmanager/` | who is told: copy to /etc/prometheus/alertmanager.yml |",
        "| `dcgm/craton-counters.csv` | `dcgm-exporter -f`: turns on what the rules and diagnosis need |",
        "| `dcgm/craton-counters-blackwell.csv` | the same for nodes with Blackwell cards (B200, GB200) |",
        "| `grafana/provisioning/` | copy to /etc/grafana/provisioning |",
    ]
    if any(name.startswith("grafana/dashboards/") for name in files):
        lines.append("| `grafana/dashboards/` | copy to /var/lib/grafana/dashboards/craton |")
    else:
        lines += ["", NO_DASHBOARDS]
    if any(name.startswith("kubernetes/") for name in files):
        lines += _operator_lines(labels)
    lines += [
        "",
        "Runs outside Kubernetes say where their metrics are in files; on a machine that sees the runs,",
        "`craton observe up --targets RUNS/.observe/targets` keeps these right for a Prometheus that runs already.",
    ]
    if workspace:
        lines += [
            "",
            f"Amazon Managed Prometheus, workspace {workspace.id} in {workspace.region}: `prometheus.yml` writes to it",
            "with the machine's role (AmazonPrometheusRemoteWriteAccess). Rules may run there instead:",
            "",
            "    aws amp create-rule-groups-namespace --name craton \\",
            f"      --workspace-id {workspace.id} --region {workspace.region} --data fileb://prometheus/rules/craton.yaml",
            "",
            "`kubernetes/prometheus-remote-write.yaml`, where it was written, is merged into the operator's object:",
            "`kubectl -n monitoring patch prometheus NAME --type merge --patch-file`. Amazon Managed Grafana takes the",
            "data source and the dashboards by its API; a provisioned Grafana by its folders.",
        ]
    return "\n".join(lines) + "\n"
