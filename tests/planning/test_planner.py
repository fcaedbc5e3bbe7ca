"""Whole plans: the examples, sums and units, and jobs that cannot be planned.

The examples' full output is kept in golden/example_*.txt: `pytest tests/planning/test_planner.py --update-golden`
writes it anew; read the diff.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console
from whole_plans import JOB, OWN_PRICE, TODAY, check_sums_and_units, plan_text, small

from craton.errors import CratonError
from craton.infrastructure import local, local_machine
from craton.infrastructure.microbenchmark import Measurement
from craton.job import load_job, parse_job
from craton.planning import Plan, PlanError, plan
from craton.planning.report import plan_to_json, render_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
GPU_EXAMPLES = [
    "llama-8b",
    "qwen3-30b-a3b",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-405b", "llama-70b-sft", "deepseek-v3")),
]


@cache
def example(name: str) -> Plan:
    return plan(load_job(EXAMPLES / f"{name}.yaml"), today=TODAY)


# --- the examples


@pytest.mark.parametrize("name", GPU_EXAMPLES)
def test_examples_plan_and_add_up(name: str) -> None:
    answer = example(name)
    check_sums_and_units(answer)
    assert answer.fits
    assert answer.layouts_evaluated > 50
    assert 3 <= len(answer.alternatives) <= 5
    assert len({str(other.layout) for other in answer.alternatives} | {str(answer.layout)}) == 1 + len(
        answer.alternatives
    )
    assert 1.05 < answer.step_seconds_high / answer.step_seconds_low < 3


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("llama-8b", 4, 9),
        pytest.param("llama-405b", 4, 9, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 4, 30, marks=pytest.mark.slow),
    ],
)
def test_steps_of_the_examples_are_the_seconds_people_know(name: str, low: float, high: float) -> None:
    assert low < example(name).step_seconds < high
    assert 0.15 < example(name).mfu < 0.65


@pytest.mark.parametrize("name", GPU_EXAMPLES)
def test_golden_output(name: str, golden: Callable[[str, str], None]) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=False, color_system=None, legacy_windows=False)
    render_plan(example(name), console, start=TODAY)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= 100
    golden(f"example_{name.replace('-', '_').replace('.', '_')}.txt", text)


@pytest.fixture
def measured_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine as if it had been measured: 1 TFLOP/s, 50 GB/s of memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake = Measurement(
        fp32_flops=1e12,
        bf16_flops=1e12,
        bf16_method="measured",
        memory_bytes_per_second=50e9,
        loopback_bytes_per_second=5e9,
        load_average=0.0,
    )
    local_machine(measure=lambda: fake, report=lambda line: None, cache=local.cache_path())


@pytest.mark.usefixtures("measured_machine")
def test_the_quickstart_plans_on_this_machine() -> None:
    answer = plan(load_job(EXAMPLES / "quickstart.yaml"), today=TODAY)
    check_sums_and_units(answer)
    assert answer.cluster.name == "local x 2"
    assert answer.cluster.num_gpus == 2
    assert answer.cost is None
    assert answer.runner_up is None
    assert answer.fits
    # 12 sequences of 256 tokens through 2.4M parameters on two halves of a TFLOP/s machine, and gloo between them
    assert 0.05 < answer.step_seconds < 0.5
    assert answer.hidden_communication_seconds == 0.0  # the cores that compute also communicate
    assert answer.memory_bytes < 2**30  # no CUDA context, no NCCL
    console = Console(file=io.StringIO(), width=100)
    render_plan(answer, console, start=TODAY)
    assert "local x 2" in console.file.getvalue()  # type: ignore[attr-defined]


# --- what the job says of its training


def single_h200(train: str, checkpoint: str = "{}") -> Plan:
    job = f"""
