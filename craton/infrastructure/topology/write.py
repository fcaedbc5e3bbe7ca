"""Write a `Topology` for a scheduler: Slurm's files, Kueue's, Volcano's and KAI's objects, a cluster file's levels.

Guarantees: pure; the same topology gives the same text; Slurm's files parse back to the same tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

import yaml

from craton.infrastructure.errors import TopologyError
from craton.infrastructure.topology.hostlist import compress
from craton.infrastructure.topology.read import HOSTNAME_LABEL
from craton.infrastructure.topology.topology import DOMAIN, ZONE, Topology, natural
from craton.yaml_text import to_yaml

Manifest = dict[str, Any]
ROOT = "fabric"  # the switch added above several: Slurm never runs a job across switches without a common parent


def slurm_tree(topology: Topology) -> str:
    """topology.conf for TopologyPlugin=topology/tree."""
    lines = ["# TopologyPlugin=topology/tree; belongs beside slurm.conf. Written by `craton cluster discover`."]
    for name, key, members in _slurm_switches(topology):
        lines.append(f"SwitchName={name} {'Nodes' if key == 'nodes' else 'Switches'}={compress(members)}")
    return "\n".join(lines) + "\n"


def slurm_block(topology: Topology) -> str:
    """topology.conf for TopologyPlugin=topology/block: NVLink domains where they span nodes, else leaves."""
    blocks, sizes = _slurm_blocks(topology)
    lines = ["# TopologyPlugin=topology/block; belongs beside slurm.conf. Written by `craton cluster discover`."]
    lines += [f"BlockName={name} Nodes={compress(nodes)}" for name, nodes in blocks.items()]
    lines.append(f"BlockSizes={','.join(map(str, sizes))}")
    return "\n".join(lines) + "\n"


def slurm_yaml(topology: Topology) -> str:
    """topology.yaml of Slurm 25.05 and later: the tree is the default, NVLink domains are blocks beside it."""
    tree = {
        "switches": [
            {"switch": name, "nodes" if key == "nodes" else "children": compress(members)}
            for name, key, members in _slurm_switches(topology)
        ]
    }
    document: list[Manifest] = [{"topology": "tree", "cluster_default": True, "tree": tree}]
    if topology.kind == "block" or any(place.domain for place in topology.places):
        blocks, sizes = _slurm_blocks(topology)
        listed = [{"block": name, "nodes": compress(nodes)} for name, nodes in blocks.items()]
        block = {"topology": "block", "cluster_default": False, "block": {"block_sizes": sizes, "blocks": listed}}
        if topology.kind == "block":
            document = [{**block, "cluster_default": True}]
        else:
            document.append(block)
    return to_yaml(document)


def kueue_topology(labels: Mapping[str, str], name: str) -> Manifest:
    """Return Kueue's Topology: level → label, broadest first; the host name last, as node replacement requires."""
    levels = [{"nodeLabel": label} for label in _ordered(labels)]
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Topology",
        "metadata": {"name": dns_name(name)},
        "spec": {"levels": levels},
    }


def kai_topology(labels: Mapping[str, str], name: str) -> Manifest:
    """KAI's Topology, whose levels may carry our own names (from KAI 0.17 on)."""
    by_label = {label: level for level, label in labels.items()}
    levels = [
        {"nodeLabel": label, **({"alias": by_label[label]} if label in by_label else {})} for label in _ordered(labels)
    ]
    return {
        "apiVersion": "kai.scheduler/v1alpha1",
        "kind": "Topology",
        "metadata": {"name": dns_name(name)},
        "spec": {"levels": levels},
    }


def volcano_hypernodes(topology: Topology) -> list[Manifest]:
    """Volcano's HyperNodes: tier 1 holds nodes, every further tier the HyperNodes below it."""
    manifests: list[Manifest] = []
    levels = _inner_levels(topology)
    for tier, level in enumerate(reversed(levels), start=1):
        label = topology.labels.get(level)
        below = levels[len(levels) - tier + 1] if tier > 1 else ""
        inside = topology.switches(below) if below else {}
        for switch, nodes in sorted(topology.groups(level).items(), key=lambda item: natural(item[0])):
            if tier > 1:
                inner = {inside[node] for node in nodes} - {""}
                members = [_exact("HyperNode", dns_name(f"{below}-{one}")) for one in sorted(inner, key=natural)]
            elif label and not topology.renamed:
                members = [{"type": "Node", "selector": {"labelMatch": {"matchLabels": {label: switch}}}}]
            else:
                members = [_exact("Node", node) for node in nodes]
            manifests.append(
                {
                    "apiVersion": "topology.volcano.sh/v1alpha1",
                    "kind": "HyperNode",
                    "metadata": {"name": dns_name(f"{level}-{switch}")},
                    "spec": {"tier": tier, "tierName": level, "members": members},
                }
            )
    return manifests


def level_section(topology: Topology) -> str:
    """Return `levels:` of a cluster file: the names in a job's `placement`, mapped to this cluster's names."""
    levels: dict[str, dict[str, Any]] = {}
    if any(topology.labels.values()):
        levels["node"] = {"label": HOSTNAME_LABEL}
    zone = ZONE if ZONE in topology.levels else next((name for name in topology.levels if name == "core"), "")
    inner = list(reversed(_inner_levels(topology)))
    for name, level in (("leaf", "leaf"), ("spine", "spine"), ("zone", zone)):
        if level not in topology.levels:
            continue
        groups = topology.groups(level)
        facts: dict[str, Any] = {"nodes": max(len(nodes) for nodes in groups.values())}
        if level in topology.labels:
            facts["label"] = topology.labels[level]
        elif prefix := _prefix(topology, level):
            facts["switch"] = prefix
        if level in inner:
            facts["tier"] = inner.index(level) + 1
        levels[name] = facts
    return "levels:\n" + "".join(f"  {name}: {_flow(facts)}\n" for name, facts in levels.items())


