"""Plans of CPU ranks count operations and collectives, and their interval is never wider than a factor of two."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from craton.infrastructure import Cluster, HostCosts, Instance, MachineLoad
from craton.infrastructure.local import LocalMachine, instance_of_machine
from craton.infrastructure.microbenchmark import Measurement
from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.calibration import find_profile, predict
from craton.planning.fitting import Prediction
from craton.planning.rates import machine_of
from craton.planning.step import StepModel
from craton.planning.step.cpu import (
    ADAPTER,
    EACH_EXPERT,
    ENDS,
    EXPERTS,
    FIXED_COLLECTIVES,
    GROUPED_QUERIES,
    LAYER,
    SELECTIVE,
    SHARDED_GROUP,
    TENSOR_PARALLEL,
    end_calls,
    layer_calls,
    num_tensors,
    step_collectives,
)

COSTS = HostCosts(
    operation_seconds=15e-6,
    backward_operation_seconds=10e-6,
    exponential_seconds=3e-9,
    matmul_element_seconds=1e-9,
    tensor_seconds=8e-6,
    loop_seconds=110e-6,
    collective_seconds=500e-6,
    collective_bytes_per_second=0.5e9,
)
MEASURED = Measurement(70e9, 0.3e9, "torch, one thread a core", 60e9, 5e9, 0.1, host=COSTS)
SHAPE = ModelShape("small", 2, 64, 192, 4, 4, 16, 512)
MOE = replace(SHAPE, experts=8, top_k=2, moe_ffn_hidden=64)
IDLE = MachineLoad()
BUSY = MachineLoad(runnable=2.0)
ONE = Layout(precision="fp32", micro_batch=2)
FSDP = replace(ONE, fsdp=2)
REPLICATE = replace(ONE, replicate=2)
TENSOR = replace(ONE, tp=2)


def node(ranks: int, load: MachineLoad = IDLE, cores: int = 2) -> Instance:
    machine = LocalMachine("cpu", cores, 16e9, MEASURED, datetime(2026, 11, 18, tzinfo=UTC))
    return instance_of_machine(machine, ranks, load)


def step(
    shape: ModelShape = SHAPE,
    layout: Layout = ONE,
    load: MachineLoad = IDLE,
    *,
    sequence: int = 64,
    batch: int = 4,
    lora: int = 0,
    cores: int = 2,
) -> Prediction:
    instance = node(layout.world, load, cores)
    machine = machine_of(Cluster(name="local", instance=instance, num_nodes=layout.world))
    profile = find_profile("craton", instance.gpu)
    model = StepModel(
        shape, sequence, batch, machine.rates, machine.network, profile.traits, lora=bool(lora), lora_rank=lora
    )
    return predict(profile, model.terms(layout))


def test_operations_of_a_layer() -> None:
    assert layer_calls(SHAPE, ONE, 0, moe=False) == LAYER
    assert layer_calls(replace(SHAPE, kv_heads=2), ONE, 0, moe=False) == LAYER.plus(GROUPED_QUERIES)
    assert layer_calls(SHAPE, FSDP, 0, moe=False) == LAYER.plus(SHARDED_GROUP)
    assert layer_calls(SHAPE, TENSOR, 0, moe=False) == LAYER.plus(SHARDED_GROUP).plus(TENSOR_PARALLEL)
    assert layer_calls(MOE, ONE, 0, moe=True) == LAYER.plus(EXPERTS).plus(EACH_EXPERT, 8)
    assert layer_calls(SHAPE, ONE, 4, moe=False) == LAYER.plus(ADAPTER, 5), "qkv, output, gate, up and down"
    assert layer_calls(SHAPE, replace(ONE, recompute="selective"), 0, moe=False) == LAYER.plus(SELECTIVE)
    assert (end_calls(ONE), end_calls(FSDP)) == (ENDS, ENDS.plus(SHARDED_GROUP))


def test_tensors_of_the_optimizer() -> None:
    layers = [(False, 2)]
    assert num_tensors(SHAPE, ONE, layers, 0) == 2 * 7 + 3, "two norms and five matrices a layer; embedding, norm, head"
    assert num_tensors(SHAPE, ONE, layers, 4) == 2 * 2 * 5, "only the adapters are trained"


def test_collectives_that_no_other_term_counts() -> None:
    traits = find_profile("craton", node(2).gpu).traits
    assert step_collectives(ONE, traits, 2) == 0
    assert step_collectives(FSDP, traits, 2) == FIXED_COLLECTIVES + 1, "and the gradient norm"
    assert step_collectives(REPLICATE, traits, 2) == FIXED_COLLECTIVES + 2, "one of the three reductions is in a term"
    assert step_collectives(TENSOR, traits, 2) >= FIXED_COLLECTIVES + 1


@pytest.mark.parametrize(
    "larger",
    [
        lambda: step(replace(SHAPE, layers=4)),
        lambda: step(replace(SHAPE, hidden=128)),
        lambda: step(replace(SHAPE, vocab=4096)),
        lambda: step(MOE),
        lambda: step(sequence=256),
        lambda: step(batch=8),
        lambda: step(layout=replace(ONE, micro_batch=1)),
        lambda: step(layout=replace(ONE, recompute="full")),
        lambda: step(layout=replace(ONE, recompute="selective")),
        lambda: step(load=BUSY),
        lambda: step(load=MachineLoad(steal_share=0.3)),
    ],
)
def test_more_work_or_load_takes_longer(larger: object) -> None:
    assert larger().seconds > step().seconds  # type: ignore[operator]


def test_a_small_step_is_mostly_operations() -> None:
    base = step()
    operations = 2 * 2 * (95 * 15e-6 + 126 * 10e-6)  # layers, micro-batches
    assert operations < base.seconds < 4 * operations


def test_more_ranks_than_cores_are_slower() -> None:
    assert step(layout=FSDP, cores=1).seconds > 1.8 * step(layout=FSDP, cores=2).seconds


def test_bf16_without_kernels_is_planned_as_measured() -> None:
    large = replace(SHAPE, hidden=256, ffn_hidden=1024)
    assert step(large, replace(ONE, precision="bf16")).seconds > 50 * step(large).seconds


@pytest.mark.parametrize("layout", [ONE, FSDP, REPLICATE, TENSOR])
@pytest.mark.parametrize("load", [IDLE, BUSY, MachineLoad(runnable=100.0, steal_share=0.9)])
@pytest.mark.parametrize("shape", [SHAPE, MOE])
def test_the_interval_is_at_most_a_factor_of_two(shape: ModelShape, layout: Layout, load: MachineLoad) -> None:
    found = step(shape, layout, load)
    assert 1.2 < found.high / found.low <= 2.0


def test_load_widens_the_interval() -> None:
    idle, busy = step(), step(load=BUSY)
    assert busy.log_deviation > idle.log_deviation
