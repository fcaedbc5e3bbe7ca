"""Advantages against hand-made values; samples without a verdict are in no baseline."""

from __future__ import annotations

import numpy as np
import pytest

from craton.ml.posttraining import completion_advantages, generalized_advantages, has_verdict, whiten

NAN = float("nan")


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "cispo"])
def test_groups_are_normalized_on_their_own(loss: str) -> None:
    found = completion_advantages(np.array([[0.0, 1.0, 2.0], [5.0, 5.0, 8.0]]), loss)  # type: ignore[arg-type]
    np.testing.assert_allclose(found[0], np.array([-1, 0, 1]) / 1.0001)
    np.testing.assert_allclose(found[1], np.array([-1, -1, 2]) / (3**0.5 + 1e-4))


def test_dr_grpo_only_subtracts_the_mean() -> None:
    np.testing.assert_allclose(completion_advantages(np.array([[0.0, 1.0, 5.0]]), "dr_grpo"), [[-2, -1, 3]])


def test_rloo_leaves_the_sample_out_of_its_baseline() -> None:
    np.testing.assert_allclose(completion_advantages(np.array([[0.0, 1.0, 5.0]]), "rloo"), [[-3, -1.5, 4.5]])


def test_reinforce_plus_plus_normalizes_the_whole_batch() -> None:
    rewards = np.array([[0.0, 1.0], [3.0, 8.0]])
    wanted = (rewards - 3) / (np.std(rewards, ddof=1) + 1e-4)
    np.testing.assert_allclose(completion_advantages(rewards, "reinforce++"), wanted)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_a_sample_without_a_verdict_changes_no_other(loss: str) -> None:
    rewards = np.array([[0.0, NAN, 1.0, 4.0], [1.0, NAN, 3.0, 2.0]])
    found = completion_advantages(rewards, loss)  # type: ignore[arg-type]
    assert (found[:, 1] == 0).all()
    np.testing.assert_allclose(found[:, [0, 2, 3]], completion_advantages(rewards[:, [0, 2, 3]], loss))  # type: ignore[arg-type]
    assert has_verdict(rewards).tolist() == [[True, False, True, True]] * 2


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[3.0, NAN, NAN], [NAN, NAN, NAN], [0.1, 0.1, 0.1]])
def test_nothing_to_compare_is_exactly_zero(loss: str, rewards: list[float]) -> None:
    found = completion_advantages(np.array([rewards]), loss)  # type: ignore[arg-type]
    if loss == "rloo":
        np.testing.assert_allclose(found, 0, atol=1e-15)
    else:
        assert (found == 0).all()


def test_generalized_advantages_are_the_sum_of_discounted_errors() -> None:
    rewards, values = np.array([0.5, 0.0, 2.0]), np.array([1.0, -1.0, 0.5])
    discount, decay, last = 0.9, 0.8, 3.0
    errors = rewards + discount * np.array([-1.0, 0.5, last]) - values
    wanted = [sum((discount * decay) ** (k - t) * errors[k] for k in range(t, 3)) for t in range(3)]
    found, returns = generalized_advantages(rewards, values, discount, decay, last)
    np.testing.assert_allclose(found, wanted)
    np.testing.assert_allclose(returns, wanted + values)


def test_whitening_leaves_out_tokens_without_weight() -> None:
    found = whiten(np.array([1.0, 100.0, 3.0]), np.array([1.0, 0.0, 1.0]))
    np.testing.assert_allclose(found, np.array([-1, 0, 1]) / (2**0.5 + 1e-4))


@pytest.mark.parametrize("loss", ["ppo", "distill"])
def test_losses_without_advantages_per_completion_are_refused(loss: str) -> None:
    with pytest.raises(ValueError, match=loss):
        completion_advantages(np.zeros((1, 2)), loss)  # type: ignore[arg-type]
