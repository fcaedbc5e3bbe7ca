"""AWS Parallel Computing Service: one CloudFormation stack with cluster, login and compute node groups, queue, roles
and file system; scripts that nodes fetch."""

from __future__ import annotations

from shlex import quote
from typing import Any

from craton.infrastructure.aws.scripts import HOOKS, setup_script, slurm_hooks
from craton.infrastructure.aws.site import AwsSite, facts
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

GROUPS: list[Any] = [{"Ref": "NodeSecurityGroup"}]


def pcs(site: AwsSite) -> dict[str, str]:
    nodes = launch_template(site, GROUPS, user_data=_user_data(site, "setup.sh"))
    login = {
        "Type": "AWS::EC2::LaunchTemplate",
        "Properties": {
            "LaunchTemplateData": {
                "SecurityGroupIds": GROUPS,
                "MetadataOptions": {"HttpTokens": "required"},
                "UserData": {"Fn::Base64": _user_data(site, "")},
                **({"KeyName": site.aws.key_name} if site.aws.key_name else {}),
            }
        },
    }
    resources: dict[str, Resource] = {
        **security_group(site),
        **placement_group(site),
        **file_system(site, GROUPS),
        **_roles(site),
        "Cluster": _cluster(site),
        "NodeTemplate": nodes,
        "LoginTemplate": login,
        "Nodes": _node_group(site),
        "Login": _login_group(site),
        "Queue": {
            "Type": "AWS::PCS::Queue",
            "Properties": {
                "Name": site.queue,
                "ClusterId": {"Fn::GetAtt": ["Cluster", "Id"]},
                "ComputeNodeGroupConfigurations": [{"ComputeNodeGroupId": {"Fn::GetAtt": ["Nodes", "Id"]}}],
            },
        },
    }
    outputs = {"Cluster": {"Fn::GetAtt": ["Cluster", "Id"]}}
    if not site.lustre.file_system:
        outputs |= file_system_outputs()
    return {
        "cluster.yaml": template(f"Slurm cluster {site.name} on AWS PCS", resources, outputs),
        "scripts/setup.sh": setup_script(site, timer=True, raid=True),
        **{f"scripts/{name}": text for name, text in slurm_hooks(site).items()},
    }


def _cluster(site: AwsSite) -> Resource:
    nodes = site.num_nodes + 1  # and the login node
    # PCS accepts some of Slurm's settings. SchedulerParameters is not in the published lists of its API, and an
    # unsupported setting makes it reject the whole cluster.
    settings = [("Prolog", f"{HOOKS}/prolog.sh"), ("Epilog", f"{HOOKS}/epilog.sh")]
    return {
        "Type": "AWS::PCS::Cluster",
        "Properties": {
            "Name": site.name,
            "Size": next(size for size, most in facts()["pcs_sizes"].items() if nodes <= most),
            "Scheduler": {"Type": "SLURM", "Version": site.aws.slurm_version},
            "Networking": {"SubnetIds": [site.aws.subnet], "SecurityGroupIds": GROUPS},
            "SlurmConfiguration": {
                "SlurmCustomSettings": [{"ParameterName": name, "ParameterValue": value} for name, value in settings],
                "Accounting": {"Mode": "STANDARD"},
            },
        },
    }


def _node_group(site: AwsSite) -> Resource:
    aws = site.aws
    fewest = site.file.nodes.min_nodes if site.file.nodes.min_nodes and not aws.capacity_block else site.num_nodes
    return _group(
        name=site.queue,
        machine=site.instance.name,
        launch="NodeTemplate",
        fewest=fewest,
        most=site.num_nodes,
        subnet=aws.subnet,
        image=aws.image,
        purchase="CAPACITY_BLOCK" if aws.capacity_block else "ONDEMAND",
    )


def _login_group(site: AwsSite) -> Resource:
    return _group(
        name="login",
        machine=site.aws.head_instance,
        launch="LoginTemplate",
        fewest=1,
        most=1,
        subnet=site.aws.head_subnet or site.aws.subnet,
        image=site.aws.image,
        purchase="ONDEMAND",
    )


def _group(
    *,
    name: str,
    machine: str,
    launch: str,
    fewest: int,
    most: int,
    subnet: str | None,
    image: str | None,
    purchase: str,
) -> Resource:
    return {
        "Type": "AWS::PCS::ComputeNodeGroup",
        "Properties": {
            "Name": name,
            "ClusterId": {"Fn::GetAtt": ["Cluster", "Id"]},
            "AmiId": image,
            "SubnetIds": [subnet],
            "InstanceConfigs": [{"InstanceType": machine}],
            "PurchaseOption": purchase,
            "ScalingConfiguration": {"MinInstanceCount": fewest, "MaxInstanceCount": most},
            "IamInstanceProfileArn": {"Fn::GetAtt": ["NodeProfile", "Arn"]},
            "CustomLaunchTemplate": {
                "TemplateId": {"Ref": launch},
                "Version": {"Fn::GetAtt": [launch, "LatestVersionNumber"]},
            },
        },
    }


def _roles(site: AwsSite) -> dict[str, Resource]:
    """Return the roles: nodes may register themselves and read their scripts. PCS requires its name in role or path."""
    bucket, _, prefix = site.scripts.removeprefix("s3://").partition("/")
    objects = f"arn:${{AWS::Partition}}:s3:::{bucket}/{prefix + '/' if prefix else ''}*"
    statements = [
        {"Effect": "Allow", "Action": "pcs:RegisterComputeNodeGroupInstance", "Resource": "*"},
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": {"Fn::Sub": objects}},
        {
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": {"Fn::Sub": f"arn:${{AWS::Partition}}:s3:::{bucket}"},
        },
    ]
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    return {
        "NodeRole": {
            "Type": "AWS::IAM::Role",
            "Properties": {
                "Path": "/aws-pcs/",
                "AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": [trust]},
                "ManagedPolicyArns": [
                    {"Fn::Sub": "arn:${AWS::Partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"}
                ],
                "Policies": [
                    {"PolicyName": "node", "PolicyDocument": {"Version": "2012-10-17", "Statement": statements}}
                ],
            },
        },
        "NodeProfile": {
            "Type": "AWS::IAM::InstanceProfile",
            "Properties": {"Path": "/aws-pcs/", "Roles": [{"Ref": "NodeRole"}]},
        },
    }


def _user_data(site: AwsSite, script: str) -> Any:
    """Return MIME user data, which PCS joins with its own part: mount the file system, then run the node's script."""
    lustre = site.lustre
    system = lustre.file_system or "${FileSystem}"
    mount = lustre.mount_name or "${FileSystem.LustreMountName}"
    source = f"{system}.fsx.${{AWS::Region}}.amazonaws.com@tcp:/{mount}"
    commands = [
        f"mkdir -p {quote(lustre.path)}",
        f"mountpoint -q {quote(lustre.path)} || mount -t lustre -o relatime,flock {source} {quote(lustre.path)}",
    ]
    if script:
        place = f"/run/craton-{script}"  # writable by root only, so that no other user can place a script there first
        commands.append(f"aws s3 cp --region ${{AWS::Region}} {quote(site.scripts + '/' + script)} {place}")
        commands.append(f"bash {place}")
    return {"Fn::Sub": mime("text/x-shellscript", "\n".join(["#!/bin/bash", "set -e", *commands]))}