kind: pretrain
model: llama-3.1-8b
data: {{sequence: 4096, validation: /v}}
train: {{global_batch_sequences: 1, steps: 100000, {train}}}
cluster: {{name: one, nodes: 1, hardware: {{name: one, gpu: h200, num_gpus: 1, network_bytes_per_second: 50e9}}}}
layout: {{micro_batch: 1}}
checkpoint: {checkpoint}
"""
    return plan(parse_job(job), today=TODAY)


def test_weights_in_bf16_need_half_the_memory_and_half_the_optimizer() -> None:
    master, narrow = single_h200("weights: fp32"), single_h200("weights: bf16")
    parameters = narrow.model.parameters
    assert master.memory_parts["optimizer states"] == pytest.approx(12 * parameters, rel=1e-4)
    assert narrow.memory_parts["optimizer states"] == pytest.approx(4 * parameters, rel=1e-4)
    assert narrow.memory_parts["parameters"] == pytest.approx(2 * parameters, rel=1e-4)
    assert narrow.memory_parts["parameters"] == master.memory_parts["parameters"]
    parts = [each.parts["optimizer"]["optimizer step"] for each in (narrow, master)]
    assert parts[1] / parts[0] == pytest.approx(2.0)  # 28 and 14 bytes a parameter
    assert (master.storage.checkpoint_bytes, narrow.storage.checkpoint_bytes) == (12 * parameters, 6 * parameters)


def test_evaluation_is_part_of_the_run_and_not_of_the_step() -> None:
    without, with_it = single_h200("seed: 1"), single_h200("evaluate: {every_steps: 100, sequences: 300}")
    assert without.evaluate_seconds == 0.0
    assert with_it.step_seconds == without.step_seconds
    # 300 forward passes in 100 steps of one sequence each: a third of a step's compute, three times as often
    assert 0.6 * with_it.step_seconds < with_it.evaluate_seconds < 1.2 * with_it.step_seconds
    longer = with_it.run_seconds / without.run_seconds - 1.0
    assert longer == pytest.approx(with_it.evaluate_seconds / without.step_seconds, rel=0.05)


def test_a_suite_is_part_of_the_run_too_and_the_plan_says_what_it_assumes() -> None:
    def planned(suite: str) -> Plan:
        return single_h200(f"evaluate: {{every_steps: 100, sequences: 300, suite: arithmetic{suite}}}")

    validated, small, large = (
        single_h200("evaluate: {every_steps: 100, sequences: 300}"),
        planned(""),
        planned(", samples: 64"),
    )
    assert large.step_seconds == validated.step_seconds
    assert validated.evaluate_seconds < small.evaluate_seconds < large.evaluate_seconds
    longer = large.run_seconds / validated.run_seconds - 1.0
    before = validated.step_seconds + validated.evaluate_seconds
    more = (large.evaluate_seconds - validated.evaluate_seconds) / before
    assert longer == pytest.approx(more, rel=0.05)
    (note,) = [warning for warning in large.warnings if "suite" in warning]
    assert "every 100 steps: 500 problems with 64 answers of" in note


def test_the_plan_counts_the_problems_of_a_suite_and_warns_of_its_copy_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 30)
    (tmp_path / "own.yaml").write_text(f"data: {{path: {tmp_path / 'rows.jsonl'}}}\nreward: exact\n")

    def notes(model: str, cluster: str) -> list[str]:
        job = f"""
