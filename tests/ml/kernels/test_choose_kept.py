"""The choice among the tokens that top-k, top-p and min-p keep: both twins choose the token that a sort chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from craton.ml.kernels.serving import choose, choose_kept, gumbel, truncate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 60  # of two tiles in the interpreter, the last of them not full
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, on which Triton's interpreter computes


class Case(NamedTuple):
    logits: Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@pytest.fixture(params=[False, True], ids=["twin", "triton"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    is_fused = bool(request.param)
    if is_fused:
        pytest.importorskip("triton", reason="Triton is not installed")
        if DEVICE == "cpu":  # several tiles of a small vocabulary; the interpreter's time is that of passes, not pivots
            for name, value in (("LANES", 8), ("WIDTH", 4), ("PIVOTS", 2048)):
                monkeypatch.setattr(f"craton.ml.kernels.triton.choose_kept.{name}", value)
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: is_fused)
    return is_fused


def draw(deviation: float = 2.0) -> Tensor:
    return torch.randn(VOCABULARY) * deviation


def peak(*values: float) -> Tensor:
    """Logits of which the last ones are given and the others are unlikely."""
    row = torch.full((VOCABULARY,), -4.0)
    row[-len(values) :] = torch.tensor(values)
    return row


def masked(row: Tensor, allowed: int) -> Tensor:
    return row.masked_fill(torch.arange(VOCABULARY) % (VOCABULARY // allowed) > 0, -math.inf)


CASES: dict[str, Callable[[], Case]] = {
    "all kept": lambda: Case(draw()),
    "greedy": lambda: Case(draw(), 0.0, 5, 0.5, 0.1),
    "nearly greedy": lambda: Case(draw(), 1e-6, 5, 0.5, 0.1),
    "top-k": lambda: Case(draw(), 0.7, 7),
    "top-k of many ties": lambda: Case(draw().round(), 0.7, 7),
    "the likeliest": lambda: Case(draw(), 1.0, 1),
    "the likeliest of two": lambda: Case(peak(3.0, 1.0, 3.0), 1.0, 1),
    "top-k above the vocabulary": lambda: Case(draw(), 1.3, VOCABULARY + 1),
    "top-k above the allowed": lambda: Case(masked(draw(), 5), 1.3, 20),
    "top-p": lambda: Case(draw(0.5), 1.0, 0, 0.6),
    "top-p of many ties": lambda: Case(draw().round(), 1.7, 0, 0.6),
    "top-p of masked": lambda: Case(masked(draw(), 15), 0.7, 0, 0.8),
    "tiny top-p": lambda: Case(draw(0.1), 1.0, 0, 1e-9),
    "top-p of 0": lambda: Case(draw(0.1), 1.0, 0, 0.0),
    "one token above top-p": lambda: Case(peak(9.0), 1.0, 0, 0.6),
    "both halves of a tie": lambda: Case(masked(torch.zeros(VOCABULARY), 2), 1.0, 0, 0.5),
    "all equal": lambda: Case(torch.full((VOCABULARY,), -3.0), 1.0, 3, 0.5, 0.5),
    "min-p": lambda: Case(draw(), 1.5, 0, 1.0, 0.1),
    "min-p of 1": lambda: Case(draw().round(), 1.5, 0, 1.0, 1.0),
    "top-k and top-p": lambda: Case(draw(0.3), 1.0, 10, 0.5),
    "top-k and top-p of ties": lambda: Case(draw().round(), 2.0, 10, 0.5),
    "top-p beyond top-k": lambda: Case(draw(), 5.0, 2, 0.999),
    "top-k and min-p": lambda: Case(draw(), 2.0, 20, 1.0, 0.3),
    "min-p above 1": lambda: Case(draw(), 1.0, 0, 0.9, 2.0),
    "top-p and min-p": lambda: Case(draw(), 2.0, 0, 0.9, 0.2),
    "all three": lambda: Case(draw(), 3.0, 12, 0.9, 0.5),
    "cold": lambda: Case(draw(), 0.02, 12, 0.9),
    "hot": lambda: Case(draw(), 300.0, 12, 0.9),
}
# the interpreter needs 0.1 s for one
FEW = ("greedy", "top-k of many ties", "top-p", "min-p", "all three")


def batch(cases: list[Case], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return logits, temperatures, and the three limits."""
    rows, temperature, top_k, top_p, min_p = zip(*cases, strict=True)
    numbers = (torch.tensor(values, device=DEVICE) for values in (temperature, top_k, top_p, min_p))
    temperatures, *limits = numbers
    return torch.stack(rows).to(DEVICE, dtype), temperatures, tuple(limits)


def is_kept(case: Case, row: Tensor) -> Tensor:
    """Which tokens are kept, by definition: compares each token with each, in fp64."""
    row = row.double().cpu()
    weights = ((row - row.max()) / case.temperature).exp()
    above = row[None] > row[:, None]  # [token, the one above it]
    kept = torch.ones_like(row, dtype=torch.bool)
    if case.top_k:
        kept = above.sum(1) < case.top_k
    if case.top_p < 1:
        weights = torch.where(kept, weights, 0.0)
        mass = torch.where(above, weights, 0.0).sum(1)
        kept &= (mass < case.top_p * weights.sum()) | (row == row.max())
    return kept & (row - row.max() >= case.temperature * (math.log(min(case.min_p, 1)) if case.min_p else -math.inf))


