"""`craton observe render`: files for an existing Prometheus, Alertmanager and Grafana.

Pure: the same cluster file gives the same texts, except for the folder of runs: when the cluster file does not name it,
$CRATON_RUNS of this machine does. The rendered README.md says what each file is for and how to install it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote

from craton.job.cluster import ClusterFile
from craton.observability.exporter import dcgm_counters
from craton.observability.prometheus.alertmanager import alertmanager_config
from craton.observability.prometheus.exporter_service import (
    DAEMON_SET,
    PORT,
    PROGRAM,
    UNIT,
    exporter_daemons,
    exporter_unit,
)
from craton.observability.prometheus.kubernetes import MonitoredCluster, operator_objects
from craton.observability.prometheus.observer import FOLDER, ObserverSettings, gpus_per_node, leaf_label
from craton.observability.prometheus.remote import (
    SIGNING_PLUGIN,
    Workspace,
    dashboard_provider,
    data_sources,
    workspace_of,
)
from craton.observability.prometheus.rules import checked_runbooks, efa_per_node, rule_groups
from craton.observability.prometheus.scrape import (
    SLURM_PORT,
    Job,
    file_jobs,
    kubernetes_jobs,
    own_job,
    prometheus_config,
    shared_file_jobs,
    slurm_jobs,
)
from craton.yaml_text import to_yaml

NO_DASHBOARDS = "No dashboards were rendered: they need the extra `observe`."
NO_EXPORTER = (
    "No DaemonSet for the exporter was rendered: set scheduler.image in the cluster file to an image that contains "
    "craton[observe]."
)
OPERATOR_PATCH = "amp/prometheus-remote-write.yaml"
PROMETHEUS_URL, ALERTMANAGER_URL = "http://localhost:9090", "http://localhost:9093"


def render(
    cluster: ClusterFile | None = None,
    webhook: str | None = None,
    amp: str | None = None,
    labels: Mapping[str, str] | None = None,
    runbooks: str | None = None,
    dashboards: Callable[[str | None], Mapping[str, str]] = lambda _: {},
) -> dict[str, str]:
    """Return file name → text. `amp` is the endpoint of an Amazon Managed Prometheus workspace; `labels` are set on the
    objects of the Prometheus operator; `runbooks` is the URL of the runbook folder; `dashboards` returns the Grafana
    dashboard files, with links to these runbooks."""
    workspace = workspace_of(amp) if amp else None
    settings = ObserverSettings(cluster=cluster)
    runs = settings.root.absolute()
    groups = rule_groups(gpus_per_node(cluster), efa_per_node=efa_per_node(cluster), runbooks=runbooks)
    on_kubernetes = cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == "kubernetes"
    config = prometheus_config(
        [own_job(PROMETHEUS_URL.removeprefix("http://")), *_jobs(cluster, runs)],
        alertmanager=ALERTMANAGER_URL.removeprefix("http://"),
        external_labels={"cluster": cluster.name} if cluster else None,
        remote_write=[workspace.remote_write] if workspace else [],
    )
    files = {
        "prometheus/prometheus.yml": to_yaml(config),
        "prometheus/rules/craton.yaml": to_yaml({"groups": groups}),
        "alertmanager/alertmanager.yml": to_yaml(alertmanager_config(webhook)),
        "dcgm/craton-counters.csv": dcgm_counters(),
        "dcgm/craton-counters-blackwell.csv": dcgm_counters(blackwell=True),
        "grafana/provisioning/datasources/craton.yaml": to_yaml(
            data_sources(PROMETHEUS_URL, ALERTMANAGER_URL, workspace)
        ),
        "grafana/provisioning/dashboards/craton.yaml": to_yaml(dashboard_provider()),
        **dashboards(checked_runbooks(runbooks)),
    }
    if cluster is None or on_kubernetes:
        gang = cluster.scheduler.gang if cluster and cluster.scheduler else "kueue"
        name = cluster.name if cluster else "craton"
        monitored = MonitoredCluster(name, gang, leaf_label(cluster), labels or {})
        objects = operator_objects(monitored, groups)
        if cluster and (daemons := exporter_daemons(cluster, monitored, settings.cluster_runs)):
            objects[DAEMON_SET] = daemons
        files |= {f"kubernetes/{name}": to_yaml(manifest) for name, manifest in objects.items()}
        if workspace:
            files[OPERATOR_PATCH] = to_yaml(_operator_patch(workspace))
    if not on_kubernetes:
        in_store = cluster is not None and cluster.runs and not settings.cluster_runs
        files[f"systemd/{UNIT}"] = exporter_unit("" if in_store else str(runs))
    files["README.md"] = _readme(files, cluster, workspace, labels or {}, runs)
    return files


def lacks_exporter(files: Mapping[str, str]) -> bool:
    """Return whether the files have Kubernetes monitors but no DaemonSet that starts Craton's exporter."""
    return any(name.startswith("kubernetes/") for name in files) and f"kubernetes/{DAEMON_SET}" not in files


