"""Norm and rotation of query and key heads in one Triton kernel, against plain PyTorch, run by Triton's interpreter
where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from craton.job.model import MlaShape, ModelShape
from craton.ml.kernels import reference, split_and_rotate
from craton.ml.models import Decoder, DecoderConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON = 1e-6
# The interpreter cuts to bf16 where the device rounds, so the result may be one spacing off, 2 ** -7 of a value.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
QWEN = ModelShape("small", 2, 32, 48, 4, 2, 16, 64, qk_norm=True)
pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _several_tiles_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craton.ml.kernels.triton.qk_norm.PROGRAMS_PER_PROCESSOR", 1)


def fuse(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: fused)


def relative_error(ours: Tensor, plain: Tensor) -> float:
    return ((ours.float() - plain.float()).norm() / plain.float().norm()).item()


# sequences do not divide the tile; the last one has more tiles than programs
CASES = [
    (4, 2, 16, 37, torch.float32),
    (3, 3, 64, 11, torch.float32),
    (8, 1, 128, 5, torch.float32),
    (16, 1, 32, 3, torch.bfloat16),
    (4, 2, 128, 9, torch.bfloat16),
    (2, 2, 64, 23, torch.bfloat16),
]


@pytest.mark.usefixtures("_several_tiles_per_program")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "sequence", "dtype"), CASES)
def test_split_norm_and_rotate(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, sequence: int, dtype: torch.dtype
) -> None:
    rows = 2
    qkv = torch.randn(rows, sequence, (heads + 2 * kv_heads) * head_dim, device=DEVICE) * 3
    weights = [torch.rand(head_dim, device=DEVICE) + 0.5 for _ in range(2)]
    inputs = [tensor.to(dtype).requires_grad_() for tensor in (qkv, *weights)]
    angle = torch.rand(rows, sequence, head_dim // 2, device=DEVICE) * 6
    counts = (heads, kv_heads, kv_heads)
    slopes = [torch.randn(rows, sequence, count, head_dim, device=DEVICE).to(dtype) for count in counts]
    results = []
    for fused in (True, False):
        fuse(monkeypatch, fused)
        norms = (inputs[1], inputs[2], EPSILON)
        parts = split_and_rotate(inputs[0], angle.cos(), angle.sin(), heads, kv_heads, head_dim, norms)
        results.append([*parts, *torch.autograd.grad(parts, inputs, slopes)])
    for ours, plain in zip(*results, strict=True):
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
        torch.testing.assert_close(ours, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * plain.abs().max().item())
        assert relative_error(ours, plain) < TOLERANCE[dtype] / 2


def test_plain_twin_is_the_norm_before_the_rotation() -> None:
    qkv, angle = torch.randn(2, 7, 6 * 16), torch.rand(2, 7, 8) * 6
    q_norm, k_norm = (torch.nn.RMSNorm(16, eps=EPSILON) for _ in range(2))
    torch.nn.init.uniform_(q_norm.weight)
    query, key, value = reference.split_heads(qkv, 2, 2, 16)
    wanted = (*(reference.rotate(part, angle.cos(), angle.sin()) for part in (q_norm(query), k_norm(key))), value)
    norms = (q_norm.weight, k_norm.weight, EPSILON)
    found = reference.split_and_rotate(qkv, angle.cos(), angle.sin(), 2, 2, 16, norms)
    assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))


def test_a_decoder_has_the_same_loss_and_gradients_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(DecoderConfig(QWEN, initializer_range=0.2)).to(DEVICE)
    model.initialize(1)
    tokens = torch.randint(0, QWEN.vocab, (2, 9), device=DEVICE)
    results = []
    for fused in (True, False):
        fuse(monkeypatch, fused)
        logits = model(tokens) @ model.head_weight.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
        results.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    for ours, plain in zip(*results, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "covered"),
    [
        ({"qk_norm": True}, True),
        ({"qk_norm": False}, True),
        ({"qk_norm": True, "experts": 4, "top_k": 2, "moe_ffn_hidden": 16}, False),
        ({"mla": MlaShape(q_lora=8, kv_lora=8, qk_nope=8, qk_rope=8, v_head=8)}, False),
    ],
)
def test_blocks_that_the_kernels_cover(more: dict[str, object], covered: bool) -> None:
    shape = ModelShape("small", 1, 32, 48, 4, 4, 16, 64, **more)  # type: ignore[arg-type]
    assert Decoder(DecoderConfig(shape)).blocks[0].has_own_kernels is covered
