"""Faults of the network between nodes, fourth set: damaged packets, a MAC address twice, a VPN, a firewall that
refuses, no loopback."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import on_node, program_path
from craton.bench.why.faults.node_network import INTERFACE, NETWORK, WRAP
from craton.bench.why.faults.running import RunningJob

NEEDS = ("root", "ip", "nsenter")
PROGRAM = "fourth_network"
PATH = str(program_path(PROGRAM))
PROGRESS = {"pattern": "step {step} loss {loss}", "hang": "15m"}
FABRIC = (r"network|link|interface|fabric|bandwidth|packet|retransmi|reach|route|checksum",)
MISLEADING = (r"add memory|out of memory|file system|learning rate",)
METRICS_PORT = "9100"
REFUSED_TABLE = "100"


def _train(nodes: int, kind: Any = "pretrain", **keys: Any) -> JobRecipe:
    shared = {"train": {"global_batch_sequences": 2 * nodes}, "checkpoint": {"peer": "off"}}
    return JobRecipe(kind=kind, nodes=nodes, keys={**shared, **keys}, network=True, wrap=WRAP)


def _script(fault: str, nodes: int) -> JobRecipe:
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={"command": ["{python}", f"{PROGRAM}.py"], "progress": PROGRESS},
        program=PROGRAM,
        fault=fault,
        network=True,
        wrap=WRAP,
    )


def _corrupt(job: RunningJob, node: int, others: tuple[int, ...], share: float) -> None:
    """Let the interface of a node damage a share of the packets that it sends."""
    pids = [str(job.agent_pid(f"node-{number}")) for number in (node, *others)]
    job.spawn([sys.executable, PATH, "corrupt", str(share), *pids])


def _take_hardware_address(job: RunningJob, node: int, of: int) -> None:
    """Give the interface of a node the MAC address of another node's, as a cloned machine has it."""
    inside = ("nsenter", "-t", str(job.agent_pid(f"node-{of}")), "-n")
    words = subprocess.run(
        [*inside, "ip", "-brief", "link", "show", INTERFACE], check=True, capture_output=True, text=True
    ).stdout.split()
    on_node(job, node, "ip", "link", "set", INTERFACE, "address", words[2])


def _take_route(job: RunningJob, node: int) -> None:
    """Start a VPN client on a node that announces a route for half of the cluster's subnet."""
    job.spawn([sys.executable, PATH, "tunnel", str(job.agent_pid(f"node-{node}")), f"{NETWORK}.0/25"])


def _refuse(job: RunningJob, node: int, port: str) -> None:
    """Refuse connections of a node to a port, as a firewall rule `REJECT` does; others work."""
    on_node(job, node, "ip", "route", "add", "unreachable", "default", "table", REFUSED_TABLE)
    on_node(job, node, "ip", "rule", "add", "ipproto", "tcp", "dport", port, "lookup", REFUSED_TABLE)


FAULTS = (
    LiveFault(
        name="network-packets-damaged",
        family="network",
        summary="The network card of node-1 damages a third of its packets; their receivers find it by the checksum.",
        source="https://www.michal-drozd.com/en/blog/vxlan-checksum-offload-packet-drops/",
        job=_train(3, layout={"fsdp": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric",),
            conditions=("slow", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=FABRIC,
            misleading=MISLEADING,
        ),
        inject=lambda job: _corrupt(job, 1, (0, 2), 0.35),
        judge_seconds=35,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-hardware-address-twice",
        family="network",
        summary="Node-2 is a clone and gets the MAC address of node-1; the switch sends frames to one or the other.",
        source="https://github.com/harvester/harvester/issues/9973",
        job=_train(
            3,
            model={"experts": 6, "top_k": 2, "moe_ffn_hidden": 64},
            layout={"fsdp": 3, "ep": 3, "micro_batch": 2},
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("hung", "dead", "slow", "waiting", "starting"),
            ranks=frozenset({1, 2}),
            remedy=(*FABRIC, r"\bMAC\b|\bARP\b|address|duplicate|peer|connection|collective"),
            misleading=MISLEADING,
        ),
        inject=lambda job: _take_hardware_address(job, 2, of=1),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-vpn-takes-the-route",
        family="network",
        summary="A VPN client on node-2 adds a route for the subnet of the cluster; all that node-2 sends is lost.",
        source="https://github.com/tailscale/tailscale/issues/14871",
        job=_train(
            3,
            kind="sft",
            train={"global_batch_sequences": 6, "lora": {"rank": 4}},
            layout={"fsdp": 3, "micro_batch": 2},
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "host"),
            conditions=("hung", "dead", "waiting", "starting"),
            ranks=frozenset({2}),
            node="node-2",
            remedy=(*FABRIC, r"\bVPN\b|vpn0|lost|silent"),
            misleading=MISLEADING,
        ),
        inject=lambda job: _take_route(job, 2),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-firewall-refuses",
        family="network",
        summary="A new firewall rule on node-1 refuses connections to the metrics port of rank 0: no route to host.",
        source="https://github.com/facebookresearch/PyTorch-BigGraph/issues/99",
        job=_script("metrics", nodes=3),
        expected=ExpectedVerdict(
            layers=("fabric", "host"),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"no route to host|Errno 113|EHOSTUNREACH|firewall|\broute|reach|9100",),
            misleading=MISLEADING,
        ),
        inject=lambda job: _refuse(job, 1, METRICS_PORT),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-loopback-down",
        family="network",
        summary="The loopback interface of node-1 goes down; rank 1 waits for its helper at 127.0.0.1.",
        source="https://github.com/pelagos-containers/pelagos/issues/331",
        job=_script("sidecar", nodes=2),
        expected=ExpectedVerdict(
            layers=("fabric", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"loopback|\blo\b|127\.0\.0\.1|localhost|connect|interface|sidecar|stack|py-spy",),
            misleading=MISLEADING,
        ),
        inject=lambda job: on_node(job, 1, "ip", "link", "set", "lo", "down"),
        judge_seconds=30,
        needs=NEEDS,
    ),
)
