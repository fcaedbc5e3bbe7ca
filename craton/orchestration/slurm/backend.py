"""The backend `slurm`: a run is one batch job, identified by its job ID; its progress is in the run directory."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from craton.formatting import whole_duration
from craton.orchestration.backend import Standing, Submission, read_submission, write_submission
from craton.orchestration.errors import SchedulerError, StartError
from craton.orchestration.slurm.allocation import read_allocation
from craton.orchestration.slurm.handover import NEVER, RELEASED, RESTARTS, hand_over, is_fresh, unheard_numbers
from craton.orchestration.slurm.member_steps import is_member, kill_member, member_standing, submit_member
from craton.orchestration.slurm.mounts import image_of, mounts_of
from craton.orchestration.slurm.records import CONFIGURING, RUNNING, JobRecord, job_of
from craton.orchestration.slurm.script import SCRIPT_FILE, ScriptOptions, copies_stem, sbatch_script
from craton.orchestration.slurm.starts import has_begun
from craton.orchestration.slurm.tools import SlurmState, cancel, read_jobs, read_snapshot, release
from craton.orchestration.slurm.waiting import HELD, why_waiting
from craton.telemetry import RunDirectory

if TYPE_CHECKING:
    from craton.orchestration.draft import Draft

BEGIN_SECONDS = 20.0  # after a job was started, for its batch script to begin
CONFIGURE_SECONDS = 600.0  # for nodes in a cloud to boot
LAUNCH_FAILED = "launch_failed_requeued_held"  # a prolog failed, without `nohold_on_prolog_fail`


class SlurmBackend:
    name = "slurm"

    def check(self, draft: Draft, run: RunDirectory) -> None:
        """Refuse a job that sbatch would refuse, and a machine without sbatch; a member needs neither."""
        if draft.launch.owner:
            return
        if shutil.which("sbatch") is None:
            raise StartError(
                "sbatch is not installed here; run this on a login node of the cluster, or use `--on local` to run on "
                "this machine"
            )
        sbatch_script(draft, run, ScriptOptions(sys.executable))
        if image_of(draft.job, draft.launch):
            mounts_of(draft.job, run, draft.launch)

    def files(self, draft: Draft, run: RunDirectory) -> dict[str, str]:
        return {} if draft.launch.owner else {SCRIPT_FILE: sbatch_script(draft, run)}

    def command(self, draft: Draft, run: RunDirectory) -> list[list[str]]:
        return [["sbatch", "--parsable", str(run.path / SCRIPT_FILE)]]

    def submit(self, draft: Draft, run: RunDirectory) -> Submission:
        if draft.launch.owner:
            return submit_member(draft, run)
        return hand_over([run], draft.job.run.restarts)[0]

    def look(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        """Query the state of runs. Runs without a job ID are found by their nonce; jobs that Slurm holds after a failed
        launch are released."""
        submissions = {run: read_submission(run) for run in runs}
        submissions |= unheard_numbers({run: item for run, item in submissions.items() if not is_member(item)})
        numbers = dict.fromkeys(item.job for item in submissions.values() if item.job)
        listed = {job.id: job for job in read_jobs(list(numbers))}
        jobs = {run: job_of(listed, submission.job) for run, submission in submissions.items()}
        cluster = read_snapshot() if any(job and job.is_pending for job in jobs.values()) else SlurmState()
        return {
            run.name: member_standing(jobs[run], submission, run)
            if is_member(submission)
            else _standing(jobs[run], submission, cluster, run)
            for run, submission in submissions.items()
        }

    def stop(self, run: RunDirectory) -> None:
        """Do nothing: the agents see the STOP marker."""

    def kill(self, run: RunDirectory) -> None:
        submission = read_submission(run)
        if is_member(submission):
            kill_member(submission)
            return
        record = {run: submission, **unheard_numbers({run: submission})}[run]
        if record.job:
            cancel(record.job)


def submit_array(draft: Draft, run: RunDirectory, options: ScriptOptions) -> str:
    """Submit all copies of a job, the first of which is `run`, and record each one's job ID; return the array's ID."""
    (run.path / SCRIPT_FILE).write_text(sbatch_script(draft, run, options), encoding="utf-8")
    copies = [RunDirectory(f"{copies_stem(run)}-{number}") for number in range(1, options.copies + 1)]
    submissions = hand_over(copies, draft.job.run.restarts, is_array=True)
    return submissions[0].job.partition("_")[0]


def release_held(run: RunDirectory) -> bool:
    """Release a job that Slurm holds; False if it is not held."""
    number = read_submission(run).job
    job = job_of({job.id: job for job in read_jobs([number])}, number) if number else None
    if job is None or not job.is_pending or job.reason not in HELD:
        return False
    release(number)
    return True


def _let_go(run: RunDirectory, submission: Submission) -> str:
    """Release a job that Slurm held after a failed prolog: that node is drained, so the job may start elsewhere. Return
    what was done; empty if the limit is reached or the job belongs to another user."""
    times, limit = int(submission.details.get(RELEASED, 0)) + 1, int(submission.details.get(RESTARTS, 0))
    if times > limit:
        return ""
    try:
        write_submission(run, replace(submission, details={**submission.details, RELEASED: str(times)}))
        release(submission.job)
    except (OSError, SchedulerError):
        return ""
    return (
        "the prolog failed on a node, so Slurm drained that node and held the job; Craton released it "
        f"({times} of at most {limit} times, run.restarts) and it starts on other nodes"
    )


def _not_begun(number: str, seconds: float, state: str) -> str:
    if state == CONFIGURING:
        return (
            f"Slurm gave job {number} its nodes {whole_duration(seconds)} ago and still configures them: they boot, or "
            "their prolog runs (`scontrol show job` and `sinfo -R` show more)"
        )
    return (
        f"Slurm started job {number} {whole_duration(seconds)} ago, but its batch script has not begun: its prolog "
        "still runs, or the nodes do not reach the run directory"
    )


def _standing(job: JobRecord | None, submission: Submission, cluster: SlurmState, run: RunDirectory) -> Standing:
    number = submission.job
    if not number and NEVER not in submission.details and is_fresh(run):
        return Standing("unknown", sentence="it was just submitted, and Slurm does not list it yet")
    if not number:
        return Standing("ended", reason="Slurm never received it")
    if job is None or job.has_ended:
        # The batch script exits with 0 only if the run is done or its user stopped it.
        is_done = job is not None and job.state == "COMPLETED"
        return Standing("ended", number, reason="" if job is None else job.state, outcome="done" if is_done else "")
    if job.is_pending:
        # scontrol shows more of a job than squeue.
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
    halted = f"Slurm has suspended job {number}; `scontrol resume {number}` continues it" if job.is_suspended else ""
    seconds = time.time() - job.start if job.start and job.state in (RUNNING, CONFIGURING) else 0.0
    limit = CONFIGURE_SECONDS if job.state == CONFIGURING else BEGIN_SECONDS
    is_late = seconds > limit and not has_begun(run, job.start or 0.0)
    return Standing(
        "running",
        number,
        nodes=names or (job.nodes,),
        reason=job.state if job.is_suspended else "",
        sentence=_not_begun(number, seconds, job.state) if is_late else halted,
        restarts=job.restarts,
        is_suspended=job.is_suspended,
        has_begun=not is_late,
    )
