"""The `eval:` section of kind eval: which suite is evaluated, on what, and how. The suite is a file of its own."""

from __future__ import annotations

import os.path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator

from craton.job.document import KeyConflictError, Section, Size, Whole, whole_number
from craton.job.sections.data import absolute_path
from craton.job.sections.posttraining import ApiEndpoint
from craton.job.sections.strategy import StrategySpec

MAX_SAMPLES = 1024  # of one problem
MAX_SUITE_SEED = 8191  # of a suite: seeds of samples are a function of it, the problem and the sample

Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def parse_suite(value: object, info: ValidationInfo) -> object:
    """Return the path of a suite file as an absolute one; a built-in name stays."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a suite; write the path of a YAML file, or the name of a built-in suite")
    text = value.strip()
    looks_like_file = "/" in text or text.endswith((".yaml", ".yml"))
    path = absolute_path(text, info)
    return path if looks_like_file or os.path.isfile(path) else text


def parse_strategies(value: object) -> object:
    """Return a list of strategies; one may be written alone."""
    if value is None:
        return ()
    return list(value) if isinstance(value, list | tuple) else [value]


def _parse_checkpoints(value: object) -> object:
    if value is None or value == "all":
        return value
    steps = value if isinstance(value, list | tuple) else [value]
    try:
        return tuple(sorted({whole_number(1)(step) for step in steps}))
    except ValueError as error:
        raise ValueError(f"{error}; write all, or the steps, e.g. [100, 200]") from None


def _parse_price(value: Any) -> Any:
    if value is None or (isinstance(value, list | tuple) and len(value) == 2):
        return value
    raise ValueError(f"{value!r} is not a price; write dollars per million tokens of prompt and of completion: [3, 15]")


SuiteName = Annotated[str, BeforeValidator(parse_suite)]
Samples = Annotated[int, PlainValidator(whole_number(1, MAX_SAMPLES))]


class Evaluation(Section):
    """A suite, and what differs from its file."""

    suite: SuiteName
    endpoint: ApiEndpoint | None = None  # in place of a model: an OpenAI-compatible server
    problems: Size | None = None  # the first so many of the suite
    samples: Samples | None = None  # of each problem
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    max_tokens: Size | None = None
    seed: Annotated[int, PlainValidator(whole_number(0, MAX_SUITE_SEED))] | None = None
    strategies: Annotated[tuple[StrategySpec, ...] | None, BeforeValidator(parse_strategies)] = None
    checkpoints: Annotated[Literal["all"] | tuple[Whole, ...] | None, BeforeValidator(_parse_checkpoints)] = None
    concurrency: Size = 64  # answers in flight
    max_length: Size | None = None  # tokens of prompt and answer; default: the model's
    price: Annotated[tuple[Dollars, Dollars] | None, BeforeValidator(_parse_price)] = None  # of prompt, of completion

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for key in ("checkpoints", "max_length"):
            if self.endpoint is not None and getattr(self, key) is not None:
                raise KeyConflictError(f"eval: {key} applies to a model, not to an endpoint", (key,), ("endpoint",))
        if self.price is not None and self.endpoint is None:
            raise KeyConflictError(
                "eval: price is that of an endpoint; the cost of a model of one's own is that of its cluster",
                ("price",),
            )
        return self
