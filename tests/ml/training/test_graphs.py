"""CUDA graphs of micro-steps, as far as they can be tested without a GPU: tests/gpu/test_gpu_graphs.py replays them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import GLOBAL_BATCH, make_trainer, tiny_job
from torch import Tensor, nn

from craton.job.layout import Layout
from craton.ml.kernels import Documents
from craton.ml.training import AdamW, graphs
from craton.ml.training.batch import Batch
from craton.ml.training.graphs import GraphError, MicroStepGraphs, first_reason


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {name: nn.Parameter(torch.randn(4, 3).to(dtype)) for name in ("a", "b")}


def gradients(dtype: torch.dtype, micro_batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(micro_batch)
    return {name: torch.randn(4, 3, generator=generator).to(dtype) for name in ("a", "b")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_buffers_are_those_of_accumulation(dtype: torch.dtype) -> None:
    eager, summed = (AdamW(parameters(dtype).items()) for _ in range(2))
    sums = summed.new_sums()
    for step in range(3):
        torch._foreach_zero_(list(sums.values()))
        for micro_batch in range(4):
            for name, gradient in gradients(dtype, 10 * step + micro_batch).items():
                own = eager.parameters[name]
                own.grad = gradient.clone() if own.grad is None else own.grad + gradient
                summed.parameters[name].grad = gradient
            if micro_batch < 3:
                eager.accumulate()
            summed.move_gradients_into(sums)
        summed.use_sums(sums)
        norms = [optimizer.step(1e-2) for optimizer in (eager, summed)]
        assert torch.equal(*norms)
        for optimizer in (eager, summed):
            optimizer.zero_grad()
    for name, parameter in eager.parameters.items():
        assert torch.equal(parameter, summed.parameters[name])


def batch_of(documents: list[list[int]]) -> Batch:
    rows, sequence = len(documents), len(documents[0])
    numbers = np.arange(rows * sequence).reshape(rows, sequence)
    arrays = {
        "tokens": numbers,
        "labels": numbers,
        "positions": numbers,
        "weight": np.ones((rows, sequence), "float32"),
    }
    return Batch.from_arrays({**arrays, "documents": np.array(documents, "int32")})


def test_boundaries_are_padded_to_few_shapes() -> None:
    three = batch_of([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]).with_fixed_documents()
    four = batch_of([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]]).with_fixed_documents()
    assert three.documents is not None
    assert three.documents.offsets.tolist() == [0, 3, 8, 16, 16]  # the last document is empty
    assert three.documents.longest == 8
    assert three.shape == four.shape
    assert three.shape != batch_of([[0] * 8] * 2).with_fixed_documents().shape
    many = Documents.of(torch.tensor([[0, 1, 2, 3, 4, 4, 4]], dtype=torch.int32))
    assert many is not None
    assert many.padded().longest == 4
    assert len(many.padded().offsets) == 9


def test_a_batch_is_overwritten_in_place() -> None:
    held = batch_of([[0, 0, 1, 1]]).clone()
    memory = held.tokens.data_ptr()
    other = batch_of([[0, 1, 1, 1]])
    other.tokens.mul_(3)
    held.copy_(other)
    assert held.tokens.data_ptr() == memory
    assert torch.equal(held.tokens, other.tokens)
    assert held.documents is not None
    assert held.documents.offsets.tolist() == [0, 1, 4]


@pytest.mark.parametrize("micro_batch", [2, GLOBAL_BATCH])
def test_shapes_without_a_graph_run_eagerly_into_the_same_buffers(
    micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 0)
    layout = Layout(micro_batch=micro_batch, precision="fp32")
    plain, plain_records = make_trainer(tiny_job(4), layout)
    plain.fit()
    buffered, records = make_trainer(tiny_job(4), layout)
    buffered.graphs = MicroStepGraphs("on", buffered._micro_step, buffered.parts.optimizer)
    buffered.fit()
    assert records.losses == plain_records.losses
    assert records.norms == plain_records.norms


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(GraphError, match="there is no GPU; write graphs: auto"):
        make_trainer(tiny_job(2, graphs="on"))


@pytest.mark.parametrize(("shares", "is_on"), [((0.9, 0.7), True), ((0.9, 0.2), False)])
def test_graphs_are_used_where_launching_takes_long(shares: tuple[float, float], is_on: bool) -> None:
    trainer, _ = make_trainer(tiny_job(2))
    found = MicroStepGraphs("auto", trainer._micro_step, trainer.parts.optimizer)
    for share in shares:
        assert found.is_measuring
        found.add_share(share)
    assert found.is_on is is_on
    assert not found.is_measuring


def test_the_first_error_is_the_reason() -> None:
    last = RuntimeError("operation failed due to a previous error during capture")
    last.__context__ = ValueError("called a synchronizing operation\nand more")
    assert first_reason(last) == "called a synchronizing operation"
    assert first_reason(AssertionError()) == "AssertionError"