def _jobs(cluster: ClusterFile | None, runs: Path) -> list[Job]:
    """Return jobs that find runs and Craton's exporter by the files of `craton observe up --targets`, and other
    exporters by the cluster's own service discovery."""
    if cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == "kubernetes":
        return kubernetes_jobs(cluster.scheduler.gang, leaf_label=leaf_label(cluster))
    jobs = file_jobs(str(runs / FOLDER / "targets"))
    if cluster is None or cluster.scheduler is None or cluster.scheduler.kind != "slurm":
        return jobs
    shared = cluster.storage.shared.path if cluster.storage.shared else None
    exporters = shared_file_jobs(f"{shared.rstrip('/')}/prometheus") if shared else []
    written_by_nodes = {job["job_name"] for job in exporters}
    return [*(job for job in jobs if job["job_name"] not in written_by_nodes), *exporters, *slurm_jobs()]


def _operator_patch(workspace: Workspace) -> dict[str, object]:
    """Return the merge patch for the operator's Prometheus object, with the operator's key names."""
    queue = {"maxSamplesPerSend": 1000, "maxShards": 200, "capacity": 2500}
    url = workspace.remote_write["url"]
    return {"spec": {"remoteWrite": [{"url": url, "sigv4": {"region": workspace.region}, "queueConfig": queue}]}}


def _readme(
    files: Mapping[str, str],
    cluster: ClusterFile | None,
    workspace: Workspace | None,
    labels: Mapping[str, str],
    runs: Path,
) -> str:
    where = f"the cluster {cluster.name}" if cluster else "any cluster"
    lines = [
        f"# Observing {where}",
        "",
        "Written by `craton observe render`; rendering again gives the same files. Rules: Craton's docs/alerts.md.",
        "",
        "| file | purpose |",
        "|---|---|",
        "| `prometheus/` | configuration and rules: copy to /etc/prometheus, then `systemctl reload prometheus` |",
        "| `alertmanager/` | routes and receivers: copy to /etc/prometheus/alertmanager.yml |",
        "| `dcgm/craton-counters.csv` | for `dcgm-exporter -f`: enables the counters that rules and diagnosis need |",
        "| `dcgm/craton-counters-blackwell.csv` | the same for nodes with Blackwell GPUs (B200, GB200) |",
        "| `grafana/provisioning/` | copy to /etc/grafana/provisioning |",
    ]
    if any(name.startswith("grafana/dashboards/") for name in files):
        lines.append("| `grafana/dashboards/` | copy to /var/lib/grafana/dashboards/craton |")
    else:
        lines += ["", NO_DASHBOARDS]
    if any(name.startswith("kubernetes/") for name in files):
        lines += _operator_lines(labels)
        lines += _daemons_lines(cluster) if f"kubernetes/{DAEMON_SET}" in files else ["", NO_EXPORTER]
    if f"systemd/{UNIT}" in files:  # not on Kubernetes, where everything is found by pods
        lines += [*_unit_lines(), *_targets_lines(cluster, runs)]
    if cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == "slurm":
        lines += [
            "",
            f"Slurm's own metrics are scraped at localhost:{SLURM_PORT}. Run Prometheus on the machine of slurmctld,",
            "or put that machine's name into `prometheus.yml`.",
        ]
    if workspace:
        lines += _workspace_lines(workspace, OPERATOR_PATCH in files)
    return "\n".join(lines) + "\n"


def _operator_lines(labels: Mapping[str, str]) -> list[str]:
    stated = ", ".join(f"`{key}: {value}`" for key, value in labels.items())
    has = f"These objects have {stated}." if stated else "These objects lack it: render with `--label release=NAME`."
    return [
        "",
        "With the Prometheus operator, run `kubectl apply -f kubernetes/` instead of copying `prometheus/`. Prometheus",
        "uses only objects that match its selectors: kube-prometheus-stack selects the label `release: NAME`, where",
        f"NAME is its Helm release. {has}",
        "Scrape each node_exporter once: if kube-prometheus-stack scrapes it too, set",
        "`prometheus-node-exporter.prometheus.monitor.enabled=false` there. The label `leaf` comes from node labels:",
        "Prometheus' service account must be allowed to list and watch nodes. dcgm-exporter knows the run of every GPU",
        "when it runs with `--kubernetes-enable-pod-labels`; otherwise only of runs whose pod names contain it",
        "(docs/alerts.md).",
    ]


