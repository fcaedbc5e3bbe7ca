"""The `policy:` section of kind grpo: the loss of the policy, its clipping, its reference and its corrections."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from craton.job.document import KeyConflictError, Section, SectionError, Size
from craton.job.sections.data import absolute_path
from craton.job.sections.posttraining.rewards import ApiEndpoint

PolicyLoss = Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "ppo", "distill"]
Correction = Literal["truncated", "sequence", "off"]
GROUP_LOSSES = ("grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo")  # their baseline is the group of a prompt

DEFAULT_CLIP = (0.2, 0.2)
# DAPO arXiv:2503.14476; GSPO arXiv:2507.18071, ratios of sequences; CISPO arXiv:2506.13585, an upper bound
DEFAULT_CLIPS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 2.0)}

Share = Annotated[float, Field(ge=0, le=1)]


def _parse_clip(value: object) -> object:
    if value is None:
        return None
    pair = list(value) if isinstance(value, list | tuple) else [value, value]
    numbers = [float(item) for item in pair if isinstance(item, int | float) and not isinstance(item, bool)]
    if len(pair) != 2 or len(numbers) != 2 or min(numbers) <= 0:
        raise ValueError(f"{value!r} is not a clip range; write one number or two, e.g. 0.2 or [0.2, 0.28]")
    return tuple(numbers)


def _parse_reference(value: str, info: ValidationInfo) -> str:
    return value if value == "start" else absolute_path(value, info)


def _parse_teacher(value: object, info: ValidationInfo) -> object:
    if isinstance(value, dict):
        try:
            return ApiEndpoint.parse(value, info)
        except SectionError as error:
            raise SectionError(error.section, error.error) from None
    if isinstance(value, str):
        return absolute_path(value, info)
    if value is None or isinstance(value, ApiEndpoint):
        return value
    raise ValueError(f"{value!r} is not a teacher; write a folder, or {{url: http://host:8000}}")


class Policy(Section):
    """How a policy learns from its rollouts."""

    loss: PolicyLoss = "grpo"
    clip: Annotated[tuple[float, float] | None, BeforeValidator(_parse_clip)] = None  # default: the paper's
    kl: Annotated[float, Field(ge=0)] = 0.0  # weight of the KL divergence from the reference
    reference: Annotated[str, AfterValidator(_parse_reference)] = "start"  # or a folder; used if kl is not 0
    entropy: Annotated[float, Field(ge=0)] = 0.0  # weight of the entropy bonus
    epochs: Size = 1  # passes over the samples of a step
    minibatches: Size = 1  # optimizer updates per pass
    correction: Correction = "truncated"  # of differences between the log-probabilities of rollouts and of training
    teacher: Annotated[str | ApiEndpoint | None, BeforeValidator(_parse_teacher)] = None  # distill: folder or endpoint
    discount: Share = 1.0  # ppo: gamma of the rewards
    gae: Share = 0.95  # ppo: lambda of generalized advantage estimation
    value_weight: Annotated[float, Field(ge=0)] = 0.5  # ppo: weight of the value loss

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.loss == "distill") != (self.teacher is not None):
            problem = "needs a teacher: a folder or {url: …}" if self.loss == "distill" else "has no teacher; remove it"
            raise KeyConflictError(f"policy: loss {self.loss} {problem}", ("loss",), ("teacher",))
        for key in ("discount", "gae", "value_weight"):
            if self.loss != "ppo" and getattr(self, key) != type(self).model_fields[key].default:
                raise KeyConflictError(f"policy: {key} applies to loss ppo, not {self.loss}", (key,), ("loss",))
        if self.reference != "start" and not self.kl:
            raise KeyConflictError(
                "policy: reference is used only with kl; set kl, or remove reference", ("reference",), ("kl",)
            )
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may be below and above 1: as written, else the paper's."""
        return self.clip or DEFAULT_CLIPS.get(self.loss, DEFAULT_CLIP)

    @property
    def updates(self) -> int:
        """Optimizer updates in one step."""
        return self.epochs * self.minibatches
