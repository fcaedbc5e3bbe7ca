"""`craton validate JOB`: check a job file without planning it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from craton.job import Job


def validate(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check a job file: keys, model, cluster, batch and layout."""
    import json

    from craton.job import check_job, load_job
    from craton.orchestration.draft import check_needs
    from craton.planning.calibration import check_software

    checked = load_job(job)
    check_software(checked)
    check_needs(checked)
    summary = check_job(checked, num_gpus=_num_gpus(checked))
    more = _check_members(checked)
    print(json.dumps({"ok": True, **summary.as_dict(), **more}) if as_json else f"ok: {summary}{_members_text(more)}")


def _check_members(job: Job) -> dict[str, object]:
    """Check the job that trains the weights, and every member of the sweep, like jobs of their own."""
    from craton.job import ContentError, check_job, sweep_jobs
    from craton.orchestration.draft import check_needs

    found: dict[str, object] = {}
    if job.weights_job is not None:
        check_needs(job.weights_job)
        check_job(job.weights_job, num_gpus=_num_gpus(job.weights_job))
        _check_members(job.weights_job)
        found["weights_job"] = job.weights_job.name
    if job.sweep is not None:
        members = sweep_jobs(job)
        for number, member in enumerate(members):
            if number == 0 or any(key.startswith("data") for key in member.values):
                check_needs(member.job)
            try:
                check_job(member.job, num_gpus=_num_gpus(member.job))
            except ContentError as error:
                raise ContentError([f"{problem} (member {member.name})" for problem in error.problems]) from None
        found["members"] = [member.name for member in members]
    return found


def _members_text(found: dict[str, object]) -> str:
    from craton.formatting import counted

    members = found.get("members")
    swept = f" · sweep of {counted(len(members), 'member')}" if isinstance(members, list) else ""
    return f"{swept} · weights of {found['weights_job']}" if "weights_job" in found else swept


def _num_gpus(job: Job) -> int:
    """Return the number of GPUs: one rank per local node, without measuring this machine; else from the catalog.
    Nodes that share GPUs need one here, with enough memory for their ranks."""
    from craton.infrastructure import CatalogError, nodes_per_gpu, resolve_cluster, visible_accelerators

    try:
        if job.run.share_gpus:
            nodes_per_gpu(visible_accelerators(), job.cluster.num_nodes)
        if job.cluster.is_local:
            return job.cluster.num_nodes
        cluster = resolve_cluster(job.cluster, job.price)
        return cluster.instance.num_gpus if job.serve else cluster.num_gpus
    except CatalogError as error:
        raise CatalogError(f"{job.where('cluster')}cluster: {error}") from None
