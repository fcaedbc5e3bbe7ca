"""Ports on which processes of a run will meet.

They lie below those the kernel gives to outgoing connections: a process that dials a port of its own kind again and
again until somebody listens may else be given just that port, meet itself, and keep the one who should listen out.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

FIRST = 20_000
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_OUTGOING = 32_768  # Linux's own choice
TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on."""
    last = FIRST_OUTGOING
    with contextlib.suppress(OSError, ValueError):
        last = int(OUTGOING.read_text().split()[0])
    candidates = [random.randrange(FIRST, last) for _ in range(TRIES)] if last > FIRST else []
    for port in (*candidates, 0):  # where there is no such port, any
        with contextlib.suppress(OSError), socket.create_server((host, port)) as probe:
            return int(probe.getsockname()[1])
    raise OSError(f"no TCP port of {host} is free")
