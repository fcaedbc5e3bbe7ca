"""A suite: where its problems come from, how they are asked, what verifies the answers, how the model is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from craton.job.document import (
    KeyConflictError,
    Name,
    Section,
    SectionError,
    Size,
    Whole,
    section_problems,
    whole_number,
)
from craton.job.errors import JobError, StrategyError
from craton.job.sections.data import absolute_path
from craton.job.sections.posttraining import RewardSpec, RewardTerm, VerifySection
from craton.job.sections.strategy import AnswerRule, Strategy, StrategySpec, VoteStrategy, check_score
from craton.job.sections.suites.evaluation import MAX_SUITE_SEED, Samples, parse_strategies

DEFAULT_TOKENS = 512
DEFAULT_PROBLEMS = 500  # of a generator
MAX_DIGITS = 12

Generator = Literal["arithmetic", "reasoning_gym"]


def _parse_path(value: object, info: ValidationInfo) -> object:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a path; write a file of JSONL or Parquet, or a folder of them")
    return absolute_path(value.strip(), info)


def _list_of(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


class SuiteData(Section):
    """The problems: rows of a file, or of a generator."""

    path: Annotated[str | None, BeforeValidator(_parse_path)] = None  # JSONL or Parquet; a folder holds such files
    generate: Generator | None = None
    problems: Size | None = None  # the first so many; default: all of a file, 500 of a generator
    seed: Whole = 0  # of a generator
    digits: Annotated[
        tuple[Annotated[int, PlainValidator(whole_number(1, MAX_DIGITS))], ...], BeforeValidator(_list_of)
    ] = ()  # arithmetic: of both summands; several: in turn
    tasks: Annotated[tuple[str, ...], BeforeValidator(_list_of)] = ()  # reasoning_gym: names of its datasets, in turn

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.path is None) == (self.generate is None):
            given = "both" if self.path is not None else "none of them"
            raise ValueError(f"give one of path and generate, not {given}; e.g. {{path: problems.jsonl}}")
        for key, generator in (("digits", "arithmetic"), ("tasks", "reasoning_gym")):
            if getattr(self, key) and self.generate != generator:
                raise KeyConflictError(f"data: {key} applies to generate: {generator}", (key,))
        if self.generate == "reasoning_gym" and not self.tasks:
            raise KeyConflictError("data: generate: reasoning_gym needs tasks, e.g. [leg_counting]", ("generate",))
        return self


class SuiteTemplate(Section):
    """How a row becomes a prompt: a text, or the message of a user. {FIELD} stands for a field of the row."""

    text: str | None = None
    chat: str | None = None
    system: str | None = None  # message before that of the user

    @model_validator(mode="after")
    def _is_one_form(self) -> Self:
        if (self.text is None) == (self.chat is None):
            raise ValueError('give one of text and chat, e.g. {chat: "{question}"}')
        if self.system is not None and self.chat is None:
            raise KeyConflictError("template: system goes with chat, not with text", ("system",))
        return self


def _parse_template(value: object) -> object:
    return {"text": value} if isinstance(value, str) else value


class SuiteSampling(Section):
    """How answers are sampled. Sample i of problem p has a seed of its own, a function of (seed, p, i)."""

    max_tokens: Size = DEFAULT_TOKENS
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # default: 0 for one sample, 1 otherwise
    samples: Samples = 1  # of each problem
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Whole = 0  # 0: all
    seed: Annotated[int, PlainValidator(whole_number(0, MAX_SUITE_SEED))] = 0
    stop: Annotated[tuple[str, ...], BeforeValidator(_list_of)] = ()

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise KeyConflictError(
                f"sampling: {self.samples} samples at temperature 0 are all the same; use one sample, or a temperature "
                "above 0",
                ("samples",),
                ("temperature",),
            )
        return self

    def temperature_for(self, samples: int) -> float:
        """The temperature as written, else 0 for one sample and 1 for several."""
        return self.temperature if self.temperature is not None else 1.0 if samples > 1 else 0.0

    def changed(self, **values: object) -> SuiteSampling:
        """Return the sampling with those of these values that are not None; JobError if they do not go together."""
        given = {**self.model_dump(), **{key: value for key, value in values.items() if value is not None}}
        try:
            return SuiteSampling.model_validate(given)
        except ValidationError as error:
            raise JobError(section_problems(SuiteSampling, error, "sampling")[0]) from None


def _parse_answer(value: object, info: ValidationInfo) -> object:
    """Parse what is counted, as a vote has it."""
    if isinstance(value, AnswerRule):
        return value
    return VoteStrategy.parse({} if value is None else {"answer": value}, info).answer


class Suite(Section):
    """Problems with verifiers. An answer is right if its reward reaches `threshold`."""

    name: Name = "suite"
    data: SuiteData
    template: Annotated[SuiteTemplate | None, BeforeValidator(_parse_template)] = None  # default: the row's `prompt`
    columns: dict[str, str] = Field(default_factory=dict)  # which columns of the rows hold prompt, answer, …
    reward: RewardSpec
    threshold: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    verify: VerifySection = VerifySection()
    verifiers: dict[str, RewardTerm] = Field(default_factory=dict)  # scores of strategies, by name
    sampling: SuiteSampling = SuiteSampling()
    strategies: Annotated[tuple[StrategySpec, ...], BeforeValidator(parse_strategies)] = ()
    answer: Annotated[AnswerRule, BeforeValidator(_parse_answer)] = AnswerRule()  # what majority@k counts

    @model_validator(mode="before")
    @classmethod
    def _name_from_file(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and "name" not in value and info.context:
            return {**value, "name": Path(info.context["name"]).stem}
        return value

    @field_validator("verifiers", mode="before")
    @classmethod
    def _parse_verifiers(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, dict):
            return value
        parsed = {}
        for name, term in value.items():
            try:
                parsed[name] = RewardTerm.parse({"verifier": term} if isinstance(term, str) else term, info)
            except SectionError as error:
                raise SectionError(error.section, error.error, at=(name,)) from None
        return parsed

    @model_validator(mode="after")
    def _has_scores(self) -> Self:
        for number, strategy in enumerate(self.strategies):
            try:
                self.score_of(strategy, f"strategies[{number}]")
            except StrategyError as error:
                raise KeyConflictError(str(error), ("strategies",)) from None
        return self

    def score_of(self, strategy: Strategy, where: str = "strategies") -> RewardTerm | None:
        """Return the verifier that scores the samples of a strategy; None: it needs none. StrategyError if its name is
        neither under `verifiers` nor that of a term of `reward`."""
        terms = {**{term.name: term for term in reversed(self.reward)}, **self.verifiers}
        check_score(strategy, terms, where)
        return None if strategy.verifier is None else terms[strategy.verifier]

    @field_validator("reward")
    @classmethod
    def _can_verify(cls, value: tuple[RewardTerm, ...]) -> tuple[RewardTerm, ...]:
        if not value:
            raise ValueError("a suite needs a verifier, e.g. reward: exact")
        for term in value:
            if term.model is not None:
                raise ValueError("a reward model does not say whether an answer is right; use a verifier")
        return value
