"""Faults of the network between nodes: each node has its own network namespace, joined to the others by a bridge."""

from __future__ import annotations

import sys

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import (
    drop_route,
    limit_link,
    lose_packets,
    program_path,
    reset_connections,
    take_link_down,
)
from craton.bench.why.faults.node_network import BLOCKED_VARIABLE, WRAP, address
from craton.bench.why.faults.running import RunningJob

NEEDS = ("root", "ip", "nsenter")
RATE = "kernel:tbf rate 1mbit burst 16kb latency 50ms"
SCRIPT = {"command": ["{python}", "network.py"], "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"}}
NETWORK = (r"network|link|interface|fabric|communicat|bandwidth|latency|packet|retransmi|reach",)
MISLEADING = (r"add memory|file system|out of memory",)
PORT = "29511"


def data_parallel(nodes: int) -> JobRecipe:
    keys = {
        "train": {"global_batch_sequences": 2 * nodes},
        "layout": {"fsdp": nodes, "micro_batch": 2},
        "checkpoint": {"peer": "off"},
    }
    return JobRecipe(nodes=nodes, keys=keys, network=True, wrap=WRAP)


def _partition(job: RunningJob) -> None:
    drop_route(job, 1, address(2))
    drop_route(job, 2, address(1))


def _slow_everywhere(job: RunningJob) -> None:
    for node in (0, 1):
        limit_link(job, node, "3mbit")


def _delay(job: RunningJob) -> None:
    agents = [str(job.agent_pid(node)) for node in ("node-0", "node-1")]
    job.spawn([sys.executable, str(program_path("network")), "delay", *agents, "0.06"])


FAULTS = (
    LiveFault(
        name="network-link-down",
        family="network",
        summary="The interface of node-2 goes down and stays down; its processes live.",
        source="https://github.com/NVIDIA/nccl/pull/1311",
        job=data_parallel(3),
        expected=ExpectedVerdict(
            layers=("fabric", "host"),
            conditions=("hung", "dead", "starting", "waiting"),
            ranks=frozenset({2}),
            node="node-2",
            remedy=(*NETWORK, r"lost|silent"),
            misleading=MISLEADING,
        ),
        inject=lambda job: take_link_down(job, 2),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-partition-of-two-nodes",
        family="network",
        summary="A firewall drops all packets between node-1 and node-2; both still reach node-0.",
        source="https://github.com/NVIDIA/nccl/issues/706",
        job=data_parallel(3),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("hung", "dead"),
            ranks=frozenset({1, 2}),
            remedy=(*NETWORK, r"collective|firewall|peer"),
            misleading=MISLEADING,
        ),
        inject=_partition,
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-one-slow-link",
        family="network",
        summary="The link of node-1 drops to 3 Mbit/s; all ranks wait for its part of every collective.",
        source="https://github.com/deepspeedai/DeepSpeed/issues/1617",
        job=data_parallel(3),
        expected=ExpectedVerdict(
            layers=("fabric",),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=NETWORK,
            misleading=MISLEADING,
        ),
        inject=lambda job: limit_link(job, 1, "3mbit"),
        judge_seconds=40,
        needs=(*NEEDS, RATE),
    ),
    LiveFault(
        name="network-slow-between-nodes",
        family="network",
        summary="The network between two nodes has 3 Mbit/s in both directions instead of gigabits.",
        source="https://github.com/mlfoundations/open_clip/issues/466",
        job=data_parallel(2),
        expected=ExpectedVerdict(
            layers=("fabric",), conditions=("slow",), ranks=frozenset(), remedy=NETWORK, misleading=MISLEADING
        ),
        inject=_slow_everywhere,
        judge_seconds=40,
        needs=(*NEEDS, RATE),
    ),
    LiveFault(
        name="network-packet-loss",
        family="network",
        summary="The cable of node-1 loses a fifth of its packets; TCP retransmits them.",
        source="https://github.com/NVIDIA/nccl/issues/306",
        job=data_parallel(3),
        expected=ExpectedVerdict(
            layers=("fabric",),
            conditions=("slow", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=NETWORK,
            misleading=MISLEADING,
        ),
        inject=lambda job: lose_packets(job, 1, 0.2),
        judge_seconds=40,
        needs=(*NEEDS, "kernel:htb default 1"),
    ),
    LiveFault(
        name="network-delay",
        family="network",
        summary="Packets between two nodes arrive 60 ms late; every small message of a step pays for it.",
        source="https://github.com/NVIDIA/nccl/issues/651",
        job=data_parallel(2),
        expected=ExpectedVerdict(
            layers=("fabric",), conditions=("slow",), ranks=frozenset(), remedy=NETWORK, misleading=MISLEADING
        ),
        inject=_delay,
        judge_seconds=40,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-connections-reset",
        family="network",
        summary="A firewall forgets its connections; those of rank 1 are reset in the middle of a collective.",
        source="https://github.com/NVIDIA/nccl/issues/193",
        job=data_parallel(2),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("dead",),
            ranks=None,
            remedy=(*NETWORK, r"connection|reset|peer|collective"),
            misleading=MISLEADING,
        ),
        inject=lambda job: reset_connections(job, 1, job.pid(1)),
        needs=(*NEEDS, "ss"),
    ),
    LiveFault(
        name="network-rendezvous-port-blocked",
        family="network",
        summary="A firewall on node-1 drops packets to a script's rendezvous port; its ranks never find each other.",
        source="https://github.com/pytorch/pytorch/issues/52848",
        job=JobRecipe(
            kind="command",
            keys=SCRIPT,
            program="network",
            env={"RENDEZVOUS_PORT": PORT},
            network=True,
            wrap=("env", f"{BLOCKED_VARIABLE}=1:{PORT}", *WRAP),
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("starting", "hung", "dead"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*NETWORK, r"rendezvous|firewall|\bport\b|connect|init_process_group|store"),
            misleading=MISLEADING,
        ),
        onset="start",
        judge_seconds=90,
        needs=(*NEEDS, "kernel:htb default 1"),
    ),
    LiveFault(
        name="network-wrong-interface",
        family="network",
        summary="The job sets GLOO_SOCKET_IFNAME to an interface that no node has; no rank can start.",
        source="https://github.com/aws-samples/aws-do-eks/pull/51",
        job=JobRecipe(
            kind="command", keys=SCRIPT, program="network", env={"GLOO_SOCKET_IFNAME": "eth7"}, network=True, wrap=WRAP
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"GLOO_SOCKET_IFNAME|eth7|interface|find address",),
            misleading=MISLEADING,
        ),
        onset="start",
        judge_seconds=90,
        needs=NEEDS,
    ),
)
