"""Programs of the fifth family network: a script that reports by host name, and what stands between nodes.

`fifth_network.py` is the script. `… resolve ADDRESS` answers DNS queries. `… reorder SHARE PID PID …` joins the
networks of processes by TUN devices and holds back packets of the first, so that later ones overtake them.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 65_536
INTERFACE, WIRE = "eth0", "bond0"
HELD_SECONDS = 0.03
STEP_SECONDS = 0.1
TRACKER_HOST, TRACKER_PORT = "tracker.cluster.internal", 8125
REPORT_EVERY = 5
DNS_PORT, TYPE_A, ANSWER_BYTES = 53, 1, 512


def train() -> None:
    """Average gradients over gloo; every few steps each rank reports to the experiment tracker by its name."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    tracker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    gradients = torch.randn(10_000)
    for step in range(1, 1_000_000):
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)
        if step % REPORT_EVERY == 0:
            host = socket.getaddrinfo(TRACKER_HOST, TRACKER_PORT, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
            tracker.sendto(f"step:{step}|g".encode(), host)


def resolve(address: str) -> None:
    """Answer every query for an IPv4 address with 127.0.0.1."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, DNS_PORT))
    while True:
        query, client = server.recvfrom(ANSWER_BYTES)
        end = query.index(0, 12) + 5  # after the name: a zero, type and class
        is_address = struct.unpack_from("!H", query, end - 4)[0] == TYPE_A
        answer = struct.pack("!HHHLH4s", 0xC00C, TYPE_A, 1, 0, 4, bytes((127, 0, 0, 1))) if is_address else b""
        head = query[:2] + struct.pack("!HHHHH", 0x8180, 1, int(is_address), 0, 0)
        server.sendto(head + query[12:end] + answer, client)


def reorder(share: float, pids: list[int]) -> None:
    """Carry all packets between the first process's network and the others'; hold a share of those it sends."""
    addresses = [_address(pid) for pid in pids]
    wires = [_open_device(pid) for pid in pids]
    for pid, own in zip(pids, addresses, strict=True):
        _in_network(pid, "ip", "link", "set", WIRE, "up")
        for other in addresses[1:] if own == addresses[0] else addresses[:1]:
            _in_network(pid, "ip", "route", "add", f"{other}/32", "dev", WIRE)
    targets = {socket.inet_aton(address): wire for address, wire in zip(addresses, wires, strict=True)}
    held: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        pause = max(0.0, held[0][0] - time.monotonic()) if held else None
        for wire in select.select(wires, [], [], pause)[0]:
            packet = os.read(wire, PACKET_BYTES)
            target = targets.get(packet[16:20])
            if target is None:
                continue
            if wire == wires[0] and random.random() < share:
                number += 1
                heapq.heappush(held, (time.monotonic() + random.random() * 2 * HELD_SECONDS, number, target, packet))
            else:
                os.write(target, packet)
        while held and held[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(held)
            os.write(target, packet)


def _open_device(pid: int) -> int:
    """Open a TUN device in the network of a process; this process stays there."""
    with open(f"/proc/{pid}/ns/net") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", WIRE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _address(pid: int) -> str:
    return _in_network(pid, "ip", "-4", "-brief", "address", "show", INTERFACE).split()[2].partition("/")[0]


def _in_network(pid: int, *command: str) -> str:
    done = subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:2] == ["resolve"]:
        resolve(sys.argv[2])
    elif sys.argv[1:2] == ["reorder"]:
        reorder(float(sys.argv[2]), [int(word) for word in sys.argv[3:]])
    else:
        train()
