"""What a run's agents leave in its folder, for tests that look for it."""

from __future__ import annotations

import os
import socket
import time

from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, NodeStatus, RankStatus, write_heartbeat, write_status


def status_of(run: RunDirectory, node: str, pids: dict[int, int], host: str = "") -> None:
    """A node of a run that lives; this host's where none is given."""
    ranks = tuple(RankStatus(rank, pid, "productive", (), 5, 0.1, 0.2, False) for rank, pid in pids.items())
    write_heartbeat(run, node, Heartbeat(0, "running", os.getpid(), 0, host=host or socket.gethostname()))
    write_status(run, NodeStatus(time.time(), 0, node, ranks))
