"""One decoder for every model family: families differ only by config.

A block passes on the residual stream and the delta still to be added to it, so that the addition and the next norm are
one pass over memory. With pipeline parallelism a rank keeps a few stages of the decoder; parameter names and initial
values are the same as in the whole decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from craton.ml.collectives import ALONE, Connections, gather_copies, local, own_part, own_slices
from craton.ml.kernels import Documents, add_norm
from craton.ml.kernels.serving import Past
from craton.ml.models.attention import Attention
from craton.ml.models.config import DecoderConfig
from craton.ml.models.linear import Embedding, Linear, Mlp, Norm
from craton.ml.models.mla import LatentAttention
from craton.ml.models.moe import MoE
from craton.ml.models.rope import rope_tables

SCORE = "score.weight"


class Block(nn.Module):
    """Attention and MLP, each behind its norm. (residual, delta) → (residual, delta)."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        shape = config.shape
        self.epsilon = config.norm_epsilon
        window = shape.sliding_window if index in sliding_layers(config) else 0
        self.attention_norm = Norm(shape.hidden, eps=config.norm_epsilon)
        self.attention = Attention(config, window, index) if shape.mla is None else LatentAttention(config, index)
        self.mlp_norm = Norm(shape.hidden, eps=config.norm_epsilon)
        has_experts = shape.is_moe and index >= shape.dense_layers
        self.mlp = MoE(config) if has_experts else Mlp(shape.hidden, shape.ffn_hidden)

    @property
    def has_own_kernels(self) -> bool:
        """Whether the fused kernels cover the whole block: grouped-query attention and a dense MLP. The routing of
        experts is plain PyTorch."""
        return isinstance(self.attention, Attention) and self.attention.has_own_kernels and isinstance(self.mlp, Mlp)

    def forward(
        self,
        residual: Tensor,
        delta: Tensor | None,
        rope: tuple[Tensor, Tensor],
        documents: Documents | Past | None = None,
    ) -> tuple[Tensor, Tensor]:
        residual, normed = add_norm(residual, delta, own_part(self.attention_norm.weight), self.epsilon)
        attended = self.attention(normed, rope, documents)
        residual, normed = add_norm(residual, attended, own_part(self.mlp_norm.weight), self.epsilon)
        return residual, self.mlp(normed)


@dataclass(frozen=True)
class Stage:
    """Consecutive layers: the first stage begins with the embedding, the last one ends with the norm."""

    layers: range
    is_first: bool = True
    is_last: bool = True


