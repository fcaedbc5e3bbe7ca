"""The processes of a node: ranks, their fork server, the keeper of their state, and sinks.

Each one leads its own session (a Ctrl-C in the agent's terminal does not reach it) and dies with the agent (child.py).
When it has ended, the rest of its process group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import craton.agent.processes.child as child_program
from craton.agent.generation import Generation
from craton.agent.launch import Launch
from craton.agent.processes.oom import OomWatch
from craton.agent.processes.output import CommandOutput
from craton.job.sections import PLACEHOLDERS
from craton.limits import MORE_MEMORY, limit_hint, memory_text
from craton.telemetry import RunDirectory
from craton.telemetry.error_reports import ErrorReport, read_error
from craton.telemetry.files import append_regular, open_regular
from craton.telemetry.rank import STEADY, RankPage

RECORD = "record"  # key of an order: the file for the flight recording of a rank
DUMP = "dump"  # key of an order: dump the stacks of all threads
EXIT_FINAL = 3  # of a rank: the job itself is at fault, and a retry would fail as well
PIPE_BYTES = 1 << 20
ERROR_BYTES = 48 << 10  # at the end of a log, in which the reason of an end is searched
# Errors of NCCL are handled by agents. PyTorch's watchdog would end the process; before, it holds a lock for a minute,
# so that others can dump their recordings, and the rank waits for that lock in its next collective.
NCCL_POLICY = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# Path prefix of PyTorch's flight recorder, to which it adds the rank; the first one set counts (as of 2.11 and 2.13).
RECORDING_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# How long an idle thread spins before it sleeps: libgomp (PyTorch's wheels) 300,000 times by default, Intel's OpenMP
# for 200 ms. Sleeping at once costs 4 to 19% on an idle machine (benchmarks/waiting_policy.py, docs/measurements.md).
WAITING_POLICY = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
WAITING_VARIABLES = ("OMP_WAIT_POLICY", *WAITING_POLICY)
GROUP_SECONDS = 1.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_NAME = "(" + "|".join(PLACEHOLDERS) + ")"
_PLACEHOLDER = re.compile(rf"\{{\{{{_NAME}\}}\}}|(?<!\$)\{{{_NAME}\}}")  # ${name} is a shell's own


@dataclass
class ChildProcess:
    """A started process, and how it ended."""

    name: str  # "rank 3", "sink tensorboard", "keeper"
    pid: int
    log_path: Path
    log_offset: int  # where the log began for this process
    started: float  # epoch seconds of the steady clock, like `ended`
    stdin: int = -1  # our end, if there is one
    ended: float | None = None
    code: int = 0  # after the end: exit code, or minus the signal
    sent: set[signal.Signals] = field(default_factory=set)
    oom: OomWatch = field(init=False)

    def __post_init__(self) -> None:
        self.oom = OomWatch(self.pid, time.monotonic())

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, or what a shell ran for it."""
        return self.code in (-signal.SIGKILL, 128 + signal.SIGKILL)

    @property
    def is_running(self) -> bool:
        return self.ended is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal: SIGTERM to the process, which may have work to finish; SIGKILL to its whole group."""
        if not self.is_running:
            return
        self.sent.add(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    @property
    def state(self) -> str:
        """Its state, by the kernel: R, S, D, T, Z (proc_pid_stat(5)); "" if it cannot be read. A process that a
        debugger examines sleeps: no signal has stopped it."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0].replace("t", "S")
        except (OSError, IndexError):
            return ""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.state == "T"

    def last_lines(self, count: int = 20, max_bytes: int = 16 << 10) -> list[str]:
        """Return the last lines that this process printed."""
        return self.last_text(max_bytes).splitlines()[-count:]

    def last_text(self, max_bytes: int = ERROR_BYTES) -> str:
        """Return the end of what this process printed."""
        if isinstance(self, RankProcess) and self.output is not None:
            return self.output.tail_text()
        try:
            with open_regular(self.log_path) as handle:
                size = handle.seek(0, os.SEEK_END)
                handle.seek(max(self.log_offset, size - max_bytes))
                return handle.read(max_bytes).decode(errors="replace")
        except OSError:
            return ""


