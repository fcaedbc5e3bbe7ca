"""Generation beside training: groups come complete, whatever happens to endpoints and weights on the way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from waiting import wait_until

from craton.job.model import ModelShape
from craton.ml.data import Prompt
from craton.ml.models import Decoder, DecoderConfig
from craton.ml.posttraining.asynchronous.completing import Completions, CompletionSettings, GenerationError
from craton.ml.posttraining.asynchronous.endpoints import Endpoints, RolloutEndpoint
from craton.ml.posttraining.asynchronous.groups import RolloutCopy, RolloutGroup
from craton.ml.posttraining.asynchronous.producer import RolloutProducer
from craton.ml.serving import EngineSettings
from craton.ml.serving.clients import Answer, AnswerDelta, EngineClient, RequestRefusedError
from craton.ml.serving.engine import build_runner, join_engine
from craton.ml.serving.engine.engine import Engine
from craton.ml.verifiers import Verdict, VerifierSample

VOCABULARY, MAX_LENGTH, MAX_TOKENS, GROUP = 96, 64, 12, 3
SETTINGS = CompletionSettings(GROUP, MAX_TOKENS, temperature=0.8, seed=4, stop_tokens=(7, 8, 9), vocabulary=VOCABULARY)


class Prompts:
    def prompt(self, index: int) -> Prompt:
        length = MAX_LENGTH if index == 99 else 3 + index % 4
        return Prompt(index, tuple((index * 7 + place) % VOCABULARY for place in range(length)), {"prompt": "?"})


class Letters:
    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


class Counted:
    """Verdicts at once: how many tokens a completion has."""

    def submit(self, sample: VerifierSample) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        future.set_result(Verdict(float(len(sample.completion.split()))))
        return future


def make_engine() -> Engine:
    torch.manual_seed(3)
    shape = ModelShape("llama", 2, 32, 64, 4, 2, 8, VOCABULARY)
    model = Decoder(DecoderConfig(shape, initializer_range=0.3))
    model.initialize()
    runner, settings, max_length = build_runner(model, EngineSettings(page=4, blocks=200, max_length=MAX_LENGTH))
    return join_engine(runner, runner, settings, max_length, ())


class Bench:
    """A producer over engines with the same weights."""

    def __init__(self, *engines: Engine, limit: int = 64, offset: int = 0) -> None:
        self.endpoints = Endpoints()
        self.clients: list[EngineClient] = []

        async def open_completions() -> Completions:
            for number, engine in enumerate(engines):
                self.clients.append(EngineClient(engine))
                self.endpoints.add(RolloutEndpoint(f"engine {number}", self.clients[-1], limit, version_offset=offset))
            return Completions(self.endpoints, SETTINGS, Prompts(), Letters(), Counted())  # type: ignore[arg-type]

        self.producer = RolloutProducer(open_completions)

    def finish(self, *groups: RolloutGroup) -> list[RolloutGroup]:
        self.producer.begin(groups, nothing)
        indices = [group.index for group in groups]
        wait_until(lambda: all(state.is_finished for state in self.producer.states(nothing)), "groups finish")
        return self.producer.take(indices, nothing)

    def call(self, action: Callable[[], Any]) -> Any:
        async def run() -> Any:
            result = action()
            return await result if asyncio.iscoroutine(result) else result

        return self.producer.call(run, nothing)


@contextmanager
def bench(*engines: Engine, **options: int) -> Iterator[Bench]:
    made = Bench(*engines, **options)
    try:
        yield made
    finally:
        made.producer.close()
        assert not made.producer._thread.is_alive()


def nothing() -> None:
    """The generation goes on."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def calm(engine: Engine) -> list[RolloutGroup]:
    """Groups that nothing happened to."""
    engine.change_version(0)
    with bench(engine) as made:
        return made.finish(*(RolloutGroup(index) for index in range(8)))


def tokens_of(groups: Sequence[RolloutGroup]) -> list[list[list[int]]]:
    return [[copy.tokens for copy in group.copies] for group in sorted(groups, key=lambda group: group.index)]


def test_every_copy_is_generated_and_verified(calm: list[RolloutGroup]) -> None:
    copies = [copy for group in calm for copy in group.copies]
    assert len(copies) == 8 * GROUP
    assert len({tuple(copy.tokens) for copy in copies}) > 20, "every copy has its own noise"
    for copy in copies:
        assert copy.is_complete
        assert len(copy.tokens) == len(copy.logprobs) == len(copy.versions)
        assert copy.is_truncated == (copy.tokens[-1] not in SETTINGS.stop_tokens)
        assert len(copy.tokens) == MAX_TOKENS or not copy.is_truncated
        assert copy.verdict == Verdict(len(copy.tokens) - (not copy.is_truncated))
    assert {copy.is_truncated for copy in copies} == {True, False}
    samples = [copy.sample(Prompts().prompt(1), 2) for copy in calm[1].copies]
    assert all(sample.num_generated == len(copy.tokens) for sample, copy in zip(samples, calm[1].copies, strict=True))


def test_few_places_change_nothing_but_the_order(engine: Engine, calm: list[RolloutGroup]) -> None:
    with bench(engine, limit=GROUP) as made:
        assert tokens_of(made.finish(*(RolloutGroup(index) for index in range(8)))) == tokens_of(calm)


