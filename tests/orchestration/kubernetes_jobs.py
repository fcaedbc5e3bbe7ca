"""Jobs and drafts for Kubernetes, made of the parts that tests vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from craton.job import Job, parse_job
from craton.orchestration.draft import Draft
from craton.orchestration.draft.draft import launch_of
from craton.orchestration.kubernetes.target import KubernetesTarget, target_of

LAPTOP = Path("/home/ada/runs")
SHARED = Path("/fsx/runs")
LEAF = "topology.k8s.aws/network-node-layer-3"
SPINE = "topology.k8s.aws/network-node-layer-2"

KINDS: dict[str, dict[str, Any]] = {
    "pretrain": {
        "model": "llama-3.1-8b",
        "data": {"path": "/fsx/tokens", "sequence": 8192},
        "train": {"global_batch_sequences": 256, "steps": 1000},
    },
    "command": {"command": ["torchrun", "train.py", "--lr", "3e-4"]},
    "serve": {"model": "llama-3.1-8b", "serve": {"initialize": "random"}},
}
MACHINES: dict[str, dict[str, Any]] = {
    "p5": {"instance": "p5.48xlarge"},
    "lab": {
        "hardware": {
            "name": "lab",
            "gpu": "H100-SXM",
            "num_gpus": 8,
            "network_bytes_per_second": "400GB/s",
            "vcpus": 224,
            "host_memory_bytes": "2TiB",
        }
    },
}


def cluster(machine: str = "p5", nodes: int | str = 4, **more: Any) -> dict[str, Any]:
    """A cluster file, inline."""
    scheduler = {
        "kind": "kubernetes",
        "namespace": "train",
        "image": "example.com/train:1",
        **more.pop("scheduler", {}),
    }
    storage = {"shared": {"path": "/fsx", "kind": "lustre", "claim": "fsx"}, **more.pop("storage", {})}
    levels = {"leaf": {"label": LEAF, "tier": 1}, "spine": {"label": SPINE, "tier": 2}}
    return {
        "name": "lab",
        **MACHINES[machine],
        "nodes": nodes,
        "levels": levels,
        "storage": storage,
        "scheduler": scheduler,
        **more,
    }


def job(kind: str = "pretrain", place: object = None, name: str = "llm", **more: Any) -> Job:
    document = {"name": name, "kind": kind, **KINDS[kind], "cluster": place or cluster(), **more}
    return parse_job(yaml.safe_dump(document, sort_keys=False))


def draft(wanted: Job, run: Path, generation: int = 0) -> Draft:
    """Without a plan, which costs a second and changes nothing that is emitted."""
    return Draft(wanted, None, launch_of(wanted, None, run, generation, dict(wanted.run.env), 29500, "kubernetes"))


def target(wanted: Job, root: Path = LAPTOP, **more: Any) -> KubernetesTarget:
    run = root / wanted.name
    return target_of(draft(wanted, run), run, **{"submission": "0123456789abcdef", "user": (1000, 1000), **more})
