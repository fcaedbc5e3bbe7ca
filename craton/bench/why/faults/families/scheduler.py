"""Runs that Slurm holds, cannot place, preempts or loses; a real Slurm of four nodes on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from craton.bench.why.faults.fault import ExpectedVerdict, LiveFault
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.slurm import NODES
from craton.bench.why.faults.slurm_jobs import slurm_of, slurm_recipe

PROGRAM = "scheduler"
NEEDS = ("slurm",)


def occupy_all_nodes(job: RunningJob) -> None:
    slurm_of(job).occupy(*NODES)


def hold(job: RunningJob) -> None:
    """Hold the run's job, as an administrator does: it is the newest in the queue."""
    slurm_of(job)("scontrol", "hold", slurm_of(job).job_numbers()[-1])


def drain_three_nodes(job: RunningJob) -> None:
    for node in NODES[:3]:
        slurm_of(job).update_node(node, "drain", "uncorrectable ECC errors, ticket 4711")


def break_all_prologs(job: RunningJob) -> None:
    for node in NODES:
        slurm_of(job).break_prolog(node)


def preempt(job: RunningJob) -> None:
    """Submit a job of higher priority that takes all nodes; return once it runs."""
    slurm_of(job).occupy(*NODES, partition="urgent")


def set_a_node_down(job: RunningJob) -> None:
    slurm_of(job).update_node(NODES[2], "down", "power supply failed")


def kill_a_node(job: RunningJob) -> None:
    slurm_of(job).kill_node(NODES[2])


def kill_the_controller(job: RunningJob) -> None:
    os.kill(int(Path(slurm_of(job).folder / "slurmctld.pid").read_text()), signal.SIGKILL)


FAULTS = (
    LiveFault(
        name="slurm-job-held",
        family="scheduler",
        summary="An administrator holds the pending job.",
        source="https://github.com/c3nl-neuraldynamics/c3nl_cluster/issues/6",
        job=slurm_recipe(PROGRAM, prepare=occupy_all_nodes),
        inject=hold,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",), conditions=("waiting",), remedy=(r"\bheld\b", r"\bhold\b", r"scontrol release")
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-nodes-drained",
        family="scheduler",
        summary="Three of four nodes are drained because of memory errors, and the job needs two.",
        source="https://github.com/ArjunaCluster/ArjunaUsers/issues/69",
        job=slurm_recipe(PROGRAM, prepare=drain_three_nodes),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",), conditions=("waiting",), remedy=(r"drain", r"uncorrectable ECC", r"ticket 4711")
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-nodes-occupied",
        family="scheduler",
        summary="Another job holds all nodes for half an hour.",
        source="https://github.com/lyulyul/shine-cluster/issues/168",
        job=slurm_recipe(PROGRAM, prepare=occupy_all_nodes),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"\b0 (are |is )?free", r"no (node )?(is )?free", r"job \d+", r"Resources", r"ends? in"),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-time-limit-above-partition",
        family="scheduler",
        summary="The job asks for an hour in a partition that allows five minutes, and stays pending.",
        source="https://github.com/SckyzO/slurm_exporter/issues/146",
        job=slurm_recipe(PROGRAM, partition="short", time_limit="1h"),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",), conditions=("waiting",), remedy=(r"time[ _]limit", r"PartitionTimeLimit", r"5 ?m")
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-more-nodes-than-partition",
        family="scheduler",
        summary="The job asks for four nodes in a partition that gives at most two.",
        source="https://github.com/aws/aws-parallelcluster-cookbook/pull/410",
        job=slurm_recipe(PROGRAM, nodes=4, partition="short", time_limit="4m", save_before="1m"),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(
                r"PartitionNodeLimit",
                r"(more|fewer|at most|maximum|limit).*nodes",
                r"nodes.*(limit|at most|allows)",
            ),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-partition-down",
        family="scheduler",
        summary="The partition of the job is down.",
        source="https://github.com/mace-cream/clusterhowto/issues/2",
        job=slurm_recipe(PROGRAM, partition="closed"),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"partition.*(down|closed|not (up|available))", r"PartitionDown"),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-prolog-fails",
        family="scheduler",
        summary="The prolog fails on every node: Slurm drains them, requeues the job and holds it.",
        source="https://github.com/burrmill/burrmill/issues/15",
        job=slurm_recipe(PROGRAM, prepare=break_all_prologs),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler", "host"),
            conditions=("waiting", "dead"),
            remedy=(r"prolog", r"launch failed"),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-preempted",
        family="scheduler",
        summary="A job of a partition with higher priority takes all nodes of the running job, which is requeued.",
        source="https://github.com/reframe-hpc/reframe/issues/3608",
        job=slurm_recipe(PROGRAM, partition="low"),
        inject=preempt,
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting", "stopped", "dead"),
            remedy=(r"preempt", r"urgent", r"higher priority"),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-node-set-down",
        family="scheduler",
        summary="A node of the run is set down; the job needs all four nodes and waits for it.",
        source="https://github.com/ArjunaCluster/ArjunaUsers/issues/106",
        job=slurm_recipe(PROGRAM, nodes=4),
        inject=set_a_node_down,
        expected=ExpectedVerdict(
            layers=("scheduler", "host"),
            conditions=("waiting", "dead"),
            remedy=(r"\bg3\b", r"power supply failed", r"\bdown\b"),
        ),
        judge_seconds=40,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-node-loses-power",
        family="scheduler",
        summary="A node of the run loses power: all its processes are gone at once, and the job needs all four nodes.",
        source="https://github.com/ArjunaCluster/ArjunaUsers/issues/111",
        job=slurm_recipe(PROGRAM, nodes=4),
        inject=kill_a_node,
        expected=ExpectedVerdict(
            layers=("scheduler", "host"),
            conditions=("waiting", "dead", "starting"),
            remedy=(r"\bg3\b", r"\bnode-2\b", r"lost", r"not respond", r"\bdown\b"),
        ),
        judge_seconds=40,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-controller-down",
        family="scheduler",
        summary="slurmctld is gone while the job runs; its processes go on.",
        source="https://github.com/ai4d-iasc/trixie/issues/93",
        job=slurm_recipe(PROGRAM),
        inject=kill_the_controller,
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("unknown", "healthy"),
            remedy=(r"slurmctld", r"controller", r"does not respond", r"no answer", r"squeue"),
        ),
        judge_seconds=40,
        needs=NEEDS,
    ),
)
