"""Nodes with a network of their own: each agent of a local run in its own network namespace, joined by a bridge.

`python -m craton.bench.why.faults.node_network PROGRAM -m craton run …` (the `wrap` of a recipe with `network`)
starts the run with node K at FIRST_ADDRESS + K on the interface INTERFACE. The namespaces belong to the agents: they
vanish with them, however they end.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from craton.agent import Launch
from craton.orchestration import agent_command

WRAP = (sys.executable, "-m", "craton.bench.why.faults.node_network")
BRIDGE, INTERFACE, PREFIX = "bridge0", "eth0", 24
NETWORK = "10.77.0"
NODE_OPTION = "--inside"
BLOCKED_VARIABLE = "LIVE_FAULT_BLOCKED"  # NODE:PORT, a TCP port that this node cannot reach
CLONE_NEWNET = 0x40000000  # of linux/sched.h


def address(node: int) -> str:
    return f"{NETWORK}.{node + 1}"


def start(arguments: Sequence[str]) -> None:
    """Run `craton` in this process, with the agents of the run it starts in namespaces of their own."""
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("link", "set", BRIDGE, "up")
    local: Any = import_module("craton.orchestration.local")  # its agents start inside namespaces
    local.with_cards = _with_addresses
    local.agent_command = _agent_in_namespace
    sys.argv = ["craton", *arguments[arguments.index("run") :]]
    runpy.run_module("craton", run_name="__main__")


def enter(node: int, command: Sequence[str]) -> None:
    """Become the agent of a node, in a namespace with an interface on the bridge."""
    outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    os.set_inheritable(outside, True)  # the bridge lives as long as an agent has it
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):  # os.unshare is new in Python 3.12
        raise OSError(ctypes.get_errno(), "unshare")
    port = f"port{node}"
    there = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{outside}"]
    _ip("link", "set", "lo", "up")
    _ip("link", "add", INTERFACE, "type", "veth", "peer", "name", port)
    _ip("link", "set", port, "netns", f"/proc/{os.getpid()}/fd/{outside}")
    subprocess.run([*there, "ip", "link", "set", port, "master", BRIDGE, "up"], check=True, pass_fds=(outside,))
    _ip("addr", "add", f"{address(node)}/{PREFIX}", "dev", INTERFACE)
    _ip("link", "set", INTERFACE, "up")
    blocked, _, number = os.environ.get(BLOCKED_VARIABLE, "").partition(":")
    if blocked == str(node):
        for words in dropping("u32", "match", "ip", "dport", number, "0xffff"):
            subprocess.run(words, check=True, capture_output=True)
    os.execv(command[0], list(command))


def dropping(*match: str) -> list[list[str]]:
    """Commands that move the packets of a filter into a queue without room."""
    device = ("dev", INTERFACE)
    return [
        ["tc", "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "1"],
        ["tc", "class", "add", *device, "parent", "1:", "classid", "1:1", "htb", "rate", "10gbit"],
        ["tc", "class", "add", *device, "parent", "1:", "classid", "1:2", "htb", "rate", "8bit"],
        ["tc", "qdisc", "add", *device, "parent", "1:2", "handle", "2:", "bfifo", "limit", "1"],
        ["tc", "filter", "add", *device, "parent", "1:", "protocol", "ip", *match, "classid", "1:2"],
    ]


def _with_addresses(launch: Launch) -> Launch:
    return replace(launch, master_address=address(0), agent_command=[])  # no agent can restart another one


def _agent_in_namespace(run: Path, node: int | None = None) -> list[str]:
    return [*WRAP, NODE_OPTION, str(node), *agent_command(run, node)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    if sys.argv[1] == NODE_OPTION:
        enter(int(sys.argv[2]), sys.argv[3:])
    start(sys.argv[1:])
