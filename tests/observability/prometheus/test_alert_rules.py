"""The rules, by real promtool: each fires and is silent when it should; none reads what nobody serves."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from observed import need
from rule_cases import all_expressions, cases, metrics_of, write_tests
from waiting import PATIENCE_SECONDS

from craton.infrastructure.probes import xid_facts
from craton.job.cluster import ClusterFile
from craton.observability.exporter import FAMILIES, SHARED_KINDS
from craton.observability.exporter.dcgm import ONLY_DCGM
from craton.observability.prometheus import ALERTS
from craton.observability.prometheus.rules import (
    ACTIONS,
    LAYERS,
    RECORDINGS,
    SEVERITIES,
    AlertRule,
    RecordingRule,
    efa_per_node,
    rule_groups,
)
from craton.telemetry import METRICS

REPOSITORY = Path(__file__).parents[3]
# Served by others; nothing of ours names them.
FOREIGN = {
    "up": "Prometheus itself",
    "prometheus_rule_evaluation_failures_total": "Prometheus itself",
    "prometheus_rule_group_iterations_missed_total": "Prometheus itself",
    "prometheus_rule_group_iterations_total": "Prometheus itself",
    "slurm_nodes": "slurmctld, https://slurm.schedmd.com/metrics.html",
    "slurm_nodes_drain": "slurmctld",
    "slurm_nodes_down": "slurmctld",
    "slurm_nodes_idle": "slurmctld",
    "slurm_jobs_pending": "slurmctld",
    "slurm_jobs_running": "slurmctld",
    "kueue_pending_workloads": "Kueue",
    "kueue_admitted_until_ready_wait_time_seconds_bucket": "Kueue",
    "kueue_evicted_workloads_total": "Kueue",
    "nccl_bus_bandwidth_gbs": "NCCL Inspector",
}


# A series for each run, node or file system: hours of these are few samples.
FEW = {
    "craton:run_loss:limit",
    "craton:run_gradient_norm:limit",
    "craton:lustre_client_samples:rate5m",
    "aws_fsx_free_data_storage_capacity_sum",
}


@pytest.mark.parametrize(
    "severities",
    [("page",), pytest.param(tuple(name for name in SEVERITIES if name != "page"), marks=pytest.mark.slow)],
    ids=lambda names: ", ".join(names),
)
def test_every_rule_fires_and_is_silent_as_its_cases_say(tmp_path: Path, severities: tuple[str, ...]) -> None:
    need("promtool")
    wanted = {alert.name for alert in ALERTS if alert.severity in severities}
    files = [path for path in write_tests(tmp_path) if path.name.partition("-")[0].partition(".")[0] in wanted]
    assert len(files) >= len(wanted) > 0
    done = subprocess.run(
        ["promtool", "test", "rules", *map(str, files)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.strip() and "SUCCESS" not in line]
    assert done.returncode == 0, "\n".join(line for line in told if not line.startswith("Unit Testing"))


def test_no_rule_lacks_its_cases() -> None:
    assert set(cases()) == {alert.name for alert in ALERTS}
    for name, entry in cases().items():
        assert set(entry) == {"fires", "silent"}, name
        for kind in ("fires", "silent"):
            assert entry[kind], f"{name} has no case in which it {kind}"
            for case in entry[kind]:
                assert case["series"].strip(), name
        assert all("with" in case for case in entry["fires"]) or name.startswith("Slurm"), f"{name}: say which labels"


def test_a_case_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    """The cases would be worth nothing if promtool took a firing alert for a silent one."""
    need("promtool")
    file = next(path for path in write_tests(tmp_path) if path.name.startswith("LossNotFinite"))
    document = yaml.safe_load(file.read_text())
    document["tests"] = [test for test in document["tests"] if "silent" in test["name"]]
    document["tests"][0]["input_series"] = [{"series": 'craton_run_loss{run="a"}', "values": "NaN NaN NaN NaN"}]
    document["tests"][0]["promql_expr_test"][0]["eval_time"] = "3m"
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode != 0


def test_rules_say_what_a_person_needs() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(names) == len(set(names))
    for alert in ALERTS:
        assert alert.severity in SEVERITIES, alert.name
        assert alert.layer in LAYERS, alert.name
        assert alert.action in ACTIONS, alert.name
        assert alert.summary, alert.name
        assert alert.description.endswith("."), alert.name
        assert alert.source, alert.name
        if alert.severity == "page":
            assert alert.action != "observe", f"{alert.name} wakes somebody who then has nothing to do"
    assert {alert.layer for alert in ALERTS} == set(LAYERS)


def test_every_alert_has_its_place_in_a_runbook() -> None:
    for alert in ALERTS:
        page, _, anchor = alert.runbook.partition("#")
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        headings = [line.lstrip("# ").strip().lower() for line in text.splitlines() if line.startswith("## ")]
        assert anchor in headings, f"{page} has no heading for {alert.name}"
    for page in (REPOSITORY / "docs/runbooks").glob("*.md"):
        told = {line[3:].strip() for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("## ")}
        assert told <= {alert.name for alert in ALERTS}, f"{page.name} tells of alerts that are no more"


def test_rules_read_only_what_somebody_serves() -> None:
    """Our vocabulary, our exporter's table, dcgm-exporter's, the server's own source, and a short list of others."""
    server = (REPOSITORY / "craton/ml/serving/server/metrics.py").read_text(encoding="utf-8")
    strings = {node.value for node in ast.walk(ast.parse(server)) if isinstance(node, ast.Constant)}
    of_server = {f"vllm:{text.removeprefix('vllm:')}" for text in strings if isinstance(text, str)}
    known = {
        *(metric.prometheus_name for metric in METRICS.values()),
        *FAMILIES,
        *ONLY_DCGM,
        *FOREIGN,
        *(f"{name}{ending}" for name in of_server for ending in ("", "_total", "_bucket")),
        *(recording.name for recording in RECORDINGS),
        "craton:node_gpus_expected",
        "craton:node_fabric_devices_expected",
    }
    for name, expr in all_expressions().items():
        read = metrics_of(expr)
        assert read, name
        assert read <= known, f"{name} reads {sorted(read - known)}, which nobody serves"


