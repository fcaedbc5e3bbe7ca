"""Strategies as they are written, and the bounds that a server sets.

`parse_strategy` reads a short text (`vote:16`, `best_of:8:math`, `budget:100-400`) or a mapping with `kind`, from a job
file, a request or a command line. A mistake is one StrategyError line that names the key. Strategies do not nest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError, ValidationInfo

from craton.job.document import Seconds, Section, SectionError, Size, parse_document, section_problems, shown_value
from craton.job.errors import StrategyError
from craton.job.sections.strategy.kinds import (
    LOGPROBS,
    MAX_SAMPLES,
    BeamStrategy,
    BestOfStrategy,
    BudgetStrategy,
    Samples,
    Strategy,
    TreeStrategy,
    VoteStrategy,
)
from craton.nearest import did_you_mean

_KINDS: dict[str, type[Strategy]] = {
    "vote": VoteStrategy,
    "best_of": BestOfStrategy,
    "beam": BeamStrategy,
    "tree": TreeStrategy,
    "budget": BudgetStrategy,
}
_EXAMPLES = "vote:16, best_of:8:math, beam:4:math, tree:32:math or budget:100-400"


class StrategyBounds(Section):
    """The bounds that a server sets for the strategy of every request."""

    max_n: Samples = MAX_SAMPLES
    max_tokens: Size | None = None
    max_seconds: Seconds | None = None

    def bound(self, strategy: Strategy, where: str = "strategy") -> Strategy:
        """Return the strategy with these limits where it has none of its own; StrategyError if it is beyond them."""
        n = getattr(strategy, "n", 1)
        if max(n, strategy.num_samples) > self.max_n:
            branches = f" with {strategy.num_samples} branches" if strategy.num_samples > n else ""
            raise StrategyError(f"{where}.n: {n}{branches} is above this server's maximum of {self.max_n}; lower n")
        changes: dict[str, float] = {}
        for key in ("max_tokens", "max_seconds"):
            limit, given = getattr(self, key), getattr(strategy, key)
            if limit is not None and given is not None and given > limit:
                raise StrategyError(f"{where}.{key}: {given:g} is above this server's maximum of {limit:g}; lower it")
            if limit is not None and given is None:
                changes[key] = limit
        if isinstance(strategy, BudgetStrategy) and strategy.at_least > changes.get("max_tokens", strategy.at_least):
            raise StrategyError(
                f"{where}.at_least: {strategy.at_least} is above this server's maximum of {self.max_tokens} tokens; "
                "lower it"
            )
        return strategy.model_copy(update=changes)


def parse_strategy(value: object, where: str = "strategy", scores: Collection[str] | None = None) -> Strategy:
    """Return a strategy; StrategyError in one line that begins with `where`. `scores`: the names of verifiers that it
    may use, None: any."""
    try:
        strategy = _validated(value, None)
    except SectionError as error:
        raise StrategyError(section_problems(error.section, error.error, where)[0]) from None
    except ValueError as error:
        raise StrategyError(f"{where}: {error}") from None
    check_score(strategy, scores, where)
    return strategy


def read_strategy(text: str, where: str) -> object:
    """Return a strategy of a command line for `parse_strategy`: `vote:16`, or a mapping `{kind: vote, n: 16}`."""
    if not text.lstrip().startswith("{"):
        return text
    value: object = parse_document(f"strategy: {text}", name=where).data["strategy"]
    return value


def check_score(strategy: Strategy, scores: Collection[str] | None, where: str = "strategy") -> None:
    """Raise StrategyError unless the strategy's verifier is among these."""
    name = strategy.verifier
    if scores is None or name is None or name in scores:
        return
    known = ", ".join((LOGPROBS, *sorted(scores)))
    raise StrategyError(f"{where}.score: no verifier is called {name!r}; allowed: {known}{did_you_mean(name, scores)}")


def _validated(value: object, info: ValidationInfo | None) -> Strategy:
    """Return a strategy; SectionError or ValueError otherwise."""
    if isinstance(value, Strategy):
        return value
    mapping = _of_text(value) if isinstance(value, str) else value
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{shown_value(value)} is not a strategy; write e.g. {_EXAMPLES}, or a mapping with kind")
    mapping = {str(key): inner for key, inner in mapping.items()}
    for key, inner in mapping.items():
        if key in ("strategy", "strategies") or (key != "answer" and isinstance(inner, Mapping) and "kind" in inner):
            raise ValueError(f"key {key!r} holds another strategy, and strategies do not nest; remove it")
    if "kind" not in mapping:
        raise ValueError(f"key 'kind' is missing; allowed: {', '.join(_KINDS)}")
    kind = mapping["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        near = did_you_mean(str(kind), _KINDS)
        raise ValueError(f"kind: {shown_value(kind)} is not a strategy; allowed: {', '.join(_KINDS)}{near}")
    section = _KINDS[kind]
    try:
        return section.model_validate(mapping, context=info.context if info is not None else None)
    except ValidationError as error:
        raise SectionError(section, error) from None


def _of_text(text: str) -> dict[str, Any]:
    """Return the mapping of `KIND`, `KIND:N`, `KIND:N:SCORE`, `budget:AT_MOST` or `budget:AT_LEAST-AT_MOST`."""
    kind, *rest = text.strip().split(":")
    mapping: dict[str, Any] = {"kind": kind}
    if kind == "budget" and len(rest) == 1:
        least, dash, most = rest[0].rpartition("-")
        return mapping | {"at_most": most} | ({"at_least": least} if dash else {})
    keys = {"vote": ("n",), "budget": ()}.get(kind, ("n", "score"))
    if kind in _KINDS and len(rest) > len(keys):
        form = ":".join((kind, *(key.upper() for key in keys))) if keys else "budget:AT_LEAST-AT_MOST"
        raise ValueError(f"{shown_value(text)} has too many parts; write {form}, or a mapping for other keys")
    return mapping | dict(zip(keys, rest, strict=False))


StrategySpec = Annotated[Strategy, BeforeValidator(_validated)]  # of a section's field
