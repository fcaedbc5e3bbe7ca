"""Closed forms of a scheduler that spreads prompts over steps, as Craton's does, beside a simulation of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from serving_simulator import LinearSteps, Simulated, open_arrivals, simulate

from craton.planning.serving.closed_load import closed_loop
from craton.planning.serving.load import ServedLoad, ServedReplica, TokenLengths, open_load
from craton.planning.serving.poisson_load import poisson_load

# Near our 8B server on one H200: decode in 4.2 ms, and a step with a prompt takes a little longer than its tokens.
SPREAD = LinearSteps(
    step_seconds=4.2e-3,
    request_seconds=2e-5,
    kv_tokens=800_000,
    least_tokens=512,
    prefill_steps=12,
    join_steps=1.5,
)
EXTRA = 0.8e-3  # of a step with a prompt
WARM_UP = 0.15


class LongerSteps(LinearSteps):
    """Steps with a prompt take a fixed time more."""

    def mixed_seconds(self, batch, context, tokens, prompt):  # type: ignore[no-untyped-def]
        added = EXTRA * (np.asarray(tokens) > 0)
        return super().mixed_seconds(batch, context, tokens, prompt) + added

    def prefill_seconds(self, tokens, context):  # type: ignore[no-untyped-def]
        return super().prefill_seconds(tokens, context) + EXTRA * tokens / self.chunk_tokens(tokens)

    def prompts_seconds(self, tokens, prompt):  # type: ignore[no-untyped-def]
        return super().prompts_seconds(tokens, prompt) + EXTRA * tokens / self.chunk_tokens(tokens)


SERVER = LongerSteps(**SPREAD.__dict__)


def simulated(rate: float, prompt: int, output: int, number: int = 1500) -> Simulated:
    generator = np.random.default_rng(3)
    arrivals = open_arrivals(rate, number, 1.0, generator)
    arrivals *= number / rate / arrivals[-1]  # exactly this rate
    return simulate(SERVER, arrivals, np.full(number, prompt), np.full(number, output))


@pytest.mark.parametrize(
    ("rate", "prompt", "output"), [(4, 1024, 256), (8, 1024, 256), (14, 1024, 256), (17, 1024, 256), (8, 2048, 128)]
)
def test_a_random_load(rate: float, prompt: int, output: int) -> None:
    found = simulated(rate, prompt, output)
    window = slice(int(WARM_UP * len(found.ttft_seconds)), None)
    ttft, tpot = found.ttft_seconds[window], found.tpot_seconds[window]
    fitted = poisson_load(SERVER, np.array(float(rate)), np.array(float(prompt)), float(output))
    assert float(fitted.tpot_seconds) == pytest.approx(tpot.mean(), rel=0.15)
    assert float(fitted.ttft_seconds) == pytest.approx(ttft.mean(), rel=0.30)
    load = ServedLoad(TokenLengths.fixed(prompt), TokenLengths.fixed(output), rate=float(rate))
    planned = open_load(ServedReplica(SERVER), load, np.array(float(rate)))
    assert float(planned.tpot["mean"]) == pytest.approx(tpot.mean(), rel=0.15)
    assert 1 / 1.5 < float(planned.ttft["p99"]) / np.percentile(ttft, 99) < 1.5


@pytest.mark.parametrize(
    ("users", "prompt", "output"), [(1, 512, 128), (16, 1024, 256), (64, 1024, 256), (8, 8192, 128)]
)
def test_users(users: int, prompt: int, output: int) -> None:
    number = max(8, 8 * users)
    outputs = np.random.default_rng(1).integers(output // 4, 7 * output // 4, number)  # spread a wave of users
    found = simulate(SERVER, np.zeros(number), np.full(number, prompt), outputs, concurrency=users)
    planned = closed_loop(SERVER, float(users), float(prompt), float(output), waves=0.0)  # type: ignore[arg-type]
    assert float(planned.tpot_seconds) == pytest.approx(found.tpot_seconds[users:].mean(), rel=0.2)
    assert float(planned.requests_per_second) == pytest.approx(found.completed_per_second, rel=0.2)
    assert float(planned.steady_ttft_seconds) == pytest.approx(found.ttft_seconds[users:].mean(), rel=0.4)


def test_more_waiting_tokens_make_larger_chunks_within_the_budget() -> None:
    waiting = np.array([100.0, 512.0, 6144.0, 8192.0, 1e5, 1e9])
    chunks = SERVER.chunk_tokens(waiting)
    assert np.all(np.diff(chunks) >= 0.0)
    assert chunks[:3].tolist() == [100.0, 512.0, 512.0]
    assert chunks[-1] == pytest.approx(SERVER.step_tokens, rel=1e-4)
    whole = replace(SPREAD, least_tokens=2048, prefill_steps=1)
    assert whole.chunk_tokens(np.array([100.0, 5000.0])).tolist() == [100.0, 2048.0]
