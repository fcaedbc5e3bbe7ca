"""Prometheus' configuration: scrape jobs, relabeling to run, node and leaf, rule files and Alertmanager.

Agents and Craton's exporter set run, node, leaf and rank themselves, so their labels win (honor_labels). dcgm-exporter
sets Hostname, on Slurm a job ID (hpc_job) and on Kubernetes the pod, optionally with its labels; relabeling derives
node and run from these. Only an exporter that sees processes knows ranks: ours does, dcgm-exporter does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from craton.infrastructure.aws import EXPORTERS as EXPORTER_PORTS
from craton.infrastructure.aws import SLURM_PAGES
from craton.observability.prometheus.targets import AGENTS, EXPORTERS, FOUND_JOBS, SERVERS

Job = dict[str, Any]
HONORED = (AGENTS, "craton-node")
OWN_JOB = "prometheus"
SLURM_PORT = 6817
KUEUE, KUEUE_NAMESPACE = "kueue", "kueue-system"  # the only gang scheduler whose metrics the rules read
# Pods of a run: NAME-node-0-3-x7k2p of a JobSet, NAME-node-3 of a Volcano Job. Names of pods of an Indexed Job or a
# LeaderWorkerSet are not specific to Craton and do not match.
POD_OF_RUN = r"(.+?)-node-(?:0-)?\d+(?:-[a-z0-9]{5})?"
MANAGED_BY = "__meta_kubernetes_pod_label_app_kubernetes_io_managed_by"
RUN = "__meta_kubernetes_pod_label_craton_run"  # the run's name; object names are derived from it
POD_NAME = "__meta_kubernetes_pod_label_app_kubernetes_io_name"
# A finished pod stays listed with its old address and would show as a node that is down. The operator drops such pods
# for its monitors by itself.
ENDED_PODS_DROPPED = {
    "source_labels": ["__meta_kubernetes_pod_phase"],
    "regex": "Succeeded|Failed",
    "action": "drop",
}


def prometheus_config(
    jobs: Iterable[Job],
    *,
    scrape_every: str = "15s",
    rule_files: Iterable[str] = ("rules/*.yaml",),
    alertmanager: str | None = None,
    external_labels: Mapping[str, str] | None = None,
    remote_write: Iterable[Job] = (),
) -> dict[str, Any]:
    """Return the whole configuration."""
    document: dict[str, Any] = {
        "global": {
            "scrape_interval": scrape_every,
            "evaluation_interval": scrape_every,
            **({"external_labels": dict(external_labels)} if external_labels else {}),
        },
        "rule_files": list(rule_files),
        "scrape_configs": list(jobs),
    }
    if alertmanager:
        document["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    if remote := list(remote_write):
        document["remote_write"] = remote
    return document


def own_job(address: str) -> Job:
    """Return the job that scrapes Prometheus itself, for failures of its rule evaluation."""
    return {"job_name": OWN_JOB, "static_configs": [{"targets": [address]}]}


def file_jobs(folder: str, runs_of_jobs: Mapping[str, str] | None = None) -> list[Job]:
    """Return the jobs with targets in FOLDER/JOB.json, which `observe up` writes. `runs_of_jobs`: Slurm job → run."""
    return [
        {
            "job_name": job,
            **({"honor_labels": True} if job in HONORED else {}),
            "file_sd_configs": [{"files": [f"{folder}/{job}.json"], "refresh_interval": "10s"}],
            **({"metric_relabel_configs": dcgm_relabeling(runs_of_jobs)} if job == "dcgm" else {}),
        }
        for job in FOUND_JOBS
    ]


def shared_file_jobs(folder: str) -> list[Job]:
    """Return jobs for the exporters of a provisioned Slurm cluster: every node writes its addresses into a file of this
    folder. Craton's exporter is not among them: it is not part of the node setup."""
    return [
        {
            "job_name": job,
            "file_sd_configs": [{"files": [f"{folder}/*.json"], "refresh_interval": "1m"}],
            "relabel_configs": [
                {"source_labels": ["__address__"], "regex": f".*:{port}", "action": "keep"},
                {"source_labels": ["node", "__address__"], "regex": r";(.+):\d+", "target_label": "node"},
            ],
            **({"metric_relabel_configs": dcgm_relabeling(None)} if job == "dcgm" else {}),
        }
        for job, port in EXPORTER_PORTS.items()
    ]


