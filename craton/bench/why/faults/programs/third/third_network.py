"""Programs of the third family network: a script that sends metrics by host name, and what runs beside it.

`third_network.py` is the script. `… resolve ADDRESS` answers DNS queries, `… announce DEVICE ADDRESS` claims an IPv4
address by gratuitous ARP.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

STEP_SECONDS = 0.1
ANNOUNCE_SECONDS = 0.5
METRICS_HOST, METRICS_PORT = "metrics.cluster.internal", 8125
DNS_PORT, TYPE_A, ANSWER_BYTES = 53, 1, 512
ETHERNET_ARP, REQUEST, BROADCAST = 0x0806, 1, b"\xff" * 6


def train() -> None:
    """Train, and send the loss of every step to a metrics service by its name, as StatsD clients do."""
    metrics = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for step in range(1, 1_000_000):
        time.sleep(STEP_SECONDS)
        loss = 3 - step / 1e4
        metrics.sendto(f"loss:{loss:.4f}|g".encode(), (METRICS_HOST, METRICS_PORT))
        print(f"step {step} loss {loss:.4f}", flush=True)


def resolve(address: str) -> None:
    """Answer every query for an IPv4 address with 127.0.0.1, others with no record."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, DNS_PORT))
    while True:
        query, client = server.recvfrom(ANSWER_BYTES)
        end = query.index(0, 12) + 5  # after the name: a zero, type and class
        is_address = struct.unpack_from("!H", query, end - 4)[0] == TYPE_A
        answer = struct.pack("!HHHLH4s", 0xC00C, TYPE_A, 1, 0, 4, bytes((127, 0, 0, 1))) if is_address else b""
        head = query[:2] + struct.pack("!HHHHH", 0x8180, 1, int(is_address), 0, 0)
        server.sendto(head + query[12:end] + answer, client)


def announce(device: str, address: str) -> None:
    """Say again and again that this machine has the address."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    wire.bind((device, ETHERNET_ARP))
    hardware: bytes = wire.getsockname()[4]
    owner = hardware + socket.inet_aton(address)
    claim = struct.pack("!HHBBH", 1, 0x0800, 6, 4, REQUEST) + owner + bytes(6) + socket.inet_aton(address)
    while True:
        wire.send(BROADCAST + hardware + struct.pack("!H", ETHERNET_ARP) + claim)
        time.sleep(ANNOUNCE_SECONDS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["resolve"]:
        resolve(sys.argv[2])
    elif sys.argv[1:2] == ["announce"]:
        announce(sys.argv[2], sys.argv[3])
    train()
