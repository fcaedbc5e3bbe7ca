"""What processes listen on, as the kernel tells it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"  # the state of a socket in /proc/net/tcp
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, as the kernel writes them


def processes_with(path: Path) -> list[int]:
    """Processes that have a path, or one below it, in their command line, this one left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes()
            if any(os.fsencode(path) + end in line for end in (b"\0", b"/")) and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def children() -> list[int]:
    """Processes that this one has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def listeners_of(processes: Iterable[int]) -> set[tuple[str, int]]:
    """(address as the kernel writes it, port) of every TCP socket on which one of them listens."""
    links = set()
    for process in processes:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    links.add(os.readlink(f"/proc/{process}/fd/{name}"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, port = fields[1].partition(":")
                if fields[3] == LISTENING and f"socket:[{fields[9]}]" in links:
                    found.add((address, int(port, 16)))
    return found
