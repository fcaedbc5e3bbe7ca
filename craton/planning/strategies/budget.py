"""A budget per problem: dollars, tokens or seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from craton import formatting
from craton.job.document import parse_count, parse_seconds
from craton.planning.setting import PlanError
from craton.planning.strategies.price import ProblemPrice
from craton.planning.strategies.usage import PlannedUsage


@dataclass(frozen=True)
class ProblemBudget:
    """The most that one problem may cost."""

    unit: Literal["dollars", "tokens", "seconds"]
    limit: float

    def __str__(self) -> str:
        if self.unit == "dollars":
            return f"{formatting.small_dollars(self.limit)} per problem"
        if self.unit == "tokens":
            return f"{formatting.count(self.limit)} tokens per problem"
        return f"{formatting.duration(self.limit)} per problem"

    def allows(self, usage: PlannedUsage, price: ProblemPrice) -> bool:
        """Return whether a strategy keeps it; what is not known does not."""
        spent = {"dollars": price.dollars, "tokens": usage.tokens, "seconds": price.latency_seconds}[self.unit]
        return spent is not None and spent <= self.limit


def parse_budget(text: str) -> ProblemBudget:
    """Read `$0.01`, `0.01`, `20k tokens` or `30s`."""
    try:
        if found := re.fullmatch(r"\s*(.+?)\s*(tokens|token|tok)\s*", text):
            return ProblemBudget("tokens", _positive(float(parse_count(found[1]))))
        if found := re.fullmatch(r"\s*\$?\s*([0-9.]+(?:e-?[0-9]+)?)\s*(\$|dollars)?\s*", text):
            return ProblemBudget("dollars", _positive(float(found[1])))
        return ProblemBudget("seconds", _positive(float(parse_seconds(text))))
    except ValueError:
        raise PlanError(
            f"--budget {text!r} is not an amount per problem; write e.g. $0.01, 20k tokens or 30s"
        ) from None


def _positive(value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError
    return value
