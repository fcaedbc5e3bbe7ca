"""What a training job says about itself, and the steps that its ranks found to be bad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from craton.errors import CratonError
from craton.job import Job, load_job
from craton.observability.diagnosis.snapshot import SnapshotBadStep, TrainingFacts
from craton.telemetry import RunDirectory

CROSS_ENTROPY = "cross_entropy"
MAX_BAD_STEPS, FIRST_BAD_STEPS = 40, 3  # the first ones, which the ranks examined, are always kept
# AdamW: 6e-4 at a width of 768 (GPT-3, arXiv:2005.14165, table 2.1; wider models use less), a tenth of it for
# fine-tuning of all weights, a hundredth for preference training. Adapters take what pretraining takes.
WIDTH, RATE_AT_WIDTH = 768, 6e-4
RATE_SHARES = {"pretrain": 1.0, "sft": 0.1, "dpo": 0.01, "grpo": 0.01}


def training_facts(run: RunDirectory) -> TrainingFacts | None:
    """Return what the job file says about training; None for other kinds of jobs, or if it cannot be read."""
    try:
        job = load_job(run.job_path)
    except (CratonError, OSError):
        return None
    if job.train is None:
        return None
    shape = job.model_shape
    return TrainingFacts(
        objective=job.objective or (CROSS_ENTROPY if job.kind in ("pretrain", "sft") else job.kind),
        vocabulary=shape.vocab if shape else None,
        source=job.data.source or "",
        has_files=bool(job.data.mixture),
        has_adapters=job.train.lora is not None,
        learning_rate=job.learning_rate,
        usual_learning_rate=_usual_learning_rate(job),
        warmup_steps=job.warmup_steps,
        weight_decay=job.train.weight_decay,
        policy=job.train.on_nan,
        is_new=_is_new(job),
        tokens_per_expert=_tokens_per_expert(job),
    )


def read_bad_steps(lines: Iterable[Mapping[str, Any]], first: int) -> tuple[SnapshotBadStep, ...]:
    """Return the bad steps of the generations from `first` on, by time: the first ones, which the ranks examined, and
    the newest ones."""
    bad = [line for line in lines if line["event"] == "bad_step" and isinstance(line.get("step"), int)]
    found = [step for step in map(_bad_step, bad) if step.generation is None or step.generation >= first]
    if len(found) <= MAX_BAD_STEPS:
        return tuple(found)
    return (*found[:FIRST_BAD_STEPS], *found[FIRST_BAD_STEPS - MAX_BAD_STEPS :])


def _bad_step(line: Mapping[str, Any]) -> SnapshotBadStep:
    def whole(name: str) -> int | None:
        value = line.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return SnapshotBadStep(
        step=int(line["step"]),
        reason=str(line.get("reason") or "")[:300],
        policy=str(line.get("policy") or ""),
        generation=whole("generation"),
        moment=float(line.get("time") or 0.0) or None,
        first_sample=whole("first_sample"),
        last_sample=whole("last_sample"),
        sample=whole("sample"),
        origin=str(line.get("origin") or ""),
        part=str(line.get("part") or "")[:200],
        rank=whole("found_by"),
        is_alone=line.get("found_alone") is True,
    )


def _is_new(job: Job) -> bool:
    """Return whether the weights start at random, as far as this machine can tell."""
    assert job.train is not None
    if job.train.initialize != "auto":
        return job.train.initialize == "random"
    try:
        return job.kind == "pretrain" and job.weights_job is None and job.weights_folder is None
    except (CratonError, OSError):
        return False


def _usual_learning_rate(job: Job) -> float | None:
    assert job.train is not None
    if job.train.optimizer != "adamw":
        return None
    shape = job.model_shape
    rate = RATE_AT_WIDTH * ((WIDTH / shape.hidden) ** 0.5 if shape else 1.0)
    is_light = job.train.lora is not None or _is_new(job)
    return rate * (1.0 if is_light else RATE_SHARES.get(job.kind, 1.0))


def _tokens_per_expert(job: Job) -> float | None:
    shape = job.model_shape
    if shape is None or not shape.experts:
        return None
    return job.global_batch_tokens * shape.top_k / shape.experts
