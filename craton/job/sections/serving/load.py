"""The keys `serve.load` and `serve.slo`: the requests that a server is planned for, and the latency they may have.

Only plans read them; a running server takes any load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, ValidationInfo, model_validator

from craton.job.document import (
    KeyConflictError,
    Section,
    Size,
    TokenCount,
    parse_seconds,
    parse_token_count,
    shown_value,
)
from craton.nearest import did_you_mean

Statistic = Literal["mean", "p50", "p90", "p95", "p99"]
STATISTICS: tuple[str, ...] = get_args(Statistic)
MIN_RATE, MAX_RATE = 1e-6, 1e6  # requests per second
MIN_BURSTINESS, MAX_BURSTINESS = 0.01, 100.0
MAX_P95 = 3.86  # of the mean: no lognormal distribution has a larger one
MIN_LATENCY = 1e-6  # seconds
DEFAULT_INPUT, DEFAULT_OUTPUT = 1024, 256  # tokens


def parse_latency(value: object) -> float:
    """Parse a duration with its unit, `500ms` or `1m30s`, to seconds: whether 500 is milliseconds cannot be seen."""
    seconds = parse_seconds(value)
    text = str(value).replace(" ", "")
    if not text[-1].isalpha():
        near = f"write {text}ms or {text}s" if re.fullmatch(r"[0-9.]+", text) else "write e.g. 500ms or 2s"
        raise ValueError(f"{shown_value(value)} has no unit; {near}")
    if seconds < MIN_LATENCY:
        raise ValueError(f"{shown_value(value)} is below a microsecond, which no request is; write e.g. 30ms")
    return seconds


def _number(low: float, high: float, allowed: str) -> Callable[[object], float]:
    """Return a validator of a number between two ends."""

    def parse(value: object) -> float:
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                number = None
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{shown_value(value)} is not {allowed}")
        if number < low or number > high:
            raise ValueError(f"{shown_value(value)} is not {allowed}")
        return float(number)

    return parse


def _share(allowed: str) -> Callable[[object], float]:
    """Return a validator of a share from 0 to 1, which may be written as a percentage."""
    parse = _number(0.0, 1.0, allowed)

    def parse_or_percent(value: object) -> float:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", value) if isinstance(value, str) else None
        if match is None:
            return parse(value)
        percent = float(match[1])
        if percent > 100.0:
            raise ValueError(f"{shown_value(value)} is not {allowed}")
        return percent / 100.0

    return parse_or_percent


def _parse_hits(value: object) -> float:
    share = _share("a share of the prompt tokens; write 0 or more and below 1, e.g. 0.4 or 40%")(value)
    if share == 1.0:
        raise ValueError(f"{shown_value(value)} would leave no prompt token to compute; write a share below 1")
    return share


def _parse_lengths(value: object, info: ValidationInfo) -> LengthsSection:
    if isinstance(value, LengthsSection):
        return value
    if isinstance(value, dict):
        return LengthsSection.parse(value, info)
    return LengthsSection(mean=parse_token_count(value))


def _parse_slo(value: object) -> dict[Statistic, float]:
    """Parse `500ms`, which is p95, or a mapping of statistics to durations."""
    if not isinstance(value, dict):
        return {"p95": parse_latency(value)}
    if not value:
        raise ValueError("the mapping is empty; write a duration, or e.g. {p95: 500ms}")
    for name in value:
        if name not in STATISTICS:
            near = did_you_mean(str(name), STATISTICS)
            raise ValueError(f"{shown_value(name)} is not a statistic; allowed: {', '.join(STATISTICS)}{near}")
    return {name: parse_latency(limit) for name, limit in value.items()}


Rate = Annotated[
    float,
    PlainValidator(
        _number(MIN_RATE, MAX_RATE, f"a rate; write requests per second, e.g. 20, from {MIN_RATE:g} to {MAX_RATE:,.0f}")
    ),
]


def _with_units(limits: dict[Statistic, float]) -> dict[str, str]:
    """Return limits as they are written, exactly: 0.5 is `0.5s`."""
    return {name: f"{Decimal(repr(seconds)):f}s" for name, seconds in limits.items()}


Slo = Annotated[dict[Statistic, float], PlainValidator(_parse_slo), PlainSerializer(_with_units)]


class LengthsSection(Section):
    """Tokens: a mean (all alike), mean and p95 (lognormal), or min and max (uniform)."""

    mean: TokenCount | None = None
    p95: TokenCount | None = None
    min: TokenCount | None = None
    max: TokenCount | None = None

    @model_validator(mode="after")
    def _is_a_distribution(self) -> Self:
        given = self.model_fields_set
        if given not in ({"mean"}, {"mean", "p95"}, {"min", "max"}):
            raise ValueError(
                f"{', '.join(sorted(given)) or 'an empty mapping'} is not a distribution; write a number of tokens, "
                "{mean: 1024, p95: 3000} or {min: 100, max: 2000}"
            )
        if self.mean and self.p95 and not self.mean <= self.p95 <= MAX_P95 * self.mean:
            raise ValueError(
                f"p95 {self.p95:,} does not go with mean {self.mean:,}; write {self.mean:,} to "
                f"{int(MAX_P95 * self.mean):,}"
            )
        if self.min and self.max and self.max < self.min:
            raise ValueError(f"max {self.max:,} is below min {self.min:,}; swap them")
        return self

    @property
    def longest(self) -> int:
        """The largest length that is stated."""
        return max(length or 0 for length in (self.mean, self.p95, self.max))


LoadLengths = Annotated[LengthsSection, BeforeValidator(_parse_lengths)]


class LoadSection(Section):
    """Requests: `rate` per second (open load), or `concurrency` users (closed load). Neither: plans look for the
    highest rate within the limits of `slo`."""

    rate: Rate | None = None
    concurrency: Size | None = None
    requests: Size | None = None  # of a benchmark, which begins with all users at once
    input: LoadLengths = LengthsSection(mean=DEFAULT_INPUT)
    output: LoadLengths = LengthsSection(mean=DEFAULT_OUTPUT)
    prefix_hits: Annotated[float, PlainValidator(_parse_hits)] = 0.0  # share of prompt tokens in the prefix cache
    acceptance: Annotated[float, PlainValidator(_share("a share from 0 to 1, e.g. 0.7 or 70%"))] | None = None
    # Shape of the gamma distribution of the gaps between requests, as in `craton bench serve` and vLLM's benchmark.
    burstiness: Annotated[
        float,
        PlainValidator(
            _number(
                MIN_BURSTINESS,
                MAX_BURSTINESS,
                f"from {MIN_BURSTINESS:g} to {MAX_BURSTINESS:g}; 1: Poisson, less is burstier, more is steadier",
            )
        ),
    ] = 1.0

    @model_validator(mode="after")
    def _has_decode_steps(self) -> Self:
        if self.output.longest == 1:
            raise KeyConflictError(
                "load: an output of 1 token has no decode steps to plan; write 2 or more", ("output",)
            )
        return self

    @model_validator(mode="after")
    def _is_one_load(self) -> Self:
        if self.rate is not None and self.concurrency is not None:
            raise KeyConflictError(
                "load: requests arrive at a rate, or a number of users each wait for an answer (concurrency); remove "
                "one of them",
                ("rate",),
                ("concurrency",),
            )
        if self.concurrency is not None and "burstiness" in self.model_fields_set:
            raise KeyConflictError("load: burstiness applies to a rate; remove it", ("burstiness",), ("concurrency",))
        if self.requests is not None and self.concurrency is None:
            raise KeyConflictError(
                "load: requests is the length of a benchmark with concurrency; give concurrency, or remove it",
                ("requests",),
            )
        if self.requests is not None and self.concurrency is not None and self.requests < self.concurrency:
            raise KeyConflictError(
                f"load: requests {self.requests:,} are fewer than the {self.concurrency:,} users; write "
                f"{self.concurrency:,} or more",
                ("requests",),
                ("concurrency",),
            )
        return self


class SloSection(Section):
    """Upper limits of latencies in seconds, by statistic. A duration alone limits p95."""

    ttft: Slo | None = None
    tpot: Slo | None = None
    e2e: Slo | None = None

    @property
    def limits(self) -> dict[tuple[str, str], float]:
        """(latency, statistic) → seconds."""
        return {
            (name, statistic): seconds
            for name in ("ttft", "tpot", "e2e")
            for statistic, seconds in (getattr(self, name) or {}).items()
        }
