"""Faults of the network between nodes, second set: paths, directions, sizes of packets, names, ports, interfaces."""

from __future__ import annotations

from typing import Any

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.node_network import WRAP, address
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.system_injections import (
    drop_large_packets,
    forget_connections,
    limit_path,
    limit_receiving,
    upload,
)

NEEDS = ("root", "ip", "nsenter", "tc")
FILTER = "kernel:clsact"
LIMIT = "kernel:htb default 1"
NETWORK = (r"network|link|interface|fabric|bandwidth|packet|retransmi|reach|route|path|\bMTU\b",)
CONNECT = (r"connect|rendezvous|firewall|\bports?\b|init_process_group|store|peer|address",)
MISLEADING = (r"add memory|out of memory|file system|learning rate",)
PROGRESS = {"progress": {"pattern": "step {step} loss {loss}", "hang": "10x"}}
MODEL = {"experts": 6, "top_k": 2, "moe_ffn_hidden": 64}
SCRIPT = "exec {python} second_network.py"
OLD_ADDRESS = address(98)


def _train(nodes: int, kind: Any = "pretrain", **keys: Any) -> JobRecipe:
    shared = {"train": {"global_batch_sequences": 2 * nodes}, "checkpoint": {"peer": "off"}}
    return JobRecipe(kind=kind, nodes=nodes, keys={**shared, **keys}, network=True, wrap=WRAP)


def _script(fault: str, victim: int, nodes: int, shell: str = SCRIPT, **env: str) -> JobRecipe:
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={"command": ["/bin/sh", "-c", shell], **PROGRESS},
        program="second_network",
        fault=fault,
        victim=victim,
        env=env,
        files={f"hosts-{rank}": _hosts(OLD_ADDRESS if rank == victim else address(0)) for rank in range(nodes)},
        network=True,
        wrap=WRAP,
    )


def _hosts(trainer: str) -> str:
    return f"127.0.0.1 localhost\n{trainer} trainer-0\n"


def _limit_both_ways(job: RunningJob) -> None:
    limit_path(job, 1, 2, "400kbit")
    limit_path(job, 2, 1, "400kbit")


FAULTS = (
    LiveFault(
        name="network-large-packets-lost",
        family="network",
        summary="After a change of the tunnel, packets above 1,400 bytes from and to node-2 vanish; small ones pass.",
        source="https://github.com/NVIDIA/nccl/pull/2135",
        job=_train(3, layout={"fsdp": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("hung", "dead"),
            ranks=frozenset({2}),
            node="node-2",
            remedy=NETWORK,
            misleading=MISLEADING,
        ),
        inject=lambda job: drop_large_packets(job, 2, 1400),
        judge_seconds=30,
        needs=(*NEEDS, FILTER),
    ),
    LiveFault(
        name="network-slow-in-one-direction",
        family="network",
        summary="Node-0 sends at full speed, but receives at 2 Mbit/s only: a bad transceiver in one direction.",
        source="https://github.com/rackerlabs/spot/issues/40",
        job=_train(3, layout={"replicate": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric",),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=NETWORK,
            misleading=MISLEADING,
        ),
        inject=lambda job: limit_receiving(job, 0, "2mbit"),
        judge_seconds=35,
        needs=(*NEEDS, "kernel:tbf rate 1mbit burst 16kb latency 50ms"),
    ),
    LiveFault(
        name="network-one-path-slow",
        family="network",
        summary="Only the path between node-1 and node-2, two stages of a pipeline of three, has 0.4 Mbit/s.",
        source="https://github.com/NVIDIA/nccl/issues/325",
        job=_train(3, model={"layers": 3}, layout={"pp": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric",),
            conditions=("slow",),
            ranks=frozenset({1, 2}),
            remedy=NETWORK,
            misleading=MISLEADING,
        ),
        inject=_limit_both_ways,
        judge_seconds=35,
        needs=(*NEEDS, LIMIT),
    ),
    LiveFault(
        name="network-stale-hosts-file",
        family="network",
        summary="The hosts file of rank 2 has an old address of the rendezvous host, where no machine is any more.",
        source="https://github.com/pytorch/pytorch/issues/85300",
        job=_script(
            "hosts",
            victim=2,
            nodes=3,
            shell=f"exec unshare --mount /bin/sh -c 'mount --bind hosts-$RANK /etc/hosts && {SCRIPT}'",
            RENDEZVOUS_HOST="trainer-0",
        ),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("starting", "hung", "dead"),
            ranks=frozenset({2}),
            node="node-2",
            remedy=(*NETWORK, *CONNECT),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=(*NEEDS, "unshare"),
    ),
    LiveFault(
        name="network-connections-forgotten",
        family="network",
        summary="A stateful firewall forgets the connections of node-0 with node-1 without a reset; new ones work.",
        source="https://github.com/cockroachdb/cockroach/issues/13823",
        job=_train(3, model=MODEL, layout={"fsdp": 3, "ep": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("hung", "dead"),
            ranks=frozenset({0, 1}),
            remedy=(*NETWORK, r"connection|firewall|peer|collective"),
            misleading=MISLEADING,
        ),
        inject=lambda job: forget_connections(job, 1, 0),
        judge_seconds=30,
        needs=(*NEEDS, FILTER),
    ),
    LiveFault(
        name="network-link-shared-with-upload",
        family="network",
        summary="A backup on node-1 uploads with 24 streams over the node's link; the run gets a small share of it.",
        source="https://github.com/bytedance/byteps/issues/52",
        job=_train(3, kind="sft", layout={"fsdp": 3, "micro_batch": 2}),
        expected=ExpectedVerdict(
            layers=("fabric", "host"),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*NETWORK, r"traffic|upload|other process"),
            misleading=MISLEADING,
        ),
        inject=lambda job: upload(job, 1, 24, "40mbit"),
        judge_seconds=35,
        needs=(*NEEDS, "kernel:tbf rate 1mbit burst 16kb latency 50ms"),
    ),
    LiveFault(
        name="network-data-ports-filtered",
        family="network",
        summary="The firewall of node-2 lets only the rendezvous port through; connections to other ranks never open.",
        source="https://github.com/NVIDIA/nccl/issues/388",
        job=_script("filtered", victim=2, nodes=3),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("starting", "hung", "dead"),
            ranks=frozenset({2}),
            node="node-2",
            remedy=(*NETWORK, *CONNECT),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=(*NEEDS, FILTER),
    ),
    LiveFault(
        name="network-rank-on-container-bridge",
        family="network",
        summary="Rank 1 announces the address of its container bridge, which all nodes have; others cannot reach it.",
        source="https://github.com/pytorch/pytorch/issues/15592",
        job=_script("container-bridge", victim=1, nodes=3),
        expected=ExpectedVerdict(
            layers=("fabric", "collective"),
            conditions=("starting", "hung", "dead"),
            ranks=None,
            remedy=(r"10\.0\.3\.1|lxcbr0|GLOO_SOCKET_IFNAME|interface|refused|connect",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="network-ports-used-up",
        family="network",
        summary="Rank 1 never closes its connections to a metrics service until its node has no local port left.",
        source="https://github.com/mozilla/sumo/issues/2179",
        job=_script(
            "ports", victim=1, nodes=2, shell=f"sysctl -qw net.ipv4.ip_local_port_range='40000 40299' && {SCRIPT}"
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"cannot assign requested address|Errno 99|EADDRNOTAVAIL|local port|ephemeral|port range",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
)
