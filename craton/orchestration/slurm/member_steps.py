"""Members of a run on Slurm: each is a further step of its owner's job, on nodes of that job.

The member manager runs beside the batch program, on the first node and outside any image, so it has Slurm's tools. It
starts a member with `srun --overlap`, in a session of its own: killing the manager ends no member, and the end of the
job ends all of them. backend.json of a member names the job of its owner, the step, and the srun process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from craton.agent import has_agents, read_launch, write_launch
from craton.formatting import counted
from craton.orchestration.backend import BACKEND_FILE, Standing, Submission, read_submission, write_submission
from craton.orchestration.errors import StartError
from craton.orchestration.member_nodes import choose_hosts
from craton.orchestration.slurm.allocation import job_number, read_allocation, write_allocation
from craton.orchestration.slurm.life import FIRST_SECONDS, give_up_seconds
from craton.orchestration.slurm.mounts import image_of
from craton.orchestration.slurm.tools import end_step_named
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.members import member_runs, owner_of, read_members
from craton.telemetry.node import process_start, read_heartbeat

if TYPE_CHECKING:
    from craton.orchestration.draft import Draft
    from craton.orchestration.slurm.records import JobRecord

STEP = "step"  # name of a member's step; other runs have none
ASKED = "asked"  # a command outside the job wants the member started
_PID, _STARTED, _HOST = "pid", "started", "host"


class SlurmPlace:
    """The job of a run as the place where its members start."""

    on = "slurm"

    def owner_lives(self, owner: RunDirectory) -> bool:
        return has_agents(owner)

    def member_lives(self, member: RunDirectory) -> bool:
        return _srun_lives(read_submission(member)) and not _is_silent(member)

    def is_asked(self, member: RunDirectory) -> bool:
        return ASKED in read_submission(member).details


def is_member(submission: Submission) -> bool:
    return STEP in submission.details


def submit_member(draft: Draft, run: RunDirectory) -> Submission:
    """Start the step of a member, from inside its owner's job. From outside, ask the member manager to do so."""
    from craton.agent.processes import open_log  # these import jobs and the planner, which `ps` avoids
    from craton.orchestration.slurm.step import agents_command, slurm_step

    owner = owner_of(run)
    assert owner is not None, run.path
    before = read_submission(run)
    allocation = read_allocation(owner)
    if allocation is None or "SLURM_JOB_ID" not in os.environ or allocation.job != job_number(os.environ):
        return Submission("slurm", read_submission(owner).job, {STEP: run.path.name, ASKED: "true"})
    if _srun_lives(before):  # its nodes are silent
        end_step_named(before.job, before.details[STEP])
    mine = read_allocation(run)
    hosts = choose_hosts(
        read_members(owner),
        run.path.name,
        len(allocation.nodes),
        allocation.all_hosts,
        _taken_hosts(owner, run),
        mine.hosts if mine else (),
    )
    names = draft.launch.nodes
    if len(hosts) < len(names):
        raise StartError(
            f"{run.name} needs {counted(len(names), 'node')}, and job {allocation.job} has {len(hosts)} for it; "
            f"`craton stop {owner.name}` and `craton resume {owner.name}` request nodes again"
        )
    part = allocation.part(names, hosts[: len(names)])
    launch = replace(
        draft.launch,
        master_address=part.nodes[0].address,
        leaves=part.leaves,
        stop_grace_seconds=max(draft.launch.stop_grace_seconds, read_launch(owner).stop_grace_seconds),
        give_up_seconds=give_up_seconds(draft.launch, bool(image_of(draft.job, draft.launch))),
    )
    write_allocation(run, part)
    write_launch(run, launch)
    words = agents_command(slurm_step(draft.job, run, launch, run.path.name), part.hosts)
    with open_log(run.path / "logs" / f"slurm-{allocation.job.partition('_')[0]}.out") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    details = {
        STEP: run.path.name,
        "nodes": ",".join(part.hosts),
        _PID: str(process.pid),
        _STARTED: process_start(process.pid),
        _HOST: socket.gethostname(),
    }
    submission = Submission("slurm", allocation.job, details)
    write_submission(run, submission)  # at once: a step that is not recorded would be started twice
    return submission


def kill_member(submission: Submission) -> None:
    """End the step of a member at once."""
    end_step_named(submission.job, submission.details[STEP])


def member_standing(job: JobRecord | None, submission: Submission, run: RunDirectory) -> Standing:
    """Return the state of a member, from its owner's job and its own step."""
    number = submission.job
    if job is None or job.has_ended:
        return Standing("ended", number, reason="" if job is None else job.state)
    if job.is_pending:
        return Standing("waiting", number, reason=job.reason, sentence="the nodes of its owner's job")
    allocation = read_allocation(run)
    nodes = tuple(f"{node.name} on {node.host}" for node in allocation.nodes) if allocation else ()
    if not _step_lives(run, submission):
        return Standing("ended", reason="its step has ended")
    sentence = f"Slurm has suspended job {number}; `scontrol resume {number}` continues it" if job.is_suspended else ""
    return Standing("running", number, nodes=nodes, sentence=sentence, is_suspended=job.is_suspended)


def _taken_hosts(owner: RunDirectory, run: RunDirectory) -> set[str]:
    """Return the hosts of the owner's other members that live."""
    others = [member for member in member_runs(owner) if member.path != run.path]
    living = [member for member in others if _srun_lives(read_submission(member))]
    return {host for member in living if (part := read_allocation(member)) is not None for host in part.hosts}


def _step_lives(run: RunDirectory, submission: Submission) -> bool:
    """Whether a member's step lives, also seen from a machine outside the job."""
    if submission.details.get(_HOST) == socket.gethostname():
        return _srun_lives(submission)
    return has_agents(run) or _is_starting(run, submission)


def _srun_lives(submission: Submission) -> bool:
    details = submission.details
    if details.get(_HOST) != socket.gethostname() or not details.get(_STARTED):
        return False
    return process_start(int(details[_PID])) == details[_STARTED]


def _is_starting(run: RunDirectory, submission: Submission) -> bool:
    """Whether a step was started a short time ago, so that no agent of it has sent a heartbeat yet."""
    launch = read_json(run.launch_path)
    beats = [read_heartbeat(run, str(node)) for node in launch.get("nodes") or ()]
    if _PID not in submission.details or any(beat and beat.generation == launch.get("generation") for beat in beats):
        return False
    try:
        return abs(time.time() - (run.path / BACKEND_FILE).stat().st_mtime) < FIRST_SECONDS
    except OSError:
        return False


def _is_silent(run: RunDirectory) -> bool:
    """Whether all agents of a member have sent heartbeats and none does any more: srun waits for lost nodes forever."""
    launch = read_json(run.launch_path)
    beats = [read_heartbeat(run, str(node)) for node in launch.get("nodes") or ()]
    return bool(beats) and all(
        beat is not None and beat.generation >= int(launch.get("generation") or 0) and beat.is_lost() for beat in beats
    )
