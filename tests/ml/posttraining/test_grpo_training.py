"""Whole trainings of kind grpo in one process: real rollouts, real verifiers, exact repetition and resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_jobs import FOLDER, PROMPT_TOKENS, byte_tokenizer, job_text, rollout_run
from torch import Tensor

from craton.ml.data import PromptEncoder
from craton.ml.models import save_folder
from craton.ml.posttraining import build as posttraining
from craton.ml.posttraining.synchronous import EqualRewardsError
from craton.ml.training import RankIdentity, Trainer
from craton.ml.verifiers import VerifierError
from craton.telemetry import RunDirectory, result_details, summarize
from craton.telemetry.files import read_lines
from craton.telemetry.rank import LedgerClock, Recorder

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes") / "tokenizer")


@pytest.fixture(autouse=True)
def functions_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the jobs are found, and a quarter of the tokens end a completion of an untrained model."""
    monkeypatch.setenv("CRATON_JOB_FOLDER", str(FOLDER))
    monkeypatch.setattr(PromptEncoder, "stop_tokens", tuple(range(0, 259, 4)))


def trainer_of(run: RunDirectory, stop_at: int | None = None) -> Trainer:
    place = RankIdentity(0, 1, 0, FOLDER, stop_at)
    recorder = Recorder("node-0", 0, 0, run)
    return Trainer(posttraining.build(run, place, recorder, LedgerClock()), stop_at)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.parts.model.named_parameters()}


def trained(run: RunDirectory, stop_at: int | None = None) -> dict[str, Tensor]:
    """The weights after training this run."""
    trainer = trainer_of(run, stop_at)
    trainer.fit()
    return weights_of(trainer)


def metrics_of(run: RunDirectory) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in read_lines(run.metrics_path("node-0"))[0]:
        found.setdefault(line["step"], {}).update(line)
    return found


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def test_it_records_what_a_step_did(tmp_path: Path, tokenizer: Path) -> None:
    text = job_text(tokenizer, train="evaluate: {every_steps: 2, sequences: 5}")
    run = rollout_run(tmp_path, "recorded", text)
    before = weights_of(trainer_of(run))
    after = trained(run)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    steps = metrics_of(run)
    assert sorted(steps) == [1, 2, 3]
    for numbers in steps.values():
        assert 0 < numbers["run_reward"] < 1
        assert 0 < numbers["run_completion_tokens"] <= 6
        assert numbers["run_longest_completion_tokens"] <= 6
        assert numbers["run_logprob_gap"] < 1e-5, "engine and trainer agree"
        assert numbers["run_clipped_share"] == 0, "one update per step"
        assert numbers["run_verifier_failure_share"] == 0
        assert numbers["run_staleness"] == 0
        assert numbers["run_step_tokens"] >= 16 * (PROMPT_TOKENS + 1)
        for phase in ("rollout", "reward", "sync", "compute"):
            assert numbers[f"run_{phase}_seconds"] >= 0
    assert "run_validation_reward" in steps[2]
    samples = [line for line in read_lines(run.samples_path("node-0"))[0] if "trained" not in line]
    assert {line["step"] for line in samples} == {1, 2, 3}
    assert len({line["prompt"] for line in samples if line["step"] == 1}) > 1, "not one group only"
    assert all(line["parts"] == {"rollout_jobs:byte_reward": line["reward"]} for line in samples)


def test_it_records_each_term_of_the_reward(tmp_path: Path, tokenizer: Path) -> None:
    rest = "reward: [{verifier: regex, pattern: '.', weight: 2}, {python: 'rollout_jobs:failing_reward'}]\n"
    run = rollout_run(tmp_path, "terms", job_text(tokenizer, reward="", rest=rest))
    trained(run)
    steps = metrics_of(run)
    assert sorted(steps) == [1, 2, 3]
    failures = [numbers["run_term_failure_share/rollout_jobs:failing_reward"] for numbers in steps.values()]
    assert failures == [numbers["run_verifier_failure_share"] for numbers in steps.values()]
    assert max(failures) > 0
    for numbers in steps.values():
        assert numbers["run_term_failure_share/regex"] == 0
        assert 0 < numbers["run_term_reward/regex"] <= 1, "without its weight"
        assert 0 < numbers["run_term_reward/rollout_jobs:failing_reward"] < 1
    results = summarize(run).results
    assert results["term_reward/regex"] == steps[3]["run_term_reward/regex"]
    assert [title for title, _ in result_details(results)][:2] == ["regex", "rollout_jobs:failing_reward"]


