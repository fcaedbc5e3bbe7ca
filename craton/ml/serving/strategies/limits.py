"""Limits of tokens, seconds and dollars, shared by all samples of a strategy and by nested work.

A sample starts only with an allowance for all tokens that it may have, so that together they cannot exceed a limit,
and no result depends on which sample ends first. Only seconds end samples that are running.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass

from craton.ml.serving.strategies.errors import LimitError

MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """Dollars for a million tokens."""

    prompt: float
    completion: float

    def dollars(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / MILLION


class Limits:
    """Limits, and what has been spent of them. `parent`: limits of the work that this is a part of."""

    def __init__(
        self,
        tokens: int | None = None,
        seconds: float | None = None,
        dollars: float | None = None,
        prices: Prices | None = None,
        parent: Limits | None = None,
    ) -> None:
        """`tokens`: of all completions together."""
        self.tokens, self.seconds, self.dollars = tokens, seconds, dollars
        self.prices: Prices | None = prices or (parent.prices if parent is not None else None)
        if dollars is not None and self.prices is None:
            raise LimitError("a limit in dollars needs the endpoint's prices; give dollars per million tokens, IN,OUT")
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._parent = parent
        self._reserved = [0, 0]  # prompt and completion tokens of running samples, at their maximum
        self._deadline: float | None = None

    def begin(self) -> None:
        """Start the clock, unless it runs."""
        for limits in self._chain():
            if limits.seconds is not None and limits._deadline is None:
                limits._deadline = asyncio.get_running_loop().time() + limits.seconds

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the first deadline, 0 after it; None: no limit."""
        now = asyncio.get_running_loop().time()
        left = [limits._deadline - now for limits in self._chain() if limits._deadline is not None]
        return max(0.0, min(left)) if left else None

    @property
    def spent_dollars(self) -> float | None:
        if self.prices is None:
            return None
        return self.prices.dollars(self.prompt_tokens, self.completion_tokens)

    def allowance(self, prompt_tokens: int, wanted: int) -> tuple[int, str]:
        """Return how many tokens another sample may have, up to `wanted`, and the limit if these are fewer."""
        allowed, limit = wanted, ""
        for limits in self._chain():
            left = limits._tokens_left()
            if left is not None and left < allowed:
                allowed, limit = left, "tokens"
            left = limits._dollars_left(prompt_tokens)
            if left is not None and left < allowed:
                allowed, limit = left, "dollars"
        return max(0, allowed), limit

    def reserve(self, prompt_tokens: int, completion_tokens: int) -> None:
        for limits in self._chain():
            limits._reserved[0] += prompt_tokens
            limits._reserved[1] += completion_tokens

    def spend(self, reserved: tuple[int, int], prompt_tokens: int, completion_tokens: int) -> None:
        """Replace a reservation by what a sample has used."""
        for limits in self._chain():
            limits._reserved[0] -= reserved[0]
            limits._reserved[1] -= reserved[1]
            limits.prompt_tokens += prompt_tokens
            limits.completion_tokens += completion_tokens

    def _chain(self) -> Iterator[Limits]:
        limits: Limits | None = self
        while limits is not None:
            yield limits
            limits = limits._parent

    def _tokens_left(self) -> int | None:
        if self.tokens is None:
            return None
        return self.tokens - self.completion_tokens - self._reserved[1]

    def _dollars_left(self, prompt_tokens: int) -> int | None:
        """Return how many completion tokens the dollars left can pay, behind another prompt."""
        if self.dollars is None or self.prices is None:
            return None
        prompts = self.prompt_tokens + self._reserved[0] + prompt_tokens
        left = self.dollars - self.prices.dollars(prompts, self.completion_tokens + self._reserved[1])
        if left < 0:
            return 0
        return math.floor(left * MILLION / self.prices.completion) if self.prices.completion > 0 else None
