"""Prometheus' scrape configuration of a cluster: exporters of its nodes, its scheduler's own metrics, Craton's runs."""

from __future__ import annotations

from typing import Any

from craton.infrastructure.aws.scripts import EXPORTERS
from craton.infrastructure.aws.site import SLURM_TARGETS, Site
from craton.infrastructure.yaml_text import to_yaml

Job = dict[str, Any]
SLURM_PAGES = ("jobs", "nodes", "partitions", "scheduler")  # of slurmctld, from Slurm 25.11 on
CONTROLLERS = {  # gang scheduler → namespace, job
    "kueue": ("kueue-system", "kueue"),
    "volcano": ("volcano-system", "volcano"),
    "kai": ("kai-scheduler", "kai"),
}


def prometheus_config(site: Site, target: str) -> dict[str, str]:
    slurm = target in SLURM_TARGETS
    jobs = _slurm_jobs(site) if slurm else _kubernetes_jobs(site)
    document = {
        "global": {"scrape_interval": "15s", "external_labels": {"cluster": site.name}},
        "scrape_configs": jobs,
    }
    return {"prometheus.yml": to_yaml(document)}


def _slurm_jobs(site: Site) -> list[Job]:
    """Nodes write where they are into the shared file system; HyperPod's are not seen by EC2's discovery."""
    files = [{"files": [f"{site.lustre.path}/prometheus/*.json"], "refresh_interval": "1m"}]
    jobs: list[Job] = [
        {
            "job_name": name,
            "file_sd_configs": files,
            "relabel_configs": [{"source_labels": ["__address__"], "regex": f".*:{port}", "action": "keep"}],
        }
        for name, port in EXPORTERS.items()
    ]
    jobs += [
        {
            "job_name": f"slurm-{page}",
            "metrics_path": f"/metrics/{page}",
            "static_configs": [{"targets": ["localhost:6817"]}],
        }
        for page in SLURM_PAGES
    ]
    return jobs


def _kubernetes_jobs(site: Site) -> list[Job]:
    jobs = [
        _pods("dcgm", [_keep("__meta_kubernetes_pod_label_app_kubernetes_io_name", "dcgm-exporter")]),
        _pods("node", [_keep("__meta_kubernetes_pod_label_app_kubernetes_io_name", "prometheus-node-exporter")]),
        {
            **_pods(
                "craton",
                [
                    _keep("__meta_kubernetes_pod_label_app_kubernetes_io_managed_by", "craton"),
                    _keep("__meta_kubernetes_pod_container_port_name", "metrics"),
                    {"source_labels": ["__meta_kubernetes_pod_label_craton_run"], "target_label": "run"},
                    {"source_labels": ["__meta_kubernetes_pod_node_name"], "target_label": "node"},
                ],
            ),
            "honor_labels": True,  # agents say themselves which run and node they are of
        },
    ]
    gang = site.file.scheduler.gang if site.file.scheduler else "none"
    if gang in CONTROLLERS:
        namespace, name = CONTROLLERS[gang]
        jobs.append(
            {
                **_pods(name, [_keep("__meta_kubernetes_pod_container_port_name", "metrics|https")]),
                "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [namespace]}}],
            }
        )
    return jobs


def _pods(name: str, relabel: list[Job]) -> Job:
    """Of pods that run: one that ended stays listed, with an address that answers nobody."""
    ended = {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Succeeded|Failed", "action": "drop"}
    return {"job_name": name, "kubernetes_sd_configs": [{"role": "pod"}], "relabel_configs": [ended, *relabel]}


def _keep(label: str, regex: str) -> Job:
    return {"source_labels": [label], "regex": regex, "action": "keep"}
