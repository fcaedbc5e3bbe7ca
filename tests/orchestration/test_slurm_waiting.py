"""Why a job waits: one sentence for every reason, from what the cluster looks like."""

from __future__ import annotations

import itertools
import re
import tomllib
from dataclasses import replace
from datetime import datetime

import pytest

from craton.infrastructure.topology import expand as expand_hosts
from craton.orchestration.slurm import records
from craton.orchestration.slurm.records import JobRecord, NodeRecord, PartitionRecord, ReservationRecord, SwitchRecord
from craton.orchestration.slurm.tools import SlurmState
from craton.orchestration.slurm.waiting import HELD, REASONS, limit_in_words, why_waiting

NOON = datetime(2026, 11, 15, 12, 0).timestamp()
AT_1405 = datetime(2026, 11, 15, 14, 5).timestamp()
AT_1600 = datetime(2026, 11, 15, 16, 0).timestamp()
LEAVES = (
    SwitchRecord("leaf1", 0, "g[1-4]"),
    SwitchRecord("leaf2", 0, "g[5-8]"),
    SwitchRecord("spine", 1, "g[1-8]"),
)


def cluster(
    free: str = "",
    away: dict[str, str] | None = None,
    jobs: tuple[JobRecord, ...] = (),
    flags: dict[str, str] | None = None,
    **more: object,
) -> SlurmState:
    """g1 … g8 in the partition train; those in `free` are idle, those in `away` drained for a reason, and `flags` are
    beside the state."""
    away = away or {}

    def states(name: str) -> tuple[str, ...]:
        if name in away:
            return ("IDLE", "DRAIN")
        state = "IDLE" if name in free.split() else "ALLOCATED"
        return (state, *(flags or {}).get(name, "").split())

    nodes = tuple(
        NodeRecord(
            name,
            states(name),
            reason=away.get(name, ""),
            features=("h100",),
            partitions=("train",),
        )
        for name in (f"g{number}" for number in range(1, 9))
    )
    return SlurmState(jobs=jobs, nodes=nodes, switches=LEAVES, **more)  # type: ignore[arg-type]


def pending(reason: str, **more: object) -> JobRecord:
    settings: dict[str, object] = {"partition": "train", "num_nodes": 4, "priority": 10, **more}
    return JobRecord("900", "PENDING", reason=reason, **settings)  # type: ignore[arg-type]


def running(number: str, nodes: str, end: float) -> JobRecord:
    return JobRecord(number, "RUNNING", partition="train", nodes=nodes, end=end, start=NOON - 3600)


BUSY = (running("811", "g[1-4]", AT_1600), running("812", "g8", AT_1405), running("813", "g9", NOON + 60))

