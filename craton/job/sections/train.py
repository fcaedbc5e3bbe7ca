"""The `train:` section: batch, length, optimizer and schedule. Job resolves what depends on the whole job."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from craton.job.document import Count, KeyConflictError, Section, Size, TokenCount, Whole
from craton.job.layout import Precision
from craton.job.sections.suites import Samples, SuiteName
from craton.nearest import did_you_mean

LearningRateSchedule = Literal["cosine", "linear", "constant", "wsd"]
Weights = Literal["fp32", "bf16"]
Float8Recipe = Literal["tensorwise", "rowwise"]
FaultPolicy = Literal["skip", "rollback", "stop"]
Initialize = Literal["auto", "random", "weights"]
Graphs = Literal["auto", "on", "off"]

Rate = Annotated[float, Field(ge=0, lt=1)]


class Lora(Section):
    """Low-rank adapters (arXiv:2106.09685): the base weights stay frozen."""

    rank: Size
    alpha: Annotated[float, Field(gt=0)] | None = None  # default: the rank
    targets: Literal["attention", "mlp", "all"] = "all"


class Evaluate(Section):
    """Periodic evaluation: of the loss on `data.validation`, of the accuracy on a suite, or of both."""

    every_steps: Size
    sequences: Size = 64  # the first sequences of the validation data, the same each time
    suite: SuiteName | None = None
    problems: Size | None = None  # the first so many of the suite; default: all
    samples: Samples | None = None  # answers to each problem; default: the suite's

    @model_validator(mode="after")
    def _has_a_suite(self) -> Self:
        for key in ("problems", "samples"):
            if self.suite is None and getattr(self, key) is not None:
                raise KeyConflictError(
                    f"train: evaluate.{key} applies to a suite; give one, e.g. suite: arithmetic, or remove {key}",
                    (key,),
                )
        return self


class Spike(Section):
    """A loss above `factor` times its recent level is treated as a fault."""

    factor: Annotated[float, Field(gt=1)]
    policy: FaultPolicy = "skip"


def _parse_compile(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise ValueError(
        f"{value!r} is not allowed; allowed: auto, true, false{did_you_mean(str(value), ('auto', 'true', 'false'))}"
    )


def _parse_betas(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2:
        return value
    raise ValueError(f"{value!r} is not a pair; write two numbers from 0 to 1, e.g. [0.9, 0.95]")


class Train(Section):
    """Batch, length, precision, optimizer and schedule of training."""

    global_batch_tokens: TokenCount | None = None
    global_batch_sequences: Count | None = None
    tokens: Count | None = None
    steps: Count | None = None
    precision: Precision = "bf16"
    weights: Weights = "fp32"  # fp32: master weights; bf16: weights and optimizer states in bf16, stochastic rounding
    fp8: Float8Recipe | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    schedule: LearningRateSchedule = "cosine"
    warmup_steps: Whole | None = None
    final_learning_rate: Annotated[float, Field(ge=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: Annotated[tuple[Rate, Rate], BeforeValidator(_parse_betas)] = (0.9, 0.95)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    clip: Annotated[float, Field(ge=0)] = 1.0  # maximum gradient norm; 0: off
    seed: Whole = 0
    compile: Annotated[Literal["auto"] | bool, BeforeValidator(_parse_compile)] = (
        "auto"  # auto: on a GPU, for blocks without Craton's own kernels
    )
    graphs: Graphs = "auto"  # CUDA graphs; auto: on a GPU, if launching kernels takes much of a step
    initialize: Initialize = "auto"
    evaluate: Evaluate | None = None
    on_nan: FaultPolicy = "skip"
    on_spike: Spike | None = None
    lora: Lora | None = None

    @model_validator(mode="after")
    def _never_both_of_a_pair(self, info: ValidationInfo) -> Self:
        if (info.context or {}).get("kind") == "grpo":
            return self  # refuses all of these but steps
        for first, second in (("global_batch_tokens", "global_batch_sequences"), ("tokens", "steps")):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise KeyConflictError(f"train: {first} and {second} are both given; keep one", (first,), (second,))
        return self

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Self:
        if self.schedule == "constant" and self.final_learning_rate is not None:
            raise KeyConflictError(
                "train: a constant schedule has no final_learning_rate; remove one of the two",
                ("final_learning_rate",),
                ("schedule",),
            )
        return self
