"""Parts of CloudFormation templates: security group, placement group, launch template, FSx with its S3 link."""

from __future__ import annotations

from typing import Any

from craton.infrastructure.aws.interfaces import interfaces
from craton.infrastructure.aws.site import AwsSite
from craton.yaml_text import to_yaml

Resource = dict[str, Any]
LUSTRE_VERSION = "2.15"  # the newest that FSx has; EFA needs it
EVENTS = ["NEW", "CHANGED", "DELETED"]


def template(description: str, resources: dict[str, Resource], outputs: dict[str, Any] | None = None) -> str:
    """A template; outputs are name → value."""
    document: dict[str, Any] = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": description,
        "Resources": resources,
    }
    if outputs:
        document["Outputs"] = {name: {"Value": value} for name, value in outputs.items()}
    return to_yaml(document)


def security_group(site: AwsSite) -> dict[str, Resource]:
    """Return a security group that allows all traffic within itself (EFA needs it) and out (nodes need it). The rules
    are separate resources, because a group cannot name itself."""
    inside = {"GroupId": {"Ref": "NodeSecurityGroup"}, "IpProtocol": "-1"}
    return {
        "NodeSecurityGroup": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "GroupDescription": f"Nodes of {site.name}: everything among them, as EFA needs",
                "VpcId": site.aws.vpc,
                "Tags": [{"Key": "craton:cluster", "Value": site.name}],
                "SecurityGroupEgress": [{"IpProtocol": "-1", "CidrIp": "0.0.0.0/0", "Description": "out"}],
            },
        },
        "NodeIngress": {
            "Type": "AWS::EC2::SecurityGroupIngress",
            "Properties": {**inside, "SourceSecurityGroupId": {"Ref": "NodeSecurityGroup"}},
        },
        "NodeEgress": {
            "Type": "AWS::EC2::SecurityGroupEgress",
            "Properties": {**inside, "DestinationSecurityGroupId": {"Ref": "NodeSecurityGroup"}},
        },
    }


def placement_group(site: AwsSite) -> dict[str, Resource]:
    """A cluster placement group, where EC2 does not place the nodes itself."""
    if not site.own_placement_group:
        return {}
    return {"PlacementGroup": {"Type": "AWS::EC2::PlacementGroup", "Properties": {"Strategy": "cluster"}}}


def launch_template(site: AwsSite, groups: list[Any], user_data: Any = None) -> Resource:
    """Return interfaces, placement and capacity of the nodes. The user of the template sets the instance type, except
    for a capacity block: EKS and PCS require it here."""
    data: dict[str, Any] = {
        "NetworkInterfaces": [
            {
                "NetworkCardIndex": interface.card,
                "DeviceIndex": interface.device,
                "InterfaceType": interface.kind,
                "Groups": groups,
                "DeleteOnTermination": True,
            }
            for interface in interfaces(site)
        ],
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 200, "VolumeType": "gp3", "Encrypted": True}}
        ],
        "TagSpecifications": [
            {
                "ResourceType": "instance",
                "Tags": [{"Key": "Name", "Value": site.name}, {"Key": "craton:cluster", "Value": site.name}],
            }
        ],
    }
    if site.aws.key_name:
        data["KeyName"] = site.aws.key_name
    if user_data is not None:
        data["UserData"] = {"Fn::Base64": user_data}
    if site.own_placement_group:
        data["Placement"] = {"GroupName": {"Ref": "PlacementGroup"}}
    elif site.aws.placement_group:
        data["Placement"] = {"GroupName": site.aws.placement_group}
    if reservation := site.aws.capacity_block or site.aws.capacity_reservation:
        target = {"CapacityReservationTarget": {"CapacityReservationId": reservation}}
        data["CapacityReservationSpecification"] = target
    if site.aws.capacity_block:
        data["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
        data["InstanceType"] = site.instance.name
    return {"Type": "AWS::EC2::LaunchTemplate", "Properties": {"LaunchTemplateData": data}}


def mime(content_type: str, text: str) -> str:
    """Return user data as MIME multipart, to which PCS and EKS can add their own parts."""
    lines = [
        "MIME-Version: 1.0",
        'Content-Type: multipart/mixed; boundary="==PART=="',
        "",
        "--==PART==",
        f'Content-Type: {content_type}; charset="us-ascii"',
        "",
        text.rstrip("\n"),
        "",
        "--==PART==--",
        "",
    ]
    return "\n".join(lines)


def file_system(site: AwsSite, groups: list[Any]) -> dict[str, Resource]:
    """Return FSx for Lustre and its S3 link: new, changed and deleted objects are imported, files exported. Empty if
    the file system already exists."""
    lustre = site.lustre
    if lustre.file_system:
        return {}
    configuration: dict[str, Any] = {
        "DeploymentType": "PERSISTENT_2",
        "PerUnitStorageThroughput": lustre.megabytes_per_second_per_tib,
        "DataCompressionType": "LZ4",
        "MetadataConfiguration": {"Mode": "AUTOMATIC"},
    }
    if lustre.efa:
        configuration["EfaEnabled"] = True
    result: dict[str, Resource] = {
        "FileSystem": {
            "Type": "AWS::FSx::FileSystem",
            "DeletionPolicy": "Retain",  # deleting the stack must not delete checkpoints
            "UpdateReplacePolicy": "Retain",
            "Properties": {
                "FileSystemType": "LUSTRE",
                "FileSystemTypeVersion": LUSTRE_VERSION,
                "StorageType": "SSD",
                "StorageCapacity": lustre.capacity_gib,
                "SubnetIds": [site.aws.subnet],
                "SecurityGroupIds": groups,
                "LustreConfiguration": configuration,
                "Tags": [{"Key": "Name", "Value": site.name}],
            },
        }
    }
    if lustre.data:
        result["DataRepository"] = {
            "Type": "AWS::FSx::DataRepositoryAssociation",
            "Properties": {
                "FileSystemId": {"Ref": "FileSystem"},
                "FileSystemPath": "/data",
                "DataRepositoryPath": lustre.data,
                "BatchImportMetaDataOnCreate": True,
                "S3": {"AutoImportPolicy": {"Events": EVENTS}, "AutoExportPolicy": {"Events": EVENTS}},
            },
        }
    return result


def file_system_outputs() -> dict[str, Any]:
    return {
        "FileSystem": {"Ref": "FileSystem"},
        "FileSystemMount": {"Fn::GetAtt": ["FileSystem", "LustreMountName"]},
    }


def storage_stack(site: AwsSite) -> dict[str, str]:
    """Return the file system alone, for clusters that another service creates; empty if it already exists."""
    if site.lustre.file_system:
        return {}
    resources = file_system(site, list(site.aws.security_groups))
    return {"storage.yaml": template(f"Shared file system of {site.name}", resources, file_system_outputs())}
