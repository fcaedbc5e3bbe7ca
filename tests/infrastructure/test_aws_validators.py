"""Every file for every kind of cluster, held against the validators of those who will read it. No cloud is asked.

ParallelCluster's schema and cfn-lint live in an environment of their own (`make validators`), because they pin what
others need newer; where it is missing those tests are skipped. botocore's models, kubernetes-validate and the CRDs are
asked here.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from aws_clusters import BLOCK, EXISTING, PLAN, RESERVATION, cluster
from botocore.model import Shape
from botocore.validate import ParamValidator
from manifests import check_manifests

from craton.infrastructure.aws import provision
from craton.infrastructure.aws.site import TARGETS as PROVISION_TARGETS

VALIDATORS = Path(__file__).parents[2] / ".venv-aws" / "bin"
INSTANCES = ("p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge", "p4d.24xlarge", "g6e.48xlarge")
needs_validators = pytest.mark.skipif(
    not (VALIDATORS / "cfn-lint").exists(),
    reason="cfn-lint and ParallelCluster's schema are not here: `make validators`",
)


def variants(target: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, aws, other keys): capacity, file system, policy, queues and pools, each with an instance of its own."""
    hyperpod = target.startswith("hyperpod")
    capacities: list[dict[str, Any]] = [{}, PLAN] if hyperpod else [{}, BLOCK, RESERVATION]
    number = 0
    for capacity in capacities:
        for system in ({}, EXISTING):
            yield f"{number}", {**capacity, **system}, {"instance": INSTANCES[number % len(INSTANCES)]}
            number += 1
    yield "elastic", {}, {"nodes": "2..8", "health": {"policy": "drain"}, "spares": 1}
    if target in ("eks", "hyperpod-eks"):
        for gang in ("kai", "volcano", "none"):
            scheduler = {
                "kind": "kubernetes",
                "gang": gang,
                "image": "example.com/a:1",
                "tolerations": ["nvidia.com/gpu"],
            }
            pool = {"node_pool": "gpu"} if target == "eks" else {}
            yield gang, EXISTING, {"scheduler": {**scheduler, **pool}, "health": {"policy": "observe"}}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """`TARGET-VARIANT` → its files, all of them written below one folder as well."""
    folder = tmp_path_factory.mktemp("clusters")
    found = {}
    for target in PROVISION_TARGETS:
        for name, aws, keys in variants(target):
            files = provision(cluster(folder, target, aws, **keys), target).files
            found[f"{target}-{name}"] = files
            for path, text in files.items():
                (folder / f"{target}-{name}" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / f"{target}-{name}" / path).write_text(text)
    found["folder"] = {"path": str(folder)}
    return found


def of_kind(rendered: dict[str, dict[str, str]], suffix: str, marker: str = "") -> list[Path]:
    folder = Path(rendered["folder"]["path"])
    return sorted(path for path in folder.rglob(suffix) if marker in path.read_text())


@needs_validators
def test_parallelcluster_accepts_its_files(rendered: dict[str, dict[str, str]], tmp_path: Path) -> None:
    files = [path for path in of_kind(rendered, "cluster.yaml") if "parallelcluster-" in str(path)]
    broken = tmp_path / "broken.yaml"
    broken.write_text(files[0].read_text().replace("PERSISTENT_2", "PERSISTENT_9"))
    denied = tmp_path / "denied.yaml"
    denied.write_text(files[0].read_text().replace("HealthCheckProgram:", "Prolog:"))
    script = Path(__file__).with_name("parallelcluster_schema.py")
    command = [VALIDATORS / "python", script, *files, broken, denied]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(files) == 7
    assert {name: problems for name, problems in said.items() if Path(name) in files and problems} == {}
    assert "DeploymentType" in said[str(broken)][0]
    assert said[str(denied)] == ["Prolog is denied"]


@needs_validators
def test_cfn_lint_accepts_every_stack(rendered: dict[str, dict[str, str]], tmp_path: Path) -> None:
    every = of_kind(rendered, "*.yaml", "AWSTemplateFormatVersion")
    stacks = list({path.read_text(): path for path in every}.values())
    broken = tmp_path / "broken.yaml"
    pcs = next(path for path in every if "pcs-0" in str(path))
    broken.write_text(pcs.read_text().replace("Size: SMALL", "Size: TINY").replace("StorageCapacity", "StorageSize"))
    # a region that has all of INSTANCES
    command = [VALIDATORS / "cfn-lint", "--format", "json", "--regions", "us-west-2", "--", *stacks, broken]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert [f"{one['Filename']}: {one['Message']}" for one in said if one["Filename"] != str(broken)] == []
    text = str(said)
    assert "TINY" in text
    assert "StorageSize" in text
    assert len(stacks) > 12


def test_sagemaker_takes_the_request(rendered: dict[str, dict[str, str]]) -> None:
    requests = [json.loads(path.read_text()) for path in of_kind(rendered, "create-cluster.json")]
    assert len(requests) == 13
    for request in requests:
        assert botocore_problems("sagemaker", "CreateCluster", request) == []
    wrong = copy.deepcopy(requests[0])
    wrong["NodeRecovery"] = "Sometimes"
    wrong["InstanceGroups"][0]["InstanceType"] = "ml.bogus"
    wrong["Tag"] = []
    assert len(botocore_problems("sagemaker", "CreateCluster", wrong)) == 3