@dataclass
class RankProcess(ChildProcess):
    """A rank, the pipe for its records, and the pipe that sends it generations."""

    rank: int = 0
    records: int = -1  # descriptor of the reading end
    orders: int = -1  # of the writing end; -1: it takes none
    values: dict[str, str] = field(default_factory=dict)  # values of placeholders
    page: RankPage | None = None  # shared with the agent
    output: CommandOutput | None = None  # of a job's own command
    error: ErrorReport | None = None  # why it ends, in its own words
    traps_before: int = 0  # of its page, triggered before this process or survived by it
    is_killed_by_chaos: bool = False  # by the agent, for `craton chaos`

    @property
    def is_injected(self) -> bool:
        """Whether a fault of `craton chaos` ended it."""
        is_trapped = self.page is not None and self.page.traps_sprung > self.traps_before
        return self.code == -signal.SIGKILL and (is_trapped or self.is_killed_by_chaos)

    @property
    def has_records(self) -> bool:
        """Whether its pipe still holds records, also after its end."""
        with selectors.DefaultSelector() as one:
            one.register(self.records, selectors.EVENT_READ)
            return bool(one.select(0))

    def read_end(self) -> ErrorReport | None:
        """Return why it ended: as it reported itself, else as its output shows; None if it ended well, or for a signal
        of its agent."""
        if self.code == 0 or -self.code in self.sent:
            return None
        return self.error or read_error(self.last_text())

    def request_recording(self, run: RunDirectory) -> None:
        """Make a rank of the training loop write its last collectives."""
        self._request({RECORD: str(run.recording_prefix.with_name(f"{run.recording_prefix.name}{self.rank}"))})

    def request_stacks(self) -> bool:
        """Make a rank of the training loop dump its stacks; False: it takes no orders."""
        return self._request({DUMP: True})

    def _request(self, order: dict[str, Any]) -> bool:
        if self.orders < 0:
            return False
        with contextlib.suppress(OSError):  # it is dying, or does not read its orders
            os.write(self.orders, json.dumps(order).encode() + b"\n")
            return True
        return False

    def close(self) -> None:
        for descriptor in (self.records, self.orders):
            if descriptor >= 0:
                os.close(descriptor)
        self.records = self.orders = -1


def common_environment(run: RunDirectory, launch: Launch, node: str) -> dict[str, str]:
    """Return the environment of all ranks of a node, in every generation."""
    is_set = any({**os.environ, **launch.env}.get(name) for name in RECORDING_VARIABLES)
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code prints the Python stack
        "OMP_NUM_THREADS": str(launch.threads_per_rank),
        **waiting_policy({**os.environ, **launch.env}),
        **({name: value for name, value in NCCL_POLICY.items() if name not in os.environ} if launch.nursery else {}),
        **({} if is_set else {RECORDING_VARIABLES[0]: str(run.recording_prefix)}),
        # Also with InfiniBand or EFA: ranks that share a GPU talk over loopback, which the interface variables choose.
        **({"NCCL_NET": "Socket"} if launch.nodes_per_gpu > 1 else {}),
        **launch.env,
        **({"CUDA_VISIBLE_DEVICES": launch.cards[node]} if node in launch.cards else {}),
        **({"CUDA_VISIBLE_DEVICES": ""} if launch.hides_gpus else {}),
        "LOCAL_WORLD_SIZE": str(launch.ranks_per_node),
        "CRATON_RUN": str(run.path),
        "CRATON_NODE": node,
    }


def waiting_policy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return OpenMP variables that make waiting threads sleep soon: on a shared machine, a spinning thread takes the
    CPU from the one it waits for. Empty if `environment` sets any of them, as they work together."""
    return {} if any(name in environment for name in WAITING_VARIABLES) else dict(WAITING_POLICY)


def rank_environment(launch: Launch, generation: Generation, node: str, rank: int) -> dict[str, str]:
    """Return the variables that differ between ranks, with torchrun's names."""
    host, _, port = generation.store.rpartition(":")
    local_rank = rank - generation.ranks_of(node).start
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(generation.world),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": host or launch.master_address,
        "MASTER_PORT": port or str(launch.master_port),
        "CRATON_GENERATION": str(generation.number),
        # NCCL refuses two ranks of one host on one GPU; with an ID each, it takes every rank for a host of its own.
        **({"NCCL_HOSTID": f"{node}-{local_rank}"} if launch.nodes_per_gpu > 1 else {}),
    }


