"""Best-of-n: which sample is chosen, and what has no score; budgets that are kept exactly; limits."""

from __future__ import annotations

import asyncio

import pytest
from openai_like_server import Behaviour, openai_like_server
from strategy_runs import FunctionScorer, Strategies, texts_of

from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.job.sections.strategy import parse_strategy
from craton.ml.serving.clients import EngineClient, InferenceRequest, MissingCapabilityError, OpenAIClient
from craton.ml.serving.messages import Sampling
from craton.ml.serving.strategies import (
    CallableScorer,
    LimitError,
    Limits,
    NoScoreError,
    PoolScorer,
    Prices,
    StrategyRunError,
    run_strategy,
)
from craton.ml.verifiers import VerifierPool


def vowels(text: str) -> float:
    return float(sum(letter in "aeiou" for letter in text))


def test_the_best_of_n_is_the_first_with_the_highest_score(strategies: Strategies) -> None:
    outcome = strategies.run("best_of:8:vowels", vowels)
    scores = [vowels(text) for text in texts_of(outcome)]
    assert outcome.report["scores"] == scores
    assert len(set(scores)) > 1
    assert outcome.text == texts_of(outcome)[scores.index(max(scores))]
    assert outcome.usage.num_samples == 8
    assert outcome.usage.discarded_tokens > outcome.usage.chosen_tokens > 0


def test_log_probabilities_choose_the_likeliest_sample(strategies: Strategies) -> None:
    outcome = strategies.run("best_of:6")
    means = [sum(s.answer.sampled_logprobs) / len(s.answer.sampled_logprobs) for s in outcome.samples if s.answer]
    assert outcome.report["scores"] == pytest.approx(means)
    assert outcome.samples[means.index(max(means))].text == outcome.text


def test_a_sample_without_score_is_out_of_the_choice(strategies: Strategies) -> None:
    texts = texts_of(strategies.run("best_of:4:vowels", vowels))
    outcome = strategies.run("best_of:4:vowels", lambda text: None if text != texts[2] else -5.0)
    assert (outcome.text, outcome.report["without_score"]) == (texts[2], 3)
    with pytest.raises(NoScoreError, match="none of 4 samples got a score; first errors: nonsense"):
        strategies.run("best_of:4:vowels", lambda text: None)


def test_scores_of_verifiers_and_functions(strategies: Strategies) -> None:
    request = InferenceRequest("The quick brown", Sampling(max_tokens=16, seed=3))
    texts = texts_of(strategies.run("best_of:4:vowels", vowels))

    async def work(client: EngineClient) -> tuple[str, str]:
        with VerifierPool([RewardTerm(verifier="exact")], VerifySection(workers=1)) as pool:
            strategy = parse_strategy("best_of:4:exact")
            row = {"answer": texts[3]}
            verified = await run_strategy(client, request, strategy, PoolScorer(pool), Limits(), row=row)
            with pytest.raises(NoScoreError, match="the row has no field 'answer'"):
                await run_strategy(client, request, strategy, PoolScorer(pool), Limits())
        function = CallableScorer(lambda prompt, completions: [float(texts.index(text)) for text in completions])
        modelled = await run_strategy(client, request, parse_strategy("best_of:3:model"), function, Limits())
        return verified.text, modelled.text

    assert strategies.with_client(work) == (texts[3], texts[2])


@pytest.mark.parametrize("tokens", [1, 15, 40, 70])
def test_a_limit_of_tokens_is_never_exceeded_and_its_answer_says_so(strategies: Strategies, tokens: int) -> None:
    full = strategies.run("best_of:8:vowels", vowels, ignore_eos=True)
    outcome = strategies.run("best_of:8:vowels", vowels, Limits(tokens=tokens), ignore_eos=True)
    assert outcome.limited_by == "tokens"
    assert outcome.usage.completion_tokens == tokens
    whole = tokens // 16
    assert texts_of(outcome)[:whole] == texts_of(full)[:whole]
    inner = strategies.run({"kind": "best_of", "n": 8, "max_tokens": tokens}, ignore_eos=True)
    assert (inner.limited_by, inner.usage.completion_tokens) == ("tokens", tokens)


