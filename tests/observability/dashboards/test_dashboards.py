"""The dashboards as data and as Grafana's JSON: names, labels, twins, places, links, and that they are rendered."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from observability.prometheus.rule_cases import metrics_of

from craton.observability.dashboards.boards import BOARDS
from craton.observability.dashboards.files import dashboard_files
from craton.observability.dashboards.grafana import RUNBOOKS_AT, all_dashboards, dashboard_of
from craton.observability.dashboards.model import Board, Panel, PanelQuery
from craton.observability.exporter import FAMILIES
from craton.observability.exporter.dcgm import ONLY_DCGM
from craton.observability.prometheus import ALERTS, DATA_SOURCE, render
from craton.observability.prometheus.rules import RECORDINGS
from craton.telemetry import METRICS, TWINS

REPOSITORY = Path(__file__).parents[3]
TARGET = {"job", "instance", "run", "node", "leaf"}  # of every series, by how targets are found
RUN_LABELS = {"run", "node", "leaf", "rank"}
# Of others, with their labels. Sources: Prometheus documentation; slurm.schedmd.com/metrics.html; Kueue's list of
# metrics; NCCL's inspector. 2026-11-16
FOREIGN = {
    "up": set(),
    "ALERTS": {"alertname", "alertstate", "severity", "layer", "action", "rank", "gpu"},
    "ALERTS_FOR_STATE": {"alertname", "severity", "layer", "action", "rank", "gpu"},
    "slurm_nodes": set(),
    "slurm_nodes_idle": set(),
    "slurm_nodes_drain": set(),
    "slurm_nodes_down": set(),
    "slurm_jobs_running": set(),
    "slurm_jobs_pending": set(),
    "kueue_pending_workloads": {"cluster_queue", "status"},
    "kueue_admitted_until_ready_wait_time_seconds_bucket": {"cluster_queue", "le"},
    "kueue_evicted_workloads_total": {"cluster_queue", "reason"},
    "nccl_bus_bandwidth_gbs": {"collective", "message_size"},
}
OF_RECORDINGS = {
    "craton:node_gpus_expected": {"node"},
    "craton:node_gpus": {"node"},
    "craton:gpu_xid_events:15m": {"node", "leaf", "gpu", "UUID", "pci_bus_id", "xid"},
    "craton:gpu_nvlink_errors:15m": {"node", "leaf", "gpu", "UUID", "pci_bus_id", "field"},
    "craton:checkpoint_age_seconds": {"run", "tier"},
    "craton:rank_gradient_norm:ratio": RUN_LABELS,
    "craton:run_goodput:6h": {"run"},
}
SERVER_LABELS = {"model_name", "finished_reason", "tier", "sleep_state", "le"}
# Panels that set measured times against each other, and the stack whose plan is the stack beside it.
WITHOUT_PLAN = {"Compute of the slowest rank over the median", "Step by phase, measured"}


def all_queries() -> Iterator[tuple[Board, Panel, PanelQuery]]:
    for board in BOARDS:
        for panel, query in board.queries:
            yield board, panel, query


def labels_of() -> dict[str, set[str]]:
    """Metric → the labels that its series can have."""
    text = (REPOSITORY / "craton/ml/serving/server/metrics.py").read_text(encoding="utf-8")
    strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    names = {each for each in strings if isinstance(each, str) and re.fullmatch(r"[\w:]+", each)}
    of_server = {
        f"{prefix}{name}{ending}": TARGET | SERVER_LABELS
        for name in names
        for prefix in ("", "vllm:")
        for ending in ("", "_total", "_bucket", "_sum", "_count")
    }
    of_runs = {
        # A server measures some of these too, and then has the name of its model.
        metric.prometheus_name: RUN_LABELS | {metric.label, "model_name"} - {""}
        for metric in METRICS.values()
    }
    others = {name: TARGET | labels for name, labels in FOREIGN.items()}
    return {
        **of_server,
        **of_runs,
        **others,
        **OF_RECORDINGS,
        **{name: set(family.labels) | ({"pod"} if _is_dcgms(name) else set()) for name, family in FAMILIES.items()},
        **{name: {"gpu", "UUID", "node", "run"} for name in ONLY_DCGM},
    }


def _is_dcgms(name: str) -> bool:
    """dcgm-exporter serves these too, with the pod that has the card."""
    return name.startswith("DCGM_")


def test_queries_read_only_what_somebody_serves() -> None:
    known = labels_of()
    assert {each.name for each in RECORDINGS} >= set(OF_RECORDINGS) - {"craton:node_gpus_expected"}
    for board, panel, query in all_queries():
        read = metrics_of(_bare(query.expr))
        assert read, f"{board.name}: {panel.title}"
        assert read <= set(known), f"{board.name}: {panel.title} reads {sorted(read - set(known))}, which nobody serves"


def test_queries_use_only_labels_that_are_there() -> None:
    known = labels_of()
    for board, panel, query in all_queries():
        expr = _bare(query.expr)
        where = f"{board.name}: {panel.title}"
        for name, matchers in re.findall(r"([a-zA-Z_][\w:]*)\{([^}]*)\}", expr):
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert asked <= known[name], f"{where}: {name} has no {sorted(asked - known[name])}"
        readable = set().union(*(known[name] for name in metrics_of(expr)))
        for labels in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", expr):
            asked = {label.strip() for label in labels.split(",") if label.strip()}
            assert asked <= readable, f"{where}: nothing has {sorted(asked - readable)}"


def test_rates_are_of_counters() -> None:
    counters = {metric.prometheus_name for metric in METRICS.values() if metric.kind == "counter"}
    counters |= {family.name for family in FAMILIES.values() if family.kind == "counter"}
    gauges = {metric.prometheus_name for metric in METRICS.values()} | set(FAMILIES)
    gauges -= counters
    for board, panel, query in all_queries():
        for name in re.findall(r"\b(?:rate|increase|irate)\(([\w:]+)", query.expr):
            assert name not in gauges, f"{board.name}: {panel.title}: a rate of {name}, which is no counter"
        for name in re.findall(r"\b(?:deriv|delta)\(([\w:]+)", query.expr):
            assert name not in counters, f"{board.name}: {panel.title}: {name} is a counter"


def test_bandwidth_is_that_of_large_messages() -> None:
    """Small ones never come near what the network can do: the least of all sizes says nothing of it."""
    read = [query.expr for _, _, query in all_queries() if "nccl_bus_bandwidth_gbs" in query.expr]
    assert read
    assert all('message_size=~".*(MB|GB)"' in expr for expr in read)


def test_errors_of_nvlink_are_seen_on_every_generation() -> None:
    """Counters of the three have different names, which only the recording knows."""
    (recording,) = (each for each in RECORDINGS if each.name == "craton:gpu_nvlink_errors")
    named = metrics_of(recording.expr)
    assert named >= {name for name in (*FAMILIES, *ONLY_DCGM) if re.search(r"NVLINK_\w*(?:ERROR|FAILED)", name)}
    for _, panel, query in all_queries():
        assert not named & metrics_of(_bare(query.expr)), f"{panel.title} shows the errors of one generation"


def test_the_sticky_gauge_is_not_used() -> None:
    assert not any("DCGM_FI_DEV_XID_ERRORS" in query.expr for _, _, query in all_queries())


def test_what_has_a_plan_is_shown_with_it() -> None:
    for board in BOARDS:
        on_board = {name for _, query in board.queries for name in metrics_of(_bare(query.expr))}
        for panel in board.panels:
            read = {name for query in panel.queries for name in metrics_of(_bare(query.expr))}
            for twin in TWINS:
                if f"craton_run_{twin}" not in read:
                    continue
                assert f"craton_plan_{twin}" in on_board, f"{board.name} shows {twin} without its plan"
                if board.name == "run" and panel.title not in WITHOUT_PLAN:
                    assert f"craton_plan_{twin}" in read, f"{panel.title} shows {twin} without its plan"
    shown = {name for board in BOARDS if board.name in ("run", "cost") for _, query in board.queries
             for name in metrics_of(_bare(query.expr))}  # fmt: skip
    assert {f"craton_{side}_{twin}" for twin in TWINS for side in ("plan", "run")} <= shown


def test_plans_are_dashed() -> None:
    found = all_dashboards()["run"]["panels"]
    panel = next(each for each in found if each["title"] == "Exposed communication")
    plan = next(target for target in panel["targets"] if "craton_plan_" in target["expr"])
    (override,) = panel["fieldConfig"]["overrides"]
    assert override["matcher"] == {"id": "byFrameRefID", "options": plan["refId"]}
    assert {"id": "custom.lineStyle", "value": {"dash": [8, 6], "fill": "dash"}} in override["properties"]


def test_the_metrics_of_hardware_are_known_as_such() -> None:
    hardware = {
        "gpu": True, "xid": True, "fabric": True, "lustre": True, "fsx": True, "host": False, "filesystem": False,
        "runs": False, "exporter": False,
    }  # fmt: skip
    for name, family in FAMILIES.items():
        if family.collector == "drives":
            expected = name.startswith("nvme_")
        elif name == "craton_exporter_kernel_log_readable":
            expected = False
        else:
            expected = hardware[family.collector]
        assert PanelQuery(f"sum({name})", "").hardware_only == expected, name
    for metric in METRICS.values():
        assert not PanelQuery(metric.prometheus_name, "").hardware_only
    assert PanelQuery("slurm_nodes", "").hardware_only
    assert PanelQuery("max(kueue_pending_workloads)", "").hardware_only


def test_variables_are_those_that_queries_use() -> None:
    for board in BOARDS:
        used = {name for _, query in board.queries for name in re.findall(r"\$([a-z]+)", query.expr)}
        assert used == {variable.name for variable in board.variables}, board.name
        offered = [each["name"] for each in all_dashboards()[board.name]["templating"]["list"]]
        assert offered == ["datasource", "runbooks", *(variable.name for variable in board.variables)]


def test_panels_say_what_to_do_and_link_to_runbooks() -> None:
    alerts = {alert.name: alert for alert in ALERTS}
    linked = set()
    for board in BOARDS:
        for panel in board.panels:
            assert panel.description.endswith("."), f"{board.name}: {panel.title}"
            linked |= set(panel.alerts)
        panels = {each["title"]: each for each in _panels(all_dashboards()[board.name])}
        for panel in board.panels:
            links = [link["url"] for link in panels[panel.title].get("links", ())]
            assert links == [
                f"${{runbooks}}/{alerts[name].runbook.removeprefix('docs/runbooks/')}" for name in panel.alerts
            ]
            assert all(alerts[name].runbook in panels[panel.title]["description"] for name in panel.alerts)
    # Nobody looks at a dashboard for these: they tell of single events, of which a panel of its own would be empty.
    alone = {"GpuXidObserve", "GpuXidUnknown", "GpuHealthFailed", "NvswitchFatal", "ClockOff", "FileSystemReadOnly"}
    assert set(alerts) - linked == {*alone, "RulesNotEvaluated"}


def test_links_to_runbooks_begin_where_they_are_served() -> None:
    (board,) = (board for board in BOARDS if board.name == "cost")
    for given, used in (("https://wiki.example.com/r", "https://wiki.example.com/r"), (None, RUNBOOKS_AT)):
        variables = dashboard_of(board, given)["templating"]["list"]
        assert [each["query"] for each in variables if each["name"] == "runbooks"] == [used]


def test_a_card_that_somebody_has_is_not_idle(tmp_path: Path) -> None:
    """By Prometheus' own word."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed: `make observers` installs it where it may")
    (query,) = (query for board, _, query in all_queries() if board.name == "cost" and query.legend == "unallocated")
    ours, theirs = 'UUID="a", job="craton-node"', 'UUID="a", job="dcgm"'
    cases: list[tuple[list[str], int]] = [  # labels of the series there are, cards that nobody has
        ([f'{ours}, run="llama"', 'UUID="b", job="craton-node"'], 1),
        ([f'{theirs}, hpc_job="812"'], 0),  # another job of Slurm
        ([f'{theirs}, pod="notebook-0"'], 0),
        ([f'{ours}, run="llama"', theirs], 0),  # dcgm-exporter knows no run
        ([ours, f'{theirs}, hpc_job="812"'], 0),
        ([ours, theirs], 1),  # one card
    ]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": f"DCGM_FI_DEV_GPU_TEMP{{{labels}}}", "values": "40"} for labels in series],
            "promql_expr_test": [
                {"expr": query.expr, "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": idle}]}
            ],
        }
        for series, idle in cases
    ]
    (tmp_path / "test.yaml").write_text(json.dumps({"tests": tests}))
    words = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_places_and_numbers_of_their_own() -> None:
    for name, document in all_dashboards().items():
        panels = document["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels), name
        titles = [panel["title"] for panel in _panels(document)]
        assert len(titles) == len(set(titles)), f"{name}: two panels have one title"
        for first, second in itertools.combinations([panel["gridPos"] for panel in panels], 2):
            assert not _overlap(first, second), f"{name}: {first} and {second}"
        for panel in panels:
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, f"{name}: {panel['title']}"
            letters = [target["refId"] for target in panel.get("targets", ())]
            assert len(letters) == len(set(letters))


def test_addresses_of_dashboards_stay() -> None:
    """Links and bookmarks hold them."""
    found = all_dashboards()
    assert {name: document["uid"] for name, document in found.items()} == {
        name: f"craton-{name}" for name in ("cluster", "run", "node", "serving", "storage", "network", "cost")
    }
    for name, document in found.items():
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, name
        source = document["templating"]["list"][0]
        assert (source["query"], source["current"]["value"]) == ("prometheus", DATA_SOURCE)


def test_rows_of_tables_lead_to_the_board_of_their_label() -> None:
    names = {board.name for board in BOARDS}
    for board, panel, _ in all_queries():
        if panel.opens:
            assert panel.opens in names, board.name
            document = next(each for each in all_dashboards()[board.name]["panels"] if each["title"] == panel.title)
            assert f"/d/craton-{panel.opens}?" in json.dumps(document["fieldConfig"]["overrides"])


def test_they_are_grafanas_own_model() -> None:
    """Read back by the typed model and written again they are the same: nothing in them is unknown to it."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    for name, document in all_dashboards().items():
        again = json.loads(json.dumps(models.Dashboard.from_json(document), cls=encoder.JSONEncoder))
        assert _targets(again) == _targets(document), name
        assert again["templating"] == document["templating"], name
        assert {panel["type"] for panel in document["panels"]} <= {"row", "timeseries", "stat", "table", "bargauge"}


def test_they_are_rendered_where_grafana_looks() -> None:
    files = render(dashboards=dashboard_files)
    for board in BOARDS:
        assert json.loads(files[f"grafana/dashboards/{board.name}.json"]) == all_dashboards()[board.name]
    assert "grafana/provisioning/dashboards/craton.yaml" in files
    assert "grafana/dashboards/" in files["README.md"]


def _bare(expr: str) -> str:
    """With a window that is one to whoever reads it."""
    return expr.replace("$__rate_interval", "5m")


def _overlap(first: dict[str, int], second: dict[str, int]) -> bool:
    return (
        first["x"] < second["x"] + second["w"]
        and second["x"] < first["x"] + first["w"]
        and first["y"] < second["y"] + second["h"]
        and second["y"] < first["y"] + first["h"]
    )


def _panels(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the titles of rows."""
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def _targets(document: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in document["panels"] for target in panel.get("targets") or ()]