def test_no_rule_reads_hours_of_what_is_scraped() -> None:
    """A day of 4,000 ports, scraped every five seconds, is 70 million samples: such a rule, and with it its group, is
    never done in time. What looks back for long reads what was recorded every minute, and is itself a slow rule."""
    minutes = {"m": 1, "h": 60, "d": 24 * 60}
    slow = {recording.name for recording in RECORDINGS if recording.slow}
    rules: list[AlertRule | RecordingRule] = [*ALERTS, *RECORDINGS]
    for rule in rules:
        for name, number, unit in re.findall(r"([\w:]+)(?:\{[^}]*\})?\[(\d+)([mhd])\]", rule.expr):
            if int(number) * minutes[unit] > 60 and name not in FEW:
                assert name in slow, f"{rule.name} reads {number}{unit} of {name}"
                assert rule.slow, f"{rule.name} reads {number}{unit}, and is evaluated as often as any"


def test_slow_rules_are_groups_of_their_own() -> None:
    groups = {group["name"]: group for group in rule_groups(evaluate_every="5s")}
    for alert, name in (("RunHung", "craton-framework"), ("TcpFallback", "craton-fabric")):
        assert groups[name]["interval"] == "5s"
        assert alert in [rule.get("alert") for rule in groups[name]["rules"]]
    slow = {name: group for name, group in groups.items() if name.endswith("-slow")}
    assert {"craton-device-slow", "craton-fabric-slow", "craton-framework-slow", "craton-storage-slow"} <= set(slow)
    assert {group["interval"] for group in slow.values()} == {"1m"}
    assert "craton:node_gpus_expected" in [rule.get("record") for rule in slow["craton-device-slow"]["rules"]]


def test_the_sticky_gauge_and_bare_utilisation_are_not_used() -> None:
    for name, expr in all_expressions().items():
        assert "DCGM_FI_DEV_XID_ERRORS" not in metrics_of(expr), name
    for alert in ALERTS:
        assert not re.match(r"^\s*DCGM_FI_DEV_GPU_UTIL", alert.expr), alert.name


def test_xid_rules_cover_the_table_and_follow_it() -> None:
    by_action = {alert.action: alert.expr for alert in ALERTS if re.fullmatch(r"GpuXid(?!Unknown)\w+", alert.name)}
    for code, fact in xid_facts().items():
        assert re.search(rf"[\"|]{code}[\"|]", by_action[fact.action]), f"XID {code} ({fact.action})"
        others = [expr for action, expr in by_action.items() if action != fact.action]
        assert not any(re.search(rf"xid=~\"[^\"]*\b{code}\b", expr) for expr in others), code


def test_a_cluster_says_how_many_efa_devices_its_nodes_have() -> None:
    machine = {"name": "own", "gpu": "H100-SXM", "num_gpus": 8, "network_bytes_per_second": "400 GB/s"}
    known: list[tuple[dict[str, Any], int | None]] = [
        ({"instance": "p5en"}, 16),
        ({"hardware": machine}, None),
        ({"hardware": {**machine, "efa_version": 2, "network_interfaces": 32}}, 32),
    ]
    for stated, devices in known:
        assert efa_per_node(ClusterFile.model_validate({"name": "lab", "nodes": 2, **stated})) == devices
    assert efa_per_node(None) is None


def test_shared_file_systems_are_those_that_the_exporter_knows() -> None:
    by_name = {alert.name: alert.expr for alert in ALERTS}
    for name in ("DiskNearlyFull", "DiskFillsSoon", "SharedNearlyFull", "SharedFillsSoon", "FileSystemReadOnly"):
        kinds = set(re.findall(r'fstype[!=]~"([^"]+)"', by_name[name])[0].split("|"))
        assert kinds >= SHARED_KINDS, name


@pytest.mark.parametrize("gpus", [None, 8])
def test_the_rule_file_is_what_prometheus_takes(tmp_path: Path, gpus: int | None) -> None:
    need("promtool")
    path = tmp_path / "craton.yaml"
    path.write_text(yaml.safe_dump({"groups": rule_groups(gpus, "15s", efa_per_node=gpus)}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS) + len(RECORDINGS) + 2} rules found" in done.stdout
