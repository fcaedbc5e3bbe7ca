"""What injectors of several families do: a small HTTP service, triggers, memory limits.

Each leaves its removal in `job.undo`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from craton.bench.why.faults.injections import confine, when_agents_end
from craton.bench.why.faults.running import RunningJob

MEGABYTE = 1 << 20
# Environment of a recipe: the file that `trigger` creates, and the port of the service.
GO = {"GO": "{folder}/go"}
SERVICE_PORT = {"SERVICE_PORT": "{folder}/service/port"}
# Answers GET with 200. The file `seconds` delays each answer; the file `per_second` limits the answers, others get 503.
SERVICE = """\
import http.server, pathlib, sys, threading, time

folder = pathlib.Path(sys.argv[1])
lock, taken = threading.Lock(), []


def value(name):
    try:
        return float((folder / name).read_text())
    except (OSError, ValueError):
        return 0.0


def is_over_limit():
    limit, now = value("per_second"), time.monotonic()
    with lock:
        taken[:] = [moment for moment in taken if now - moment < 1]
        if limit and len(taken) >= limit:
            return True
        taken.append(now)
        return False


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(value("seconds"))
        if is_over_limit():
            self.send_response(503, "Slow Down")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"1.0")

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
(folder / "starting").write_text(str(server.server_address[1]))
(folder / "starting").rename(folder / "port")
server.serve_forever()
"""


def start_service(job: RunningJob) -> None:
    """Start an HTTP service beside the run, such as a reward server or an object store; its port is in SERVICE_PORT."""
    folder = service_folder(job)
    folder.mkdir()
    job.spawn([sys.executable, "-c", SERVICE, str(folder)])
    job.wait(lambda: (folder / "port").exists(), "the service listens")


def service_folder(job: RunningJob) -> Path:
    return job.folder.parent / "service"


def trigger(job: RunningJob) -> None:
    """Create the file $GO, which a program waits for."""
    (job.folder.parent / "go").touch()


def limit_memory(job: RunningJob, pids: Iterable[int], megabytes: int) -> Path:
    """Move processes into a container with a memory limit. What they have allocated before is not charged to it."""
    return confine(job, "memory", pids, memory__limit_in_bytes=megabytes * MEGABYTE)


def disable_oom_killer(job: RunningJob, group: Path) -> None:
    """Let processes wait at the memory limit of a group instead of being killed; released when the agents end."""
    control = group / "memory.oom_control"
    when_agents_end(job, lambda: control.write_text("0"))
    control.write_text("1")


def children_of(pid: int) -> list[int]:
    """Processes that any thread of a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def child_of(pid: int, word: str) -> int:
    """Return the child of a process that has this word in its command line; LookupError if there is none."""
    for child in children_of(pid):
        if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return child
    raise LookupError(f"process {pid} has no child `{word}`")
