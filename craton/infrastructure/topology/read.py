"""Parse descriptions of a network into a `Topology`: Slurm's text and files, Kubernetes labels, EC2's topology.

Guarantees: pure; a node without a position becomes `unplaced`, never guessed; other or incomplete text is rejected with
a list of what is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from craton.infrastructure.errors import TopologyError
from craton.infrastructure.topology.hostlist import expand
from craton.infrastructure.topology.topology import DOMAIN, ZONE, Topology, level_names, natural, tree_of

ZONE_LABEL = "topology.kubernetes.io/zone"
HOSTNAME_LABEL = "kubernetes.io/hostname"
_EKS = re.compile(r"topology\.k8s\.aws/network-node-layer-(?P<number>[0-9]+)")  # 1 is the broadest
_TOPOGRAPH = re.compile(r"fabric\.topograph\.run/tier-(?P<number>[0-9]+)")  # from 1.0 on; 0 is the closest
_TOPOGRAPH_DOMAIN = "accelerator.topograph.run/domain"
_OLD_TOPOGRAPH = ("core", "spine", "leaf")  # network.topology.nvidia.com/NAME, up to 0.5
_OLD_PREFIX = "network.topology.nvidia.com/"
_FILES = (
    "the output of `scontrol show topology`, a topology.conf or topology.yaml, "
    "`kubectl get nodes -o json`, or `aws ec2 describe-instance-topology --output json`"
)


def read_topology(text: str, names: Mapping[str, str] | None = None) -> Topology:
    """Parse any text that the readers below understand; `names` is for EC2, instance → node."""
    try:
        return _read(text, names)
    except TopologyError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        # The readers assume parts that a hand-edited file may lack.
        lacks = f"lacks {error}" if isinstance(error, KeyError) else f"has a part of the wrong kind ({error})"
        raise TopologyError(f"it looks like a topology, but {lacks}; give {_FILES}, unmodified") from None


def _read(text: str, names: Mapping[str, str] | None) -> Topology:
    if re.search(r"^\s*(?:SwitchName|BlockName)\s*=", text, re.IGNORECASE | re.MULTILINE):
        return read_slurm(text)
    try:
        document = json.loads(text) if text.lstrip()[:1] in ("{", "[") else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise TopologyError(f"not Slurm text, JSON or YAML ({str(error)[:80]}); give {_FILES}") from None
    if isinstance(document, list) and document and isinstance(document[0], dict) and "topology" in document[0]:
        return read_slurm_yaml(document)
    if isinstance(document, dict) and "Instances" in document:
        return read_ec2(document, names)
    items = document.get("items") if isinstance(document, dict) else document
    if isinstance(items, list) and items and all(isinstance(item, dict) and "metadata" in item for item in items):
        return read_kubernetes(items)
    raise TopologyError(f"no topology found in it; give {_FILES}")


def read_slurm(text: str) -> Topology:
    """Parse `scontrol show topology` or a topology.conf, with tree or block topology."""
    switches: dict[str, dict[str, str]] = {}
    blocks: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        fields = {key.lower(): value for key, value in re.findall(r"(\w+)\s*=\s*(\S+)", line.split("#")[0])}
        if "switchname" in fields:
            for name in expand(fields["switchname"]):
                switches[name] = fields
        elif "blockname" in fields:
            blocks[fields["blockname"]] = fields.get("nodes", "")
    if blocks:
        return _blocks(blocks)
    children = {name: expand(fields["switches"]) for name, fields in switches.items() if fields.get("switches")}
    # Above the leaves scontrol lists every node again; only switches without switches below them hold nodes.
    nodes = {name: expand(fields.get("nodes", "")) for name, fields in switches.items() if name not in children}
    return _switches(children, nodes)


def read_slurm_yaml(document: list[dict[str, Any]]) -> Topology:
    """Parse Slurm's topology.yaml (25.05 and later): of several topologies the cluster's default, else the first."""
    chosen = next((entry for entry in document if entry.get("cluster_default")), document[0])
    if "block" in chosen:
        return _blocks({str(block["block"]): str(block["nodes"]) for block in chosen["block"]["blocks"]})
    if "tree" not in chosen:
        raise TopologyError(f"topology {chosen['topology']!r} is neither a tree nor blocks: it has no switches")
    switches = chosen["tree"]["switches"]
    children = {str(entry["switch"]): expand(str(entry["children"])) for entry in switches if "children" in entry}
    nodes = {str(entry["switch"]): expand(str(entry["nodes"])) for entry in switches if "nodes" in entry}
    return _switches(children, nodes)


def read_kubernetes(nodes: Iterable[Mapping[str, Any]]) -> Topology:
    """Parse node objects with labels of EKS or of topograph, old or new: the family that most nodes have."""
    labels = {str(node["metadata"]["name"]): dict(node["metadata"].get("labels") or {}) for node in nodes}
    families = sorted((_eks(labels), _topograph(labels), _old_topograph(labels)), key=lambda family: -len(family[1]))
    keys, members, domain = families[0]
    if not members:
        raise TopologyError(
            f"none of {len(labels)} nodes has a topology label; EKS sets "
            "topology.k8s.aws/network-node-layer-N, NVIDIA's topograph fabric.topograph.run/tier-N on other clusters"
        )
    zones = {name: labels[name][ZONE_LABEL] for name in members if ZONE_LABEL in labels[name]}
    zones = zones if len(zones) == len(members) else {}
    domains = {name: labels[name][domain] for name in members if domain in labels[name]}
    labels_by_level = dict(zip(level_names(len(keys)), keys, strict=True))
    if zones:
        labels_by_level[ZONE] = ZONE_LABEL
    if domains:
        labels_by_level[DOMAIN] = domain
    unplaced = tuple(sorted(labels.keys() - set(members), key=natural))
    paths = {name: [labels[name][key] for key in keys] for name in members}
    return tree_of(paths, zones, domains, labels=labels_by_level, unplaced=unplaced)


def read_ec2(document: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Topology:
    """Parse the response of EC2's DescribeInstanceTopology. `names`: instance → node, for all nodes of the cluster;
    without it nodes are named by their instance.

    Instance types differ in how many layers EC2 shows; a mixed response gives the layers that all have.
    """
    asked = [entry for entry in document["Instances"] if names is None or entry["InstanceId"] in names]
    if document["Instances"] and not asked:
        raise TopologyError("none of its instances is in the names; they may be of another region or cluster")
    instances = [entry for entry in asked if entry.get("NetworkNodes")]
    if not instances:
        raise TopologyError("no instance in it has NetworkNodes; only running instances of types such as p5 have them")
    layers = min(len(entry["NetworkNodes"]) for entry in instances)
    called = {entry["InstanceId"]: (names or {}).get(entry["InstanceId"], entry["InstanceId"]) for entry in instances}
    return tree_of(
        {called[entry["InstanceId"]]: entry["NetworkNodes"][:layers] for entry in instances},
        {called[entry["InstanceId"]]: entry.get("AvailabilityZone", "") for entry in instances},
        # an UltraServer's instances share the id of their Capacity Block; other types do not have it
        {called[entry["InstanceId"]]: entry["CapacityBlockId"] for entry in instances if entry.get("CapacityBlockId")},
        unplaced=tuple(entry["InstanceId"] for entry in asked if not entry.get("NetworkNodes")),
    )


def read_instance_names(text: str) -> dict[str, str]:
    """Parse instance → node: a JSON mapping, or the output of `aws ec2 describe-instances` (private host names)."""
    try:
        document = json.loads(text)
        if "Reservations" not in document:
            return {str(instance): str(name) for instance, name in document.items()}
        instances = [entry for group in document["Reservations"] for entry in group["Instances"]]
        return {entry["InstanceId"]: entry["PrivateDnsName"].split(".")[0] for entry in instances}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise TopologyError(
            'names of instances are a JSON mapping {"i-0123": "node1"} or the output of `aws ec2 describe-instances`'
        ) from None


def _blocks(blocks: Mapping[str, str]) -> Topology:
    return tree_of({node: (name,) for name, nodes in blocks.items() for node in expand(nodes)}, kind="block")


def _switches(children: Mapping[str, list[str]], nodes: Mapping[str, list[str]]) -> Topology:
    above = {child: parent for parent, below in children.items() for child in below}

    def path(switch: str) -> list[str]:
        upward = [switch]
        while upward[-1] in above:
            if above[upward[-1]] in upward:
                raise TopologyError(f"switch {upward[-1]!r} is below itself; fix topology.conf")
            upward.append(above[upward[-1]])
        return list(reversed(upward))

    if not nodes:
        raise TopologyError(f"no switch holds nodes; give {_FILES}")
    return tree_of({node: path(switch) for switch, below in nodes.items() for node in below})


Family = tuple[list[str], list[str], str]  # label keys, broadest first; nodes that have them all; the domain's label


def _eks(labels: Mapping[str, Mapping[str, str]]) -> Family:
    return _numbered(labels, _EKS, "", broadest_first=True)


def _topograph(labels: Mapping[str, Mapping[str, str]]) -> Family:
    return _numbered(labels, _TOPOGRAPH, _TOPOGRAPH_DOMAIN, broadest_first=False)


def _numbered(
    labels: Mapping[str, Mapping[str, str]], pattern: re.Pattern[str], domain: str, broadest_first: bool
) -> Family:
    """Return labels with a level number; in a cluster of several node types, the levels that all of them have."""
    layers = {name: {key for key in own if pattern.fullmatch(key)} for name, own in labels.items()}
    members = [name for name, keys in layers.items() if keys]
    shared = set.intersection(*(layers[name] for name in members)) if members else set()

    def number(key: str) -> int:
        match = pattern.fullmatch(key)
        assert match
        return int(match["number"])

    return sorted(shared, key=number, reverse=not broadest_first), members if shared else [], domain


def _old_topograph(labels: Mapping[str, Mapping[str, str]]) -> Family:
    members = [name for name, own in labels.items() if _OLD_PREFIX + "leaf" in own]
    keys = [
        _OLD_PREFIX + level
        for level in _OLD_TOPOGRAPH
        if members and all(_OLD_PREFIX + level in labels[name] for name in members)
    ]
    return keys, members, _OLD_PREFIX + "accelerator"
