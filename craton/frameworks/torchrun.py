"""torchrun, once a node. Its own restarts stay off (its default): the agents start a whole generation instead."""

from __future__ import annotations

from collections.abc import Sequence


def torchrun_command(script: Sequence[str], processes_per_node: int | None = None) -> list[str]:
    """torchrun for a script and its arguments, with a process for each GPU of a node unless a number is given."""
    return [
        "torchrun",
        "--nnodes={num_nodes}",
        f"--nproc-per-node={processes_per_node or '{gpus_per_node}'}",
        "--node-rank={node_rank}",
        "--master-addr={master_address}",
        "--master-port={master_port}",
        *script,
    ]
