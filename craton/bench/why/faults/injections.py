"""What injectors of several families do to a running job: CPU and memory limits, disks, links, load.

Each leaves its removal in `job.undo`. Processes that cannot be killed meanwhile (frozen, or waiting for a frozen file
system) are released as soon as the agents of the run are gone, so that the run can end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from craton.bench.why.faults.node_network import INTERFACE, dropping
from craton.bench.why.faults.running import RunningJob

CGROUP = Path("/sys/fs/cgroup")
PROGRAMS = Path(__file__).parent / "programs"  # a folder for each set
SPIN = (sys.executable, "-c", "while True: pass")
CREATE_FILES = """\
import itertools, pathlib, sys, time
for number in itertools.count():
    while True:
        try:
            pathlib.Path(sys.argv[1], f"part-{number:06d}").touch()
            break
        except OSError:
            time.sleep(0.001)
"""
LOOK_SECONDS = 0.05
REMOVE_SECONDS = 20.0


# Processes and CPUs


def program_path(name: str) -> Path:
    """Return the file of a program, whose name is unique in all sets."""
    (path,) = PROGRAMS.glob(f"*/{name}.py")
    return path


def hog(job: RunningJob, count: int, *before: str) -> None:
    """Start processes that use a CPU without end; `before` is put before their command, such as `taskset -c 1`."""
    for _ in range(count):
        job.spawn([*before, *SPIN])


def pin(pids: Iterable[int], cpu: int) -> None:
    """Bind every thread of these processes to one CPU, as `taskset -a -p` does."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {cpu})


def renice(pid: int, nice: int) -> None:
    """Set the niceness of every thread of a process."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def confine(job: RunningJob, controller: str, pids: Iterable[int], **files: str | int) -> Path:
    """Move processes into a cgroup of their own; the names of `files` have `__` instead of dots."""
    group = CGROUP / controller / f"craton-{job.name}-limit"
    group.mkdir()
    job.undo.callback(_remove_group, group)
    for name, value in files.items():
        (group / name.replace("__", ".")).write_text(str(value))
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    return group


def limit_cpu(job: RunningJob, pids: Iterable[int], share: float) -> None:
    """Limit these processes together to a share of one CPU, as the CPU limit of a container does."""
    confine(job, "cpu", pids, cpu__cfs_period_us=100_000, cpu__cfs_quota_us=int(share * 100_000))


def freeze(job: RunningJob, pid: int) -> None:
    """Freeze a process as `docker pause` does: no signal reaches it, not even SIGKILL."""
    state = confine(job, "freezer", [pid]) / "freezer.state"
    when_agents_end(job, lambda: state.write_text("THAWED"))
    state.write_text("FROZEN")


def kill_again_and_again(job: RunningJob, rank: int, seconds: float) -> None:
    """Kill a rank, and each of its successors `seconds` after it started, as a watchdog of the site does."""
    over = threading.Event()
    job.undo.callback(over.set)

    def kill() -> None:
        seen: dict[int, float] = {}
        while not over.wait(0.2):
            with suppress(LookupError, OSError, ValueError):
                pid = job.pid(rank)
                if time.monotonic() - seen.setdefault(pid, time.monotonic()) >= seconds:
                    os.kill(pid, signal.SIGKILL)

    job.signal_rank(rank, signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()


def when_agents_end(job: RunningJob, action: Callable[[], object]) -> None:
    """Do something once, when the agents of the run have been killed, or at the latest by `undo`."""
    agents = [job.agent_pid(node) for node in job.nodes()]
    done = threading.Lock()

    def act() -> None:
        if done.acquire(blocking=False):
            with suppress(OSError):
                action()

    def watch() -> None:
        while not done.locked() and any(_is_running(pid) for pid in agents):
            time.sleep(LOOK_SECONDS)
        act()

    job.undo.callback(act)
    threading.Thread(target=watch, daemon=True).start()


# Disks


def with_disk(role: str, megabytes: int, quota: bool = False) -> tuple[str, ...]:
    """The `wrap` of a recipe with a mount of this role: a real ext4 file system on a block device, at ROLE/disk. It
    goes with the mount."""
    place = f"../{role}"
    feature, option = (" -O quota", ",usrquota") if quota else ("", "")
    prepare = (
        f"truncate -s {megabytes}M {place}/image && mkfs.ext4 -q{feature} {place}/image && mkdir {place}/disk && "
        f"mount -o loop{option} {place}/image {place}/disk && chmod 777 {place}/disk && "
        f"head -c 8M /dev/urandom > {place}/disk/samples.bin && sync -f {place}/disk && "
        'exec "$@"'
    )
    return ("/bin/sh", "-c", prepare, "sh")


def link_again(folder: Path) -> None:
    """Give all files in a folder a second link, as a backup does: removing them frees nothing."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    backup = folder / "backup"
    backup.mkdir()
    for number, path in enumerate(files):
        with suppress(FileNotFoundError):  # just replaced
            os.link(path, backup / str(number))


