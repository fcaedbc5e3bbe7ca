"""The processes a node's agent starts: ranks and sinks.

Each is the head of a session of its own (a Ctrl-C in the agent's terminal does not reach it), dies with the agent
(child.py), and leaves nobody behind: when it has ended, what is left of its process group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import craton.agent.child as child_program
from craton.agent.launch import Launch
from craton.telemetry import RunDirectory

PIPE_BYTES = 1 << 20
GROUP_SECONDS = 1.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass
class ChildProcess:
    """A started process, and how it ended."""

    name: str  # "rank 3", "sink tensorboard"
    process: subprocess.Popen[bytes]
    log_path: Path
    log_offset: int  # where the log began for this process
    started: float  # epoch seconds
    ended: float | None = None
    sent: set[signal.Signals] = field(default_factory=set)

    @property
    def is_running(self) -> bool:
        return self.ended is None

    @property
    def code(self) -> int:
        """Exit code, or minus the signal that ended it."""
        assert self.process.returncode is not None
        return self.process.returncode

    def send(self, number: signal.Signals) -> None:
        """SIGTERM goes to the process, which may have work to finish; SIGKILL to its whole group."""
        if not self.is_running:
            return
        self.sent.add(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)

    def last_lines(self, count: int = 20, max_bytes: int = 16 << 10) -> list[str]:
        """The end of what this process printed."""
        try:
            with open(self.log_path, "rb") as handle:
                size = handle.seek(0, os.SEEK_END)
                handle.seek(max(self.log_offset, size - max_bytes))
                return handle.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []


@dataclass
class RankProcess(ChildProcess):
    """A rank, the pipe its records come through, and what it has booked in the ledger."""

    rank: int = 0
    records: int = -1  # descriptor of the reading end
    booked_seconds: float = 0.0

    @property
    def has_booked(self) -> bool:
        return self.booked_seconds > 0


def start_rank(run: RunDirectory, launch: Launch, node: int, local_rank: int) -> RankProcess:
    rank = node * launch.ranks_per_node + local_rank
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.suppress(OSError, AttributeError):  # an unprivileged user has a limited amount of pipe memory
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    started = time.time()
    environment = {
        "PYTHONUNBUFFERED": "1",
        **launch.env,
        **({} if launch.gpus else {"CUDA_VISIBLE_DEVICES": ""}),
        "RANK": str(rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(launch.ranks_per_node),
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
        "OMP_NUM_THREADS": str(launch.threads_per_rank),
        "CRATON_RUN": str(run.path),
        "CRATON_NODE": launch.nodes[node],
        "CRATON_GENERATION": str(launch.generation),
        "CRATON_RECORDS": str(writing),
        "CRATON_STARTED": repr(started),
    }
    log_path = run.log_path(rank)
    try:
        process, log_offset = _start(launch.command, environment, log_path, (writing,))
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return RankProcess(f"rank {rank}", process, log_path, log_offset, started, rank=rank, records=reading)


def start_sink(run: RunDirectory, sink: str) -> ChildProcess:
    """A sink goes on until `end_sink` closes its standard input."""
    command = [sys.executable, "-m", "craton.telemetry.track", str(run.path), sink, "--until-stdin-closes"]
    log_path = run.path / "logs" / f"track-{sink}.log"
    started = time.time()
    process, log_offset = _start(command, {"PYTHONUNBUFFERED": "1"}, log_path, (), stdin=subprocess.PIPE)
    return ChildProcess(f"sink {sink}", process, log_path, log_offset, started)


def end_sink(sink: ChildProcess) -> None:
    assert sink.process.stdin is not None
    sink.process.stdin.close()


def adopt_orphans() -> None:
    """Processes that a rank leaves behind become children of the agent, which reaps them: process 1 may not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(children: Sequence[ChildProcess]) -> list[ChildProcess]:
    """Takes note of every process that has ended, ours first to end first; orphans are reaped and forgotten."""
    ended: list[ChildProcess] = []
    by_pid = {each.process.pid: each for each in children if each.is_running}
    while True:
        try:
            status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ended
        if status is None:
            return ended
        if status.si_pid not in by_pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(status.si_pid, os.WNOHANG)
            continue
        child = by_pid.pop(status.si_pid)
        # The group goes while its head is still a zombie: until then its number cannot belong to anybody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
        child.ended = time.time()
        ended.append(child)
        _reap_group(child.process.pid)


def _reap_group(group: int) -> None:
    """Reaps what was killed with a process and is our child since; briefly, for the kernel may hold one back."""
    deadline = time.monotonic() + GROUP_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is None:
                time.sleep(0.002)
        except ChildProcessError:
            return


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    pass_descriptors: tuple[int, ...],
    stdin: int = subprocess.DEVNULL,
) -> tuple[subprocess.Popen[bytes], int]:
    with open(log_path, "ab") as log:
        offset = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", child_program.__file__, str(os.getpid()), *command],
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=pass_descriptors,
            start_new_session=True,
        )
    return process, offset
