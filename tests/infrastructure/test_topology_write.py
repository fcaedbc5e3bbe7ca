"""A topology in the words of every scheduler, checked by Slurm itself and by the schemas of the others."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from counted_calls import counted_calls
from manifests import check_manifests
from topologies import SLURM_BLOCK, SLURM_TREE, ec2_answer, eks_nodes, topograph_nodes
from waiting import wait_until

from craton.infrastructure import TopologyError
from craton.infrastructure.topology import read_topology
from craton.infrastructure.topology import written as written_topology
from craton.infrastructure.topology.read import read_ec2, read_kubernetes, read_slurm
from craton.infrastructure.topology.topology import Topology, tree_of
from craton.infrastructure.topology.write import FORMATS as TOPOLOGY_FORMATS
from craton.infrastructure.topology.write import volcano_hypernodes
from craton.job.cluster import load_cluster

TOPOLOGIES: dict[str, Topology] = {
    "slurm": read_slurm(SLURM_TREE),
    "eks": read_kubernetes(eks_nodes()),
    "topograph": read_kubernetes(topograph_nodes()),
    "ec2": read_ec2(ec2_answer()),
    "block": read_slurm(SLURM_BLOCK),
}
LABELLED = ("eks", "topograph")


@pytest.mark.parametrize("form", TOPOLOGY_FORMATS)
@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_golden(golden: Callable[[str, str], None], kind: str, form: str) -> None:
    if form in ("kueue", "kai") and kind not in LABELLED:
        with pytest.raises(TopologyError, match="node labels"):
            written_topology(TOPOLOGIES[kind], form)
        return
    name, text = written_topology(TOPOLOGIES[kind], form)
    golden(f"topology-{kind}-{form}{Path(name).suffix}", text)


@pytest.mark.parametrize("form", ["kueue", "kai", "volcano"])
@pytest.mark.parametrize("kind", LABELLED)
def test_objects_are_what_their_schemas_allow(kind: str, form: str) -> None:
    assert check_manifests(written_topology(TOPOLOGIES[kind], form)[1])


@pytest.mark.parametrize("form", ["slurm-tree", "slurm-yaml"])
@pytest.mark.parametrize("kind", ["slurm", "ec2", "topograph"])
def test_what_is_written_reads_back(kind: str, form: str) -> None:
    topology = TOPOLOGIES[kind]
    again = read_topology(written_topology(topology, form)[1])
    assert again.groups("leaf") == topology.groups("leaf")
    assert again.groups("spine") == topology.groups("spine")


def test_blocks_are_nvlink_domains_where_there_are_some() -> None:
    again = read_topology(written_topology(TOPOLOGIES["topograph"], "slurm-block")[1])
    assert again.groups("leaf") == TOPOLOGIES["topograph"].groups("domain")
    assert "BlockSizes=2,4,8\n" in written_topology(TOPOLOGIES["topograph"], "slurm-block")[1]


def test_levels_are_a_section_of_a_cluster_file(tmp_path: Path) -> None:
    for kind, topology in TOPOLOGIES.items():
        path = tmp_path / f"{kind}.yaml"
        path.write_text("name: lab\ninstance: p5.48xlarge\nnodes: 8\n" + written_topology(topology, "levels")[1])
        levels = load_cluster(path).levels
        assert levels.leaf
        assert levels.leaf.nodes == max(len(nodes) for nodes in topology.groups("leaf").values())
        assert levels.leaf.tier == 1
        assert levels.leaf.label == topology.labels.get("leaf")


def test_a_switch_prefix_belongs_to_one_level() -> None:
    assert "leaf: {nodes: 2, tier: 1}" in written_topology(TOPOLOGIES["ec2"], "levels")[1]  # all begin with nn-3 or nn-
    assert "leaf: {nodes: 4, switch: leaf, tier: 1}" in written_topology(TOPOLOGIES["slurm"], "levels")[1]


def test_hypernodes_follow_labels_unless_two_switches_share_a_value() -> None:
    by_label = volcano_hypernodes(TOPOLOGIES["eks"])[0]["spec"]["members"][0]["selector"]
    assert by_label == {"labelMatch": {"matchLabels": {"topology.k8s.aws/network-node-layer-3": "nn-leaf0"}}}
    renamed = tree_of({"a": ("s1", "1"), "b": ("s2", "1")}, labels={"leaf": "x/leaf", "spine": "x/spine"})
    assert volcano_hypernodes(renamed)[0]["spec"]["members"] == [
        {"type": "Node", "selector": {"exactMatch": {"name": "a"}}}
    ]


def test_unconnected_switches_get_a_root() -> None:
    forest = tree_of({"a": ("l1",), "b": ("l2",)})
    assert "SwitchName=fabric Switches=l[1-2]" in written_topology(forest, "slurm-tree")[1]


@pytest.mark.parametrize("name", ["a b", "a,b", "a\nSwitchName=x", "a=b"])
def test_names_that_would_change_the_file_are_refused(name: str) -> None:
    with pytest.raises(TopologyError, match="is not a valid name in Slurm"):
        written_topology(tree_of({"n1": (name,)}), "slurm-tree")


@pytest.mark.parametrize("form", ["slurm-tree", "slurm-block", "slurm-yaml", "levels"])
def test_four_times_the_nodes_cost_about_four_times_the_calls(form: str) -> None:
    def cost(nodes: int) -> int:
        tree = tree_of({f"n{number}": (f"s{number // 256}", f"l{number // 16}") for number in range(nodes)})
        with counted_calls() as calls:
            written_topology(tree, form)
        return calls.number

    assert cost(4096) < 5 * cost(1024)


@pytest.fixture
def controller() -> Iterator[Callable[[str, list[str]], str]]:
    """A real slurmctld for a topology.conf; what it says of it comes back."""
    missing = [tool for tool in ("munged", "mungekey", "slurmctld", "scontrol") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"Slurm's own word needs root and {', '.join(missing) or 'its tools'}")
    folder = Path(tempfile.mkdtemp(prefix="topology-", dir="/tmp"))  # short: it holds a socket
    pids: list[int] = []

    def show(topology: str, nodes: list[str]) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (folder / "state").mkdir()
        (folder / "topology.conf").write_text(topology)
        (folder / "slurm.conf").write_text(
            f"ClusterName=t\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort={port}\nSlurmUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.sock\nCredType=cred/munge\n"
            f"StateSaveLocation={folder}/state\nSlurmctldPidFile={folder}/slurmctld.pid\nProctrackType=proctrack/pgid\n"
            f"SlurmctldLogFile={folder}/slurmctld.log\nTopologyPlugin=topology/tree\nSwitchType=switch/none\n"
            f"NodeName={','.join(nodes)} NodeAddr=127.0.0.1 State=UNKNOWN\nPartitionName=all Nodes=ALL Default=YES\n"
        )
        subprocess.run(["mungekey", "-c", "-k", folder / "key"], check=True, capture_output=True)
        munge = ["munged", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge.sock"]
        munge += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        subprocess.run(munge, check=True, capture_output=True)
        pids.append(int((folder / "munged.pid").read_text()))
        subprocess.run(["slurmctld", "-f", folder / "slurm.conf"], check=True, capture_output=True)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

        def topology() -> str:
            if (folder / "slurmctld.pid").exists() and len(pids) < 2:
                pids.append(int((folder / "slurmctld.pid").read_text()))
            done = subprocess.run(
                ["scontrol", "show", "topology"], env=environment, capture_output=True, text=True, check=False
            )
            return done.stdout if done.returncode == 0 and "SwitchName" in done.stdout else ""

        return wait_until(topology, lambda: (folder / "slurmctld.log").read_text()[-2000:])

    yield show
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def test_slurm_itself_reads_the_tree(controller: Callable[[str, list[str]], str]) -> None:
    # unlike the other sources EC2's tree has three levels and a zone above them
    topology = TOPOLOGIES["ec2"]
    told = read_topology(controller(written_topology(topology, "slurm-tree")[1], list(topology.nodes)))
    assert {level: told.groups(level) for level in ("leaf", "spine", "core")} == {
        level: topology.groups(level) for level in ("leaf", "spine", "core")
    }


def test_yaml_of_slurm_is_a_list_of_topologies() -> None:
    (tree, block) = yaml.safe_load(written_topology(TOPOLOGIES["topograph"], "slurm-yaml")[1])
    assert tree["cluster_default"] is True
    assert block["block"]["block_sizes"] == [2, 4, 8]
