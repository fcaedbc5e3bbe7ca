"""Why jobs wait, on a real Slurm: what it says of them is put into the sentence that a person would give."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from slurm_lab import LEAVES, SlurmLab
from waiting import wait_until

from craton.orchestration.slurm.room import room_for
from craton.orchestration.slurm.tools import read_snapshot
from craton.orchestration.slurm.waiting import why_waiting

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
            r"needs 4 nodes on one leaf; leaf1 has 0 free; after 1h Slurm accepts any 4 nodes; g8 is drained "
            rf"\(hc: ecc row remap\); earliest \d\d:\d\d when job {busy} ends",
        ),
        "Priority": (
            slurm.submit("--nodes=2", "--exclusive", "--time=600"),
            rf"1 job has precedence in train \({together}\); job {together} needs 4 nodes.*",
        ),
        "Dependency": (
            slurm.submit(f"--dependency=afterok:{busy}", *one),
            rf"waits for job {busy}, which is running until \d\d:\d\d at the latest",
        ),
        "DependencyNeverSatisfied": (
            slurm.submit(f"--dependency=afterok:{failed}", *one),
            r"its dependency can never be satisfied: afterok:\d+.*; `craton stop` cancels it",
        ),
        "ReqNodeNotAvail": (
            slurm.submit("--nodelist=g8", *one),
            r"needs 1 node; g8 is drained \(hc: ecc row remap\)",
        ),
        "Reservation": (
            slurm.submit("--reservation=maint", *one),
            r"waits for its reservation maint, which starts \d\d:\d\d",
        ),
        "BeginTime": (slurm.submit("--begin=now+1hour", *one), r"may start \d\d:\d\d"),
        "JobHeldUser": (held, rf"it is held by its owner; release it with `scontrol release {held}`"),
        "PartitionTimeLimit": (
            slurm.submit("--nodes=1", "--time=600", "--partition=short"),
            r"requests 10h, and the partition short allows 5m; set a shorter run.time_limit .*",
        ),
        "PartitionNodeLimit": (
            slurm.submit("--nodes=5", "--time=1", "--partition=short"),
            r"needs 5 nodes, and the partition short allows 4; g8 is drained \(hc: ecc row remap\)",
        ),
        "PartitionDown": (
            slurm.submit("--nodes=1", "--time=1", "--partition=closed"),
            r"the partition closed is down; wait for its administrators, or set another run.partition",
        ),
        "Licenses": (
            slurm.submit("--licenses=solver:1", "--partition=urgent", *one),
            r"it needs licenses that other jobs use: solver:1",
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


@pytest.fixture
def reserved_cluster(slurm: SlurmLab) -> Iterator[SlurmLab]:
    """g8 is in a reservation of now, g7 in one of later."""
    for name, node, start in (("team", "g8", "now"), ("later", "g7", "now+2hour")):
        slurm(
            *("scontrol", "create", "reservation", f"reservationname={name}", f"starttime={start}", "duration=60"),
            *(f"nodes={node}", "users=root"),
        )
    yield slurm
    slurm.cancel_all()
    for name in ("team", "later"):
        slurm("scontrol", "delete", f"reservationname={name}")


def test_nodes_that_idle_for_others_are_not_counted_as_free(reserved_cluster: SlurmLab) -> None:
    """Nodes shared by two jobs, reserved ones, and those that Slurm has planned for the job in front."""
    slurm = reserved_cluster
    slurm.occupy("g1", "g2", "g3", "g4", minutes=40)
    two = [slurm.submit("--nodelist=g5", "--ntasks=1", f"--time={minutes}") for minutes in (10, 30)]
    wait_until(lambda: all(slurm.state(job) == "RUNNING" for job in two), "two jobs share g5")
    first = slurm.submit("--nodes=6", "--exclusive", "--time=600", "--job-name=first")
    member = slurm.submit("--hold", "--nodes=1", "--exclusive", "--time=20", "--reservation=team")
    second = slurm.submit("--nodelist=g6", "--exclusive", "--time=600")

    def is_planned() -> bool:
        jobs = {job.id: job for job in read_snapshot().jobs}
        planned = "PLANNED" in slurm("scontrol", "show", "node", "g6") and jobs[first].scheduled
        return bool(planned and jobs[first].reason == "Resources")

    wait_until(is_planned, "Slurm has planned the nodes of the first job")
    cluster = read_snapshot()
    jobs = {job.id: job for job in cluster.jobs}
    now = time.time()
    assert re.fullmatch(
        r"needs 6 nodes; 1 of 8 in train is free; g7 is kept for the reservation later; g8 is kept for the reservation "
        r"team; earliest \d\d:\d\d when job \d+ ends",
        sentence := why_waiting(jobs[first], cluster, now),
    ), sentence
    room = room_for(jobs[first], cluster, now)
    assert room.busy["g5"].by == f"job {two[1]}", "the last to end lets the node go"
    assert room.busy["g8"].by == "the reservation team"
    behind = room_for(jobs[second], cluster, now)
    assert (behind.free, behind.kept) == (frozenset(), {f"job {first}": ["g6"]})
    assert room_for(jobs[member], cluster, now).free == {"g8"}
