"""A job in one line, once its model, batch and layout are known to go together."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from craton.job.errors import ContentError, LayoutError
from craton.job.jobfile import Job
from craton.job.layout_check import check_layout


@dataclass(frozen=True)
class JobSummary:
    """What was checked. Numbers a kind does not have are None."""

    name: str
    kind: str
    model: str | None
    parameters: int | None
    cluster: str
    num_gpus: int
    sequence: int | None
    global_batch_sequences: int | None
    global_batch_tokens: int | None
    steps: int | None
    total_tokens: float | None
    layout: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"{self.name} ({self.kind})"]
        if self.model:
            size = f", {short_count(self.parameters)} parameters" if self.parameters else ""
            parts.append(f"{self.model}{size}")
        unit = "rank" if self.cluster.startswith("local ") else "GPU"
        parts.append(f"{self.cluster} = {self.num_gpus:,} {unit}{'' if self.num_gpus == 1 else 's'}")
        if self.global_batch_sequences and self.global_batch_tokens:
            parts.append(
                f"{self.global_batch_sequences:,} sequences of {self.sequence:,} = "
                f"{short_count(self.global_batch_tokens)} tokens a step"
            )
        if self.steps and self.total_tokens:
            parts.append(f"{self.steps:,} steps, {short_count(self.total_tokens)} tokens")
        return " · ".join([*parts, f"layout {self.layout}"])


def check_job(job: Job, num_gpus: int) -> JobSummary:
    """The summary of a job on so many GPUs, or a ContentError with what is wrong with its layout."""
    shape = job.model_shape
    try:
        layout = job.fixed_layout(num_gpus)
    except LayoutError as error:
        raise ContentError([f"{job.where('layout')}{error}"]) from None
    if layout and shape and job.train:
        problems = check_layout(layout, shape, num_gpus, job.global_batch_sequences, job.sequence)
        if problems:
            raise ContentError([f"{job.where('layout')}layout: {problem}" for problem in problems])
    return JobSummary(
        name=job.name,
        kind=job.kind,
        model=shape.name if shape else job.model if isinstance(job.model, str) else None,
        parameters=shape.parameters if shape else None,
        cluster=str(job.cluster),
        num_gpus=num_gpus,
        sequence=job.sequence if job.train else None,
        global_batch_sequences=job.global_batch_sequences if job.train else None,
        global_batch_tokens=job.global_batch_tokens if job.train else None,
        steps=job.steps,
        total_tokens=job.total_tokens,
        layout=str(layout) if layout else "auto",
    )


def short_count(value: float) -> str:
    """1234567 → 1.23M: three digits, decimal."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.3g}"
