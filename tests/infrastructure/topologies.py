"""Networks as others describe them: what Slurm prints, Kubernetes nodes with labels, EC2's answer."""

from __future__ import annotations

from typing import Any

SLURM_TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=g[1-4]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=g[5-8]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=g[1-8] Switches=leaf[1-2]
"""
SLURM_BLOCK = """\
BlockName=b1 BlockIndex=0 Nodes=n[01-18] BlockSize=18
BlockName=b2 BlockIndex=1 Nodes=n[19-36] BlockSize=18
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[01-36] BlockSize=36
"""
EKS = "topology.k8s.aws/network-node-layer-{}"
ZONE = "topology.kubernetes.io/zone"


def node(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}}


def eks_nodes(layers: int = 3) -> list[dict[str, Any]]:
    """Eight nodes: two spines, each with two leaves of two nodes; and one that has no GPU and no place."""
    found = []
    for number in range(8):
        # one network node on the broadest layers, two spines, four leaves
        names = ["nn-top"] * (layers - 2) + [f"nn-spine{number // 4}", f"nn-leaf{number // 2}"]
        labels = {EKS.format(index): name for index, name in enumerate(names, start=1)}
        found.append(node(f"ip-10-0-0-{number}.ec2.internal", **labels, **{ZONE: "us-east-2a"}))
    return [*found, node("system", **{ZONE: "us-east-2a"})]


def topograph_nodes() -> list[dict[str, Any]]:
    """Labels of topograph 1.0: tier 0 is the closest; four nodes of an NVLink domain hang on one leaf."""
    return [
        node(
            f"n{number}",
            **{
                "fabric.topograph.run/tier-0": f"leaf{number // 4}",
                "fabric.topograph.run/tier-1": "spine",
                "accelerator.topograph.run/domain": f"nvl{number // 2}",
            },
        )
        for number in range(8)
    ]


def old_topograph_nodes() -> list[dict[str, Any]]:
    prefix = "network.topology.nvidia.com/"
    return [
        node(
            f"n{number}",
            **{
                prefix + "leaf": f"leaf{number // 2}",
                prefix + "spine": "spine",
                prefix + "accelerator": f"nvl{number}",
            },
        )
        for number in range(4)
    ]


def ec2_answer() -> dict[str, Any]:
    return {
        "Instances": [
            {
                "InstanceId": f"i-{number:017x}",
                "InstanceType": "p5.48xlarge",
                "NetworkNodes": ["nn-1", f"nn-2{number // 4}", f"nn-3{number // 2}"],
                "AvailabilityZone": "us-east-2a",
                "ZoneId": "use2-az1",
            }
            for number in range(8)
        ]
    }
