"""Cases of rules (cases/GROUP.yaml) as files for `promtool test rules`, one for each alert with the rules it needs.

An alert is looked for as the series ALERTS: a case names the labels it cares about, and every label that the alert's
summary names must be there, so that nobody reads "XID  on  GPU".
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from craton.observability.prometheus import ALERTS
from craton.observability.prometheus.rules import RECORDINGS, AlertRule, rule_groups

CASES = Path(__file__).with_name("cases")
_SERIES = re.compile(r"^(?P<name>[^ {]+(?:\{[^}]*\})?)\s+(?P<values>.+)$")


@cache
def cases() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Alert → fires and silent → cases."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(CASES.glob("*.yaml")):
        for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            assert name not in found, f"{name} has cases in two files"
            found[name] = entry
    return found


def write_tests(folder: Path) -> list[Path]:
    """A test file for each alert, and for each cluster that its cases state by numbers of GPUs and EFA devices."""
    written = []
    for alert in ALERTS:
        entry = cases()[alert.name]
        all_cases = [(kind, case) for kind in ("fires", "silent") for case in entry[kind]]
        for cluster in dict.fromkeys(_cluster(case) for _, case in all_cases):
            name = "-".join(map(str, (alert.name, *cluster)))
            rules, test = folder / f"{name}.rules.yaml", folder / f"{name}.test.yaml"
            groups = _needed(alert, *cluster)
            rules.write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
            tests = [_test(alert, kind, case) for kind, case in all_cases if _cluster(case) == cluster]
            document = {
                "rule_files": [str(rules)],
                "evaluation_interval": "1m",
                "group_eval_order": [group["name"] for group in groups],
                "tests": tests,
            }
            test.write_text(yaml.safe_dump(document), encoding="utf-8")
            written.append(test)
    return written


def _cluster(case: dict[str, Any]) -> tuple[int | None, int | None]:
    return case.get("gpus_per_node"), case.get("efa_per_node")


def _needed(alert: AlertRule, gpus: int | None, efa: int | None) -> list[dict[str, Any]]:
    """The groups with this alert, and with what it reads, of others' recordings too."""
    names, groups = {alert.name}, rule_groups(gpus, efa_per_node=efa)
    expressions = {rule.get("record"): rule["expr"] for group in groups for rule in group["rules"]}
    reads = metrics_of(alert.expr) & set(expressions)
    while reads:
        names |= reads
        reads = {name for read in reads for name in metrics_of(expressions[read]) if name in expressions} - names
    kept = [
        {**group, "rules": [rule for rule in group["rules"] if {rule.get("record"), rule.get("alert")} & names]}
        for group in groups
    ]
    return [group for group in kept if group["rules"]]


def _test(alert: AlertRule, kind: str, case: dict[str, Any]) -> dict[str, Any]:
    wanted = {"alertname": alert.name, "alertstate": "firing"}
    if kind == "fires":
        expr = _count({**wanted, **case.get("with", {})}, _named_in(alert.summary))
        checks = [
            {"expr": expr, "eval_time": case["at"], "exp_samples": [{"labels": "{}", "value": 1}]},
            {"expr": _count(wanted), "eval_time": case["at"], "exp_samples": [{"labels": "{}", "value": 1}]},
        ]
    else:
        checks = [{"expr": _count(wanted), "eval_time": case["at"], "exp_samples": []}]
    series = [_SERIES.fullmatch(line.strip()) for line in case["series"].splitlines() if line.strip()]
    return {
        "name": f"{alert.name} {kind}: {case.get('why', '')}",
        "interval": "1m",
        "input_series": [{"series": each["name"], "values": _spelled_out(each["values"])} for each in series if each],
        "promql_expr_test": checks,
    }


def _spelled_out(values: str) -> str:
    """promtool repeats numbers (3x10), but not NaN and Inf."""
    return re.sub(r"\b(NaN|Inf)x(\d+)", lambda match: " ".join([match[1]] * (int(match[2]) + 1)), values)


def _count(labels: dict[str, str], present: list[str] | None = None) -> str:
    matchers = [f'{name}="{value}"' for name, value in labels.items()]
    matchers += [f'{name}!=""' for name in present or () if name not in labels]
    return f"count(ALERTS{{{', '.join(matchers)}}})"


def _named_in(summary: str) -> list[str]:
    """Labels that the summary needs; inside `or` and `if` they may be missing."""
    return re.findall(r"\{\{ \$labels\.(\w+) \}\}", re.sub(r"\{\{ if .*?\{\{ end \}\}", "", summary))


def metrics_of(expr: str) -> set[str]:
    """Names of the series that an expression reads."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    bare = re.sub(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"\{[^}]*\}", "{}", bare)
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    words = re.findall(r"(?<![\w.:])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", bare)
    keywords = {"and", "or", "unless", "offset", "Inf", "NaN", "bool", "by", "on", "e9", "m", "h", "d"}
    return {word for word in words if word not in keywords and not re.fullmatch(r"\d*[smhdy]", word)}


def all_expressions() -> dict[str, str]:
    return {each.name: each.expr for each in (*ALERTS, *RECORDINGS)}
