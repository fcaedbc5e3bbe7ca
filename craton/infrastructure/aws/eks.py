"""Amazon EKS: one CloudFormation stack with control plane, roles, system nodes, GPU nodes and the file system.

GPU nodes are a managed group with a launch template, or Karpenter's where the cluster file names a node pool.
"""

from __future__ import annotations

from typing import Any

from craton.infrastructure.aws.nodes import karpenter_role
from craton.infrastructure.aws.site import AwsSite
from craton.infrastructure.aws.stack import (
    Resource,
    file_system,
    file_system_outputs,
    launch_template,
    mime,
    placement_group,
    security_group,
    template,
)
from craton.yaml_text import to_yaml

NODE_POLICIES = ("AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryReadOnly")
ADDONS = ("vpc-cni", "kube-proxy", "coredns", "aws-fsx-csi-driver")
SYSTEM_NODES = 2
GROUPS: list[Any] = [{"Ref": "NodeSecurityGroup"}, {"Fn::GetAtt": ["Cluster", "ClusterSecurityGroupId"]}]


def eks_stack(site: AwsSite) -> dict[str, str]:
    resources: dict[str, Resource] = {
        **security_group(site),
        "ClusterRole": _role("eks.amazonaws.com", ("AmazonEKSClusterPolicy",)),
        "NodeRole": _role("ec2.amazonaws.com", NODE_POLICIES),
        "Cluster": {
            "Type": "AWS::EKS::Cluster",
            "Properties": {
                "Name": site.name,
                "Version": site.aws.kubernetes_version,
                "RoleArn": {"Fn::GetAtt": ["ClusterRole", "Arn"]},
                "AccessConfig": {"AuthenticationMode": "API"},
                "ResourcesVpcConfig": {
                    "SubnetIds": list(site.aws.control_subnets),
                    "SecurityGroupIds": [{"Ref": "NodeSecurityGroup"}],
                    "EndpointPrivateAccess": True,
                },
            },
        },
        "SystemNodes": _node_group(site, "system", site.aws.head_instance, SYSTEM_NODES, "AL2023_x86_64_STANDARD"),
        **{f"Addon{index}": _addon(name) for index, name in enumerate(ADDONS)},
        **file_system(site, [{"Ref": "NodeSecurityGroup"}]),
    }
    if not site.node_pool:
        nodes = _node_group(site, site.queue, site.instance.name, site.num_nodes, "AL2023_x86_64_NVIDIA")
        nodes["Properties"] |= {
            "CapacityType": "CAPACITY_BLOCK" if site.aws.capacity_block else "ON_DEMAND",
            "Taints": [{"Key": "nvidia.com/gpu", "Value": "present", "Effect": "NO_SCHEDULE"}],
            "LaunchTemplate": {
                "Id": {"Ref": "NodeTemplate"},
                "Version": {"Fn::GetAtt": ["NodeTemplate", "LatestVersionNumber"]},
            },
        }
        if site.aws.capacity_block:  # it is in the launch template, and EKS accepts it in one of the two only
            del nodes["Properties"]["InstanceTypes"]
        resources |= {
            **placement_group(site),
            "NodeTemplate": launch_template(
                site, GROUPS, user_data=_local_drives() if site.instance.nvme_bytes else None
            ),
            "Nodes": nodes,
        }
    else:
        resources["KarpenterNodes"] = _access_entry(karpenter_role(site))
    outputs: dict[str, Any] = {"Cluster": {"Ref": "Cluster"}, "NodeSecurityGroup": {"Ref": "NodeSecurityGroup"}}
    if not site.lustre.file_system:
        outputs |= file_system_outputs()
    return {"cluster.yaml": template(f"EKS cluster {site.name}", resources, outputs)}


def _node_group(site: AwsSite, name: str, machine: str, count: int, image: str) -> Resource:
    return {
        "Type": "AWS::EKS::Nodegroup",
        "Properties": {
            "ClusterName": {"Ref": "Cluster"},
            "NodegroupName": name,
            "NodeRole": {"Fn::GetAtt": ["NodeRole", "Arn"]},
            "Subnets": [site.aws.subnet],
            "InstanceTypes": [machine],
            "AmiType": image,
            "ScalingConfig": {"MinSize": count, "DesiredSize": count, "MaxSize": count},
            "NodeRepairConfig": {"Enabled": site.file.health.policy == "replace"},
        },
    }


def _access_entry(role: str) -> Resource:
    """Let nodes with the role join the cluster. EKS does this by itself only for the roles of its own node groups."""
    principal = {"Fn::Sub": f"arn:${{AWS::Partition}}:iam::${{AWS::AccountId}}:role/{role}"}
    return {
        "Type": "AWS::EKS::AccessEntry",
        "Properties": {"ClusterName": {"Ref": "Cluster"}, "PrincipalArn": principal, "Type": "EC2_LINUX"},
    }


def _local_drives() -> str:
    """Return the setting with which the EKS image joins the node's drives and mounts them at /mnt/k8s-disks/0."""
    spec = {"instance": {"localStorage": {"strategy": "RAID0"}}}
    config = {"apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig", "spec": spec}
    return mime("application/node.eks.aws", to_yaml(config))


def _addon(name: str) -> Resource:
    return {
        "Type": "AWS::EKS::Addon",
        "DependsOn": ["SystemNodes"],
        "Properties": {"AddonName": name, "ClusterName": {"Ref": "Cluster"}},
    }


def _role(service: str, policies: tuple[str, ...]) -> Resource:
    trust = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return {
        "Type": "AWS::IAM::Role",
        "Properties": {
            "AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": [trust]},
            "ManagedPolicyArns": [
                {"Fn::Sub": f"arn:${{AWS::Partition}}:iam::aws:policy/{policy}"} for policy in policies
            ],
        },
    }
