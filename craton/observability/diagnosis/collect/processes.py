"""Inspect a rank's process on this machine: its state, its kernel wait channel and its stack.

Agents take the stacks of stuck ranks of the training loop (`stacks/`). For other ranks py-spy, if installed and
permitted, gives the Python stack; otherwise /proc gives the kernel stack where it is readable.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from craton.observability.diagnosis.snapshot import SnapshotRank
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_regular
from craton.telemetry.rank import MAX_STACK_BYTES, read_stacks

STACK_SECONDS = 5.0
STACK_FRAMES = 12
CARD_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")


def look_at_process(rank: SnapshotRank) -> SnapshotRank:
    """Return the rank with its process state and wait channel. Its agent decides whether a signal has stopped it, as it
    also knows since when; without its report, the process state does."""
    if rank.pid is None or rank.is_alive is False:
        return rank
    folder = Path(f"/proc/{rank.pid}")
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return rank  # it may have ended since its agent wrote its status
    if state == "t" and rank.frame:  # its agent examines it with a debugger at this moment
        return rank
    return replace(
        rank,
        process_state=state if state != "t" else "T",
        is_stopped=rank.is_stopped if rank.is_stopped is not None else state in ("T", "t"),
        wait_channel=_read(folder / "wchan") if state in ("D", "S") else "",
    )


def visible_cards(pid: int) -> str:
    """Return the GPUs in a rank's environment, by index or UUID; "" if it does not limit them or cannot be read.
    Slurm's own variables number the GPUs of the whole node."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    return next((environment[name] for name in CARD_VARIABLES if environment.get(name)), "")


def stack_of(rank: SnapshotRank) -> tuple[str, ...]:
    """Return the stack, innermost first; empty if it cannot be read."""
    if rank.pid is None or rank.is_alive is False:
        return ()
    return _python_stack(rank.pid) or _kernel_stack(rank.pid)


def taken_stack(run: RunDirectory, rank: int) -> tuple[str, ...]:
    """Return the stack of the rank's main thread as its agent took it, innermost first; empty if there is none."""
    try:
        text = read_regular(run.stack_path(rank), 4 * MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ()
    return tuple(f"{frame.function} ({frame.file}:{frame.line})" for frame in read_stacks(text).main[:STACK_FRAMES])


def _python_stack(pid: int) -> tuple[str, ...]:
    program = shutil.which("py-spy")
    if program is None:
        return ()
    try:
        completed = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=STACK_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return read_py_spy(completed.stdout) if completed.returncode == 0 else ()


def read_py_spy(text: str) -> tuple[str, ...]:
    """Parse the frames of the main thread from `py-spy dump`: four spaces and `function (file:line)`."""
    frames: list[str] = []
    is_inside = False
    for line in text.splitlines():
        if line.startswith("Thread"):
            if frames:
                break
            is_inside = "MainThread" in line or "Thread" in line
        elif is_inside and line.startswith("    "):
            frames.append(line.strip())
    return tuple(frames[:STACK_FRAMES])


def _kernel_stack(pid: int) -> tuple[str, ...]:
    """Return the kernel stack, readable by root: lines such as `[<0>] name+0x1/0x2`."""
    lines = _read(Path(f"/proc/{pid}/stack")).splitlines()
    names = [line.split("] ", 1)[-1].split("+", 1)[0].strip() for line in lines if "]" in line]
    return tuple(name for name in names if name and name != "0xffffffffffffffff")[:STACK_FRAMES]


def _read(path: Path) -> str:
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return ""
    return "" if text == "0" else text
