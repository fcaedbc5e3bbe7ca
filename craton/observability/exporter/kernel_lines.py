"""Read new lines of the kernel log from /dev/kmsg, else from journald, else from a recorded file.

Every line has its age at the time of reading, where the log has timestamps, and whether it is older than the opening of
the log (history). Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from craton.infrastructure.probes import NodeRoot

RECORD_BYTES = 8192  # the longest record of /dev/kmsg (CONSOLE_EXT_LOG_MAX)
SourceName = Literal["kmsg", "journal", "file", "none"]
_SINCE_BOOT = re.compile(r"^\[\s*(\d+\.\d+)\]\s?")
JOURNAL = ["--dmesg", "--follow", "--lines=all", "--boot", "--output=short-monotonic", "--quiet"]


class Line(NamedTuple):
    text: str
    age_seconds: float | None  # None when the log has no timestamp
    is_history: bool


class KernelLines(Protocol):
    name: SourceName

    def new(self) -> Iterator[Line]: ...

    def close(self) -> None: ...


def open_kernel_lines(root: NodeRoot) -> KernelLines:
    """Open the best available source. A recorded file is read again as it grows."""
    with contextlib.suppress(OSError):
        path = root.at("dev/kmsg")
        if stat.S_ISCHR(path.stat().st_mode):
            return Kmsg(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), root)
    if root.is_recorded:
        return RecordedLines(root)
    program = shutil.which("journalctl") if root.is_live else None
    return Journal([program, *JOURNAL], root) if program else NoLines()


class Kmsg:
    """/dev/kmsg: one record per read, the oldest kept record first (Documentation/ABI/testing/dev-kmsg)."""

    name: SourceName = "kmsg"

    def __init__(self, descriptor: int, root: NodeRoot) -> None:
        self._descriptor, self._root = descriptor, root
        self._is_first = True

    def new(self) -> Iterator[Line]:
        # The first call reads the kernel's whole ring buffer.
        is_history, self._is_first = self._is_first, False
        uptime = _uptime(self._root)
        while True:
            try:
                record = os.read(self._descriptor, RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before they were read; the next are complete
                    continue
                raise
            if not record:
                return
            head, _, body = record.partition(b";")
            fields = head.split(b",")
            text = body.partition(b"\n")[0].decode("utf-8", "replace")
            written = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else None
            yield Line(text, _age(written, uptime), is_history)

    def close(self) -> None:
        os.close(self._descriptor)


class Journal:
    """Follow the log with journalctl, for users in the journal's group who cannot read /dev/kmsg."""

    name: SourceName = "journal"

    def __init__(self, command: list[str], root: NodeRoot) -> None:
        self._root = root
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        self._descriptor = self._process.stdout.fileno()
        os.set_blocking(self._descriptor, False)
        self._rest = b""
        self._opened = time.monotonic()

    def new(self) -> Iterator[Line]:
        uptime, open_seconds = _uptime(self._root), time.monotonic() - self._opened
        while True:
            try:
                piece = os.read(self._descriptor, 2**16)
            except BlockingIOError:
                return
            if not piece:
                if self._process.poll() is not None:
                    raise OSError("journalctl exited: check that this user may read the kernel log")
                return
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                text, age = _dated(line.decode("utf-8", "replace"), uptime)
                yield Line(text, age, age is None or age > open_seconds)

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        assert self._process.stdout is not None
        self._process.stdout.close()


class RecordedLines:
    """The log of a node's image, `commands/dmesg.txt`; lines added since the last call are new."""

    name: SourceName = "file"
    _path = "commands/dmesg.txt"

    def __init__(self, root: NodeRoot) -> None:
        self._root = root
        self._seen = 0
        self._is_first = True

    def new(self) -> Iterator[Line]:
        is_history, self._is_first = self._is_first, False
        content = self._root.bytes_of(self._path)
        if len(content) < self._seen:
            self._seen = 0  # another boot
        whole = content[self._seen : content.rfind(b"\n") + 1]
        self._seen += len(whole)
        uptime = _uptime(self._root)
        for line in whole.decode("utf-8", "replace").splitlines():
            text, age = _dated(line, uptime)
            yield Line(text, age, is_history)

    def close(self) -> None:
        pass


class NoLines:
    name: SourceName = "none"

    def new(self) -> Iterator[Line]:
        raise OSError("neither /dev/kmsg nor journalctl is readable: run as root, or with CAP_SYSLOG")

    def close(self) -> None:
        pass


def _dated(line: str, uptime: float | None) -> tuple[str, float | None]:
    written = _SINCE_BOOT.match(line)
    return (line[written.end() :], _age(float(written[1]), uptime)) if written else (line, None)


def _age(written: float | None, uptime: float | None) -> float | None:
    return max(0.0, uptime - written) if written is not None and uptime is not None else None


def _uptime(root: NodeRoot) -> float | None:
    if not root.is_recorded:
        return time.clock_gettime(time.CLOCK_MONOTONIC)  # kernel log timestamps use a clock that stops during suspend
    match = re.match(r"\d+(?:\.\d+)?", root.read("proc/uptime"))
    return float(match[0]) if match else None