SITUATIONS = {
    "resources": (
        pending("Resources", num_nodes=4),
        cluster("g5 g6 g7", jobs=BUSY),
        "needs 4 nodes; 3 of 8 in train are free; earliest 14:05 when job 812 ends",
    ),
    "resources on one leaf": (
        pending("Resources", switches=1, switch_wait_seconds=365 * 86400.0),
        cluster("g5 g6 g7", jobs=BUSY),
        "needs 4 nodes on one leaf; leaf2 has 3 free; earliest 14:05 when job 812 ends",
    ),
    "enough, but not together": (
        pending("Resources", switches=1, switch_wait_seconds=600.0),
        cluster("g1 g2 g5 g6", jobs=(running("811", "g[3-4]", AT_1600), running("812", "g[7-8]", AT_1405))),
        "needs 4 nodes on one leaf; leaf1 has 2 free; after 10m Slurm accepts any 4 nodes; earliest 14:05 when job "
        "812 ends",
    ),
    "a drained node is missing": (
        pending("Resources"),
        cluster("g5 g6 g7", {"g8": "hc: ecc row remap"}, BUSY[:1]),
        "needs 4 nodes; 3 of 7 in train are free; g8 is drained (hc: ecc row remap); earliest 16:00 when job 811 ends",
    ),
    "nothing that runs would be enough": (
        pending("Resources", num_nodes=9, start=AT_1600),
        cluster("", jobs=BUSY),
        "needs 9 nodes; 0 of 8 in train are free; Slurm expects to start it 16:00",
    ),
    "room on nodes that others share, of which Slurm knows": (
        pending("Resources", num_nodes=1, start=AT_1405),
        cluster(jobs=(running("811", "g[1-8]", AT_1600),)),
        "needs 1 node; 0 of 8 in train are free; Slurm expects to start it 14:05",
    ),
    "a plan of Slurm's that is a moment off": (
        pending("Resources", num_nodes=1, start=AT_1405 - 30),
        cluster(jobs=(running("811", "g[1-8]", AT_1405),)),
        "needs 1 node; 0 of 8 in train are free; earliest 14:05 when job 811 ends",
    ),
    "enough, but not in one block": (
        pending("Resources", segment_nodes=4),
        cluster("g1 g2 g3 g5 g6 g7", jobs=(running("811", "g4", AT_1600), running("812", "g8", AT_1405))),
        "needs 4 nodes in one block; leaf1 has 3 free; earliest 14:05 when job 812 ends",
    ),
    "enough, but not two by two": (
        pending("Resources", num_nodes=6, segment_nodes=2),
        cluster("g1 g2 g3 g5 g6 g7", jobs=(running("811", "g4", AT_1600), running("812", "g8", AT_1405))),
        "needs 6 nodes, each 2 of them in one block; leaf1 has 3 free and leaf2 has 3 free; earliest 14:05 when job "
        "812 ends",
    ),
    "segments that no block holds": (
        pending("Resources", num_nodes=8, segment_nodes=8),
        cluster("g1 g2", jobs=(running("811", "g[3-8]", AT_1600),)),
        "needs 8 nodes; 2 of 8 in train are free; earliest 16:00 when job 811 ends",
    ),
    "nodes of a kind": (
        pending("Resources", features="h100", excluded="g1"),
        cluster("g2 g3", jobs=BUSY[1:2]),
        "needs 4 nodes with h100; 2 of 7 in train are free; it excludes g1",
    ),
    "a node that two jobs share": (
        pending("Resources", num_nodes=2),
        cluster(
            "g1",
            jobs=(
                running("811", "g[2-3]", AT_1405),
                running("812", "g[2-3]", AT_1600),
                running("813", "g[4-8]", AT_1600 + 3600),
            ),
        ),
        "needs 2 nodes; 1 of 8 in train is free; earliest 16:00 when job 812 ends",
    ),
    "a job without an end": (
        pending("Resources", num_nodes=2),
        cluster(
            "g1",
            jobs=(running("811", "g[2-8]", AT_1405), JobRecord("812", "RUNNING", partition="train", nodes="g[2-8]")),
        ),
        "needs 2 nodes; 1 of 8 in train is free",
    ),
    "enough is free already": (
        pending("Resources", num_nodes=3),
        cluster("g5 g6 g7", jobs=BUSY),
        "needs 3 nodes; 3 of 8 in train are free; that is enough, and Slurm has not started it yet",
    ),
    "a leaf is free already": (
        pending("Resources", num_nodes=3, switches=1, start=AT_1405),
        cluster("g5 g6 g7", jobs=BUSY),
        "needs 3 nodes on one leaf; leaf2 has 3 free; that is enough, and Slurm has not started it yet; Slurm expects "
        "to start it 14:05",
    ),
    "two leaves": (
        pending("Resources", num_nodes=6, switches=2),
        cluster("g1 g5 g6 g7", jobs=(running("811", "g[2-3]", AT_1600), running("812", "g8", AT_1405))),
        "needs 6 nodes on at most 2 leaves; leaf2 has 3 free and leaf1 has 1 free; earliest 16:00 when job 811 ends",
    ),
    "nodes that idle in a reservation": (
        pending("Resources", num_nodes=2, time_limit_seconds=3600.0),
        cluster(
            "g1 g2 g3",
            jobs=(running("811", "g[4-8]", AT_1600),),
            flags={"g2": "RESERVED", "g3": "RESERVED"},
            reservations=(
                ReservationRecord("team", "g[2-3]", NOON - 60, AT_1405),
                ReservationRecord("tonight", "g1", AT_1600, AT_1600 + 60),
                ReservationRecord("past", "g1", NOON - 120, NOON - 60),
            ),
        ),
        "needs 2 nodes; 1 of 8 in train is free; g2, g3 are kept for the reservation team; earliest 14:05 when the "
        "reservation team ends",
    ),
    "a reservation that nobody shows": (
        pending("Resources", num_nodes=2),
        cluster("g1 g2", flags={"g2": "RESERVED"}),
        "needs 2 nodes; 1 of 8 in train is free; g2 is kept for a reservation",
    ),
    "a reservation that begins before it would end": (
        pending("Resources", num_nodes=2, time_limit_seconds=86400.0),
        cluster("g1 g2", reservations=(ReservationRecord("maint", "g2", AT_1405, AT_1600),)),
        "needs 2 nodes; 1 of 8 in train is free; g2 is kept for the reservation maint; earliest 16:00 when the "
        "reservation maint ends",
    ),
    "nodes of its own reservation": (
        pending("Resources", num_nodes=2, reservation="team"),
        cluster(
            "g1 g2",
            jobs=(running("811", "g3", AT_1405),),
            flags={"g2": "RESERVED", "g3": "RESERVED"},
            reservations=(ReservationRecord("team", "g[2-3]", NOON - 60, AT_1600),),
        ),
        "needs 2 nodes; 1 of 2 in train is free; earliest 14:05 when job 811 ends",
    ),
    "nodes that are planned for another job": (
        pending("Resources", num_nodes=2, start=AT_1600),
        cluster(
            "g6 g7",
            jobs=(
                running("811", "g[1-5]", AT_1405),
                running("812", "g8", AT_1600 + 3600),
                JobRecord("890", "PENDING", partition="train", scheduled="g[1-7]", start=AT_1405, end=AT_1600),
            ),
            flags={"g6": "PLANNED", "g7": "PLANNED"},
        ),
        "needs 2 nodes; 0 of 8 in train are free; g6, g7 are kept for job 890; earliest 14:05 when job 811 ends",
    ),
    "nodes that are planned for it": (
        pending("Resources", num_nodes=7, scheduled="g[1-7]", start=AT_1405),
        cluster(
            "g6 g7",
            jobs=(
                running("811", "g[1-5]", AT_1405),
                running("812", "g8", AT_1600),
                pending("Resources", num_nodes=7, scheduled="g[1-7]", start=AT_1405),
                JobRecord("901", "PENDING", partition="train", scheduled="g6", start=AT_1600),
            ),
            flags={"g6": "PLANNED", "g7": "PLANNED"},
        ),
        "needs 7 nodes; 2 of 8 in train are free; earliest 14:05 when job 811 ends",
    ),
    "it would end before the job that a node is planned for": (
        pending("Resources", num_nodes=2, time_limit_seconds=3600.0),
        cluster(
            "g6",
            jobs=(
                running("811", "g7", AT_1405),
                JobRecord("890", "PENDING", partition="train", scheduled="g[6-7]", start=AT_1405, end=AT_1600),
            ),
            flags={"g6": "PLANNED"},
        ),
        "needs 2 nodes; 1 of 8 in train is free; earliest 14:05 when job 811 ends",
    ),
    "nodes it asks for by name": (
        pending("Resources", num_nodes=1, required="g8"),
        cluster("g5 g6 g7", jobs=BUSY),
        "needs 1 node (g8); 0 of 1 in train are free; earliest 14:05 when job 812 ends",
    ),
    "priority": (
        pending("Priority", start=AT_1405),
        cluster(jobs=(JobRecord("890", "PENDING", partition="train", priority=50, num_nodes=8),)),
        "1 job has precedence in train (890); job 890 needs 8 nodes; Slurm expects to start it 14:05",
    ),
    "priority, first come": (
        pending("Priority", priority=50),
        cluster(
            jobs=tuple(
                JobRecord(str(n), "PENDING", partition="train", priority=50) for n in (880, 881, 882, 900, 901, 883)
            )
        ),
        "4 jobs have precedence in train (880, 881, 882, …); job 880 needs 1 node",
    ),
    "dependency": (
        pending("Dependency", dependency="afterok:812(unfulfilled)"),
        cluster(jobs=BUSY),
        "waits for job 812, which is running until 14:05 at the latest",
    ),
    "dependency on what is gone": (
        pending("Dependency", dependency="afterok:500(unfulfilled)"),
        cluster(),
        "waits for job 500 to succeed",
    ),
    "a dependency that cannot be": (
        pending("DependencyNeverSatisfied", dependency="afterok:500(failed)"),
        cluster(),
        "its dependency can never be satisfied: afterok:500(failed); `craton stop` cancels it",
    ),
    "a drained node that it needs": (
        pending("ReqNodeNotAvail,_UnavailableNodes:g[3,5]", num_nodes=8),
        cluster("g1 g2", {"g3": "XID 79", "g5": "prolog error", "g8": "other"}),
        "needs 8 nodes; g3 is drained (XID 79), g5 is drained (prolog error)",
    ),
    "nodes that are reserved": (
        pending("ReqNodeNotAvail,_UnavailableNodes:g6", num_nodes=8, time_limit_seconds=86400.0),
        cluster("g1", reservations=(ReservationRecord("maint", "g6", AT_1405, AT_1600),)),
        "needs 8 nodes; unavailable: g6; the reservation maint holds nodes from 14:05 until 16:00; a shorter "
        "run.time_limit may fit before it",
    ),
    "a reservation to come": (
        pending("Reservation", reservation="block"),
        cluster(reservations=(ReservationRecord("block", "g[1-8]", AT_1405, AT_1600),)),
        "waits for its reservation block, which starts 14:05",
    ),
    "a reservation that is full": (
        pending("Reservation", reservation="block"),
        cluster(reservations=(ReservationRecord("block", "g[1-8]", NOON - 60, AT_1600),)),
        "waits for nodes of its reservation block, which has 8 and ends 16:00",
    ),
    "a pause after a requeue": (
        pending("BeginTime", restarts=2, start=NOON + 120),
        cluster(),
        "was requeued 2 times and may start 12:02 (Slurm pauses after a requeue)",
    ),
    "held by its owner": (
        pending("JobHeldUser"),
        cluster(),
        "it is held by its owner; release it with `scontrol release 900`",
    ),
    "held by an administrator": (
        pending("JobHeldAdmin"),
        cluster(),
        "it is held by an administrator; only an administrator can release it",
    ),
    "a prolog failed": (
        pending("launch_failed_requeued_held"),
        cluster(),
        "the prolog failed on a node, so Slurm drained that node and holds the job; `craton resume` releases it",
    ),
    "too long for its partition": (
        pending("PartitionTimeLimit", time_limit_seconds=172800.0),
        cluster(partitions=(PartitionRecord("train", max_seconds=86400.0),)),
        "requests 2d, and the partition train allows 1d; set a shorter run.time_limit (at its end the job saves and "
        "is requeued), or another run.partition",
    ),
    "too many nodes for its partition": (
        pending("PartitionNodeLimit", num_nodes=20),
        cluster(partitions=(PartitionRecord("train", max_nodes=16),)),
        "needs 20 nodes, and the partition train allows 16",
    ),
    "a partition that is down": (
        pending("PartitionDown"),
        cluster(),
        "the partition train is down; wait for its administrators, or set another run.partition",
    ),
    "nothing like it exists": (
        pending("BadConstraints", features="h300"),
        cluster(),
        "no node can ever satisfy its request (4 nodes with h300); change run.constraint, run.gres or the number of "
        "nodes",
    ),
    "licenses": (
        pending("Licenses", licenses="solver:1"),
        cluster(),
        "it needs licenses that other jobs use: solver:1",
    ),
    "an account that is not": (
        pending("InvalidAccount", account="lab2"),
        cluster(),
        "the account lab2 is not permitted, or does not exist; set another run.account (`sacctmgr show associations "
        "user=$USER` lists yours)",
    ),
    "a QOS limit for each user": (
        pending("QOSMaxNodePerUserLimit", qos="research"),
        cluster(),
        "the QOS research allows no more nodes per user; it starts when another of your jobs ends",
    ),
    "a QOS limit for all": (
        pending("QOSGrpGRES", qos="research"),
        cluster(),
        "all jobs of the QOS research together are at their limit of GPUs; it starts when one of them ends",
    ),
    "an account's limit": (
        pending("AssocGrpNodeLimit", account="lab"),
        cluster(),
        "all jobs of the account lab together are at their limit of nodes; it starts when one of them ends",
    ),
    "an account's budget": (
        pending("AssocGrpGRESMinutes", account="lab"),
        cluster(),
        "the GPU minutes that all jobs of the account lab may use together are used up, or too few are left; the "
        "end of a job frees nothing, only time does if the site lets usage decay; request less, or set another "
        "run.account",
    ),
    "an account's budget of hours": (
        pending("AssocGrpWallLimit", account="lab"),
        cluster(),
        "the time that all jobs of the account lab may use together is used up, or too little is left; the end of a "
        "job frees nothing, only time does if the site lets usage decay; request less, or set another run.account",
    ),
    "minutes that running jobs have before them": (
        pending("QOSGrpGRESRunMinutes", qos="research"),
        cluster(),
        "all jobs of the QOS research together are at their limit of GPU minutes; it starts when one of them ends",
    ),
    "a QOS limit for each account": (
        pending("MaxGRESPerAccount", qos="research", account="lab"),
        cluster(),
        "the QOS research allows no more GPUs per account; it starts when another job of the account lab ends",
    ),
    "more on one node than a job may": (
        pending("QOSMaxGRESPerNode", qos="research"),
        cluster(),
        "the QOS research allows a job fewer GPUs on one node than it requests; request less, or set another run.qos",
    ),
    "more than a job may": (
        pending("QOSMaxWallDurationPerJobLimit", qos="short"),
        cluster(),
        "the QOS short allows a job less time than it requests; request less, or set another run.qos",
    ),
    "not looked at yet": (pending(""), cluster(), "Slurm has not evaluated it yet"),
    "something new": (
        pending("MoonPhase"),
        cluster(),
        "Slurm's reason is MoonPhase; `scontrol show job 900` shows more",
    ),
}


