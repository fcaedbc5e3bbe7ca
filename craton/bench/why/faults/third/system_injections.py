"""What injectors of the third set do: an object store, swap, a FUSE mount, IOPS limits, tracers, real-time load.

Each leaves its removal in `job.undo`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from craton.bench.why.faults.injections import CGROUP, SPIN, limit_cpu, program_path, when_agents_end
from craton.bench.why.faults.program_injections import service_folder
from craton.bench.why.faults.running import RunningJob

SWAP_BYTES = 1 << 30
REAL_TIME_PRIORITY = "50"
# Answers GET with 200, or with 403 and the reason in the file `refusal` if there is one.
STORE = """\
import http.server, pathlib, sys

folder = pathlib.Path(sys.argv[1])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        refusal = folder / "refusal"
        is_refused = refusal.exists()
        body = refusal.read_bytes() if is_refused else b"sample"
        self.send_response(403 if is_refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
(folder / "starting").write_text(str(server.server_address[1]))
(folder / "starting").rename(folder / "port")
server.serve_forever()
"""
HOLD_LOCK = """\
import fcntl, sys, time
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    time.sleep(3600)
"""


# Services


def start_store(job: RunningJob) -> None:
    """Start an object store beside the run; its port is in SERVICE_PORT."""
    folder = service_folder(job)
    folder.mkdir()
    job.spawn([sys.executable, "-c", STORE, str(folder)])
    job.wait(lambda: (folder / "port").exists(), "the store listens")


def refuse(job: RunningJob, reason: str) -> None:
    """Let the store answer every request with 403 from now on."""
    folder = service_folder(job)
    (folder / "refused").write_text(reason)
    (folder / "refused").rename(folder / "refusal")


# Memory


def add_swap(job: RunningJob) -> None:
    """Give the machine a swap file; it is taken away when the run has ended."""
    path = job.folder.parent / "swap"
    subprocess.run(["fallocate", "-l", str(SWAP_BYTES), str(path)], check=True, capture_output=True)
    path.chmod(0o600)
    subprocess.run(["mkswap", str(path)], check=True, capture_output=True)
    job.undo.callback(subprocess.run, ["swapoff", str(path)], check=False, capture_output=True)
    subprocess.run(["swapon", str(path)], check=True, capture_output=True)


# Disks


def mount_bucket(job: RunningJob) -> None:
    """Mount a bucket with one object, `samples.bin`, at FOLDER/bucket by a FUSE daemon, as s3fs and gcsfuse do."""
    place = bucket(job)
    place.mkdir()
    job.undo.callback(subprocess.run, ["umount", "-l", str(place)], check=False, capture_output=True)
    job.spawn([sys.executable, str(program_path("third_disk")), "serve", str(place)], place.with_suffix(".log"))
    job.wait(lambda: (place / "samples.bin").exists(), "the bucket is mounted")


def kill_bucket_daemon(job: RunningJob) -> None:
    """Kill the daemon: the mount stays, and every access fails with ENOTCONN."""
    for pid in job.processes():
        if str(bucket(job)).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            os.kill(pid, signal.SIGKILL)
            return
    raise LookupError("the bucket has no daemon")


def bucket(job: RunningJob) -> Path:
    return job.folder.parent / "bucket"


def limit_writes(job: RunningJob, folder: Path, per_second: int) -> None:
    """Limit the number of writes to the block device below a folder, as a volume without burst credits does."""
    device = os.stat(folder).st_dev
    limit = CGROUP / "blkio" / "blkio.throttle.write_iops_device"
    name = f"{os.major(device)}:{os.minor(device)}"
    when_agents_end(job, lambda: limit.write_text(f"{name} 0"))
    limit.write_text(f"{name} {per_second}")


def hold_lock(job: RunningJob, path: Path) -> None:
    """Lock a file in another process and keep the lock."""
    job.spawn([sys.executable, "-c", HOLD_LOCK, str(path)])


# CPUs


def hog_in_real_time(job: RunningJob, cpu: int) -> None:
    """Start a busy process of a real-time class on one CPU: the kernel leaves 5% of it to all others."""
    job.spawn(["chrt", "--fifo", REAL_TIME_PRIORITY, "taskset", "-c", str(cpu), *SPIN])


def start_sidecar(job: RunningJob, pids: Iterable[int], count: int, share: float) -> None:
    """Put busy processes into one container with these processes, with a CPU limit for all of them together."""
    sidecars = [job.spawn(SPIN).pid for _ in range(count)]
    limit_cpu(job, [*pids, *sidecars], share)


def trace(job: RunningJob, pid: int) -> None:
    """Attach strace to all threads of a process and leave it on."""
    job.spawn(["strace", "-f", "-o", os.devnull, "-p", str(pid)])
    status = Path(f"/proc/{pid}/status")
    job.wait(lambda: "TracerPid:\t0\n" not in status.read_text(), "strace is attached")


def start_short_processes(job: RunningJob, count: int) -> None:
    """Start loops that run one short-lived program after another, as health checks of many containers do."""
    for _ in range(count):
        job.spawn(["/bin/sh", "-c", "while true; do /bin/true; done"])
