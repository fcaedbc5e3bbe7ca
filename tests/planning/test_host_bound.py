"""A rank that launches its kernels one by one is never faster than its host: measured steps, and what the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from craton.infrastructure import Cluster
from craton.infrastructure.catalog import instance
from craton.job.layout import Layout
from craton.job.model import ModelShape, model_preset
from craton.planning.calibration import find_profile, predict
from craton.planning.rates import machine_of
from craton.planning.software import SoftwareProfile
from craton.planning.step import StepModel, evaluation_terms

SHAPE = ModelShape(
    name="tiny",
    layers=8,
    hidden=256,
    ffn_hidden=512,
    heads=4,
    kv_heads=4,
    head_dim=64,
    vocab=512,
    tied_embeddings=False,
)
ONE = Layout(micro_batch=1)
MEASURED_OPERATION = 7.03e-6  # seconds, of the host on which the steps below were measured


def model(
    shape: ModelShape = SHAPE,
    batch: int = 4,
    sequence: int = 128,
    *,
    graphs: bool = False,
    operation_seconds: float = MEASURED_OPERATION,
    software: str = "craton",
) -> tuple[StepModel, SoftwareProfile]:
    node = instance("p5en.48xlarge")
    node = replace(node, gpu=replace(node.gpu, operation_seconds=operation_seconds))
    machine = machine_of(Cluster(name="p5en", instance=node, num_nodes=1))
    profile = find_profile(software, node.gpu)
    return StepModel(shape, sequence, batch, machine.rates, machine.network, profile.traits, graphs=graphs), profile


def seconds(layout: Layout = ONE, **arguments: Any) -> float:
    steps, profile = model(**arguments)
    return predict(profile, steps.terms(layout)).seconds


@pytest.mark.parametrize(
    ("operation", "layers", "micro_batches", "recompute", "milliseconds"),
    [
        (7.03e-6, 8, 4, "none", 93.5),
        (7.03e-6, 2, 4, "none", 34.8),
        (7.03e-6, 8, 1, "none", 27.3),
        (4.94e-6, 8, 4, "none", 72.7),
        (4.94e-6, 8, 4, "full", 142.3),
        (4.94e-6, 8, 4, "selective", 198.6),
    ],
)
def test_eager_steps_of_a_small_model_on_an_h200(
    operation: float, layers: int, micro_batches: int, recompute: Any, milliseconds: float
) -> None:
    shape, layout = replace(SHAPE, layers=layers), replace(ONE, recompute=recompute)
    found = seconds(layout, shape=shape, batch=micro_batches, operation_seconds=operation)
    assert found == pytest.approx(milliseconds / 1000, rel=0.15)


def test_graphs_leave_the_host_out() -> None:
    assert seconds(graphs=True) < 0.1 * seconds(graphs=False)


def test_several_ranks_always_launch_from_python() -> None:
    alone, together = seconds(), seconds(Layout(fsdp=2, micro_batch=1), batch=8, graphs=True)
    assert together > alone, "the same micro-batches, and the hooks of FSDP2"


def test_larger_micro_batches_need_fewer_launches() -> None:
    assert seconds(Layout(micro_batch=4)) < 0.4 * seconds(Layout(micro_batch=1))


def test_a_faster_host_is_a_faster_step() -> None:
    assert seconds(operation_seconds=MEASURED_OPERATION / 2) == pytest.approx(seconds() / 2, rel=0.05)
    assert 0.5 < seconds(operation_seconds=0.0) / seconds() < 1.0, "not measured: the hosts of an H200"


def test_a_large_model_does_not_wait_for_its_host() -> None:
    eight = model_preset("llama-3.1-8b")
    layout = Layout(fsdp=8, micro_batch=1)
    slow = seconds(layout, shape=eight, batch=8, sequence=8192)
    assert slow == seconds(layout, shape=eight, batch=8, sequence=8192, operation_seconds=1e-9)


def test_other_software_waits_for_its_host_too() -> None:
    """Small steps of Megatron-DeepSpeed took 3.4 ms per layer and micro-batch with full recompute, and 2.5 ms for the
    ends, whatever their width (data/vtrain_steps.json)."""
    arguments = {"shape": SHAPE, "software": "megatron-lm"}
    slow = seconds(**arguments, operation_seconds=1e-3)
    assert slow > 5.0 * seconds(**arguments)
    full = seconds(replace(ONE, recompute="full"), **arguments, operation_seconds=1e-3)
    assert 1.2 < full / slow < 1.5
    split = seconds(replace(ONE, tp=2), **arguments, operation_seconds=1e-3)
    assert split == pytest.approx(slow, rel=0.2)


def test_a_pipeline_waits_for_the_host_in_its_bubble_too() -> None:
    arguments = {"shape": replace(SHAPE, layers=8), "software": "megatron-lm", "batch": 8, "operation_seconds": 1e-3}
    flat, staged = (seconds(replace(ONE, pp=pp), **arguments) for pp in (1, 2))
    assert 0.68 < staged / flat < 0.78  # half of the layers, all of the ends, a ninth slot besides eight micro-batches


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_launches_again(recompute: Any) -> None:
    assert seconds(replace(ONE, recompute=recompute)) > 1.2 * seconds()


def test_an_evaluation_has_only_forward_passes() -> None:
    steps, profile = model()
    terms = evaluation_terms(steps.terms(ONE), ONE, 4)
    assert 0.3 * seconds() < predict(profile, terms).seconds < 0.6 * seconds()
