"""Slurm of the second set: maintenance, dependencies, licenses, priorities; suspended and cancelled runs."""

from __future__ import annotations

import time

from craton.bench.why.faults.fault import ExpectedVerdict, LiveFault
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.slurm import NODES
from craton.bench.why.faults.slurm_jobs import slurm_of, slurm_recipe

PROGRAM = "second_scheduler"
NEEDS = ("slurm",)
FAIL_SECONDS = 30.0


def _newest(job: RunningJob) -> str:
    """The job of the run, which was submitted last."""
    return slurm_of(job).job_numbers()[-1]


def reserve_for_maintenance(job: RunningJob) -> None:
    """Reserve all nodes for a maintenance that begins in half an hour."""
    slurm_of(job)(
        *("scontrol", "create", "reservation", "reservationname=maintenance", "starttime=now+30minutes"),
        *("duration=240", "nodes=ALL", "flags=maint,ignore_jobs", "users=root"),
    )


def occupy_all_nodes(job: RunningJob) -> None:
    slurm_of(job).occupy(*NODES)


def fail_then_occupy(job: RunningJob) -> None:
    """Let a job fail, then hold all nodes until the run waits in the queue; both are the oldest jobs."""
    slurm = slurm_of(job)
    failed = slurm.submit("--nodes=1", "--time=5", command="exit 1")
    deadline = time.monotonic() + FAIL_SECONDS
    while slurm.state(failed) != "FAILED":
        if time.monotonic() > deadline:
            raise TimeoutError(f"job {failed} does not fail: {slurm('squeue', '--states=all')}")
        time.sleep(0.2)
    (job.folder.parent / "failed-job").write_text(failed)
    slurm.occupy(*NODES)


def depend_on_the_failed_job(job: RunningJob) -> None:
    """Let the run wait for the success of a job that has failed, and give the nodes back."""
    slurm, occupying = slurm_of(job), slurm_of(job).job_numbers()[0]
    failed = (job.folder.parent / "failed-job").read_text()
    slurm("scontrol", "update", f"jobid={_newest(job)}", f"dependency=afterok:{failed}")
    slurm("scancel", occupying)


def need_a_taken_license(job: RunningJob) -> None:
    """Let the run need a license that another job has, and give the nodes back."""
    slurm, (occupying, *_, run) = slurm_of(job), slurm_of(job).job_numbers()
    slurm("scontrol", "update", f"jobid={run}", "licenses=solver:1")
    slurm("scancel", occupying)


def occupy_and_take_the_license(job: RunningJob) -> None:
    """Hold three nodes by one job, the fourth and the only license by another."""
    slurm = slurm_of(job)
    slurm.occupy(*NODES[:3])
    slurm.submit(f"--nodelist={NODES[3]}", "--nodes=1", "--exclusive", "--licenses=solver:1", "--time=60")


def queue_a_large_job(job: RunningJob) -> None:
    """Hold three of four nodes, and queue a job that needs all four before the run."""
    slurm = slurm_of(job)
    slurm.occupy(*NODES[:3])
    slurm.submit("--nodes=4", "--exclusive", "--time=60")


def suspend(job: RunningJob) -> None:
    slurm_of(job)("scontrol", "suspend", _newest(job))


def cancel(job: RunningJob) -> None:
    slurm_of(job)("scancel", _newest(job))


FAULTS = (
    LiveFault(
        name="slurm-maintenance-ahead",
        family="scheduler",
        summary="All nodes are idle but reserved for maintenance in half an hour, and the job asks for twelve hours.",
        source="https://github.com/RobertsLab/resources/issues/1531",
        job=slurm_recipe(PROGRAM, prepare=reserve_for_maintenance, time_limit="12h"),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"maintenance|reserv",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-dependency-never-satisfied",
        family="scheduler",
        summary="The job depends on the success of a job that has failed, so it never starts; all nodes are idle.",
        source="https://github.com/desihub/desispec/issues/2682",
        job=slurm_recipe(PROGRAM, prepare=fail_then_occupy),
        inject=depend_on_the_failed_job,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"depend|afterok",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-license-taken",
        family="scheduler",
        summary="The job needs the only license of a program, which another job has; nodes are idle.",
        source="https://github.com/aws-samples/aws-eda-slurm-cluster/issues/95",
        job=slurm_recipe(PROGRAM, prepare=occupy_and_take_the_license),
        inject=need_a_taken_license,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"licen[sc]e",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-behind-a-large-job",
        family="scheduler",
        summary="A node is idle, but a job of four nodes is first in the queue, and the run is too long for backfill.",
        source="https://github.com/lyulyul/shine-cluster/issues/170",
        job=slurm_recipe(PROGRAM, nodes=1, prepare=queue_a_large_job, time_limit="12h"),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"priorit|backfill|(first|ahead|before).*(queue|job)|job \d+|time[ _]limit",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-job-suspended",
        family="scheduler",
        summary="An administrator suspends the running job: Slurm stops all its processes and keeps its nodes.",
        source="https://github.com/Snakemake-Profiles/slurm/issues/71",
        job=slurm_recipe(PROGRAM),
        inject=suspend,
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("stopped", "waiting", "hung"),
            remedy=(r"suspend|scontrol resume",),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-job-cancelled",
        family="scheduler",
        summary="An administrator cancels the running job with scancel; nothing restarts it.",
        source="https://github.com/Snakemake-Profiles/slurm/pull/22",
        job=slurm_recipe(PROGRAM),
        inject=cancel,
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("dead", "stopped"),
            remedy=(r"cancel",),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
)