def test_what_has_come_goes_on_in_another_producer(engine: Engine, calm: list[RolloutGroup]) -> None:
    """Whatever the moment of the snapshot: tokens, log-probabilities and versions are those of an undisturbed run."""
    with bench(engine, limit=6) as made:
        made.producer.begin([RolloutGroup(index) for index in range(8)], nothing)
        wait_until(lambda: made.producer.numbers(nothing)[0] > 20, "tokens")
        kept = made.producer.pending(nothing)
    partial = [copy for group in kept for copy in group.copies if copy.tokens and not copy.is_complete]
    assert [group.index for group in kept] == list(range(8))
    assert partial
    with bench(engine) as made:
        done = made.finish(*kept)
    assert tokens_of(done) == tokens_of(calm)
    for group, other in zip(done, calm, strict=True):
        for copy, twin in zip(group.copies, other.copies, strict=True):
            assert copy.logprobs == pytest.approx(twin.logprobs, abs=1e-5)
            assert (copy.completion, copy.verdict, copy.is_truncated) == (
                twin.completion,
                twin.verdict,
                twin.is_truncated,
            )


def test_a_lost_endpoint_costs_no_sample(engine: Engine, calm: list[RolloutGroup]) -> None:
    with bench(engine, make_engine(), limit=9) as made:
        made.producer.begin([RolloutGroup(index) for index in range(8)], nothing)
        wait_until(lambda: made.producer.numbers(nothing)[0] > 10, "tokens")
        made.call(lambda: made.clients[1].close())
        wait_until(lambda: all(state.is_finished for state in made.producer.states(nothing)), "groups finish")
        assert tokens_of(made.producer.take(list(range(8)), nothing)) == tokens_of(calm)
        assert made.endpoints.num_lost
        assert [endpoint.is_ready for endpoint in made.endpoints.endpoints] == [True, False]
        assert made.endpoints.endpoints[0].in_flight == 0


def test_tokens_know_the_weights_that_sampled_them(engine: Engine) -> None:
    with bench(engine, limit=GROUP) as made:
        made.producer.begin([RolloutGroup(index) for index in range(4)], nothing)
        wait_until(lambda: made.producer.numbers(nothing)[0] > 4, "tokens")

        async def change() -> None:
            await made.clients[0].between_steps(lambda: engine.change_version(5))
            made.endpoints.endpoints[0].version = 5

        made.producer.call(change, nothing)
        wait_until(lambda: all(state.is_finished for state in made.producer.states(nothing)), "groups finish")
        groups = made.producer.take(list(range(4)), nothing)
    engine.change_version(0)
    versions = [copy.versions for group in groups for copy in group.copies]
    assert all(copy == sorted(copy) and set(copy) <= {0, 5} for copy in versions)
    assert any(set(copy) == {0, 5} for copy in versions), "a generation went on under new weights"
    assert groups[0].oldest == 0
    assert groups[-1].oldest == 5


def test_tokens_of_other_weights_are_not_taken(engine: Engine) -> None:
    """A server that restarted has the weights it began with: its versions are below those that it is known to have."""
    with bench(engine, offset=1) as made:
        made.producer.begin([RolloutGroup(0)], nothing)
        wait_until(lambda: made.endpoints.num_lost, "it is noticed")
        endpoint = made.endpoints.endpoints[0]
        wait_until(lambda: not endpoint.in_flight, "its requests end")
        assert "has other weights" in endpoint.reason
        assert made.producer.pending(nothing) == [RolloutGroup(0)]
        engine.change_version(1)
        made.call(lambda: made.endpoints.restore(endpoint, 0))
        wait_until(lambda: made.producer.states(nothing)[0].is_finished, "it goes on")
        (group,) = made.producer.take([0], nothing)
        assert group.oldest == 0
    engine.change_version(0)


def test_a_refused_prompt_ends_the_run(engine: Engine) -> None:
    with bench(engine) as made:
        made.producer.begin([RolloutGroup(99)], nothing)
        with pytest.raises(RequestRefusedError, match="64"):
            wait_until(lambda: made.producer.states(nothing)[0].is_finished, "it fails")


@pytest.mark.parametrize(
    ("tokens", "logprobs", "message"),
    [
        ([999_999], [], "engine 0 returned the token id 999999, outside the vocabulary of"),
        ([-5], [], "engine 0 returned the token id -5, outside the vocabulary of"),
        ([], [0.5], "engine 0 returned 0.5 as a log-probability; it must be finite and <= 0"),
        ([], [math.nan], "engine 0 returned nan as a log-probability"),
        ([], [-math.inf], "engine 0 returned -inf as a log-probability"),
    ],
)
def test_numbers_of_another_model_end_the_run(
    engine: Engine, tokens: list[int], logprobs: list[float], message: str
) -> None:
    with bench(engine) as made:
        made.call(lambda: None)
        client = made.clients[0]
        stream = client.stream

        async def wrong(answer: Answer) -> AsyncIterator[AnswerDelta]:
            async for delta in stream(answer):
                yield replace(delta, tokens=tokens or delta.tokens, logprobs=logprobs or delta.logprobs)

        client.stream = wrong  # type: ignore[assignment, method-assign]
        made.producer.begin([RolloutGroup(0)], nothing)
        with pytest.raises(GenerationError, match=message):
            wait_until(lambda: made.producer.states(nothing)[0].is_finished, "it fails")
        assert not made.endpoints.num_lost, "nothing is tried again"


def test_an_error_while_opening_is_raised_in_the_trainer() -> None:
    async def fails() -> Completions:
        raise RequestRefusedError("no such model")

    producer = RolloutProducer(fails)
    with pytest.raises(RequestRefusedError, match="no such model"):
        producer.states(nothing)
    producer.close()


def test_waiting_for_an_endpoint_ends_with_the_generation() -> None:
    class OverError(Exception):
        pass

    def over() -> None:
        raise OverError

    with bench() as made:
        made.producer.begin([RolloutGroup(0), RolloutGroup(1, [RolloutCopy() for _ in range(GROUP)], begun=0)], nothing)
        with pytest.raises(OverError):
            made.producer.call(lambda: asyncio.sleep(1000), over)
        assert [state.index for state in made.producer.states(nothing)] == [0, 1]
