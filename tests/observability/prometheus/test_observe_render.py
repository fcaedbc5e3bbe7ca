"""`craton observe render`: every file is what its reader takes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml
from observed import need
from operator_kinds import SPECS, problems_of
from typer.testing import CliRunner

from craton.cli.app import app
from craton.errors import CratonError
from craton.job.cluster import ClusterFile, load_cluster
from craton.observability import prometheus
from craton.observability.dashboards import files as dashboards
from craton.observability.prometheus import ALERTS, rendering
from craton.observability.prometheus.alertmanager import alertmanager_config
from craton.observability.prometheus.errors import ObserveError
from craton.observability.prometheus.exporter_service import exporter_unit
from craton.observability.prometheus.rules import rule_groups
from craton.observability.prometheus.scrape import dcgm_relabeling
from craton.orchestration.kubernetes.names import object_name
from craton.orchestration.kubernetes.pods import RUN_ANNOTATION

CLUSTERS = Path(__file__).parents[3] / "examples/clusters"
WORKSPACE = "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-0123"
NAMES = ("slurm-p5", "eks-p5en", "lab-h100")
DAEMONS = "kubernetes/daemonset-craton-exporter.yaml"


def cluster(name: str) -> ClusterFile:
    return load_cluster(CLUSTERS / f"{name}.yaml")


def render(*arguments: Any, **options: Any) -> dict[str, str]:
    return prometheus.render(*arguments, **options, dashboards=dashboards.dashboard_files)


@cache
def plain(name: str | None = None) -> Mapping[str, str]:
    """What is rendered of a cluster file and no options."""
    return render(cluster(name) if name else None)


def objects_of(files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What `kubectl apply -f kubernetes/` is given."""
    return {file: load(text) for file, text in files.items() if file.startswith("kubernetes/")}


def load(text: str) -> Any:
    return yaml.load(text, yaml.CSafeLoader)  # of PyYAML's loaders the fast one


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering without rules and dashboards, which take most of its time."""
    monkeypatch.setattr(rendering, "rule_groups", lambda *_, **__: [])
    monkeypatch.setattr(dashboards, "dashboard_files", lambda _: {})


def scraped(files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Job → how it is scraped."""
    jobs = load(files["prometheus/prometheus.yml"])["scrape_configs"]
    found = {job["job_name"]: job for job in jobs}
    assert len(found) == len(jobs), "Prometheus takes a name once"
    return found


