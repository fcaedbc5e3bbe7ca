"""Jobs of stand-in ranks that count steps (rank.py), and waiting for what they do."""

from __future__ import annotations

import sys
from pathlib import Path

from waiting import wait_until

from craton.agent.processes import free_port
from craton.job import Job, parse_job
from craton.orchestration.draft import draft_run
from craton.orchestration.start import start_run
from craton.telemetry import RunDirectory, RunSummary, summarize

RANK = Path(__file__).with_name("rank.py")


def counting_job(nodes: int = 2, name: str = "count", **environment: object) -> Job:
    env = ", ".join(f"{key}: '{value}'" for key, value in environment.items())
    return parse_job(
        f"name: {name}\nkind: command\ncommand: [{sys.executable}, {RANK}]\ncluster: local x {nodes}\n"
        f"run: {{env: {{{env}}}}}\n",
        folder=RANK.parent,
    )


def start(root: Path, job: Job) -> RunDirectory:
    return start_run(draft_run(job, root / job.name, port=free_port()), root)


def wait_for_state(run: RunDirectory, *states: str) -> RunSummary:
    wait_until(lambda: summarize(run).state in states, lambda: f"{states}; it is {summarize(run).state}")
    return summarize(run)
