"""Runs of reinforcement learning: a healthy one, and what makes its samples wrong or lets one side wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fake_snapshots import healthy, slowed_all, with_ranks, with_run

from craton.observability.diagnosis.snapshot import Snapshot

STEPS = range(1, 121)
ROLLOUT_STEP = {
    "rollout": 4.0,
    "reward": 0.3,
    "sync": 0.1,
    "data": 0.02,
    "compute": 3.0,
    "communication": 0.5,
    "optimizer": 0.1,
    "checkpoint": 0.02,
}
USUAL: dict[str, float | Callable[[int], float]] = {
    "reward": lambda step: 0.2 + 0.004 * step,
    "reward_std": 0.35,
    "completion_tokens": lambda step: 300.0 + step,
    "longest_completion_tokens": 900.0,
    "truncated_share": 0.03,
    "kl": lambda step: 0.0003 * step,
    "entropy": lambda step: 1.2 - 0.006 * step,
    "logprob_gap": 0.012,
    "logprob_k3": 2e-4,
    "corrected_share": 0.002,
    "staleness": 1.0,
    "rollout_tokens_per_second": 24_000.0,
    "rollout_idle_share": 0.1,
    "rollout_tail_share": 0.15,
    "trainer_idle_share": 0.2,
    "verifier_failure_share": 0.004,
    "advantage_zero_share": 0.3,
}


def rollout_run(
    phases: Mapping[str, float] | None = None, seed: int = 0, **results: float | Callable[[int], float]
) -> Snapshot:
    """A healthy run; `phases` are measured instead of the planned ones, `results` recorded instead of the usual ones.
    Names with None are not recorded."""
    dice = random.Random(seed)
    snapshot = with_run(healthy(2, phases=ROLLOUT_STEP, step=120), kind="grpo")
    if phases:
        step = {**ROLLOUT_STEP, **phases}
        whole = {**step, "step": sum(step.values())}
        snapshot = with_ranks(snapshot, lambda rank: replace(rank, recent=dict(whole), earlier=dict(whole)))
        snapshot = with_run(snapshot, step_seconds_high=2.0 * whole["step"])  # the sum is what was planned
    recorded: dict[str, Any] = {}
    for name, value in {**USUAL, **results}.items():
        if value is not None:
            level = value if callable(value) else lambda _, constant=value: constant
            recorded[name] = tuple((at, level(at) * (1.0 + 0.03 * dice.gauss(0.0, 1.0))) for at in STEPS)
    return replace(snapshot, series=replace(snapshot.series, loss=(), gradient_norm=(), results=recorded))


def rollout_faults() -> Iterator[tuple[str, str, str, Snapshot]]:
    """Name, cause, condition and snapshot."""
    slow, wrong = "slow", "wrong"
    yield "generation", "rollouts_slow", slow, rollout_run({"rollout": 30.0})
    yield "an idle trainer", "rollouts_slow", slow, rollout_run(trainer_idle_share=0.7)
    tail = rollout_run({"rollout": 30.0}, rollout_tail_share=0.7, longest_completion_tokens=16_000.0)
    yield "one long text", "rollout_long_tail", slow, tail
    yield "a tail as planned", "rollout_long_tail", slow, rollout_run(rollout_tail_share=0.8)
    uneven: dict[str, Any] = {"rollout_tail_share": None, "longest_completion_tokens": 16_000.0}
    yield "lengths alone", "rollout_long_tail", slow, rollout_run({"rollout": 30.0}, **uneven)
    longer = slowed_all(rollout_run(completion_tokens=lambda step: 300.0 + 8.0 * step), 2.5, "rollout")
    yield "longer and longer", "rollouts_longer", slow, longer
    yield "slow verifier", "verifier_slow", slow, rollout_run({"reward": 6.0})
    yield "transfers", "weight_sync_slow", slow, rollout_run({"sync": 5.0})
    yield "waiting for weights", "trainer_slow", slow, rollout_run(rollout_idle_share=0.6, trainer_idle_share=0.0)
    yield "no verdicts", "verifier_failing", wrong, rollout_run(verifier_failure_share=0.2)
    equal = {"advantage_zero_share": 1.0, "reward_std": 0.0}
    yield "all wrong", "reward_constant", wrong, rollout_run(**equal, reward=0.0)
    cut = rollout_run(**equal, reward=0.0, truncated_share=0.98, completion_tokens=256.0)
    yield "cut", "completions_truncated", wrong, cut
    yield "drift", "logprob_mismatch", wrong, rollout_run(logprob_gap=lambda step: 0.01 + 0.0006 * step)
    yield "another engine", "logprob_mismatch", wrong, rollout_run(logprob_gap=0.3)
    yield "far away", "kl_explosion", wrong, rollout_run(kl=lambda step: 0.01 if step < 90 else 0.1 * (step - 88))
    yield "same text", "entropy_collapse", wrong, rollout_run(entropy=lambda step: 1.2 * 0.95**step, reward=0.3)
    yield (
        "gibberish",
        "length_explosion",
        wrong,
        rollout_run(
            completion_tokens=lambda step: 300.0 + 12.0 * step,
            truncated_share=lambda step: min(0.9, 0.01 * step),
            reward=lambda step: 0.5 - 0.003 * step,
        ),
    )
    fallen = rollout_run(reward=lambda step: 0.7 if step < 80 else 0.1)
    yield "unlearned", "reward_collapsed", wrong, fallen
