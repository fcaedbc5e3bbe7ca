"""`craton observe render`: files for a Prometheus, Alertmanager and Grafana that somebody else runs.

Pure: the same cluster file gives the same texts, but for where runs are when it does not say that: then $CRATON_RUNS of
this machine does. What the files are for, and how they are put in place, stands in the README.md among them.
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

NO_DASHBOARDS = "No dashboards are among these: they need the extra `observe`."
NO_EXPORTER = (
    "No DaemonSet of the exporter is among these: it runs in the image that a cluster file names as scheduler.image, "
    "with craton[observe] in it."
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
    """File → text. `amp` is the endpoint of a workspace of Amazon Managed Prometheus; `labels` are for the objects of
    the Prometheus operator; `runbooks` is the URL of the folder of runbooks; `dashboards` makes the files of Grafana's
    dashboards, with links to these runbooks."""
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
    """Whether nothing on Kubernetes starts what a monitor of these files looks for."""
    return any(name.startswith("kubernetes/") for name in files) and f"kubernetes/{DAEMON_SET}" not in files


def _jobs(cluster: ClusterFile | None, runs: Path) -> list[Job]:
    """Runs and our exporter by the files that `craton observe up --targets` keeps, other exporters by the cluster's own
    means."""
    if cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == "kubernetes":
        return kubernetes_jobs(cluster.scheduler.gang, leaf_label=leaf_label(cluster))
    jobs = file_jobs(str(runs / FOLDER / "targets"))
    if cluster is None or cluster.scheduler is None or cluster.scheduler.kind != "slurm":
        return jobs
    shared = cluster.storage.shared.path if cluster.storage.shared else None
    exporters = shared_file_jobs(f"{shared.rstrip('/')}/prometheus") if shared else []
    told_by_nodes = {job["job_name"] for job in exporters}
    return [*(job for job in jobs if job["job_name"] not in told_by_nodes), *exporters, *slurm_jobs()]


def _operator_patch(workspace: Workspace) -> dict[str, object]:
    """What is merged into the Prometheus object: the operator has its own spelling."""
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
        lines += _daemons_lines(cluster) if f"kubernetes/{DAEMON_SET}" in files else ["", NO_EXPORTER]
    if f"systemd/{UNIT}" in files:  # not on Kubernetes, where everything is found by pods
        lines += [*_unit_lines(), *_targets_lines(cluster, runs)]
    if cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == "slurm":
        lines += [
            "",
            f"Slurm's own metrics are asked for at localhost:{SLURM_PORT}: Prometheus is on the machine of slurmctld,",
            "or `prometheus.yml` gets that machine's name instead.",
        ]
    if workspace:
        lines += _workspace_lines(workspace, OPERATOR_PATCH in files)
    return "\n".join(lines) + "\n"


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


def _daemons_lines(cluster: ClusterFile | None) -> list[str]:
    image = cluster.scheduler.image if cluster and cluster.scheduler else ""
    return [
        "",
        f"`kubernetes/{DAEMON_SET}` starts our exporter on every node with GPUs, in {image},",
        "which must have `craton[observe]` in it. It has the node's root to read, no token, and takes no card, but it",
        "is privileged, for only so may a container read /dev/kmsg and ask drives: its namespace must allow that.",
        "Where NVIDIA's is not the default runtime of containers, add `runtimeClassName: nvidia`. Beside dcgm-exporter",
        "and node_exporter it adds runs, ranks, XIDs and EFA. It leaves out what a node_exporter on its node serves;",
        "what dcgm-exporter serves is there twice, under two jobs. Without the operator, `kubectl apply` this file",
        "alone.",
    ]


def _unit_lines() -> list[str]:
    return [
        "",
        f"`systemd/{UNIT}` starts our exporter on a node, by its image or its set-up script:",
        "",
        f"    cp {UNIT} /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now {UNIT}",
        "",
        f"Craton is looked for at {PROGRAM}, where provisioned nodes have it; GPUs need `craton[observe]`",
        f"there. It listens on all addresses, without a password: let no other network reach port {PORT}. Beside",
        "dcgm-exporter and node_exporter it adds runs, ranks, XIDs and EFA. It leaves out what a node_exporter on its",
        "node serves; what dcgm-exporter serves is there twice, under two jobs.",
    ]


def _targets_lines(cluster: ClusterFile | None, runs: Path) -> list[str]:
    """The command that keeps the files which `_jobs` reads; it must look where these look."""
    named = "--cluster CLUSTER " if cluster else ""
    stated = "" if ObserverSettings(cluster=cluster).cluster_runs else f"CRATON_RUNS={quote(str(runs))} "
    hint = " CLUSTER is the cluster file that this was rendered of." if cluster else ""
    return [
        "",
        "Runs, and our exporter on their nodes and on those of Slurm, stand in files, which one command keeps right.",
        "Have it run always, as a service, on a machine that sees the runs and, on Slurm, has `sinfo`:",
        "",
        f"    {stated}craton observe up {named}--targets {quote(str(runs / FOLDER / 'targets'))}",
        "",
        f"Prometheus must see that folder as well.{hint}",
    ]


def _workspace_lines(workspace: Workspace, has_patch: bool) -> list[str]:
    place = f"--workspace-id {workspace.id} --region {workspace.region}"
    lines = [
        "",
        f"Amazon Managed Prometheus, workspace {workspace.id} in {workspace.region}: `prometheus.yml` writes to it",
        "with the machine's role (AmazonPrometheusRemoteWriteAccess).",
    ]
    if has_patch:
        lines += [
            "",
            "The operator's Prometheus is told to by a patch, which replaces a list as a whole: where",
            "`kubectl -n monitoring get prometheus NAME -o jsonpath={.spec.remoteWrite}` shows another entry, put that",
            "into the patch as well.",
            "",
            f"    kubectl -n monitoring patch prometheus NAME --type merge --patch-file {OPERATOR_PATCH}",
        ]
    return [
        *lines,
        "",
        "Rules may run there instead:",
        "",
        "    aws amp create-rule-groups-namespace --name craton \\",
        f"      {place} --data fileb://prometheus/rules/craton.yaml",
        "",
        "Then its own alert manager tells, and until it has a definition it tells nobody. `alertmanager/` is none: a",
        "definition holds the configuration as a text under `alertmanager_config`, and knows SNS and PagerDuty but no",
        "webhook. With the ARN of a topic that aps.amazonaws.com may publish to, in a file amp.yaml:",
        "",
        "    alertmanager_config: |",
        "      route: {receiver: sns, group_by: [alertname, run, leaf]}",
        "      receivers:",
        "        - name: sns",
        f"          sns_configs: [{{topic_arn: ARN, sigv4: {{region: {workspace.region}}}}}]",
        "",
        f"    aws amp create-alert-manager-definition {place} --data fileb://amp.yaml",
        "",
        "The data source is of a plugin that Grafana does not come with: `grafana cli plugins install",
        f"{SIGNING_PLUGIN}`, and a role with AmazonPrometheusQueryAccess. Amazon Managed Grafana takes no",
        "provisioning: make the data source there, with its workspace IAM role (by its API `sigV4AuthType:",
        "workspace-iam-role`) and the uid of the file here, and import the dashboards.",
    ]