def elsewhere(snapshot: SlurmState) -> SlurmState:
    """The same with nodes and a reservation of another partition, drained and idle, which no sentence may count."""
    states = {"x1": ("IDLE",), "x2": ("IDLE", "DRAIN"), "x3": ("DOWN",)}
    others = [NodeRecord(name, each, reason="not ours", partitions=("other",)) for name, each in states.items()]
    reserved = ReservationRecord("others", "x[1-3]", NOON - 60, AT_1600)
    return replace(snapshot, nodes=(*others, *snapshot.nodes), reservations=(reserved, *snapshot.reservations))


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_of_other_partitions_changes_nothing(name: str) -> None:
    job, snapshot, sentence = SITUATIONS[name]
    assert why_waiting(job, elsewhere(snapshot), NOON) == sentence


def test_unavailable_nodes_of_other_partitions_are_left_out() -> None:
    drained = cluster("g1 g2", {"g3": "XID 79"})
    job = pending("ReqNodeNotAvail,_UnavailableNodes:g3,x[2-3]", num_nodes=8)
    assert why_waiting(job, elsewhere(drained), NOON) == "needs 8 nodes; g3 is drained (XID 79)"
    unlisted = pending("ReqNodeNotAvail", num_nodes=8)
    assert why_waiting(unlisted, elsewhere(drained), NOON) == "needs 8 nodes; g3 is drained (XID 79)"
    assert why_waiting(unlisted, elsewhere(cluster("g1")), NOON) == "needs 8 nodes"


