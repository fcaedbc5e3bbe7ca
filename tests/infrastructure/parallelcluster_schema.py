"""Runs in the environment of the validators: loads ParallelCluster files with its own schema and Slurm's deny list.

With a capacity reservation the schema asks EC2; here it gets an answer that says which instance the reservation is for,
and any other question to AWS is an error. Prints one JSON object: file → problems.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import botocore.client
import yaml

os.environ.update(AWS_DEFAULT_REGION="us-east-2", AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none")


def problems_of(path: Path) -> list[str]:
    from marshmallow import ValidationError
    from pcluster.schemas.cluster_schema import ClusterSchema
    from pcluster.validators.slurm_settings_validator import SLURM_SETTINGS_DENY_LIST

    document = yaml.safe_load(path.read_text())
    resource = document["Scheduling"]["SlurmQueues"][0]["ComputeResources"][0]

    def answer(_client: Any, operation: str, _parameters: Any) -> dict[str, Any]:
        if operation == "DescribeCapacityReservations":
            reservation = {"InstanceType": resource["InstanceType"], "CapacityReservationId": "cr-0123456789abcdef0"}
            return {"CapacityReservations": [{**reservation, "ReservationType": "capacity-block"}]}
        raise AssertionError(f"the schema asked AWS for {operation}")

    botocore.client.BaseClient._make_api_call = answer
    try:
        config = ClusterSchema(cluster_name="test").load(document)
    except ValidationError as error:
        return [str(error.messages)]
    settings = document["Scheduling"].get("SlurmSettings", {}).get("CustomSlurmSettings", [])
    denied = SLURM_SETTINGS_DENY_LIST["SlurmConf"]["Global"]
    queue = config.scheduling.queues[0]
    assert queue.compute_resources[0].efa.enabled == resource["Efa"]["Enabled"]
    return [f"{key} is denied" for entry in settings for key in entry if key.lower() in denied]


if __name__ == "__main__":
    print(json.dumps({name: problems_of(Path(name)) for name in sys.argv[1:]}))