def relabelled(rules: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> dict[str, str] | None:
    """What Prometheus makes of labels; None: the target is dropped."""
    made = dict(labels)
    for rule in rules:
        value = ";".join(made.get(name, "") for name in rule.get("source_labels", []))
        match = re.fullmatch(rule.get("regex", "(.*)"), value)
        action = rule.get("action", "replace")
        if action in ("keep", "drop"):
            if bool(match) != (action == "keep"):
                return None
        elif match:
            made[rule["target_label"]] = rule.get("replacement", match[1] if match.groups() else "")
    return {name: value for name, value in made.items() if value and not name.startswith("__")}


def as_meta(kind: str, name: str) -> str:
    return f"__meta_kubernetes_{kind}_label_{re.sub('[^a-zA-Z0-9_]', '_', name)}"


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
    config = load(files["prometheus/prometheus.yml"])
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
def test_kubernetes_and_the_operator_take_their_objects(name: str | None) -> None:
    files = objects_of(plain(name))
    assert {manifest["kind"] for manifest in files.values()} == {*SPECS, *(["DaemonSet"] if name else [])}
    for file, manifest in files.items():
        problems = problems_of(manifest)
        assert not problems, f"{file}: {problems}"
        for part in (manifest, manifest["metadata"], manifest["spec"]):
            part["unknown"] = True
            assert problems_of(manifest)
            del part["unknown"]


def test_a_slurm_cluster_gets_slurms_own_metrics_and_no_kubernetes_objects() -> None:
    files = plain("slurm-p5")
    config = load(files["prometheus/prometheus.yml"])
    jobs = scraped(files)
    assert not any(name.startswith("kubernetes/") for name in files)
    assert jobs["slurm-nodes"]["metrics_path"] == "/metrics/nodes"
    assert jobs["craton"]["file_sd_configs"][0]["files"] == ["/fsx/runs/.observe/targets/craton.json"]
    assert jobs["dcgm"]["file_sd_configs"][0]["files"] == ["/fsx/prometheus/*.json"]  # as provisioned nodes write it
    assert config["global"]["external_labels"] == {"cluster": "slurm-p5"}
    ours = jobs["craton-node"]
    assert ours["file_sd_configs"][0]["files"] == ["/fsx/runs/.observe/targets/craton-node.json"], "no set-up names it"
    assert ours["honor_labels"]
    assert "relabel_configs" not in ours, "nothing is left out"


def test_every_gpu_node_of_kubernetes_gets_the_exporter_that_its_monitor_looks_for() -> None:
    daemons = objects_of(plain("eks-p5en"))[DAEMONS]
    labels, pod = daemons["spec"]["template"]["metadata"]["labels"], daemons["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    monitor = objects_of(plain("eks-p5en"))["kubernetes/podmonitor-exporter.yaml"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"][0]["port"] in {port["name"] for port in container["ports"]}
    (wanted,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert wanted["matchExpressions"][0]["values"] == ["p5en.48xlarge", "ml.p5en.48xlarge"]
    assert container["image"] == "example.com/craton:1"
    given = node_options(container["args"])
    assert (given["root"], given["runs"], given["port"]) == (Path("/host"), Path("/fsx/runs"), 9500)
    assert daemons["metadata"]["namespace"] == "train", "the claim of the runs is there"
    assert {"name": "runs", "mountPath": "/fsx", "readOnly": True} in container["volumeMounts"]
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}, "it takes no card"


@pytest.mark.usefixtures("light")
def test_where_nodes_have_the_runs_in_their_own_files_the_exporter_reads_them_there() -> None:
    file = cluster("eks-p5en")
    shared = file.storage.model_copy(update={"shared": file.storage.shared.model_copy(update={"claim": None})})  # type: ignore[union-attr]
    own = file.model_copy(update={"storage": shared, "instance": "DGX-H100"})
    daemons = objects_of(render(own))[DAEMONS]
    assert problems_of(daemons) == []
    pod = daemons["spec"]["template"]["spec"]
    assert node_options(pod["containers"][0]["args"])["runs"] == Path("/host/fsx/runs")
    assert daemons["metadata"]["namespace"] == "monitoring"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


@pytest.mark.usefixtures("light")
def test_without_an_image_it_says_that_nothing_starts_the_exporter(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["observe", "render", f"--out={tmp_path}"])
    for said in (done.output, (tmp_path / "README.md").read_text()):
        assert "scheduler.image" in said
    assert "scheduler.image" not in render(cluster("slurm-p5"))["README.md"]


@pytest.mark.parametrize("name", ["slurm-p5", "lab-h100", None])
def test_elsewhere_a_unit_of_systemd_starts_it(name: str | None) -> None:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(plain(name)["systemd/craton-exporter.service"])
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert (program, words[:2]) == ("/opt/craton/bin/craton", ["observe", "node"])
    given = node_options(words[2:])
    assert (given["listen"], given["port"]) == ("0.0.0.0", 9500)
    assert given["runs"] == {"slurm-p5": Path("/fsx/runs"), "lab-h100": Path("/lustre/runs")}.get(
        name or "", Path("runs").absolute()
    )
    own_mounts = ("Protect", "Private", "ReadOnly", "ReadWrite", "Inaccessible", "Bind", "Root", "TemporaryFile")
    assert not any(key.startswith(own_mounts) for key in unit["Service"]), "it would tell of its own mounts"
    assert "systemctl enable --now craton-exporter.service" in plain(name)["README.md"]


@pytest.mark.usefixtures("light")
def test_a_folder_with_odd_letters_reaches_the_exporter() -> None:
    assert '"--runs=/fs x/100%%/$$a"' in exporter_unit("/fs x/100%/$a")
    daemons = objects_of(render(cluster("eks-p5en").model_copy(update={"runs": "/fsx/$(NODE)"})))[DAEMONS]
    assert "--runs=/fsx/$$(NODE)" in daemons["spec"]["template"]["spec"]["containers"][0]["args"]


def node_options(words: list[str]) -> dict[str, Any]:
    """What `craton observe node` takes these for; it refuses what it does not know."""
    observe = cast(Any, typer.main.get_command(app)).commands["observe"]
    return dict(observe.commands["node"].make_context("node", list(words)).params)


@pytest.mark.usefixtures("light")
def test_targets_stand_where_the_command_that_keeps_them_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CRATON_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    nowhere = cluster("lab-h100").model_copy(update={"runs": None})
    for files in (render(None), render(nowhere)):
        folder = f"{tmp_path}/runs/.observe/targets"
        assert scraped(files)["craton-node"]["file_sd_configs"][0]["files"] == [f"{folder}/craton-node.json"]
        assert f"CRATON_RUNS={tmp_path}/runs craton observe up " in files["README.md"]
        assert f"--targets {folder}\n" in files["README.md"]
    assert "slurmctld" not in render(None)["README.md"]
    slurm = render(cluster("slurm-p5"))["README.md"]
    assert "    craton observe up --cluster CLUSTER --targets /fsx/runs/.observe" in slurm
    assert "machine of slurmctld" in slurm
    assert "--targets" not in render(cluster("eks-p5en"))["README.md"], "pods are found by Kubernetes"


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("gang", ["volcano", "kai", "none"])
def test_of_gang_schedulers_only_kueues_metrics_are_known(gang: str) -> None:
    file = cluster("eks-p5en")
    assert file.scheduler is not None
    files = render(file.model_copy(update={"scheduler": file.scheduler.model_copy(update={"gang": gang})}))
    assert not {"kueue", gang} & set(scraped(files))
    assert [name for name in objects_of(files) if "servicemonitor" in name] == ["kubernetes/servicemonitor-dcgm.yaml"]


def test_a_kubernetes_cluster_gets_its_gang_scheduler() -> None:
    files = plain("eks-p5en")
    jobs = {job["job_name"]: job for job in load(files["prometheus/prometheus.yml"])["scrape_configs"]}
    assert jobs["kueue"]["kubernetes_sd_configs"][0]["namespaces"] == {"names": ["kueue-system"]}
    assert "kubernetes/servicemonitor-kueue.yaml" in files
    assert not any(name.startswith("slurm") for name in jobs)


@pytest.mark.parametrize("run", ["llama", "Llama-3.1_8B"])
def test_a_run_has_one_name_on_kubernetes(run: str) -> None:
    """What agents serve, and what Prometheus says of them."""
    jobs, leaf = scraped(plain("eks-p5en")), "topology.k8s.aws/network-node-layer-3"
    pod = {
        as_meta("pod", "app.kubernetes.io/managed-by"): "craton",
        as_meta("pod", "app.kubernetes.io/instance"): object_name(run),
        as_meta("pod", RUN_ANNOTATION): run,
        as_meta("node", leaf): "nn-3",
        "__meta_kubernetes_pod_container_port_name": "metrics",
        "__meta_kubernetes_pod_node_name": "g1",
    }
    agents = jobs["craton"]
    assert relabelled(agents["relabel_configs"], pod) == {"run": run, "node": "g1", "leaf": "nn-3"}
    assert agents["kubernetes_sd_configs"][0]["attach_metadata"] == {"node": True}, "else it has no label of its node"
    monitor = load(plain("eks-p5en")["kubernetes/podmonitor-runs.yaml"])["spec"]
    named = {
        rule.get("targetLabel"): rule.get("sourceLabels") for rule in monitor["podMetricsEndpoints"][0]["relabelings"]
    }
    assert named["run"] == [as_meta("pod", RUN_ANNOTATION)]
    assert named["leaf"] == [as_meta("node", leaf)]
    assert monitor["attachMetadata"] == {"node": True}


def test_where_no_label_names_the_leaf_nodes_are_not_asked_for() -> None:
    files = {name: text for name, text in plain().items() if name.startswith("kubernetes/")}
    assert not any("attachMetadata" in text for text in files.values())


@pytest.mark.parametrize(
    ("labels", "run"),
    [
        ({"pod": "llama-node-0-3-x7k2p"}, "llama"),  # of a JobSet
        ({"pod": "llama-node-3"}, "llama"),  # of a Volcano Job
        ({"pod": "llama-3-x7k2p"}, ""),  # of an Indexed Job: anybody's may be called so
        ({"pod": "llama-3-x7k2p", "craton_run": "llama"}, "llama"),
        ({"pod": "llama-3-1-8b-7b633509-node-0-3-x7k2p", "craton_run": "llama-3.1-8b"}, "llama-3.1-8b"),
        ({"pod": "postgres-0"}, ""),
    ],
)
def test_the_run_of_a_card_is_that_of_its_pod(labels: dict[str, str], run: str) -> None:
    made = relabelled(dcgm_relabeling(None), {"Hostname": "g1", **labels})
    assert made is not None
    assert (made["node"], made.get("run", "")) == ("g1", run)
    monitor = load(plain()["kubernetes/servicemonitor-dcgm.yaml"])["spec"]["endpoints"][0]
    assert [rule["sourceLabels"] for rule in monitor["metricRelabelings"]] == [
        rule["source_labels"] for rule in dcgm_relabeling(None)
    ]


@pytest.mark.parametrize("name", [*NAMES, None])
def test_prometheus_is_scraped_itself(name: str | None) -> None:
    job = scraped(plain(name))["prometheus"]
    assert job["static_configs"] == [{"targets": ["localhost:9090"]}]


def test_objects_have_the_labels_by_which_a_prometheus_finds_them(tmp_path: Path) -> None:
    command = ["observe", "render", f"--out={tmp_path}", f"--cluster={CLUSTERS / 'eks-p5en.yaml'}"]
    done = CliRunner().invoke(app, [*command, "--label=release=monitor", "--label=team=ml"])
    assert done.exit_code == 0, done.output
    objects = {path.name: path.read_text() for path in (tmp_path / "kubernetes").iterdir()}
    assert "prometheusrule.yaml" in objects
    for text in objects.values():
        labels = load(text.partition("spec:\n")[0])["metadata"]["labels"]
        assert (labels["release"], labels["team"], labels["craton/cluster"]) == ("monitor", "ml", "eks-p5en")
    assert "`release: monitor`" in (tmp_path / "README.md").read_text()
    assert "--label release=NAME" in plain("eks-p5en")["README.md"], "without it, it says how"
    exporter = load(objects["podmonitor-node-exporter.yaml"])["spec"]
    assert [each["port"] for each in exporter["podMetricsEndpoints"]] == ["metrics", "http-metrics"]


def test_a_label_without_a_value_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["observe", "render", f"--out={tmp_path}", "--label=release"])
    assert "KEY=VALUE" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_dashboards_that_cannot_be_written_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["observe", "render", f"--out={tmp_path}"])
    for said in (done.output, (tmp_path / "README.md").read_text()):
        assert "craton[observe]" in said
    assert not (tmp_path / "grafana/dashboards").exists()


