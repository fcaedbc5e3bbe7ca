"""The `preference:` section of kind dpo: the loss that compares the completions of a pair, and its reference."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from craton.job.document import KeyConflictError, Section
from craton.job.sections.data import absolute_path

PreferenceLoss = Literal["dpo", "ipo", "simpo", "orpo", "reward"]

# Defaults of the papers: DPO arXiv:2305.18290, IPO arXiv:2310.12036, SimPO arXiv:2405.14734, ORPO arXiv:2403.07691.
DEFAULT_BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "reward": 1.0}
DEFAULT_MARGIN = 1.0  # SimPO: the target reward margin, gamma in the paper
LOSSES_WITH_REFERENCE = ("dpo", "ipo")


def _parse_reference(value: str, info: ValidationInfo) -> str:
    return value if value in ("start", "none") else absolute_path(value, info)


Reference = Annotated[str, AfterValidator(_parse_reference)]


class Preference(Section):
    """How a model learns from pairs of a chosen and a rejected completion."""

    loss: PreferenceLoss = "dpo"
    beta: Annotated[float, Field(gt=0)] | None = None  # default: the paper's
    margin: Annotated[float, Field(ge=0)] | None = None  # simpo: target reward margin, gamma in the paper
    reference: Reference | None = None  # start: the weights that training starts from; none; or a folder

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.margin is not None and self.loss != "simpo":
            raise KeyConflictError(f"preference: margin applies to loss simpo, not {self.loss}", ("margin",), ("loss",))
        if self.beta is not None and self.loss == "reward":
            raise KeyConflictError("preference: loss reward has no beta; remove it", ("beta",), ("loss",))
        if self.reference not in (None, "none") and self.loss not in LOSSES_WITH_REFERENCE:
            raise KeyConflictError(
                f"preference: loss {self.loss} compares with no reference; remove reference, or use loss "
                f"{' or '.join(LOSSES_WITH_REFERENCE)}",
                ("reference",),
                ("loss",),
            )
        return self

    @property
    def scale(self) -> float:
        """`beta` as written, else that of the loss."""
        return DEFAULT_BETAS[self.loss] if self.beta is None else self.beta

    @property
    def target_margin(self) -> float:
        """`margin` as written, else SimPO's default."""
        return DEFAULT_MARGIN if self.margin is None else self.margin

    @property
    def reference_model(self) -> str | None:
        """`start`, a folder, or None if the loss uses no reference."""
        if self.loss not in LOSSES_WITH_REFERENCE or self.reference == "none":
            return None
        return self.reference or "start"
