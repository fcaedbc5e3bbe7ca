"""`craton observe render`: every file is what its reader takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from observed import need
from operator_kinds import SPECS, problems_of
from typer.testing import CliRunner

from craton.cli.app import app
from craton.job import ClusterFile, load_cluster
from craton.observability.prometheus import ALERTS, ObserveError, alertmanager_config, dcgm_relabeling, render

CLUSTERS = Path(__file__).parents[3] / "examples/clusters"
WORKSPACE = "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-0123"
NAMES = ("slurm-p5", "eks-p5en", "lab-h100")


def cluster(name: str) -> ClusterFile:
    return load_cluster(CLUSTERS / f"{name}.yaml")


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", [*NAMES, None])
def test_prometheus_and_alertmanager_take_their_files(tmp_path: Path, name: str | None) -> None:
    need("promtool")
    need("amtool")
    files = render(cluster(name) if name else None, webhook="http://127.0.0.1:1/alerts", amp=WORKSPACE)
    config = yaml.safe_load(files["prometheus/prometheus.yml"])
    for job in config["scrape_configs"]:
        # Debian builds promtool without discovery in Kubernetes and would not know the key.
        if job.pop("kubernetes_sd_configs", None):
            job["static_configs"] = [{"targets": ["pod:1"]}]
            job.pop("authorization", None)  # a file that only pods have
    files["prometheus/prometheus.yml"] = yaml.safe_dump(config)
    folder = written(tmp_path, files)
    for command in (
        ["promtool", "check", "config", str(folder / "prometheus/prometheus.yml")],
        ["amtool", "check-config", str(folder / "alertmanager/alertmanager.yml")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["eks-p5en", None])
def test_the_operator_takes_its_objects(name: str | None) -> None:
    files = {
        file: yaml.safe_load(text)
        for file, text in render(cluster(name) if name else None).items()
        if file.startswith("kubernetes/")
    }
    assert {manifest["kind"] for manifest in files.values()} == set(SPECS)
    for file, manifest in files.items():
        problems = problems_of(manifest)
        assert not problems, f"{file}: {problems}"
        for part in (manifest, manifest["metadata"], manifest["spec"]):
            part["unknown"] = True
            assert problems_of(manifest)
            del part["unknown"]


def test_a_slurm_cluster_gets_slurms_own_metrics_and_no_kubernetes_objects() -> None:
    files = render(cluster("slurm-p5"))
    config = yaml.safe_load(files["prometheus/prometheus.yml"])
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert not any(name.startswith("kubernetes/") for name in files)
    assert jobs["slurm-nodes"]["metrics_path"] == "/metrics/nodes"
    assert jobs["craton"]["file_sd_configs"][0]["files"] == ["/fsx/runs/.observe/targets/craton.json"]
    assert jobs["dcgm"]["file_sd_configs"][0]["files"] == ["/fsx/prometheus/*.json"]  # as provisioned nodes write it
    assert config["global"]["external_labels"] == {"cluster": "slurm-p5"}


def test_a_kubernetes_cluster_gets_its_gang_scheduler() -> None:
    files = render(cluster("eks-p5en"))
    jobs = {job["job_name"]: job for job in yaml.safe_load(files["prometheus/prometheus.yml"])["scrape_configs"]}
    assert jobs["kueue"]["kubernetes_sd_configs"][0]["namespaces"] == {"names": ["kueue-system"]}
    assert "kubernetes/servicemonitor-kueue.yaml" in files
    assert not any(name.startswith("slurm") for name in jobs)


def test_pods_that_ended_are_no_targets() -> None:
    jobs = yaml.safe_load(render(cluster("eks-p5en"))["prometheus/prometheus.yml"])["scrape_configs"]
    of_pods = [job for job in jobs if "kubernetes_sd_configs" in job]
    assert {job["job_name"] for job in of_pods} == {"craton", "craton-serve", "craton-node", "node", "dcgm", "kueue"}
    for job in of_pods:
        (rule,) = (rule for rule in job["relabel_configs"] if rule.get("action") == "drop")
        assert rule["source_labels"] == ["__meta_kubernetes_pod_phase"]
        for phase, is_dropped in (("Succeeded", True), ("Failed", True), ("Running", False), ("Pending", False)):
            assert bool(re.fullmatch(rule["regex"], phase)) == is_dropped, job["job_name"]


def test_a_webhook_in_a_rendered_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "alertmanager/alertmanager.yml"
    path.parent.mkdir()
    path.write_text("there before, for all to read")
    path.chmod(0o644)
    CliRunner().invoke(app, ["observe", "render", f"--out={tmp_path}", "--webhook=https://example.com/secret"])
    assert "secret" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_expected_gpus_are_those_of_the_instance() -> None:
    for name in NAMES:
        groups = yaml.safe_load(render(cluster(name))["prometheus/rules/craton.yaml"])["groups"]
        (rule,) = (
            rule for group in groups for rule in group["rules"] if rule.get("record") == "craton:node_gpus_expected"
        )
        assert rule["expr"].endswith("+ 8"), name
    groups = yaml.safe_load(render()["prometheus/rules/craton.yaml"])["groups"]
    (rule,) = (rule for group in groups for rule in group["rules"] if rule.get("record") == "craton:node_gpus_expected")
    assert "max_over_time" in rule["expr"]


def test_managed_prometheus_and_grafana() -> None:
    files = render(cluster("eks-p5en"), amp=f"{WORKSPACE}/api/v1/remote_write")
    (remote,) = yaml.safe_load(files["prometheus/prometheus.yml"])["remote_write"]
    assert remote["url"] == f"{WORKSPACE}/api/v1/remote_write"
    assert remote["sigv4"] == {"region": "us-east-2"}
    (source,) = yaml.safe_load(files["grafana/provisioning/datasources/craton.yaml"])["datasources"]
    assert source["jsonData"]["sigV4Region"] == "us-east-2"
    patch = yaml.safe_load(files["kubernetes/prometheus-remote-write.yaml"])
    assert patch["spec"]["remoteWrite"][0]["sigv4"] == {"region": "us-east-2"}
    assert "ws-0123" in files["README.md"]
    with pytest.raises(ObserveError, match="aps-workspaces"):
        render(amp="https://example.com/prometheus")


def test_without_a_workspace_nothing_leaves_the_cluster() -> None:
    files = render(cluster("eks-p5en"))
    assert "remote_write" not in yaml.safe_load(files["prometheus/prometheus.yml"])
    assert not any("remote" in name for name in files)


def test_counters_of_dcgm_hold_what_the_rules_read() -> None:
    fields = {line.partition(",")[0] for line in render()["dcgm/craton-counters.csv"].splitlines()}
    for alert in ALERTS:
        for field in ("ECC_DBE_VOL_TOTAL", "ROW_REMAP_PENDING", "THERMAL_VIOLATION"):
            if f"DCGM_FI_DEV_{field}" in alert.expr:
                assert f"DCGM_FI_DEV_{field}" in fields
    assert "DCGM_EXP_XID_ERRORS_COUNT" in fields


def test_a_rendering_is_the_same_each_time() -> None:
    assert render(cluster("slurm-p5")) == render(cluster("slurm-p5"))


def test_who_is_told() -> None:
    assert alertmanager_config()["route"]["receiver"] == "nobody"
    told = alertmanager_config("https://example.com/hook")
    assert told["receivers"][1]["webhook_configs"][0]["url"] == "https://example.com/hook"
    silent = [route for route in told["route"]["routes"] if route["matchers"] == ['severity="info"']]
    assert silent[0]["receiver"] == "nobody"
    with pytest.raises(ObserveError, match="--webhook"):
        alertmanager_config("example.com")
    assert told["route"]["group_by"] == ["alertname", "run", "leaf"], "a leaf's failure is told once, not by each node"
    holding = [
        rule["source_matchers"]
        for rule in told["inhibit_rules"]
        if any("RunHung" in m for m in rule["target_matchers"])
    ]
    assert holding == [['alertname="RunLost"']], "a node that is down holds back no hang of those that went on"
    names = {alert.name for alert in ALERTS}
    for rule in told["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            pattern = matcher.partition('"')[2].rstrip('"')
            plain = [word for word in pattern.replace("(", "|").split("|") if word.isalpha() and word in names]
            assert plain or "GpuXid" in pattern, f"{matcher} names no alert"


def test_routes_by_amtool(tmp_path: Path) -> None:
    """Alertmanager's own word for where an alert goes."""
    need("amtool")
    path = tmp_path / "alertmanager.yml"
    path.write_text(yaml.safe_dump(alertmanager_config("http://127.0.0.1:1/")))
    for severity, receiver in (("page", "webhook"), ("ticket", "webhook"), ("info", "nobody")):
        amtool = str(shutil.which("amtool"))
        done = subprocess.run(
            [amtool, "config", "routes", "test", f"--config.file={path}", f"severity={severity}", "alertname=A"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == receiver, done.stdout + done.stderr


def test_a_run_with_odd_letters_is_matched_as_it_is() -> None:
    rules = dcgm_relabeling({"812_3": "llama.v2", "9": "b"})
    assert [(rule["regex"], rule["replacement"]) for rule in rules if rule.get("source_labels") == ["hpc_job"]] == [
        ("812_3", "llama.v2"),
        ("9", "b"),
    ]
