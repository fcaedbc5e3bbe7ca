"""Add what Prometheus knows about the nodes of a run to its snapshot.

Every query of queries.toml is one HTTP request for the machines of the run; they run in parallel. A server that does
not respond only adds a note, and a value that is not a number is ignored: a diagnosis must not depend on healthy
monitoring, and missing values stay unknown.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import typing
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from craton.observability.diagnosis.collect.file_systems import with_holders
from craton.observability.diagnosis.snapshot import (
    CardOccupant,
    Snapshot,
    SnapshotFabricDevice,
    SnapshotGpu,
    SnapshotHost,
    SnapshotMount,
    SnapshotNode,
    SnapshotXid,
    hints_of,
    with_occupants,
)

ANSWER_SECONDS = 5.0
AT_ONCE = 8
ANSWER_BYTES = 64 << 20
SKIPPED_FILE_SYSTEMS = ("tmpfs", "devtmpfs", "overlay", "squashfs", "ramfs")
OCCUPANTS = "craton_gpu_rank_memory_bytes"
Ask = Callable[[str], list[dict[str, Any]]]
_METRIC = re.compile(r"\b((?:DCGM|node|lustre|craton)_\w+)(?:\{([^}]*)\})?")  # and its own matchers


@dataclass(frozen=True)
class SnapshotQuery:
    of: str
    field: str
    expression: str
    label: str = ""  # whose value is the result


@dataclass
class _Known:
    """Query results for one node, by the key of each part: GPU index, name of a device or mount."""

    gpu: dict[str, dict[str, Any]] = field(default_factory=dict)
    fabric: dict[str, dict[str, Any]] = field(default_factory=dict)
    host: dict[str, dict[str, Any]] = field(default_factory=dict)
    filesystem: dict[str, dict[str, Any]] = field(default_factory=dict)
    lustre: dict[str, dict[str, Any]] = field(default_factory=dict)


@cache
def queries() -> tuple[SnapshotQuery, ...]:
    text = resources.files(__package__).joinpath("queries.toml").read_text(encoding="utf-8")
    return tuple(SnapshotQuery(**row) for row in tomllib.loads(text)["query"])


def ask_prometheus(snapshot: Snapshot, address: str, ask: Ask | None = None) -> tuple[Snapshot, str]:
    """Return the snapshot with the results, and a note if the server could not be queried."""
    machines = machines_of(snapshot.nodes)
    put = ask or (lambda expression: answer(address, of_machines(expression, machines), snapshot.moment))
    try:
        put("vector(1)")
    except (OSError, ValueError) as error:
        return snapshot, f"Prometheus at {address} could not be queried: {error}"
    with ThreadPoolExecutor(AT_ONCE) as pool:
        expressions = [*(query.expression for query in queries()), OCCUPANTS]
        results = list(pool.map(lambda expression: _quietly(put, expression), expressions))
    *answers, occupants = [[] if isinstance(element, Exception) else element for element in results]
    failed = [entry for entry in results if isinstance(entry, Exception)]
    unanswered = {query.field for query, item in zip(queries(), results, strict=False) if isinstance(item, Exception)}
    known_nodes: dict[str, _Known] = {}
    names = _names(snapshot, [row.get("metric") or {} for rows in answers for row in rows])
    for query, rows in zip(queries(), answers, strict=True):
        for row in rows:
            for node in _nodes_of(row.get("metric") or {}, names):
                _take(known_nodes.setdefault(node, _Known()), query, row)
    nodes = tuple(
        _onto(node, known_nodes[node.name], snapshot.run.paths, unanswered) if node.name in known_nodes else node
        for node in snapshot.nodes
    )
    note = "" if known_nodes else f"Prometheus at {address} has no data on the nodes of this run"
    if failed:
        note = f"Prometheus at {address} failed {len(failed)} of {len(results)} queries: {failed[0]}"
    filled = replace(snapshot, nodes=nodes)
    return with_occupants(filled, _occupants(occupants, names)), note


def _occupants(rows: Iterable[Mapping[str, Any]], names: Mapping[str, list[str]]) -> Iterator[CardOccupant]:
    for row in rows:
        labels = row.get("metric") or {}
        card, rank = labels.get("gpu", ""), labels.get("rank", "")
        if card.isdecimal():
            for node in _nodes_of(labels, names):
                yield CardOccupant(node, int(card), labels.get("run", ""), int(rank) if rank.isdecimal() else None)


def _names(snapshot: Snapshot, rows: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return machine name of a series → the nodes of the run on it. The run's own node names may be those of other
    machines: they count only if the server has no data on its hosts."""
    hosts: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        host = node.host_name or node.name
        for name in dict.fromkeys((host, host.partition(".")[0])):
            hosts.setdefault(name, []).append(node.name)
    if any(_nodes_of(labels, hosts) for labels in rows):
        return hosts
    return {node.name: [node.name] for node in snapshot.nodes}


def machines_of(nodes: Iterable[SnapshotNode]) -> str:
    """Return a regular expression for the label node, with or without a domain."""
    names = [name.partition(".")[0] for node in nodes for name in (node.host_name, node.name) if name]
    return f"(?:{'|'.join(map(re.escape, dict.fromkeys(names)))})(?:[.].*)?"


def of_machines(expression: str, machines: str) -> str:
    """Restrict an expression to these machines, and to series without a label node, whose machine is known only from
    the result."""
    if not _METRIC.search(expression):
        return expression

    def matching(matcher: str) -> str:
        return _METRIC.sub(lambda item: f"{item[1]}{{{','.join(filter(None, (item[2], matcher)))}}}", expression)

    named, nameless = matching(f"node=~{json.dumps(machines)}"), matching('node=""')
    return f"({named}) or ({nameless})"


