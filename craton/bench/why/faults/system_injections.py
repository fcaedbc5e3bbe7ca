"""What injectors of several sets do to networks, processes and limits.

Rules of a network are set on the ports of its bridge (`node_network`), as a switch would have them; they vanish with
the network.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from craton.bench.why.faults.injections import on_node, program_path
from craton.bench.why.faults.node_network import BRIDGE, INTERFACE, NETWORK, PREFIX, address
from craton.bench.why.faults.running import RunningJob

# Classic BPF (linux/bpf_common.h) on an Ethernet frame; a filter returns what becomes of the packet (linux/pkt_cls.h).
LENGTH, HALF_AT, BYTE_AT, WORD_AT_X, X_FROM_HEADER = 0x80, 0x28, 0x30, 0x40, 0xB1
IF_EQUAL, IF_GREATER, RETURN = 0x15, 0x25, 0x06
PASS, DROP = 0, 2
ETHERNET_BYTES, TYPE_AT, PROTOCOL_AT, IPV4, TCP = 14, 12, 23, 0x0800, 6
ESTABLISHED = "01"
QUEUE = ("latency", "100ms")
SINK_PORT = 9999
HOLD = """\
import ctypes, os, sys, time
trace = ctypes.CDLL(None, use_errno=True).ptrace
SEIZE, INTERRUPT = 0x4206, 0x4207
for thread in map(int, os.listdir(f"/proc/{sys.argv[1]}/task")):
    if trace(SEIZE, thread, None, None) or trace(INTERRUPT, thread, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
time.sleep(3600)
"""

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


# Networks


def in_switch(job: RunningJob, *command: str) -> None:
    """Run a command in the network of the bridge."""
    subprocess.run(["ip", "netns", "exec", job.network, *command], check=True, capture_output=True)


def drop_large_packets(job: RunningJob, node: int, size: int) -> None:
    """Drop packets above a size from and to a node without a word, as a tunnel with a smaller MTU does."""
    frame = size + ETHERNET_BYTES
    _filter_port(job, node, [(LENGTH, 0, 0, 0), (IF_GREATER, 0, 1, frame), (RETURN, 0, 0, DROP), (RETURN, 0, 0, PASS)])


def forget_connections(job: RunningJob, node: int, other: int) -> None:
    """Drop the packets of every connection that the ranks of two nodes have now; new connections work."""
    pairs = sorted(_connections(job.pid(node), other) | {(b, a) for a, b in _connections(job.pid(other), node)})
    if not pairs:
        raise LookupError(f"node-{node} and node-{other} have no connection")
    words = [first << 16 | second for pair in pairs for first, second in (pair, pair[::-1])]
    checks: list[Instruction] = [
        (IF_EQUAL, len(words) - number, 0, word) for number, word in enumerate(words)
    ]  # a match jumps over the rest and over PASS
    head: list[Instruction] = [
        (HALF_AT, 0, 0, TYPE_AT),
        (IF_EQUAL, 0, len(words) + 4, IPV4),
        (BYTE_AT, 0, 0, PROTOCOL_AT),
        (IF_EQUAL, 0, len(words) + 2, TCP),
        (X_FROM_HEADER, 0, 0, ETHERNET_BYTES),
        (WORD_AT_X, 0, 0, ETHERNET_BYTES),
    ]
    _filter_port(job, node, [*head, *checks, (RETURN, 0, 0, PASS), (RETURN, 0, 0, DROP)])


def limit_receiving(job: RunningJob, node: int, rate: str) -> None:
    """Limit what a node can receive; what it sends is as fast as before."""
    limit = ("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")
    in_switch(job, "tc", "qdisc", "add", "dev", f"port{node}", "root", *limit)


def limit_path(job: RunningJob, node: int, other: int, rate: str) -> None:
    """Limit what a node can send to one other node."""
    device = ("dev", INTERFACE)
    for words in (
        ("tc", "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "1"),
        ("tc", "class", "add", *device, "parent", "1:", "classid", "1:1", "htb", "rate", "10gbit"),
        ("tc", "class", "add", *device, "parent", "1:", "classid", "1:2", "htb", "rate", rate),
        (
            *("tc", "filter", "add", *device, "parent", "1:", "protocol", "ip", "u32"),
            *("match", "ip", "dst", f"{address(other)}/32", "classid", "1:2"),
        ),
    ):
        on_node(job, node, *words)


def upload(job: RunningJob, node: int, streams: int, rate: str) -> None:
    """Start an upload from a node to a machine outside of the run, over a link of this rate."""
    outside = f"{NETWORK}.254"
    in_switch(job, "ip", "addr", "add", f"{outside}/{PREFIX}", "dev", BRIDGE)
    on_node(job, node, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst", "64kb", *QUEUE)
    program = str(program_path("second_network"))
    job.spawn(["ip", "netns", "exec", job.network, sys.executable, program, "sink", str(SINK_PORT)])
    enter = ["nsenter", "-t", str(job.agent_pid(f"node-{node}")), "-n"]
    job.spawn([*enter, sys.executable, program, "upload", outside, str(SINK_PORT), str(streams)])


# Processes


def hold_in_debugger(job: RunningJob, pid: int) -> None:
    """Attach to all threads of a process and stop them, as a debugger that was left open does."""
    job.spawn([sys.executable, "-c", HOLD, str(pid)])
    job.wait(lambda: _state(pid) == "t", "the process is held")


def limit_cpu_time(pid: int, more_seconds: int) -> None:
    """Let a process use so many more seconds of CPU time, as `ulimit -t` does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    limit = int(used) + more_seconds
    resource.prlimit(pid, resource.RLIMIT_CPU, (limit, limit + 60))


def limit_open_files(pid: int, more: int) -> None:
    """Let a process open so many more files than it has open now."""
    limit = len(list(Path(f"/proc/{pid}/fd").iterdir())) + more
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))


