"""Checks before a start: the run's name, the places it writes to, its port."""

from __future__ import annotations

import tempfile
from pathlib import Path

from craton.infrastructure import StorageError
from craton.infrastructure.storage import open_store
from craton.job import TRAINING_KINDS, Job
from craton.job.sections import place_of
from craton.orchestration.backend import read_submission
from craton.orchestration.errors import RunStateError, StartError
from craton.orchestration.local import living_agents
from craton.orchestration.saved_steps import newest_checkpoint
from craton.orchestration.server import check_port
from craton.orchestration.watching import GOES_ON, standing_of
from craton.telemetry import RunDirectory, RunExistsError, summarize
from craton.telemetry.files import names_in
from craton.telemetry.members import living_manager, member_runs, owner_of

START_PRODUCTIVE_SECONDS = 1.0  # a command that fails at once counts as productive from its start
CHECK_SECONDS = 20.0  # timeout for an object store that a run would write to


def check_name_is_free(root: Path, name: str) -> None:
    """Refuse a taken name or an unwritable root early, before anything is planned or tokenized."""
    if (root / name).exists() and not failed_at_start(RunDirectory(root / name)):
        raise RunExistsError(taken_text(root, name))
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise StartError(
            f"cannot write runs to {root} ({error.strerror}); set CRATON_RUNS to a writable folder"
        ) from None


def failed_at_start(run: RunDirectory) -> bool:
    """Whether a local run and its members failed before they did anything: no step, checkpoint, productive second. Its
    name is free, so that the fixed job can start again under the same name."""
    if run.path.is_symlink() or not run.has("FATAL") or read_submission(run).on != "local":
        return False
    try:
        summary = summarize(run)
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    did_something = summary.step > 0 or summary.ledger.get("productive", 0.0) > START_PRODUCTIVE_SECONDS
    has_saved = any(names_in(run.path / "checkpoints" / tier) for tier in names_in(run.path / "checkpoints", "[a-z]*"))
    if summary.state != "failed" or did_something or has_saved or living_agents(run):
        return False
    return living_manager(run) is None and all(failed_at_start(member) for member in member_runs(run))


def check_places(job: Job, run: Path, on: str = "local") -> None:
    """Refuse unwritable checkpoint tiers before data is prepared. Tiers local to a cluster's nodes cannot be tested
    from here."""
    storage = job.cluster.file.storage if job.cluster.file else None
    for number, tier in enumerate(job.checkpoint.tiers if job.kind in TRAINING_KINDS else ()):
        located = place_of(tier, storage, run)
        if located.is_inside_run or (located.is_node_local and on != "local"):
            continue
        try:
            if located.is_url:
                open_store(located.place).check_writable(CHECK_SECONDS)
            else:
                Path(located.place).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=located.place):
                    pass
        except OSError as error:
            raise StartError(
                f"{job.where('checkpoint', 'tiers', number)}checkpoint tier {tier.to} cannot be written: "
                f"{located.place}: {error.strerror}; give it a writable folder"
            ) from None
        except StorageError as error:
            raise StartError(f"{job.where('checkpoint', 'tiers', number)}checkpoint tier {tier.to}: {error}") from None


def check_owner(run: RunDirectory) -> None:
    """Refuse to resume a member whose owner does not run: nothing would look after it."""
    owner = owner_of(run)
    if owner is None or living_manager(owner) is not None or standing_of(owner).condition in GOES_ON:
        return
    name = owner.name
    raise RunStateError(f"{run.name} is a member of {name}, which is not running; `craton resume {name}` resumes both")


def check_server(job: Job) -> None:
    """Refuse a server that would fail after loading its model; no check for other jobs. With `model: {job: FILE}` the
    server starts once that job is done."""
    if job.serve is None:
        return
    check_port(job)
    trained = job.trained_run if job.weights_job is None else None
    if trained is not None and job.serve.initialize != "random" and newest_checkpoint(RunDirectory(trained)) is None:
        raise StartError(
            f"{job.where('model')}the run {trained.name} has no checkpoint yet, so there is nothing to serve; "
            f"`craton stop {trained.name}` saves one"
        )


def taken_text(root: Path, name: str) -> str:
    number = 2
    while (root / f"{name}-{number}").exists():
        number += 1
    run = RunDirectory(root / name)
    is_running = standing_of(run).condition in GOES_ON
    there = "is running" if is_running else "already exists"
    verb = f"`craton logs {name} -f` follows it" if is_running else f"`craton resume {name}` resumes it"
    return f"the run {name} {there} ({run.path}); {verb}, `--name {name}-{number}` starts another"