def _quietly(ask: Ask, expression: str) -> list[dict[str, Any]] | Exception:
    try:
        return ask(expression)
    except (OSError, ValueError) as error:
        return error


def answer(address: str, expression: str, moment: float) -> list[dict[str, Any]]:
    """Return the rows of an instant query. ValueError if the response is not that of Prometheus."""
    # POST, because the names of a thousand machines are too long for a URL.
    arguments = urllib.parse.urlencode({"query": " ".join(expression.split()), "time": f"{moment:.3f}"})
    request = urllib.request.Request(f"{address.rstrip('/')}/api/v1/query", data=arguments.encode())
    if urllib.parse.urlsplit(address).scheme not in ("http", "https"):
        raise ValueError(f"{address!r} is not the URL of a Prometheus, such as http://127.0.0.1:9090")
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
        document = json.loads(response.read(ANSWER_BYTES))
    if not isinstance(document, dict) or document.get("status") != "success":
        raise ValueError("the response is not from Prometheus")
    rows = (document.get("data") or {}).get("result")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _nodes_of(labels: Mapping[str, str], names: Mapping[str, list[str]]) -> list[str]:
    """Return the nodes of the run on the machine of a series."""
    messages = [labels.get(name, "") for name in ("node", "Hostname", "nodename")]
    for name in (*messages, labels.get("instance", "").rpartition(":")[0]):
        result = names.get(name) or names.get(name.partition(".")[0])
        if name and result:
            return result
    return []


def _take(known_node: _Known, query: SnapshotQuery, row: Mapping[str, Any]) -> None:
    labels = row.get("metric") or {}
    value = _number((row.get("value") or [None, None])[1])
    if value is None:
        return
    if query.of == "filesystem" and labels.get("fstype") in SKIPPED_FILE_SYSTEMS:
        return
    key = {
        "gpu": labels.get("gpu", ""),
        "fabric": labels.get("device", ""),
        "host": "host",
        "filesystem": labels.get("mountpoint", ""),
        "lustre": str(labels.get("target", "")).partition("-")[0],
    }[query.of]
    if not key or (query.of == "gpu" and not key.isdecimal()):
        return
    part: dict[str, Any] = getattr(known_node, query.of).setdefault(key, {})
    if query.label:
        label = labels.get(query.label, "")
        if query.field == "xids" and label.isdecimal():
            part.setdefault("xids", {}).setdefault(int(label), value or None)
        elif query.field == "throttle" and label:
            part.setdefault("throttle", []).append(label)
        elif label:
            part.setdefault(query.field, label)
    elif query.of == "lustre" and query.field in part:
        # A file system has many targets: programs wait for the slowest; rates add up.
        both = (part[query.field], value)
        part[query.field] = sum(both) if query.field.endswith("bytes_per_second") else max(both)
    else:
        part.setdefault(query.field, value)
    if query.of == "gpu":
        part.setdefault("uuid", labels.get("UUID") or labels.get("uuid") or "")
    if query.of == "filesystem":
        part.setdefault("kind", labels.get("fstype", ""))


def _onto(
    node: SnapshotNode, known_node: _Known, paths: Mapping[str, Sequence[str]], unanswered: Set[str]
) -> SnapshotNode:
    """Add results to a node. Values from the node itself are newer and stay; `unanswered` fields stay unknown."""
    gpus = {gpu.index: gpu for gpu in node.gpus}
    for key, part in known_node.gpu.items():
        values = dict(part)
        xids = tuple(SnapshotXid(code, moment) for code, moment in values.pop("xids", {}).items())
        values = {**values, **({"xids": xids} if xids else {})}
        if "throttle" in values or (part.get("sm_clock_mhz") is not None and "throttle" not in unanswered):
            values["throttle"] = tuple(values.get("throttle", ()))
        gpus[int(key)] = _filled(gpus.get(int(key)) or SnapshotGpu(int(key)), values)
    fabric = {device.name: device for device in node.fabric}
    for name, part in known_node.fabric.items():
        fabric[name] = _filled(fabric.get(name) or SnapshotFabricDevice(name), part)
    mounts = {mount.path: mount for mount in node.mounts}
    for path, part in known_node.filesystem.items():
        mounts[path] = _filled(mounts.get(path) or SnapshotMount(path, part.get("kind", "")), part)
    for name, part in known_node.lustre.items():
        path = next((item.path for item in mounts.values() if item.kind == "lustre"), name)
        mounts[path] = _filled(mounts.get(path) or SnapshotMount(path, "lustre"), part)
    host = _filled(node.host or SnapshotHost(), known_node.host["host"]) if known_node.host else node.host
    return replace(
        node,
        gpus=tuple(gpus[index] for index in sorted(gpus)),
        gpus_known=node.gpus_known or bool(known_node.gpu),
        fabric=tuple(fabric.values()),
        mounts=with_holders(tuple(mounts.values()), paths),
        host=host,
    )


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    """Set fields that are not known yet, converted to the type of the field."""
    hints = hints_of(part.__class__)
    changes = {}
    for item in fields(part):
        if item.name in values and getattr(part, item.name) in (None, "", ()):
            changes[item.name] = _as(hints[item.name], values[item.name])
    return replace(part, **changes)


def _as(kind: Any, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    kinds: Iterable[Any] = typing.get_args(kind) or (kind,)
    if bool in kinds:
        return value != 0.0
    return round(value) if int in kinds else value


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
