"""The recipe of kind dpo: models that learn from pairs of a chosen and a rejected completion."""

from __future__ import annotations

from collections.abc import Sequence

from craton.job import Job
from craton.ml.data import Mixture, PairedSource, Source, open_pairs
from craton.ml.posttraining.objectives import preference_objective
from craton.ml.posttraining.reference import Wanted, attach_references
from craton.ml.training import Objective, Recipe, Schedule, TrainingInputs, TrainingSetup, inputs_of, objective_of


def dpo_objective(job: Job) -> Objective:
    """Return the user's objective if the job names one, else that of `preference.loss`."""
    assert job.preference is not None
    return objective_of(job) if job.objective else preference_objective(job.preference)


def open_preference(setup: TrainingSetup) -> TrainingInputs:
    """Open the pairs, with their reference log-probabilities if the loss compares with a reference."""
    job = setup.job
    assert job.train is not None
    assert job.preference is not None
    train, weights = open_pairs(job, vocab=setup.vocabulary)
    wanted = _wanted("train", train, weights, num_samples(job))
    validation: list[PairedSource] = []
    if job.validates and job.train.evaluate is not None:
        validation, shares = open_pairs(job, "validation", vocab=setup.vocabulary)
        wanted += _wanted("validation", validation, shares, job.train.evaluate.sequences)
    if job.preference.reference_model is not None:
        attach_references(setup, wanted)
    return inputs_of(setup, _mixed(train, weights), _mixed(validation, shares) if validation else None)


DPO = Recipe(dpo_objective, open_preference)


def num_samples(job: Job) -> int:
    """Return how many samples a run may take. A rollback skips those of the steps that it leaves out, as many as the
    run has at the most."""
    assert job.train is not None
    samples = Schedule.of(job).steps * job.global_batch_sequences
    may_roll_back = "rollback" in (job.train.on_nan, job.train.on_spike.policy if job.train.on_spike else "")
    return 2 * samples if may_roll_back else samples


def _wanted(name: str, sources: Sequence[PairedSource], weights: Sequence[float], samples: int) -> list[Wanted]:
    """Each source gives its share of the samples, to within one for each source of the mixture."""
    if len(sources) == 1:
        return [Wanted(f"{name}-0", sources[0], samples)]
    shares = [int(samples * weight / sum(weights)) + len(sources) for weight in weights]
    return [
        Wanted(f"{name}-{number}", source, share)
        for number, (source, share) in enumerate(zip(sources, shares, strict=True))
    ]


def _mixed(sources: Sequence[PairedSource], weights: Sequence[float]) -> Source:
    return sources[0] if len(sources) == 1 else Mixture(sources, weights)
