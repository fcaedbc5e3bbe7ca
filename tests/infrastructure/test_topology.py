"""What schedulers and clouds say of a network becomes one tree."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topologies import (
    SLURM_BLOCK,
    SLURM_TREE,
    ec2_answer,
    eks_nodes,
    node,
    old_topograph_nodes,
    topograph_nodes,
)

from craton.infrastructure import TopologyError
from craton.infrastructure.topology import discover as discover_topology
from craton.infrastructure.topology import expand, natural, read_instance_names, read_topology
from craton.infrastructure.topology.hostlist import compress
from craton.infrastructure.topology.read import read_ec2, read_kubernetes, read_slurm
from craton.infrastructure.topology.topology import tree_of


def test_scontrol_of_a_tree() -> None:
    found = read_slurm(SLURM_TREE)
    assert found.levels == ("spine", "leaf")
    assert found.groups("leaf") == {"leaf1": ["g1", "g2", "g3", "g4"], "leaf2": ["g5", "g6", "g7", "g8"]}
    assert found.addresses()["g5"] == ("spine", "leaf2")


def test_a_topology_conf_says_the_same_as_scontrol() -> None:
    written = "# ours\nSwitchName=leaf1 Nodes=g[1-4]\nswitchname=leaf2 \\\n  nodes=g[5-8] # two\n"
    written += "SwitchName=spine Switches=leaf[1-2]\n"
    assert read_topology(written) == read_slurm(SLURM_TREE)


def test_blocks_and_not_their_aggregates() -> None:
    found = read_topology(SLURM_BLOCK)
    assert found.kind == "block"
    assert {name: len(nodes) for name, nodes in found.groups("leaf").items()} == {"b1": 18, "b2": 18}


def test_topology_yaml_takes_the_default_of_several() -> None:
    text = (
        "- topology: flat\n  flat: true\n- topology: main\n  cluster_default: true\n  tree:\n    switches:\n"
        "    - {switch: root, children: 'leaf[1-2]'}\n    - {switch: leaf1, nodes: 'g[1-4]'}\n"
        "    - {switch: leaf2, nodes: 'g[5-8]'}\n"
    )
    assert read_topology(text).groups("leaf") == read_slurm(SLURM_TREE).groups("leaf")


def test_switches_in_a_circle_are_refused() -> None:
    with pytest.raises(TopologyError, match="below itself"):
        read_slurm(
            "SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=b2 Nodes=n1\nSwitchName=a Switches=b,b2\n"
        )


def test_a_tree_of_uneven_depth_is_aligned_at_the_leaves() -> None:
    found = read_slurm(
        "SwitchName=l1 Nodes=a\nSwitchName=l2 Nodes=b\nSwitchName=s Switches=l1\nSwitchName=top Switches=s,l2\n"
    )
    assert found.levels == ("core", "spine", "leaf")
    assert found.addresses() == {"a": ("top", "s", "l1"), "b": ("", "top", "l2")}


def test_eks_labels() -> None:
    found = read_kubernetes(eks_nodes())
    assert found.levels == ("zone", "core", "spine", "leaf")
    assert found.labels["leaf"] == "topology.k8s.aws/network-node-layer-3"
    assert found.labels["zone"] == "topology.kubernetes.io/zone"
    assert found.unplaced == ("system",)
    assert len(found.groups("leaf")) == 4
    assert len(found.groups("spine")) == 2


def test_four_layers_make_the_fourth_the_leaf() -> None:
    found = read_kubernetes(eks_nodes(layers=4))
    assert found.labels["leaf"] == "topology.k8s.aws/network-node-layer-4"
    assert found.levels == ("zone", "core-2", "core", "spine", "leaf")


def test_a_cluster_of_three_and_four_layers_uses_what_both_have() -> None:
    mixed = [*eks_nodes(), node("extra", **eks_nodes(4)[0]["metadata"]["labels"])]
    assert read_kubernetes(mixed).labels["leaf"] == "topology.k8s.aws/network-node-layer-3"


def test_topograph_old_and_new() -> None:
    new, old = read_kubernetes(topograph_nodes()), read_kubernetes(old_topograph_nodes())
    assert new.levels == old.levels == ("spine", "leaf")
    assert new.labels["leaf"] == "fabric.topograph.run/tier-0"
    assert old.labels["leaf"] == "network.topology.nvidia.com/leaf"
    assert new.addresses()["n3"] == ("spine", "leaf0", "nvl1")
    assert new.groups("domain")["nvl1"] == ["n2", "n3"]
    assert old.labels["domain"] == "network.topology.nvidia.com/accelerator"


def test_nodes_without_labels_say_what_to_do() -> None:
    with pytest.raises(TopologyError, match=r"none of 1 nodes has a topology label.*topograph"):
        read_kubernetes([node("a")])


def test_ec2_with_and_without_names() -> None:
    answer = ec2_answer()
    assert len(read_ec2(answer).groups("leaf")) == 4
    described = {
        "Reservations": [
            {
                "Instances": [
                    {"InstanceId": one["InstanceId"], "PrivateDnsName": f"ip-{index}.us-east-2.compute.internal"}
                ]
            }
            for index, one in enumerate(answer["Instances"])
        ]
    }
    named = read_ec2(answer, read_instance_names(json.dumps(described)))
    assert named.nodes == tuple(f"ip-{index}" for index in range(8))
    assert named.addresses()["ip-5"] == ("us-east-2a", "nn-1", "nn-21", "nn-32")


def test_instances_of_others_are_no_nodes_of_a_cluster_whose_names_are_known() -> None:
    answer = ec2_answer()
    first, *_ = (one["InstanceId"] for one in answer["Instances"])
    assert read_ec2(answer, {first: "train-1"}).nodes == ("train-1",)
    with pytest.raises(TopologyError, match="none of its instances is in the names"):
        read_ec2(answer, {"i-other": "train-1"})


def test_an_ultraserver_is_a_domain_of_its_instances() -> None:
    answer = ec2_answer()
    for number, instance in enumerate(answer["Instances"]):
        instance["CapacityBlockId"] = f"cb-{number // 4}"
    found = read_ec2(answer)
    assert [len(nodes) for nodes in found.groups("domain").values()] == [4, 4]


def test_instances_of_ec2_that_do_not_say_where_they_are() -> None:
    answer = ec2_answer()
    answer["Instances"][0]["NetworkNodes"] = []
    assert read_ec2(answer).unplaced == (answer["Instances"][0]["InstanceId"],)
    with pytest.raises(TopologyError, match="only running instances"):
        read_ec2({"Instances": [{"InstanceId": "i-1"}]})


def test_two_switches_of_one_name_are_told_apart() -> None:
    found = tree_of({"a": ("s1", "1"), "b": ("s2", "1"), "c": ("s2", "2")})
    assert found.renamed
    assert sorted(found.groups("leaf")) == ["2", "s1-1", "s2-1"]


@pytest.mark.parametrize("text", ["hello", "{}", "[]", "{: }", "a: [1", '{"items": [1]}'])
def test_what_is_no_topology_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(TopologyError, match="scontrol show topology"):
        read_topology(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"Instances": [{"NetworkNodes": ["nn-1"]}]}', "lacks 'InstanceId'"),
        ('{"Instances": 5}', "wrong kind"),
        ('{"Instances": [7]}', "wrong kind"),
        ('{"items": [{"metadata": {}}]}', "lacks 'name'"),
        ('{"items": [{"metadata": {"name": "a", "labels": 3}}]}', "wrong kind"),
        ("- topology: a\n  tree: {}\n", "lacks 'switches'"),
        ("- topology: a\n  tree: {switches: [{nodes: a}]}\n", "lacks 'switch'"),
        ("- topology: a\n  block: {blocks: [b1]}\n", "wrong kind"),
        ("- topology: a\n- 5\n", "wrong kind"),
        (f"SwitchName=a Nodes=g[{'1' * 5000}]\n", "wrong kind"),
    ],
)
def test_a_topology_with_parts_missing_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "topology"
    path.write_text(text)
    with pytest.raises(TopologyError, match=f"{path}: it looks like a topology.*{said}.*scontrol show topology"):
        discover_topology(str(path))


def test_a_topology_of_endless_brackets_is_refused() -> None:
    with pytest.raises(TopologyError, match="not Slurm text"):
        read_topology("[" * 200_000)
    with pytest.raises(TopologyError, match="names of instances"):
        read_instance_names("[" * 200_000)


def test_a_file_of_each_kind(tmp_path: Path) -> None:
    documents = {"slurm": SLURM_TREE, "nodes": json.dumps({"items": eks_nodes()}), "ec2": json.dumps(ec2_answer())}
    for name, text in documents.items():
        path = tmp_path / name
        path.write_text(text)
        assert len(discover_topology(str(path)).places) == 8
    with pytest.raises(TopologyError, match="cannot be read"):
        discover_topology(str(tmp_path / "nothing"))


def test_without_slurm_or_kubernetes_it_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(TopologyError, match="kubectl get nodes -o json"):
        discover_topology(None)
    with pytest.raises(TopologyError, match="scontrol not found"):
        discover_topology("slurm")


def test_a_slurm_without_topology_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\necho 'No topology information available'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(TopologyError, match="TopologyPlugin is flat"):
        discover_topology("slurm")


def test_ec2_is_not_asked_without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(TopologyError, match="aws ec2 describe-instance-topology"):
        discover_topology("ec2", region="us-east-2")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("g[1-3]", ["g1", "g2", "g3"]),
        ("g[08-10],h", ["g08", "g09", "g10", "h"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("", []),
    ],
)
def test_hostlists(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["g[1", "g[a-b]", "g]1[", "g[1-900000]", "a[1-999]b[1-999]"])
def test_hostlists_that_are_not(text: str) -> None:
    with pytest.raises(TopologyError):
        expand(text)


@given(st.lists(st.from_regex(r"[a-c]{0,2}[0-9]{0,3}[a-c]?", fullmatch=True).filter(bool), max_size=30))
def test_a_compressed_hostlist_has_the_same_names(names: list[str]) -> None:
    assert sorted(expand(compress(names))) == sorted(set(names))


def test_ranges_are_short() -> None:
    assert compress(["g10", "g9", "g8", "x", "g1"]) == "g[1,8-10],x"
    assert compress([f"n{number:02d}" for number in range(1, 19)]) == "n[01-18]"


def test_natural_order() -> None:
    assert sorted(["g10", "g2", "a", "g1b"], key=natural) == ["a", "g1b", "g2", "g10"]


def test_kubernetes_is_asked_for_its_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in of an API server that lists nodes and tells its version, nothing else."""
    pytest.importorskip("kr8s")
    listed = {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": eks_nodes()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/api/v1/nodes": listed, "/version/": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}}
            answer = known.get(self.path.partition("?")[0])
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer or {"message": self.path}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
            "users": [{"name": "me", "user": {"token": "none"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        found = discover_topology("kubernetes")
        server.shutdown()
        thread.join()
    assert len(found.places) == 8
    assert found.unplaced == ("system",)
