"""One decoder for every family: what differs between them is its config.

A block hands on the residual stream and what is still to be added to it, so that addition and the next norm are one
pass over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from craton.ml.kernels import Documents, add_norm
from craton.ml.models.attention import Attention
from craton.ml.models.config import DecoderConfig
from craton.ml.models.mla import LatentAttention
from craton.ml.models.mlp import Mlp
from craton.ml.models.moe import MoE
from craton.ml.models.rope import rope_tables


class Block(nn.Module):
    """Attention and MLP, each behind its norm. (residual, delta) → (residual, delta)."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        shape = config.shape
        self.epsilon = config.norm_epsilon
        window = shape.sliding_window if index in sliding_layers(config) else 0
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=config.norm_epsilon)
        self.attention = Attention(config, window) if shape.mla is None else LatentAttention(config)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=config.norm_epsilon)
        has_experts = shape.is_moe and index >= shape.dense_layers
        self.mlp = MoE(config) if has_experts else Mlp(shape.hidden, shape.ffn_hidden)

    @property
    def has_own_kernels(self) -> bool:
        """Whether the fused kernels cover all of it: plain grouped-query attention and a dense MLP."""
        return isinstance(self.attention, Attention) and self.attention.q_norm is None and isinstance(self.mlp, Mlp)

    def forward(
        self, residual: Tensor, delta: Tensor | None, rope: tuple[Tensor, Tensor], documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        residual, normed = add_norm(residual, delta, self.attention_norm.weight, self.epsilon)
        attended = self.attention(normed, rope, documents)
        residual, normed = add_norm(residual, attended, self.mlp_norm.weight, self.epsilon)
        return residual, self.mlp(normed)


class Decoder(nn.Module):
    """tokens → the hidden state after the last norm; `head_weight` turns it into logits."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=config.norm_epsilon)
        self.head = None if shape.tied_embeddings else nn.Linear(shape.hidden, shape.vocab, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary, hidden]; the embedding itself where the two are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Documents | Tensor | None = None
    ) -> Tensor:
        """tokens [rows, sequence] → [rows, sequence, hidden]."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        rope = self.rope(positions)
        documents = Documents.of(documents)
        residual: Tensor = self.embedding(tokens)
        delta = None
        for block in self.blocks:
            residual, delta = block(residual, delta, rope, documents)
        return add_norm(residual, delta, self.norm.weight, self.config.norm_epsilon)[1]

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of cosines and sines for these positions, fp32."""
        shape = self.config.shape
        head_dim = shape.mla.qk_rope if shape.mla else shape.head_dim
        return rope_tables(positions, head_dim, self.config.rope)

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> None:
        """Normal weights of the config's width, those that write to the residual stream narrower by √(2 · layers)
        (GPT-2, section 2.3); norms one, biases zero. The same for every sharding, on one kind of device."""
        width = self.config.initializer_range
        narrow = width / (2 * self.config.shape.layers) ** 0.5
        for index, (name, parameter) in enumerate(self.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                writes_residual = name.endswith(("output.weight", "down.weight", "experts.down"))
                fill_normal(parameter, narrow if writes_residual else width, seed * 1_000_003 + index)
        for name, buffer in self.named_buffers():
            if name.endswith("router_bias"):
                buffer.zero_()


def sliding_layers(config: DecoderConfig) -> range:
    """Layers that see only a window: with all or none it is plain; some means the last ones, as Qwen has it."""
    shape = config.shape
    return range(shape.layers - shape.sliding_layers, shape.layers)


def fill_normal(parameter: Tensor, width: float, seed: int) -> None:
    """Fills a tensor, or the local part of a sharded one, with the numbers that the whole would get."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    def whole(device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.empty(parameter.shape, dtype=torch.float32, device=device).normal_(0.0, width, generator=generator)

    if isinstance(parameter, DTensor):
        device = parameter.to_local().device
        part = distribute_tensor(whole(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(whole(parameter.device))
