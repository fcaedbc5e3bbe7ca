"""Faults of the network between nodes, fifth set: a wrong neighbour entry, a card that is deaf, packets out of order, a
slow backup link, no name server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import on_node, program_path
from craton.bench.why.faults.node_network import BRIDGE, INTERFACE, NETWORK, PREFIX, WRAP, address
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.system_injections import in_switch

NEEDS = ("root", "ip", "nsenter")
PROGRAM = "fifth_network"
PATH = str(program_path(PROGRAM))
FABRIC = (r"network|link|interface|fabric|bandwidth|packet|retransmi|reach|route|carrier",)
MISLEADING = (r"add memory|out of memory|file system|learning rate",)
OLD_HARDWARE_ADDRESS = "02:00:5e:10:00:aa"  # of the card that node-0 had before
DROP_ALL = "1,6 0 0 2"  # classic BPF: return TC_ACT_SHOT
BACKUP, BACKUP_RATE = "eth1", "2mbit"
RESOLVER = "127.0.0.53"


def _train(nodes: int, kind: Any = "pretrain", **keys: Any) -> JobRecipe:
    shared = {"train": {"global_batch_sequences": 2 * nodes}, "checkpoint": {"peer": "off"}}
    return JobRecipe(kind=kind, nodes=nodes, keys={**shared, **keys}, network=True, wrap=WRAP)


def _keep_old_neighbour(job: RunningJob, node: int, of: int) -> None:
    """Give a node a permanent neighbour entry for another one, with the address of a card that no longer exists."""
    words = ("lladdr", OLD_HARDWARE_ADDRESS, "nud", "permanent", "dev", INTERFACE)
    on_node(job, node, "ip", "neigh", "replace", address(of), *words)


def _stop_receiving(job: RunningJob, node: int) -> None:
    """Let nothing more arrive at a node; what it sends is delivered."""
    port = ("dev", f"port{node}")
    in_switch(job, "tc", "qdisc", "add", *port, "clsact")
    in_switch(job, "tc", "filter", "add", *port, "egress", "bpf", "direct-action", "bytecode", DROP_ALL)


def _reorder(job: RunningJob, node: int, others: tuple[int, ...], share: float) -> None:
    """Spread the packets of a node over two lines of different length, as a bond in round-robin mode does."""
    pids = [str(job.agent_pid(f"node-{number}")) for number in (node, *others)]
    job.spawn([sys.executable, PATH, "reorder", str(share), *pids])


def _fail_over(job: RunningJob, node: int) -> None:
    """Take the main link of a node down; its address moves to a slow backup link, as in a bond."""
    pid = str(job.agent_pid(f"node-{node}"))
    shown = ["nsenter", "-t", pid, "-n", "ip", "-brief", "link", "show", INTERFACE]
    hardware = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.split()[2]
    limit = ("tbf", "rate", BACKUP_RATE, "burst", "16kb", "latency", "200ms")
    in_switch(job, "ip", "link", "add", BACKUP, "type", "veth", "peer", "name", "backup0")
    in_switch(job, "ip", "link", "set", BACKUP, "netns", pid)
    in_switch(job, "ip", "link", "set", "backup0", "master", BRIDGE, "up")
    in_switch(job, "tc", "qdisc", "add", "dev", "backup0", "root", *limit)
    on_node(job, node, "ip", "link", "set", BACKUP, "address", hardware, "up")
    on_node(job, node, "tc", "qdisc", "add", "dev", BACKUP, "root", *limit)
    in_switch(job, "ip", "link", "set", f"port{node}", "down")
    subnet = f"{NETWORK}.0/{PREFIX}"
    on_node(job, node, "ip", "route", "replace", subnet, "dev", BACKUP, "src", address(node))
    on_node(job, node, "ip", "route", "flush", subnet, "dev", INTERFACE)


def _start_resolver(job: RunningJob) -> None:
    """Start the only name server in the network of the run."""
    folder = Path("/etc/netns") / job.network
    folder.mkdir(parents=True)
    job.undo.callback(shutil.rmtree, folder, ignore_errors=True)
    (folder / "resolv.conf").write_text(f"nameserver {RESOLVER}\noptions timeout:1 attempts:2\n")
    process = job.spawn(["ip", "netns", "exec", job.network, sys.executable, PATH, "resolve", RESOLVER])
    (job.folder.parent / "resolver").write_text(str(process.pid))


def _kill_resolver(job: RunningJob) -> None:
    os.kill(int((job.folder.parent / "resolver").read_text()), signal.SIGKILL)


FAULTS = (
    LiveFault(
        name="network-neighbour-entry-stale",
        family="network",
        summary="Node-2 keeps a permanent neighbour entry with the old card of node-0: what it sends there is lost.",
        source="https://github.com/cilium/cilium/issues/14962",
        job=_train(
            3,
            model={"experts": 6, "top_k": 2, "moe_ffn_hidden": 64},
            layout={"fsdp": 3, "ep": 3, "micro_batch": 2},
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({0, 2}),
            node="node-2",
            remedy=(*FABRIC, r"neighbou?r|\bARP\b|\bMAC\b|ip neigh|lost|silent"),
            misleading=MISLEADING,
        ),
        inject=lambda job: _keep_old_neighbour(job, 2, of=0),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-card-receives-nothing",
        family="network",
        summary="The receive queue of node-1's card is stuck: its link is up, it sends, and nothing arrives there.",
        source="https://github.com/oxidecomputer/hubris/issues/750",
        job=_train(
            3,
            kind="sft",
            train={"global_batch_sequences": 6, "lora": {"rank": 4}},
            layout={"replicate": 3, "micro_batch": 2},
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*FABRIC, r"receiv|\bcard\b|\bNIC\b|lost|silent"),
            misleading=MISLEADING,
        ),
        inject=lambda job: _stop_receiving(job, 1),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-packets-out-of-order",
        family="network",
        summary="Packets of node-1 take two paths of different length and arrive out of order; TCP sends many twice.",
        source="https://github.com/cisco-system-traffic-generator/trex-core/issues/813",
        job=_train(3, layout={"fsdp": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric",),
            conditions=("slow", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*FABRIC, r"order|latency|delay|round[- ]trip"),
            misleading=MISLEADING,
        ),
        inject=lambda job: _reorder(job, 1, (0, 2), 0.5),
        judge_seconds=40,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-on-the-backup-link",
        family="network",
        summary="The main link of node-1 loses its carrier; the node goes on over its backup link with 2 Mbit/s.",
        source="https://github.com/bb-qq/aqc111/issues/123",
        job=_train(3, model={"layers": 3}, layout={"pp": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric",),
            conditions=("slow", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*FABRIC, r"eth0|eth1|backup|bond|fail-?over"),
            misleading=MISLEADING,
        ),
        inject=lambda job: _fail_over(job, 1),
        judge_seconds=40,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-no-name-server",
        family="network",
        summary="The only name server goes away: all ranks of a script raise when they look up the tracker's address.",
        source="https://github.com/WongKinYiu/yolov7/issues/275",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", f"{PROGRAM}.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
            },
            program=PROGRAM,
            network=True,
            prepare=_start_resolver,
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"name resolution|\bDNS\b|name ?server|resolv|gaierror|host ?name|look-?up",),
            misleading=MISLEADING,
        ),
        inject=_kill_resolver,
        judge_seconds=25,
        needs=NEEDS,
    ),
)
