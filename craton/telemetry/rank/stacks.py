"""Stacks of a rank: dumped by its process when its agent asks, also while its main thread is blocked in C code.

`faulthandler` writes the stacks of all threads into a file in memory that rank and agent share: a dump needs no disk.
A thread of the rank calls it (`dump_stacks`), with the interpreter lock. If it does not in time, for example because C
code holds the lock, the agent sends a signal, whose handler needs no lock. The signal is the second choice: while
other threads run Python code, the handler may read frames that are gone, and the process ends with SIGSEGV (CPython
issue 116008). It is sent only to a process that handles it (`is_answering`): user code may have removed the handler,
and the signal would end the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from craton.printable import printable_line
from craton.telemetry.files import open_regular

VARIABLE = "CRATON_STACKS"  # environment of a rank: the descriptor of the shared file
# A real-time signal that neither Python, PyTorch, NCCL nor schedulers use; Slurm sends SIGUSR1 and SIGUSR2.
STACK_SIGNAL = signal.SIGRTMAX - 4 if sys.platform == "linux" else signal.SIGUSR2
MAX_STACK_BYTES = 256 << 10
TOOL = "\nby "  # begins what a tool added to a dump
MAX_SOURCE_BYTES = 4 << 20
MAX_LINE = 80  # characters of a source line
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PY_SPY = re.compile(r"^\s{4}(?P<function>.*) \((?P<file>.*?):(?P<line>\d+)\)$")
_COLLECTIVE = re.compile(r"torch/distributed/|craton/ml/training/parallel/")
_CRATON = str(Path(__file__).parents[2])  # the package
_PYTHON = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
WAIT_FRAMES = 8  # innermost frames of the main thread, among which a collective is searched


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_craton(self) -> bool:
        return self.file.startswith(_CRATON)

    @property
    def waits_for_ranks(self) -> bool:
        """Whether it is in a collective, or waits for a GPU, whose collectives wait for other ranks."""
        is_on_gpu = self.function == "synchronize" and "torch/cuda/" in self.file
        return is_on_gpu or bool(_COLLECTIVE.search(self.file))

    @property
    def is_user(self) -> bool:
        """Whether it is neither of Craton, nor of Python or an installed package."""
        is_library = self.file.startswith(_PYTHON) or "site-packages/" in self.file or "dist-packages/" in self.file
        return not self.is_craton and not is_library and not self.file.startswith("<") and bool(self.file)

    def __str__(self) -> str:
        return printable_line(f"{os.path.basename(self.file)}:{self.line} in {self.function}")

    def with_source(self) -> str:
        """`source.py:14 in read: time.sleep(60)`; without the source line if it cannot be read."""
        text = _source_line(self.file, self.line)
        return f"{self}: {text}" if text else str(self)


@dataclass(frozen=True)
class Stacks:
    """The stacks of a process, each with its innermost frame first. The main thread is the last one."""

    threads: tuple[tuple[Frame, ...], ...] = ()

    @property
    def main(self) -> tuple[Frame, ...]:
        return self.threads[-1] if self.threads else ()

    @property
    def frame(self) -> Frame | None:
        """Where it waits: the innermost frame of user code, in the main thread or in a thread in which Craton called
        it; else the innermost frame of the main thread that is not of Python itself."""
        if (found := _innermost_user(self.main)) is not None:
            return found
        for thread in self.threads[:-1]:
            found = _innermost_user(thread)
            if found is not None and any(frame.is_craton for frame in thread):
                return found
        own = (frame for frame in self.main if frame.is_craton or "torch/" in frame.file)
        return next(own, self.main[0] if self.main else None)

    @property
    def is_waiting(self) -> bool:
        """Whether the main thread waits for other ranks, in a collective that Craton or PyTorch called or for a GPU."""
        for frame in self.main[:WAIT_FRAMES]:
            if frame.is_user:
                return False
            if frame.waits_for_ranks:
                return True
        return False


def dump_stacks() -> None:
    """Dump the stacks of all threads into the file that this process shares with its agent, if there is one."""
    import faulthandler

    with contextlib.suppress(KeyError, ValueError, OSError):
        faulthandler.dump_traceback(file=int(os.environ[VARIABLE]), all_threads=True)


def answer_stack_requests() -> bool:
    """Dump this process's stacks at STACK_SIGNAL. False: no agent gave it a file, or the signal is in use."""
    import faulthandler

    try:
        descriptor = int(os.environ[VARIABLE])
        os.fstat(descriptor)
        if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
            return False
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)
    except (KeyError, ValueError, OSError, RuntimeError, AttributeError):
        return False
    return True


def make_stack_file() -> int:
    """Return the descriptor of an empty file in memory, to which every process appends."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("craton-stacks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def is_answering(pid: int) -> bool:
    """Whether the process handles STACK_SIGNAL, and neither blocks nor ignores it (proc_pid_status(5))."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = dict(re.findall(r"^Sig(Cgt|Blk|Ign):\s*([0-9a-f]+)$", text, re.MULTILINE))
    bit = 1 << (STACK_SIGNAL - 1)
    return bool(int(masks.get("Cgt", "0"), 16) & bit) and not int(masks.get("Blk", "0"), 16) & bit


def read_stacks(text: str) -> Stacks:
    """Parse a dump of faulthandler, which lists the newest thread first, or of py-spy, whose main thread is first. What
    a tool added (`TOOL`) counts only without the former."""
    own, _, added = text.partition(TOOL)
    return _parsed(own) if not added or "(most recent call first)" in own else _parsed(added)


def _parsed(text: str) -> Stacks:
    threads: list[list[Frame]] = []
    is_py_spy = False
    for line in text.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
        elif line.startswith("Thread "):  # of py-spy
            is_py_spy = True
            threads.append([])
        elif threads and (match := _FRAME.match(line) or _PY_SPY.match(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    ordered = reversed(threads) if is_py_spy else threads
    return Stacks(tuple(tuple(frames) for frames in ordered if frames))


def _innermost_user(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in frames if frame.is_user), None)


def _source_line(path: str, number: int) -> str:
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        lines = file.read(MAX_SOURCE_BYTES).decode(errors="replace").splitlines()
        if 0 < number <= len(lines):
            text = printable_line(lines[number - 1].strip())
            return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}…"
    return ""
