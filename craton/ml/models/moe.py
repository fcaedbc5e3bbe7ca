"""Mixture of experts: every token goes to a few routed experts, and to the shared ones.

Tokens are sorted by expert and multiplied in one grouped matmul: no token is dropped, and no number leaves the device.
With expert parallelism each rank holds some whole experts, and rows travel to them and back (`dispatch`).
`Experts.loop` is the same in plain PyTorch: the reference for the grouped matmul, and the fallback where its alignment
rule (rows of 16 bytes) does not hold or there are no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import grouped_mm, linear

from craton.errors import CratonError
from craton.ml.collectives import ALONE, Connections, local, own_part
from craton.ml.kernels import reference, swiglu, swiglu_backward, weight_gradient
from craton.ml.models.config import DecoderConfig, RoutingConfig
from craton.ml.models.dispatch import Delivery, permute, repeat_tokens, rows_per_expert, sort_by_expert
from craton.ml.models.linear import Mlp


class ExpertsError(CratonError):
    """The experts cannot be distributed as the layout requires."""


class MoE(nn.Module):
    """The MLP of a layer with experts.

    `aux_weight` is the weight of the load-balancing loss in the next training forward pass: the micro-batch's share of
    the step. It only adds to the gradient; None disables it.
    """

    router_bias: Tensor | None
    expert_load: Tensor

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
        # this rank's tokens per expert since the last step: for the bias, and to notice dead experts
        self.register_buffer("expert_load", torch.zeros(shape.experts), persistent=False)
        self.aux_weight: Tensor | None = None
        self.connections: Connections = ALONE

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] → the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, weights, chosen = self.choose(tokens)
        order, inverse, ends = sort_by_expert(chosen, scores.shape[-1])
        rows = repeat_tokens(tokens, order, inverse, self.top_k)
        if self.connections.experts is None:
            shared = None if self.shared is None else self.shared(tokens)
            outputs = self.experts(rows, ends)
        else:
            delivery = Delivery(ends, len(rows), self.connections.experts)
            sent = delivery.send(rows)
            shared = None if self.shared is None else self.shared(tokens)  # overlaps with the all-to-all
            outputs = delivery.give_back(self.experts(delivery.receive(sent), delivery.ends))
        y = weighted_sum(permute(outputs, inverse, order), weights)
        if shared is not None:
            y = y + shared
        return self._balance(y, scores, ends).view_as(x)

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [tokens, hidden] → scores [tokens, experts], weights and chosen experts, both [tokens, top_k]."""
        # fp32: rounding a score can flip the choice of expert, and avoiding that costs almost nothing
        logits = linear(tokens.float(), own_part(self.router.weight).float())  # [tokens, experts]
        scores = logits.sigmoid() if self.routing.scoring == "sigmoid" else logits.softmax(-1)
        return scores, *route(scores, self.router_bias, self.top_k, self.routing)

    def mix_first(self, tokens: Tensor, weights: Tensor, chosen: Tensor, count: int) -> Tensor:
        """Return what the first `count` experts, all that this rank holds, add to the output of these tokens. Every
        shape follows from the number of tokens."""
        order, inverse, ends = sort_by_expert(chosen, count)  # rows of other experts come last, and have no ends
        outputs = self.experts(repeat_tokens(tokens, order, inverse, self.top_k), ends)
        elsewhere = torch.arange(len(outputs), device=outputs.device) >= ends[-1]  # not computed: any bits, also NaN
        outputs = outputs.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return weighted_sum(permute(outputs, inverse, order), weights)

    @torch.no_grad()
    def update_bias(self) -> None:
        """After a step, make overloaded experts less likely and idle ones more (arXiv:2408.15664, algorithm 1)."""
        if self.routing.bias_update and self.router_bias is not None:
            stage = self.connections.stage
            load = self.expert_load if stage is None else stage.sum(self.expert_load)
            self.router_bias += self.routing.bias_update * (load.mean() - load).sign()
        self.expert_load.zero_()

    def _balance(self, y: Tensor, scores: Tensor, ends: Tensor) -> Tensor:
        """Count the chosen experts for the bias; add the gradient of the load-balancing loss to that of y."""
        if not self.training:
            return y
        counts = rows_per_expert(ends).float()
        # A recomputed forward counts twice, but for every expert alike: only ratios and signs are used.
        self.expert_load.add_(counts)
        if not self.routing.auxiliary_loss or self.aux_weight is None:
            return y
        tokens = len(scores)
        if self.connections.rows is not None:  # other ranks hold tokens of the same samples
            counts, tokens = self.connections.rows.sum(counts), tokens * self.connections.rows.size
        loss = self.routing.auxiliary_loss * balance_loss(scores, counts, tokens)
        out: Tensor = _AddLoss.apply(y, loss, self.aux_weight)
        return out

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """Keep bias and load in fp32 when the weights are not: their steps are too small for bf16 addition."""
        super()._apply(function, recurse)
        if self.router_bias is not None:
            self.router_bias = self.router_bias.float()
        self.expert_load = self.expert_load.float()
        return self


