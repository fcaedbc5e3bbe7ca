"""Programs of the family network: a data-parallel script, and a wire that delays packets between two nodes.

`network.py` is the script of a command job. `network.py delay PID PID SECONDS` connects the networks of two processes
by TUN devices and delivers every packet SECONDS late, as a long or congested path does.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
STEP_SECONDS = 0.1
PACKET_BYTES = 65_536
INTERFACE, DEVICE = "eth0", "delay0"


def train() -> None:
    """Average gradients over gloo, as a user's own script does."""
    import torch

    port = os.environ.get("RENDEZVOUS_PORT", os.environ["MASTER_PORT"])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{port}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    gradients = torch.randn(100_000)
    step = 0
    while True:
        step += 1
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def delay(pids: tuple[int, int], seconds: float) -> None:
    """Take over all packets between the two processes' networks; deliver them late."""
    addresses = [_address(pid) for pid in pids]
    wires = [_open_wire(pid) for pid in pids]
    for pid, other in zip(pids, reversed(addresses), strict=True):
        _in_network(pid, "ip", "link", "set", DEVICE, "up")
        _in_network(pid, "ip", "route", "add", f"{other}/32", "dev", DEVICE)
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        room = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for wire in select.select(wires, [], [], room)[0]:
            packet = os.read(wire, PACKET_BYTES)
            waiting.append((time.monotonic() + seconds, wires[1 - wires.index(wire)], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            os.write(target, packet)


def _open_wire(pid: int) -> int:
    """Open a TUN device in the network of a process; this process stays there."""
    with open(f"/proc/{pid}/ns/net") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    wire = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return wire


def _address(pid: int) -> str:
    return _in_network(pid, "ip", "-4", "-brief", "address", "show", INTERFACE).split()[2].partition("/")[0]


def _in_network(pid: int, *command: str) -> str:
    done = subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:2] == ["delay"]:
        delay((int(sys.argv[2]), int(sys.argv[3])), float(sys.argv[4]))
    train()