def test_pods_that_ended_are_no_targets() -> None:
    jobs = load(plain("eks-p5en")["prometheus/prometheus.yml"])["scrape_configs"]
    of_pods = [job for job in jobs if "kubernetes_sd_configs" in job]
    assert {job["job_name"] for job in of_pods} == {"craton", "craton-serve", "craton-node", "node", "dcgm", "kueue"}
    for job in of_pods:
        (rule,) = (rule for rule in job["relabel_configs"] if rule.get("action") == "drop")
        assert rule["source_labels"] == ["__meta_kubernetes_pod_phase"]
        for phase, is_dropped in (("Succeeded", True), ("Failed", True), ("Running", False), ("Pending", False)):
            assert bool(re.fullmatch(rule["regex"], phase)) == is_dropped, job["job_name"]


@pytest.mark.usefixtures("light")
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
        groups = load(plain(name)["prometheus/rules/craton.yaml"])["groups"]
        (rule,) = (
            rule for group in groups for rule in group["rules"] if rule.get("record") == "craton:node_gpus_expected"
        )
        assert rule["expr"].endswith("+ 8"), name
    groups = load(plain()["prometheus/rules/craton.yaml"])["groups"]
    (rule,) = (rule for group in groups for rule in group["rules"] if rule.get("record") == "craton:node_gpus_expected")
    assert "max_over_time" in rule["expr"]


