"""Slurm of the fifth set: a reservation to come, excluded nodes, no authentication, a job of the same name, nodes that
never boot."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from typing import Any

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.slurm import NODES
from craton.bench.why.faults.slurm_jobs import slurm_of, slurm_recipe

PROGRAM = "fifth_scheduler"
NEEDS = ("slurm",)
RESERVATION = "llama-week"
POWER_SECONDS = 40.0
# Nodes of a cloud: none is suspended by itself, and the program that resumes one starts no machine.
POWER_SAVING = """\
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=86400
SuspendTimeout=1
ResumeTimeout=1800
"""


def _training(kind: Any, keys: Mapping[str, Any], prepare: Any, **run: object) -> JobRecipe:
    return JobRecipe(kind=kind, nodes=2, keys={**keys, "run": run}, on="slurm", prepare=prepare)


def reserve_for_later(job: RunningJob) -> None:
    """Reserve all nodes for the user's own work, from three hours on."""
    slurm_of(job)(
        *("scontrol", "create", "reservation", f"reservationname={RESERVATION}", "starttime=now+3hours"),
        *("duration=600", "nodes=ALL", "users=root"),
    )


def occupy_all_nodes(job: RunningJob) -> None:
    slurm_of(job).occupy(*NODES)


def exclude_too_many(job: RunningJob) -> None:
    """Let the run exclude three of four nodes, and give the nodes back."""
    slurm, (occupying, *_, run) = slurm_of(job), slurm_of(job).job_numbers()
    slurm("scontrol", "update", f"jobid={run}", f"excnodelist={','.join(NODES[:3])}")
    slurm("scancel", occupying)


def kill_munge(job: RunningJob) -> None:
    """End the daemon that signs the messages of Slurm."""
    os.kill(int((slurm_of(job).folder / "munged.pid").read_text()), signal.SIGKILL)


def occupy_in_two_parts(job: RunningJob) -> None:
    slurm_of(job).occupy(NODES[0])
    slurm_of(job).occupy(*NODES[1:])


def wait_for_same_name(job: RunningJob) -> None:
    """Let the run wait for a running job of its name, and give the other nodes back."""
    slurm, (first, second, *_, run) = slurm_of(job), slurm_of(job).job_numbers()
    found = re.search(r"JobName=(\S+)", slurm("scontrol", "show", "job", run))
    assert found is not None
    slurm("scontrol", "update", f"jobid={first}", f"jobname={found[1]}")
    slurm("scontrol", "update", f"jobid={run}", "dependency=singleton")
    slurm("scancel", second)


def power_down_all_nodes(job: RunningJob) -> None:
    """Turn all nodes off, as a cloud does with idle ones; nothing will start them again."""
    slurm = slurm_of(job)
    with slurm.config.open("a") as config:
        config.write(POWER_SAVING)
    slurm("scontrol", "reconfigure")
    slurm("scontrol", "update", f"nodename={','.join(NODES)}", "state=power_down_force")
    for node in NODES:
        slurm.kill_node(node)
    deadline = time.monotonic() + POWER_SECONDS
    while len(slurm.nodes_in("idle~")) < len(NODES):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the nodes do not power down: {slurm('sinfo')}")
        time.sleep(0.2)


FAULTS = (
    LiveFault(
        name="slurm-reservation-not-begun",
        family="scheduler",
        summary="The job asks for a reservation that begins in three hours; all nodes are idle, and it waits.",
        source="https://github.com/flux-framework/flux-sched/issues/284",
        job=_training("pretrain", {"layout": {"fsdp": 2}}, reserve_for_later, reservation=RESERVATION),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"reservation|llama-week",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-too-many-nodes-excluded",
        family="scheduler",
        summary="The exclude list of the job has grown to three of four nodes; it needs two, and only one is left.",
        source="https://github.com/snakemake/snakemake-executor-plugin-slurm/pull/411",
        job=_training(
            "sft", {"train": {"lora": {"rank": 4}}, "layout": {"replicate": 2}}, occupy_all_nodes, time_limit="2h"
        ),
        inject=exclude_too_many,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"exclu|ExcNodeList|BadConstraints|node configuration|constraint|g\[1-3\]",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-munge-stops",
        family="scheduler",
        summary="The munge daemon of the machine is gone while the job waits: no message of Slurm is authenticated.",
        source="https://github.com/dun/munge/issues/124",
        job=slurm_recipe(PROGRAM, prepare=occupy_all_nodes),
        inject=kill_munge,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler", "host"),
            conditions=("waiting", "starting"),
            remedy=(r"munge|authenticat|slurmctld|controller|squeue|does not answer|contact",),
        ),
        judge_seconds=60,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-waits-for-same-name",
        family="scheduler",
        summary="The job is a singleton, and an older job of the same name still runs; three nodes are idle.",
        source="https://github.com/flux-framework/flux-core/issues/6804",
        job=slurm_recipe(PROGRAM, prepare=occupy_in_two_parts),
        inject=wait_for_same_name,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"singleton|dependency|same name|depends",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-cloud-nodes-never-boot",
        family="scheduler",
        summary="Slurm gives the job powered-down nodes of a cloud, and none of them boots; the job is configuring.",
        source="https://github.com/aws/aws-parallelcluster/issues/5919",
        job=slurm_recipe(PROGRAM, prepare=power_down_all_nodes),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler", "host"),
            conditions=("waiting", "starting"),
            remedy=(r"power|boot|resum|configur|cloud|not respond|ResumeTimeout|slurmd",),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
)