def test_a_resumed_run_ends_with_the_weights_of_a_calm_one(tmp_path: Path, tokenizer: Path) -> None:
    text = job_text(
        tokenizer,
        steps=4,
        policy="{loss: dapo, epochs: 2, minibatches: 2, kl: 0.1}",
        rollout="filter: equal",
        reward="rare_reward",
        train="evaluate: {every_steps: 2, sequences: 5}",
    )
    calm = trained(rollout_run(tmp_path, "calm", text))
    broken = rollout_run(tmp_path, "broken", text)
    trained(broken, stop_at=1)
    (broken.path / "STOP").unlink(missing_ok=True)
    trained(broken, stop_at=3)
    (broken.path / "STOP").unlink(missing_ok=True)
    assert_equal(trained(broken), calm)
    drawn = metrics_of(tmp_path_run(tmp_path, "calm"))
    assert [drawn[step]["run_reward"] for step in drawn] == [
        metrics_of(broken)[step]["run_reward"] for step in sorted(drawn)
    ]


@pytest.mark.slow
def test_a_step_whose_line_was_lost_gets_its_reward_from_the_checkpoint(tmp_path: Path, tokenizer: Path) -> None:
    text = job_text(tokenizer, steps=4, policy="{loss: grpo, kl: 0.1}")
    calm = rollout_run(tmp_path, "calm-records", text)
    trained(calm)
    broken = rollout_run(tmp_path, "broken-records", text)
    trainer = trainer_of(broken, stop_at=2)
    trainer.parts.clock.is_shared = True  # as under an agent, which has written no step yet
    trainer.fit()
    (broken.path / "STOP").unlink(missing_ok=True)
    lines = broken.metrics_path("node-0").read_text().splitlines(keepends=True)
    broken.metrics_path("node-0").write_text(lines[0])
    trained(broken)
    expected, found = metrics_of(calm)[2], metrics_of(broken)[2]
    for name in ("loss", "reward", "reward_std", "kl", "entropy", "completion_tokens", "truncated_share", "staleness"):
        assert found[f"run_{name}"] == expected[f"run_{name}"], name
    assert "run_step_seconds" not in found, "its line was lost"


def tmp_path_run(root: Path, name: str) -> RunDirectory:
    return RunDirectory(root / name)


@pytest.mark.parametrize(
    ("policy", "rollout", "names"),
    [
        ("{loss: ppo, minibatches: 2, entropy: 0.01}", "truncated: mask", {"value_loss", "entropy"}),
        ("{loss: gspo, kl: 0.05, epochs: 2}", "temperature: 0.7", {"kl", "clipped_share"}),
        ("{loss: reinforce++, correction: sequence}", "", {"corrected_share"}),
    ],
    ids=["ppo", "gspo", "reinforce++"],
)
def test_every_kind_of_loss_trains(tmp_path: Path, tokenizer: Path, policy: str, rollout: str, names: set[str]) -> None:
    run = rollout_run(tmp_path, "losses", job_text(tokenizer, steps=2, policy=policy, rollout=rollout))
    trained(run)
    last = metrics_of(run)[2]
    assert {f"run_{name}" for name in names} <= set(last)
    assert all(math.isfinite(last[f"run_{name}"]) for name in names)
    assert last["run_gradient_norm"] > 0
    assert last["run_logprob_gap"] < 1e-5


@pytest.mark.parametrize(("sharper", "low", "high"), [(1, -1e-5, 1e-5), (8, 0.3, 1.5)])
def test_distillation_compares_with_the_teacher(
    tmp_path: Path, tokenizer: Path, sharper: float, low: float, high: float
) -> None:
    model = trainer_of(rollout_run(tmp_path, "teacher", job_text(tokenizer))).parts.model
    state = dict(model.state_dict())
    state["norm.weight"] = sharper * state["norm.weight"]  # the policy before training, but more certain
    folder = tmp_path / "teacher-model"
    save_folder(state, model.config, folder, dtype=torch.float32)  # type: ignore[arg-type]
    policy = f"{{loss: distill, teacher: {folder}}}"
    run = rollout_run(tmp_path, "student", job_text(tokenizer, steps=1, policy=policy, reward=""))
    trained(run)
    numbers = metrics_of(run)[1]
    assert low < numbers["run_kl"] < high
    assert "run_reward" not in numbers


