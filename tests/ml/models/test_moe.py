"""Experts: the grouped product against a plain loop, the choice of experts, and their balance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from gang import Gang
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from craton.job.model import ModelShape
from craton.ml.collectives import Connections, Peers
from craton.ml.kernels import LateGradients, put_off
from craton.ml.models import DecoderConfig, cut_experts
from craton.ml.models.config import RoutingConfig
from craton.ml.models.moe import ExpertsError, MoE, balance_loss, route

_SHAPE = ModelShape(
    name="tiny",
    layers=2,
    hidden=32,
    ffn_hidden=64,
    heads=2,
    kv_heads=2,
    head_dim=16,
    vocab=64,
    experts=8,
    top_k=3,
    moe_ffn_hidden=16,
    shared_experts=1,
)


def _moe(routing: RoutingConfig, **shape: int) -> MoE:
    module = MoE(DecoderConfig(replace(_SHAPE, **shape), routing=routing))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        if module.router_bias is not None:
            module.router_bias.uniform_(-0.3, 0.3, generator=generator)
    return module


def _tokens(count: int = 40) -> Tensor:
    return torch.randn(count, _SHAPE.hidden, generator=torch.Generator().manual_seed(2))


def _plain(module: MoE, x: Tensor) -> Tensor:
    """Every expert on every token, then the sum of the chosen ones."""
    logits = x @ module.router.weight.T
    scores = logits.sigmoid() if module.routing.scoring == "sigmoid" else logits.softmax(-1)
    weights, chosen = route(scores, module.router_bias, module.top_k, module.routing)
    share = torch.zeros_like(scores).scatter(1, chosen, weights)  # [tokens, experts]
    experts = module.experts
    gated = torch.einsum("th,efh->tef", x, experts.gate)
    lifted = torch.einsum("th,efh->tef", x, experts.up)
    outputs = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gated) * lifted, experts.down)
    y = torch.einsum("te,teh->th", share, outputs)
    return y if module.shared is None else y + module.shared(x)


@pytest.mark.parametrize(
    "routing",
    [
        RoutingConfig(),
        RoutingConfig(normalize_top_k=False),
        RoutingConfig(scoring="sigmoid", routed_scale=2.5, groups=4, top_groups=2),
    ],
    ids=["softmax", "not normalized", "sigmoid in groups"],
)
@pytest.mark.parametrize("ffn_hidden", [16, 15], ids=["grouped", "loop"])
def test_output_and_gradients_equal_those_of_every_expert_on_every_token(
    routing: RoutingConfig, ffn_hidden: int
) -> None:
    module = _moe(routing, moe_ffn_hidden=ffn_hidden)
    x = _tokens().requires_grad_()
    inputs = [x, *module.parameters()]
    got, wanted = module(x), _plain(module, x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    toward = torch.randn(got.shape, generator=torch.Generator().manual_seed(3))
    for ours, plain in zip(
        torch.autograd.grad(got, inputs, toward), torch.autograd.grad(wanted, inputs, toward), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_experts_that_no_token_chose_get_no_gradient() -> None:
    module = _moe(RoutingConfig(), top_k=1)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[5] = 10.0
    module(_tokens().abs()).sum().backward()
    assert module.experts.gate.grad is not None
    assert module.experts.gate.grad[5].abs().sum() > 0
    assert module.experts.gate.grad[[0, 1, 2, 3, 4, 6, 7]].abs().sum() == 0


def test_groups_limit_the_choice() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.8, 0.7, 0.2, 0.2, 0.1, 0.1]])
    weights, chosen = route(scores, None, 2, RoutingConfig(scoring="sigmoid", groups=4, top_groups=1))
    assert sorted(chosen[0].tolist()) == [2, 3]  # the best two together, not the best one
    assert weights.sum().item() == pytest.approx(1.0)


def test_the_bias_sways_the_choice_but_not_the_weight() -> None:
    scores = torch.tensor([[0.6, 0.5, 0.1]])
    bias = torch.tensor([0.0, 0.0, 1.0])
    weights, chosen = route(scores, bias, 1, RoutingConfig(scoring="sigmoid", normalize_top_k=False))
    assert chosen.item() == 2
    assert weights.item() == pytest.approx(0.1)


def test_auxiliary_loss_is_least_when_experts_are_busy_alike() -> None:
    even = balance_loss(torch.full((8, 4), 0.25), torch.full((4,), 4.0), 8)  # two experts a token
    assert even.item() == pytest.approx(2.0)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    assert balance_loss(skewed, torch.tensor([8.0, 8.0, 0.0, 0.0]), 8).item() > 3.0


def test_auxiliary_losses_of_parts_add_up_to_that_of_the_whole() -> None:
    scores = _tokens(10)[:, :4].softmax(-1)
    counts = torch.tensor([9.0, 6.0, 4.0, 1.0])
    parts = sum(balance_loss(part, counts, 10).item() for part in (scores[:7], scores[7:]))
    assert parts == pytest.approx(balance_loss(scores, counts, 10).item())


def _router_gradient(weight: float | None, module: MoE, recompute: bool = False) -> Tensor:
    """Of the sum of all outputs and, with a weight, of the auxiliary loss."""
    module.zero_grad()
    module.aux_weight = None if weight is None else torch.tensor(weight)
    x = _tokens().requires_grad_()
    y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    module.aux_weight = torch.tensor(99.0)  # that of the next micro-batch, which a pipeline begins before this one ends
    y.sum().backward()
    assert module.router.weight.grad is not None
    return module.router.weight.grad.clone()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_auxiliary_loss_is_in_the_gradient_and_not_in_the_output(recompute: bool) -> None:
    module = _moe(RoutingConfig(auxiliary_loss=0.5))
    scores = (_tokens() @ module.router.weight.T).softmax(-1)
    chosen = route(scores, None, module.top_k, module.routing)[1]
    counts = chosen.flatten().bincount(minlength=8).float()
    loss = 0.25 * 0.5 * balance_loss(scores, counts, len(scores))
    (alone,) = torch.autograd.grad(loss, module.router.weight)
    without = _router_gradient(None, module)
    torch.testing.assert_close(_router_gradient(0.25, module, recompute) - without, alone, rtol=1e-4, atol=1e-5)
    assert alone.abs().max() > 1e-3
    torch.testing.assert_close(_router_gradient(0.25, module.eval()), without)


def _most_and_least_after(module: MoE, steps: int, x: Tensor) -> tuple[float, float]:
    for _ in range(steps):
        module(x)
        module.update_bias()
    module(x)
    assert module.expert_load is not None
    load = module.expert_load / x.shape[0] / module.top_k * module.experts.gate.shape[0]
    return load.max().item(), load.min().item()


def test_updates_of_the_bias_even_out_the_load() -> None:
    module = _moe(RoutingConfig(scoring="sigmoid", bias_update=0.02))
    x = _tokens(512)
    most, least = _most_and_least_after(module, 0, x)
    assert most > 1.4
    assert least < 0.6
    most, least = _most_and_least_after(module, 60, x)
    assert most < 1.2
    assert least > 0.8


def _bias_after_one_step() -> list[float]:
    rank = torch.distributed.get_rank()
    module = _moe(RoutingConfig(scoring="sigmoid", bias_update=0.01))
    module.connections = Connections(stage=Peers(torch.distributed.group.WORLD))
    module(_tokens(64)[rank * 32 : (rank + 1) * 32])
    module.update_bias()
    assert module.router_bias is not None
    return module.router_bias.tolist()


def test_ranks_agree_on_the_bias(gang: Gang) -> None:
    first, second = gang.run(_bias_after_one_step)
    alone = _moe(RoutingConfig(scoring="sigmoid", bias_update=0.01))
    alone(_tokens(64))
    alone.update_bias()
    assert alone.router_bias is not None
    assert first == second == alone.router_bias.tolist()


def _on_two_ranks(ffn_hidden: int, everything_to: int | None) -> tuple[Tensor, list[Tensor]]:
    """Outputs of this rank's half of the tokens, and gradients: of the half, then of the weights of its experts."""
    rank = torch.distributed.get_rank()
    module = _skewed(ffn_hidden, everything_to)
    cut_experts(module, init_device_mesh("cpu", (2,)))
    module.connections = Connections(experts=Peers(torch.distributed.group.WORLD))
    x = _tokens()[rank * 20 : (rank + 1) * 20].requires_grad_()
    y = module(x)
    (y * _tokens().flip(0)[rank * 20 : (rank + 1) * 20]).sum().backward()
    gradients = [x.grad, *(weight.grad.to_local() for weight in module.experts.parameters())]  # type: ignore[union-attr]
    return y.detach(), [gradient for gradient in gradients if gradient is not None]


