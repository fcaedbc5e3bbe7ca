"""Network topology: the position of every node in a tree of named switches, independent of its source.

A `Topology` is the same whether Slurm, Kubernetes labels or EC2 described it: levels from the broadest to the closest,
and for each node the name of its switch on every level. `read` parses one, `write` formats it for a scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

ZONE = "zone"
DOMAIN = "domain"  # GPUs of several nodes on one NVLink
_UPWARDS = ("leaf", "spine", "core")


@dataclass(frozen=True)
class TopologyPath:
    """One node: its switch on every level, broadest first. "": no switch on that level."""

    node: str
    path: tuple[str, ...]
    domain: str = ""  # the NVLink domain, where it spans nodes


@dataclass(frozen=True)
class Topology:
    """Nodes below switches. `levels` names the entries of every path."""

    levels: tuple[str, ...]  # broadest first, the last is the leaf: ("spine", "leaf")
    places: tuple[TopologyPath, ...]
    kind: Literal["tree", "block"] = "tree"
    labels: Mapping[str, str] = field(default_factory=dict)  # level → the Kubernetes label it was read from
    unplaced: tuple[str, ...] = ()  # nodes without a known position
    renamed: bool = False  # two switches had the same name, so names are longer than the original labels

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(place.node for place in self.places)

    def groups(self, level: str) -> dict[str, list[str]]:
        """Return switch → its nodes on one level; with DOMAIN, NVLink domain → its nodes."""
        result: dict[str, list[str]] = {}
        for place in self.places:
            name = place.domain if level == DOMAIN else place.path[self.levels.index(level)]
            if name:
                result.setdefault(name, []).append(place.node)
        return result

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Return node → its switches, broadest first, the NVLink domain last: the sort key of nodes."""
        return {place.node: (*place.path, place.domain) if place.domain else place.path for place in self.places}

    def switches(self, level: str) -> dict[str, str]:
        """Return node → its switch on one level."""
        index = self.levels.index(level)
        return {place.node: place.path[index] for place in self.places}

    def domains_are_nested(self) -> bool:
        """Whether every NVLink domain is inside one leaf, so that it is one more level."""
        leaves: dict[str, set[str]] = {}
        for place in self.places:
            leaves.setdefault(place.domain, set()).add(place.path[-1] if place.path else "")
        return "" not in leaves and all(len(names) == 1 for names in leaves.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "levels": list(self.levels),
            "labels": dict(self.labels),
            "nodes": [asdict(place) | {"path": list(place.path)} for place in self.places],
            "unplaced": list(self.unplaced),
        }

    def sentences(self) -> list[str]:
        """Return a summary: the number of switches on each level and their sizes."""
        lines = [f"{len(self.places)} node{'s' if len(self.places) != 1 else ''} in a {self.kind} topology"]
        for level in (*self.levels, *([DOMAIN] if any(place.domain for place in self.places) else ())):
            groups = self.groups(level)
            sizes = Counter(len(nodes) for nodes in groups.values())
            spread = ", ".join(f"{count} x {size}" for size, count in sorted(sizes.items(), reverse=True))
            label = f" ({self.labels[level]})" if level in self.labels else ""
            lines.append(f"{level}{label}: {len(groups)}, of {spread} nodes")
        if self.unplaced:
            shown = ", ".join(self.unplaced[:5]) + (" …" if len(self.unplaced) > 5 else "")
            lines.append(f"{len(self.unplaced)} nodes have no known position and are left out: {shown}")
        return lines


def level_names(depth: int) -> tuple[str, ...]:
    """Return names of `depth` switch levels, broadest first: leaf is the closest, then spine, core, core-2, …"""
    names = [*_UPWARDS, *(f"core-{number}" for number in range(2, depth))][:depth]
    return tuple(reversed(names))


def tree_of(
    paths: Mapping[str, Iterable[str]],
    zones: Mapping[str, str] | None = None,
    domains: Mapping[str, str] | None = None,
    **facts: Any,
) -> Topology:
    """Build a tree from each node's switches, broadest first. Paths of different length are aligned at the leaf."""
    paths_by_node = {node: tuple(path) for node, path in paths.items()}
    depth = max((len(path) for path in paths_by_node.values()), default=0)
    levels = level_names(depth)
    if zones:
        levels = (ZONE, *levels)
    places = []
    for node in sorted(paths_by_node, key=natural):
        path = ("",) * (depth - len(paths_by_node[node])) + paths_by_node[node]
        if zones:
            path = (zones.get(node, ""), *path)
        places.append(TopologyPath(node, path, (domains or {}).get(node, "")))
    return _with_unique_names(Topology(levels, tuple(places), **facts))


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts g2 before g10."""
    parts: list[tuple[int, int, str]] = []
    digits = word = ""
    for character in text + "\0":
        if character.isdecimal():
            if word:
                parts.append((1, 0, word))
                word = ""
            digits += character
        else:
            if digits:
                parts.append((0, int(digits), digits))
                digits = ""
            if character != "\0":
                word += character
    return tuple(parts + ([(1, 0, word)] if word else []))


def _with_unique_names(topology: Topology) -> Topology:
    """Make switch names unique: leaf "1" of spine "a" and leaf "1" of spine "b" would be one switch to a scheduler."""
    parents: dict[tuple[int, str], set[tuple[str, ...]]] = {}
    for place in topology.places:
        for index, name in enumerate(place.path):
            parents.setdefault((index, name), set()).add(place.path[:index])
    at: dict[str, set[int]] = {}
    for index, name in parents:
        at.setdefault(name, set()).add(index)

    def unique(path: tuple[str, ...], index: int) -> str:
        name = path[index]
        if not name or (len(parents[index, name]) == 1 and len(at[name]) == 1):
            return name
        return "-".join(part for part in path[: index + 1] if part)

    places = tuple(
        TopologyPath(place.node, tuple(unique(place.path, index) for index in range(len(place.path))), place.domain)
        for place in topology.places
    )
    return replace(topology, places=places, renamed=places != topology.places)
