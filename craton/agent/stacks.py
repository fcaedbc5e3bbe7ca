"""Take the stacks of ranks that make no progress, once per episode, before anyone ends them.

A rank of the training loop dumps the stacks of all its threads (`craton.telemetry.rank.stacks`) at an order of the
agent or, if it does not read its orders, at a signal. For other processes py-spy is used where it is installed. The
kernel's view of every thread (state, wait channel, system call) is added from /proc, and native frames by py-spy or
gdb, where installed, for ranks that stay stuck. The result replaces `stacks/rank-00001.txt` in the run directory, and
an event names where the rank waits. Then the training loop writes its last collectives (PyTorch's flight recorder).

Nothing here blocks the agent or raises: it asks and reads the answers in its loop, and tools run in a thread. A tool
stops the process, gdb for many seconds: that does not count as stopped by a signal (`is_examined`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from craton.agent.processes import RankProcess
from craton.formatting import whole_duration
from craton.telemetry import RunDirectory
from craton.telemetry.files import replace_text
from craton.telemetry.node import PeerTraffic
from craton.telemetry.rank import MAX_STACK_BYTES, STACK_SIGNAL, TOOL, is_answering, make_stack_file, read_stacks

START_SECONDS = 15.0  # in a start, after which its stack is wanted, and again after half of the time since
MAX_STACKS = 8  # ranks of a node, per episode
ANSWER_SECONDS = 1.0  # for a rank to dump its stacks; on a busy machine it needs a CPU first
ORDER_SECONDS = 1.0  # the same at an order, before it gets a signal, which is less safe
KILL_ANSWER_SECONDS = 0.3  # the same for a rank that is about to be killed
NATIVE_SECONDS = 30.0  # without progress, after which native frames are worth stopping the rank for a moment
TOOL_SECONDS = 20.0
OWN_CODE = "in your own code: "
WAITS = ", waiting for other ranks"
MAX_PEERS = 4  # of a rank, in its event
MAX_THREADS = 64  # of a process, whose kernel state is noted


@dataclass
class RankStack:
    """The stacks of one slot's process. An episode is a time without progress."""

    descriptor: int = field(default_factory=make_stack_file)
    episode: float = -1.0  # the rank's last progress before it; -1: none
    asked_at: float = 0.0  # monotonic; 0: not asked
    signalled_at: float = 0.0  # the same, of the signal
    is_taken: bool = False
    is_early: bool = False  # taken in a long start, before the rank counts as stuck
    has_native: bool = False
    frame: str = ""
    is_user_frame: bool = False
    is_waiting: bool = False
    wait_channels: tuple[str, ...] = ()  # kernel functions in which its threads sleep
    is_examined: bool = False  # a tool stops the process for a moment: nobody else has stopped it

    def begin(self, progress: float) -> None:
        """Forget the last episode if the rank has made progress since."""
        if progress != self.episode:
            self.episode, self.asked_at, self.signalled_at = progress, 0.0, 0.0
            self.is_taken = self.is_early = self.has_native = self.is_waiting = self.is_user_frame = False
            self.frame, self.wait_channels = "", ()

    def again(self) -> None:
        """Take the stack once more; the frame is shown until there is a newer one."""
        self.asked_at, self.signalled_at, self.is_taken = 0.0, 0.0, False


@dataclass(frozen=True)
class StuckRank:
    """A rank of this node that may be stuck."""

    stack: RankStack
    process: RankProcess
    progress: float  # monotonic: its last progress
    kind: str
    step: int
    age_seconds: float
    is_due: bool  # it has made no progress for so long that its stack is wanted
    is_stopped: bool = False  # by a signal
    is_starting: bool = False  # its start takes long, which may be usual
    unacknowledged: tuple[PeerTraffic, ...] = ()  # peers that do not acknowledge what it sends


