"""What an engine says its last steps should have taken, against the same steps in the planner's own words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from craton.job.model import model_preset
from craton.ml.serving.engine import PlannedSteps, Rates, measured_machine
from craton.ml.serving.engine.planned_steps import BatchWork, batch_work
from craton.ml.serving.heartbeat import MIN_SECONDS, SLOWNESS, patience_of
from craton.ml.serving.messages import Sampling
from craton.ml.serving.schedule import DraftInput, ScheduledStep, Sequence
from craton.ml.serving.schedule.scheduler import MIN_STEP_TOKENS, PREFILL_STEPS, ScheduledChunk
from craton.ml.serving.settings import EngineSettings
from craton.planning.rates import machine
from craton.planning.serving import ServedModel, draft_steps, own_steps, roofline_steps

H200 = machine("H200-SXM", 1, 1, 50e9, 0)
MODEL = own_steps(ServedModel(model_preset("llama-3.1-8b")), H200)
DRAFT = draft_steps(ServedModel(model_preset("llama-3.2-1b")), H200)


def chunk(begin: int, count: int, samples: bool = True, drafts: int = 0) -> ScheduledChunk:
    sequence = Sequence(1, 0, [1] * (begin + count), Sampling(64), 0, begin + count)
    return ScheduledChunk(sequence, begin, count, samples, drafts)


def drafts_of(requests: int, length: int, context: int) -> DraftInput:
    ones, ends, none = np.ones(requests, np.int64), np.full(requests, context), np.zeros(0, np.int64)
    return DraftInput(length, requests, ones, ones, ends, ones, none, none)


def test_a_step_of_decode_and_prefill_is_the_planners() -> None:
    step = ScheduledStep([chunk(999, 1), chunk(1999, 1), chunk(512, 512, False), chunk(0, 100)])
    work = batch_work(step)
    assert (work.rows, work.context_tokens, work.prefill_tokens, work.ended_prompts) == (2, 3000, 612, 1)
    pairs = 512 * 768.5 + 100 * 50.5
    assert work.prefill_pairs == pairs
    planned = PlannedSteps(MODEL)
    expected = MODEL.mixed_seconds(2.0, 1500.0, 612.0, 2 * pairs / 612, chunks=1.0)
    assert planned.mean_seconds([work]) == pytest.approx(expected)
    decode = batch_work(ScheduledStep([chunk(999, 1)]))
    assert planned.mean_seconds([decode]) == pytest.approx(MODEL.decode_seconds(1.0, 1000.0))
    assert planned.mean_roofline_seconds([decode]) == pytest.approx(roofline_steps(MODEL).decode_seconds(1.0, 1000.0))
    assert planned.mean_seconds([work, decode]) == pytest.approx(
        (planned.mean_seconds([work]) + planned.mean_seconds([decode])) / 2
    )


def test_a_step_with_drafts_has_the_passes_of_both_models() -> None:
    step = ScheduledStep([chunk(995, 5, drafts=4), chunk(995, 5, drafts=4)])
    work = batch_work(step, drafts_of(2, 4, 996))
    assert (work.rows, work.context_tokens, work.prefill_tokens) == (10, 2000, 0)
    passes = DRAFT.decode_seconds(2.0, 996.0) + 3 * DRAFT.decode_seconds(2.0, 998.0)
    seconds = PlannedSteps(MODEL, DRAFT).mean_seconds([work])
    assert seconds == pytest.approx(MODEL.decode_seconds(10.0, 200.0) + passes)
    assert PlannedSteps(MODEL).mean_seconds([work]) < seconds
    plain = batch_work(ScheduledStep([chunk(999, 1)]))
    assert PlannedSteps(MODEL, DRAFT).mean_seconds([plain]) == PlannedSteps(MODEL).mean_seconds([plain])


def test_rates_compare_the_last_steps_with_their_plan() -> None:
    rates = Rates(PlannedSteps(MODEL))
    assert (rates.plan_step_seconds, rates.roofline) == (0.0, 0.0)
    step = ScheduledStep([chunk(999, 1)])
    for _ in range(3):
        rates.record(step, 1)
    assert rates.plan_step_seconds == pytest.approx(MODEL.decode_seconds(1.0, 1000.0))
    minimum = roofline_steps(MODEL).decode_seconds(1.0, 1000.0)
    assert rates.roofline == pytest.approx(minimum / rates.step_seconds)
    unplanned = Rates()
    unplanned.record(step, 1)
    assert (unplanned.plan_step_seconds, unplanned.roofline) == (0.0, 0.0)


def test_no_step_of_an_engine_is_planned_to_outlast_its_heartbeat() -> None:
    settings = EngineSettings(max_length=131_072, chunk_tokens=2048, max_running=256)
    patience = patience_of(MODEL, settings, 800_000)
    assert patience >= MIN_SECONDS
    work = [BatchWork(256, 800_000, 2048, 2048 * 131_000.0, 1), BatchWork(0, 0, 2048, 2048 * 1024.0, 1)]
    assert all(SLOWNESS * PlannedSteps(MODEL).mean_seconds([each]) <= patience for each in work)
    slow = own_steps(ServedModel(model_preset("llama-3.1-405b")), measured_machine(torch.device("cpu"), torch.bfloat16))
    assert patience_of(slow, settings, 800_000) > 10 * patience


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_machine_of_an_engine_has_measured_rates(dtype: torch.dtype) -> None:
    found = measured_machine(torch.device("cpu"), dtype, 2)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    assert 1e8 < found.rates.streaming_bytes_per_second < 1e13
    assert 1e7 < found.rates.matrix_flops[precision] < 1e14
    steps = own_steps(ServedModel(model_preset("qwen3-0.6b"), precision, tp=2), found)
    assert 0 < steps.decode_seconds(1.0, 100.0) < 60


def test_plans_spread_prompts_as_the_scheduler_does() -> None:
    assert (MODEL.work.least_tokens, MODEL.prefill_steps) == (MIN_STEP_TOKENS, PREFILL_STEPS)
    for decoding in (0, 90, 1000):
        assert MODEL.least_chunk(decoding) == max(MIN_STEP_TOKENS - decoding, MIN_STEP_TOKENS // 2)
