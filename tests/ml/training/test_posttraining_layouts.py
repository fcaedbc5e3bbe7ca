"""Objectives of post-training on several ranks: slopes, entropies, sums over sequences and scalar heads train what one
process trains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gang import Gang
from tiny import SEQUENCE, VOCABULARY, make_trainer, tiny_job

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.job.sections.posttraining import Policy, Preference, Rollout
from craton.ml.data.sample import Sample
from craton.ml.models import DecoderConfig
from craton.ml.posttraining import policy_objective, preference_objective
from craton.ml.training import Objective

STEPS = 3
TOLERANCE = 1e-4  # relative, of every loss, gradient norm and metric: steps are large here
SHAPE = ModelShape("dense", 2, 32, 64, 4, 2, 8, VOCABULARY, tied_embeddings=True)
LORA = {"lora": "{rank: 3, targets: all}"}
PROMPT, LONGEST = 3, 12  # of the two sequences in a row


class Samples:
    """Rows of two sequences, with the extras of pairs and of rollouts."""

    sequence = SEQUENCE
    epoch_samples = None

    def sample(self, index: int) -> Sample:
        random = np.random.default_rng(index)
        tokens = random.integers(0, VOCABULARY, SEQUENCE)
        labels, positions, documents = np.full(SEQUENCE, -100), np.zeros(SEQUENCE, np.int64), np.full(SEQUENCE, 2)
        extra: dict[str, Any] = {
            name: np.zeros(SEQUENCE, np.float32)
            for name in ("side", "pair_start", "last", "advantage", "sequence_start")
        }
        weight, pair = np.zeros(SEQUENCE, np.float32), np.full(SEQUENCE, -1)
        lengths, at = random.integers(PROMPT + 2, LONGEST + PROMPT, 2), 0
        for number, length in enumerate(lengths):
            inside, completion = slice(at, at + length), slice(at + PROMPT, at + length)
            labels[at : at + length - 1] = tokens[at + 1 : at + length]
            labels[at + length - 1] = 1
            positions[inside], documents[inside], pair[inside] = np.arange(length), number, 0
            weight[completion], extra["side"][inside] = 1, 1 - 2 * number
            extra["advantage"][inside] = random.normal()
            extra["last"][at + length - 1] = extra["sequence_start"][at + PROMPT] = 1
            at += length
        extra["pair_start"][PROMPT] = 1
        log_prob = np.log(1 / VOCABULARY) + random.normal(0, 0.2, (4, SEQUENCE))
        names = ("rollout_logprob", "old_logprob", "reference_logprob", "return_")
        extra |= {name: values.astype(np.float32) for name, values in zip(names, log_prob, strict=True)}
        extra |= {
            "old_value": np.zeros(SEQUENCE, np.float32),
            "pair": pair,
            "sequence": np.where(documents > 1, -1, documents),
        }
        extra["reference"] = random.normal(-40, 3, (1, 2)).astype(np.float32)
        extra["sequence_tokens"] = (lengths - PROMPT).astype(np.float32)
        positions[at:] = np.arange(SEQUENCE - at)
        return Sample(tokens, labels, positions, weight, documents.astype(np.int32), extra)


@dataclass(frozen=True)
class Case:
    objective: str
    sizes: dict[str, Any] = field(default_factory=dict)
    train: dict[str, str] = field(default_factory=dict)
    has_slope: bool = True

    def __str__(self) -> str:
        sizes = " ".join(f"{name} {value}" for name, value in self.sizes.items())
        return f"{self.objective}: {sizes}{', adapters' if self.train else ''}"


def objective_and_heads(name: str) -> tuple[Objective, str]:
    if name in ("dpo", "reward"):
        return preference_objective(Preference.model_validate({"loss": name})), {"reward": "score"}.get(name, "tokens")
    policy = {"loss": name, "epochs": 2, "kl": 0.1, "entropy": 0.05, "correction": "sequence"}
    rollout = Rollout(temperature=0.7, max_tokens=LONGEST)
    return policy_objective(Policy.model_validate(policy), rollout), "both" if name == "ppo" else "tokens"


def curve(case: Case, folder: str | None = None, until: int | None = None) -> dict[int, dict[str, float]]:
    """Loss, gradient norm and the objective's report of every step, and of an evaluation after the last one."""
    objective, heads = objective_and_heads(case.objective)
    if not case.has_slope:
        assert objective.slope is not None
        objective = replace(objective, slope=None)
    config = DecoderConfig(SHAPE, initializer_range=0.1, heads=heads)  # type: ignore[arg-type]
    job = tiny_job(STEPS, evaluate="{every_steps: 3, sequences: 3}", **case.train)
    layout = Layout(**{"precision": "fp32", "micro_batch": 2, **case.sizes})
    trainer, records = make_trainer(
        job,
        layout,
        Path(folder) if folder else None,
        source=Samples(),
        objective=objective,
        config=config,
        validation=Samples(),
        steps=until,
    )
    trainer.fit()
    names = ("kl", "entropy", "logprob_gap", "clipped_share", "corrected_share", "value_loss", "reward_margin")
    kept = {"run_loss", "run_gradient_norm", "run_evaluation_loss", "run_reward_accuracy"}
    kept |= {f"run_{name}" for name in names} | {f"run_validation_{name}" for name in names}
    steps = records.metrics_by_step.items()
    return {step: {name: value for name, value in each.items() if name in kept} for step, each in steps}