class StackTaker:
    """Takes the stacks of a node's ranks; the agent calls `look` several times a second."""

    def __init__(self, run: RunDirectory, event: Callable[..., None]) -> None:
        self._run, self._event = run, event
        self._tool: threading.Thread | None = None
        self._found: list[tuple[StuckRank, str]] = []  # dumps by tools

    def look(self, ranks: Sequence[StuckRank], now: float) -> None:
        for rank in ranks:
            rank.stack.begin(rank.progress)
            is_late = not rank.is_starting or now - rank.stack.asked_at > max(START_SECONDS, rank.age_seconds / 2)
            if rank.stack.is_early and rank.stack.is_taken and is_late:
                rank.stack.again()  # it may be elsewhere by now
        num_asked = sum(bool(rank.stack.asked_at) for rank in ranks)
        for rank in ranks:
            if rank.is_due and not rank.stack.asked_at and num_asked < MAX_STACKS:
                num_asked += 1
                self._ask(rank, now)
            elif rank.stack.asked_at and not rank.stack.is_taken:
                self._await(rank, now)
        while self._found:
            self._publish(*self._found.pop(0))
        self._look_closer(ranks)

    def take_now(self, rank: StuckRank) -> None:
        """Take the stack of a rank that is about to be killed, if there is none of this episode."""
        rank.stack.begin(rank.progress)
        began = time.monotonic()
        if not rank.stack.asked_at:
            self._ask(rank, began)
        while not rank.stack.is_taken:
            seconds = time.monotonic() - began
            if seconds > KILL_ANSWER_SECONDS / 2 and not rank.stack.signalled_at:
                self._signal(rank, began + seconds)
            self._read(rank, is_late=seconds > KILL_ANSWER_SECONDS)
            time.sleep(0.01)

    def _ask(self, rank: StuckRank, now: float) -> None:
        rank.stack.asked_at = now
        with contextlib.suppress(OSError):
            os.ftruncate(rank.stack.descriptor, 0)
        if rank.is_stopped or not rank.process.is_running or not rank.process.request_stacks():
            self._signal(rank, now)

    def _await(self, rank: StuckRank, now: float) -> None:
        """Read its answer to the order; after ORDER_SECONDS send the signal, and read its answer to that."""
        stack = rank.stack
        if stack.signalled_at:
            self._read(rank, now - stack.signalled_at > ANSWER_SECONDS)
            return
        self._read(rank, is_late=False)
        if not stack.is_taken and now - stack.asked_at > ORDER_SECONDS:
            self._signal(rank, now)

    def _signal(self, rank: StuckRank, now: float) -> None:
        # In the thread that reaps processes: the PID cannot have been reused.
        rank.stack.signalled_at = now
        with contextlib.suppress(OSError):
            if rank.process.is_running and not rank.process.is_stopped and is_answering(rank.process.pid):
                os.kill(rank.process.pid, STACK_SIGNAL)

    def _read(self, rank: StuckRank, is_late: bool) -> None:
        try:
            size = os.fstat(rank.stack.descriptor).st_size
            text = os.pread(rank.stack.descriptor, min(size, MAX_STACK_BYTES), 0).decode(errors="replace")
        except OSError:
            text = ""
        if not is_late and not text.endswith("\n"):
            return
        if not is_late and not read_stacks(text).main:
            return
        self._publish(rank, text)

    def _publish(self, rank: StuckRank, text: str) -> None:
        """Write the file and the event, once per episode; a later dump by a tool is added."""
        stack = rank.stack
        is_first, stack.is_taken = not stack.is_taken, True
        if is_first and not rank.is_stopped and not rank.is_starting:  # after the dump, which other threads may disturb
            rank.process.request_recording(self._run)
        was_early, stack.is_early = stack.is_early, rank.is_starting
        stacks = read_stacks(text)
        frame, shown = stacks.frame, stack.frame
        if frame is not None and (was_early or not stack.frame):
            stack.frame, stack.is_user_frame = frame.with_source(), frame.is_user
            stack.is_waiting = stacks.is_waiting
        number = rank.process.rank
        what = f"rank {number} has been in {rank.kind} for {whole_duration(rank.age_seconds)} at step {rank.step}"
        what += WAITS if stack.is_waiting else ""
        where = f" ({OWN_CODE if stack.is_user_frame else ''}{stack.frame})" if stack.frame else ""
        kernel = kernel_threads(rank.process.pid)
        stack.wait_channels = tuple(dict.fromkeys(thread.channel for thread in kernel if thread.channel))
        with contextlib.suppress(OSError):  # the disk may be the reason why it is stuck
            path = self._run.stack_path(number)
            path.parent.mkdir(exist_ok=True)
            parts = [f"{what}{where}", text.strip(), "threads, by the kernel:", *map(str, kernel)]
            replace_text(path, "\n".join(part for part in parts if part)[:MAX_STACK_BYTES] + "\n", durable=False)
        if is_first and (not rank.is_starting or (stack.is_user_frame and stack.frame != shown)):
            self._event(
                "rank_stuck",
                number,
                message=f"{what}{where}",
                kind=rank.kind,
                stuck_step=rank.step,
                seconds=round(rank.age_seconds, 1),
                frame=stack.frame,
                waits=stack.is_waiting,
                is_user_frame=stack.is_user_frame,
                channels=list(stack.wait_channels)[:4],
                unacknowledged=[asdict(peer) for peer in rank.unacknowledged[:MAX_PEERS]],
            )

    def _look_closer(self, ranks: Sequence[StuckRank]) -> None:
        """Use a tool, one at a time, for ranks that did not answer, and for native frames of those that stay stuck."""
        if self._tool is not None and self._tool.is_alive():
            return
        for rank in ranks:
            stack = rank.stack
            wants_native = rank.age_seconds > NATIVE_SECONDS and not stack.is_waiting and not stack.is_user_frame
            if (
                not (rank.is_due and stack.is_taken)
                or rank.is_starting
                or stack.has_native
                or not (wants_native or not stack.frame)
            ):
                continue
            stack.has_native = True
            command = tool_command(rank.process.pid, native=wants_native)
            if command and not rank.process.is_stopped:
                before, stack.is_examined = _text_of(stack.descriptor), True
                self._tool = threading.Thread(target=self._run_tool, args=(rank, command, before), daemon=True)
                self._tool.start()
                return

    def _run_tool(self, rank: StuckRank, command: list[str], before: str) -> None:
        try:
            completed = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TOOL_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return
        finally:
            rank.stack.is_examined = False
        if completed.stdout.strip() and rank.stack.episode == rank.progress:
            name = os.path.basename(command[0])
            self._found.append((rank, f"{before.strip()}\n{TOOL}{name}:\n{completed.stdout.strip()}"))


