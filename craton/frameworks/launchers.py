"""How torchrun, Accelerate and veRL start processes on a node, and what JAX reads to join them.

What differs from node to node stands in the command line, so that one file serves them all. Sharding is FSDP2; tensor
and context parallelism are Accelerate's `parallelism_config` (1.10 and later). What veRL trains on and how it is
rewarded is the user's; Ray, which it runs on, is started by the command itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from craton.frameworks.errors import FrameworkError, refuse
from craton.job.layout import Layout
from craton.yaml_text import to_yaml

ACCELERATE_PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


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


def accelerate_config(layout: Layout, num_nodes: int) -> str:
    """The config file of a layout, as YAML."""
    refuse("Accelerate", layout, "pp", "ep")
    if layout.precision not in ACCELERATE_PRECISIONS:
        raise FrameworkError(f"Accelerate has no precision {layout.precision}; use {', '.join(ACCELERATE_PRECISIONS)}")
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
    """`accelerate launch` of a script and its arguments, once a node."""
    return [
        *("accelerate", "launch", "--config_file", config_file),
        *("--machine_rank", "{node_rank}"),
        *("--main_process_ip", "{master_address}", "--main_process_port", "{master_port}"),
        *script,
    ]


def jax_environment(one_gpu_each: bool = False) -> dict[str, str]:
    """`one_gpu_each`: a process sees only the GPU of its own number, as with `processes: gpu`."""
    environment = {"JAX_COORDINATOR_ADDRESS": "{master_address}:{master_port}"}
    if one_gpu_each:
        environment["JAX_LOCAL_DEVICE_IDS"] = "{local_rank}"
    return environment


def verl_overrides(model: str, layout: Layout, num_nodes: int, rollout_tp: int = 1) -> list[str]:
    """veRL's Hydra overrides, on FSDP2 with rollouts by vLLM: `key=value` words for `python -m verl.trainer.main_ppo`.
    `model` is a folder or a Hub id, `rollout_tp` over how many GPUs each copy that samples is cut."""
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
