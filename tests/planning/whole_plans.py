"""The job of the tests of whole plans, and what must hold for every plan."""

from __future__ import annotations

import json
import math
from datetime import date
from functools import cache

import pytest

from craton.job import parse_job
from craton.job.layout import layout_is_valid
from craton.planning import Plan, plan
from craton.planning.report import plan_to_json
from craton.planning.result import LAYERS
from craton.telemetry import PHASES

TODAY = date(2026, 11, 15)
JOB = """\
kind: pretrain
model: llama-3.1-8b
data: {sequence: 8192}
train: {global_batch_sequences: 64, tokens: 100B}
cluster: p5.48xlarge x 2
checkpoint: {tiers: [{to: shared, every: 1h}]}
"""
OWN_PRICE = "price: {dollars_per_hour: 10.0, kind: own, date: 2026-11-01}\n"


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