def written(topology: Topology, form: str, name: str = "fabric") -> tuple[str, str]:
    """(file name, text) of one of FORMATS."""
    if form not in FORMATS:
        raise TopologyError(f"{form!r} is not a format; allowed: {', '.join(FORMATS)}")
    if not topology.places:
        raise TopologyError("the topology has no nodes; nothing can be written")
    return FORMATS[form](topology, name)


FORMATS: dict[str, Callable[[Topology, str], tuple[str, str]]] = {
    "slurm-tree": lambda topology, name: ("topology.conf", slurm_tree(topology)),
    "slurm-block": lambda topology, name: ("topology.conf", slurm_block(topology)),
    "slurm-yaml": lambda topology, name: ("topology.yaml", slurm_yaml(topology)),
    "kueue": lambda topology, name: (
        "kueue-topology.yaml",
        to_yaml(kueue_topology(_labels(topology), name)),
    ),
    "kai": lambda topology, name: ("kai-topology.yaml", to_yaml(kai_topology(_labels(topology), name))),
    "volcano": lambda topology, name: ("volcano-hypernodes.yaml", to_yaml(*volcano_hypernodes(topology))),
    "levels": lambda topology, name: ("levels.yaml", level_section(topology)),
}


def dns_name(text: str) -> str:
    """Return a valid Kubernetes name: lowercase letters, digits, '-' and '.', at most 63 characters."""
    return re.sub(r"[^a-z0-9.-]+", "-", text.lower()).strip("-.")[:63].rstrip("-.") or "x"


def _labels(topology: Topology) -> dict[str, str]:
    """Level → label, broadest first, the NVLink domain last where it is a level of the same tree."""
    labels = {level: topology.labels[level] for level in topology.levels if level in topology.labels}
    if not labels:
        raise TopologyError(
            "Kueue and KAI identify levels by node labels, and this topology has none; discover it --from kubernetes, "
            "or label the nodes first"
        )
    if DOMAIN in topology.labels and topology.domains_are_nested():
        labels[DOMAIN] = topology.labels[DOMAIN]
    return labels


def _ordered(labels: Mapping[str, str]) -> list[str]:
    return [*(label for label in labels.values() if label != HOSTNAME_LABEL), HOSTNAME_LABEL]


def _inner_levels(topology: Topology) -> list[str]:
    """Return levels that distinguish nodes: a level with one switch above another such level adds nothing."""
    levels = [level for level in topology.levels if topology.groups(level) and level != ZONE]
    while len(levels) > 1 and len(topology.groups(levels[0])) == 1 and len(topology.groups(levels[1])) == 1:
        levels.pop(0)
    return levels


def _exact(kind: str, name: str) -> Manifest:
    return {"type": kind, "selector": {"exactMatch": {"name": name}}}


def _slurm_switches(topology: Topology) -> list[tuple[str, str, list[str]]]:
    """(switch, "nodes" or "switches", its members), leaves first, and a root above several tops."""
    for name in {name for place in topology.places for name in (*place.path, place.node)}:
        if name and not re.fullmatch(r"[A-Za-z0-9_.:-]+", name):
            raise TopologyError(f"{name!r} is not a valid name in Slurm; use letters, digits, '_', '-', '.'")
    rows: list[tuple[str, str, list[str]]] = []
    tops: set[str] = set()
    levels = list(reversed(topology.levels))
    for depth, level in enumerate(levels):
        inside = topology.switches(levels[depth - 1]) if depth else {}
        for switch, nodes in sorted(topology.groups(level).items(), key=lambda item: natural(item[0])):
            if depth == 0:
                rows.append((switch, "nodes", nodes))
            else:
                inner = {inside[node] for node in nodes} - {""}
                rows.append((switch, "switches", sorted(inner, key=natural)))
                tops -= inner
            tops.add(switch)
    if len(tops) > 1:
        rows.append((ROOT, "switches", sorted(tops, key=natural)))
    return rows


def _slurm_blocks(topology: Topology) -> tuple[dict[str, list[str]], list[int]]:
    """Return blocks and Slurm's BlockSizes: the smallest block, and its doublings up to the whole cluster."""
    domains = topology.groups(DOMAIN)
    blocks = domains if sum(map(len, domains.values())) == len(topology.places) else topology.groups("leaf")
    base = min(len(nodes) for nodes in blocks.values())
    sizes = [base]
    while 2 * sizes[-1] <= base * len(blocks):
        sizes.append(2 * sizes[-1])
    return dict(sorted(blocks.items(), key=lambda item: natural(item[0]))), sizes


def _prefix(topology: Topology, level: str) -> str:
    """Return the common prefix of all switches of a level, if no switch of another level has it."""
    names = list(topology.groups(level))
    prefix = names[0]
    if len(names) > 1:
        same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
        prefix = "".join(letters[0] for letters in same).rstrip("0123456789")
    others = {name for other in topology.levels if other != level for name in topology.groups(other)}
    return prefix if prefix and not any(name.startswith(prefix) for name in others) else ""


def _flow(facts: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(facts), default_flow_style=True, sort_keys=False, width=1000).strip()
