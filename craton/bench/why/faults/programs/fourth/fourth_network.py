"""Programs of the fourth family network: a data-parallel script, and what stands between nodes.

`fourth_network.py` is the script; FAULT is `metrics` (all ranks report to rank 0) or `sidecar` (each rank asks a helper
on its own machine). `… sidecar PORT` is that helper. `… corrupt SHARE PID PID …` joins the networks of processes by TUN
devices and damages packets that the first of them sends. `… tunnel PID SUBNET` is a VPN client that leads nowhere.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 65_536
INTERFACE, WIRE, TUNNEL = "eth0", "wire0", "vpn0"
TUNNEL_ADDRESS = "100.64.0.7/32"
STEP_SECONDS = 0.1
METRICS_PORT, SIDECAR_PORT = 9100, 8971
REPORT_EVERY = 5


def train() -> None:
    """Average gradients over gloo, as a user's own script does."""
    import torch

    rank, fault = int(os.environ["RANK"]), os.environ["FAULT"]
    torch.set_num_threads(1)
    if fault == "metrics" and rank == 0:
        threading.Thread(target=answer, args=("", METRICS_PORT), daemon=True).start()
    if fault == "sidecar":
        subprocess.Popen([sys.executable, __file__, "sidecar", str(SIDECAR_PORT)])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    gradients = torch.randn(10_000)
    for step in range(1, 1_000_000):
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)
        if step % REPORT_EVERY == 0 and fault == "metrics":
            report(os.environ["MASTER_ADDR"], METRICS_PORT, step)
        if step % REPORT_EVERY == 0 and fault == "sidecar":
            report("127.0.0.1", SIDECAR_PORT, step)


def report(host: str, port: int, step: int) -> None:
    """Send the number of a step over a new connection, and wait for the answer."""
    with socket.create_connection((host, port)) as connection:
        connection.sendall(f"{step}\n".encode())
        connection.recv(16)


def answer(host: str, port: int) -> None:
    """Answer every connection."""
    listener = socket.create_server((host, port), backlog=128)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(b"ok\n")


def corrupt(share: float, pids: list[int]) -> None:
    """Carry all packets between the first process's network and the others'; damage a share of those it sends."""
    addresses = [_address(pid) for pid in pids]
    wires = [_open_device(pid, WIRE) for pid in pids]
    for pid, own in zip(pids, addresses, strict=True):
        _in_network(pid, "ip", "link", "set", WIRE, "up")
        for other in addresses[1:] if own == addresses[0] else addresses[:1]:
            _in_network(pid, "ip", "route", "add", f"{other}/32", "dev", WIRE)
    targets = {socket.inet_aton(address): wire for address, wire in zip(addresses, wires, strict=True)}
    while True:
        for wire in select.select(wires, [], [])[0]:
            packet = bytearray(os.read(wire, PACKET_BYTES))
            if wire == wires[0] and random.random() < share:
                packet[-1] ^= 0x40
            target = targets.get(bytes(packet[16:20]))
            if target is not None:
                os.write(target, packet)


def tunnel(pid: int, subnet: str) -> None:
    """Take over the route of a subnet, and lose what is sent there."""
    device = _open_device(pid, TUNNEL)
    _in_network(pid, "ip", "addr", "add", TUNNEL_ADDRESS, "dev", TUNNEL)
    _in_network(pid, "ip", "link", "set", TUNNEL, "up")
    _in_network(pid, "ip", "route", "add", subnet, "dev", TUNNEL)
    while os.read(device, PACKET_BYTES):
        pass


def _open_device(pid: int, name: str) -> int:
    """Open a TUN device in the network of a process; this process stays there."""
    with open(f"/proc/{pid}/ns/net") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _address(pid: int) -> str:
    return _in_network(pid, "ip", "-4", "-brief", "address", "show", INTERFACE).split()[2].partition("/")[0]


def _in_network(pid: int, *command: str) -> str:
    done = subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 1 else "train"
    if mode == "sidecar":
        answer("127.0.0.1", int(sys.argv[2]))
    elif mode == "corrupt":
        corrupt(float(sys.argv[2]), [int(word) for word in sys.argv[3:]])
    elif mode == "tunnel":
        tunnel(int(sys.argv[2]), sys.argv[3])
    else:
        train()
