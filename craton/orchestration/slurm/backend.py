"""The backend `slurm`: a run is one batch job, known by its number; what it does is in the run directory."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from craton.orchestration.backend import Standing, Submission, read_submission
from craton.orchestration.draft import Draft
from craton.orchestration.errors import SchedulerError, StartError
from craton.orchestration.slurm.allocation import read_allocation
from craton.orchestration.slurm.records import JobRecord
from craton.orchestration.slurm.script import SCRIPT_FILE, ScriptOptions, sbatch_script
from craton.orchestration.slurm.tools import Snapshot, cancel, read_jobs, read_snapshot, release, submit
from craton.orchestration.slurm.waiting import HELD, why_waiting
from craton.telemetry import RunDirectory

REFUSED = "submission failed"  # as opposed to a controller that does not answer


class SlurmBackend:
    name = "slurm"

    def check(self, draft: Draft) -> None:
        """Refuse what sbatch would refuse, and a machine that has none."""
        if shutil.which("sbatch") is None:
            raise StartError(
                "sbatch is not installed here; start this on a login node of the cluster, or `--on local` runs it on "
                "this machine"
            )
        sbatch_script(draft, RunDirectory(Path("runs").absolute() / draft.job.name), ScriptOptions(sys.executable))

    def files(self, draft: Draft, run: RunDirectory) -> dict[str, str]:
        return {SCRIPT_FILE: sbatch_script(draft, run)}

    def command(self, draft: Draft, run: RunDirectory) -> list[list[str]]:
        return [["sbatch", "--parsable", str(run.path / SCRIPT_FILE)]]

    def submit(self, draft: Draft, run: RunDirectory) -> Submission:
        return Submission("slurm", _submit(self.command(draft, run)[0]))

    def look(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        numbers = {run.name: read_submission(run).job for run in runs}
        places = {run.name: run for run in runs}
        listed = {job.id: job for job in read_jobs(number for number in numbers.values() if number)}
        jobs = {name: _job_of(listed, number) for name, number in numbers.items()}
        cluster = read_snapshot() if any(job and job.is_pending for job in jobs.values()) else Snapshot()
        return {name: _standing(jobs[name], number, cluster, places[name]) for name, number in numbers.items()}

    def stop(self, run: RunDirectory) -> None:
        """The agents see the marker."""

    def kill(self, run: RunDirectory) -> None:
        cancel(read_submission(run).job)


def submit_array(draft: Draft, run: RunDirectory, options: ScriptOptions) -> str:
    """Hands over all copies of a job, the first of which is `run`; the number of the array."""
    script = run.path / SCRIPT_FILE
    script.write_text(sbatch_script(draft, run, options), encoding="utf-8")
    return _submit(["sbatch", "--parsable", str(script)])


def release_held(run: RunDirectory) -> bool:
    """Lets go of a job that Slurm holds; False: it holds none."""
    number = read_submission(run).job
    job = _job_of({job.id: job for job in read_jobs([number])}, number) if number else None
    if job is None or not job.is_pending or job.reason not in HELD:
        return False
    release(number)
    return True


def _submit(words: list[str]) -> str:
    try:
        return submit(words)
    except SchedulerError as error:
        hint = "; what was asked for stands under `run:` in the job and `scheduler:` in the cluster file"
        raise SchedulerError(f"{error}{hint if REFUSED in str(error) else ''}") from None


def _job_of(jobs: Mapping[str, JobRecord], number: str) -> JobRecord | None:
    """The job of this number; as long as it waits, a task of an array is part of the array's own record."""
    array, _, task = number.partition("_")
    if number in jobs or not task:
        return jobs.get(number)
    whole = jobs.get(array)
    return whole if whole is not None and whole.has_task(int(task)) else None


def _standing(job: JobRecord | None, number: str, cluster: Snapshot, run: RunDirectory) -> Standing:
    if job is None or job.has_ended:
        # The batch script ends well only when the run is done, or was stopped by its user.
        is_done = job is not None and job.state == "COMPLETED"
        return Standing("ended", number, reason="" if job is None else job.state, outcome="done" if is_done else "")
    if job.is_pending:
        # `scontrol` tells more of a job than squeue does.
        told = _job_of(cluster.by_number, number) or job
        return Standing(
            "waiting",
            number,
            reason=told.reason,
            sentence=why_waiting(told, cluster, time.time()),
            restarts=job.restarts,
            expected_start=job.start,
        )
    allocation = read_allocation(run)
    names = tuple(f"{node.name} on {node.host}" for node in allocation.nodes) if allocation else ()
    return Standing("running", number, nodes=names or (job.nodes,), restarts=job.restarts)