def tool_command(pid: int, native: bool) -> list[str]:
    """Return the command that prints the stacks of a process; [] if no such tool is installed."""
    if program := shutil.which("py-spy"):
        return [program, "dump", *(["--native"] if native else ["--nonblocking"]), "--pid", str(pid)]
    if native and (program := shutil.which("gdb")):
        return [program, "-p", str(pid), "-batch", "-nx", "-ex", "set pagination off", "-ex", "thread apply all bt 12"]
    return []


@dataclass(frozen=True)
class KernelThread:
    """A thread as the kernel sees it (proc_pid_stat(5))."""

    number: str
    name: str
    state: str
    channel: str = ""  # the kernel function it sleeps in
    call: str = ""  # number of its system call

    def __str__(self) -> str:
        words = (self.state, self.channel, self.call)
        return f"  {self.number} {self.name}: {' '.join(word for word in words if word)}"


def kernel_threads(pid: int) -> list[KernelThread]:
    """Return the threads of a process; empty if they cannot be read."""
    threads: list[KernelThread] = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir())[:MAX_THREADS]:
            with contextlib.suppress(OSError, IndexError):
                name, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
                state = rest.split()[0]
                threads.append(KernelThread(task.name, name, state, _word(task / "wchan"), _word(task / "syscall")))
    return threads


def _word(path: Path) -> str:
    try:
        text = path.read_text().split(" ", 1)[0].strip()
    except OSError:
        return ""
    return "" if text == "0" else text


def _text_of(descriptor: int) -> str:
    try:
        return os.pread(descriptor, MAX_STACK_BYTES, 0).decode(errors="replace")
    except OSError:
        return ""