kind: pretrain
model: {model}
data: {{sequence: 4096}}
train: {{global_batch_sequences: 64, steps: 100, evaluate: {{every_steps: 50, suite: {tmp_path / "own.yaml"}}}}}
cluster: {cluster}
"""
        return [warning for warning in plan(parse_job(job), today=TODAY).warnings if "suite" in warning]

    (planned,) = notes("llama-3.1-8b", "p5en.48xlarge x 4")
    assert "30 problems with 1 answer of 256 tokens each" in planned
    warning = notes("llama-3.1-70b", "p5.48xlarge x 16")[1]
    assert "for a whole copy of the weights, and training leaves" in warning


def test_a_tier_may_count_steps() -> None:
    counted = single_h200("seed: 1", "{tiers: [{to: shared, every_steps: 1000}, {to: object}]}")
    cadence = {tier.tier: tier.every_seconds for tier in counted.storage.tiers}
    assert cadence["shared"] == pytest.approx(1000 * counted.step_seconds, rel=0.02)
    assert cadence["object"] is None  # only at the end


# --- layouts


def test_auto_is_at_least_as_fast_as_any_fixed_layout() -> None:
    auto = small()
    for layout in ("{fsdp: 16}", "{pp: 4, fsdp: 4, zero: 1}"):
        fixed = plan_text(JOB + f"layout: {layout}\n")
        check_sums_and_units(fixed)
        if fixed.fits:
            assert auto.step_seconds <= fixed.step_seconds * 1.02  # a simpler layout may cost a little


def test_a_fixed_layout_is_the_users_and_hears_of_a_better_one() -> None:
    fixed = plan_text(JOB + "layout: {fsdp: 2, tp: 8, recompute: full}\n")
    assert str(fixed.layout) == "fsdp 2 · tp 8 · micro_batch 1 · recompute full · bf16"
    assert any(f"faster: {small().layout}" in warning for warning in fixed.warnings)
    assert not any("faster" in warning for warning in small().warnings)


def test_offload_is_not_free() -> None:
    """What leaves the card passes the host link: tens of GB/s against terabytes of its own memory."""
    text = JOB.replace("64", "16")
    kept, optimizer, activations = (
        plan_text(f"{text}layout: {{fsdp: 16, offload: {offload}}}\n")
        for offload in ("none", "optimizer", "activations")
    )
    assert optimizer.step_seconds > kept.step_seconds
    assert activations.step_seconds > kept.step_seconds
    assert optimizer.memory_bytes < kept.memory_bytes
    assert activations.memory_bytes < kept.memory_bytes
    check_sums_and_units(optimizer)
    check_sums_and_units(activations)


def test_lora_is_faster_and_smaller() -> None:
    text = JOB.replace("pretrain", "sft") + "layout: {fsdp: 16}\n"
    full, lora = plan_text(text), plan_text(text.replace("tokens: 100B", "tokens: 100B, lora: {rank: 16}"))
    check_sums_and_units(lora)
    assert lora.step_seconds < full.step_seconds
    assert lora.memory_bytes < full.memory_bytes
    assert lora.storage.checkpoint_bytes < 0.1 * full.storage.checkpoint_bytes
    wide = plan_text(text.replace("tokens: 100B", "tokens: 100B, lora: {rank: 128}"))
    assert wide.step_seconds > lora.step_seconds
    assert wide.memory_bytes > lora.memory_bytes
    assert wide.storage.checkpoint_bytes == pytest.approx(8 * lora.storage.checkpoint_bytes, rel=0.01)


def test_twice_the_tokens_take_and_cost_twice_as_much() -> None:
    longer = plan_text(JOB.replace("100B", "200B"))
    assert longer.step_seconds == pytest.approx(small().step_seconds)
    assert longer.run_seconds / small().run_seconds == pytest.approx(2.0, rel=0.01)
    assert longer.cost is not None
    assert small().cost is not None
    assert longer.cost.cost_dollars / small().cost.cost_dollars == pytest.approx(2.0, rel=0.01)  # type: ignore[union-attr]


def test_twice_the_batch_is_nearly_twice_the_step() -> None:
    layout = "layout: {fsdp: 16}\n"
    once, twice = plan_text(JOB + layout), plan_text(JOB.replace("64", "128") + layout)
    assert 1.85 < twice.step_seconds / once.step_seconds <= 2.0
    assert twice.steps == pytest.approx(once.steps / 2, abs=1)


def test_more_gpu_memory_never_makes_the_plan_slower(tmp_path: Path) -> None:
    """The same machine with a larger card, through the cluster file as a user would write it."""
    steps = []
    for memory in ("24GiB", "160GiB"):
        file = tmp_path / "lab.yaml"
        file.write_text(
            "name: lab\nnodes: 2\nhardware:\n  name: own\n  num_gpus: 8\n  host_link: pcie5\n"
            "  network_bytes_per_second: 3200Gbps\n  gpu: {name: own, generation: hopper, flops: {bf16: 989T}, "
            f"memory_bytes: {memory}, memory_bytes_per_second: 3.35TB/s, nvlink_bytes_per_second: 450GB/s}}\n"
        )
        (tmp_path / "job.yaml").write_text(JOB.replace("p5.48xlarge x 2", "lab.yaml"))
        answer = plan(load_job(tmp_path / "job.yaml"), today=TODAY)
        assert answer.fits
        steps.append(answer.step_seconds)
    for before, after in itertools.pairwise(steps):
        assert after <= before * 1.01  # within the price of simplicity


# --- other sizes and other hardware


@pytest.mark.parametrize("name", GPU_EXAMPLES)
def test_the_chosen_plan_is_in_the_front_and_agrees_with_it(name: str) -> None:
    answer = example(name)
    (chosen,) = [entry for entry in answer.front if entry.reason == "chosen"]
    assert chosen.layout == answer.layout
    assert chosen.run_seconds == pytest.approx(answer.run_seconds)
    assert chosen.step_seconds == pytest.approx(answer.step_seconds)
    assert answer.cost is not None
    assert chosen.cost_dollars == pytest.approx(answer.cost.cost_dollars)
    assert [entry.run_seconds for entry in answer.front] == sorted(entry.run_seconds for entry in answer.front)


@pytest.mark.parametrize("name", GPU_EXAMPLES)
def test_the_runner_up_is_on_other_hardware(name: str) -> None:
    answer = example(name)
    assert answer.runner_up is not None
    assert answer.cluster.instance.name not in answer.runner_up.cluster
    assert answer.runner_up.fits


def test_the_scaling_curve_rises_and_bends() -> None:
    points = example("llama-8b").scaling
    assert [point.num_gpus for point in points] == [32, 64, 128, 256, 512]
    rates = [point.tokens_per_second for point in points]
    assert rates == sorted(rates)
    efficiency = [rate / point.num_gpus for rate, point in zip(rates, points, strict=True)]
    assert efficiency[-1] < efficiency[0]
    assert efficiency[-1] > 0.7 * efficiency[0]
    (own,) = [point for point in points if point.num_gpus == 128]
    assert own.step_seconds == pytest.approx(example("llama-8b").step_seconds)


# --- prices


def test_an_old_price_warns_and_a_young_one_does_not() -> None:
    assert small().cost is not None
    stated = date.fromisoformat(small().cost.price_date)  # type: ignore[union-attr]
    ages = [(date.fromordinal(stated.toordinal() + days), days > 90) for days in (90, 91)]
    for today, old in ages:
        answer = plan(parse_job(JOB), today=today)
        assert any("days old" in warning for warning in answer.warnings) == old
        assert answer.cost is not None
        assert answer.cost.price_age_days == (today - stated).days


def test_the_users_own_price_wins() -> None:
    answer = plan_text(JOB + OWN_PRICE)
    assert answer.cost is not None
    assert (answer.cost.purchase, answer.cost.dollars_per_hour_per_instance) == ("own", 10.0)
    assert answer.cost.dollars_per_day == pytest.approx(2 * 24 * 10.0)
    assert not any("days old" in warning for warning in answer.warnings)


# --- jobs that cannot be planned


def test_405b_on_one_node_says_what_is_needed() -> None:
    answer = plan_text(JOB.replace("llama-3.1-8b", "llama-3.1-405b").replace("x 2", "x 1"))
    assert not answer.fits
    assert answer.memory_bytes > 5 * answer.memory_limit_bytes
    assert any("does not fit" in warning and "GPUs with more memory" in warning for warning in answer.warnings)
    assert answer.bottleneck.part == "memory"
    check_sums_and_units(answer)


def test_a_fixed_layout_that_does_not_fit_is_planned_with_a_warning() -> None:
    answer = plan_text(JOB.replace("llama-3.1-8b", "llama-3.1-70b") + "layout: {replicate: 16, fsdp: 1}\n")
    assert not answer.fits
    assert any("does not fit" in warning for warning in answer.warnings)
    check_sums_and_units(answer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kind: serve\nmodel: llama-3.1-8b\ncluster: p5.48xlarge x 1\n",
            "kind serve does not train; plan it with `plan_serving`",
        ),
        ("kind: command\ncommand: ls\ncluster: p5.48xlarge x 1\n", "kind command cannot be planned"),
        (JOB.replace("llama-3.1-8b", "my.models:build"), "the model is a Python function"),
        (JOB.replace(", tokens: 100B", ""), "set train.tokens or train.steps"),
        (JOB + "layout: {tp: 3}\n", "a multiple of 3 ranks, but the cluster has 16 GPUs"),
        (JOB + "layout: {replicate: 1, fsdp: 8}\n", "= 8 ranks, but the cluster has 16 GPUs; fsdp 16 would fit"),
        (JOB.replace("x 2", "x 3") + "layout: {tp: 24}\n", "tp 24 does not divide the model's 32 heads"),
        (JOB + "layout: {pp: 16, fsdp: 1, vpp: 8}\n", "128 stages, but the model has 32 layers"),
        (JOB.replace("64", "7").replace("x 2", "x 1000"), "7 sequences per step on 8000 GPUs"),
        (JOB + "software: torchtitn\n", "did you mean 'torchtitan'"),
        (JOB.replace("p5.48xlarge", "p5.84xlarge"), "p5.84xlarge"),
    ],
    ids=lambda text: text.splitlines()[-1][:40],
)
def test_jobs_that_cannot_be_planned_say_why(text: str, message: str) -> None:
    with pytest.raises(CratonError, match=message) as caught:
        plan_text(text)
    assert "\n" not in str(caught.value)


def test_a_job_that_cannot_be_planned_does_not_measure_the_machine_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PlanError, match="kind serve"):
        plan_text("kind: serve\nmodel: llama-3.1-8b\ncluster: local x 1\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("instance", "precision", "real"),
    [
        ("p4d.24xlarge", "fp8", False),
        ("p5.48xlarge", "fp16", True),
        ("p5.48xlarge", "nvfp4", False),
        ("p6-b200.48xlarge", "nvfp4", True),
        ("p6-b200.48xlarge", "fp32", True),
    ],
)
def test_every_precision_plans_and_says_where_the_card_lacks_it(instance: str, precision: str, real: bool) -> None:
    text = JOB.replace("p5.48xlarge", instance).replace("tokens: 100B", f"tokens: 100B, precision: {precision}")
    answer = plan_text(text + "layout: {fsdp: 16}\n")
    check_sums_and_units(answer)
    assert any("no matrix unit" in warning for warning in answer.warnings) != real


def test_hardware_with_one_precision_plans_the_others_at_its_rate(tmp_path: Path) -> None:
    """A card whose owner states only fp16: fp8 runs at that rate, with a warning, and nothing breaks."""
    (tmp_path / "lab.yaml").write_text(
        "name: lab\nnodes: 2\nhardware:\n  name: own\n  num_gpus: 8\n  host_link: pcie4\n"
        "  network_bytes_per_second: 800Gbps\n  gpu: {name: own, generation: ampere, flops: {fp16: 125T}, "
        "memory_bytes: 80GiB, memory_bytes_per_second: 1TB/s}\n"
    )
    (tmp_path / "job.yaml").write_text(
        JOB.replace("p5.48xlarge x 2", "lab.yaml").replace("tokens: 100B", "tokens: 100B, precision: fp8")
    )
    answer = plan(load_job(tmp_path / "job.yaml"), today=TODAY)
    check_sums_and_units(answer)
    assert any("no matrix unit for fp8" in warning for warning in answer.warnings)


def test_attention_in_fp32_does_not_run_at_the_16_bit_rate() -> None:
    """With long sequences most of the step is attention; at the rate of bf16 a step in fp32 would beat the card."""
    text = JOB.replace("8192", "65536").replace("tokens: 100B", "tokens: 100B, precision: fp32")
    check_sums_and_units(plan_text(text.replace("p5.48xlarge", "p6-b200.48xlarge")))


def test_a_run_that_would_never_end_is_told_without_a_traceback() -> None:
    """Nothing survives a failure and the run is far longer than the time between them."""
    text = JOB.replace("llama-3.1-8b", "llama-3.1-405b").replace("100B", "10T").replace("x 2", "x 1")
    text = text.replace("checkpoint: {tiers: [{to: shared", "checkpoint: {peer: off, tiers: [{to: nvme")
    console = Console(file=io.StringIO(), width=100)
    try:
        answer = plan_text(text)
    except CratonError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    render_plan(answer, console, start=TODAY)
    json.dumps(plan_to_json(answer), allow_nan=False)
    assert answer.warnings


def test_the_same_job_gives_the_same_plan() -> None:
    assert plan_to_json(plan_text(JOB)) == plan_to_json(small())
