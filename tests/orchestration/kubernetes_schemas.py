"""What is wrong with a manifest, by the schemas of Kubernetes and of the custom kinds; unknown fields are wrong.

Pods and Jobs inside other objects are also held against Kubernetes' own schemas, because some custom kinds do not look
inside. Rules written in CEL, and what webhooks refuse, are not covered.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate

CRDS = Path(__file__).with_name("crds")
VERSION = "1.37"
FILES = {
    ("batch.volcano.sh/v1alpha1", "Job"): "batch.volcano.sh_jobs",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobset.x-k8s.io_jobsets",
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): "leaderworkerset.x-k8s.io_leaderworkersets",
    ("kueue.x-k8s.io/v1beta2", "Workload"): "kueue.x-k8s.io_workloads",
    ("scheduling.run.ai/v2alpha2", "PodGroup"): "scheduling.run.ai_podgroups",
    ("scheduling.volcano.sh/v1beta1", "PodGroup"): "scheduling.volcano.sh_podgroups",
    ("kueue.x-k8s.io/v1beta2", "Topology"): "kueue.x-k8s.io_topologies",
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"): "kueue.x-k8s.io_resourceflavors",
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"): "kueue.x-k8s.io_clusterqueues",
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"): "kueue.x-k8s.io_localqueues",
    ("kueue.x-k8s.io/v1beta2", "WorkloadPriorityClass"): "kueue.x-k8s.io_workloadpriorityclasses",
    ("kai.scheduler/v1alpha1", "Topology"): "kai.scheduler_topologies",
    ("scheduling.run.ai/v2", "Queue"): "scheduling.run.ai_queues",
    ("scheduling.volcano.sh/v1beta1", "Queue"): "scheduling.volcano.sh_queues",
    ("topology.volcano.sh/v1alpha1", "HyperNode"): "topology.volcano.sh_hypernodes",
}

SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"


def problems(manifest: dict[str, Any]) -> list[str]:
    """All of them; empty for what an API server would take."""
    return [
        f"{each['kind']} {'/'.join(map(str, error.instance_path))}: {error.message[:300]}"
        for each in (manifest, *_inner(manifest))
        for error in _validator(each["apiVersion"], each["kind"]).iter_errors(each)
    ]


def _inner(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "JobSet":
        return [
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": each["template"]["spec"]}
            for each in spec["replicatedJobs"]
        ]
    templates = [task["template"] for task in spec.get("tasks", ())]
    if "leaderWorkerTemplate" in spec:
        templates.append(spec["leaderWorkerTemplate"]["workerTemplate"])
    return [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]


@cache
def _validator(version: str, kind: str) -> jsonschema_rs.Draft202012Validator:
    """Compiled once: a combination takes microseconds, where kubernetes-validate reads its files anew each time."""
    if (version, kind) not in FILES:
        definitions = json.loads((SCHEMAS / "_definitions.json").read_text())
        group, _, number = version.rpartition("/")
        short = f"{group.partition('.')[0]}-{number}" if group else number
        schema = json.loads((SCHEMAS / f"{kind.lower()}-{short}.json").read_text())
        registry = jsonschema_rs.Registry([(definitions["$id"], definitions)])
        return jsonschema_rs.Draft202012Validator(schema, registry=registry)
    document = json.loads((CRDS / f"{FILES[version, kind]}.json").read_text())
    of_version = next(each for each in document["spec"]["versions"] if each["name"] == version.rpartition("/")[2])
    schema = _closed(of_version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # which custom kinds leave to Kubernetes
    return jsonschema_rs.Draft202012Validator(schema)


def _closed(schema: Any) -> Any:
    """The schema with unknown fields refused, as an API server does when it is asked to be strict."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed = {"type": ["integer", "string"]}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        closed["type"] = [schema["type"], "null"]
    return closed
