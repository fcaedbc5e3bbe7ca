"""The engine's log-probabilities are the trainer's, however the engine computed a rollout: in chunks, from the prefix
cache, after a preemption, forked or continued."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_models import VOCABULARY, trained_model, trainer_logprobs

from craton.ml.models import Decoder
from craton.ml.posttraining.shared import RolloutEngine
from craton.ml.serving.clients import Answer, InferenceRequest
from craton.ml.serving.messages import OutputDelta, Sampling, Submit
from craton.ml.serving.settings import EngineSettings

TOLERANCE = 1e-5
TEMPERATURE = 0.7
STOP = 3
SAMPLED = Sampling(max_tokens=18, temperature=TEMPERATURE, seed=5, logprobs=0, logprobs_mode="sampled")
DEFAULTS: dict[str, Any] = {"max_length": 128, "max_running": 8, "page": 4, "chunk_tokens": 64, "blocks": 400}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunk_tokens": 5},
    "preempted": {"blocks": 34},
    "drafts": {"draft_tokens": 3},
    "graphs": {"graphs": "always"},
}


FAMILIES = ("qwen", "experts", "latent")


@pytest.fixture(scope="module", params=["llama", *FAMILIES])
def trained(request: pytest.FixtureRequest) -> tuple[Decoder, Any]:
    model, _, ranks = trained_model(request.param)
    return model, ranks


def prompts(count: int, length: int = 22) -> list[tuple[int, ...]]:
    generator = random.Random(4)
    shared = [generator.randrange(10, VOCABULARY) for _ in range(length - 10)]
    ends = [[generator.randrange(10, VOCABULARY) for _ in range(5)] for _ in range(count)]
    return [(*shared, *end, *end) for end in ends]  # a repeated end, for drafts


def engine_of(trained: tuple[Decoder, Any], **settings: Any) -> RolloutEngine:
    model, ranks = trained
    return RolloutEngine(model, ranks, EngineSettings(**{**DEFAULTS, **settings}), (STOP,))


def expect_equal(model: Decoder, rollouts: Sequence[tuple[Any, Sequence[int], Sequence[float]]]) -> None:
    expected = trainer_logprobs(model, [(prompt, sampled) for prompt, sampled, _ in rollouts], TEMPERATURE)
    for values, (_, sampled, logprobs) in zip(expected, rollouts, strict=True):
        assert len(sampled) == len(logprobs) > 0
        torch.testing.assert_close(torch.tensor(logprobs), values, atol=TOLERANCE, rtol=0)


def rollouts_of(answers: list[list[Answer]]) -> list[tuple[Any, list[int], list[float]]]:
    return [
        (answer.request.prompt, answer.sampled_tokens, answer.sampled_logprobs) for group in answers for answer in group
    ]


@pytest.mark.parametrize(
    ("trained", "case"),
    [("llama", case) for case in CASES] + [(name, case) for name in FAMILIES for case in ("chunked", "preempted")],
    indirect=["trained"],
)
def test_groups(trained: tuple[Decoder, Any], case: str) -> None:
    rollout = engine_of(trained, **CASES[case])
    sampling = replace(SAMPLED, stop_tokens=(7, 9))
    answers = rollout.generate([InferenceRequest(prompt, sampling, copies=4) for prompt in prompts(4)])
    expect_equal(trained[0], rollouts_of(answers))
    stats = rollout.engine.stats()
    assert stats.preemptions > 0 or case != "preempted"
    assert stats.drafted > 0 or case != "drafts"
    assert {answer.finish for group in answers for answer in group} == {"stop", "length"}


def test_prefix_hits_and_continued_rollouts(trained: tuple[Decoder, Any]) -> None:
    rollout = engine_of(trained)
    asked = [InferenceRequest(prompt, replace(SAMPLED, max_tokens=9)) for prompt in prompts(3)]
    first = [group[0] for group in rollout.generate(asked)]
    open_ends = [answer for answer in first if answer.finish == "length"]
    again = rollout.generate([answer.continuation(max_tokens=18) for answer in open_ends], keeps_cache=True)
    assert rollout.engine.stats().prefix_hits > 0
    expect_equal(trained[0], rollouts_of([first]))
    continued = [
        (before.request.prompt, [*before.tokens, *after.sampled_tokens], [*before.logprobs, *after.sampled_logprobs])
        for before, (after,) in zip(open_ends, again, strict=True)
    ]
    expect_equal(trained[0], continued)
    (whole,) = rollout.generate([InferenceRequest(open_ends[0].request.prompt, SAMPLED)])
    assert whole[0].sampled_tokens == continued[0][1], "as if it had never been interrupted"


def test_forked_rollouts(trained: tuple[Decoder, Any]) -> None:
    engine = engine_of(trained).engine
    (prompt,) = prompts(1)
    sampling = replace(SAMPLED, ignore_eos=True)
    engine.submit(Submit(1, prompt, sampling))
    pieces: dict[int, list[OutputDelta]] = {}
    is_forked = False
    while not engine.is_idle:
        for piece in engine.step():
            pieces.setdefault(piece.id, []).append(piece)
        if len(pieces.get(1, ())) == 6 and not is_forked:
            is_forked = True
            for number in (2, 3):
                engine.fork(1, 0, number, replace(sampling, seed=number))
    parent = [token for piece in pieces[1] for token in piece.tokens]
    rollouts = [(prompt, parent, [value for piece in pieces[1] for value in piece.logprobs])]
    for number in (2, 3):
        begin = tuple(pieces[number][0].generated)
        assert begin == tuple(parent[: len(begin)])
        assert begin
        tokens = [token for piece in pieces[number] for token in piece.tokens]
        rollouts.append(((*prompt, *begin), tokens, [value for piece in pieces[number] for value in piece.logprobs]))
    expect_equal(trained[0], rollouts)
