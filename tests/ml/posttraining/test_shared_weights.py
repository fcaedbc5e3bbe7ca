"""The rollout engine has the trainer's weights, shared or copied, in every layout; training goes on undisturbed."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from gang import Gang
from rollout_models import LORA, VOCABULARY, trained_model, trainer_logprobs, update
from torch import Tensor
from torch.distributed.tensor import DTensor

from craton.ml.models import Decoder
from craton.ml.models.moe import MoE
from craton.ml.posttraining.gathering import TrainedWeights
from craton.ml.posttraining.shared import RolloutEngine, RolloutError
from craton.ml.serving.clients import InferenceRequest, RequestRefusedError, complete_all
from craton.ml.serving.messages import Sampling
from craton.ml.serving.settings import EngineSettings
from craton.ml.training import merge_adapters
from craton.ml.training.parallel import Ranks

SETTINGS = EngineSettings(max_length=64, max_running=6, page=4, chunk_tokens=24)
SAMPLING = Sampling(max_tokens=10, temperature=0.8, logprobs=0, logprobs_mode="sampled")
PROMPTS = [tuple(range(begin, begin + 9)) for begin in (1, 20, 40, 60)]
REQUESTS = [
    InferenceRequest(prompt, replace(SAMPLING, seed=1000 * number), copies=3) for number, prompt in enumerate(PROMPTS)
]

Found = list[tuple[list[int], list[float]]]


def rollouts(engine: RolloutEngine, requests: list[InferenceRequest] = REQUESTS) -> Found:
    groups = engine.generate(requests)
    return [(answer.sampled_tokens, answer.sampled_logprobs) for group in groups for answer in group]


def fresh_engine(model: Decoder, ranks: Ranks) -> RolloutEngine:
    """An engine over a copy of the weights."""
    return RolloutEngine(copy.deepcopy(model), ranks, SETTINGS)


def expect_trainable(model: Decoder) -> None:
    assert model.training
    assert any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("family", "lora"), [("llama", None), ("experts", None), ("llama", LORA)])
def test_one_rank_shares_the_storage(family: str, lora: str | None) -> None:
    model, optimizer, ranks = trained_model(family, lora=lora)
    engine = RolloutEngine(model, ranks, SETTINGS)
    assert engine.is_shared
    theirs = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert {name: parameter.data_ptr() for name, parameter in engine.twin.named_parameters()} == theirs
    before = rollouts(engine)
    for step in (1, 2):
        update(model, optimizer, step)
        for module in model.modules():
            if isinstance(module, MoE):
                module.update_bias()
        engine.refresh(step)
        expect_trainable(model)
    after = rollouts(engine)
    assert after != before
    assert after == rollouts(fresh_engine(model, ranks))
    (answer,) = engine.generate(REQUESTS[:1])[0][:1]
    assert set(answer.sampled_versions) == {2}


def test_adapters_have_the_trainers_log_probabilities() -> None:
    model, optimizer, ranks = trained_model("llama", lora=LORA)
    engine = RolloutEngine(model, ranks, SETTINGS)
    for step in (1, 2, 3):
        update(model, optimizer, step)
    engine.refresh(3)
    found = rollouts(engine)
    texts = [
        (prompt, tokens)
        for prompt, (tokens, _) in zip([each for each in PROMPTS for _ in range(3)], found, strict=True)
    ]
    for expected, (_, logprobs) in zip(trainer_logprobs(model, texts, 0.8), found, strict=True):
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)
    plain = copy.deepcopy(model)
    merge_adapters(plain)
    merged = rollouts(RolloutEngine(plain, ranks, SETTINGS))
    assert [tokens for tokens, _ in merged] == [tokens for tokens, _ in found]
    sent = dict(TrainedWeights(model, ranks).merged())
    assert sent.keys() == plain.state_dict().keys()
    for name, tensor in plain.named_parameters():
        assert torch.equal(sent[name], tensor)


def test_a_scalar_head_is_not_part_of_the_twin() -> None:
    model, _, ranks = trained_model("llama")
    expected = rollouts(RolloutEngine(model, ranks, SETTINGS))
    both = Decoder(replace(model.config, heads="both"))
    both.load_state_dict({**both.state_dict(), **model.state_dict()})
    engine = RolloutEngine(both, ranks, SETTINGS)
    assert engine.is_shared
    assert engine.twin.score is None
    assert rollouts(engine) == expected
    with pytest.raises(RolloutError, match="scores texts and cannot generate"):
        RolloutEngine(Decoder(replace(model.config, heads="score")), ranks, SETTINGS)


def test_steps_depend_on_weights_and_requests_alone() -> None:
    model, _, ranks = trained_model("llama")
    engine = RolloutEngine(model, ranks, replace(SETTINGS, blocks=40))
    first = rollouts(engine)
    assert len({tuple(tokens) for tokens, _ in first}) == len(first), "no two copies are alike"
    others = [InferenceRequest(prompt, replace(SAMPLING, max_tokens=1, seed=3)) for prompt in PROMPTS]
    rollouts(engine, others)
    steps = engine.engine.stats().steps
    assert rollouts(engine) == first, "to the bit, whatever came before"
    num_steps = engine.engine.stats().steps - steps
    new = RolloutEngine(model, ranks, replace(SETTINGS, blocks=40))
    assert rollouts(new) == first
    assert new.engine.stats().steps == num_steps
    engine.engine.check()


def test_the_client_generates_beside_training() -> None:
    model, _, ranks = trained_model("llama")
    engine = RolloutEngine(model, ranks, SETTINGS)

    async def work() -> list[list[int]]:
        async with engine.client() as client:
            await client.between_steps(lambda: engine.refresh(4))
            groups = await complete_all(client, REQUESTS)
            return [answer.sampled_tokens for group in groups for answer in group]

    assert asyncio.run(work()) == [tokens for tokens, _ in rollouts(engine)]
    assert engine.engine.version == 4
    engine.close()
    with pytest.raises(RequestRefusedError, match="asleep"):
        rollouts(engine)


def test_what_cannot_be_generated_is_refused() -> None:
    model, _, ranks = trained_model("llama")
    with pytest.raises(RolloutError, match="decoder families; use mode separate"):
        RolloutEngine(torch.nn.Linear(2, 2), ranks, SETTINGS)
    engine = RolloutEngine(model, ranks, SETTINGS)
    for request, message in (
        (InferenceRequest("text", replace(SAMPLING, seed=1)), "the prompt is a text, and there is no tokenizer"),
        (InferenceRequest(PROMPTS[0], SAMPLING), "has no seed"),
        (InferenceRequest(PROMPTS[0], replace(SAMPLING, seed=1), stop=("x",)), "stop strings need a tokenizer"),
        (InferenceRequest((), replace(SAMPLING, seed=1)), "the prompt has no tokens"),
        (InferenceRequest((VOCABULARY,), replace(SAMPLING, seed=1)), "is not in the model's vocabulary"),
    ):
        with pytest.raises(RequestRefusedError, match=message):
            engine.generate([REQUESTS[0], request])
        assert engine.engine.is_idle
        engine.engine.check()
    assert rollouts(engine)


def test_the_kv_cache_is_bounded() -> None:
    model, _, ranks = trained_model("llama")
    block = 2 * 2 * 2 * 4 * 8 * 4  # layers, keys and values, heads, page, head_dim, bytes
    assert RolloutEngine(model, ranks, SETTINGS).engine.stats().blocks == 6 * 16 + 1, "what its requests can use"
    assert RolloutEngine(model, ranks, SETTINGS, kv_bytes=40 * block).engine.stats().blocks == 39
    assert RolloutEngine(model, ranks, replace(SETTINGS, blocks=30)).engine.stats().blocks == 29


# -- several ranks ----------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "replicate 2": ("llama", {"replicate": 2}, None),
    "fsdp 2": ("experts", {"fsdp": 2}, None),
    "replicate 2 · fsdp 2": ("qwen", {"replicate": 2, "fsdp": 2}, None),
    "fsdp 2 · tp 2": ("llama", {"fsdp": 2, "tp": 2}, None),
    "fsdp 2 · tp 2, adapters": ("llama", {"fsdp": 2, "tp": 2}, LORA),
    "cp 2": ("llama", {"cp": 2}, None),
    "fsdp 4 · ep 2": ("experts", {"fsdp": 4, "ep": 2}, None),
    "fsdp 2 · tp 2 · ep 2": ("experts", {"fsdp": 2, "tp": 2, "ep": 2}, None),
    "pp 2 · fsdp 2": ("llama", {"pp": 2, "fsdp": 2}, None),
    "pp 2 · tp 2": ("qwen", {"pp": 2, "tp": 2}, None),
    "pp 2, adapters": ("experts", {"pp": 2}, LORA),
}
FAST = ("replicate 2", "pp 2 · fsdp 2")


@torch.no_grad()
def shifted(tensor: Tensor) -> None:
    """A change that depends on nothing but the values, as an optimizer's on every rank."""
    tensor.mul_(1.0 + 0.1 * tensor.dim()).add_(0.03)


