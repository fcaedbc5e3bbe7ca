"""Checks before a run is started: its name, the places it writes to, the port it listens on."""

from __future__ import annotations

import tempfile
from pathlib import Path

from craton.infrastructure import StorageError
from craton.infrastructure.storage import open_store
from craton.job import TRAINING_KINDS, Job
from craton.job.sections import place_of
from craton.orchestration.backend import read_submission
from craton.orchestration.errors import StartError
from craton.orchestration.local import living_agents
from craton.orchestration.server import check_port
from craton.orchestration.start.saved_steps import newest_checkpoint
from craton.orchestration.watching import GOES_ON, standing_of
from craton.telemetry import RunDirectory, RunExistsError, summarize
from craton.telemetry.files import names_in

START_PRODUCTIVE_SECONDS = 1.0  # of a command that failed at once: it is productive from its first moment
CHECK_SECONDS = 20.0  # how long a service is waited for that a run would write to


def check_name_is_free(root: Path, name: str) -> None:
    """Refuse early, before anything is planned or tokenized, a name that is taken or a root that cannot be written."""
    if (root / name).exists() and not failed_at_start(RunDirectory(root / name)):
        raise RunExistsError(taken_text(root, name))
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise StartError(
            f"runs cannot be kept in {root} ({error.strerror}); set CRATON_RUNS to a folder you may write to"
        ) from None


def failed_at_start(run: RunDirectory) -> bool:
    """Whether a run of this machine failed before it did anything: no step, no checkpoint, no productive second. Its
    name is free, for whoever mends the job file starts the job again under the same name."""
    if run.path.is_symlink() or not run.has("FATAL") or read_submission(run).on != "local":
        return False
    try:
        summary = summarize(run)
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    did_something = summary.step > 0 or summary.ledger.get("productive", 0.0) > START_PRODUCTIVE_SECONDS
    has_saved = any(names_in(run.path / "checkpoints" / tier) for tier in names_in(run.path / "checkpoints", "[a-z]*"))
    return summary.state == "failed" and not did_something and not has_saved and not living_agents(run)


def check_places(job: Job, run: Path, on: str = "local") -> None:
    """Refuse before data is prepared what no rank could write to. What only the nodes of a cluster have cannot be tried
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
                f"{located.place}: {error.strerror}; give it a folder that you may write to"
            ) from None
        except StorageError as error:
            raise StartError(f"{job.where('checkpoint', 'tiers', number)}checkpoint tier {tier.to}: {error}") from None


def check_server(job: Job) -> None:
    """Refuse before a model is loaded what its server would fail on then; nothing for other jobs."""
    if job.serve is None:
        return
    check_port(job)
    trained = job.trained_run
    if trained is not None and job.serve.initialize != "random" and newest_checkpoint(RunDirectory(trained)) is None:
        raise StartError(
            f"{job.where('model')}the run {trained.name} has no checkpoint yet, so that there is nothing to serve; "
            f"`craton stop {trained.name}` saves one"
        )


def taken_text(root: Path, name: str) -> str:
    number = 2
    while (root / f"{name}-{number}").exists():
        number += 1
    run = RunDirectory(root / name)
    is_running = standing_of(run).condition in GOES_ON
    there = "is running" if is_running else "exists already"
    verb = f"`craton logs {name} -f` follows it" if is_running else f"`craton resume {name}` goes on with it"
    return f"the run {name} {there} ({run.path}); {verb}, `--name {name}-{number}` starts another"
