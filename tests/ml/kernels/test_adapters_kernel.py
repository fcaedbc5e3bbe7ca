"""Every token gets its own adapter and no other's, in plain torch and in the Triton kernels."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from craton.ml.kernels.serving import SlotsOfTokens, adapted_skinny_gated, adapted_skinny_linear, add_adapters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for the adapter that is infinite


class Case:
    """Random tokens, and adapters of which slot 1 has an infinite A."""

    def __init__(self, tokens: int, columns: int, outs: tuple[int, ...], parts: int, rank: int, dtype: torch.dtype):
        self._generator, self.dtype, self.rank = torch.Generator().manual_seed(tokens), dtype, rank
        width = parts * SLOTS * rank
        self.x = self.random(tokens, columns)
        self.a = self.random(len(outs) * width, columns)
        self.b = [self.random(size, width) for size in outs]
        self.before = [self.random(tokens, size) for size in outs]
        self.a.view(-1, SLOTS, rank, columns)[:, 1] = torch.inf
        of_tokens = torch.randint(-1, SLOTS, (tokens,), dtype=torch.int32, generator=self._generator)
        of_tokens[:5] = torch.tensor([2, -1, 0, 0, 1], dtype=torch.int32)[:tokens]
        of_tokens[64:128] = -1  # a whole block without adapters
        self.of_tokens = of_tokens.to(DEVICE)

    def random(self, *size: int) -> Tensor:
        return (torch.randn(*size, generator=self._generator) * size[-1] ** -0.5).to(DEVICE, self.dtype)

    @property
    def tokens(self) -> SlotsOfTokens:
        columns_slot = torch.arange(SLOTS, device=DEVICE).repeat_interleave(self.rank)
        return SlotsOfTokens(self.of_tokens, self.of_tokens.unsqueeze(1) != columns_slot, SLOTS, self.rank)

    def added(self, which: int) -> Tensor:
        """B · A · x of each token in fp64, with NaN where its adapter is infinite."""
        outs, (columns, rank) = self.b[which], (self.x.shape[1], self.rank)
        a = self.a.double().view(len(self.b), -1, SLOTS, rank, columns)[which]
        b = outs.double().view(len(outs), -1, SLOTS, rank)
        result = torch.zeros(len(self.x), len(outs), dtype=torch.float64, device=DEVICE)
        for token, slot in enumerate(self.of_tokens.tolist()):
            if slot >= 0:
                narrow = a[:, slot].reshape(-1, columns) @ self.x[token].double()
                result[token] = b[:, :, slot].reshape(len(outs), -1) @ narrow
        result[self.of_tokens == 1] = torch.nan
        return result

    def check(self, found: Tensor, wanted: Tensor) -> None:
        sound = self.of_tokens != 1
        torch.testing.assert_close(found[sound].double(), wanted[sound], rtol=0, atol=TOLERANCE[self.dtype])
        assert not found[~sound].isfinite().all(1).any()


@pytest.fixture(params=[False, True], ids=["twin", "triton"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "columns", "outs", "parts", "rank"),
    [(5, 40, (50,), 1, 4), (1, 2100, (130,), 3, 6), (16, 72, (33, 33), 1, 5), (40, 130, (150,), 2, 40)],
)
def test_each_token_has_its_own(
    fused: bool, dtype: torch.dtype, tokens: int, columns: int, outs: tuple[int, ...], parts: int, rank: int
) -> None:
    case = Case(tokens, columns, outs, parts, rank, dtype)
    found = [before.clone() for before in case.before]
    add_adapters(found, case.x, case.a, case.b, case.tokens)
    for which, (own, before) in enumerate(zip(found, case.before, strict=True)):
        case.check(own, before.double() + case.added(which))
        assert torch.equal(own[case.of_tokens < 0], before[case.of_tokens < 0])


@pytest.mark.parametrize(("tokens", "parts", "rank"), [(300, 3, 3), (130, 1, 16)])
def test_blocks_of_many_tokens(fused: bool, tokens: int, parts: int, rank: int) -> None:
    case = Case(tokens, 2060, (140,), parts, rank, torch.float16)
    found = case.before[0].clone()
    add_adapters((found,), case.x, case.a, case.b, case.tokens)
    case.check(found, case.before[0].double() + case.added(0))


@pytest.mark.parametrize("fused", [True], indirect=True, ids=["triton"])
def test_an_overflow_in_b_stays_with_its_tokens(fused: bool) -> None:
    """The twin multiplies zeros with every B; loading refuses one that is infinite."""
    assert fused
    case = Case(20, 40, (30,), 1, 4, torch.float32)
    case.b[0].view(30, SLOTS, 4)[:, 1] = torch.inf
    found = case.before[0].clone()
    add_adapters((found,), case.x, case.a, case.b, case.tokens)
    case.check(found, case.before[0].double() + case.added(0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize(("columns", "parts", "rank"), [(40, 1, 4), (1100, 3, 7)])
def test_adapters_of_few_tokens_are_added_to_the_sums(
    fused: bool, dtype: torch.dtype, tokens: int, columns: int, parts: int, rank: int
) -> None:
    case = Case(tokens, columns, (50,), parts, rank, dtype)
    weight, bias = case.random(50, columns), case.random(50)
    product = case.x.double() @ weight.double().t() + bias.double()
    found = adapted_skinny_linear(case.x, weight, bias, None, case.a, case.b[0], case.tokens)
    case.check(found, product + case.added(0))
    if tokens == 1:
        case.of_tokens.fill_(-1)
        case.check(adapted_skinny_linear(case.x, weight, bias, None, case.a, case.b[0], case.tokens), product)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 8])
def test_gate_and_up_have_adapters_of_their_own(fused: bool, dtype: torch.dtype, tokens: int) -> None:
    case = Case(tokens, 600, (70, 70), 1, 6, dtype)
    weights = [case.random(70, 600) for _ in range(2)]
    gate, up = (case.x.double() @ weight.double().t() + case.added(which) for which, weight in enumerate(weights))
    found = adapted_skinny_gated(case.x, *weights, None, None, case.a, *case.b, case.tokens)
    case.check(found, torch.nn.functional.silu(gate) * up)


def test_token_counts_between_blocks_are_complete(fused: bool) -> None:
    """A step gives each token the same, whatever number of tokens is beside it."""
    whole = Case(66, 30, (20,), 1, 2, torch.float32)
    found = whole.before[0].clone()
    add_adapters((found,), whole.x, whole.a, whole.b, whole.tokens)
    for begin, end in pairwise((0, 1, 9, 26, 66)):
        rows = slice(begin, end)
        own = SlotsOfTokens(whole.of_tokens[rows], whole.tokens.absent[rows], SLOTS, 2)
        part = whole.before[0][rows].clone()
        add_adapters((part,), whole.x[rows], whole.a, whole.b, own)
        torch.testing.assert_close(part, found[rows], equal_nan=True)
