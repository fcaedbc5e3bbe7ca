"""A second model beside the trained one, without gradients: a reference or a teacher."""

from __future__ import annotations

from torch import nn

from craton.ml.training import SetupError, TrainingSetup, build_model


def frozen_model(setup: TrainingSetup, folder: str | None) -> nn.Module:
    """Build a second model in the job's layout, without gradients: of a folder, or with the weights that training
    starts from."""
    job, train = setup.job if folder is None else setup.job.with_model(folder), setup.job.train
    assert train is not None
    changed = {"lora": None} if folder is None else {"lora": None, "initialize": "weights"}
    plain = job.model_copy(update={"train": train.model_copy(update=changed)})
    shape = plain.model_shape
    if shape is not None and shape.vocab < setup.vocabulary:
        raise SetupError(f"{folder}: has a vocabulary of {shape.vocab:,}, and the policy's is {setup.vocabulary:,}")
    return build_model(plain, setup.ranks).requires_grad_(False)
