"""How torchrun starts processes on a node, and what JAX reads to join them."""

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


def jax_environment(one_gpu_each: bool = False) -> dict[str, str]:
    """`one_gpu_each`: a process sees only the GPU of its own number, as with `processes: gpu`."""
    environment = {"JAX_COORDINATOR_ADDRESS": "{master_address}:{master_port}"}
    if one_gpu_each:
        environment["JAX_LOCAL_DEVICE_IDS"] = "{local_rank}"
    return environment