def test_lists_of_nodes_are_read_once_however_many_jobs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(text: str) -> list[str]:
        read.append(text)
        return expand_hosts(text)

    monkeypatch.setattr(records, "expand_hosts", counted)
    planned = [pending("Resources", scheduled=f"g[1-{number}]") for number in range(2, 8)]
    waiting = tuple(replace(job, id=str(900 + number)) for number, job in enumerate(planned))
    reserved = (ReservationRecord("team", "g[2-3]", NOON - 60, AT_1405),)
    snapshot = cluster("g1 g2", jobs=(*waiting, *BUSY), flags={"g1": "PLANNED"}, reservations=reserved)
    for job in waiting:
        assert why_waiting(job, snapshot, NOON).startswith("needs 4 nodes; ")
    assert len(read) == len(waiting) + len(BUSY) + len(reserved) + 2, "and two leaves"


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_sentence(name: str) -> None:
    job, snapshot, sentence = SITUATIONS[name]
    assert why_waiting(job, snapshot, NOON) == sentence


def test_every_sentence_of_the_table_can_be_told() -> None:
    table = tomllib.loads(REASONS.read_text())
    for reason in table:
        told = why_waiting(pending(reason), SlurmState(), NOON)
        assert "{" not in told
        assert not told.startswith("Slurm's reason"), reason
    assert set(HELD) <= set(table)


