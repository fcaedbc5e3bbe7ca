"""Whole plans: the examples, sums and units, every option of the search over clusters, and jobs that cannot be.

The examples' full output is kept in golden/example_*.txt: `pytest tests/planning/test_planner.py --update-golden`
writes it anew; read the diff.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from craton.errors import CratonError
from craton.infrastructure import local, local_machine
from craton.infrastructure.microbenchmark import Measurement
from craton.job import load_job, parse_job
from craton.job.layout import layout_is_valid
from craton.planning import Plan, PlanError, plan, plan_clusters
from craton.planning.report import plan_html, plan_to_json, render_front, render_plan
from craton.planning.report.findings import is_on_front
from craton.planning.result import LAYERS, PHASES

EXAMPLES = Path(__file__).parents[2] / "examples"
GPU_EXAMPLES = [
    "llama-8b",
    "qwen3-30b-a3b",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-405b", "llama-70b-sft", "deepseek-v3")),
]
TODAY = date(2026, 11, 15)
JOB = """\
kind: pretrain
model: llama-3.1-8b
data: {sequence: 8192}
train: {global_batch_sequences: 64, tokens: 100B}
cluster: p5.48xlarge x 2
checkpoint: {tiers: [{to: shared, every: 1h}]}
"""


@cache
def example(name: str) -> Plan:
    return plan(load_job(EXAMPLES / f"{name}.yaml"), today=TODAY)


def plan_text(text: str) -> Plan:
    return plan(parse_job(text), today=TODAY)


@cache
def small() -> Plan:
    return plan_text(JOB)


def check_sums_and_units(answer: Plan) -> None:
    """What must hold for every plan."""
    assert tuple(answer.phases) == PHASES
    assert sum(answer.phases.values()) == pytest.approx(answer.step_seconds, rel=1e-9)
    for phase, parts in answer.parts.items():
        assert sum(parts.values()) == pytest.approx(answer.phases[phase], rel=1e-9)
        assert all(seconds > 0 for seconds in parts.values())
    assert sum(answer.memory_parts.values()) == pytest.approx(answer.memory_bytes, rel=1e-9)
    assert max(answer.memory_instants.values()) == pytest.approx(answer.memory_bytes, rel=1e-9)
    batch = answer.global_batch_sequences * answer.sequence
    assert answer.tokens_per_second * answer.step_seconds == pytest.approx(batch)
    peak = answer.cluster.instance.gpu.peak_flops(answer.layout.precision) * answer.cluster.num_gpus
    assert answer.mfu == pytest.approx(answer.tokens_per_second * answer.flops_per_token / peak)
    assert 0 < answer.mfu < 0.9
    assert answer.step_seconds_low < answer.step_seconds < answer.step_seconds_high
    assert answer.run_seconds_low < answer.run_seconds < answer.run_seconds_high
    assert 0 < answer.goodput.goodput_low <= answer.goodput.goodput <= answer.goodput.goodput_high <= 1
    # failures and checkpoints only add to the steps themselves
    productive = answer.step_seconds - answer.phases["checkpoint"]
    wall = answer.steps * (productive + answer.evaluate_seconds) / answer.goodput.goodput
    assert answer.run_seconds == pytest.approx(wall, rel=1e-9)
    assert answer.steps == math.ceil(answer.tokens / batch)
    shape, cluster = answer.model, answer.cluster
    assert layout_is_valid(answer.layout, shape, cluster.num_gpus, answer.global_batch_sequences, answer.sequence)
    if answer.cost:
        cost = answer.cost
        assert cost.cost_dollars_low < cost.cost_dollars < cost.cost_dollars_high
        assert cost.cost_dollars == pytest.approx(cost.dollars_per_day * answer.run_seconds / 86400)
        assert cost.dollars_per_trillion_tokens == pytest.approx(cost.cost_dollars / answer.tokens * 1e12)
    assert answer.bottleneck.layer in LAYERS
    assert answer.bottleneck.phase in PHASES
    assert 0 <= answer.bottleneck.share <= 1
    assert answer.bottleneck.relief
    for other in answer.alternatives:
        assert layout_is_valid(other.layout, shape, cluster.num_gpus, answer.global_batch_sequences, answer.sequence), (
            other.layout
        )
        assert other.fits == (other.memory_bytes <= answer.memory_limit_bytes)
    json.dumps(plan_to_json(answer), allow_nan=False)


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


OWN_PRICE = "price: {dollars_per_hour: 10.0, kind: own, date: 2026-11-01}\n"


def test_the_users_own_price_wins() -> None:
    answer = plan_text(JOB + OWN_PRICE)
    assert answer.cost is not None
    assert (answer.cost.purchase, answer.cost.dollars_per_hour_per_instance) == ("own", 10.0)
    assert answer.cost.dollars_per_day == pytest.approx(2 * 24 * 10.0)
    assert not any("days old" in warning for warning in answer.warnings)


def test_the_users_own_price_wins_in_a_search_over_clusters_too() -> None:
    answer = plan_clusters(parse_job(JOB + OWN_PRICE), ["p5.48xlarge", "p5en.48xlarge"], [16], today=TODAY)
    assert answer.cluster.name == "p5.48xlarge x 2"
    assert answer.cost is not None
    assert answer.cost.dollars_per_hour_per_instance == 10.0


# --- a search over clusters


def searched(by: str = "cost", deadline_days: float | None = None, budget: float | None = None) -> Plan:
    return _searched(by, deadline_days, budget)


@cache
def _searched(by: str, deadline_days: float | None, budget: float | None) -> Plan:
    return plan_clusters(
        parse_job(JOB),
        ["p5.48xlarge", "p6-b200.48xlarge"],
        [16, 32],
        by=by,
        deadline_seconds=deadline_days * 86400 if deadline_days else None,
        budget_dollars=budget,
        today=TODAY,
    )


@pytest.mark.parametrize("by", ["time", "cost", "gpus"])
def test_by_what_the_cluster_is_chosen(by: str) -> None:
    answer = searched(by)
    check_sums_and_units(answer)
    assert len(answer.front) == 4
    key: dict[str, Callable[[int], float]] = {
        "time": lambda index: answer.front[index].run_seconds,
        "cost": lambda index: answer.front[index].cost_dollars or math.inf,
        "gpus": lambda index: float(answer.front[index].layout.world),
    }
    chosen = [index for index, entry in enumerate(answer.front) if entry.reason == "chosen"]
    assert len(chosen) == 1
    assert key[by](chosen[0]) == min(key[by](index) for index in range(4))
    if by != "gpus":
        assert is_on_front(answer.front[chosen[0]], answer.front)  # nothing beats it in both time and cost


def test_the_runner_up_of_a_search_is_another_instance() -> None:
    answer = searched()
    assert answer.runner_up is not None
    assert answer.cluster.instance.name not in answer.runner_up.cluster
    others = [entry for entry in answer.front if answer.cluster.instance.name not in entry.cluster]
    assert answer.runner_up.cost_dollars == min(entry.cost_dollars or math.inf for entry in others)


def test_a_deadline_and_a_budget_bind() -> None:
    free = searched()
    assert free.cost is not None
    deadline_days = 0.6 * free.run_seconds / 86400
    pressed = searched(deadline_days=deadline_days)
    assert pressed.run_seconds <= deadline_days * 86400 < free.run_seconds
    assert pressed.cost is not None
    assert pressed.cost.cost_dollars >= free.cost.cost_dollars
    fastest = searched("time")
    assert fastest.cost is not None
    poor = searched("time", budget=0.5 * (fastest.cost.cost_dollars + free.cost.cost_dollars))
    assert poor.cost is not None
    assert poor.cost.cost_dollars <= 0.5 * (fastest.cost.cost_dollars + free.cost.cost_dollars)
    assert poor.run_seconds > fastest.run_seconds


def test_what_cannot_be_met_says_what_could() -> None:
    def one(**limits: float) -> Plan:
        return plan_clusters(parse_job(JOB), ["p5.48xlarge"], [16], today=TODAY, **limits)  # type: ignore[arg-type]

    with pytest.raises(PlanError, match=r"deadline of 12h.*fastest, p5\.48xlarge x 2, takes \d+d \d+h"):
        one(deadline_seconds=43200.0)
    with pytest.raises(PlanError, match=r"budget of \$100; .*cheapest, p5\.48xlarge x 2, costs \$\d+"):
        one(budget_dollars=100.0)
    with pytest.raises(PlanError, match=r"a deadline of .* and a budget of"):
        one(deadline_seconds=3600.0, budget_dollars=100.0)


def test_the_search_evaluates_what_the_single_plan_does() -> None:
    one = plan_clusters(parse_job(JOB), ["p5.48xlarge"], [16], today=TODAY)
    assert (one.layout, one.run_seconds) == (small().layout, small().run_seconds)
    assert one.runner_up is None
    assert [entry.reason for entry in one.front] == ["chosen"]


def test_a_fixed_layout_is_not_forgotten_in_a_search_over_clusters() -> None:
    """It is kept, or the plan says that it was not."""
    answer = plan_clusters(parse_job(JOB + "layout: {tp: 8}\n"), ["p5.48xlarge"], [16], today=TODAY)
    assert answer.layout.tp == 8 or any("layout" in warning for warning in answer.warnings)


def test_clusters_that_cannot_run_the_job_are_named() -> None:
    job = parse_job(JOB.replace("llama-3.1-8b", "llama-3.1-405b"))
    answer = plan_clusters(job, ["p5.48xlarge"], [8, 256], today=TODAY)
    assert answer.cluster.name == "p5.48xlarge x 32"
    assert any("p5.48xlarge x 1: no layout fits" in warning for warning in answer.warnings)
    with pytest.raises(PlanError, match=r"no cluster in the search can run this job: p5\.48xlarge x 1: .* GiB"):
        plan_clusters(job, ["p5.48xlarge"], [8], today=TODAY)


def test_gpus_that_are_no_whole_nodes() -> None:
    with pytest.raises(PlanError, match=r"12 GPUs is not a whole number of p5\.48xlarge nodes"):
        plan_clusters(parse_job(JOB), ["p5.48xlarge"], [12], today=TODAY)
    with pytest.raises(CratonError, match=r"p5\.84xlarge"):
        plan_clusters(parse_job(JOB), ["p5.84xlarge"], [64], today=TODAY)


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    plan_clusters(
        parse_job(JOB),
        ["p5.48xlarge"],
        [8, 16],
        today=TODAY,
        progress=lambda done, total, what: told.append((done, total, what)),
    )
    for number in (1, 2):
        counts = [(done, total) for done, total, what in told if what.startswith(f"cluster {number} of 2, layouts on")]
        assert len(counts) > 10
        assert counts == [(done, len(counts)) for done in range(len(counts))], "every layout counts"


def test_the_front_can_be_rendered() -> None:
    console = Console(file=io.StringIO(), width=100)
    render_front(searched(), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(entry.cluster in text for entry in searched().front)
    assert "<html" in plan_html(searched(), TODAY)


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
        (JOB.replace("pretrain", "dpo"), "kind dpo cannot be planned"),
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