@pytest.mark.usefixtures("light")
def test_managed_prometheus_and_grafana() -> None:
    files = render(cluster("eks-p5en"), amp=f"{WORKSPACE}/api/v1/remote_write")
    (remote,) = load(files["prometheus/prometheus.yml"])["remote_write"]
    assert remote["url"] == f"{WORKSPACE}/api/v1/remote_write"
    assert remote["sigv4"] == {"region": "us-east-2"}
    (source,) = load(files["grafana/provisioning/datasources/craton.yaml"])["datasources"]
    assert source["jsonData"]["sigV4Region"] == "us-east-2"
    patch = load(files["amp/prometheus-remote-write.yaml"])
    assert patch["spec"]["remoteWrite"][0]["sigv4"] == {"region": "us-east-2"}
    assert all("kind" in manifest for manifest in objects_of(files).values()), "kubectl applies that folder"
    readme = files["README.md"]
    assert "replaces the whole list" in readme
    assert "ws-0123" in readme
    assert "plugins install\ngrafana-amazonprometheus-datasource" in readme
    definition = load(readme[readme.index("    alertmanager_config: |") : readme.index("    aws amp create-al")])
    assert set(load(definition["alertmanager_config"])) == {"route", "receivers"}
    with pytest.raises(ObserveError, match="aps-workspaces"):
        render(amp="https://example.com/prometheus")


