"""Experts: the grouped product against a plain loop, the choice of experts, and their balance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gang import Gang
from torch import Tensor

from craton.job import ModelShape
from craton.ml.models import DecoderConfig, MoE, RoutingConfig
from craton.ml.models.moe import balance_loss, route

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
    even = balance_loss(torch.full((8, 4), 0.25), torch.full((4,), 4.0))  # two experts a token
    assert even.item() == pytest.approx(2.0)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    assert balance_loss(skewed, torch.tensor([8.0, 8.0, 0.0, 0.0])).item() > 3.0

    module = _moe(RoutingConfig(auxiliary_loss=0.5))
    module(_tokens())
    assert module.aux_loss is not None
    module.aux_loss.backward()
    assert module.router.weight.grad is not None
    assert module.router.weight.grad.abs().sum() > 0
    module.eval()(_tokens())
    assert module.aux_loss is None


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
