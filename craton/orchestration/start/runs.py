"""Stop and resume runs: what the verbs `stop` and `resume` do to a run directory.

A live run is never started a second time, and a resume changes only the files that describe the next generation.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import yaml

from craton.agent import next_number
from craton.agent.coordination import check_secret
from craton.agent.processes import free_port
from craton.job import Job, JobError, SchemaError, dump_job, load_job, parse_job
from craton.orchestration.backend import read_submission
from craton.orchestration.backends import backend_of_run
from craton.orchestration.changes import faults_left, resized_nodes
from craton.orchestration.draft import (
    COPY,
    JOB_FOLDER,
    Draft,
    Progress,
    check_code,
    draft_run,
    with_chosen_layout,
    with_fitting_layout,
)
from craton.orchestration.draft.members import Members
from craton.orchestration.errors import RunEndedError, RunStateError
from craton.orchestration.local import kill_manager
from craton.orchestration.run_files import USER_STOP
from craton.orchestration.saved_steps import newest_checkpoint
from craton.orchestration.start.checks import check_server
from craton.orchestration.start.relaunch import last_launch
from craton.orchestration.start.submit import launch
from craton.orchestration.watching import check_not_running, check_running, launching, living_members
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import storage_problem
from craton.telemetry.members import living_manager, owner_of, read_members


def stop_run(run: RunDirectory) -> None:
    """Ask the ranks to save a checkpoint, or to finish running requests, and exit; return at once. A pending run is
    removed from its queue. The member manager stops the runs that it owns; without one, they are stopped here."""
    try:
        standing = check_running(run, may_wait=True)
    except RunEndedError:
        if living_manager(run) is not None:  # which restarts agents that were killed, unless there is a STOP
            _mark_stop(run, USER_STOP)
            return
        left = living_members(run)
        for member in reversed(left):
            stop_run(member)
        if left:
            return
        raise
    _mark_stop(run, USER_STOP)
    if not run.has("STOP"):
        raise RunStateError(
            f"{run.name} cannot be stopped: {storage_problem(run.path) or f'{run.path} cannot be written'}; then "
            f"stop it again, or end it without saving: `craton stop {run.name} --now`"
        )
    backend = backend_of_run(run)
    if standing.condition == "waiting":
        backend.kill(run)
    else:
        backend.stop(run)


def kill_run(run: RunDirectory) -> None:
    """End every process of the run and of the runs that it owns at once, without a checkpoint."""
    has_members = living_manager(run) is not None or bool(living_members(run))
    try:
        check_running(run, may_wait=True)
    except RunEndedError:
        if not has_members:
            raise
    _mark_stop(run, f"{USER_STOP} --now")  # first: an agent that starts now ends by itself
    if has_members:
        kill_manager(run)
        for member in reversed(living_members(run)):
            with suppress(RunEndedError):
                kill_run(member)
    backend_of_run(run).kill(run)


def _mark_stop(run: RunDirectory, text: str) -> None:
    """Set the STOP marker. On a full disk it is set without text, which is enough; on a read-only disk it is not."""
    with suppress(OSError):
        run.mark("STOP", text)


def release_run(run: RunDirectory) -> bool:
    """Release a run that its scheduler holds, for example after a failed prolog. False if it is not held."""
    if read_submission(run).on != "slurm":
        return False
    from craton.orchestration.slurm import release_held

    return release_held(run)


def resumed_job(run: RunDirectory, cluster: str | None = None, steps: int | None = None) -> Job:
    """Return the job of a run's next generation, on the number of nodes last requested. On another cluster the planner
    chooses a new layout."""
    check_not_running(run)
    try:
        job = load_job(run.job_path)
    except SchemaError:
        raise
    except JobError as error:
        problems = "; ".join(str(error).splitlines())
        raise RunStateError(
            f"{problems}; if the file is damaged or missing, copy the job file that {run.name} was started from to "
            f"{run.job_path}"
        ) from None
    nodes = resized_nodes(run)
    if cluster is None and nodes is not None and nodes != job.cluster.num_nodes:
        smallest = job.cluster.min_nodes if job.cluster.min_nodes < nodes else 0
        resized = job.cluster.model_copy(update={"num_nodes": nodes, "min_nodes": smallest})
        ranks_per_node = int(read_json(run.launch_path).get("ranks_per_node") or 1)
        job = with_fitting_layout(job.model_copy(update={"cluster": resized}), nodes * ranks_per_node)
    if cluster is None and steps is None:
        return job
    document = yaml.safe_load(dump_job(job if cluster is None else with_chosen_layout(job)))
    if cluster is not None:
        document["cluster"] = cluster
    if steps is not None:
        if job.train is None:
            raise RunStateError(f"{run.name} is of kind {job.kind}, which has no steps; remove --steps")
        document["train"].pop("tokens", None)
        document["train"]["steps"] = steps
    return parse_job(yaml.safe_dump(document, sort_keys=False), f"{run.name}/job.yaml", run.path)


def draft_resume(
    run: RunDirectory,
    job: Job,
    *,
    on: str | None = None,
    stop_at: int | None = None,
    progress: Progress | None = None,
) -> Draft:
    """Draft the next generation of a run, planned again; on the same backend by default."""
    saved = newest_checkpoint(run, job)
    if saved and job.steps is not None and saved.step >= job.steps:
        raise RunStateError(
            f"{run.name} is already at step {saved.step:,} of {job.steps:,}; `--steps {2 * saved.step}` trains "
            f"further, `craton export {run.name} FOLDER` exports the model"
        )
    if saved and stop_at is not None and stop_at <= saved.step:
        raise RunStateError(
            f"--stop-at {stop_at} is not after the newest checkpoint of {run.name}, step {saved.step:,}; give a later "
            "step, or remove it"
        )
    if run.has("DONE") and job.kind == "command":
        raise RunStateError(f"{run.name} is done; `craton run` with another --name starts its command again")
    check_code(run)
    check_secret(run)
    spec, present = read_members(run), read_submission(run).on
    if spec.members and present == "local" and on not in (None, "local"):
        raise RunStateError(
            f"the members of {run.name} were planned for this machine, so it cannot be resumed on {on}; `craton run` "
            f"with --on {on} and another --name starts it there"
        )
    last, rebuilt = last_launch(run, job)
    draft = draft_run(
        job.model_copy(update={"chaos": ()}),
        run.path,
        on=on or present,
        generation=max(next_number(run), last.generation + 1),
        stop_at=stop_at,
        job_folder=last.env.get(JOB_FOLDER, "."),
        port=free_port(),
        progress=progress,
        members=Members(spec) if spec.members else None,
    )
    left = faults_left(run, job, last, draft.launch, saved.step if saved else 0)
    copy = {COPY: last.env[COPY]} if COPY in last.env else {}
    owner = owner_of(run)
    launch = replace(draft.launch, chaos=left, env={**draft.launch.env, **copy}, owner=str(owner.path) if owner else "")
    return replace(draft, job=job, launch=launch, note="; ".join(filter(None, [rebuilt, draft.note])))


def resume_run(run: RunDirectory, draft: Draft) -> None:
    """Start the next generation, which restores the newest checkpoint. A refusal leaves the run unchanged."""
    with launching(run):
        check_not_running(run)
        if draft.on == "local":
            check_server(draft.job)
        launch(run, draft)
