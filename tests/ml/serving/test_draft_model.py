"""Speculative decoding with a draft model: answers are those without, whatever the draft model is worth."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_pairs import LONGEST, VOCABULARY, Answer, drafting, pair
from served_ranks import random_model, save_random
from test_engine import answers

from craton.job import Job, parse_job
from craton.ml.data.tokenizer import train_bpe
from craton.ml.models import Decoder
from craton.ml.serving.__main__ import settings_of
from craton.ml.serving.device import EngineRank, load_served
from craton.ml.serving.device.order_bytes import EXECUTE, decode_order, encode_order
from craton.ml.serving.engine import build_runner, join_engine
from craton.ml.serving.engine.build import bytes_of_block
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Sampling, Stats, Submit
from craton.ml.serving.schedule import DraftInput, StepInput
from craton.ml.serving.settings import EngineSettings, ServingError
from craton.orchestration.draft.check import check_weights
from craton.orchestration.errors import StartError
from craton.planning.serving import AUTO_LENGTHS, ServedModel, SpeculationCosts, roofline_costs

SETTINGS = EngineSettings(max_length=LONGEST, blocks=200, max_running=6, page=4, chunk_tokens=32)
WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "graphs": {"graphs": "always"},
    "tight": {"max_length": 72, "blocks": 24, "chunk_tokens": 9},
}
USED = {"roomy": "prefix_hits", "graphs": "prefix_hits", "tight": "preemptions"}


def engine_of(
    draft: Decoder | None, costs: SpeculationCosts | None = None, model: Decoder | None = None, **settings: Any
) -> Engine:
    wanted = replace(SETTINGS, **settings)
    runner, found, length = build_runner(model or pair("llama")[1], wanted, draft=draft)
    return join_engine(runner, runner, found, length, costs=costs)


def requests() -> list[Submit]:
    """Greedy and sampled, with a common beginning, copies, and one that needs more than a temperature."""
    shared = tuple(range(3, 40))
    found = [
        Submit(number, (*shared[: 9 * (number % 4)], number, 8, 9), Sampling(20, 0.4 * (number % 3), seed=number))
        for number in range(1, 7)
    ]
    found.append(Submit(20, (*shared, 5), Sampling(25, 0.8, seed=3), copies=3))
    found.append(Submit(21, (*shared, 6), Sampling(25, 0.9, seed=4, top_p=0.6, presence_penalty=0.4)))
    return [*found, Submit(22, (*shared, 7), Sampling(25, 0.5, seed=5), generated=(1, 2, 3, 4, 5))]


def tokens_of(found: dict[tuple[int, int], Answer]) -> dict[tuple[int, int], list[int]]:
    return {key: answer.tokens for key, answer in found.items()}


def run(engine: Engine, *wanted: Submit) -> tuple[dict[tuple[int, int], list[int]], Stats]:
    found = tokens_of(answers(engine, *(wanted or requests())))
    return found, engine.stats()


@pytest.fixture(scope="module")
def plain() -> dict[tuple[int, int], list[int]]:
    return run(engine_of(None))[0]


@pytest.mark.parametrize("way", [pytest.param("roomy", marks=pytest.mark.slow), "graphs", "tight"])
def test_answers_are_those_without_drafts(way: str, plain: dict[tuple[int, int], list[int]]) -> None:
    engine = engine_of(drafting("llama"), draft_tokens=3, **WAYS[way])
    run(engine, Submit(1, (1, 2), Sampling(1, 0.0)))  # who has seen only short answers admits too many
    first, _ = run(engine)
    again, stats = run(engine)  # over the prefix cache of the first
    assert first == plain
    assert again == plain
    assert 0.2 < stats.accepted / stats.drafted < 0.95
    assert 2 * stats.drafts < stats.drafted <= 3 * stats.drafts
    assert getattr(stats, USED[way])


def test_an_equal_model_has_every_draft_token_accepted(plain: dict[tuple[int, int], list[int]]) -> None:
    engine = engine_of(copy.deepcopy(pair("llama")[1]), draft_tokens=4)
    found, stats = run(engine)
    assert found == plain
    assert stats.accepted == stats.drafted > 60
    assert stats.draft_acceptance > 0.9
    alone = engine_of(copy.deepcopy(pair("llama")[1]), draft_tokens=4)
    run(alone, Submit(1, (5, 6, 7), Sampling(21, 0.0)))
    assert alone.stats().steps == 1 + 20 / 5


def test_the_number_of_draft_tokens_follows_their_acceptance(plain: dict[tuple[int, int], list[int]]) -> None:
    config = pair("llama")[1].config
    cheap = roofline_costs(ServedModel(replace(config.shape, layers=40)), ServedModel(replace(config.shape, layers=1)))
    sampling = Sampling(200, 0.0)
    good = engine_of(copy.deepcopy(pair("llama")[1]), cheap, draft_tokens=8, draft_auto=True, max_running=2)
    lengths = set()
    good.submit(Submit(1, (5, 6, 7), sampling))
    while not good.is_idle:
        good.step()
        lengths.add(good.stats().draft_tokens)
    assert 8 in lengths
    assert good.stats().draft_speedup > 1
    dear = roofline_costs(ServedModel(replace(config.shape, layers=40)), ServedModel(replace(config.shape, layers=20)))
    useless = engine_of(random_model(config, seed=9), dear, draft_tokens=8, draft_auto=True)
    found, stats = run(useless)
    assert found == plain
    assert stats.draft_tokens == 0


def test_the_draft_model_computes_a_token_once_and_a_bounded_number_per_step() -> None:
    engine = engine_of(drafting("llama"), draft_tokens=2, chunk_tokens=16)
    drafter = engine._executor.drafter  # type: ignore[attr-defined]
    works: list[DraftInput] = []
    draft = drafter.draft

    def record(work: DraftInput) -> torch.Tensor:
        works.append(work)
        return draft(work)

    drafter.draft = record
    prompt = tuple(range(1, 91))
    run(engine, Submit(1, prompt, Sampling(20, 0.0)))
    caught_up = [
        position
        for work in works
        for end, count, is_late in zip(work.ends, work.counts, np.arange(len(work.rows)) >= work.requests, strict=True)
        for position in range(end - count, end if is_late else end - 2)
    ]
    assert caught_up == list(range(len(caught_up)))
    assert len(caught_up) >= len(prompt)
    assert max(work.counts.sum() for work in works) <= 16 + 2
    works.clear()
    run(engine, Submit(2, prompt, Sampling(20, 0.0)))
    assert works[0].counts.tolist() == [len(prompt) + 1 - 88], "the first 88 tokens are in the prefix cache"


def test_draft_and_model_share_their_distribution() -> None:
    """Chi-square of the second and third token of an answer, which are drafted, against the model's probabilities."""
    config = pair("llama")[1].config
    model, other = (random_model(config, seed, vocab=4, layers=1) for seed in (1, 2))
    engine = engine_of(other, model=model, draft_tokens=2, max_running=64, blocks=400)
    prompt, count = (1, 3, 2), 400
    wanted = [Submit(seed, prompt, Sampling(4, 0.7, seed=seed)) for seed in range(count)]
    found, stats = run(engine, *wanted)
    seen = Counter((tokens[1], tokens[2]) for tokens in found.values())
    assert 0.1 < stats.accepted / stats.drafted < 0.9
    assert chi_square(seen, probabilities(model, prompt), count) < 37.7  # 15 degrees of freedom: p = 0.001
    assert chi_square(seen, probabilities(other, prompt), count) > 100.0


