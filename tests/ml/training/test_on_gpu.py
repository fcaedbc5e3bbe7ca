"""The loop on a GPU: it learns as on the CPU, and a step makes the host wait for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, make_trainer, tiny_job

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.ml.models import DecoderConfig
from craton.ml.training import Trainer
from craton.ml.training.checkpoint import TierFolder, find_checkpoint, read_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = ModelShape("small", 2, 256, 512, 4, 2, 64, VOCABULARY, tied_embeddings=True)
with_and_without_qk_norm = pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, qk_norm=True)], ids=["plain", "QK norm"]
)


def trainer_on(device: str, shape: ModelShape, **options: str) -> tuple[Trainer, dict[int, float]]:
    job = tiny_job(12, precision="bf16", learning_rate="1e-3", **options)
    trainer, records = make_trainer(job, Layout(micro_batch=4), config=DecoderConfig(shape), device=device)
    trainer.fit()
    step = records.metrics_by_step[12]
    names = ("data", "compute", "communication", "optimizer", "checkpoint")
    assert sum(step[f"run_{name}_seconds"] for name in names) == pytest.approx(step["run_step_seconds"])
    return trainer, records.losses


@with_and_without_qk_norm
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_gpu_learns_what_a_cpu_learns(weights: str, shape: ModelShape) -> None:
    (_, on_cpu), (_, on_gpu) = (trainer_on(device, shape, weights=weights) for device in ("cpu", "cuda"))
    # random weights differ between the devices' generators, the way down does not
    assert on_gpu[1] == pytest.approx(on_cpu[1], rel=0.05)
    assert on_gpu[12] == pytest.approx(on_cpu[12], rel=0.05)
    assert on_gpu[12] < on_gpu[1] - 0.3


@with_and_without_qk_norm
def test_a_step_makes_the_host_wait_for_nothing(shape: ModelShape) -> None:
    job = tiny_job(20, precision="bf16", learning_rate="1e-3")
    trainer, _ = make_trainer(job, Layout(micro_batch=4), config=DecoderConfig(shape), device="cuda")
    trainer._begin(None)
    trainer.timer.begin()
    for _ in range(6):  # the first ones compile, measure the launches and capture a graph
        trainer._train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            trainer._train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        assert trainer.loader is not None
        trainer.loader.close()


@with_and_without_qk_norm
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_bit(recompute: str, shape: ModelShape) -> None:
    losses = []
    for chosen in ("none", recompute):
        job = tiny_job(6, precision="bf16", learning_rate="1e-3")
        layout = Layout(micro_batch=4, recompute=chosen)
        trainer, records = make_trainer(job, layout, config=DecoderConfig(shape), device="cuda")
        trainer.fit()
        losses.append(records.losses)
    assert losses[0] == losses[1]


def test_a_checkpoint_is_of_its_step_though_training_goes_on(tmp_path: Path) -> None:
    wide = DecoderConfig(ModelShape("wide", 2, 2048, 8192, 16, 4, 128, VOCABULARY))  # its copy outlasts a forward pass
    job = tiny_job(9, precision="bf16", learning_rate="1e-3")
    trainer, _ = make_trainer(job, Layout(micro_batch=4), tmp_path, config=wide, every_steps=3, device="cuda")
    save, states = trainer.parts.checkpointer.save, {}

    def kept(step: int, tensors: Any, *rest: Any, **options: Any) -> float:
        states[step] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return save(step, tensors, *rest, **options)

    trainer.parts.checkpointer.save = kept  # type: ignore[method-assign]
    trainer.fit()
    assert list(states) == [3, 6, 9]
    for step, state in states.items():
        found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        read_tensors(find_checkpoint([TierFolder("shared", tmp_path)], step), found)
        for name, tensor in state.items():
            assert torch.equal(tensor, found[name]), f"{name} of step {step}"
