"""veRL's Hydra overrides, for its trainer on FSDP2 with rollouts by vLLM.

What it trains on and how it is rewarded is the user's; Ray, which it runs on, is started by the command itself.
"""

from __future__ import annotations

from craton.frameworks.errors import refuse
from craton.job.layout import Layout


def verl_overrides(model: str, layout: Layout, num_nodes: int, rollout_tp: int = 1) -> list[str]:
    """`key=value` words for `python -m verl.trainer.main_ppo`: `model` is a folder or a Hub id, `rollout_tp` over how
    many GPUs each copy that samples is cut."""
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
