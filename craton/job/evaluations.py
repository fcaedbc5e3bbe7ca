"""Checks of evaluations: of `train.evaluate` against the job, and of the keys of kind eval."""

from __future__ import annotations

from typing import NamedTuple

from craton.job.document import KeyConflictError
from craton.job.model import ModelSpec, is_function
from craton.job.sections.posttraining import Preference
from craton.job.sections.suites import Evaluation

NOT_OF_AN_EVALUATION = {
    "data": "the suite has the problems",
    "layout": "one process has the whole model; serve it to use several GPUs, and give the URL as eval.endpoint",
    "checkpoint": "the results of each problem are saved as they come",
    "objective": "nothing is trained",
}


class SuiteUse(NamedTuple):
    """A suite, and what a job changes of it."""

    suite: str
    problems: int | None  # the first so many
    samples: int | None  # of each problem


def check_training_evaluation(
    suite: str | None, validates: bool, model: ModelSpec | None, preference: Preference | None
) -> None:
    """Raise KeyConflictError if training cannot be evaluated as asked. `validates`: on `data.validation`."""
    if suite is None and not validates:
        raise KeyConflictError(
            "train: evaluate requires data.validation, or a suite, e.g. suite: arithmetic", ("train", "evaluate")
        )
    generates = preference is None or preference.loss != "reward"
    if suite is not None and (not generates or (isinstance(model, str) and is_function(model))):
        why = f"{model} is a function" if generates else "a reward model answers nothing"
        raise KeyConflictError(
            f"train: evaluate.suite needs a model that Craton can serve, and {why}; remove suite",
            ("train", "evaluate", "suite"),
            ("model",),
        )


def check_evaluation(evaluation: Evaluation, model: ModelSpec | None, num_nodes: int) -> None:
    """Raise KeyConflictError unless a job of kind eval has one model, on one node."""
    if (model is None) == (evaluation.endpoint is None):
        given = "both" if model is not None else "neither"
        raise KeyConflictError(f"kind eval needs one of model and eval.endpoint; got {given}", ("eval",), ("kind",))
    if isinstance(model, str) and is_function(model):
        raise KeyConflictError(
            f"kind eval requires a model that Craton builds, but {model} is a function", ("model",), ("kind",)
        )
    if num_nodes > 1:
        raise KeyConflictError(
            "kind eval runs in one process on one node; serve a larger model and give its URL as eval.endpoint",
            ("cluster",),
            ("kind",),
        )
