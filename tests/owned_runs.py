"""Run directories of owners and members, as their agents and the member manager leave them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from craton.telemetry import RunDirectory
from craton.telemetry.members import (
    MEMBERS_FOLDER,
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberStatus,
    write_members,
    write_members_status,
)
from craton.telemetry.node import Heartbeat, process_start, write_heartbeat

MOMENT = time.time()  # of the last step of every run
FRESH_SECONDS = 3600.0  # for which a heartbeat stays fresh, however slow the test
PLAN = {"kind": "pretrain", "steps": 10, "step_seconds": 1.0, "tokens_per_second": 4000.0}


def make_member(
    root: Path, name: str, state: str = "done", steps: int = 10, dollars_per_day: float = 0.0
) -> RunDirectory:
    """A run of one node in a state: done, failed, stopped, running (on another machine) or lost."""
    run = RunDirectory.create(root, name)
    launch = {"generation": 0, "nodes": ["node-0"], "ranks_per_node": 1}
    run.launch_path.write_text(
        json.dumps({**launch, **({"dollars_per_day": dollars_per_day} if dollars_per_day else {})})
    )
    run.plan_path.write_text(json.dumps(PLAN))
    run.job_path.write_text(f"name: {name}\nkind: command\ncommand: ['true']\ncluster: local x 1\n")
    run.log_path(0).write_text(f"hello from {name}\n")
    for step in range(1, steps + 1):
        labels = {"time": MOMENT - steps + step, "step": step, "generation": 0, "node": "node-0", "rank": 0}
        measured = {"run_loss": 1.0 / step, "run_step_seconds": 1.0, "run_tokens_per_second": 4000.0}
        with run.metrics_path("node-0").open("a") as metrics, run.ledger_path("node-0").open("a") as ledger:
            metrics.write(json.dumps({**labels, **measured}) + "\n")
            ledger.write(json.dumps({**labels, "seconds": {"productive": 1.0}}) + "\n")
    if state in ("running", "lost"):
        write_heartbeat(run, "node-0", Heartbeat(0, "running", 1, 0, "127.0.0.1:1", "elsewhere"))
        moment = time.time() + FRESH_SECONDS if state == "running" else 1e9
        os.utime(run.heartbeat_path("node-0"), (moment, moment))
    elif state == "failed":
        run.mark("FATAL", "rank 0 ran out of luck")
    else:
        run.mark("DONE" if state == "done" else "STOP")
    return run


def beat_here(run: RunDirectory) -> None:
    """Make this process the agent of a run: `craton stop --now` would end it."""
    pid = os.getpid()
    beat = Heartbeat(0, "running", pid, 0, "127.0.0.1:1", socket.gethostname(), process_start(pid))
    write_heartbeat(run, "node-0", beat)
    moment = time.time() + FRESH_SECONDS
    os.utime(run.heartbeat_path("node-0"), (moment, moment))


def make_owner(
    root: Path,
    name: str,
    members: Mapping[str, str],
    state: str = "running",
    status: Mapping[str, MemberStatus] | None = None,
    dollars_per_day: float = 0.0,
    members_dollars_per_day: float = 0.0,
) -> RunDirectory:
    """A run with members (name → state). One that waits has no run directory yet."""
    owner = make_member(root, name, state, 3, dollars_per_day)
    (owner.path / MEMBERS_FOLDER).mkdir()
    for member, its_state in members.items():
        if its_state != "waiting":
            make_member(owner.path / MEMBERS_FOLDER, member, its_state, 5, members_dollars_per_day)
    write_members(owner, MembersSpec([MemberSpec(member) for member in members], purpose="sweep"))
    write_members_status(owner, MembersStatus(dict(status or {}), is_open=True))
    return owner
