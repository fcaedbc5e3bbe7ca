"""What Craton uses of the Prometheus operator's kinds, as strict schemas: any other field, or one in the wrong place,
is a mistake that the operator would drop without a word.

Field names and types are those of its API reference (monitoring.coreos.com/v1, version 0.93, read 2026-11-16). Only
what is emitted stands here, so that a field emitted anew has to be looked up first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema_rs

sys.path.append(str(Path(__file__).parents[2] / "orchestration"))
from kubernetes_schemas import problems as kubernetes_problems

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
WORDS = {"type": "object", "additionalProperties": TEXT}
SPAN = {"type": "string", "pattern": r"^(\d+(ms|s|m|h|d))+$"}


def fields(required: tuple[str, ...] = (), **known: Any) -> dict[str, Any]:
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


RELABELING = fields(
    sourceLabels=TEXTS,
    separator=TEXT,
    targetLabel=TEXT,
    regex=TEXT,
    replacement=TEXT,
    action={"enum": ["replace", "drop", "labeldrop"]},
)
SCRAPED: dict[str, Any] = {
    "port": TEXT,
    "path": TEXT,
    "scheme": {"enum": ["http", "https"]},
    "interval": SPAN,
    "honorLabels": FLAG,
    "relabelings": several(RELABELING),
    "metricRelabelings": several(RELABELING),
}
EXPRESSION = fields(("key", "operator"), key=TEXT, operator={"enum": ["In", "NotIn", "Exists"]}, values=TEXTS)
CHOSEN: dict[str, Any] = {
    "selector": fields(matchLabels=WORDS, matchExpressions=several(EXPRESSION)),
    "namespaceSelector": {"oneOf": [fields(("any",), any=FLAG), fields(("matchNames",), matchNames=TEXTS)]},
    "attachMetadata": fields(("node",), node=FLAG),
}
SERVICE_ENDPOINT = fields(
    **SCRAPED,
    targetPort={"type": ["integer", "string"]},
    bearerTokenFile=TEXT,
    tlsConfig=fields(insecureSkipVerify=FLAG),
)
RULE = {
    "oneOf": [
        fields(("alert", "expr"), alert=TEXT, expr=TEXT, **{"for": SPAN}, labels=WORDS, annotations=WORDS),
        fields(("record", "expr"), record=TEXT, expr=TEXT, labels=WORDS),
    ]
}
SPECS = {
    "PrometheusRule": fields(
        ("groups",), groups=several(fields(("name",), name=TEXT, interval=SPAN, rules=several(RULE)))
    ),
    "PodMonitor": fields(("selector",), **CHOSEN, podMetricsEndpoints=several(fields(**SCRAPED))),
    "ServiceMonitor": fields(("selector", "endpoints"), **CHOSEN, endpoints=several(SERVICE_ENDPOINT)),
}


def problems_of(manifest: dict[str, Any]) -> list[str]:
    """What the operator would not take of an object, or Kubernetes of one of its own."""
    if manifest["kind"] not in SPECS:
        return kubernetes_problems(manifest)
    schema = fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind={"enum": list(SPECS)},
        metadata=fields(("name", "namespace"), name=TEXT, namespace=TEXT, labels=WORDS),
        spec=SPECS[manifest["kind"]],
    )
    return [error.message for error in jsonschema_rs.Draft202012Validator(schema).iter_errors(manifest)]
