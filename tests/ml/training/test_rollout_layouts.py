"""Every layout trains on given rollouts as one process does: packing, minibatches, passes that score samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from gang import Gang
from test_every_layout import CASES, MODELS, Case
from tiny import SEQUENCE, VOCABULARY, make_trainer

from craton.job import Job, parse_job
from craton.job.layout import Layout
from craton.ml.data import Prompt
from craton.ml.models.config import RoutingConfig
from craton.ml.posttraining import policy_objective
from craton.ml.posttraining.loader import RolloutLoader, Scorers
from craton.ml.posttraining.samples import RolloutSample, StepSamples
from craton.ml.posttraining.token_reader import TokenReader
from craton.ml.training import build_decoder
from craton.ml.verifiers import Verdict

STEPS = 2
TOLERANCE = 1e-4  # relative: four updates with a large learning rate
PROMPTS, GROUP = 4, 3
NAMES = ("loss", "gradient_norm", "kl", "clipped_share", "logprob_gap", "value_loss", "advantage_zero_share")


def policy_job(loss: str, adapters: bool) -> Job:
    """With a large epsilon, so that Adam does not blow up what rounding does to gradients near 0."""
    lora = ", lora: {rank: 4, targets: all}" if adapters else ""
    return parse_job(
        f"""
        name: given
        kind: grpo
        model: {{layers: 4, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: {VOCABULARY}}}
        data: {{sequence: {SEQUENCE}, path: none}}
        policy: {{loss: {loss}, clip: 0.2, epochs: 2, minibatches: 2, kl: 0.1, entropy: 0.01}}
        rollout: {{prompts: {PROMPTS}, group: {GROUP}, max_tokens: 12, temperature: 0.8, truncated: mask}}
        reward: {{verifier: exact}}
        train: {{steps: {STEPS}, precision: fp32, initialize: random, learning_rate: 1e-2, epsilon: 1e-3{lora}}}
        cluster: local
        """
    )


class Given:
    """Samples that do not depend on weights. One has no verdict, and some are truncated."""

    pending = ()

    def draw(self, first: int, check: Callable[[], None]) -> StepSamples:
        random = np.random.default_rng(first)
        samples = []
        for index in range(first, first + PROMPTS):
            prompt = Prompt(index, tuple(random.integers(0, VOCABULARY, int(random.integers(3, 9))).tolist()), {})
            for copy in range(GROUP):
                count = int(random.integers(2, 13))
                tokens = [*prompt.tokens, *random.integers(0, VOCABULARY, count).tolist()]
                is_generated = [bool(number % 4) or number == count - 1 for number in range(count)]
                logprobs = (random.normal(-math.log(VOCABULARY), 0.3, count) * is_generated).tolist()
                sample = RolloutSample(prompt, copy, tokens, len(prompt.tokens), is_generated, logprobs, [])
                sample.is_truncated = count == 12
                reward = None if (index, copy) == (first, 1) else float(random.normal())
                sample.verdict = Verdict(reward)
                samples.append(sample)
        return StepSamples(samples, GROUP, first + PROMPTS, {"rollout": 0.0}, {})

    def close(self) -> None:
        pass


def curve(case: Case, loss: str) -> dict[int, dict[str, float]]:
    """The numbers of every step, as rank 0 records them."""
    job = policy_job(loss, bool(case.train))
    assert job.policy is not None
    assert job.rollout is not None
    assert job.train is not None
    # Losses and biases that balance experts depend on how rows are cut into micro-batches.
    config = replace(MODELS[case.model], routing=RoutingConfig(), heads="both" if loss == "ppo" else "tokens")
    layout = Layout(**{"precision": "fp32", "micro_batch": 1, **case.sizes})
    trainer, records = make_trainer(job, layout, objective=policy_objective(job.policy, job.rollout), config=config)
    ranks = trainer.parts.ranks
    other = job.model_copy(update={"train": job.train.model_copy(update={"seed": 7, "lora": None})})
    frozen = build_decoder(config, other, ranks).requires_grad_(False)

    def reader(model: Any, what: Any = "log_probs") -> TokenReader:
        return TokenReader(model, ranks, SEQUENCE, what, 0.8)

    model = trainer.parts.model
    values = reader(model, "scores") if loss == "ppo" else None
    scorers = Scorers(reader(model), values, reader(frozen).read)
    trainer.parts.open_loader = lambda start: RolloutLoader(job, ranks, Given(), scorers, start)
    trainer.fit()
    assert trainer.loader is not None
    assert trainer.loader.state == STEPS * PROMPTS
    return {
        step: {name: numbers[f"run_{name}"] for name in NAMES if f"run_{name}" in numbers}
        for step, numbers in records.metrics_by_step.items()
    }


@cache
def expected(model: str, adapters: bool, loss: str) -> dict[int, dict[str, float]]:
    return curve(Case({"micro_batch": 4}, "", model, {"lora": "yes"} if adapters else {}), loss)


EVERY_DAY = {"pp 2 · fsdp 2, interleaved": "ppo", "tp 2 · cp 2": "grpo"}
ALL = [
    pytest.param(name, loss, marks=[] if EVERY_DAY.get(name) == loss else [pytest.mark.slow])
    for name in CASES
    for loss in ("grpo", "ppo", "gspo")
]


@pytest.mark.parametrize(("name", "loss"), ALL)
def test_the_layout_trains_on_rollouts_as_one_process_does(gang: Gang, name: str, loss: str) -> None:
    case = CASES[name]
    found = gang.run(curve, case, loss, ranks=4)[0]
    whole = expected(case.model, bool(case.train), loss)
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, numbers in found.items():
        assert numbers == pytest.approx(whole[step], rel=TOLERANCE, abs=1e-6), f"step {step}"
    assert whole[1]["gradient_norm"] > 1e-2
    assert whole[1]["kl"] > 0
