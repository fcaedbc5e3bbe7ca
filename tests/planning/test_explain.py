"""What limits a job, why a layout lost and what the answer hangs on: the explanation must fit the numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from craton.infrastructure import Cluster, cluster_of
from craton.job import load_job
from craton.job.layout import Layout
from craton.job.model import ModelShape, model_preset
from craton.planning import plan
from craton.planning.calibration import find_profile
from craton.planning.rates import machine_of
from craton.planning.report import PARTS, bottleneck, sensitivities, why_lost
from craton.planning.result import LAYERS, Bottleneck, Sensitivity
from craton.planning.search import Candidate, evaluate
from craton.planning.step import StepModel, StepTimes, compose
from craton.telemetry import PHASES

EIGHT_B = model_preset("llama-3.1-8b")
P5 = cluster_of("p5.48xlarge", 16)


def on(cluster: Cluster, shape: ModelShape, layout: Layout, batch: int, sequence: int) -> tuple[Candidate, StepTimes]:
    machine, profile = machine_of(cluster), find_profile("craton", cluster.instance.gpu)
    model = StepModel(shape, sequence, batch, machine.rates, machine.network, profile.traits)
    candidate = evaluate(model, machine, profile, layout)
    return candidate, compose(candidate.terms, np.exp(np.array(profile.log_constants)))


def limit_of(
    layout: Layout,
    batch: int,
    *,
    shape: ModelShape = EIGHT_B,
    sequence: int = 8192,
    cluster: Cluster = P5,
    memory_share: float = 0.9,
    goodput: float = 0.99,
) -> Bottleneck:
    _, times = on(cluster, shape, layout, batch, sequence)
    found = bottleneck(times, layout, machine_of(cluster), memory_share, goodput, 0.0)
    assert found.layer in LAYERS
    assert found.phase in PHASES
    assert 0 <= found.share <= 1
    assert found.text
    assert found.relief
    return found


def test_every_part_of_a_step_is_named_once() -> None:
    named = [name for names in PARTS.values() for name in names]
    assert sorted(named) == sorted(field.name for field in fields(StepTimes) if field.name != "hidden")
    texts = [text for names in PARTS.values() for text in names.values()]
    assert len(set(texts)) == len(texts)


def test_tensor_parallelism_across_nodes_is_told_to_stay_inside_one() -> None:
    found = limit_of(Layout(fsdp=8, tp=16), 64, shape=replace(EIGHT_B, kv_heads=16))
    assert (found.layer, found.phase, found.part) == ("infrastructure", "communication", "tensor parallel")
    assert "across nodes" in found.text
    assert "tp ≤ 8" in found.relief
    assert found.share > 0.2


@pytest.mark.parametrize(
    ("layout", "batch", "part", "relief"),
    [
        (Layout(pp=16, fsdp=8, zero=1), 16, "pipeline bubble", "vpp"),
        (Layout(fsdp=128), 128, "weight sharding", "micro-batch"),
        (Layout(fsdp=128, recompute="full", micro_batch=8), 1024, "recompute", "memory"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_largest_avoidable_part_is_named_with_what_relieves_it(
    layout: Layout, batch: int, part: str, relief: str
) -> None:
    found = limit_of(layout, batch, sequence=1024 if part == "weight sharding" else 8192)
    assert found.part == part
    assert relief in found.relief


def test_a_good_layout_is_bound_by_compute() -> None:
    found = limit_of(Layout(fsdp=128, micro_batch=4), 1024)
    assert (found.layer, found.phase) == ("infrastructure", "compute")
    assert found.part == "matmul"
    assert 0.5 < found.share < 0.8, "of this part alone, as its row of the table says"
    assert "own compute takes 87%" in found.text


def test_failures_and_memory_come_before_the_step() -> None:
    good = Layout(fsdp=128, micro_batch=2)
    assert limit_of(good, 1024, goodput=0.6).layer == "orchestration"
    assert limit_of(good, 1024, goodput=0.6).share == pytest.approx(0.4)
    assert limit_of(good, 1024, memory_share=1.3, goodput=0.6).part == "memory"


def test_a_starved_loader_is_what_limits_the_job(tmp_path: Path) -> None:
    """A file system of 10 kB/s: most of the step waits for data, and the plan has to say so."""
    (tmp_path / "lab.yaml").write_text(
        "name: lab\ninstance: p5.48xlarge\nnodes: 2\nstorage:\n"
        "  shared: {path: /fsx, kind: lustre, read_bytes_per_second: 10kB/s, write_bytes_per_second: 100GB/s}\n"
    )
    (tmp_path / "job.yaml").write_text(
        "kind: pretrain\nmodel: llama-3.1-8b\ndata: {path: /fsx/tokens, sequence: 8192}\n"
        "train: {global_batch_sequences: 64, steps: 100000}\ncluster: lab.yaml\n"
        "checkpoint: {tiers: [{to: shared, every: 1h}]}\n"
    )
    answer = plan(load_job(tmp_path / "job.yaml"), today=date(2026, 11, 15))
    assert answer.phases["data"] > 0.5 * answer.step_seconds
    assert answer.bottleneck.phase == "data"


# --- why a layout lost


@cache
def candidate(layout: Layout) -> tuple[Candidate, StepTimes]:
    return on(P5, EIGHT_B, layout, 1024, 8192)


def reason(loser: Layout, winner: Layout) -> str:
    lost, lost_times = candidate(loser)
    won, won_times = candidate(winner)
    return why_lost(replace(lost, fits=True), won, lost_times, won_times)


def test_a_slower_layout_says_how_much_and_through_what() -> None:
    best = Layout(fsdp=128, micro_batch=2, zero=1)
    text = reason(Layout(fsdp=16, tp=8, zero=1), best)
    assert "slower: tensor parallel" in text
    slower = candidate(Layout(fsdp=16, tp=8, zero=1))[0].step_seconds / candidate(best)[0].step_seconds - 1
    assert float(text.split()[0].rstrip("%")) == pytest.approx(100 * slower, rel=0.03)
    assert "slower: recompute" in reason(replace(best, recompute="full"), best)


def test_a_faster_layout_than_the_users_says_so() -> None:
    text = reason(Layout(fsdp=128, micro_batch=2), Layout(fsdp=128, micro_batch=2, recompute="full"))
    assert "faster: recompute −" in text


def test_a_layout_as_fast_is_less_simple() -> None:
    same = Layout(fsdp=128, micro_batch=2)
    assert reason(same, same).startswith("equally fast")


def test_a_layout_that_does_not_fit_says_what_it_needs() -> None:
    lost, lost_times = candidate(Layout(fsdp=128, micro_batch=2))
    won, won_times = candidate(Layout(fsdp=128, micro_batch=2, recompute="full"))
    text = why_lost(replace(lost, fits=False, memory_bytes=100 * 2.0**30), won, lost_times, won_times)
    assert "does not fit: needs 100" in text
    assert "faster" in text


# --- what the answer hangs on


def sensitivities_of(layout: Layout, batch: int, sequence: int = 8192, most: int = 30) -> dict[str, Sensitivity]:
    machine, profile = machine_of(P5), find_profile("craton", P5.instance.gpu)
    model = StepModel(EIGHT_B, sequence, batch, machine.rates, machine.network, profile.traits)
    found = sensitivities(model, machine, profile, evaluate(model, machine, profile, layout), most)
    effects = [abs(entry.effect) for entry in found]
    assert effects == sorted(effects, reverse=True)
    return {entry.name: entry for entry in found}


def test_worse_hardware_is_slower_and_matters_where_it_is_used() -> None:
    compute = sensitivities_of(Layout(fsdp=128, micro_batch=2), 1024)
    assert 0.05 < compute["matrix unit"].effect < 0.12
    assert "NVLink bandwidth" not in compute or compute["NVLink bandwidth"].effect < 0.01
    network = sensitivities_of(Layout(fsdp=128), 128, sequence=1024)
    assert network["network bandwidth"].effect > 0.01
    tensor = sensitivities_of(Layout(fsdp=16, tp=8), 1024)
    assert tensor["NVLink bandwidth"].effect > 0.01
    for found in (compute, network, tensor):
        assert all(entry.effect > 0 for entry in found.values())


def test_attention_runs_on_the_matrix_unit_too() -> None:
    """With 128k tokens a sequence attention is most of the step; a slower matrix unit slows it as well."""
    sequence = 131072
    _, times = on(P5, EIGHT_B, Layout(fsdp=128), 128, sequence)
    assert times.attention > 0.5 * times.step_seconds
    useful = float((times.gemm + times.attention + times.head) / times.step_seconds)
    assert sensitivities_of(Layout(fsdp=128), 128, sequence)["matrix unit"].effect > 0.8 * useful * (1 / 0.9 - 1)


def test_constants_matter_by_their_own_uncertainty() -> None:
    found = sensitivities_of(Layout(pp=16, fsdp=8, zero=1), 16)
    assert found["bubble"].effect > 0.02
    assert "expert efficiency" not in found
    assert "σ" in found["bubble"].change


def test_only_the_largest_are_kept() -> None:
    assert len(sensitivities_of(Layout(fsdp=128), 128, most=3)) == 3