# What Slurm calls the limits of accounts and QOS (src/common/job_state_reason.c, 162 in all), by what ends the wait.
ANOTHER_JOB_ENDS = """
    {QOS,Assoc}Grp{BB,Billing,Energy,GRES,License,Unknown,CpuLimit,JobsLimit,MemLimit,NodeLimit,SubmitJobsLimit}
    {QOS,Assoc}Grp{BB,Billing,Energy,GRES,License,Node,Unknown}RunMinutes {QOS,Assoc}GrpCPURunMinutesLimit
    QOSGrpMemoryRunMinutes AssocGrpMemRunMinutes AssocMaxJobsLimit AssocMaxSubmitJobLimit
    QOSMax{BB,Billing,Energy,GRES,License,Memory,Unknown}PerUser QOSMax{Cpu,Jobs,Node,SubmitJob}PerUserLimit
    Max{BB,Billing,Cpu,Energy,GRES,Jobs,License,Memory,Node,SubmitJobs,Unknown}PerAccount
    Max{BB,Billing,Cpu,Energy,GRES,License,Memory,Node,Unknown}RunMinsPer{Account,User}
"""
IT_ASKS_FOR_LESS = """
    {QOS,Assoc}Max{BB,Billing,Energy,GRES,License,Unknown}PerJob {QOS,Assoc}Max{Cpu,Node,WallDuration}PerJobLimit
    {QOS,Assoc}Max{Billing,Energy,GRES,License,Node,Unknown}MinutesPerJob {QOS,Assoc}MaxCpuMinutesPerJobLimit
    {QOS,Assoc}Max{BB,Billing,Cpu,Energy,GRES,Unknown}PerNode AssocMaxBBMinutesPerJob
    QOSMaxMemory{PerJob,PerNode,MinutesPerJob} AssocMaxMem{PerJob,PerNode,MinutesPerJob}
"""
IT_ASKS_FOR_MORE = "QOSMin{BB,Billing,CpuNotSatisfied,Energy,GRES,License,Memory,Node,Unknown}"
NO_JOB_ENDS_IT = """
    {QOS,Assoc}Grp{BB,Billing,Energy,GRES,License,Node,Unknown}Minutes {QOS,Assoc}Grp{CPUMinutes,Wall}Limit
    QOSGrpMemoryMinutes AssocGrpMemMinutes
"""