def placeholder_values(
    run: RunDirectory, launch: Launch, generation: Generation, node: str, rank: int
) -> dict[str, str]:
    """Return the values of `{name}` in a job's own command; its environment has the same as CRATON_NAME."""
    words = rank_environment(launch, generation, node, rank)
    values = {
        "rank": words["RANK"],
        "local_rank": words["LOCAL_RANK"],
        "world_size": words["WORLD_SIZE"],
        "node_rank": str(generation.nodes.index(node)),
        "num_nodes": str(len(generation.nodes)),
        "processes_per_node": str(generation.ranks_per_node),
        "gpus_per_node": str(launch.gpus_per_node or generation.ranks_per_node),
        "master_address": words["MASTER_ADDR"],
        "master_port": words["MASTER_PORT"],
        "run": str(run.path),
    }
    assert tuple(values) == PLACEHOLDERS, values
    return values


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of a text; `{{rank}}` becomes `{rank}`, `${rank}` and other braces stay."""
    return _PLACEHOLDER.sub(lambda item: f"{{{item[1]}}}" if item[1] else values[item[2]], text)


def search_path() -> str:
    """Return $PATH with the agent's own programs first, as if its virtual environment were active."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(Path(sys.executable).parent), *folders]))


def pipe() -> tuple[int, int]:
    """Return (reading, writing) of a large non-blocking pipe."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.suppress(OSError, AttributeError):  # an unprivileged user has a limited amount of pipe memory
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def command_environment(
    run: RunDirectory, launch: Launch, generation: Generation, node: str, rank: int
) -> dict[str, str]:
    """Return the environment of a rank of a command, without the descriptors that only it has."""
    values = placeholder_values(run, launch, generation, node, rank)
    common = {"PATH": search_path(), **common_environment(run, launch, node)}
    return {
        **{name: fill(value, values) for name, value in common.items()},
        **rank_environment(launch, generation, node, rank),
        **{f"CRATON_{name.upper()}": value for name, value in values.items()},
    }


def start_rank(
    run: RunDirectory, launch: Launch, generation: Generation, node: str, rank: int, page: int
) -> RankProcess:
    """Start a rank of a job's own command; `page` is the descriptor of its page."""
    reading, writing = pipe()
    started = STEADY.now()
    values = placeholder_values(run, launch, generation, node, rank)
    environment = {
        **command_environment(run, launch, generation, node, rank),
        "CRATON_RECORDS": str(writing),
        "CRATON_PAGE": str(page),
    }
    # A shell text keeps its braces: it can use the environment, and nothing is inserted that the shell could execute.
    is_text = launch.command[:2] == ["/bin/sh", "-c"]
    command = launch.command if is_text else [fill(word, values) for word in launch.command]
    log_path = run.log_path(rank)
    output = CommandOutput(open_log(log_path))
    folder = launch.workdir or None
    try:
        process, log_offset = start(
            command, environment, log_path, (writing, page), folder=folder, output=output.writing
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
        os.close(output.writing)
    begun = (f"rank {rank}", process.pid, log_path, log_offset, started)
    return RankProcess(*begun, rank=rank, records=reading, values=values, output=output)


def start_sink(run: RunDirectory, sink: str) -> ChildProcess:
    """Start a sink, which runs until `end_sink` closes its standard input."""
    command = [sys.executable, "-m", "craton.telemetry.track", str(run.path), sink, "--until-stdin-closes"]
    log_path = run.path / "logs" / f"track-{sink}.log"
    started = STEADY.now()
    process, log_offset = start(command, {"PYTHONUNBUFFERED": "1"}, log_path, (), stdin=subprocess.PIPE)
    assert process.stdin is not None
    return ChildProcess(
        f"sink {sink}", process.pid, log_path, log_offset, started, stdin=os.dup(process.stdin.fileno())
    )


def end_sink(sink: ChildProcess) -> None:
    os.close(sink.stdin)


def adopt_orphans() -> None:
    """Become the subreaper: orphans of a child become children of the agent, which reaps them (process 1 may not). So
    do ranks that the fork server forks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(children: Sequence[ChildProcess]) -> list[ChildProcess]:
    """Reap every process that has ended, and return ours in the order of their ends; orphans are only reaped."""
    ended: list[ChildProcess] = []
    by_pid = {item.pid: item for item in children if item.is_running}
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
        # Kill the group while its leader is still a zombie: until it is reaped, the PID cannot be reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        _, code = os.waitpid(child.pid, 0)
        child.code = os.waitstatus_to_exitcode(code)
        child.ended = STEADY.now()
        ended.append(child)
        _reap_group(child.pid)
        if isinstance(child, RankProcess) and child.values:
            _end_orphans(child.values, {*by_pid})


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    pass_descriptors: tuple[int, ...],
    stdin: int = subprocess.DEVNULL,
    folder: str | None = None,
    output: int | None = None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process and return (process, length of its log so far). `reap` collects its exit code, not the Popen
    object. It prints to the log, or to the descriptor `output`."""
    with open_log(log_path) as log:
        offset = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", child_program.__file__, str(os.getpid()), *command],
            stdin=stdin,
            stdout=log if output is None else output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=folder,
            pass_fds=pass_descriptors,
            start_new_session=True,
        )
    process.returncode = 0  # Popen must not wait for the process when it is garbage-collected
    return process, offset


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending. If storage refuses, discard the output: the process matters more."""
    try:
        return os.fdopen(append_regular(path), "ab", buffering=0)
    except OSError as error:
        print(f"craton: cannot open {path} ({error.strerror}); this output is lost", file=sys.stderr)
        return open(os.devnull, "ab", buffering=0)


def _reap_group(group: int) -> None:
    """Reap the killed group of a process, now our children; for a short time only, as the kernel may hold one back."""
    deadline = time.monotonic() + GROUP_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is None:
                time.sleep(0.002)
        except ChildProcessError:
            return


def _end_orphans(values: Mapping[str, str], known_pids: set[int]) -> None:
    """Kill what a rank has left in other sessions, as torchrun starts its workers: they are now our children, are not
    in `known_pids`, and have its run and rank in their environment. Their children follow."""
    marks = [f"\0CRATON_{name.upper()}={values[name]}\0".encode() for name in ("run", "rank")]
    deadline = time.monotonic() + GROUP_SECONDS
    while time.monotonic() < deadline:
        strangers = {pid: _environment(pid) for pid in _children() if pid not in known_pids}
        orphans = [pid for pid, environment in strangers.items() if all(mark in environment for mark in marks)]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # A process that may not be killed, or that the kernel holds back, must not block the agent.
        while (orphans := [pid for pid in orphans if not _is_reaped(pid)]) and time.monotonic() < deadline:
            time.sleep(0.002)


def _is_reaped(pid: int) -> bool:
    """Whether a child has ended and is reaped."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _children() -> list[int]:
    """Return our live child processes (proc(5)); none if the system does not list them."""
    result = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state not in ("Z", "X"):
                result.append(int(path.parent.name))
    return result