@pytest.mark.parametrize(
    ("fused", "dtype", "names", "copies"),
    [
        (False, torch.float32, CASES, 40),
        (False, torch.bfloat16, CASES, 40),
        pytest.param(True, torch.float32, CASES, 4, marks=pytest.mark.slow),
        pytest.param(True, torch.bfloat16, CASES, 4, marks=pytest.mark.slow),
        pytest.param(True, torch.bfloat16, FEW, 1),
    ],
    indirect=["fused"],
)
@pytest.mark.usefixtures("fused")
def test_token_and_log_probability_are_those_of_a_sort(dtype: torch.dtype, names: Collection[str], copies: int) -> None:
    torch.manual_seed(0)
    named = [name for name in names for _ in range(copies)]
    cases = [CASES[name]() for name in named]
    logits, temperature, limits = batch(cases, dtype)
    seeds = torch.arange(len(cases), device=DEVICE) * 2**38 - 2**41
    asked = torch.where(torch.arange(len(cases), device=DEVICE) % 2 > 0, temperature, 0.0)  # odd rows
    tokens, logprobs = choose_kept(logits, temperature, seeds, seeds + 5, asked, *limits)
    scores = (logits.float() / temperature[:, None]).cpu() + gumbel(seeds, seeds + 5, VOCABULARY).cpu()
    for index, (name, case) in enumerate(zip(named, cases, strict=True)):
        row = logits[index].double().cpu()
        if case.temperature < 1e-5:
            expected, distribution = row.argmax(), row
        else:
            kept = is_kept(case, row)
            expected = scores[index].masked_fill(~kept, -math.inf).argmax()
            distribution = (row / case.temperature).masked_fill(~kept, -math.inf) if asked[index] > 0 else row
        assert int(tokens[index]) == int(expected), name
        assert logprobs[index].item() == pytest.approx(distribution.log_softmax(0)[expected].item(), abs=2e-5), name


def test_a_sort_keeps_the_same_tokens() -> None:
    torch.manual_seed(1)
    cases = [make() for make in CASES.values() for _ in range(20)]
    logits, temperature, limits = batch(cases)
    found = truncate(logits, temperature, *limits)
    for index, case in enumerate(cases):
        if case.temperature >= 1e-5:
            kept = is_kept(case, logits[index]) & (logits[index] > -math.inf).cpu()
            assert torch.equal(found[index].cpu() > -math.inf, kept), list(CASES)[index // 20]


def test_a_mass_that_reaches_top_p_exactly_keeps_no_further_token(fused: bool) -> None:
    """Of two tokens of probability 0.5 with different logits the second is not kept for p = 0.5, and it is above."""
    row = torch.full((VOCABULARY,), -math.inf)
    row[3], row[50] = -1e-9, 0.0
    count = 1 if fused else 30
    for top_p, expected in ((0.5, {50}), (0.5001, {3, 50})):
        logits, temperature, (_, share, _) = batch([Case(row, 1.0, 0, top_p)] * count)
        seeds = torch.arange(count, device=DEVICE)
        tokens, logprobs = choose_kept(logits, temperature, seeds, seeds, temperature, None, share, None)
        assert set(tokens.tolist()) <= expected
        assert logprobs.tolist() == pytest.approx([-math.log(len(expected))] * count, abs=1e-6)


@pytest.mark.usefixtures("fused")
def test_rows_without_numbers_give_no_token_and_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(2)
    limits = (3, 0.9, 0.05)
    rows = [draw() for _ in range(7)]
    rows[0][50] = math.nan
    rows[1][3] = math.inf
    rows[2][:] = -math.inf
    rows[3][:] = 3e38  # over the temperature it is infinite
    rows[4][:-1] = -math.inf
    cases = [Case(row, 0.5, *limits) for row in rows[:6]] + [Case(rows[6], 0.0), Case(rows[0], 0.0)]
    logits, temperature, cuts = batch(cases, torch.bfloat16)
    seeds = torch.arange(len(cases), device=DEVICE)
    model = torch.zeros_like(temperature)
    tokens, logprobs = choose_kept(logits, temperature, seeds, seeds, model, *cuts)
    assert (tokens < 0).tolist() == [True, True, True, True, False, False, False, True]
    assert logprobs.isnan().tolist() == (tokens < 0).tolist()
    assert (int(tokens[4]), float(logprobs[4])) == (VOCABULARY - 1, 0.0)
    for row in (5, 6):
        one = slice(row, row + 1)
        given = (logits[one], temperature[one], seeds[one], seeds[one], model[one])
        alone = choose_kept(*given, *(cut[one] for cut in cuts))
        assert torch.equal(torch.stack(alone), torch.stack((tokens, logprobs))[:, one])


def test_without_limits_it_is_the_token_of_choose(fused: bool) -> None:
    torch.manual_seed(3)
    count = 3 if fused else 60
    logits = torch.randn(count, 2 * VOCABULARY, device=DEVICE).bfloat16()[:, :VOCABULARY]  # rows apart
    temperature = torch.linspace(0, 2, count, device=DEVICE)
    seeds = torch.arange(count, device=DEVICE)
    expected, their_logprobs = choose(logits, temperature, seeds, seeds, temperature)
    tokens, logprobs = choose_kept(logits, temperature, seeds, seeds, temperature, None, None, None)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, their_logprobs, rtol=1e-5, atol=1e-5)
