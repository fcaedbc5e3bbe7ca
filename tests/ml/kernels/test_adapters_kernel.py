"""Every token gets its own adapter and no other's, in plain torch and in the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from craton.ml.kernels.serving import add_adapters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 3


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for the adapter that is infinite
@pytest.mark.parametrize("fused", [False, True], ids=["twin", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("parts", "rank", "columns", "outs"), [(1, 4, 40, 50), (3, 6, 1100, 130)])
def test_each_token_has_its_own(
    fused: bool, dtype: torch.dtype, parts: int, rank: int, columns: int, outs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fused:
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: fused)
    generator = torch.Generator().manual_seed(0)
    width = parts * SLOTS * rank
    x, a, b, before = (
        (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(DEVICE, dtype)
        for size in ((5, columns), (width, columns), (outs, width), (5, outs))
    )
    of_tokens = torch.tensor([2, -1, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    a.view(parts, SLOTS, rank, columns)[:, 1] = torch.inf  # which reaches the last token alone
    columns_slot = torch.arange(SLOTS, device=DEVICE).repeat_interleave(rank)
    absent = of_tokens.unsqueeze(1) != columns_slot
    found = add_adapters(before.clone(), x, a, b, of_tokens, absent, SLOTS, rank)
    wanted = before.double()
    for token, slot in enumerate(of_tokens.tolist()[:4]):
        if slot >= 0:
            own_a = a.view(parts, SLOTS, rank, columns)[:, slot].reshape(parts * rank, columns).double()
            own_b = b.view(outs, parts, SLOTS, rank)[:, :, slot].reshape(outs, parts * rank).double()
            wanted[token] += own_b @ (own_a @ x[token].double())
    tolerance = 1e-5 if dtype is torch.float32 else 3e-3
    torch.testing.assert_close(found[:4].double(), wanted[:4], rtol=0, atol=tolerance)
    assert torch.equal(found[1], before[1])
    assert not found[4].isfinite().all()
