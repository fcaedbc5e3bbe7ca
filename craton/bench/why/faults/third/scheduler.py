"""Slurm of the third set: time limits, begin times, pinned nodes, nodes that never finish, steps inside steps."""

from __future__ import annotations

import time
from dataclasses import replace

from craton.bench.why.faults.fault import ExpectedVerdict, LiveFault
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.slurm import NODES
from craton.bench.why.faults.slurm_jobs import slurm_of, slurm_recipe

PROGRAM = "third_scheduler"
NEEDS = ("slurm",)
COMPLETING_SECONDS = 30.0
EPILOG = "#!/bin/sh\n# waits for a file server that does not answer\nwhile true; do sleep 1; done\n"


def occupy_all_nodes(job: RunningJob) -> None:
    slurm_of(job).occupy(*NODES)


def begin_later(job: RunningJob) -> None:
    """Let the run begin in six hours, and give the nodes back."""
    slurm, (occupying, *_, run) = slurm_of(job), slurm_of(job).job_numbers()
    slurm("scontrol", "update", f"jobid={run}", "starttime=now+6hours")
    slurm("scancel", occupying)


def pin_to_a_drained_node(job: RunningJob) -> None:
    """Let the run ask for g3 by name, drain g3, and give the nodes back."""
    slurm, (occupying, *_, run) = slurm_of(job), slurm_of(job).job_numbers()
    slurm("scontrol", "update", f"jobid={run}", f"reqnodelist={NODES[2]}")
    slurm.update_node(NODES[2], "drain", "GPU has fallen off the bus, ticket 815")
    slurm("scancel", occupying)


def leave_nodes_completing(job: RunningJob) -> None:
    """Let the epilog of a job that held all nodes never end."""
    slurm = slurm_of(job)
    epilog = slurm.folder / "epilog.sh"
    epilog.write_text(EPILOG)
    epilog.chmod(0o755)
    with slurm.config.open("a") as config:
        config.write(f"Epilog={epilog}\n")
    slurm("scontrol", "reconfigure")
    slurm("scancel", slurm.occupy(*NODES))
    deadline = time.monotonic() + COMPLETING_SECONDS
    while len(slurm.nodes_in("comp")) < len(NODES):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the nodes do not complete: {slurm('sinfo')}")
        time.sleep(0.2)


FAULTS = (
    LiveFault(
        name="slurm-time-limit-reached",
        family="scheduler",
        summary="The job reaches its time limit of a minute in the middle of the training, and may not be requeued.",
        source="https://github.com/ecmwf/anemoi-core/issues/114",
        job=slurm_recipe(PROGRAM, time_limit="1m", save_before="10s", restarts=0),
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("dead", "stopped", "waiting"),
            remedy=(r"time[ _-]?limit|TIMEOUT|wall ?time|time_limit",),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-begins-later",
        family="scheduler",
        summary="The job has a begin time six hours away and waits for it; all nodes are idle.",
        source="https://github.com/aws/aws-parallelcluster-node/pull/127",
        job=slurm_recipe(PROGRAM, prepare=occupy_all_nodes),
        inject=begin_later,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"begin|start ?time|not before|earliest|starts? (at|in)",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-pinned-to-a-drained-node",
        family="scheduler",
        summary="The job asks for node g3 by name, and g3 is drained; three other nodes are idle, and the job waits.",
        source="https://github.com/reframe-hpc/reframe/issues/303",
        job=slurm_recipe(PROGRAM, prepare=occupy_all_nodes),
        inject=pin_to_a_drained_node,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"\bg3\b|drain|fallen off the bus|ticket 815|ReqNodeNotAvail|nodelist|by name",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-nodes-stuck-completing",
        family="scheduler",
        summary="The epilog of an earlier job hangs on all nodes; they stay in COMPLETING, and the run waits for them.",
        source="https://github.com/nebius/soperator/issues/556",
        job=slurm_recipe(PROGRAM, prepare=leave_nodes_completing),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"complet|epilog|\b0 (are |is )?free|no (node )?(is )?free|Resources",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-step-waits-for-its-own-job",
        family="scheduler",
        summary="The script of rank 0 evaluates with srun inside the job, whose own step has all resources: it waits.",
        source="https://github.com/llnl/smith/issues/688",
        job=replace(slurm_recipe(PROGRAM), fault="step"),
        expected=ExpectedVerdict(
            layers=("scheduler", "framework"),
            conditions=("hung", "dead", "slow"),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"srun|step creation|nodes are busy|overlap|stack|py-spy|subprocess|child",),
        ),
        judge_seconds=40,
        needs=NEEDS,
    ),
)
