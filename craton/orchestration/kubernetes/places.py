"""The position of a cluster's nodes in the network topology, from their labels. Pure.

A pod knows its node's name but not its labels; reading them needs permission for all nodes of the cluster. So the
submitting user reads them, if permitted, and sends them along: the pods order themselves by them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from craton.infrastructure.topology import read_topology
from craton.job import Job
from craton.orchestration.kubernetes.target import DEFAULT_LABELS

LEVELS = ("zone", "spine", "leaf")  # levels that a cluster file can name, broadest first
# GPUs of several nodes on one NVLink: topograph's two families, and NVIDIA's own feature discovery.
DOMAIN_LABELS = (
    "accelerator.topograph.run/domain",
    "network.topology.nvidia.com/accelerator",
    "nvidia.com/gpu.clique",
)


@dataclass(frozen=True)
class Places:
    levels: tuple[str, ...] = ()  # broadest first
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)  # node of the cluster → its switches
    why: str = ""  # why nothing is known

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def level_labels(job: Job) -> dict[str, str]:
    """Return level → its label in the cluster file."""
    file = job.cluster.file
    stated = {level: getattr(file.levels, level) for level in LEVELS} if file else {}
    return {level: numbers.label for level, numbers in stated.items() if numbers and numbers.label}


def places_of(nodes: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> Places:
    """Read the topology from Node objects by the cluster file's labels, or without one for the leaf by those of EKS and
    topograph. A node without the labels has no place. TopologyError if no node has one."""
    own = {str(node["metadata"]["name"]): dict(node["metadata"].get("labels") or {}) for node in nodes}
    if not own:
        return Places(why="the cluster had no node of the job's instance type when the run was submitted")
    if "leaf" in labels:
        labels_of_levels = dict(labels)
        placed = [name for name, entry in own.items() if all(entry.get(label) for label in labels_of_levels.values())]
        if not placed:
            wanted = " and ".join(f"the label {label}" for label in labels.values())
            return Places(why=f"no node has {wanted}, which the cluster file's `levels:` name")
        labels_of_levels = _if_all_have(own, placed, {"zone": (DEFAULT_LABELS["zone"],)}) | labels_of_levels
    else:
        items = [{"kind": "Node", "metadata": {"name": name, "labels": item}} for name, item in own.items()]
        topology = read_topology(json.dumps({"kind": "NodeList", "items": items}))
        labels_of_levels, placed = dict(topology.labels), list(topology.nodes)
        labels_of_levels.pop("domain", None)
    labels_of_levels |= _if_all_have(own, placed, {"domain": DOMAIN_LABELS})
    levels = sorted(
        labels_of_levels, key=lambda level: (level == "domain") - (level == "zone")
    )  # stable: the others keep their order
    return Places(
        tuple(levels), {name: tuple(own[name][labels_of_levels[level]] for level in levels) for name in placed}
    )


def read_places(path: Path | None) -> Places:
    """Read the topology that was sent along with the run."""
    try:
        # Not a file of the run: Kubernetes mounts a ConfigMap as links.
        document = json.loads(path.read_text(encoding="utf-8")) if path else {}
        addresses = {str(node): tuple(map(str, switches)) for node, switches in document["addresses"].items()}
        return Places(tuple(document["levels"]), addresses, str(document["why"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Places(why="no topology was sent along with the run")


def _if_all_have(
    own: Mapping[str, Mapping[str, str]], placed: Iterable[str], wanted: Mapping[str, Iterable[str]]
) -> dict[str, str]:
    """Return level → the first of its labels that all these nodes have."""
    names = list(placed)
    result: dict[str, str] = {}
    for level, choices in wanted.items():
        for label in choices:
            if all(own[name].get(label) for name in names):
                result.setdefault(level, label)
    return result
