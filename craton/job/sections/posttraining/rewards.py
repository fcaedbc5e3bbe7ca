"""The sections `reward:` and `verify:`, and endpoints: what gives a completion its reward, and under which limits."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from craton.job.document import Bytes, KeyConflictError, Seconds, Section, SectionError, Size, Variable
from craton.job.model import is_function
from craton.job.sections.data import Function, absolute_path
from craton.nearest import did_you_mean

VERIFIERS = ("exact", "regex", "json_schema", "math", "code", "judge")
MIN_VERIFIER_BYTES = 64 << 20  # of a worker: an interpreter with the verifiers' imports
ANSWER_FIELD = "answer"  # of the row, with which a verifier compares unless `field` names another

_HOW = "write package.module:function, or a list such as [{verifier: math, weight: 1.0}, {python: my.rewards:score}]"


def _check_verifier(value: object) -> object:
    if value is not None and value not in VERIFIERS:
        raise ValueError(
            f"{value!r} is not a verifier; allowed: {', '.join(VERIFIERS)}, or python: package.module:function"
            f"{did_you_mean(str(value), VERIFIERS)}"
        )
    return value


def _check_url(value: str) -> str:
    if not re.match(r"https?://[^/]+", value):
        raise ValueError(f"{value!r} is not an endpoint; write e.g. http://host:8000")
    return value


class ApiEndpoint(Section):
    """An OpenAI-compatible server. `key` names the variable of `run.secrets` that has its API key."""

    url: Annotated[str, AfterValidator(_check_url)]
    model: str | None = None  # default: the first that the server lists
    key: Variable | None = None


class RewardTerm(Section):
    """One term of the reward: a verifier, a function or a reward model, with its weight."""

    verifier: Annotated[str | None, BeforeValidator(_check_verifier)] = None
    python: Function | None = None
    model: Annotated[str, AfterValidator(absolute_path)] | None = None  # folder of a classifier with one label
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    field: str | None = None  # of the row: what the completion is compared with; default: answer
    pattern: str | None = None  # regex; default: the row's field
    json_schema: dict[str, Any] | None = None  # default: the row's field
    endpoint: ApiEndpoint | None = None  # judge
    instruction: str | None = None  # judge: what to ask; {prompt}, {completion} and {answer} are filled in

    @model_validator(mode="after")
    def _is_one_term(self) -> Self:
        given = [name for name in ("verifier", "python", "model") if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise ValueError(f"give one of verifier, python and model, not {what}")
        for key, verifier in (
            ("pattern", "regex"),
            ("json_schema", "json_schema"),
            ("endpoint", "judge"),
            ("instruction", "judge"),
        ):
            if getattr(self, key) is not None and self.verifier != verifier:
                raise KeyConflictError(
                    f"reward: {key} applies to verifier {verifier}, not {self.verifier or given[0]}", (key,)
                )
        if self.verifier == "judge" and self.endpoint is None:
            raise ValueError("verifier judge needs an endpoint; write endpoint: {url: http://host:8000}")
        return self

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        return value

    @field_validator("json_schema")
    @classmethod
    def _schema_is_json(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"is not JSON: {error}") from None
        return value

    @property
    def name(self) -> str:
        """What the term is called in verdicts and metrics."""
        return self.verifier or self.python or f"model {self.model}"

    @property
    def answer_field(self) -> str:
        return self.field or ANSWER_FIELD


def _parse_rewards(value: object, info: ValidationInfo) -> object:
    """Parse a function, one term, or a list of terms."""
    if value is None:
        return ()
    terms = list(value) if isinstance(value, list | tuple) else [value]
    parsed = []
    for index, term in enumerate(terms):
        if isinstance(term, RewardTerm):
            parsed.append(term)
            continue
        if isinstance(term, str):
            term = {"python": term} if is_function(term) else {"verifier": term}
        if not isinstance(term, dict):
            raise ValueError(f"{term!r} is not a reward; {_HOW}")
        try:
            parsed.append(RewardTerm.parse(term, info))
        except SectionError as error:
            raise SectionError(error.section, error.error, at=(index,)) from None
    return tuple(parsed)


RewardSpec = Annotated[tuple[RewardTerm, ...], BeforeValidator(_parse_rewards)]


def _parse_workers(value: object) -> object:
    return None if value == "auto" else value


def _check_memory(value: float) -> float:
    if value < MIN_VERIFIER_BYTES:
        raise ValueError(
            f"{value / (1 << 20):g} MiB is too little: Python itself needs about half of the minimum, "
            f"{MIN_VERIFIER_BYTES >> 20} MiB; the default is 1GiB"
        )
    return value


class VerifySection(Section):
    """Limits of the verifiers. Each sample is verified in a process that is killed at the limit."""

    limit: Seconds = 10.0  # per sample
    workers: Annotated[Size | None, BeforeValidator(_parse_workers)] = None  # processes per node; None: one per core
    memory: Annotated[Bytes, AfterValidator(_check_memory)] = float(1 << 30)  # of one worker
    sandbox: Literal["auto", "off"] = "auto"