def test_without_a_workspace_nothing_leaves_the_cluster() -> None:
    files = plain("eks-p5en")
    assert "remote_write" not in load(files["prometheus/prometheus.yml"])
    assert not any("remote" in name for name in files)


def test_a_link_to_a_runbook_leads_somewhere_or_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"https://wiki.example.com/craton/{ALERTS[0].group}.md#{ALERTS[0].name.lower()}"
    assert notes_of(rule_groups(runbooks="https://wiki.example.com/craton/"))[ALERTS[0].name]["runbook_url"] == place
    for each in notes_of(rule_groups()).values():
        assert "runbook_url" not in each, "tools make a link of it"
        assert each["runbook"].startswith("docs/runbooks/")
    with pytest.raises(ObserveError, match="--runbooks"):
        rule_groups(runbooks="docs/runbooks")
    given: list[Any] = []
    monkeypatch.setattr(rendering, "rule_groups", lambda *_, runbooks, **__: given.append(runbooks))
    monkeypatch.setattr(dashboards, "dashboard_files", lambda url: {"grafana/dashboards/cost.json": url})
    files = render(runbooks="https://wiki.example.com/craton/")
    assert given == ["https://wiki.example.com/craton/"]
    assert files["grafana/dashboards/cost.json"] == "https://wiki.example.com/craton"


def notes_of(groups: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    return {rule["alert"]: rule["annotations"] for group in groups for rule in group["rules"] if "alert" in rule}


@pytest.mark.usefixtures("light")
def test_a_file_in_the_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = CliRunner().invoke(app, ["observe", "render", f"--out={tmp_path / 'file'}"])
    assert isinstance(done.exception, CratonError)
    assert "--out" in str(done.exception)
    assert (tmp_path / "file").read_text() == "mine"


def test_counters_of_dcgm_hold_what_the_rules_read() -> None:
    fields = {line.partition(",")[0] for line in plain()["dcgm/craton-counters.csv"].splitlines()}
    for alert in ALERTS:
        for field in ("ECC_DBE_VOL_TOTAL", "ROW_REMAP_PENDING", "THERMAL_VIOLATION"):
            if f"DCGM_FI_DEV_{field}" in alert.expr:
                assert f"DCGM_FI_DEV_{field}" in fields
    assert "DCGM_EXP_XID_ERRORS_COUNT" in fields


def test_a_rendering_is_the_same_each_time() -> None:
    assert render(cluster("slurm-p5")) == render(cluster("slurm-p5"))


def test_who_is_told() -> None:
    assert alertmanager_config()["route"]["receiver"] == "null"
    told = alertmanager_config("https://example.com/hook")
    assert told["receivers"][1]["webhook_configs"][0]["url"] == "https://example.com/hook"
    silent = [route for route in told["route"]["routes"] if route["matchers"] == ['severity="info"']]
    assert silent[0]["receiver"] == "null"
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
    for severity, receiver in (("page", "webhook"), ("ticket", "webhook"), ("info", "null")):
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