def _skewed(ffn_hidden: int, everything_to: int | None) -> MoE:
    """Experts that are far from equally busy; with `everything_to` only the three from there on are busy at all."""
    module = _moe(RoutingConfig(scoring="sigmoid"), moe_ffn_hidden=ffn_hidden)
    assert module.router_bias is not None
    module.router_bias[1] += 1.0
    if everything_to is not None:
        module.router_bias[everything_to : everything_to + 3] += 10.0
    return module


@pytest.mark.parametrize("ffn_hidden", [16, 15], ids=["grouped", "loop"])
@pytest.mark.parametrize("everything_to", [None, 0, 5], ids=["uneven", "first rank alone", "second rank alone"])
def test_experts_on_two_ranks_are_the_experts_of_one(gang: Gang, ffn_hidden: int, everything_to: int | None) -> None:
    alone = _skewed(ffn_hidden, everything_to)
    x = _tokens().requires_grad_()
    y = alone(x)
    (y * _tokens().flip(0)).sum().backward()
    (first, of_first), (second, of_second) = gang.run(_on_two_ranks, ffn_hidden, everything_to)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(torch.cat((first, second)), y.detach())
    wanted = [x.grad, *(weight.grad for weight in alone.experts.parameters())]
    for one, other, whole in zip(of_first, of_second, wanted, strict=True):
        close(torch.cat((one, other)), whole)


def test_gradients_of_experts_can_be_put_off() -> None:
    at_once, late = _moe(RoutingConfig()), _moe(RoutingConfig())
    waiting = LateGradients()
    inputs = [_tokens().requires_grad_(), _tokens().requires_grad_()]
    at_once(inputs[0]).sum().backward()
    with put_off(waiting):
        late(inputs[1]).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert all(weight.grad is None for weight in late.experts.parameters())
    waiting.run()
    for weight, other in zip(at_once.experts.parameters(), late.experts.parameters(), strict=True):
        torch.testing.assert_close(other.grad, weight.grad)


def test_experts_that_ranks_cannot_share_alike_are_refused() -> None:
    mesh = SimpleNamespace(size=lambda: 3, get_local_rank=lambda: 0)
    with pytest.raises(ExpertsError, match="8 experts cannot be distributed over ep 3"):
        cut_experts(_moe(RoutingConfig()), mesh)  # type: ignore[arg-type]
