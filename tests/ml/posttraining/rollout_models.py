"""Small models of several families, trained for a moment, and what the training side says of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from craton.job import Job, parse_job
from craton.job.layout import Layout
from craton.job.model import MlaShape, ModelShape
from craton.ml.data import collate
from craton.ml.data.sample import window
from craton.ml.models import Decoder, DecoderConfig
from craton.ml.models.config import RoutingConfig
from craton.ml.training import Batch, build_decoder, build_optimizer
from craton.ml.training.head import log_probs
from craton.ml.training.objectives import CROSS_ENTROPY, batch_loss
from craton.ml.training.optimizer import AdamW
from craton.ml.training.parallel import Ranks, make_ranks

VOCABULARY = 96
CONFIGS = {
    "llama": DecoderConfig(ModelShape("llama", 2, 32, 64, 4, 2, 8, VOCABULARY, tied_embeddings=True)),
    "qwen": DecoderConfig(ModelShape("qwen", 2, 32, 64, 4, 2, 8, VOCABULARY, qk_norm=True), qkv_bias=True),
    "experts": DecoderConfig(
        ModelShape(
            "experts",
            2,
            32,
            64,
            4,
            2,
            8,
            VOCABULARY,
            experts=4,
            top_k=2,
            moe_ffn_hidden=32,
            shared_experts=1,
            dense_layers=1,
        ),
        routing=RoutingConfig(bias_update=0.01),
    ),
    "latent": DecoderConfig(
        ModelShape(
            "latent",
            2,
            32,
            64,
            4,
            4,
            8,
            VOCABULARY,
            mla=MlaShape(q_lora=16, kv_lora=16, qk_nope=8, qk_rope=8, v_head=8),
        )
    ),
}
LORA = "{rank: 4, alpha: 6, targets: all}"


def wide(config: DecoderConfig) -> DecoderConfig:
    """With weights that make texts of many tokens."""
    return DecoderConfig(config.shape, config.rope, config.norm_epsilon, config.qkv_bias, config.routing, 0.2)


def rollout_job(lora: str | None = None) -> Job:
    adapters = f", lora: {lora}" if lora else ""
    return parse_job(
        f"""
        name: tiny
        kind: pretrain
        model: {{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: {VOCABULARY}}}
        data: {{sequence: 32}}
        train: {{global_batch_sequences: 4, steps: 4, precision: fp32, learning_rate: 1e-2{adapters}}}
        cluster: local
        """
    )


def trained_model(
    family: str, sizes: dict[str, Any] | None = None, lora: str | None = None
) -> tuple[Decoder, AdamW, Ranks]:
    """A model, its optimizer and this rank's place in the layout."""
    job = rollout_job(lora)
    is_alone = not dist.is_initialized()
    ranks = make_ranks(
        Layout(precision="fp32", **(sizes or {})),
        torch.device("cpu"),
        0 if is_alone else dist.get_rank(),
        1 if is_alone else dist.get_world_size(),
    )
    model = build_decoder(wide(CONFIGS[family]), job, ranks)
    return model, build_optimizer(job, ranks, model), ranks


def update(model: Decoder, optimizer: AdamW, step: int) -> None:
    """One step of training on random text, without pipeline parallelism."""
    random = np.random.default_rng(step)
    rows = [window(random.integers(0, VOCABULARY, 33).astype(np.int64), np.array([11])) for _ in range(2)]
    batch = Batch.from_arrays(collate(rows))
    loss, _ = batch_loss(model, batch, CROSS_ENTROPY, batch.count)
    loss.backward()
    optimizer.step(1e-2)
    optimizer.zero_grad()


@torch.no_grad()
def trainer_logprobs(
    model: Decoder, rollouts: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
) -> list[Tensor]:
    """The training side's log-probabilities of the sampled tokens of each (prompt, sampled), packed in one row."""
    texts = [[*prompt, *sampled] for prompt, sampled in rollouts]
    ends = np.cumsum([len(text) for text in texts])
    whole = np.asarray([token for text in texts for token in text] + [0], np.int64)
    batch = Batch.from_arrays(collate([window(whole, ends[:-1])]))
    hidden = model(batch.tokens, batch.positions, batch.documents)
    values = log_probs(hidden.flatten(0, 1) / temperature, model.head_weight, batch.labels.flatten())
    return [values[end - len(sampled) - 1 : end - 1] for end, (_, sampled) in zip(ends.tolist(), rollouts, strict=True)]