def test_fsx_takes_the_file_system_and_its_link(rendered: dict[str, dict[str, str]]) -> None:
    checked = 0
    for path in of_kind(rendered, "*.yaml", "AWS::FSx::FileSystem"):
        resources = yaml.safe_load(path.read_text())["Resources"]
        system = {**resources["FileSystem"]["Properties"], "SecurityGroupIds": ["sg-0123456789abcdef0"]}
        assert botocore_problems("fsx", "CreateFileSystem", system) == []
        link = {**resources["DataRepository"]["Properties"], "FileSystemId": "fs-0123456789abcdef0"}
        assert botocore_problems("fsx", "CreateDataRepositoryAssociation", link) == []
        checked += 1
    assert checked > 10
    system["LustreConfiguration"] = {**system["LustreConfiguration"], "DeploymentType": "PERSISTENT_3"}
    assert "PERSISTENT_3" in botocore_problems("fsx", "CreateFileSystem", system)[0]


def test_pcs_takes_cluster_nodes_and_queue(rendered: dict[str, dict[str, str]]) -> None:
    operations = {
        "AWS::PCS::Cluster": ("CreateCluster", {"name": "clusterName"}),
        "AWS::PCS::ComputeNodeGroup": (
            "CreateComputeNodeGroup",
            {"name": "computeNodeGroupName", "clusterId": "clusterIdentifier", "templateId": "id"},
        ),
        "AWS::PCS::Queue": ("CreateQueue", {"name": "queueName", "clusterId": "clusterIdentifier"}),
    }
    checked = 0
    for path in of_kind(rendered, "cluster.yaml", "AWS::PCS::Cluster"):
        for resource in yaml.safe_load(path.read_text())["Resources"].values():
            if resource["Type"] in operations:
                operation, names = operations[resource["Type"]]
                assert botocore_problems("pcs", operation, api_words(resource["Properties"], names)) == []
                checked += 1
    assert checked == 7 * 4
    unknown = {"parameters": 1}
    assert botocore_problems("pcs", "CreateQueue", unknown)


@pytest.mark.parametrize("target", ["eks", "hyperpod-eks"])
def test_kubernetes_takes_every_manifest(rendered: dict[str, dict[str, str]], target: str) -> None:
    kinds = set()
    for name, files in rendered.items():
        if name.startswith(target):
            for path, text in files.items():
                if path.startswith("manifests/"):
                    kinds.update(check_manifests(text))
    needed = {"ClusterQueue", "LocalQueue", "ResourceFlavor", "Topology", "Queue", "PersistentVolume", "ConfigMap"}
    assert needed | {"DaemonSet", "ServiceAccount", "ClusterRoleBinding"} <= kinds


def test_shells_take_every_script(rendered: dict[str, dict[str, str]]) -> None:
    scripts = of_kind(rendered, "*.sh")
    assert len(scripts) > 50
    for text in {path.read_text() for path in scripts}:
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def api_words(value: Any, names: dict[str, str]) -> Any:
    """CloudFormation's properties as the API has them: a small first letter, some other names; references are ids."""
    if isinstance(value, list):
        return [api_words(one, names) for one in value]
    if isinstance(value, dict):
        if "Fn::GetAtt" in value and value["Fn::GetAtt"][-1] == "Arn":
            return "arn:aws:iam::111122223333:instance-profile/aws-pcs/node"
        if value == {"Ref": "NodeSecurityGroup"}:
            return "sg-0123456789abcdef0"
        if {"Ref", "Fn::GetAtt"} & value.keys():
            return "pcs_0123456789"
        small = {key[0].lower() + key[1:]: one for key, one in value.items()}
        return {names.get(key, key): api_words(one, names) for key, one in small.items()}
    return value


def botocore_problems(service: str, operation: str, request: dict[str, Any]) -> list[str]:
    """What botocore would refuse, and what it would only find out from the service: enums and patterns."""
    shape = botocore_model(service).operation_model(operation).input_shape
    report = ParamValidator().validate(request, shape)
    return [*(report.generate_report().splitlines() if report.has_errors() else []), *_unlisted(request, shape)]


def _unlisted(value: Any, shape: Shape, where: str = "") -> list[str]:
    if shape.type_name == "structure":
        known = {key: one for key, one in value.items() if key in shape.members}
        return [found for key, one in known.items() for found in _unlisted(one, shape.members[key], f"{where}.{key}")]
    if shape.type_name == "list":
        return [found for one in value for found in _unlisted(one, shape.member, where)]
    if shape.type_name == "string":
        if shape.enum and value not in shape.enum:
            return [f"{where}: {value} is none of {', '.join(shape.enum)}"]
        pattern = shape.metadata.get("pattern", "")
        if pattern and "\\p{" not in pattern and not re.fullmatch(pattern.strip("^$"), value):
            return [f"{where}: {value} does not match {pattern}"]
    return []


def _models() -> Callable[[str], Any]:
    session, known = botocore.session.get_session(), {}

    def model(service: str) -> Any:
        if service not in known:
            known[service] = session.get_service_model(service)
        return known[service]

    return model


botocore_model = _models()
