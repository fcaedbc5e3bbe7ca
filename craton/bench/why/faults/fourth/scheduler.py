"""Slurm of the fourth set: changed features and accounts, a prolog that hangs, a dead slurmd, full spool folders."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import fill
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.slurm import NODES
from craton.bench.why.faults.slurm_jobs import slurm_of, slurm_recipe

PROGRAM = "fourth_scheduler"
NEEDS = ("slurm",)
PROLOG = "#!/bin/sh\n# waits for a health check that never ends\nwhile true; do sleep 1; done\n"
SPOOL_SIZE = "64k"


def _training(kind: Any, keys: Mapping[str, Any], **run: object) -> JobRecipe:
    """A training of two nodes on Slurm, which waits behind a job on all nodes."""
    return JobRecipe(kind=kind, nodes=2, keys={**keys, "run": run}, on="slurm", prepare=occupy_all_nodes)


def occupy_all_nodes(job: RunningJob) -> None:
    slurm_of(job).occupy(*NODES)


def change_features(job: RunningJob) -> None:
    """Give all nodes another feature than the run asks for, as after an upgrade, and give the nodes back."""
    slurm, occupying = slurm_of(job), slurm_of(job).job_numbers()[0]
    hosts = ",".join(NODES)
    slurm("scontrol", "update", f"nodename={hosts}", "activefeatures=rocky9", "availablefeatures=rocky9")
    slurm("scancel", occupying)


def close_to_account(job: RunningJob) -> None:
    """Allow only another account in the partition, and give the nodes back."""
    slurm, occupying = slurm_of(job), slurm_of(job).job_numbers()[0]
    slurm("scontrol", "update", "partitionname=train", "allowaccounts=physics")
    slurm("scancel", occupying)


def hang_in_prolog(job: RunningJob) -> None:
    (slurm_of(job).folder / "prolog.sh").write_text(PROLOG)


def kill_slurmd(job: RunningJob) -> None:
    """Kill the daemon of a node; the processes of its jobs go on."""
    os.kill(int((slurm_of(job).folder / f"slurmd-{NODES[1]}.pid").read_text()), signal.SIGKILL)


def fill_spool_folders(job: RunningJob) -> None:
    """Leave the daemons of all nodes no room for the script of a job."""
    for node in NODES:
        place = slurm_of(job).folder / "spool" / node
        command = ["mount", "-t", "tmpfs", "-o", f"size={SPOOL_SIZE}", "tmpfs", str(place)]
        subprocess.run(command, check=True, capture_output=True)
        job.undo.callback(subprocess.run, ["umount", "-l", str(place)], check=False, capture_output=True)
        fill(place)


FAULTS = (
    LiveFault(
        name="slurm-feature-gone",
        family="scheduler",
        summary="The job asks for nodes with the feature `cpu`, which no node has any more after an upgrade.",
        source="https://github.com/aws/aws-parallelcluster/issues/5731",
        job=_training("pretrain", {"layout": {"fsdp": 2}}, constraint="cpu"),
        inject=change_features,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"constraint|feature|BadConstraints",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-account-not-allowed",
        family="scheduler",
        summary="The partition was closed to the account of the pending job; all nodes are idle, and it waits.",
        source="https://github.com/PKUHPC/OpenSCOW/pull/497",
        job=_training("sft", {"train": {"lora": {"rank": 4}}, "layout": {"replicate": 2}}, account="biology"),
        inject=close_to_account,
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler",),
            conditions=("waiting",),
            remedy=(r"account|AllowAccounts|physics|biology",),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-prolog-hangs",
        family="scheduler",
        summary="The prolog of every node waits for ever: Slurm says that the job runs, and nothing of it has started.",
        source="https://github.com/nebius/nebius-solutions-library/pull/265",
        job=slurm_recipe(PROGRAM, prepare=hang_in_prolog),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler", "host"),
            conditions=("starting", "waiting", "hung"),
            remedy=(r"prolog",),
        ),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-daemon-of-a-node-dies",
        family="scheduler",
        summary="The slurmd of g2 is killed and its ranks go on; Slurm takes the node for down and requeues the job.",
        source="https://github.com/elasticluster/elasticluster/issues/272",
        job=slurm_recipe(PROGRAM, nodes=4),
        inject=kill_slurmd,
        expected=ExpectedVerdict(
            layers=("scheduler", "host"),
            conditions=("waiting", "dead", "starting"),
            remedy=(r"\bg2\b|slurmd|not respond|\bdown\b",),
        ),
        judge_seconds=50,
        needs=NEEDS,
    ),
    LiveFault(
        name="slurm-spool-folders-full",
        family="scheduler",
        summary="The spool folders of all nodes are full: no job script can be written, and Slurm drains the nodes.",
        source="https://github.com/marbits-icm/marbits-public/issues/166",
        job=slurm_recipe(PROGRAM, prepare=fill_spool_folders),
        onset="start",
        expected=ExpectedVerdict(
            layers=("scheduler", "storage"),
            conditions=("waiting", "dead"),
            remedy=(r"spool|\bfull\b|drain|launch failed",),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
)
