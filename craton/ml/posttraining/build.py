"""Build what a rank trains with that generates: the training loop's parts, by the recipe of its kind, and its suite."""

from __future__ import annotations

from craton.job import load_job
from craton.ml.posttraining.grpo import GRPO
from craton.ml.posttraining.preference import DPO
from craton.ml.posttraining.suite_evaluation import with_suite
from craton.ml.training import PRETRAINING, Order, Parts, RankIdentity, Recipe, SetupError, session
from craton.ml.training import build as training
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder

RECIPES: dict[str, Recipe] = {"pretrain": PRETRAINING, "sft": PRETRAINING, "dpo": DPO, "grpo": GRPO}


def main(arguments: list[str]) -> int:
    """Train the run named on the command line; return the exit code."""
    return session.main(arguments, "craton.ml.posttraining", build)


def build(
    run: RunDirectory,
    place: RankIdentity,
    recorder: Recorder,
    clock: LedgerClock,
    order: Order | None = None,
) -> Parts:
    """Build everything that the loop needs for one generation of the run."""
    job = load_job(run.job_path)
    if job.kind not in RECIPES:
        raise SetupError(f"{run.job_path}: kind {job.kind} does not train")
    return training.build(run, place, recorder, clock, order, with_suite(RECIPES[job.kind]))
