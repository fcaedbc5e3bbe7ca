"""Hugging Face Accelerate: a config file for `accelerate launch`, and the command line that every node runs.

What differs from node to node stands in the command line, so that one file serves them all. Sharding is FSDP2; tensor
and context parallelism are its `parallelism_config` (Accelerate 1.10 and later).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from craton.frameworks.errors import FrameworkError, refuse
from craton.job.layout import Layout
from craton.yaml_text import to_yaml

PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def accelerate_config(layout: Layout, num_nodes: int) -> str:
    """The config file of a layout, as YAML."""
    refuse("Accelerate", layout, "pp", "ep")
    if layout.precision not in PRECISIONS:
        raise FrameworkError(f"Accelerate has no precision {layout.precision}; use {', '.join(PRECISIONS)}")
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if layout.world > 1 else "NO",
        "mixed_precision": PRECISIONS[layout.precision],
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
