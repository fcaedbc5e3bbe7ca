"""A program for a network namespace of its own: what the kernel says of its TCP connections, as JSON.

It connects to an address that drops its packets, and sends on a connection before and after its network goes away.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict

from craton.agent.processes import ConnectionReader, down_interface

OWN, OTHER, SILENT = "10.9.0.1", "10.9.1.1", "10.9.0.77"
SILENT_SECONDS = 2.0
PATIENCE_SECONDS = float(sys.argv[1])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def connected(host: str) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, 0)) as server:
        client = socket.create_connection(server.getsockname(), source_address=(OWN, 0))
        return client, server.accept()[0]


def down_once(*, down: bool) -> str:
    """The down interface of our cable, once it is down or up: the kernel notes a lost carrier up to a second late."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while bool(name := down_interface("near")) != down and time.monotonic() < deadline:
        time.sleep(0.05)
    return name


def main() -> None:
    ip("link", "add", "near", "type", "veth", "peer", "name", "far")
    for name, address in (("near", OWN), ("far", OTHER)):
        ip("addr", "add", f"{address}/24", "dev", name)
        ip("link", "set", name, "up")
    ip("neigh", "add", SILENT, "lladdr", "02:00:00:00:00:77", "dev", "near")  # no host has it
    ip("link", "set", "lo", "up")
    reader, pids = ConnectionReader(), {0: os.getpid()}
    client, server = connected(OTHER)
    connecting = socket.socket()
    connecting.setblocking(False)
    connecting.connect_ex((SILENT, 29500))
    reader.read(pids, time.monotonic())
    client.sendall(b"x" * 1000)
    server.recv(1000)
    print(json.dumps(down_once(down=False)), flush=True)
    ip("link", "set", "lo", "down")  # packets between addresses of one machine take it
    ip("link", "set", "far", "down")  # the other end of the cable
    client.sendall(b"x" * 1000)
    print(json.dumps(down_once(down=True)), flush=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        peers = {peer.address: peer for peer in reader.read(pids, time.monotonic())[0]}
        if all(at in peers and peers[at].unacknowledged_seconds > SILENT_SECONDS for at in (OTHER, SILENT)):
            break
        time.sleep(0.1)
    print(json.dumps({at: asdict(peers[at]) for at in (OTHER, SILENT) if at in peers}), flush=True)


if __name__ == "__main__":
    main()