def on_ranks(
    family: str, sizes: dict[str, Any], lora: str | None
) -> tuple[bool, Found, Found, bool, dict[str, Tensor]]:
    """Whether the twin is shared, rollouts before and after an update, whether FSDP still shards the model, and the
    weights to send."""
    model, _, ranks = trained_model(family, sizes, lora)
    engine = RolloutEngine(model, ranks, SETTINGS)
    before = rollouts(engine)
    for parameter in model.parameters():
        if parameter.requires_grad:
            shifted(parameter.detach())
    if not {"pp", "cp"} & set(sizes):
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.int64))  # after it, FSDP keeps some parameters gathered
    engine.refresh(1)
    expect_trainable(model)
    is_sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    sent = {name: tensor.clone() for name, tensor in TrainedWeights(model, ranks).merged()}
    return engine.is_shared, before, rollouts(engine), is_sharded, sent


@pytest.mark.parametrize(
    "name", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_every_rank_has_the_weights_of_one_process(gang: Gang, name: str) -> None:
    family, sizes, lora = LAYOUTS[name]
    _, before, after, _, sent = on_ranks(family, {}, lora)
    assert before != after
    world = 1
    for key, size in sizes.items():
        world *= size if key != "ep" else 1
    assert not any("lora" in weight for weight in sent)
    results = gang.run(on_ranks, family, sizes, lora, ranks=world)
    for is_shared, theirs_before, theirs_after, is_sharded, theirs_sent in results:
        assert is_shared == (name == "replicate 2")
        assert is_sharded
        assert theirs_before == before
        assert theirs_after == after
        assert list(theirs_sent) == list(sent)
        assert all(torch.equal(tensor, theirs_sent[weight]) for weight, tensor in sent.items())
