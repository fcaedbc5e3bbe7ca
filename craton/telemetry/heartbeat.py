"""A node's sign of life: `heartbeat/NODE`, touched every second by the node's agent.

Its age says whether the agent lives, its text what became of the generation. The text is replaced as a whole, so a
reader sees the old or the new one. A heartbeat older than LOST_SECONDS while running means a lost node.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from craton.telemetry.regular_files import UnsafeFileError, note_unread, open_regular
from craton.telemetry.rundirectory import RunDirectory

LOST_SECONDS = 10.0
MAX_HEARTBEAT_BYTES = 1 << 16
NodeState = Literal["running", "done", "stopped", "failed", "spare", "released"]


@dataclass(frozen=True)
class Heartbeat:
    """What a node's agent says of itself."""

    generation: int
    state: NodeState
    pid: int
    metrics_port: int  # 0: no endpoint
    address: str = ""  # host:port where the agent hears the other agents; "" before it does
    host: str = ""
    started: str = ""  # when its process began, by the system's own clock: tells it from a later one of the same number
    moment: float = 0.0  # epoch seconds of the last touch

    def is_lost(self, now: float | None = None) -> bool:
        return self.state in ("running", "spare") and (time.time() if now is None else now) - self.moment > LOST_SECONDS


def process_start(pid: int) -> str:
    """When a process began, by the system's own clock; "" when there is none. A number that was given to another
    process since has another one."""
    try:
        # The name in brackets may hold spaces and brackets itself: fields are counted from the last one (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    except ProcessLookupError:
        return ""
    listed = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = listed.stdout.strip().partition(" ")
    return "" if state[:1] in ("", "Z", "X") else started.strip()


def write_heartbeat(run: RunDirectory, node: str, heartbeat: Heartbeat) -> None:
    """Replaces the node's heartbeat; OSError when the disk is full or the run is gone."""
    path = run.heartbeat_path(node)
    document = asdict(heartbeat)
    del document["moment"]
    fresh = path.with_name(f".{node}.{os.getpid()}")
    fresh.write_text(json.dumps(document) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def touch_heartbeat(run: RunDirectory, node: str) -> None:
    os.utime(run.heartbeat_path(node))


def read_heartbeat(run: RunDirectory, node: str) -> Heartbeat | None:
    """None where the node has no readable heartbeat."""
    path = run.heartbeat_path(node)
    try:
        with open_regular(path) as file:
            moment = os.fstat(file.fileno()).st_mtime
            document: dict[str, Any] = json.loads(file.read(MAX_HEARTBEAT_BYTES))
        return Heartbeat(
            generation=int(document["generation"]),
            state=document["state"],
            pid=int(document["pid"]),
            metrics_port=int(document["metrics_port"]),
            address=str(document.get("address", "")),
            host=str(document.get("host", "")),
            started=str(document.get("started", "")),
            moment=moment,
        )
    except UnsafeFileError as error:
        note_unread(path, error)
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