class Decoder(nn.Module):
    """tokens → the hidden state after the last norm; `head_weight` turns it into logits, `scores` into one number per
    token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.connections: Connections = ALONE
        shape = config.shape
        self.embedding = Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(shape.layers))
        self.norm = Norm(shape.hidden, eps=config.norm_epsilon)
        has_own_head = config.has_token_head and not shape.tied_embeddings
        self.head = Linear(shape.hidden, shape.vocab, cut=0) if has_own_head else None
        self.score = Linear(shape.hidden, 1) if config.has_score else None
        self.stages: tuple[Stage, ...] = (Stage(range(shape.layers)),)

    def keep_stages(self, stages: Sequence[Stage]) -> None:
        """Drop everything that these stages do not use. The last stage also keeps a tied embedding, as its head."""
        self.stages = tuple(stages)
        kept = {layer for stage in stages for layer in stage.layers}
        for name, _ in list(self.blocks.named_children()):
            if int(name) not in kept:
                delattr(self.blocks, name)
        has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
        if not (has_first or (has_last and self.config.has_tied_head)):
            del self.embedding
        if not has_last:
            del self.norm
            self.head = self.score = None

    @property
    def copies(self) -> frozenset[str]:
        """Parameters that another stage also keeps and counts: the tied embedding where it is only the head."""
        is_copy = self.config.has_tied_head and not any(stage.is_first for stage in self.stages)
        return frozenset(("embedding.weight",)) if is_copy and self.stages[-1].is_last else frozenset()

    def keeps(self, name: str) -> bool:
        """Whether a parameter or buffer of the whole decoder belongs to the stages that this rank keeps."""
        try:
            self.get_submodule(name.rpartition(".")[0])
        except AttributeError:
            return False
        return True

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary, hidden]; the embedding itself if the two are tied."""
        assert self.config.has_token_head, "a reward model has no logits"
        return self.embedding.weight if self.head is None else self.head.weight

    def scores(self, hidden: Tensor) -> Tensor:
        """Final hidden states, or this tensor-parallel rank's share of them → fp32 scores of all tokens, [tokens]."""
        assert self.score is not None, "the decoder has no scalar head"
        own = (hidden.flatten(0, -2).float() @ own_part(self.score.weight).float().t()).squeeze(-1)
        tensor = self.connections.tensor
        return own if tensor is None else gather_copies(own, tensor)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor | None = None,
        documents: Documents | Tensor | None = None,
        stage: int = 0,
    ) -> Tensor:
        """tokens [rows, sequence] → [rows, sequence, hidden], or with tensor parallelism this rank's share, [rows ·
        sequence / tp, hidden]. In a pipeline, run one of the kept `stages`: its inputs are the outputs of the stage
        before."""
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape)
        rope = self.rope(positions)
        documents = Documents.of(documents)
        here = self.stages[stage]
        residual: Tensor = self.embedding(inputs) if here.is_first else inputs
        delta = None
        for layer in here.layers:
            residual, delta = self.blocks.get_submodule(str(layer))(residual, delta, rope, documents)
        if not here.is_last:
            assert delta is not None, "a stage has at least one layer"
            added: Tensor = residual + delta
            return added
        return add_norm(residual, delta, own_part(self.norm.weight), self.config.norm_epsilon)[1]

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 tables of cosines and sines for these positions."""
        shape = self.config.shape
        head_dim = shape.mla.qk_rope if shape.mla else shape.head_dim
        return rope_tables(positions, head_dim, self.config.rope, context=self.connections.context)

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> None:
        """Initialize normal weights with the config's standard deviation; layers that write to the residual stream are
        narrower by √(2 · layers) (GPT-2, section 2.3); norms one, biases and the scalar head zero. The same for every
        sharding on one device type."""
        width = self.config.initializer_range
        narrow = width / (2 * self.config.shape.layers) ** 0.5
        indices = self._indices()
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                local(parameter).fill_(1.0)
            elif name.endswith("bias") or name == SCORE:
                local(parameter).zero_()
            else:
                writes_residual = name.endswith(("output.weight", "down.weight", "experts.down"))
                fill_normal(parameter, narrow if writes_residual else width, seed * 1_000_003 + indices[name])
        for name, buffer in self.named_buffers():
            if name.endswith("router_bias"):
                buffer.zero_()

    def _indices(self) -> dict[str, int]:
        """The index of each parameter in the whole decoder."""
        with torch.device("meta"):
            whole_decoder = self if len(self.blocks) == self.config.shape.layers else Decoder(self.config)
        return {name: index for index, (name, _) in enumerate(whole_decoder.named_parameters())}


def sliding_layers(config: DecoderConfig) -> range:
    """Return the layers with a sliding window. If only some layers have one, they are the last ones, as in Qwen."""
    shape = config.shape
    return range(shape.layers - shape.sliding_layers, shape.layers)


def fill_normal(parameter: Tensor, width: float, seed: int) -> None:
    """Fill a tensor, or the local part of a sharded one, with the values that the whole tensor would get."""
    part = local(parameter)
    generator = torch.Generator(part.device).manual_seed(seed)
    numbers = torch.empty(parameter.shape, dtype=torch.float32, device=part.device)
    part.copy_(numbers.normal_(0.0, width, generator=generator)[own_slices(parameter)])
