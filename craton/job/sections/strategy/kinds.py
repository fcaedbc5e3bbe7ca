"""The keys of each strategy: how several samples, or a limited chain of thought, become one answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, PlainValidator, ValidationInfo, model_validator

from craton.job.document import (
    KeyConflictError,
    Seconds,
    Section,
    Size,
    shown_value,
    whole_number,
)
from craton.nearest import did_you_mean

MAX_SAMPLES = 1024  # of one request; also of all branches of one level of a search
MAX_DEPTH = 1024  # steps of a search
DEFAULT_STOP = 0.88  # confidence of a vote: two equal first votes of 16 are enough
LOGPROBS = "logprobs"  # the score that needs no verifier: the mean log-probability of a sample's tokens
ANSWERS = ("last_number", "boxed", "text")  # what a vote counts; or {regex: PATTERN}, {json: FIELD}

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_HOW_ANSWER = f"{', '.join(ANSWERS)}, {{regex: PATTERN}} or {{json: FIELD}}"


def _parse_dollars(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise ValueError(f"{shown_value(value)} is not an amount in dollars above 0; write e.g. 0.05")


def _parse_score(value: object) -> str:
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise ValueError(f"{shown_value(value)} is not a score; write {LOGPROBS}, or the name of a verifier")


def _parse_confidence(value: object) -> float:
    if value in ("off", 0) or value is False:
        return 0.0
    if isinstance(value, int | float) and not isinstance(value, bool) and 0.5 < value < 1:
        return float(value)
    raise ValueError(
        f"{shown_value(value)} is not a confidence; write a number above 0.5 and below 1, e.g. 0.88, or off for a "
        "full vote"
    )


def _parse_text(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"{shown_value(value)} is not a text")


def _parse_answer(value: object, info: ValidationInfo) -> object:
    if isinstance(value, AnswerRule):
        return value
    if isinstance(value, Mapping) and value and set(value) <= set(AnswerRule.model_fields):
        return AnswerRule.parse(value, info)
    if isinstance(value, Mapping) and len(value) == 1:
        ((key, argument),) = value.items()
        if key in ("regex", "json"):
            return AnswerRule.parse({"kind": key, "argument": argument}, info)
    if isinstance(value, str) and value in ANSWERS:
        return AnswerRule(kind=value)
    near = did_you_mean(value, (*ANSWERS, "regex", "json")) if isinstance(value, str) else ""
    raise ValueError(f"{shown_value(value)} is not an answer to count; allowed: {_HOW_ANSWER}{near}")


Samples = Annotated[int, PlainValidator(whole_number(1, MAX_SAMPLES))]
Steps = Annotated[int, PlainValidator(whole_number(1, MAX_DEPTH))]
Dollars = Annotated[float, PlainValidator(_parse_dollars)]
Score = Annotated[str, PlainValidator(_parse_score)]


class AnswerRule(Section):
    """What is counted of a completion. `argument`: the pattern of a regex, the field of a JSON object."""

    kind: Literal["last_number", "boxed", "text", "regex", "json"] = "last_number"
    argument: str = ""

    @model_validator(mode="after")
    def _has_its_argument(self) -> Self:
        if self.kind not in ("regex", "json"):
            return self
        if not self.argument:
            example = r"{regex: 'answer: (\w+)'}" if self.kind == "regex" else "{json: answer}"
            raise ValueError(f"{self.kind} needs an argument; write e.g. {example}")
        if self.kind == "regex":
            try:
                re.compile(self.argument)
            except re.error as error:
                raise ValueError(f"{shown_value(self.argument)} is not a regular expression: {error}") from None
        return self


class SearchStep(Section):
    """Where a step of a search ends: behind a text, or after a number of tokens."""

    stop: Annotated[str, PlainValidator(_parse_text)] | None = None
    tokens: Size | None = None

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        if (self.stop is None) == (self.tokens is None):
            raise ValueError(r'give one of stop and tokens, e.g. {stop: "\n\n"} or {tokens: 64}')
        return self


class StrategyLimits(Section):
    """Limits of a strategy, shared by all its samples. At a limit, what was reached is the answer."""

    max_tokens: Size | None = None  # of all samples together
    max_seconds: Seconds | None = None
    max_dollars: Dollars | None = None  # needs the endpoint's prices

    @property
    def num_samples(self) -> int:
        """Maximum number of samples that run at the same time."""
        return 1

    @property
    def verifier(self) -> str | None:
        """The verifier, judge or reward model that it needs, by name."""
        return None


class VoteStrategy(StrategyLimits):
    """Self-consistency: the most frequent answer of n samples. Sampling ends once the leader is this certain."""

    kind: Literal["vote"] = "vote"
    n: Samples = 16
    answer: Annotated[AnswerRule, BeforeValidator(_parse_answer)] = AnswerRule()
    stop: Annotated[float, PlainValidator(_parse_confidence)] = DEFAULT_STOP  # 0: off, a full vote

    @property
    def num_samples(self) -> int:
        return self.n


class ScoredStrategy(StrategyLimits):
    """A strategy that compares samples by a score."""

    score: Score = LOGPROBS

    @property
    def verifier(self) -> str | None:
        return None if self.score == LOGPROBS else self.score


class BestOfStrategy(ScoredStrategy):
    """The sample with the highest score."""

    kind: Literal["best_of"] = "best_of"
    n: Samples = 8

    @property
    def num_samples(self) -> int:
        return self.n


class SearchStrategy(ScoredStrategy):
    """A search over steps of a completion, guided by the score of what is written so far."""

    width: Samples = 4  # expansions of each node
    depth: Steps = 16  # steps of the longest completion
    step: SearchStep = SearchStep(stop="\n\n")


class BeamStrategy(SearchStrategy):
    """The n best branches of each level are expanded."""

    kind: Literal["beam"] = "beam"
    n: Samples = 4

    @property
    def num_samples(self) -> int:
        return self.n * self.width

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_samples > MAX_SAMPLES:
            raise KeyConflictError(
                f"strategy: n {self.n} beams with {self.width} expansions (width) each are {self.num_samples:,} "
                f"branches; allowed: up to {MAX_SAMPLES:,}",
                ("n",),
                ("width",),
            )
        return self


class TreeStrategy(SearchStrategy):
    """Best-first search: the open node with the highest score is expanded, until n branches were sampled."""

    kind: Literal["tree"] = "tree"
    n: Samples = 32

    @property
    def num_samples(self) -> int:
        return min(self.n, self.width)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if "width" in self.model_fields_set and self.width > self.n:
            raise KeyConflictError(
                f"strategy: width {self.width} expansions of a node are more than the {self.n} of the whole tree (n)",
                ("width",),
                ("n",),
            )
        return self


class BudgetStrategy(StrategyLimits):
    """Budget forcing: a chain of thought of at least and at most so many tokens."""

    kind: Literal["budget"] = "budget"
    at_least: Annotated[int, PlainValidator(whole_number(0, 10**9))] = 0
    at_most: Size | None = None
    wait: Annotated[str, PlainValidator(_parse_text)] = "Wait"  # in place of an end that comes too soon
    close: Annotated[str, PlainValidator(_parse_text)] = "</think>"  # ends the chain of thought

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.at_least == 0 and self.at_most is None:
            raise ValueError("give at_least, at_most or both, in tokens; e.g. {kind: budget, at_most: 512}")
        for key, limit in (("at_most", self.at_most), ("max_tokens", self.max_tokens)):
            if limit is not None and limit < self.at_least:
                raise KeyConflictError(
                    f"strategy: {key} {limit} is below at_least ({self.at_least}); raise {key} or lower at_least",
                    (key,),
                    ("at_least",),
                )
        return self


Strategy = VoteStrategy | BestOfStrategy | BeamStrategy | TreeStrategy | BudgetStrategy
