"""Tokens come as often as their probabilities say, whatever is asked for beside a temperature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from craton.ml.serving.device.sampler import Tuning, sample

VOCABULARY, DRAWS = 16, 20_000


def logits() -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5


def draw(row: Tensor, temperature: float, tuning: Tuning | None) -> Tensor:
    """How often each token was chosen in many draws, each at another place of a text."""
    rows = row.expand(DRAWS, -1)
    found = sample(
        rows,
        torch.full((DRAWS,), temperature),
        torch.full((DRAWS,), 11),
        torch.arange(DRAWS),
        torch.zeros(DRAWS),
        tuning,
    )
    return torch.bincount(found.tokens, minlength=VOCABULARY)


def expect_distribution(counts: Tensor, probabilities: Tensor) -> None:
    possible = probabilities > 0
    assert not counts[~possible].any()
    if possible.sum() == 1:
        return
    expected = probabilities[possible].double()
    found = chisquare(counts[possible].double(), DRAWS * expected / expected.sum())
    assert found.pvalue > 1e-4


def every(value: float) -> Tensor:
    return torch.full((DRAWS,), value)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
def test_temperature(temperature: float) -> None:
    expect_distribution(draw(logits(), temperature, None), (logits() / temperature).softmax(-1))
    expect_distribution(draw(logits(), temperature, Tuning(top_p=every(1.0))), (logits() / temperature).softmax(-1))


def test_top_k() -> None:
    kept = logits().masked_fill(logits() < logits().topk(5).values[-1], -torch.inf)
    expect_distribution(draw(logits(), 1.0, Tuning(top_k=every(5).long())), kept.softmax(-1))


@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.9])
def test_top_p(top_p: float) -> None:
    ordered, order = logits().softmax(-1).sort(descending=True)
    fewest = int((ordered.cumsum(0) < top_p).sum()) + 1
    kept = torch.zeros(VOCABULARY).scatter(0, order[:fewest], ordered[:fewest])
    expect_distribution(draw(logits(), 1.0, Tuning(top_p=every(top_p))), kept)


def test_top_p_is_a_share_of_what_top_k_keeps_and_ties_are_kept_together() -> None:
    row = (2 * logits()).round() / 2
    values = row.softmax(0)
    kept = values * (row >= row.topk(6).values[-1])
    mass = torch.where(row[None] > row[:, None], kept, 0.0).sum(1)  # of the kept tokens above each
    assert int((kept > 0).sum()) == 8
    kept = kept * (mass < 0.7 * kept.sum())
    assert int((kept > 0).sum()) == 4  # of all probabilities they are less than 0.7
    expect_distribution(draw(row, 1.0, Tuning(top_k=every(6).long(), top_p=every(0.7))), kept)


def test_min_p() -> None:
    probabilities = logits().softmax(-1)
    kept = probabilities * (probabilities >= 0.2 * probabilities.max())
    expect_distribution(draw(logits(), 1.0, Tuning(min_p=every(0.2))), kept)


def test_what_is_not_allowed_never_comes() -> None:
    bits = 0b1010_0000_0001_1101
    allowed = torch.tensor([[bits]], dtype=torch.int32).expand(DRAWS, -1)
    kept = logits().softmax(-1) * torch.tensor([bits >> token & 1 for token in range(VOCABULARY)])
    expect_distribution(draw(logits(), 1.0, Tuning(allowed=allowed)), kept)


def test_rows_of_one_batch_do_not_disturb_each_other() -> None:
    rows = torch.randn(4, VOCABULARY)
    temperature = torch.tensor([0.0, 1.0, 0.5, 1.0])
    seeds, positions = torch.tensor([1, 2, 3, 4]), torch.tensor([9, 8, 7, 6])
    tuning = Tuning(top_k=torch.tensor([0, 3, 0, 1]), top_p=torch.tensor([1.0, 1.0, 0.3, 1.0]))
    together = sample(rows, temperature, seeds, positions, torch.zeros(len(rows)), tuning)
    for row in range(4):
        one = slice(row, row + 1)
        assert tuning.top_k is not None
        assert tuning.top_p is not None
        alone = sample(
            rows[one],
            temperature[one],
            seeds[one],
            positions[one],
            torch.zeros(1),
            Tuning(top_k=tuning.top_k[one], top_p=tuning.top_p[one]),
        )
        assert int(alone.tokens) == int(together.tokens[row])
    assert int(together.tokens[0]) == int(rows[0].argmax())
    assert int(together.tokens[3]) == int(rows[3].argmax())


@pytest.mark.parametrize("tuning", [None, Tuning(top_k=torch.tensor([0, 0, 0]))])
def test_logits_that_are_not_numbers_choose_nothing(tuning: Tuning | None) -> None:
    rows = torch.randn(3, VOCABULARY)
    rows[1, 4] = torch.nan
    found = sample(rows, torch.ones(3), torch.ones(3).long(), torch.arange(3), torch.zeros(3), tuning)
    assert (found.tokens >= 0).tolist() == [True, False, True]
    assert found.logprobs.isnan().tolist() == [False, True, False]


def test_a_mask_does_not_hide_logits_that_are_not_numbers() -> None:
    rows = torch.randn(3, VOCABULARY)
    rows[0, 4], rows[1, 4] = torch.nan, torch.inf
    allowed = torch.full((3, 1), 0b1000, dtype=torch.int32)  # token 3
    for tuning in (Tuning(allowed=allowed), Tuning(allowed=allowed, top_p=torch.full((3,), 0.9))):
        found = sample(rows, torch.ones(3), torch.ones(3).long(), torch.arange(3), torch.zeros(3), tuning)
        assert found.tokens.tolist() == [-1, -1, 3]
        assert found.logprobs.isnan().tolist() == [True, True, False]
    impossible = torch.full((1, VOCABULARY), -torch.inf).index_fill_(1, torch.tensor([2]), 0.0)
    found = sample(impossible, *(torch.zeros(1).long() for _ in range(4)), Tuning(allowed=allowed[:1]))
    assert found.tokens.tolist() == [-1]


def test_a_row_without_parameters_gets_the_same_token_beside_rows_with_some() -> None:
    rows = torch.randn(64, VOCABULARY).bfloat16()
    given = (rows, torch.full((64,), 0.7), torch.arange(64), torch.arange(64), torch.full((64,), 0.7))
    plain = sample(*given)
    top_p = torch.where(torch.arange(64) % 2 > 0, 0.3, 1.0)
    bias = (torch.tensor([1]), torch.tensor([5]), torch.tensor([1.0]))
    for tuning in (Tuning(top_p=top_p), Tuning(top_p=top_p, added=bias), Tuning(added=bias)):
        found = sample(*given, tuning)
        assert torch.equal(found.tokens[::2], plain.tokens[::2])
        torch.testing.assert_close(found.logprobs[::2], plain.logprobs[::2], rtol=1e-5, atol=1e-5)


TEMPERATURE = 0.6
BITS = torch.tensor([[0b1010_0000_0001_1101]], dtype=torch.int32)


@pytest.mark.parametrize(
    "tuning",
    [
        None,
        Tuning(top_k=torch.tensor([4])),
        Tuning(top_p=torch.tensor([0.7])),
        Tuning(min_p=torch.tensor([0.2])),
        Tuning(top_k=torch.tensor([9]), top_p=torch.tensor([0.8]), min_p=torch.tensor([0.05])),
        Tuning(allowed=BITS),
        Tuning(added=(torch.tensor([0]), torch.tensor([3]), torch.tensor([2.0]))),
        Tuning(repetition=torch.tensor([1.7]), seen=torch.arange(VOCABULARY)[None] % 3 == 0),
        Tuning(presence=torch.tensor([0.5]), frequency=torch.tensor([0.3]), written=torch.arange(VOCABULARY)[None] % 3),
    ],
)
def test_log_probabilities_of_the_sampled_distribution_are_those_of_the_draws(tuning: Tuning | None) -> None:
    row, modes = logits(), torch.tensor([TEMPERATURE])
    found = sample(row[None], modes, torch.tensor([1]), torch.tensor([2]), modes, tuning, VOCABULARY)
    assert found.alternatives is not None
    (tokens,), (values,) = found.alternatives
    claimed = torch.empty(VOCABULARY).scatter(0, tokens, values)
    assert found.logprobs.item() == pytest.approx(claimed[found.tokens].item(), abs=1e-6)
    expect_distribution(draw(row, TEMPERATURE, _repeated(tuning)), claimed.exp())
    alone = sample(row[None], modes, torch.tensor([1]), torch.tensor([2]), modes, tuning)
    assert torch.equal(alone.tokens, found.tokens)
    model = sample(row[None], modes, torch.tensor([1]), torch.tensor([2]), torch.zeros(1), tuning, VOCABULARY)
    assert model.tokens.tolist() == found.tokens.tolist()
    assert model.logprobs.item() == pytest.approx(row.log_softmax(0)[model.tokens].item(), abs=1e-6)


def _repeated(tuning: Tuning | None) -> Tuning | None:
    """The same for many rows."""
    if tuning is None:
        return None
    values = {name: value for name, value in vars(tuning).items() if isinstance(value, Tensor)}
    repeated: dict[str, Any] = {name: value.expand(DRAWS, *value.shape[1:]) for name, value in values.items()}
    if tuning.added is not None:
        _, token, bias = tuning.added
        repeated["added"] = (torch.arange(DRAWS), token.expand(DRAWS), bias.expand(DRAWS))
    return Tuning(**repeated)
