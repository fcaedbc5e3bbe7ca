"""The `rollout:` section of kind grpo: how many completions are generated, where, and from how old weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from craton.job.document import KeyConflictError, Section, Size
from craton.job.layout import LayoutSpec, parse_layout
from craton.job.sections.data import Function
from craton.job.sections.posttraining.rewards import ApiEndpoint

RolloutMode = Literal["sync", "overlap", "separate"]

DEFAULT_STALENESS = 1
DEFAULT_TURNS = 8
ROLLOUT_KEY_VARIABLE = "ROLLOUT_KEY"  # has the API key of rollout servers on nodes of their own
# Training uses the log-probabilities of the sampled distribution, which has to be the model's at this temperature.
NOT_IN_ROLLOUTS = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip


class Rollout(Section):
    """The samples of a step: `group` completions for each of `prompts` prompts."""

    group: Size = 8
    prompts: Size = 64
    max_tokens: Size | None = None  # of a completion; default: half of data.sequence
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    mode: RolloutMode = "sync"  # overlap: while the trainer trains; separate: on servers of their own
    staleness: Size | None = None  # steps that the weights of a sample may be behind; default 1, sync: 0
    workers: Size | None = None  # separate: number of rollout servers; default 1
    layout: Annotated[LayoutSpec | None, BeforeValidator(parse_layout)] = None  # separate: of each server
    endpoint: ApiEndpoint | None = None  # separate: a server that keeps its own weights
    truncated: Literal["keep", "mask"] = "keep"  # mask: completions cut at max_tokens carry no loss
    filter: Literal["none", "equal"] = "none"  # equal: groups of equal rewards are replaced by other prompts
    environment: Function | None = None  # package.module:Class with reset and step, for several turns and tools
    turns: Size | None = None  # of an environment; default 8

    @model_validator(mode="before")
    @classmethod
    def _samples_the_policy(cls, value: Any) -> Any:
        for key in NOT_IN_ROLLOUTS if isinstance(value, dict) else ():
            if key in value:
                raise KeyConflictError(
                    f"rollout: {key} would sample from another distribution than the one that is trained; remove it",
                    (key,),
                )
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.mode == "sync" and self.staleness is not None:
            raise KeyConflictError(
                "rollout: mode sync always has the newest weights; remove staleness, or use mode overlap or separate",
                ("staleness",),
                ("mode",),
            )
        for key in ("workers", "layout", "endpoint"):
            if getattr(self, key) is not None and self.mode != "separate":
                raise KeyConflictError(f"rollout: {key} applies to mode separate, not {self.mode}", (key,), ("mode",))
        for key in ("workers", "layout"):
            if self.endpoint is not None and getattr(self, key) is not None:
                raise KeyConflictError(
                    f"rollout: {key} applies to Craton's own servers, and endpoint names another; remove one of them",
                    (key,),
                    ("endpoint",),
                )
        if self.turns is not None and self.environment is None:
            raise KeyConflictError("rollout: turns needs an environment", ("turns",))
        return self

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.prompts * self.group

    @property
    def max_staleness(self) -> int:
        """How many steps the weights of a sample may be behind those that are trained."""
        return 0 if self.mode == "sync" else self.staleness or DEFAULT_STALENESS

    @property
    def num_workers(self) -> int:
        """Rollout servers that the run owns."""
        return 0 if self.mode != "separate" or self.endpoint is not None else self.workers or 1

    @property
    def worker_names(self) -> list[str]:
        """Names of the member runs that are these servers."""
        return [f"rollout-{number}" for number in range(self.num_workers)]

    @property
    def max_turns(self) -> int:
        return 1 if self.environment is None else self.turns or DEFAULT_TURNS
