"""Verdicts on post-training: ordinary runs are left alone, and the evidence comes from the metrics of the run."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from fake_snapshots import slowed_all, with_run
from sick_rollouts import ROLLOUT_STEP, rollout_faults, rollout_run

from craton.formatting import percent
from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect.metrics import series_of
from craton.observability.diagnosis.snapshot import Snapshot, TrainingFacts
from craton.telemetry import RunDirectory
from craton.telemetry.rank import Recorder


@pytest.mark.parametrize("seed", range(8))
def test_ordinary_runs_are_left_alone(seed: int) -> None:
    verdict = diagnose(rollout_run(seed=seed))
    assert (verdict.condition, verdict.cause) == ("healthy", ""), verdict.sentence


def noisy(level: float, spread: float, seed: int) -> dict[int, float]:
    dice = random.Random(seed)
    return {step: level + spread * dice.gauss(0.0, 1.0) for step in range(1, 121)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("a noisy reward of few prompts", {"reward": lambda step: 0.4}),
        ("a task that is learned: little entropy, short answers", {"entropy": lambda step: 1.2 * 0.95**step}),
        ("completions that grow with the reward", {"completion_tokens": lambda step: 300.0 + 12.0 * step}),
        ("no KL", {"kl": 0.0}),
        ("a KL that grows slowly", {"kl": lambda step: 0.002 * step}),
        ("negative rewards", {"reward": lambda step: -2.0 + 0.01 * step}),
        ("many solved prompts", {"advantage_zero_share": 0.85, "reward": lambda step: 0.6 + 0.003 * step}),
        ("a few failing verdicts", {"verifier_failure_share": 0.03}),
        ("sides that take turns", {"trainer_idle_share": 0.6, "rollout_idle_share": 0.45}),
        ("a bf16 engine", {"logprob_gap": 0.03, "corrected_share": 0.05}),
    ],
)
def test_what_looks_like_a_fault_is_not(name: str, results: dict[str, object], seed: int) -> None:
    if name.startswith("a noisy"):
        points = noisy(0.4, 0.15, seed)
        results = {"reward": points.__getitem__}
    verdict = diagnose(rollout_run(seed=seed, **results))  # type: ignore[arg-type]
    assert (verdict.condition, verdict.cause) == ("healthy", ""), (name, verdict.sentence)


def test_a_finished_run_tells_of_failed_verifiers() -> None:
    failing = rollout_run(verifier_failure_share=lambda step: 0.25 if step == 40 else 0.0)
    sentence = diagnose(with_run(failing, state="done")).sentence
    worst = dict(failing.series.results["verifier_failure_share"])[40]
    assert sentence.endswith(f"; its verifiers failed, in step 40 on {percent(worst)} of the samples")
    assert "verifiers" not in diagnose(with_run(rollout_run(), state="done")).sentence


def test_rollouts_may_take_most_of_a_step_if_planned() -> None:
    long = with_run(rollout_run({"rollout": 40.0}), plan={"step_seconds": 44.0, "rollout_seconds": 40.0})
    assert diagnose(long).condition == "healthy"


def test_a_run_on_preferences_has_no_rewards_to_judge() -> None:
    snapshot = with_run(rollout_run(**dict.fromkeys(("reward", "reward_std", "kl", "entropy"))), kind="dpo")
    assert diagnose(snapshot).condition == "healthy"


def test_an_interrupted_phase_is_named_with_its_seconds() -> None:
    verdict = diagnose(rollout_run({"reward": 6.0}))
    assert any("6.00 s for verdicts" in line for line in verdict.evidence), verdict.evidence
    assert "verify.workers" in verdict.action
    slower = diagnose(slowed_all(rollout_run(), 40.0, "sync"))
    assert (slower.condition, slower.cause) == ("slow", "weight_sync_slow"), slower.sentence


def test_the_remedy_of_slow_transfers_fits_the_place_and_what_is_trained() -> None:
    """One machine has no network in the way, and who trains adapters needs no advice to do so."""
    for on, has_adapters in product(("local", "slurm"), (False, True)):
        snapshot = with_run(rollout_run({"sync": 5.0}), on=on)
        verdict = diagnose(replace(snapshot, training=TrainingFacts(has_adapters=has_adapters)))
        assert verdict.cause == "weight_sync_slow"
        assert ("network" in verdict.action) == (on != "local"), verdict.action
        assert ("one machine" in verdict.action) == (on == "local"), verdict.action
        assert ("LoRA" in verdict.action) != has_adapters, verdict.action


def test_every_fault_survives_a_saved_snapshot() -> None:
    for name, cause, _, snapshot in rollout_faults():
        assert diagnose(Snapshot.from_json(snapshot.to_json())).cause == cause, name


def test_the_metrics_of_rank_0_are_the_evidence(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "math")
    run.launch_path.write_text('{"nodes": ["x"], "ranks_per_node": 1, "generation": 0}')
    recorder = Recorder("x", 0, 0, run=run)
    for step in range(1, 13):
        seconds = {f"run_{phase}_seconds": value for phase, value in ROLLOUT_STEP.items()}
        recorder.metrics(step, run_loss=0.0, run_reward=0.5, run_kl=float("nan"), **seconds)
    recorder.close()
    results = series_of(run, ["x"]).results
    assert results["reward"][-1] == (12, 0.5)
    assert len(results["rollout_seconds"]) == 12
    assert results["kl"][0][1] != results["kl"][0][1]  # NaN