def test_a_limit_of_dollars(strategies: Strategies) -> None:
    prices = Prices(prompt=1.0, completion=10.0)
    plain = strategies.run("best_of:2:vowels", vowels, Limits(prices=prices))
    assert plain.dollars == prices.dollars(plain.usage.prompt_tokens, plain.usage.completion_tokens)
    limit = plain.dollars * 0.6
    outcome = strategies.run("best_of:2:vowels", vowels, Limits(dollars=limit, prices=prices))
    assert outcome.limited_by == "dollars"
    assert outcome.dollars is not None
    assert outcome.dollars <= limit
    nothing = strategies.run("vote:3", limits=Limits(dollars=1e-9, prices=prices))
    assert (nothing.text, nothing.limited_by, nothing.usage.num_samples) == ("", "dollars", 0)
    with pytest.raises(LimitError, match="needs the endpoint's prices"):
        Limits(dollars=1.0)


def test_the_time_is_over(strategies: Strategies) -> None:
    """What has come by then is the answer; the scorer, which never replies, is not waited for."""
    request = InferenceRequest("The quick brown", Sampling(max_tokens=16, seed=3))

    async def work(client: EngineClient) -> None:
        class Silent(FunctionScorer):
            async def score(self, *arguments: object) -> list[float | None]:
                await asyncio.Event().wait()
                return []

        strategy = parse_strategy({"kind": "best_of", "n": 2, "score": "silent", "max_seconds": 0.5})
        outcome = await run_strategy(client, request, strategy, Silent(vowels), Limits())
        assert outcome.limited_by == "seconds"
        assert outcome.report["without_score"] == len(outcome.samples)

    strategies.with_client(work)


def test_a_cancelled_strategy_leaves_no_answer_open(strategies: Strategies) -> None:
    request = InferenceRequest("The quick brown", Sampling(max_tokens=200, seed=3, ignore_eos=True))

    async def work(client: EngineClient) -> None:
        begun = asyncio.Event()

        async def run() -> None:
            begun.set()
            await run_strategy(client, request, parse_strategy("vote:8"), None, Limits())

        task = asyncio.create_task(run())
        await begun.wait()
        while client.num_in_flight == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    strategies.with_client(work)


def test_what_an_endpoint_cannot_give_is_found_before_sampling() -> None:
    with openai_like_server(Behaviour(usage=False)) as server:

        async def attempt(strategy: object, prompt: object) -> None:
            async with OpenAIClient(server.url) as client:
                request = InferenceRequest(prompt, Sampling(max_tokens=7))  # type: ignore[arg-type]
                await run_strategy(client, request, parse_strategy(strategy), None, Limits())

        chat = [{"role": "user", "content": "Hello"}]
        for strategy, prompt, message in [
            ("best_of:2", "Hello", "does not give logprobs"),
            ("budget:4", "Hello", "does not give token ids|does not tokenize"),
            ({"kind": "beam", "score": "logprobs"}, chat, "does not give logprobs"),
        ]:
            with pytest.raises(MissingCapabilityError, match=message):
                asyncio.run(attempt(strategy, prompt))
        assert not [body for body in server.behaviour.received if body["max_tokens"] == 7]
        asyncio.run(attempt({"kind": "vote", "n": 3, "answer": "text", "stop": "off"}, chat))
        assert len([body for body in server.behaviour.received if body["max_tokens"] == 7]) == 3


def test_wrong_use(strategies: Strategies) -> None:
    with pytest.raises(StrategyRunError, match="there is no verifier 'math'"):
        strategies.run("best_of:2:math")
    with pytest.raises(StrategyRunError, match=r"strategy\.at_least: 17 is above the request's max_tokens"):
        strategies.run({"kind": "budget", "at_least": 17})
