"""The choice of a token: the right distribution, the same token from both twins, and no token from logits that are
none."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor

from craton.ml.kernels.serving import paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["twin", "triton", "triton in one part"])
def _fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of these tests are one tile for each of several programs, or several tiles for one."""
    if request.param != "twin":
        pytest.importorskip("triton", reason="Triton is not installed")
    if request.param == "triton in one part":
        monkeypatch.setattr("craton.ml.kernels.triton.choose.processors", lambda _: 1)
        monkeypatch.setattr("craton.ml.kernels.triton.choose.PROGRAMS_PER_PROCESSOR", 1)
    use_triton(monkeypatch, request.param != "twin")


def use_triton(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: fused)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def temperatures(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def choose(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, logprob_temperature: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    model = torch.zeros_like(temperature)
    return paged.choose(
        logits, temperature, seeds, positions, model if logprob_temperature is None else logprob_temperature
    )


@pytest.mark.usefixtures("_fused")
def test_log_probability_of_the_scaled_distribution() -> None:
    logits = torch.randn(4, 2500, device=DEVICE) * 3
    logits[3, 1] = torch.nan
    temperature = temperatures(0.7, 0.7, 1.6, 1.6)
    asked = temperatures(0, 0.7, 1.6, 1.6)
    token, logprob = choose(logits, temperature, numbers(1, 1, 2, 3), numbers(4, 4, 5, 6), asked)
    plain, model = choose(logits, temperature, numbers(1, 1, 2, 3), numbers(4, 4, 5, 6))
    assert torch.equal(token, plain)
    scaled = logits.double() / torch.tensor([1.0, 0.7, 1.6, 1.6], device=DEVICE)[:, None]
    expected = scaled[:3].log_softmax(-1)[torch.arange(3), token[:3]]
    torch.testing.assert_close(logprob[:3].double(), expected, rtol=1e-5, atol=1e-5)
    assert logprob[0] == model[0]
    assert token[3] == -1
    assert logprob[3].isnan()


@pytest.mark.usefixtures("_fused")
def test_without_temperature_the_first_of_the_largest_logits() -> None:
    logits = torch.randn(3, 3000, device=DEVICE)
    logits[0, 2999] = logits[1, 0] = logits[1, 1500] = 50.0
    logits[2, 700] = logits[2, 701] = logits[2, 1100] = logits[2, 700 + 1024] = 9.0
    token, logprob = choose(logits, temperatures(0, 0, 1e-6), numbers(1, 2, 3), numbers(0, 0, 0))
    assert token.tolist() == [2999, 0, 700]
    expected = logits.double().log_softmax(-1)[torch.arange(3), token]
    torch.testing.assert_close(logprob.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_fused")
def test_logits_that_are_none_give_no_token_and_leave_the_other_rows_alone() -> None:
    logits = torch.randn(6, 2500, device=DEVICE)
    logits[0, 2400] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, :2499] = -torch.inf  # all but the last forbidden
    logits[4, 1000:] = -torch.inf
    seeds, positions = torch.arange(6, device=DEVICE), torch.full((6,), 7, device=DEVICE)
    for temperature in (0.0, 0.8):
        token, logprob = choose(logits, torch.full((6,), temperature, device=DEVICE), seeds, positions)
        assert token[:4].tolist() == [-1, -1, -1, 2499]
        assert logprob[:3].isnan().all()
        assert logprob[3] == 0
        assert 0 <= token[4] < 1000
        assert logprob[3:].isfinite().all()


def test_both_twins_choose_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    logits = torch.randn(16, 2100, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) * 3
    seeds = torch.arange(16, device=DEVICE) * 2**39 - 2**42  # both halves, and both signs
    positions = torch.arange(16, device=DEVICE) * 2**33 + 5
    results = []
    for fused in (False, True):
        use_triton(monkeypatch, fused)
        temperature = torch.linspace(0, 2, 16, device=DEVICE)
        results.append(choose(logits, temperature, seeds, positions))
    (token, logprob), (their_token, their_logprob) = results
    assert torch.equal(token, their_token)
    torch.testing.assert_close(logprob, their_logprob, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_fused")
def test_logits_in_half_precision_that_do_not_lie_together() -> None:
    wide = torch.randn(3, 2000, device=DEVICE).half()
    logits, seeds = wide[:, :1200], numbers(1, 2, 3)
    token, logprob = choose(logits, temperatures(0, 0.5, 1), seeds, seeds)
    again, _ = choose(logits.float().contiguous(), temperatures(0, 0.5, 1), seeds, seeds)
    assert torch.equal(token, again)
    expected = logits.double().log_softmax(-1)[torch.arange(3), token]
    torch.testing.assert_close(logprob.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_are_distributed_as_the_softmax(temperature: float) -> None:
    """20,000 positions of one seed, 16 tokens of which one is forbidden and one has a chance of one in a thousand."""
    torch.manual_seed(3)
    logits = torch.randn(16)
    logits[4], logits[9] = -torch.inf, logits.max() - 5
    count = 20_000
    rows = logits.expand(count, 16)
    positions = torch.arange(count)
    token, _ = choose(rows, torch.full((count,), temperature), torch.full((count,), 11), positions)
    seen = torch.bincount(token, minlength=16)
    expected = (logits / temperature).softmax(-1) * count
    allowed = expected > 0
    assert seen[4] == 0
    assert chisquare(seen[allowed].numpy(), expected[allowed].double().numpy(), sum_check=False).pvalue > 1e-3


def test_noise_is_gumbel_and_independent_of_its_neighbours() -> None:
    seeds, positions = torch.tensor([5, 5, 6]), torch.tensor([0, 1, 0])
    noise = paged.gumbel(seeds, positions, 50_000).double()
    for row in noise:
        assert kstest(row.numpy(), "gumbel_r").pvalue > 1e-3
    neighbours = (
        (noise[0], noise[1]),
        (noise[0], noise[2]),
        (noise[0, 1:], noise[0, :-1]),
        (noise[1, 1:], noise[0, :-1]),
    )
    for left, right in neighbours:
        assert abs(torch.corrcoef(torch.stack((left, right)))[0, 1]) < 0.02