@cache
def expected(objective: str, adapted: bool) -> dict[int, dict[str, float]]:
    return curve(Case(objective, {"micro_batch": 8}, LORA if adapted else {}))


CASES = [
    Case("dapo", {"tp": 2}),  # slope and exact entropies
    Case("dpo", {"cp": 2, "pp": 2}),  # differentiable sums over the context group
    Case("ppo", {"pp": 2, "tp": 2}),
    Case("reward", {"fsdp": 2, "tp": 2}, LORA),
]
RARE = [
    Case("dapo", {"cp": 2, "fsdp": 2}),
    Case("gspo", {"cp": 2}),
    Case("gspo", {"fsdp": 2, "tp": 2}),
    Case("grpo", {"pp": 2, "fsdp": 2, "schedule": "zero-bubble"}),
    Case("dpo", {"fsdp": 4}),
    Case("dpo", {"fsdp": 2, "tp": 2}, LORA),
    Case("ppo", {"fsdp": 4}),
    Case("ppo", {"cp": 2, "tp": 2}),
    Case("reward", {"pp": 2, "cp": 2}),
    Case("reward", {"pp": 2, "fsdp": 2, "vpp": 1, "schedule": "zero-bubble"}, LORA),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in RARE)], ids=str)
def test_the_layout_trains_as_one_process_does(gang: Gang, case: Case) -> None:
    ranks = int(np.prod([case.sizes.get(name, 1) for name in ("pp", "fsdp", "cp", "tp")]))
    found = gang.run(curve, case, ranks=ranks)[0]
    whole = expected(case.objective, bool(case.train))
    assert len(found) == STEPS
    assert "run_evaluation_loss" in found[STEPS]
    for step, numbers in found.items():
        assert numbers == pytest.approx(whole[step], rel=TOLERANCE, abs=1e-6), f"step {step}"
    assert len(whole[STEPS]) > 5
    assert whole[1]["run_gradient_norm"] > 1e-3


@pytest.mark.parametrize("objective", ["dapo", "ppo"])
def test_gradients_of_the_forward_pass_are_those_of_autograd(objective: str) -> None:
    recomputed = curve(Case(objective, {"micro_batch": 8}, has_slope=False))
    for step, numbers in expected(objective, False).items():
        assert numbers == pytest.approx(recomputed[step], rel=TOLERANCE, abs=1e-6)


@pytest.mark.slow
def test_a_scalar_head_goes_on_from_a_checkpoint_of_another_layout(gang: Gang, tmp_path: Path) -> None:
    case = Case("ppo", {"fsdp": 2, "tp": 2})
    gang.run(curve, case, str(tmp_path), 2, ranks=4)
    found = curve(Case("ppo", {"micro_batch": 4}), str(tmp_path))
    assert min(found) == 3
    assert found[3] == pytest.approx(expected("ppo", False)[3], rel=TOLERANCE, abs=1e-6)