def fill(folder: Path) -> None:
    """Write into a folder until its file system is full."""
    with (folder / "core.4711").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def use_up_inodes(job: RunningJob, folder: Path) -> None:
    """Create empty files as long as the file system has an inode left, and whenever it has one again."""
    job.spawn([sys.executable, "-c", CREATE_FILES, str(folder)])
    job.wait(lambda: os.statvfs(folder).f_favail == 0, "the inodes are used up")


def remount_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)


def freeze_disk(job: RunningJob, folder: Path) -> None:
    """Suspend a file system: every write waits, uninterruptibly, as on a file server that does not answer."""
    when_agents_end(job, lambda: subprocess.run(["fsfreeze", "-u", str(folder)], check=False, capture_output=True))
    subprocess.run(["fsfreeze", "-f", str(folder)], check=True, capture_output=True)


def throttle_disk(job: RunningJob, folder: Path, direction: str, bytes_per_second: int) -> None:
    """Limit the block device below a folder; `direction` is read or write."""
    device = os.stat(folder).st_dev
    limit = CGROUP / "blkio" / f"blkio.throttle.{direction}_bps_device"
    name = f"{os.major(device)}:{os.minor(device)}"
    when_agents_end(job, lambda: limit.write_text(f"{name} 0"))
    limit.write_text(f"{name} {bytes_per_second}")


def lose_sectors(folder: Path) -> None:
    """Cut off the end of the block device below a folder: reads beyond it fail with EIO."""
    os.truncate(folder.parent / "image", 1 << 20)


def unmount(folder: Path) -> None:
    """Take a file system away under the processes that use it; open files stay."""
    subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


# Networks of nodes (`node_network`)


def on_node(job: RunningJob, node: int, *command: str) -> None:
    """Run a command in the network of a node."""
    pid = job.agent_pid(f"node-{node}")
    subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, capture_output=True)


def take_link_down(job: RunningJob, node: int) -> None:
    on_node(job, node, "ip", "link", "set", INTERFACE, "down")


def drop_route(job: RunningJob, node: int, to: str) -> None:
    """Drop all packets of a node to an address without a word, as a firewall does."""
    on_node(job, node, "ip", "route", "add", "blackhole", to)


def limit_link(job: RunningJob, node: int, rate: str) -> None:
    """Limit what a node can send."""
    limit = ("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")
    on_node(job, node, "tc", "qdisc", "add", "dev", INTERFACE, "root", *limit)


def lose_packets(job: RunningJob, node: int, share: float) -> None:
    """Drop a random share of the packets that a node sends: a BPF filter moves them into a queue without room."""
    # SKF_AD_RANDOM is at most the threshold
    program = f"4,32 0 0 4294963256,53 1 0 {int(share * 0xFFFFFFFF)},6 0 0 4294967295,6 0 0 0"
    for words in dropping("bpf", "bytecode", program):
        on_node(job, node, *words)


def reset_connections(job: RunningJob, node: int, port_of: int) -> None:
    """Close every TCP connection of a rank with a reset, as a firewall that lost its state does."""
    for pid in _and_children(port_of):
        for port in _ports_of(pid):
            on_node(job, node, "ss", "-K", "sport", "=", f":{port}")


# Servers


def load(job: RunningJob, mode: str, *arguments: str) -> None:
    """Send requests to a server, by a client of the program server."""
    job.spawn([sys.executable, str(program_path("server")), job.url, mode, *arguments])


def child_with(job: RunningJob, words: Sequence[str]) -> int:
    """Return the process of the run whose command line has all these words; LookupError if there is none."""
    for pid in job.processes():
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if all(word in line for word in words):
                return pid
    raise LookupError(f"no process of {job.name} with {' '.join(words)}")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _and_children(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _ports_of(pid: int) -> set[int]:
    """Local ports of the established TCP connections of a process."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(link))
    ports = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in sockets and fields[3] == "01":
            ports.add(int(fields[1].partition(":")[2], 16))
    return ports


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + REMOVE_SECONDS
    while group.exists():
        with suppress(OSError):  # busy until the last process is gone
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{group} is still in use")
        time.sleep(LOOK_SECONDS)
