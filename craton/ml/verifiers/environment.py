"""Environments of several turns: tools, games, simulated users. A class with two methods, in the user's own file.

    class Calculator:
        def reset(self, row):            # → the prompt: a text, or messages; None: the row's own prompt
            ...
        def step(self, completion):      # → text: the next turn · a number: the reward, and the end
            ...                          #   None: the end, and the job's `reward` decides

One instance lives in one process for the length of its episode, so it may keep files, connections and counters. What
it wrote carries no loss. If its process is killed from outside, a new one replays the episode with the completions so
far; an environment that then writes something else ends its episode without a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from craton.ml.verifiers.answers import shortened
from craton.ml.verifiers.rewards import RewardValueError, as_reward

Prompt = str | list[dict[str, Any]]


class Environment(Protocol):
    """What a user's environment has."""

    def reset(self, row: Mapping[str, Any]) -> Prompt | None:
        """Begin an episode; return its prompt, None for the row's own."""

    def step(self, completion: str) -> str | float | None:
        """Return the text of the next turn, or the reward, or None at the end of an episode that others judge."""


@dataclass(frozen=True)
class Turn:
    """What an environment answered. `text` is the prompt after `reset` and the next turn after `step`."""

    text: Prompt | None = None
    reward: float | None = None
    is_last: bool = False
    error: str = ""  # not empty: the episode is lost
    seconds: float = 0.0


def reset_reply(environment: Environment, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return {text} of a new episode."""
    text = environment.reset(row)
    if text is None or isinstance(text, str) or _are_messages(text):
        return {"text": text}
    raise RewardValueError(
        f"{name}.reset returned {shortened(text)}; return a text, messages [{{role, content}}] or None"
    )


def step_reply(environment: Environment, name: str, completion: str) -> dict[str, Any]:
    """Return {text} of the next turn, or {is_last} with the reward if there is one."""
    answer = environment.step(completion)
    if isinstance(answer, str):
        return {"text": answer}
    if answer is None:
        return {"is_last": True}
    try:
        return {"is_last": True, "reward": as_reward(answer, f"{name}.step")}
    except RewardValueError as error:
        raise RewardValueError(f"{error} as the reward, a text as the next turn, or None at the end") from None


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str) for message in value
    )
