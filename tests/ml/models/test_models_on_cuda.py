"""On a GPU the grouped and fused paths compute what the CPU's do, and a forward pass never waits for the device."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from craton.job.model import MlaShape, ModelShape
from craton.ml.kernels import Documents
from craton.ml.models import Decoder, DecoderConfig
from craton.ml.models.config import RoutingConfig
from craton.ml.models.moe import MoE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

_SHAPE = ModelShape(
    name="small",
    layers=2,
    hidden=256,
    ffn_hidden=512,
    heads=4,
    kv_heads=4,
    head_dim=192,
    vocab=512,
    mla=MlaShape(q_lora=64, kv_lora=64, qk_nope=128, qk_rope=64, v_head=128),
    experts=8,
    top_k=2,
    moe_ffn_hidden=128,
    shared_experts=1,
    dense_layers=1,
)
_CONFIG = DecoderConfig(_SHAPE, routing=RoutingConfig(scoring="sigmoid", bias_update=0.01), initializer_range=0.1)
_LATENT = replace(_SHAPE, experts=0, top_k=0, shared_experts=0, dense_layers=0)
_NORMED = replace(_LATENT, mla=None, kv_heads=2, head_dim=128, qk_norm=True)


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got.float().cpu() - wanted).norm() / wanted.norm()).item()


def test_experts_in_bf16_agree_with_the_cpu_and_do_not_wait() -> None:
    reference = MoE(_CONFIG)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.05).copy_(parameter.bfloat16())
    module = copy.deepcopy(reference).to("cuda", torch.bfloat16)
    x = torch.randn(512, _SHAPE.hidden).bfloat16()
    on_device = x.cuda().requires_grad_()
    module(on_device).sum().backward()  # kernels are built here
    module.zero_grad()
    on_device.grad = None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = module(on_device)
        got.sum().backward()
        module.update_bias()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted_input = x.float().requires_grad_()
    wanted = reference(wanted_input)
    wanted.sum().backward()
    assert _relative_error(got, wanted) < 0.02
    assert wanted_input.grad is not None
    assert on_device.grad is not None
    assert _relative_error(on_device.grad, wanted_input.grad) < 0.03
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert _relative_error(ours.grad, theirs.grad) < 0.03


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [_LATENT, _NORMED], ids=["latent attention", "QK norm"])
def test_attention_agrees_with_the_cpu(shape: ModelShape, packed: bool) -> None:
    reference = Decoder(replace(_CONFIG, shape=shape))
    reference.initialize(1)
    model = copy.deepcopy(reference).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 512, (2, 64))
    positions = torch.cat([torch.arange(40), torch.arange(24)]).expand(2, -1)
    documents = (torch.arange(64) >= 40).int().expand(2, -1).contiguous() if packed else None
    wanted = reference(tokens, positions, documents)
    on_device = Documents.of(documents)
    got = model(tokens.cuda(), positions.cuda(), None if on_device is None else on_device.to("cuda"))
    assert _relative_error(got, wanted) < 0.03
    got.float().sum().backward()
    wanted.sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None and "embedding" not in name:
            assert ours.grad is not None
            assert _relative_error(ours.grad, theirs.grad) < 0.08, name
