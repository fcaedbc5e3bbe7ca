"""Real agents with real, small ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import Launch, write_launch
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines
from craton.telemetry.node import process_start, read_heartbeat

# What the ranks of most tests begin with: `say(name)` leaves a file beside the run that the test can wait for.
PREAMBLE = """
import os, pathlib, signal, sys, time
RANK = int(os.environ["RANK"])
HERE = pathlib.Path(os.environ["CRATON_RUN"]).parent
def say(name, text=""):
    (HERE / f"{name}-{RANK}.new").write_text(text or str(os.getpid()))
    os.replace(HERE / f"{name}-{RANK}.new", HERE / f"{name}-{RANK}")
def wait_for(name):
    while not (HERE / name).exists():
        time.sleep(0.01)
"""


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Gang:
    """A run and the agents a test starts for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunDirectory.create(folder, "run")
        self.agents: list[subprocess.Popen[bytes]] = []

    def launch(self, rank_code: str, **settings: Any) -> None:
        """Writes launch.json for ranks that run this Python code."""
        settings.setdefault("command", [sys.executable, "-c", PREAMBLE + rank_code])
        defaults: dict[str, Any] = {"generation": 1, "nodes": ["node-0"], "ranks_per_node": 1}
        write_launch(self.run, Launch(**{**defaults, **settings}))

    def start(self, node: int = 0) -> subprocess.Popen[bytes]:
        with open(self.folder / f"agent-{node}.err", "ab") as errors:
            agent = subprocess.Popen(
                [sys.executable, "-m", "craton.agent", str(self.run.path), "--node", str(node)], stderr=errors
            )
        self.agents.append(agent)
        return agent

    def end(self) -> None:
        """Kills every agent that is left, also one that another agent has started."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for path in (self.run.path / "heartbeat").glob("[!.]*"):
            beat = read_heartbeat(self.run, path.name)
            if beat is not None and beat.started and process_start(beat.pid) == beat.started:
                os.kill(beat.pid, signal.SIGKILL)

    def finish(self, node: int = 0) -> int:
        """Starts one agent and waits for its end."""
        return self.start(node).wait(PATIENCE_SECONDS)

    def errors(self, node: int = 0) -> str:
        return (self.folder / f"agent-{node}.err").read_text()

    def said(self, name: str, rank: int) -> str:
        """Waits for what a rank says."""
        path = self.folder / f"{name}-{rank}"
        wait_until(path.exists, f"rank {rank} says {name}")
        return path.read_text()

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def events(self, node: str = "node-0") -> list[dict[str, Any]]:
        return read_lines(self.run.events_path(node))[0]

    def event_names(self, node: str = "node-0") -> list[str]:
        return [line["event"] for line in self.events(node)]
