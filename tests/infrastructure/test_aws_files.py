"""What is rendered for each kind of cluster: golden files, what must be in them, and what a cluster file must say."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aws_clusters import BLOCK, DRIVES, EXISTING, OF_TARGET, PLAN, RESERVATION, cluster, document

from craton.infrastructure import Instance, ProvisionError
from craton.infrastructure.aws import provision, queues
from craton.infrastructure.aws.interfaces import interfaces, level_labels
from craton.infrastructure.aws.provisioning import ASSET_TAG
from craton.infrastructure.aws.site import TARGETS as PROVISION_TARGETS
from craton.infrastructure.aws.site import site_of
from craton.infrastructure.catalog import instance, instances
from craton.infrastructure.topology import read_instance_names
from craton.job import ContentError
from craton.job.cluster import load_cluster

CAPACITY = {"hyperpod-slurm": PLAN, "hyperpod-eks": PLAN}
POOLED = {
    "kind": "kubernetes",
    "queue": "research",
    "gang": "kueue",
    "node_pool": "gpu",
    "image": "example.com/train:1",
}


def files(folder: Path, target: str, aws: dict[str, Any] | None = None, **keys: Any) -> dict[str, str]:
    return provision(cluster(folder, target, aws, **keys), target).files


@pytest.mark.parametrize("target", PROVISION_TARGETS)
def test_golden(golden: Callable[[str, str], None], tmp_path: Path, target: str) -> None:
    made = files(tmp_path, target, CAPACITY.get(target, BLOCK))
    golden(f"aws-{target}.txt", "".join(f"=== {name}\n{text}" for name, text in made.items()))


def test_the_example_can_be_made() -> None:
    example = Path(__file__).parents[2] / "examples" / "clusters" / "eks-p5en.yaml"
    made = provision(load_cluster(example), "eks")
    assert made.notes == ()
    resources = yaml.safe_load(made.files["cluster.yaml"])["Resources"]
    assert len(resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]["NetworkInterfaces"]) == 17


@pytest.mark.parametrize("gang", ["kai", "volcano"])
def test_golden_of_other_queues(golden: Callable[[str, str], None], tmp_path: Path, gang: str) -> None:
    made = files(tmp_path, "eks", {**BLOCK, **EXISTING}, scheduler={**POOLED, "gang": gang})
    names = (f"manifests/{gang}.yaml", "manifests/karpenter.yaml", "manifests/storage.yaml", "README.md")
    golden(f"aws-eks-{gang}.txt", "".join(f"=== {name}\n{made[name]}" for name in names))


@pytest.mark.parametrize("target", PROVISION_TARGETS)
def test_everything_that_is_missing_is_told_at_once(tmp_path: Path, target: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: llm-train\ninstance: p5.48xlarge\nnodes: 16\n")
    with pytest.raises(ProvisionError) as raised:
        provision(load_cluster(path), target)
    said = "\n".join(raised.value.problems)
    for key in [*OF_TARGET[target], "region", "subnet"]:
        assert f"aws.{key} is missing: {target} needs" in said
    assert "storage.shared.path is missing" in said


SHARED = {"path": "/fsx", "capacity_bytes": "48TiB", "megabytes_per_second_per_tib": 500}
OWN = {"name": "x", "gpu": "H100", "num_gpus": 8, "network_bytes_per_second": "1GB/s"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"name": "a b; rm -rf /"}, "name: use 3 to 40 letters"),
        ({"instance": None, "hardware": OWN}, "own machines cannot be provisioned"),
        ({"instance": "u-p6e-gb200x72"}, "is an UltraServer"),
        ({"instance": "p9.big"}, "unknown instance"),
        ({"nodes": 3000}, "PCS manages at most 2047"),
        ({"scheduler": {"kind": "kubernetes"}}, "scheduler.kind is kubernetes"),
        ({"scheduler": {"kind": "slurm", "partition": "$(id)"}}, "scheduler.partition"),
        ({"storage": {"shared": {**SHARED, "path": "/fsx; reboot"}}}, "storage.shared.path"),
        ({"storage": {"shared": SHARED, "nvme": {"path": "/a b"}}}, "storage.nvme.path"),
        ({"storage": {"shared": SHARED, "object": {"path": "/tokens"}}}, "storage.object.path"),
        ({"storage": {"shared": {**SHARED, "megabytes_per_second_per_tib": 300}}}, "FSx offers 125, 250, 500, 1000"),
        ({"storage": {"shared": {"path": "/fsx"}}}, "storage.shared.capacity_bytes is missing"),
        ({"storage": {"shared": {**SHARED, "kind": "nfs"}}}, "storage.shared.kind is nfs"),
        ({"aws": {"training_plan": PLAN["training_plan"]}}, "aws.training_plan is only for HyperPod"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ProvisionError, match=re.escape(said)):
        provision(cluster(tmp_path, "pcs", **keys), "pcs")


@pytest.mark.parametrize("target", DRIVES)
def test_drives_are_where_the_image_of_the_target_has_them(tmp_path: Path, target: str) -> None:
    storage = {**document(target)["storage"], "nvme": {"path": "/scratch"}}
    with pytest.raises(ProvisionError, match=f"mount their drives at {DRIVES[target]}; use that path"):
        provision(cluster(tmp_path, target, storage=storage), target)
    storage["nvme"]["claim"] = "scratch"
    provision(cluster(tmp_path, target, storage=storage), target)


def test_a_pool_and_what_it_cannot_go_with_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match=r"scheduler\.node_pool: HyperPod creates the nodes"):
        provision(cluster(tmp_path, "hyperpod-eks", scheduler=POOLED), "hyperpod-eks")
    with pytest.raises(ProvisionError, match=r"scheduler\.topology: with a topology Kueue admits jobs only"):
        provision(cluster(tmp_path, "eks", scheduler={**POOLED, "topology": "efa"}), "eks")


@pytest.mark.parametrize(
    ("aws", "said"),
    [
        ({"subnet": "subnet-xyz"}, "is not a subnet; write e.g. subnet-0123456789abcdef0"),
        ({"scripts": "s3://b/$(id)"}, "is not an S3 URL"),
        ({"karpenter_role": "arn:aws:iam::111122223333:role/Nodes"}, "is not the name of a role .not its ARN or path."),
        ({"karpenter_role": "Nodes${AWS::StackName}"}, "is not the name of a role"),
        ({"karpenter_role": "x" * 65}, "is not the name of a role"),
        ({**BLOCK, **PLAN}, "alternative kinds of capacity"),
        ({**BLOCK, "placement_group": "x"}, "without a placement group"),
        ({"zone": "eu-west-1a"}, "is not in region us-east-2"),
        ({"regio": "x"}, "did you mean 'region'"),
    ],
)
def test_the_section_is_checked_as_it_is_read(tmp_path: Path, aws: dict[str, Any], said: str) -> None:
    with pytest.raises(ContentError, match=said):
        cluster(tmp_path, "pcs", aws)


@pytest.mark.parametrize("node", [one for one in instances() if one.efa_version and not one.name.startswith("u-")],
                         ids=lambda one: one.name)  # fmt: skip
def test_every_instance_gets_all_its_efa(tmp_path: Path, node: Instance) -> None:
    found = interfaces(site_of(cluster(tmp_path, "pcs", instance=node.name), "pcs"))
    assert sum(one.kind == "efa-only" for one in found) == node.network_interfaces
    assert [(one.card, one.device) for one in found if one.kind == "interface"] == [(0, 0)]
    assert len({(one.card, one.device) for one in found}) == len(found)


def test_the_first_card_of_p6_b300_has_no_efa(tmp_path: Path) -> None:
    found = interfaces(site_of(cluster(tmp_path, "pcs", instance="p6-b300.48xlarge"), "pcs"))
    assert {one.card for one in found if one.kind == "efa-only"} == set(range(1, 17))


def test_a_wrong_number_of_cards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match="the catalog lists 32 EFA interfaces"):
        provision(cluster(tmp_path, "pcs", {"network_cards": 8}), "pcs")


def test_only_nodes_on_demand_get_a_placement_group_of_their_own(tmp_path: Path) -> None:
    block = yaml.safe_load(files(tmp_path, "pcs", BLOCK)["cluster.yaml"])["Resources"]
    data = block["NodeTemplate"]["Properties"]["LaunchTemplateData"]
    assert "PlacementGroup" not in block
    assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert block["Nodes"]["Properties"]["PurchaseOption"] == "CAPACITY_BLOCK"
    free = yaml.safe_load(files(tmp_path, "pcs")["cluster.yaml"])["Resources"]
    assert free["PlacementGroup"]["Properties"] == {"Strategy": "cluster"}
    reserved = {"capacity_reservation": RESERVATION["capacity_reservation"]}
    for target in ("pcs", "eks"):
        made = provision(cluster(tmp_path, target, reserved), target)
        resources = yaml.safe_load(made.files["cluster.yaml"])["Resources"]
        assert "PlacementGroup" not in resources
        assert "Placement" not in resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]
        assert [note for note in made.notes if "aws.placement_group" in note]
    queue = yaml.safe_load(files(tmp_path, "parallelcluster", reserved)["cluster.yaml"])["Scheduling"]["SlurmQueues"][0]
    assert "PlacementGroup" not in queue["Networking"]
    own = yaml.safe_load(files(tmp_path, "parallelcluster", RESERVATION)["cluster.yaml"])
    assert own["Scheduling"]["SlurmQueues"][0]["Networking"]["PlacementGroup"] == {"Enabled": True, "Name": "near"}


def test_the_template_of_a_capacity_block_names_the_instance(tmp_path: Path) -> None:
    for target in ("pcs", "eks"):
        for capacity, kind in ((BLOCK, "p5.48xlarge"), ({}, None)):
            resources = yaml.safe_load(files(tmp_path, target, capacity)["cluster.yaml"])["Resources"]
            data = resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]
            assert data.get("InstanceType") == kind
            if target == "eks":  # from one of the two, not from both
                assert resources["Nodes"]["Properties"].get("InstanceTypes") == (None if kind else ["p5.48xlarge"])


@pytest.mark.parametrize("target", ["hyperpod-slurm", "hyperpod-eks"])
def test_hyperpod_keeps_the_processors_that_pods_and_doctor_count(tmp_path: Path, target: str) -> None:
    groups = json.loads(files(tmp_path, target, PLAN)["create-cluster.json"])["InstanceGroups"]
    assert {group["ThreadsPerCore"] for group in groups} == {2}


def test_lustre_has_efa_where_it_is_fast_enough(tmp_path: Path) -> None:
    def system(capacity: str) -> dict[str, Any]:
        storage = document("pcs")["storage"]
        storage["shared"]["capacity_bytes"] = capacity
        stack = yaml.safe_load(files(tmp_path, "pcs", storage=storage)["cluster.yaml"])
        properties: dict[str, Any] = stack["Resources"]["FileSystem"]["Properties"]
        return properties

    assert system("48TiB")["StorageCapacity"] == 48000
    assert system("48TiB")["LustreConfiguration"]["EfaEnabled"] is True
    assert "EfaEnabled" not in system("4800GiB")["LustreConfiguration"]
    assert system("5000GiB")["StorageCapacity"] == 7200
    assert system("1TiB")["StorageCapacity"] == 1200


def test_rounding_is_said(tmp_path: Path) -> None:
    storage = document("pcs")["storage"]
    storage["shared"]["capacity_bytes"] = "5000GiB"
    assert "7,200 GiB" in provision(cluster(tmp_path, "pcs", storage=storage), "pcs").notes[0]


def test_an_existing_file_system_is_mounted_and_not_made(tmp_path: Path) -> None:
    slurm = files(tmp_path, "hyperpod-slurm", EXISTING)
    assert "storage.yaml" not in slurm
    groups = json.loads(slurm["create-cluster.json"])["InstanceGroups"]
    assert all(
        {"MountName": "abcdefgh"}.items() <= group["InstanceStorageConfigs"][1]["FsxLustreConfig"].items()
        for group in groups
    )
    volume, claim = yaml.safe_load_all(files(tmp_path, "eks", EXISTING)["manifests/storage.yaml"])
    assert volume["spec"]["csi"]["volumeHandle"] == EXISTING["file_system"]
    assert claim["metadata"] == {"name": "fsx", "namespace": "train"}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]


def test_a_file_system_without_its_mount_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match=r"aws\.file_system_mount is missing"):
        provision(cluster(tmp_path, "eks", {"file_system": EXISTING["file_system"]}), "eks")


def test_karpenter_takes_the_place_of_the_node_group(tmp_path: Path) -> None:
    pooled = files(tmp_path, "eks", BLOCK, scheduler=POOLED)
    assert "NodeTemplate" not in yaml.safe_load(pooled["cluster.yaml"])["Resources"]
    pool, kind = yaml.safe_load_all(pooled["manifests/karpenter.yaml"])
    assert pool["spec"]["limits"]["nvidia.com/gpu"] == "128"
    assert len(kind["spec"]["networkInterfaces"]) == 33
    assert kind["spec"]["capacityReservationSelectorTerms"] == [{"id": BLOCK["capacity_block"]}]
    assert "manifests/karpenter.yaml" not in files(tmp_path, "eks", BLOCK)


def test_kueue_has_no_topology_where_karpenter_makes_the_nodes(tmp_path: Path) -> None:
    made = provision(cluster(tmp_path, "eks", BLOCK, scheduler=POOLED), "eks")
    objects = list(yaml.safe_load_all(made.files["manifests/kueue.yaml"]))
    (flavor,) = [one for one in objects if one["kind"] == "ResourceFlavor"]
    assert "Topology" not in {one["kind"] for one in objects}
    assert "topologyName" not in flavor["spec"]
    assert [note for note in made.notes if "Kueue got no topology, `placement`" in note]
    assert not [step for step in made.steps if "discover" in step]
    fixed = list(yaml.safe_load_all(files(tmp_path, "eks", BLOCK)["manifests/kueue.yaml"]))
    (flavor,) = [one for one in fixed if one["kind"] == "ResourceFlavor"]
    assert flavor["spec"]["topologyName"] == "fabric"


@pytest.mark.parametrize("role", [None, "TeamNodes"])
def test_nodes_of_karpenter_may_join_and_reach_the_others(tmp_path: Path, role: str | None) -> None:
    aws = {**BLOCK, "karpenter_role": role, "security_groups": ["sg-0123456789abcdef0"]}
    pooled = files(tmp_path, "eks", aws, scheduler=POOLED)
    entry = yaml.safe_load(pooled["cluster.yaml"])["Resources"]["KarpenterNodes"]
    spec = list(yaml.safe_load_all(pooled["manifests/karpenter.yaml"]))[1]["spec"]
    assert entry["Type"] == "AWS::EKS::AccessEntry"
    assert entry["Properties"]["Type"] == "EC2_LINUX"
    assert spec["role"] == (role or "KarpenterNodeRole-llm-train")
    assert entry["Properties"]["PrincipalArn"]["Fn::Sub"].endswith(f":role/{spec['role']}")
    assert spec["securityGroupSelectorTerms"] == [
        {"tags": {"craton:cluster": "llm-train"}},
        {"tags": {"aws:eks:cluster-name": "llm-train"}},
        {"id": "sg-0123456789abcdef0"},
    ]
    assert "KarpenterNodes" not in yaml.safe_load(files(tmp_path, "eks", BLOCK)["cluster.yaml"])["Resources"]


@pytest.mark.parametrize("gang", ["kueue", "kai", "volcano", "none"])
@pytest.mark.parametrize("target", ["eks", "hyperpod-eks"])
def test_the_namespace_is_applied_before_what_lies_in_it(tmp_path: Path, target: str, gang: str) -> None:
    """As kubectl does it: file after file, by name."""
    pool = "gpu" if target == "eks" else None
    scheduler = {**POOLED, "gang": gang, "namespace": "train", "node_pool": pool}
    made = files(tmp_path, target, EXISTING, scheduler=scheduler)
    names = sorted(name for name in made if name.startswith("manifests/"))
    objects = [one for name in names for one in yaml.safe_load_all(made[name])]
    (first,) = [number for number, one in enumerate(objects) if one["kind"] == "Namespace"]
    inside = [number for number, one in enumerate(objects) if one["metadata"].get("namespace") == "train"]
    assert objects[first]["metadata"]["name"] == "train"
    assert inside
    assert first < min(inside)
    # ConfigMaps of Volcano's chart have another owner
    assert ("apply --server-side --force-conflicts -f" in made["README.md"]) == (gang == "volcano")


def test_quotas_cover_every_resource_that_pods_ask_for(tmp_path: Path) -> None:
    objects = list(yaml.safe_load_all(files(tmp_path, "eks", BLOCK)["manifests/kueue.yaml"]))
    (queue,) = [one for one in objects if one["kind"] == "ClusterQueue"]
    (group,) = queue["spec"]["resourceGroups"]
    assert set(group["coveredResources"]) == {
        *("cpu", "memory", "nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi"),
    }
    quota = {one["name"]: one["nominalQuota"] for one in group["flavors"][0]["resources"]}
    p5 = instance("p5.48xlarge")
    assert quota["vpc.amazonaws.com/efa"] == str(16 * p5.network_interfaces)
    assert quota["cpu"] == str(16 * p5.vcpus)
    stated = {"kind": "kubernetes", "gang": "kueue", "resources": {"rdma/hca_shared_devices_a": 2}}
    named = queues.capacity(site_of(cluster(tmp_path, "eks", scheduler=stated), "eks"))
    assert named == {**quota, "rdma/hca_shared_devices_a": "32"}
    pooled = queues.capacity(site_of(cluster(tmp_path, "eks", scheduler={**stated, "node_pool": "p5"}), "eks"))
    assert set(named) - set(pooled) == {"hugepages-2Mi"}


def test_levels_of_the_cluster_file_win_over_those_of_eks(tmp_path: Path) -> None:
    own = {"leaf": {"label": "rack"}, "spine": {"label": "row"}}
    site = site_of(cluster(tmp_path, "eks", levels=own), "eks")
    assert level_labels(site) == {"spine": "row", "leaf": "rack"}
    b200 = site_of(cluster(tmp_path, "eks", instance="p6-b200.48xlarge"), "eks")
    assert level_labels(b200)["leaf"] == "topology.k8s.aws/network-node-layer-4"
    assert "levels: {" in provision(cluster(tmp_path, "eks"), "eks").notes[0]


def test_only_a_policy_that_acts_may_change_nodes(tmp_path: Path) -> None:
    acting = files(tmp_path, "eks", BLOCK)["manifests/health.yaml"]
    watching = files(tmp_path, "eks", BLOCK, health={"policy": "observe"})["manifests/health.yaml"]
    assert "ClusterRoleBinding" in acting
    assert "ClusterRole" not in watching
    (pods,) = [one for one in yaml.safe_load_all(watching) if one["kind"] == "DaemonSet"]
    assert pods["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_topology_is_asked_for_by_the_names_of_the_cluster(tmp_path: Path) -> None:
    scheduler = {"kind": "kubernetes", "gang": "kai", "topology": "efa"}
    steps = provision(cluster(tmp_path, "eks", scheduler=scheduler), "eks").steps
    assert "craton cluster discover --from kubernetes --write kai --name efa" in steps
    for target in PROVISION_TARGETS:
        made = files(tmp_path, target, CAPACITY.get(target, BLOCK))
        assert "craton observe render --cluster" in made["README.md"]
        assert "prometheus.yml" not in made


@pytest.mark.parametrize("target", ["parallelcluster", "pcs"])
def test_nodes_of_slurm_tell_which_instance_they_are(tmp_path: Path, target: str) -> None:
    steps = provision(cluster(tmp_path, target), target).steps
    (ask,) = [step for step in steps if step.startswith("srun ")]
    assert "--from ec2 --region us-east-2 --names instances.json" in steps[steps.index(ask) + 1]
    tag = tmp_path / "asset_tag"
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/bash\nwhile [ $1 != sh ]; do shift; done\nfor number in 1 2; do\n"
        f'echo "i-$number  " > {tag}; SLURMD_NODENAME=train-st-nodes-$number "$@"\ndone\n'
    )
    srun.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", ask.replace(ASSET_TAG, str(tag))], cwd=tmp_path, env=path, check=True)
    told = read_instance_names((tmp_path / "instances.json").read_text())
    assert told == {"i-1": "train-st-nodes-1", "i-2": "train-st-nodes-2"}


def test_health_pods_have_what_doctor_looks_at(tmp_path: Path) -> None:
    objects = yaml.safe_load_all(files(tmp_path, "eks", BLOCK)["manifests/health.yaml"])
    (spec,) = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "DaemonSet"]
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    (memory,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert volumes[memory]["emptyDir"] == {"medium": "Memory"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYSLOG"]}  # the kernel log
    assert container["securityContext"]["runAsUser"] == 0
    assert {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"} in container["env"]