def slurm_jobs(address: str = f"localhost:{SLURM_PORT}") -> list[Job]:
    """Return jobs for Slurm's own metrics, one per page."""
    return [
        {
            "job_name": f"slurm-{page}",
            "metrics_path": f"/metrics/{page}",
            "static_configs": [{"targets": [address]}],
        }
        for page in SLURM_PAGES
    ]


def kubernetes_jobs(
    gang: str = "none",
    kubeconfig: str | None = None,
    leaf_label: str = "",
    in_files: Mapping[str, Collection[str]] | None = None,
) -> list[Job]:
    """Return jobs that discover pods: runs, servers, exporters and, when it is the gang scheduler, Kueue's controller.
    `leaf_label` is the node label with the leaf switch; Prometheus' account must be allowed to list nodes. `in_files`:
    job → addresses that are scraped through target files, and so not again as pods."""
    names_in_files = in_files or {}
    access: Job = {"kubeconfig_file": kubeconfig} if kubeconfig else {}
    place: list[Job] = [{"source_labels": ["__meta_kubernetes_pod_node_name"], "target_label": "node"}]
    if leaf_label:
        access["attach_metadata"] = {"node": True}
        place.append({"source_labels": [node_meta(leaf_label)], "target_label": "leaf"})

    def pods(name: str, relabel: list[Job], **more: Any) -> Job:
        discovery = {"role": "pod", **access, **more.pop("discovery", {})}
        kept = [ENDED_PODS_DROPPED, *_in_files_dropped(names_in_files.get(name, ())), *relabel]
        return {"job_name": name, **more, "kubernetes_sd_configs": [discovery], "relabel_configs": kept}

    ours = [_keep(MANAGED_BY, "craton"), {"source_labels": [RUN], "target_label": "run"}, *place]
    jobs = [
        pods(AGENTS, [*ours, _keep("__meta_kubernetes_pod_container_port_name", "metrics")], honor_labels=True),
        pods(
            SERVERS,
            [
                *ours,
                _keep("__meta_kubernetes_pod_label_app_kubernetes_io_component", "serve"),
                _keep("__meta_kubernetes_pod_container_port_name", "http"),
            ],
        ),
        pods("craton-node", [_keep(POD_NAME, "craton-exporter"), *place], honor_labels=True),
        pods("node", [_keep(POD_NAME, "prometheus-node-exporter|node-exporter"), *place]),
        pods(
            "dcgm",
            [
                _keep("__meta_kubernetes_pod_container_port_number", str(EXPORTERS["dcgm"])),
                _keep("__meta_kubernetes_pod_name", ".*dcgm-exporter.*"),
                *place,
            ],
            metric_relabel_configs=dcgm_relabeling(None),
        ),
    ]
    if gang == KUEUE:
        jobs.append(
            pods(
                KUEUE,
                [_keep("__meta_kubernetes_pod_container_port_name", "metrics|https")],
                discovery={"namespaces": {"names": [KUEUE_NAMESPACE]}},
                scheme="https",
                authorization={"credentials_file": "/var/run/secrets/kubernetes.io/serviceaccount/token"},
                tls_config={"insecure_skip_verify": True},
            )
        )
    return jobs


def dcgm_relabeling(runs_of_jobs: Mapping[str, str] | None) -> list[Job]:
    """Return relabeling for dcgm-exporter: node from Hostname where the target has none; run from the pod's label, else
    from its name, or from Slurm's job ID. The pod label needs dcgm-exporter --kubernetes-enable-pod-labels."""
    rules: list[Job] = [
        {"source_labels": ["node", "Hostname"], "regex": ";(.+)", "target_label": "node"},
        {"source_labels": ["run", "craton_run"], "regex": ";(.+)", "target_label": "run"},
        {"source_labels": ["run", "pod"], "regex": f";{POD_OF_RUN}", "target_label": "run"},
    ]
    rules += [
        {"source_labels": ["hpc_job"], "regex": re.escape(job), "target_label": "run", "replacement": run}
        for job, run in sorted((runs_of_jobs or {}).items())
    ]
    return rules


def node_meta(label: str) -> str:
    """Return the meta label under which Kubernetes discovery exposes a node label."""
    return f"__meta_kubernetes_node_label_{re.sub('[^a-zA-Z0-9_]', '_', label)}"


def _in_files_dropped(addresses: Collection[str]) -> list[Job]:
    if not addresses:
        return []
    return [
        {
            "source_labels": ["__address__"],
            "regex": "|".join(re.escape(address) for address in sorted(addresses)),
            "action": "drop",
        }
    ]


def _keep(label: str, regex: str) -> Job:
    return {"source_labels": [label], "regex": regex, "action": "keep"}
