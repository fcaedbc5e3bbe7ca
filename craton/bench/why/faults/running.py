"""A job under test: its run directory, its processes, and what an injector may do to it.

Everything that an injector creates is undone by `undo` when the fault ends, in reverse order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from craton.bench.why.faults.slurm import LocalSlurm
from craton.formatting import whole_duration
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.node import read_heartbeat, read_status

WAIT_SECONDS = 60.0


@dataclass
class RunningJob:
    """A started run, with the means to break it."""

    name: str
    folder: Path  # of the job file and the user's modules
    run: RunDirectory
    marker: str  # NAME=VALUE in the environment of every process of this run
    onset: Path  # a program touches it when its fault begins
    environment: dict[str, str]  # of `craton run` and of what `spawn` starts
    undo: ExitStack
    mounts: Mapping[str, Path] = field(default_factory=dict)  # role (run, data, checkpoint) → mount point
    cgroups: Mapping[str, Path] = field(default_factory=dict)  # controller → folder of the run's group
    network: str = ""  # the name of its network namespace (`ip -n NAME …`)
    url: str = ""  # of a server
    slurm: LocalSlurm | None = None

    def step(self) -> int:
        return summarize(self.run).step

    def rank_pids(self) -> dict[int, int]:
        """Rank → process, of the ranks that their agents report."""
        found = {}
        for node in self.nodes():
            status = read_status(self.run, node)
            found.update({rank.rank: rank.pid for rank in status.ranks if rank.pid} if status is not None else {})
        return found

    def nodes(self) -> list[str]:
        return sorted(path.stem for path in (self.run.path / "status").glob("node-*.json"))

    def pid(self, rank: int) -> int:
        """The process of a rank; LookupError if it has none."""
        return self.rank_pids()[rank]

    def agent_pid(self, node: str) -> int:
        heartbeat = read_heartbeat(self.run, node)
        if heartbeat is None:
            raise LookupError(f"{node} has no heartbeat")
        return heartbeat.pid

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def processes(self) -> list[int]:
        """Every process of the run on this machine: agents, ranks and whatever they started."""
        return [pid for pid, environment in environments() if self.marker.encode() in environment]

    def spawn(self, command: Sequence[str], output: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a process beside the run (a hog, a client); it is killed when the fault ends."""
        with (output or Path(os.devnull)).open("wb") as log:
            process = subprocess.Popen(
                list(command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.undo.callback(_kill, process)
        return process

    def wait(self, is_there: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait for a condition; TimeoutError names `what` did not come."""
        deadline = time.monotonic() + seconds
        while not is_there():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: not within {whole_duration(seconds)}: {what}")
            time.sleep(0.1)


def environments() -> list[tuple[int, list[bytes]]]:
    """Process → its environment at its start, for every process that may be read."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                found.append((int(entry.name), (entry / "environ").read_bytes().split(b"\0")))
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
