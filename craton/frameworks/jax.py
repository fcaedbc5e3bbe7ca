"""jax.distributed.initialize(): the coordinator's address is an environment variable that it reads by itself.

The number of processes and the number of this one have none, and must be handed to it: otherwise it takes Slurm's,
where there is one agent a node. RANK and WORLD_SIZE have them:

    jax.distributed.initialize(num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]))
"""

from __future__ import annotations


def jax_environment(one_gpu_each: bool = False) -> dict[str, str]:
    """`one_gpu_each`: a process sees only the GPU of its own number, as with `processes: gpu`."""
    environment = {"JAX_COORDINATOR_ADDRESS": "{master_address}:{master_port}"}
    if one_gpu_each:
        environment["JAX_LOCAL_DEVICE_IDS"] = "{local_rank}"
    return environment