def chi_square(seen: Counter[tuple[int, int]], expected: dict[tuple[int, int], float], count: int) -> float:
    return sum((seen[pair] - count * share) ** 2 / (count * share) for pair, share in expected.items())


@torch.no_grad()
def probabilities(model: Decoder, prompt: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """Of the second and third token after a prompt, over all first ones, at temperature 0.7."""

    def following(*tokens: int) -> torch.Tensor:
        hidden = model(torch.tensor([[*prompt, *tokens]]))[0, -1]
        return (hidden @ model.head_weight.t() / 0.7).softmax(-1).double()

    size = model.config.shape.vocab
    total = np.zeros((size, size))
    first = following()
    for one in range(size):
        second = following(one)
        for two in range(size):
            total[two] += (first[one] * second[two] * following(one, two)).numpy()
    return {(two, three): float(total[two, three]) for two in range(size) for three in range(size)}


@pytest.mark.parametrize("level", [1, 2])
def test_a_draft_model_survives_sleep_and_new_weights(level: int) -> None:
    model = copy.deepcopy(pair("llama")[1])
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    runner, settings, length = build_runner(
        model, replace(SETTINGS, draft_tokens=3), draft=copy.deepcopy(pair("llama")[1])
    )
    engine = join_engine(runner, runner, settings, length)
    rank = EngineRank(runner)
    wanted = Submit(1, (5, 6, 7, 8, 9, 10), Sampling(40, 0.7, seed=2))
    before, _ = run(engine, wanted)
    engine.release()
    rank.sleep(level)
    rank.wake(("weights", "kv_cache"))
    model.load_state_dict(weights)
    engine.change_version(1)
    after, stats = run(engine, wanted)
    assert after == before
    assert stats.accepted == stats.drafted


def test_a_draft_model_that_cannot_draft_is_refused() -> None:
    config = pair("llama")[1].config
    with pytest.raises(ServingError, match="vocabulary of 97 tokens exceeds the model's, 96"):
        engine_of(random_model(config, vocab=VOCABULARY + 1), draft_tokens=2)
    with pytest.raises(ServingError, match="draft_tokens of 1 or more"):
        engine_of(drafting("llama"))


def test_other_tokens_are_refused_before_and_at_the_start(tmp_path: Path) -> None:
    for name, text in (("model", "abc xyz 0123456789"), ("other", "hello world foo bar")):
        folder = save_random(tmp_path / name, pair("llama")[1].config, vocab=280)
        train_bpe([text] * 4, 280, folder)

    def job_of(draft: str) -> Job:
        serve = f"serve: {{precision: fp32, speculate: {{model: ./{draft}}}}}"
        return parse_job(f"kind: serve\nmodel: {tmp_path}/model\ncluster: local\n{serve}\n", folder=tmp_path)

    same, other = job_of("model"), job_of("other")
    check_weights(same)
    assert load_served(same, torch.device("cpu")).draft is not None
    assert settings_of(same).draft_lengths == AUTO_LENGTHS
    problem = r"serve\.speculate: token 2\d\d of the model is .*; use a draft model with the same tokenizer"
    with pytest.raises(StartError, match=problem):
        check_weights(other)
    with pytest.raises(ServingError, match=problem):
        load_served(other, torch.device("cpu"))


def test_a_smaller_vocabulary_can_draft(plain: dict[tuple[int, int], list[int]]) -> None:
    engine = engine_of(random_model(pair("llama")[1].config, seed=4, vocab=50), draft_tokens=3)
    wanted = requests()[:4]
    assert run(engine, *wanted)[0] == {(request.id, 0): plain[request.id, 0] for request in wanted}


def test_the_kv_cache_of_the_draft_model_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craton.ml.serving.engine.build.CPU_KV_BYTES", 2**22)
    model, draft = pair("llama")[1], drafting("llama")
    settings = replace(SETTINGS, blocks=0, draft_tokens=2, page=16)
    runner, found, _ = build_runner(model, settings, draft=draft)
    assert runner.drafter is not None
    assert len(runner.past.cache) == len(runner.drafter.runner.past.cache) == found.blocks
    assert found.blocks == 2**22 // (bytes_of_block(model, settings) + bytes_of_block(draft, settings))


def test_the_input_of_a_draft_model_reaches_other_ranks() -> None:
    numbers = np.arange(4, dtype=np.int32)
    drafts = DraftInput(2, 3, numbers, numbers + 1, numbers + 2, numbers + 3, numbers + 4, numbers + 5)
    work = StepInput(numbers, numbers, numbers, 1, numbers, numbers, numbers, drafts=drafts)
    decoded = decode_order(encode_order((EXECUTE, (work,))))
    assert decoded is not None
    found = decoded[1][0].drafts
    assert (found.length, found.requests) == (2, 3)
    for name in ("rows", "counts", "ends", "tokens", "places", "chosen"):
        assert getattr(found, name).tolist() == getattr(drafts, name).tolist()
