"""Why jobs wait, on a real Slurm: what it says of them is put into the sentence that a person would give."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from slurm_lab import LEAVES, SlurmLab, wait_until

from craton.orchestration.slurm import why_waiting
from craton.orchestration.slurm.tools import read_snapshot

FULL = 25  # minutes that leaf1 and half of leaf2 are taken for


def situations(slurm: SlurmLab, busy: str) -> dict[str, tuple[str, str]]:
    """Slurm's reason → (job, what the sentence looks like); all of them wait at the same time."""
    one = ("--nodes=1", "--exclusive", "--time=1")
    licensed = slurm.submit("--licenses=solver:1", "--nodelist=g7", "--time=30")
    failed = slurm.submit("--nodelist=g7", "--time=1", command="exit 1")
    wait_until(lambda: slurm.state(licensed) == "RUNNING", "the license is taken")
    wait_until(lambda: slurm.state(failed) == "FAILED", "a job has failed")
    slurm(
        *("scontrol", "create", "reservation", "reservationname=maint", "starttime=now+2hour", "duration=60"),
        *("nodes=g7", "users=root"),
    )
    together = slurm.submit("--nodes=4", "--switches=1@01:00:00", "--exclusive", "--time=10")
    held = slurm.submit("--hold", *one)
    return {
        "Resources": (
            together,
            r"needs 4 nodes on one leaf; leaf1 has 0 free; after 1 h any 4 nodes will do; g8 is drained "
            rf"\(hc: ecc row remap\); earliest \d\d:\d\d when job {busy} ends",
        ),
        "Priority": (
            slurm.submit("--nodes=2", "--exclusive", "--time=600"),
            rf"1 job comes first in train \({together}\); job {together} needs 4 nodes.*",
        ),
        "Dependency": (
            slurm.submit(f"--dependency=afterok:{busy}", *one),
            rf"waits for job {busy}, which is running until \d\d:\d\d at the latest",
        ),
        "DependencyNeverSatisfied": (
            slurm.submit(f"--dependency=afterok:{failed}", *one),
            r"it waits for something that can never happen: afterok:\d+.*; `craton stop` takes it back",
        ),
        "ReqNodeNotAvail": (
            slurm.submit("--nodelist=g8", *one),
            r"needs 1 node; g8 is drained \(hc: ecc row remap\)",
        ),
        "Reservation": (
            slurm.submit("--reservation=maint", *one),
            r"waits for its reservation maint, which begins \d\d:\d\d",
        ),
        "BeginTime": (slurm.submit("--begin=now+1hour", *one), r"may start \d\d:\d\d"),
        "JobHeldUser": (held, rf"it is held by its owner; `scontrol release {held}` lets it go"),
        "PartitionTimeLimit": (
            slurm.submit("--nodes=1", "--time=600", "--partition=short"),
            r"asks for 10 h, and the partition short allows 5 min; give a shorter run.time_limit .*",
        ),
        "PartitionNodeLimit": (
            slurm.submit("--nodes=5", "--time=1", "--partition=short"),
            r"needs 5 nodes, and the partition short allows 4; g8 is drained \(hc: ecc row remap\)",
        ),
        "PartitionDown": (
            slurm.submit("--nodes=1", "--time=1", "--partition=closed"),
            r"the partition closed is down; wait for its administrators, or give another run.partition",
        ),
        "Licenses": (
            slurm.submit("--licenses=solver:1", "--partition=urgent", *one),
            r"it needs licenses that others use: solver:1",
        ),
    }


@pytest.fixture
def full_cluster(slurm: SlurmLab) -> Iterator[tuple[SlurmLab, str]]:
    """g7 alone takes jobs, and g8 is drained."""
    slurm.drain("g8", "hc: ecc row remap")
    busy = slurm.occupy(*LEAVES["leaf1"], *LEAVES["leaf2"][:2], minutes=FULL)
    yield slurm, busy
    slurm.cancel_all()
    slurm("scontrol", "delete", "reservationname=maint")


def test_twelve_jobs_that_wait_say_why(full_cluster: tuple[SlurmLab, str]) -> None:
    slurm, busy = full_cluster
    told = situations(slurm, busy)
    assert len(told) == 12

    def seen() -> bool:
        listed = slurm("squeue", "--noheader", "--states=PENDING", "--format=%i %r").splitlines()
        reasons = dict(line.split(maxsplit=1) for line in listed)
        return all(reasons.get(number, "").startswith(reason) for reason, (number, _) in told.items())

    wait_until(seen, "Slurm has given all twelve reasons")
    cluster = read_snapshot()
    jobs = {job.id: job for job in cluster.jobs}
    for reason, (number, pattern) in told.items():
        sentence = why_waiting(jobs[number], cluster, time.time())
        assert re.fullmatch(pattern, sentence), f"{reason}: {sentence}"