def _environment(pid: int) -> bytes:
    """Return the environment of a process, each variable between two NULs; empty for one that has ended."""
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def failure_text(rank: RankProcess, node: str, generation: int) -> str:
    """Return how a rank ended and why, in one line; then a hint, and its last output."""
    last_lines = rank.last_lines()
    has_step = rank.page is not None and rank.page.step and rank.code != -signal.SIGKILL
    step = f" at step {rank.page.step}" if rank.page is not None and has_step else ""
    too_early = " before the run was done" if rank.code == 0 else ""
    is_oom = rank.was_killed and rank.oom.has_killed
    by_kernel = " from the kernel's OOM killer" if rank.code < 0 else " after a kill by the kernel's OOM killer"
    by = " from `craton chaos`" if rank.is_injected else by_kernel if is_oom else ""
    headline = f"{rank.name} on {node} {how_ended(rank.code)}{by}{step}{too_early} (generation {generation})"
    error = rank.read_end()
    if error is not None and rank.code != -signal.SIGKILL:
        headline += f": {_reason(error, last_lines)}"
    text = [headline]
    if is_oom and not rank.is_injected:
        text.append(f"the kernel's OOM killer has killed a process: {memory_text()}; {MORE_MEMORY}")
    elif rank.code == -signal.SIGKILL and not rank.is_injected:
        text.append("the kernel has counted no OOM kill at that moment: find the sender of the signal")
    elif hint := limit_hint("\n".join(last_lines)):
        text.append(hint)
    text.append(f"last lines of {rank.log_path.name}:" if last_lines else f"{rank.log_path.name} is empty")
    return "\n".join([*text, *(f"  {line}" for line in last_lines)])


def _reason(error: ErrorReport, last_lines: Sequence[str]) -> str:
    """Return the error in one line. Craton's own message, which a rank prints last, also says what to do."""
    words = [line.strip() for line in last_lines if any(letter.isalnum() for letter in line)]
    if words and words[-1].startswith("craton: "):
        own = words[-1].removeprefix("craton: ")
        place = error.user_frame.partition(" in ")[0]
        return f"{own} ({error.user_frame})" if error.user_frame and place not in own else own
    return error.line


def how_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