def unfolded(text: str) -> list[str]:
    """`{QOS,Assoc}GrpBB` → QOSGrpBB, AssocGrpBB."""
    found = []
    for word in text.split():
        parts = [part.split(",") for part in re.split(r"[{}]", word)]
        found += ["".join(each) for each in itertools.product(*parts)]
    return found


@pytest.mark.parametrize(
    ("names", "ending"),
    [
        (ANOTHER_JOB_ENDS, r"it starts when (one of them|another of your jobs|another job of the account a) ends"),
        (IT_ASKS_FOR_LESS, r"than it requests; request less, or set another run\.(qos|account)"),
        (IT_ASKS_FOR_MORE, r"request more, or set another run\.qos"),
        (NO_JOB_ENDS_IT, r"the end of a job frees nothing, .*; request less, or set another run\.(qos|account)"),
    ],
    ids=["another job ends", "less", "more", "no job ends it"],
)
def test_every_limit_of_slurm_is_put_into_words(names: str, ending: str) -> None:
    for reason in unfolded(names):
        told = limit_in_words(pending(reason, qos="q", account="a"), reason)
        assert re.search(f"{ending}$", told), f"{reason}: {told}"
        assert ("the account a" if reason.startswith("Assoc") else "the QOS q") in told, reason


def test_a_later_day_is_told_with_its_date() -> None:
    later = datetime(2026, 11, 18, 9, 30).timestamp()
    told = why_waiting(pending("Priority", start=later), SlurmState(), NOON)
    assert told == "other jobs have precedence; Slurm expects to start it 18 Nov 09:30"
