"""The servers of `rollout: {mode: separate}`: members `rollout-0` … of kind serve, with the model that is trained.

They begin with random weights, and get the trained ones before the first request. On this machine they listen on
127.0.0.1; elsewhere on all interfaces, with the API key in ROLLOUT_KEY.
"""

from __future__ import annotations

from typing import Any

import yaml

from craton.agent.processes import free_port
from craton.job import Job, dump_job, parse_job
from craton.job.sections.posttraining import ROLLOUT_KEY_VARIABLE

FIRST_PORT = 8100  # of servers on nodes of their own
LOCAL_MEMORY = 0.4  # of a GPU that the trainer uses, too


def rollout_servers(job: Job, backend: str) -> dict[str, Job]:
    """Return name → job of the servers that a job's rollouts need; none unless its mode is separate."""
    names = job.rollout.worker_names if job.rollout is not None else []
    return {name: _server_job(job, backend, name, number) for number, name in enumerate(names)}


def _server_job(job: Job, backend: str, name: str, number: int) -> Job:
    assert job.rollout is not None
    assert job.train is not None
    document = yaml.safe_load(dump_job(job))
    model = yaml.safe_load(dump_job(job.weights_job))["model"] if job.weights_job is not None else document["model"]
    is_local = backend == "local"
    serve: dict[str, Any] = {
        "host": "127.0.0.1" if is_local else "0.0.0.0",
        "port": free_port() if is_local else FIRST_PORT + number,
        "precision": "fp32" if job.train.precision == "fp32" else "bf16",
        "max_length": job.sequence,
        "admin": True,
        "initialize": "random",
        "standby": True,
        **({"memory": LOCAL_MEMORY} if is_local else {"api_keys": ROLLOUT_KEY_VARIABLE}),
    }
    server = {
        "name": name,
        "kind": "serve",
        "model": model,
        "serve": serve,
        "cluster": "local" if is_local else _one_node(document["cluster"]),
        "run": {**document["run"], "copies": 1, "share_gpus": False},  # it is one node
        "recover": document["recover"],
    }
    if job.rollout.layout is not None:
        server["layout"] = job.rollout.layout.model_dump(exclude_none=True)
    return parse_job(yaml.safe_dump(server, sort_keys=False), f"{name}.yaml").model_copy(update={"folder": job.folder})


def _one_node(cluster: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return one node of the same cluster, a reference or a cluster file."""
    if isinstance(cluster, dict):
        return {**cluster, "take": "1", "spares": 0}
    return f"{cluster.partition(' x ')[0]} x 1"