def test_with_adapters_the_reference_is_the_model_without_them(tmp_path: Path, tokenizer: Path) -> None:
    """The divergence is 0 before the first update, then that from a frozen copy of the first weights."""
    model = trainer_of(rollout_run(tmp_path, "whole", job_text(tokenizer))).parts.model
    folder = tmp_path / "first-weights"
    save_folder(dict(model.state_dict()), model.config, folder, dtype=torch.float32)  # type: ignore[arg-type]
    found = {}
    for name in ("start", str(folder)):
        text = job_text(tokenizer, policy=f"{{loss: grpo, kl: 0.05, reference: {name}}}", train="lora: {rank: 4}")
        run = rollout_run(tmp_path, f"adapted-{len(found)}", text)
        trained(run)
        found[name] = [metrics_of(run)[step]["run_kl"] for step in (1, 2, 3)]
    assert found["start"][0] == pytest.approx(0, abs=1e-6)
    assert min(found["start"][1:]) > 1e-5
    assert found["start"] == pytest.approx(found[str(folder)], rel=1e-3, abs=1e-6)


def test_a_reward_model_adds_its_weighted_score(tmp_path: Path, tokenizer: Path) -> None:
    model = trainer_of(rollout_run(tmp_path, "scorer", job_text(tokenizer))).parts.model
    state = {**model.state_dict(), "score.weight": torch.ones(1, 32)}
    folder = tmp_path / "reward-model"
    save_folder(state, replace(model.config, heads="score"), folder, dtype=torch.float32)  # type: ignore[arg-type]
    text = job_text(tokenizer, steps=1, reward="").replace(
        "train:", f'reward: [{{python: "rollout_jobs:byte_reward"}}, {{model: {folder}, weight: -0.5}}]\ntrain:'
    )
    run = rollout_run(tmp_path, "modelled", text)
    trained(run)
    lines = [line for line in read_lines(run.samples_path("node-0"))[0] if "trained" not in line]
    assert lines
    for line in lines:
        parts = line["parts"]
        score = parts[f"model {folder}"]
        assert score != 0
        assert line["reward"] == pytest.approx(parts["rollout_jobs:byte_reward"] - 0.5 * score)


def test_a_failing_verifier_costs_its_samples_only(tmp_path: Path, tokenizer: Path) -> None:
    run = rollout_run(tmp_path, "failing", job_text(tokenizer, steps=2, reward="failing_reward"))
    trained(run)
    shares = [numbers["run_verifier_failure_share"] for numbers in metrics_of(run).values()]
    assert 0 < max(shares) < 0.5
    warnings = [line for line in read_lines(run.events_path("node-0"))[0] if line["event"] == "verifier_failures"]
    assert warnings
    assert "no reward today" in warnings[0]["reason"]


def test_a_verifier_that_always_fails_ends_the_run(tmp_path: Path, tokenizer: Path) -> None:
    run = rollout_run(tmp_path, "broken-reward", job_text(tokenizer, reward="broken_reward"))
    with pytest.raises(VerifierError, match=r"16 of 16 samples.*never a reward"):
        trained(run)


def test_groups_that_never_differ_end_a_filtered_run(tmp_path: Path, tokenizer: Path) -> None:
    text = job_text(tokenizer, rollout="filter: equal", reward="").replace(
        "train:", "reward: {verifier: regex, pattern: '.*'}\ntrain:"
    )
    with pytest.raises(EqualRewardsError, match="of 80 prompts only 0 have unequal rewards"):
        trained(rollout_run(tmp_path, "equal", text))


def test_an_environment_plays_several_turns(tmp_path: Path, tokenizer: Path) -> None:
    rollout = 'environment: "rollout_jobs:Echo", turns: 3'
    text = job_text(tokenizer, steps=2, rollout=rollout, reward="").replace("max_tokens: 6", "max_tokens: 16")
    run = rollout_run(tmp_path, "turns", text)
    trainer = trainer_of(run)
    trainer._begin(None)
    assert trainer.loader is not None
    samples = trainer.loader._samples.draw(0, lambda: None).samples  # type: ignore[attr-defined]
    long = [sample for sample in samples if len(sample.transcript) > 2]
    assert long
    for sample in long:
        written = [token for token, own in zip(sample.tokens[6:], sample.is_generated, strict=True) if not own]
        assert len(written) % 2 == 0, "each `ok` has two bytes"
        assert [turn["role"] for turn in sample.transcript[:2]] == ["assistant", "environment"]
        sequence = sample.sequence(is_trained=True)
        assert sequence.weight.sum() == sample.num_generated == len(sample.versions)
        assert all(value == 0 for value, own in zip(sample.logprobs, sample.is_generated, strict=True) if not own)
    rewarded = [sample for sample in samples if sample.verdict is not None and sample.verdict.reward is not None]
    assert all((sample.is_truncated and sample.reward == 0) or 3 <= sample.reward < 4 for sample in rewarded)
