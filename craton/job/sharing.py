"""`run.share_gpus`: where nodes may share a GPU."""

from __future__ import annotations

from craton.job.cluster import ClusterRef


def sharing_problem(kind: str, cluster: ClusterRef, on: str | None = None) -> str:
    """Return why the ranks of such a job cannot share GPUs on the backend `on`, default: the cluster's; "" if they
    can."""
    scheduler = cluster.file.scheduler if cluster.file else None
    backend = on or (scheduler.kind if scheduler else "local")
    if backend != "local":
        return (
            f"share_gpus is for runs on this machine, not on {backend}, where each rank has its own GPU; remove "
            "share_gpus, or run it here with --on local"
        )
    if not cluster.is_local:
        return f"share_gpus is for `cluster: local x N`, not for {cluster}; write e.g. `cluster: local x 4`"
    if kind == "serve":
        return "share_gpus does not apply to kind serve: a server runs on one node; remove share_gpus"
    return ""