def kill_everything_on_node(job: RunningJob, node: str) -> None:
    """Kill the agent of a node and all its descendants at once, as the end of a login session does."""
    agent = job.agent_pid(node)
    parents = {pid: _parent(pid) for pid in job.processes()}
    doomed = [pid for pid in parents if agent in _line(pid, parents)]
    for pid in doomed:
        os.kill(pid, signal.SIGSTOP)  # none of them can act on the end of another
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)


def named(job: RunningJob, name: str) -> int:
    """Return the process of the run with this program name; LookupError if there is none."""
    for pid in job.processes():
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    raise LookupError(f"no process {name} of {job.name}")


# Servers


def client(job: RunningJob, mode: str, count: int) -> None:
    """Send requests to a server, by a client of the program second_server."""
    job.spawn([sys.executable, str(program_path("second_server")), job.url, mode, str(count)])


def _filter_port(job: RunningJob, node: int, program: Iterable[Instruction]) -> None:
    lines = [" ".join(map(str, instruction)) for instruction in program]
    text = ",".join((str(len(lines)), *lines))
    device = ("dev", f"port{node}")
    in_switch(job, "tc", "qdisc", "add", *device, "clsact")
    for direction in ("ingress", "egress"):
        in_switch(job, "tc", "filter", "add", *device, direction, "bpf", "direct-action", "bytecode", text)


def _connections(pid: int, node: int) -> set[tuple[int, int]]:
    """Local and remote ports of the established TCP connections of a process with a node."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(link))
    remote = struct.unpack("=I", socket.inet_aton(address(node)))[0]
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        host, _, port = fields[2].partition(":")
        if f"socket:[{fields[9]}]" in sockets and fields[3] == ESTABLISHED and int(host, 16) == remote:
            found.add((int(fields[1].partition(":")[2], 16), int(port, 16)))
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _line(pid: int, parents: dict[int, int]) -> set[int]:
    """A process and its ancestors within the run."""
    line = set()
    while pid in parents and pid not in line:
        line.add(pid)
        pid = parents[pid]
    return line