class Experts(nn.Module):
    """Gated MLPs of equal size, weights stacked: gate and up [experts, ffn, hidden], down [experts, hidden, ffn]."""

    def __init__(self, experts: int, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn_hidden))
        self._grouped_mlp: Callable[..., Tensor] = _grouped_mlp

    def prepare_to_compile(self) -> None:
        """Call before a block with experts is compiled. Not done for all: it imports torch's compilers, for seconds."""
        self._grouped_mlp = torch.compiler.disable(_grouped_mlp)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [pairs, hidden] sorted by expert; `ends` int32 [experts], where each expert's rows end. Rows after the last
        end have no expert here, and their outputs no meaning."""
        sizes = (x.shape[-1], self.gate.shape[1])
        if len(x) == 0 or any(size * x.element_size() % 16 for size in sizes):  # there may be no rows from any rank
            return self.loop(x, ends)
        parameters = self.gate, self.up, self.down
        if not torch.compiler.is_compiling() or x.dtype is not torch.bfloat16:  # torch can trace it in bf16 only
            return self._grouped_mlp(x, *parameters, ends)
        gate, up, down = (own_part(parameter).to(x.dtype).transpose(-2, -1) for parameter in parameters)
        product = reference.swiglu(grouped_mm(x, gate, offs=ends), grouped_mm(x, up, offs=ends))
        return grouped_mm(product, down, offs=ends)

    def loop(self, x: Tensor, ends: Tensor) -> Tensor:
        """Run one expert after the other. Waits for the device, because the host needs the sizes."""
        sizes = rows_per_expert(ends).tolist()
        rest = len(x) - sum(sizes)
        *parts, _ = x.split([*sizes, rest])
        weights = zip(own_part(self.gate), own_part(self.up), own_part(self.down), strict=True)
        outputs = [
            linear(reference.swiglu(linear(part, gate), linear(part, up)), down)
            for part, (gate, up, down) in zip(parts, weights, strict=True)
        ]
        return torch.cat([*outputs, x.new_zeros(rest, x.shape[-1])])


def cut_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep only this rank's share of whole experts."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        for name, parameter in list(experts.named_parameters(recurse=False)):
            if parameter.shape[0] % ranks:
                raise ExpertsError(
                    f"{parameter.shape[0]} experts cannot be distributed over ep {ranks}; ep must divide them"
                )
            own = parameter.detach().chunk(ranks)[rank].clone()
            cut = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def route(scores: Tensor, bias: Tensor | None, top_k: int, routing: RoutingConfig) -> tuple[Tensor, Tensor]:
    """scores [tokens, experts] → weights and chosen experts, [tokens, top_k]. The bias only affects the choice."""
    choice = scores.detach() if bias is None else scores.detach() + bias
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        # A group's score is that of its best expert (DeepSeek-V2, arXiv:2405.04434, section 2.2.2), or the sum of its
        # best two (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        best = 1 if routing.scoring == "softmax" else 2
        worth = grouped.topk(min(best, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool)
        kept.scatter_(-1, worth.topk(routing.top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if routing.normalize_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.routed_scale, chosen


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [tokens · top_k, hidden] in the order of the tokens, weights [tokens, top_k] → [tokens, hidden]."""
    outputs = outputs.view(*weights.shape, -1)
    return torch.bmm(weights.to(outputs.dtype).unsqueeze(1), outputs).squeeze(1)


def balance_loss(scores: Tensor, counts: Tensor, tokens: int) -> Tensor:
    """Return experts · Σ share of tokens · mean probability (arXiv:2101.03961, equations 4 to 6); top_k if balanced.

    `counts` cover all `tokens` of the micro-batch, `scores` only this rank's part of them. The losses of all parts add
    up to that of the whole, and so do their gradients.
    """
    probabilities = scores / scores.sum(-1, keepdim=True)
    return scores.shape[-1] * (counts.detach() / tokens * (probabilities.sum(0) / tokens)).sum()


class _AddLoss(torch.autograd.Function):
    """Return y unchanged; the backward pass adds the gradient of weight · loss, as if it were part of the objective."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
        # Not a saved tensor: activation checkpointing would recompute it, with the weight of another micro-batch.
        ctx.weight = weight.to(loss.dtype)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, ctx.weight, None


def _grouped_mlp(*inputs: Tensor) -> Tensor:
    out: Tensor = _GroupedMlp.apply(*inputs)
    return out


class _GroupedMlp(torch.autograd.Function):
    """Every expert's gated MLP on its rows. Keeps input, gate and up; recomputes their product for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
        ctx.parameters = gate, up, down
        gate, up, down = _weights(ctx.parameters, x.dtype)
        gated = grouped_mm(x, gate.transpose(-2, -1), offs=ends)
        lifted = grouped_mm(x, up.transpose(-2, -1), offs=ends)
        ctx.save_for_backward(x, gated, lifted, ends)
        return grouped_mm(swiglu(gated, lifted), down.transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gated, lifted, ends = ctx.saved_tensors
        gate, up, down = _weights(ctx.parameters, x.dtype)
        gradient = gradient.contiguous()
        product = grouped_mm(gradient, down, offs=ends)  # its gradient first, then itself
        product, gated, lifted = swiglu_backward(gated, lifted, product)

        def of_weight(parameter: Tensor, rows: Tensor, inputs: Tensor) -> Tensor | None:
            return weight_gradient(parameter, lambda: grouped_mm(rows.t(), inputs, offs=ends).to(parameter.dtype))

        of_gate, of_up, of_down = ctx.parameters
        grad_down = of_weight(of_down, gradient, product)
        del product
        needs_x = ctx.needs_input_grad[0]
        grad_x = grouped_mm(gated, gate, offs=ends).add_(grouped_mm(lifted, up, offs=ends)) if needs_x else None
        return grad_x, of_weight(of_gate, gated, x), of_weight(of_up, lifted, x), grad_down, None


def _weights(parameters: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(local(parameter).to(dtype) for parameter in parameters)
