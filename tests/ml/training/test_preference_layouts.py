"""Every layout trains on the same pairs as one process does: losses, gradient norms, rewards and their reference."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gang import Gang
from numpy.typing import NDArray
from test_every_layout import CASES, LORA, MODELS, TOLERANCE, TOLERANCE_OF_CHOICES, Case
from tiny import GLOBAL_BATCH, SEQUENCE, VOCABULARY, make_trainer

from craton.job import Job, parse_job
from craton.ml.data.pairs import pack_pairs
from craton.ml.data.sample import Sample
from craton.ml.posttraining.preference import dpo_objective, num_samples
from craton.ml.posttraining.reference import Wanted, attach_references
from craton.ml.training import TrainingSetup
from craton.telemetry import RunDirectory

STEPS = 6
NAMES = ("run_loss", "run_gradient_norm", "run_reward_margin", "run_reward_accuracy", "run_chosen_reward")


class DrawnPairs:
    """Two pairs in most rows, one in some; the rejected tokens follow no rule."""

    slots, sequence = 2, SEQUENCE
    epoch_samples = 2 * GLOBAL_BATCH
    cache_folder = None

    def __init__(self) -> None:
        self.reference: NDArray[np.float32] | None = None

    @property
    def mark(self) -> NDArray[np.uint64]:
        return np.array([7], np.uint64)

    def num_pairs(self, _samples: int) -> int:
        return 2 * self.epoch_samples

    def pair_numbers(self, index: int) -> NDArray[np.int64]:
        row = index % self.epoch_samples
        return np.arange(2 * row, 2 * row + (1 if row % 4 == 3 else 2))

    def sample(self, index: int) -> Sample:
        numbers = self.pair_numbers(index)
        sequences = [side for number in numbers.tolist() for side in self._pair(number)]
        values = None if self.reference is None else self.reference[numbers]
        return pack_pairs(sequences, self.sequence, self.slots, values)

    def _pair(self, number: int) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        random = np.random.default_rng(number)
        prompt = (random.integers(VOCABULARY) + 7 * np.arange(3)) % VOCABULARY
        chosen = (prompt[-1] + 7 * np.arange(1, 1 + random.integers(2, 6))) % VOCABULARY
        rejected = random.integers(0, VOCABULARY, random.integers(1, 5))
        return [
            (np.concatenate((prompt, answer)), np.arange(len(prompt) + len(answer)) >= len(prompt))
            for answer in (chosen, rejected)
        ]


def preference_job(loss: str, train: dict[str, Any]) -> Job:
    options = {"precision": "fp32", "learning_rate": "1e-2", "initialize": "random", **train}
    section = ", ".join(f"{name}: {value}" for name, value in options.items())
    return parse_job(
        f"""
        name: tiny
        kind: dpo
        model: {{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: {VOCABULARY}}}
        data: {{sequence: {SEQUENCE}, path: pairs}}
        preference: {{loss: {loss}}}
        train: {{global_batch_sequences: {GLOBAL_BATCH}, steps: {STEPS}, {section}}}
        cluster: local
        """
    )


def curve(case: Case, loss: str = "dpo") -> tuple[dict[int, tuple[float, ...]], list[list[float]]]:
    """What rank 0 records at every step, and the reference log-probabilities."""
    job, source = preference_job(loss, dict(case.train)), DrawnPairs()
    trainer, records = make_trainer(
        job, case.layout, source=source, objective=dpo_objective(job), config=MODELS[case.model]
    )
    parts = trainer.parts
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        setup = TrainingSetup(
            job, directory, parts.ranks, parts.model, parts.objective, VOCABULARY, parts.recorder, parts.clock
        )
        attach_references(setup, [Wanted("train-0", source, num_samples(job))])
    trainer.fit()
    assert source.reference is not None
    numbers = {
        step: tuple(item[name] for name in NAMES) for step, item in records.metrics_by_step.items() if NAMES[0] in item
    }
    return numbers, source.reference.tolist()


@cache
def expected(model: str, adapters: bool, loss: str) -> tuple[dict[int, tuple[float, ...]], list[list[float]]]:
    return curve(Case({}, "", model, LORA if adapters else {}), loss)


FAST = ("cp 2 · fsdp 2",)
every_case = pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)


@every_case
def test_the_layout_prefers_as_one_process_does(gang: Gang, name: str) -> None:
    case = CASES[name]
    found, reference = gang.run(curve, case, ranks=4)[0]
    whole, whole_reference = expected(case.model, bool(case.train), "dpo")
    tolerance = TOLERANCE if case.model == "dense" else TOLERANCE_OF_CHOICES
    np.testing.assert_allclose(reference, whole_reference, rtol=1e-5, atol=1e-5)
    assert len(found) == STEPS
    for step, numbers in found.items():
        assert numbers == pytest.approx(whole[step], rel=10 * tolerance, abs=1e-5), f"step {step}"
    assert found[1][0] == pytest.approx(np.log(2), abs=1e-4), "the first step compares the reference with itself"
    assert found[STEPS][0] < found[1][0]
    assert found[STEPS][3] > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ipo", "simpo", "orpo"])
@pytest.mark.parametrize("name", ["cp 2 · fsdp 2", "pp 2 · tp 2"])
def test_other_losses_do_so_too(gang: Gang, name: str, loss: str) -> None:
    found, _ = gang.run(curve, CASES[name], loss, ranks=4)[0]
    whole, _ = expected("dense", False, loss)
    for step, numbers in found.items():
        assert numbers == pytest.approx(whole[step], rel=10 * TOLERANCE, abs=1e-5), f"step {step}"
