"""Faults of the network between nodes, third set: a flapping link, a second owner of an address, a switch, a resolver,
a lost address."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import on_node, program_path
from craton.bench.why.faults.node_network import BRIDGE, INTERFACE, PREFIX, WRAP, address
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.system_injections import in_switch

NEEDS = ("root", "ip", "nsenter")
NETWORK = (r"network|link|interface|fabric|bandwidth|packet|retransmi|reach|route|switch|carrier",)
MISLEADING = (r"add memory|out of memory|file system|learning rate",)
PROGRAM = str(program_path("third_network"))
DOWN_SECONDS, UP_SECONDS = 0.8, 0.4
# Two resolvers of the site; the first is asked first.
RESOLVERS = ("127.0.0.53", "127.0.0.54")


def _train(nodes: int, kind: Any = "pretrain", **keys: Any) -> JobRecipe:
    shared = {"train": {"global_batch_sequences": 2 * nodes}, "checkpoint": {"peer": "off"}}
    return JobRecipe(kind=kind, nodes=nodes, keys={**shared, **keys}, network=True, wrap=WRAP)


def _flap(job: RunningJob) -> None:
    """Take the switch port of node-1 down and up in turn, as a bad transceiver does."""
    over = threading.Event()
    job.undo.callback(over.set)

    def act() -> None:
        with suppress(subprocess.CalledProcessError):  # the network is gone with the run
            while not over.wait(DOWN_SECONDS):
                in_switch(job, "ip", "link", "set", "port1", "up")
                if over.wait(UP_SECONDS):
                    return
                in_switch(job, "ip", "link", "set", "port1", "down")

    in_switch(job, "ip", "link", "set", "port1", "down")
    threading.Thread(target=act, daemon=True).start()


def _take_address(job: RunningJob, node: int) -> None:
    """Connect a machine that has the address of a node and announces it, as a wrong static address does."""
    machine = job.spawn(["unshare", "-n", "sleep", "3600"])
    own = os.readlink("/proc/self/ns/net")
    job.wait(lambda: os.readlink(f"/proc/{machine.pid}/ns/net") != own, "the machine has a network")
    in_switch(job, "ip", "link", "add", "stranger", "type", "veth", "peer", "name", "port99")
    in_switch(job, "ip", "link", "set", "stranger", "netns", str(machine.pid))
    in_switch(job, "ip", "link", "set", "port99", "master", BRIDGE, "up")
    inside = ("nsenter", "-t", str(machine.pid), "-n")
    for words in (
        ("ip", "addr", "add", f"{address(node)}/{PREFIX}", "dev", "stranger"),
        ("ip", "link", "set", "stranger", "up"),
    ):
        subprocess.run([*inside, *words], check=True, capture_output=True)
    job.spawn([*inside, sys.executable, PROGRAM, "announce", "stranger", address(node)])


def _start_resolvers(job: RunningJob) -> None:
    """Start two resolvers in the network of the run, and name them in its resolv.conf."""
    folder = Path("/etc/netns") / job.network
    folder.mkdir(parents=True)
    job.undo.callback(shutil.rmtree, folder, ignore_errors=True)
    lines = [f"nameserver {resolver}" for resolver in RESOLVERS]
    (folder / "resolv.conf").write_text("\n".join([*lines, "options timeout:2", ""]))
    for resolver in RESOLVERS:
        process = job.spawn(["ip", "netns", "exec", job.network, sys.executable, PROGRAM, "resolve", resolver])
        (job.folder.parent / f"resolver-{resolver}").write_text(str(process.pid))


def _stop_first_resolver(job: RunningJob) -> None:
    os.kill(int((job.folder.parent / f"resolver-{RESOLVERS[0]}").read_text()), signal.SIGSTOP)


FAULTS = (
    LiveFault(
        name="network-link-flaps",
        family="network",
        summary="The link of node-1 goes down for 0.8 s and up for 0.4 s, again and again; its connections stall.",
        source="https://arxiv.org/abs/2402.15627",
        job=_train(3, layout={"fsdp": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("slow", "hung", "dead"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*NETWORK, r"flap"),
            misleading=MISLEADING,
        ),
        inject=_flap,
        judge_seconds=35,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-address-of-a-node-stolen",
        family="network",
        summary="Another machine starts with the address of node-2; it gets the packets for node-2 and resets them.",
        source="https://github.com/systemd/systemd/issues/2527",
        job=_train(
            3,
            model={"experts": 6, "top_k": 2, "moe_ffn_hidden": 64},
            layout={"fsdp": 3, "ep": 3, "micro_batch": 2},
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("dead", "hung", "waiting", "starting"),
            ranks=frozenset({2}),
            node="node-2",
            remedy=(*NETWORK, r"connection|reset|closed by peer|address|\bARP\b|\bMAC\b|duplicate|10\.77\.0\.3"),
            misleading=MISLEADING,
        ),
        inject=lambda job: _take_address(job, 2),
        judge_seconds=30,
        needs=(*NEEDS, "unshare"),
    ),
    LiveFault(
        name="network-switch-down",
        family="network",
        summary="The switch of all nodes fails: every link is still up, and no packet between any two nodes arrives.",
        source="https://wikitech-static.wikimedia.org/wiki/Incident_documentation/20150324-Eqiad-Rack-C4",
        job=_train(
            3,
            kind="sft",
            train={"global_batch_sequences": 6, "lora": {"rank": 4}},
            layout={"replicate": 3, "micro_batch": 2},
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("hung", "dead"),
            ranks=frozenset(),
            remedy=(*NETWORK, r"collective|peer|connection"),
            misleading=MISLEADING,
        ),
        inject=lambda job: in_switch(job, "ip", "link", "set", BRIDGE, "down"),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-first-resolver-dead",
        family="network",
        summary="The first name server stops answering; every lookup of a script waits 2 s and asks the second one.",
        source="https://github.com/hickory-dns/hickory-dns/issues/2150",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", "third_network.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
            },
            program="third_network",
            network=True,
            prepare=_start_resolvers,
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "framework"),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"\bDNS\b|name ?server|resolv|getaddrinfo|look-?up|host ?name|sendto|stack|py-spy",),
            misleading=MISLEADING,
        ),
        inject=_stop_first_resolver,
        judge_seconds=35,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-address-lost",
        family="network",
        summary="The DHCP lease of node-2 is lost and its address is removed; the link is up, its processes live.",
        source="https://github.com/systemd/systemd/issues/12676",
        job=_train(3, model={"layers": 3}, layout={"pp": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({2}),
            node="node-2",
            remedy=(*NETWORK, r"address|DHCP|lost|silent"),
            misleading=MISLEADING,
        ),
        inject=lambda job: on_node(job, 2, "ip", "addr", "flush", "dev", INTERFACE),
        judge_seconds=30,
        needs=NEEDS,
    ),
)
