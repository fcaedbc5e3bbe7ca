"""Mixture of experts: every token goes to a few experts, and to the shared ones.

Tokens are sorted by expert and multiplied in one grouped product: none is dropped, and no number leaves the device.
`Experts.loop` is the same in plain PyTorch: what the grouped product is tested against, and what runs where its
alignment rule (rows of 16 bytes) does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear

from craton.ml.kernels import reference, swiglu, swiglu_backward
from craton.ml.models.config import DecoderConfig, RoutingConfig
from craton.ml.models.mlp import Mlp


class MoE(nn.Module):
    """The MLP of a layer with experts.

    `aux_loss` is the weighted balancing loss of the last forward pass in training, None where there is none.
    """

    router_bias: Tensor | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        shape = config.shape
        self.routing = config.routing
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape.experts, shape.hidden, shape.moe_ffn_hidden)
        self.shared = Mlp(shape.hidden, shape.shared_experts * shape.moe_ffn_hidden) if shape.shared_experts else None
        biased = self.routing.scoring == "sigmoid" or self.routing.bias_update > 0
        self.register_buffer("router_bias", torch.zeros(shape.experts) if biased else None)
        self.expert_load: Tensor | None = None  # tokens of each expert since the last update of the bias
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] → the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        # fp32: a rounded score flips choices, and costs next to nothing to avoid
        logits = linear(tokens.float(), self.router.weight.float())  # [tokens, experts]
        scores = logits.sigmoid() if self.routing.scoring == "sigmoid" else logits.softmax(-1)
        weights, chosen = route(scores, self.router_bias, self.top_k, self.routing)
        order, inverse, ends = sort_by_expert(chosen, scores.shape[-1])
        outputs = self.experts(_Dispatch.apply(tokens, order, inverse, self.top_k), ends)
        outputs = _Permute.apply(outputs, inverse, order).view(len(tokens), self.top_k, -1)
        y = torch.bmm(weights.to(outputs.dtype).unsqueeze(1), outputs).squeeze(1)
        if self.shared is not None:
            y = y + self.shared(tokens)
        self._record(scores, ends)
        return y.view_as(x)

    @torch.no_grad()
    def update_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """After a step: overloaded experts become less likely, idle ones more (arXiv:2408.15664, algorithm 1)."""
        if self.expert_load is None or self.router_bias is None:
            return
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.expert_load, group=group)
        error = self.expert_load.mean() - self.expert_load
        self.router_bias += self.routing.bias_update * error.sign()
        self.expert_load.zero_()

    def _record(self, scores: Tensor, ends: Tensor) -> None:
        self.aux_loss = None
        if not self.training:
            return
        counts = ends.diff(prepend=ends.new_zeros(1)).float()
        if self.routing.bias_update:
            # A recomputed forward counts twice, but every expert alike: only the sign of the difference is used.
            self.expert_load = counts if self.expert_load is None else self.expert_load + counts
        if self.routing.auxiliary_loss:
            self.aux_loss = self.routing.auxiliary_loss * balance_loss(scores, counts)

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """The bias stays fp32 when the weights do not: its steps are below what bf16 can add."""
        super()._apply(function, recurse)
        if self.router_bias is not None:
            self.router_bias = self.router_bias.float()
        return self


class Experts(nn.Module):
    """Gated MLPs of equal size, weights stacked: gate and up [experts, ffn, hidden], down [experts, hidden, ffn]."""

    def __init__(self, experts: int, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn_hidden))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [pairs, hidden] sorted by expert; `ends` int32 [experts], where each expert's rows end."""
        sizes = (x.shape[-1], self.gate.shape[1])
        if any(size * x.element_size() % 16 for size in sizes):
            return self.loop(x, ends)
        weights = tuple(weight.to(x.dtype) for weight in (self.gate, self.up, self.down))
        if not torch.compiler.is_compiling() or x.dtype is not torch.bfloat16:  # it is traced in bf16 only
            out: Tensor = _grouped_mlp(x, *weights, ends)
            return out
        gate, up, down = (weight.transpose(-2, -1) for weight in weights)
        product = reference.swiglu(grouped_mm(x, gate, offs=ends), grouped_mm(x, up, offs=ends))
        return grouped_mm(product, down, offs=ends)

    def loop(self, x: Tensor, ends: Tensor) -> Tensor:
        """One expert after the other. Waits for the device: the sizes must be known here."""
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        outputs = [
            linear(reference.swiglu(linear(part, gate), linear(part, up)), down)
            for part, gate, up, down in zip(x.split(counts), self.gate, self.up, self.down, strict=True)
        ]
        return torch.cat(outputs)


def route(scores: Tensor, bias: Tensor | None, top_k: int, routing: RoutingConfig) -> tuple[Tensor, Tensor]:
    """scores [tokens, experts] → weights and chosen experts, [tokens, top_k]. The bias sways the choice only."""
    choice = scores.detach() if bias is None else scores.detach() + bias
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        # a group is worth its best two experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
        worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool)
        kept.scatter_(-1, worth.topk(routing.top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if routing.normalize_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.routed_scale, chosen


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the flattened [tokens, top_k] pairs: their order by expert, the way back, and where each expert's end."""
    sorted_experts, order = chosen.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(experts, device=chosen.device)
    return order, inverse, torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)


def balance_loss(scores: Tensor, counts: Tensor) -> Tensor:
    """experts · Σ share of tokens · mean probability (arXiv:2101.03961, equations 4 to 6); top_k when all are alike."""
    probabilities = scores / scores.sum(-1, keepdim=True)
    tokens, experts = scores.shape
    return experts * (counts.detach() / tokens * probabilities.mean(0)).sum()


class _Dispatch(torch.autograd.Function):
    """Rows of tokens, repeated and sorted by expert. Its gradient gathers through the inverse: no atomic adds, so
    it is the same every time."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return tokens[order // top_k]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """x[order], with the gradient gathered through the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


@torch.compiler.disable
def _grouped_mlp(*inputs: Tensor) -> Tensor:
    out: Tensor = _GroupedMlp.apply(*inputs)
    return out


class _GroupedMlp(torch.autograd.Function):
    """Every expert's gated MLP on its rows. Keeps input, gate and up; the product is made again for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
        gated = grouped_mm(x, gate.transpose(-2, -1), offs=ends)
        lifted = grouped_mm(x, up.transpose(-2, -1), offs=ends)
        ctx.save_for_backward(x, gated, lifted, gate, up, down, ends)
        return grouped_mm(swiglu(gated, lifted), down.transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gated, lifted, gate, up, down, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        product = grouped_mm(gradient, down, offs=ends)  # its gradient first, then itself
        product, gated, lifted = swiglu_backward(gated, lifted, product)

        def of_weight(rows: Tensor, inputs: Tensor, is_needed: bool) -> Tensor | None:
            return grouped_mm(rows.t(), inputs, offs=ends) if is_needed else None

        needs_x, needs_gate, needs_up, needs_down, _ = ctx.needs_input_grad
        grad_down = of_weight(gradient, product, needs_down)
        del product
        grad_x = grouped_mm(gated, gate, offs=ends).add_(grouped_mm(lifted, up, offs=ends)) if needs_x else None
        return grad_x, of_weight(gated, x, needs_gate), of_weight(lifted, x, needs_up), grad_down, None
