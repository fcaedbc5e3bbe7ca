"""Programs of the second family network: a data-parallel script, and an upload beside a run.

`second_network.py` is the script of a command job. `… sink PORT` receives what `… upload HOST PORT STREAMS` sends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

STEP_SECONDS = 0.1
CHUNK_BYTES = 1 << 16
METRICS_PORT = 9100
HEALTHY_STEPS = 30
LEAKED_A_STEP = 10
# Classic BPF: drop TCP packets with SYN and without ACK, unless they go to the port in its place.
ONLY_PORT = (
    "12,40 0 0 12,21 0 8 2048,48 0 0 23,21 0 6 6,177 0 0 14,80 0 0 27,84 0 0 18,21 0 2 2,72 0 0 16,21 0 1 {port},"
    "6 0 0 0,6 0 0 2"
)


def train() -> None:
    """Average gradients over gloo, as a user's own script does."""
    rank, is_victim = int(os.environ["RANK"]), os.environ["RANK"] == os.environ.get("VICTIM")
    fault = os.environ["FAULT"]
    if fault == "container-bridge":
        add_bridge_of_containers()
        if is_victim:
            os.environ["GLOO_SOCKET_IFNAME"] = "lxcbr0"
    if fault == "filtered" and is_victim:
        allow_only(os.environ["MASTER_PORT"])
    import torch

    host = os.environ.get("RENDEZVOUS_HOST", os.environ["MASTER_ADDR"])
    if is_victim:
        Path(os.environ["ONSET"]).touch()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{os.environ['MASTER_PORT']}",
        rank=rank,
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


def add_bridge_of_containers() -> None:
    """Add the interface that every machine with LXC has, with the same address everywhere."""
    for words in (
        "ip link add lxcbr0 type veth peer name lxc1",
        "ip addr add 10.0.3.1/24 dev lxcbr0",
        "ip link set lxcbr0 up",
        "ip link set lxc1 up",
    ):
        subprocess.run(words.split(), check=True)


def allow_only(port: str) -> None:
    """Let new connections through only to one port, in both directions, as the firewall of a node does."""
    subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "clsact"], check=True)
    for direction in ("ingress", "egress"):
        rule = ["tc", "filter", "add", "dev", "eth0", direction, "bpf", "direct-action", "bytecode"]
        subprocess.run([*rule, ONLY_PORT.format(port=port)], check=True)


def report() -> None:
    """Send metrics of every step to rank 0 over a new connection; after a while the connections are not closed."""
    rank, kept = int(os.environ["RANK"]), []
    if rank == 0:
        threading.Thread(target=receive, args=(METRICS_PORT,), daemon=True).start()
    step = 0
    while True:
        step += 1
        if rank == int(os.environ["VICTIM"]) and step > HEALTHY_STEPS:
            Path(os.environ["ONSET"]).touch()
            for _ in range(LEAKED_A_STEP):
                kept.append(socket.create_connection((os.environ["MASTER_ADDR"], METRICS_PORT), timeout=10))
                kept[-1].sendall(b"loss 2.9\n")
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def receive(port: int) -> None:
    """Accept connections and read what comes."""
    listener = socket.create_server(("", port), backlog=128)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=drain, args=(connection,), daemon=True).start()


def drain(connection: socket.socket) -> None:
    while connection.recv(CHUNK_BYTES):
        pass


def upload(host: str, port: int) -> None:
    """Send without end."""
    connection = socket.create_connection((host, port))
    while True:
        connection.sendall(bytes(CHUNK_BYTES))


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 1 else os.environ["FAULT"]
    if mode == "sink":
        receive(int(sys.argv[2]))
    elif mode == "upload":
        time.sleep(0.5)  # until the sink listens
        for _ in range(int(sys.argv[4])):
            threading.Thread(target=upload, args=(sys.argv[2], int(sys.argv[3]))).start()
    elif mode == "ports":
        report()
    else:
        train()
