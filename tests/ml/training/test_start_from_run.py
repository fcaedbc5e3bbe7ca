"""A job of `model: {job: FILE}` starts from the weights of the run that trained them, with any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gang import Gang
from torch.distributed.tensor import DTensor

from craton.job import Job, load_job
from craton.job.layout import Layout
from craton.ml.data import Shards, prepare, tokenizer_folder
from craton.ml.models import Decoder, config_from_shape
from craton.ml.training import build_model
from craton.ml.training.build import SetupError
from craton.ml.training.checkpoint import Checkpointer, TierFolder
from craton.ml.training.parallel import make_ranks
from craton.ml.training.parts import MissingWeightsError
from craton.telemetry import RunDirectory

BASE = """\
kind: pretrain
model: {layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 300, tied_embeddings: true}
data: {path: text.txt, tokenizer: "bpe:300", sequence: 32}
train: {global_batch_sequences: 2, steps: 4, precision: fp32}
cluster: local
"""
NEXT = """\
kind: pretrain
model: {job: base.yaml}
data: {path: other.txt, sequence: 32}
train: {global_batch_sequences: 2, steps: 4, precision: fp32, seed: 5}
cluster: local
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job that starts from another one, whose run has a checkpoint with weights of seed 7."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "next.yaml").write_text(NEXT)
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 50)
    (tmp_path / "other.txt").write_text("return add(a, a)\n" * 50)
    run = RunDirectory.create(tmp_path, "base")
    run.job_path.write_text(BASE)
    saved = trained_model(load_job(run.job_path))
    checkpointer = Checkpointer([TierFolder("shared", run.checkpoints("shared"))], 0, 1)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in saved.state_dict().items()}
    checkpointer.save(4, {**tensors, "optimizer.count": torch.zeros(())}, {"next_sample": 0}, wait=True)
    checkpointer.close()
    loaded = load_job(tmp_path / "next.yaml")
    assert loaded.weights_job is not None
    return loaded.with_weights_of(loaded.weights_job, run.path)


def trained_model(job: Job) -> Decoder:
    assert job.model_shape is not None
    model = Decoder(config_from_shape(job.model_shape))
    model.initialize(7)
    return model


def largest_difference(job: Job) -> float:
    """Build the model on this rank and compare its weights with the saved ones."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if world > 1 else 0
    built = build_model(job, make_ranks(Layout(fsdp=world, precision="fp32"), torch.device("cpu"), rank, world))
    expected = dict(trained_model(job).named_parameters())
    differences = []
    for name, parameter in built.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        differences.append((whole - expected[name]).abs().max().item())
    assert len(differences) == len(expected)
    return max(differences)


def test_a_model_has_the_weights_of_the_run(job: Job) -> None:
    assert largest_difference(job) == 0.0


def test_each_rank_reads_its_part_of_the_weights(job: Job, gang: Gang) -> None:
    assert gang.run(largest_difference, job, ranks=2) == [0.0, 0.0]


def test_adapters_are_added_to_the_weights_of_the_run(job: Job) -> None:
    assert job.train is not None
    from craton.job.sections import Lora

    adapted = job.model_copy(update={"train": job.train.model_copy(update={"lora": Lora(rank=2)})})
    model = build_model(adapted, make_ranks(Layout(precision="fp32"), torch.device("cpu"), 0, 1))
    expected = dict(trained_model(job).named_parameters())
    frozen = {name: weight for name, weight in model.named_parameters() if not name.endswith(("lora_a", "lora_b"))}
    assert frozen.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in frozen.items())


def test_a_run_without_weights_is_named(job: Job, tmp_path: Path) -> None:
    assert job.weights_job is not None
    empty = RunDirectory.create(tmp_path, "empty")
    empty.job_path.write_text(BASE)
    with pytest.raises(
        MissingWeightsError, match=r"the weights of the run .*/empty cannot be used: there is no checkpoint"
    ):
        largest_difference(job.with_weights_of(job.weights_job, empty.path))
    with pytest.raises(SetupError, match="does not state which run of base has the weights"):
        largest_difference(job.with_weights_of(job.weights_job))
    other = BASE.replace("hidden: 32", "hidden: 64")
    (tmp_path / "base.yaml").write_text(other)
    wider = load_job(tmp_path / "next.yaml")
    assert wider.weights_job is not None
    with pytest.raises(MissingWeightsError, match="belongs to another model"):
        largest_difference(wider.with_weights_of(wider.weights_job, tmp_path / "base"))


def test_an_older_step_is_not_taken_for_the_last(job: Job, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE.replace("steps: 4", "steps: 8"))
    longer = load_job(tmp_path / "next.yaml")
    assert longer.weights_job is not None
    with pytest.raises(MissingWeightsError, match="there is no checkpoint of step 8"):
        largest_difference(longer.with_weights_of(longer.weights_job, tmp_path / "base"))


def test_data_gets_the_tokenizer_that_the_weights_were_trained_with(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    assert job.weights_job is not None
    folders = prepare(job)
    base = prepare(job.weights_job)
    marks = [Shards(next(iter(place.values()))).index.tokenizer.fingerprint for place in (folders, base)]
    assert marks[0] == marks[1]
    assert tokenizer_folder(job, folders) is not None
