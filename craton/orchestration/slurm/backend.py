"""The backend `slurm`: a run is one batch job, known by its number; what it does is in the run directory."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from craton.orchestration.backend import Standing, Submission, read_submission, write_submission
from craton.orchestration.errors import SchedulerError, StartError
from craton.orchestration.slurm.allocation import read_allocation
from craton.orchestration.slurm.handover import NEVER, RELEASED, RESTARTS, hand_over, is_fresh, unheard_numbers
from craton.orchestration.slurm.mounts import image_of, mounts_of
from craton.orchestration.slurm.records import JobRecord, job_of
from craton.orchestration.slurm.script import SCRIPT_FILE, ScriptOptions, copies_stem, sbatch_script
from craton.orchestration.slurm.tools import SlurmState, cancel, read_jobs, read_snapshot, release
from craton.orchestration.slurm.waiting import HELD, why_waiting
from craton.telemetry import RunDirectory

if TYPE_CHECKING:
    from craton.orchestration.draft import Draft

LAUNCH_FAILED = "launch_failed_requeued_held"  # a prolog failed, where Slurm is not told `nohold_on_prolog_fail`


class SlurmBackend:
    name = "slurm"

    def check(self, draft: Draft, run: RunDirectory) -> None:
        """Refuse what sbatch would refuse, and a machine that has none."""
        if shutil.which("sbatch") is None:
            raise StartError(
                "sbatch is not installed here; start this on a login node of the cluster, or `--on local` runs it on "
                "this machine"
            )
        sbatch_script(draft, run, ScriptOptions(sys.executable))
        if image_of(draft.job, draft.launch):
            mounts_of(draft.job, run, draft.launch)

    def files(self, draft: Draft, run: RunDirectory) -> dict[str, str]:
        return {SCRIPT_FILE: sbatch_script(draft, run)}

    def command(self, draft: Draft, run: RunDirectory) -> list[list[str]]:
        return [["sbatch", "--parsable", str(run.path / SCRIPT_FILE)]]

    def submit(self, draft: Draft, run: RunDirectory) -> Submission:
        return hand_over([run], draft.job.run.restarts)[0]

    def look(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        """Runs whose number was never heard are found by their nonce; jobs that Slurm holds after a failed launch are
        let go."""
        submissions = {run: read_submission(run) for run in runs}
        submissions |= unheard_numbers(submissions)
        listed = {job.id: job for job in read_jobs([item.job for item in submissions.values() if item.job])}
        jobs = {run: job_of(listed, submission.job) for run, submission in submissions.items()}
        cluster = read_snapshot() if any(job and job.is_pending for job in jobs.values()) else SlurmState()
        return {run.name: _standing(jobs[run], submission, cluster, run) for run, submission in submissions.items()}

    def stop(self, run: RunDirectory) -> None:
        """The agents see the marker."""

    def kill(self, run: RunDirectory) -> None:
        submission = read_submission(run)
        record = {run: submission, **unheard_numbers({run: submission})}[run]
        if record.job:
            cancel(record.job)


def submit_array(draft: Draft, run: RunDirectory, options: ScriptOptions) -> str:
    """Hands over all copies of a job, the first of which is `run`, and writes down in each what it is known as; the
    number of the array."""
    (run.path / SCRIPT_FILE).write_text(sbatch_script(draft, run, options), encoding="utf-8")
    copies = [RunDirectory(f"{copies_stem(run)}-{number}") for number in range(1, options.copies + 1)]
    submissions = hand_over(copies, draft.job.run.restarts, is_array=True)
    return submissions[0].job.partition("_")[0]


def release_held(run: RunDirectory) -> bool:
    """Lets go of a job that Slurm holds; False: it holds none."""
    number = read_submission(run).job
    job = job_of({job.id: job for job in read_jobs([number])}, number) if number else None
    if job is None or not job.is_pending or job.reason not in HELD:
        return False
    release(number)
    return True


def _let_go(run: RunDirectory, submission: Submission) -> str:
    """Slurm has drained the node whose prolog failed, so the job may start elsewhere. What was done, in words; nothing
    where it was done as often as it may be, or is not ours to do."""
    times, most = int(submission.details.get(RELEASED, 0)) + 1, int(submission.details.get(RESTARTS, 0))
    if times > most:
        return ""
    try:
        write_submission(run, replace(submission, details={**submission.details, RELEASED: str(times)}))
        release(submission.job)
    except (OSError, SchedulerError):
        return ""
    return (
        "a node could not start it (its prolog failed), so Slurm drained that node and held the job; it was let go "
        f"({times} of at most {most} times, run.restarts) and starts on others"
    )


def _standing(job: JobRecord | None, submission: Submission, cluster: SlurmState, run: RunDirectory) -> Standing:
    number = submission.job
    if not number and NEVER not in submission.details and is_fresh(run):
        return Standing("unknown", sentence="it was handed to Slurm a moment ago, which does not show it yet")
    if not number:
        return Standing("ended", reason="Slurm never had it as a job")
    if job is None or job.has_ended:
        # The batch script ends well only when the run is done, or was stopped by its user.
        is_done = job is not None and job.state == "COMPLETED"
        return Standing("ended", number, reason="" if job is None else job.state, outcome="done" if is_done else "")
    if job.is_pending:
        # `scontrol` tells more of a job than squeue does.
        current = job_of(cluster.by_number, number) or job
        released = _let_go(run, submission) if current.reason == LAUNCH_FAILED else ""
        return Standing(
            "waiting",
            number,
            reason=current.reason,
            sentence=released or why_waiting(current, cluster, time.time()),
            restarts=job.restarts,
            expected_start=job.start,
        )
    allocation = read_allocation(run)
    names = tuple(f"{node.name} on {node.host}" for node in allocation.nodes) if allocation else ()
    return Standing("running", number, nodes=names or (job.nodes,), restarts=job.restarts)
