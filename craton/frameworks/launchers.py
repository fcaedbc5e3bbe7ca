"""Launch commands for torchrun, Accelerate and veRL, and the environment for JAX.

Values that differ from node to node are in the command line, so one config file serves all nodes. Sharding is FSDP2;
tensor and context parallelism use Accelerate's `parallelism_config` (1.10 and later). veRL's data and rewards are the
user's; the command itself starts Ray, which veRL runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from craton.frameworks.errors import FrameworkError, refuse
from craton.job.layout import Layout
from craton.yaml_text import to_yaml

ACCELERATE_PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def torchrun_command(script: Sequence[str], processes_per_node: int | None = None) -> list[str]:
    """Return the torchrun command for a script and its arguments; default: one process per GPU of a node."""
    return [
        "torchrun",
        "--nnodes={num_nodes}",
        f"--nproc-per-node={processes_per_node or '{gpus_per_node}'}",
        "--node-rank={node_rank}",
        "--master-addr={master_address}",
        "--master-port={master_port}",
        *script,
    ]


def accelerate_config(layout: Layout, num_nodes: int) -> str:
    """Return Accelerate's config file for a layout, as YAML."""
    refuse("Accelerate", layout, "pp", "ep")
    if layout.precision not in ACCELERATE_PRECISIONS:
        raise FrameworkError(
            f"Accelerate does not support precision {layout.precision}; use {', '.join(ACCELERATE_PRECISIONS)}"
        )
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if layout.world > 1 else "NO",
        "mixed_precision": ACCELERATE_PRECISIONS[layout.precision],
        "num_machines": num_nodes,
        "num_processes": layout.world,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if layout.fsdp * layout.cp * layout.tp > 1:
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.replicate,
            "parallelism_config_dp_shard_size": layout.fsdp,
            "parallelism_config_tp_size": layout.tp,
            "parallelism_config_cp_size": layout.cp,
        }
    return to_yaml(config)


def accelerate_command(script: Sequence[str], config_file: str) -> list[str]:
    """Return `accelerate launch` for a script and its arguments; it runs once per node."""
    return [
        *("accelerate", "launch", "--config_file", config_file),
        *("--machine_rank", "{node_rank}"),
        *("--main_process_ip", "{master_address}", "--main_process_port", "{master_port}"),
        *script,
    ]


def jax_environment(one_gpu_each: bool = False) -> dict[str, str]:
    """With `one_gpu_each` a process sees only the GPU of its local rank, as with `processes: gpu`."""
    environment = {"JAX_COORDINATOR_ADDRESS": "{master_address}:{master_port}"}
    if one_gpu_each:
        environment["JAX_LOCAL_DEVICE_IDS"] = "{local_rank}"
    return environment


def verl_overrides(model: str, layout: Layout, num_nodes: int, rollout_tp: int = 1) -> list[str]:
    """Return veRL's Hydra overrides with FSDP2 and vLLM rollouts: `key=value` for `python -m verl.trainer.main_ppo`.
    `model` is a folder or a Hub id, `rollout_tp` the tensor-parallel size of each rollout replica."""
    refuse("veRL on FSDP", layout, "pp", "tp", "ep")
    actor = "actor_rollout_ref.actor"
    values: dict[str, object] = {
        "trainer.nnodes": num_nodes,
        "trainer.n_gpus_per_node": layout.world // num_nodes,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": layout.recompute == "full",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.fsdp_size": layout.fsdp,
        f"{actor}.fsdp_config.param_offload": False,
        f"{actor}.fsdp_config.optimizer_offload": layout.offload == "optimizer",
        f"{actor}.ulysses_sequence_parallel_size": layout.cp,
        f"{actor}.ppo_micro_batch_size_per_gpu": layout.micro_batch,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout_tp,
    }
    return [f"{key}={value}" for key, value in values.items()]