def _daemons_lines(cluster: ClusterFile | None) -> list[str]:
    image = cluster.scheduler.image if cluster and cluster.scheduler else ""
    return [
        "",
        f"`kubernetes/{DAEMON_SET}` starts Craton's exporter on every GPU node, in the image {image},",
        "which must contain `craton[observe]`. It mounts the node's root read-only, has no token and requests no GPU,",
        "but it is privileged: only then can a container read /dev/kmsg and SMART logs. Its namespace must allow that.",
        "If the NVIDIA runtime is not the default container runtime, add `runtimeClassName: nvidia`. Next to",
        "dcgm-exporter and node_exporter it adds runs, ranks, XIDs and EFA. It omits metrics that a node_exporter on",
        "its node exports; metrics of dcgm-exporter exist twice, under two jobs. Without the operator, `kubectl apply`",
        "only this file.",
    ]


def _unit_lines() -> list[str]:
    return [
        "",
        f"`systemd/{UNIT}` starts Craton's exporter on a node. Add it to the node image or setup script:",
        "",
        f"    cp {UNIT} /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now {UNIT}",
        "",
        f"It expects Craton at {PROGRAM}, where provisioned nodes have it; GPU metrics need `craton[observe]`",
        f"there. It listens on all addresses without a password: block port {PORT} from other networks. Next to",
        "dcgm-exporter and node_exporter it adds runs, ranks, XIDs and EFA. It omits metrics that a node_exporter on",
        "its node exports; metrics of dcgm-exporter exist twice, under two jobs.",
    ]


def _targets_lines(cluster: ClusterFile | None, runs: Path) -> list[str]:
    """Describe the command that writes the target files which `_jobs` configures."""
    named = "--cluster CLUSTER " if cluster else ""
    stated = "" if ObserverSettings(cluster=cluster).cluster_runs else f"CRATON_RUNS={quote(str(runs))} "
    hint = " CLUSTER is the cluster file that these files were rendered from." if cluster else ""
    return [
        "",
        "Prometheus finds runs, and Craton's exporter on their nodes and on Slurm nodes, by target files. One command",
        "keeps these up to date. Run it as a service on a machine that can read the runs and, on Slurm, has `sinfo`:",
        "",
        f"    {stated}craton observe up {named}--targets {quote(str(runs / FOLDER / 'targets'))}",
        "",
        f"Prometheus must be able to read that folder.{hint}",
    ]


def _workspace_lines(workspace: Workspace, has_patch: bool) -> list[str]:
    place = f"--workspace-id {workspace.id} --region {workspace.region}"
    lines = [
        "",
        f"Amazon Managed Prometheus, workspace {workspace.id} in {workspace.region}: `prometheus.yml` has remote write",
        "to it, signed with the machine's IAM role (AmazonPrometheusRemoteWriteAccess).",
    ]
    if has_patch:
        lines += [
            "",
            "For the operator's Prometheus, apply a patch, which replaces the whole list of remote writes: if",
            "`kubectl -n monitoring get prometheus NAME -o jsonpath={.spec.remoteWrite}` shows other entries, add them",
            "to the patch first.",
            "",
            f"    kubectl -n monitoring patch prometheus NAME --type merge --patch-file {OPERATOR_PATCH}",
        ]
    return [
        *lines,
        "",
        "To evaluate the rules there instead:",
        "",
        "    aws amp create-rule-groups-namespace --name craton \\",
        f"      {place} --data fileb://prometheus/rules/craton.yaml",
        "",
        "Notifications then come from the workspace's own alert manager, which sends none until it has a definition.",
        "`alertmanager/` does not work there: a definition has the configuration as text under `alertmanager_config`,",
        "and supports SNS and PagerDuty but no webhook. In a file amp.yaml, with the ARN of a topic that",
        "aps.amazonaws.com may publish to:",
        "",
        "    alertmanager_config: |",
        "      route: {receiver: sns, group_by: [alertname, run, leaf]}",
        "      receivers:",
        "        - name: sns",
        f"          sns_configs: [{{topic_arn: ARN, sigv4: {{region: {workspace.region}}}}}]",
        "",
        f"    aws amp create-alert-manager-definition {place} --data fileb://amp.yaml",
        "",
        "The data source needs a plugin that Grafana does not bundle: `grafana cli plugins install",
        f"{SIGNING_PLUGIN}`, and a role with AmazonPrometheusQueryAccess. Amazon Managed Grafana does",
        "not read provisioning files: create the data source there, with its workspace IAM role (in its API",
        "`sigV4AuthType: workspace-iam-role`) and the uid from the file here, and import the dashboards.",
    ]
