"""The plan of a load: deployments with their latency, throughput and cost, and which of them hold the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from craton.job.sections.serving import LoadSection
from craton.planning.serving.layout import ServedLayout

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
# Rates of a curve, of the saturation rate.
CURVE_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97)


class Interval(NamedTuple):
    """A prediction with its 80% interval."""

    value: float
    low: float
    high: float


class SloMiss(NamedTuple):
    """A latency that is above its limit, in seconds."""

    latency: str  # ttft, tpot, e2e
    statistic: str
    limit: float
    value: float

    @property
    def ratio(self) -> float:
        return self.value / self.limit


@dataclass(frozen=True)
class Deployment:
    """Replicas of one layout on one kind of instance, under the load. With a prefill pool, `layout` is that of the
    decode pool."""

    instance: str
    gpu: str
    layout: ServedLayout
    prefill: ServedLayout | None
    gpus: int
    nodes: int
    rate: float  # requests per second that it serves
    max_rate: Interval  # saturation
    slo_rate: float  # largest rate within all limits; 0: none is
    limit: str  # what saturates it
    bottleneck: dict[str, float]  # part of a step → its share at this load
    ttft: dict[str, Interval]
    tpot: dict[str, Interval]
    e2e: dict[str, Interval]
    decoding: float  # requests in decode, of all replicas
    kv_tokens: float  # of all replicas
    max_concurrency: int  # requests whose KV cache fits
    prefill_share: float  # of the time of a step
    tokens_per_second: Interval  # output tokens of all users
    tokens_per_second_per_gpu: Interval
    tokens_per_second_per_user: Interval
    dollars_per_hour: float | None  # of all nodes
    dollars_per_million_input: Interval | None
    dollars_per_million_output: Interval | None
    kv_transfer_seconds: float | None = None  # from the prefill pool to the decode pool
    kv_transfer_link: str = ""
    misses: tuple[SloMiss, ...] = ()

    @property
    def is_saturated(self) -> bool:
        return not math.isfinite(self.ttft["mean"].value)

    @property
    def holds(self) -> bool:
        return not self.misses and not self.is_saturated

    @property
    def distance(self) -> float:
        """How far the worst latency is above its limit; 1 or less: it is not."""
        return max((miss.ratio for miss in self.misses), default=math.inf if self.is_saturated else 0.0)


def best_of_each(rows: Sequence[Deployment], count: int) -> list[Deployment]:
    """Return the first `count` rows, in which every instance has at least its first one."""
    firsts = list({row.instance: row for row in reversed(rows)}.values())
    others = [row for row in rows if row not in firsts][: max(0, count - len(firsts))]
    return [row for row in rows if row in firsts or row in others]


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark of the chosen deployment measures, if it begins with all users at once."""

    requests: int
    ttft: dict[str, Interval]


@dataclass(frozen=True)
class PlannedDrafts:
    """Speculative decoding in the chosen deployment, at this load."""

    model: str  # the draft model, or n-grams
    draft_tokens: int  # per step; 0: drafts would cost more than they save
    is_auto: bool
    acceptance: float
    acceptance_low: float  # of the published range, where it is assumed
    acceptance_high: float
    is_assumed: bool
    speedup: float  # of decode
    speedup_low: float
    speedup_high: float


@dataclass(frozen=True)
class CurvePoint:
    """The chosen deployment at another rate."""

    rate: float
    ttft: dict[str, Interval]
    tpot: dict[str, Interval]


@dataclass(frozen=True)
class FrontPoint:
    """A deployment at a rate, per GPU and per user."""

    layout: ServedLayout
    instance: str
    rate_per_replica: float
    tokens_per_second_per_gpu: float
    tokens_per_second_per_user: float
    limit: str  # the largest part of its steps
    is_on_front: bool


@dataclass(frozen=True)
class KvTier:
    """Reloading the KV cache of a prefix from a slower tier, against computing it again."""

    name: str
    tokens: float  # that the tier of one node holds
    reload_seconds: float  # of the load's mean prompt
    recompute_seconds: float

    @property
    def is_faster(self) -> bool:
        return self.reload_seconds < self.recompute_seconds


@dataclass(frozen=True)
class LoadPlan:
    """The deployments that were compared for a load; `chosen` holds it, or is nearest to that."""

    model: str
    engine: str
    precision: str  # of weights
    attention_precision: str  # of the weights of attention; parts of 4-bit checkpoints stay in bf16
    activation_precision: str  # of the inputs of matmuls
    kv_precision: str
    load: LoadSection
    slo: dict[str, dict[str, float]]
    by: str  # cost or gpus
    gpus_limit: int | None
    chosen: Deployment
    deployments: list[Deployment]  # best first, the chosen one and the best of each instance included
    compared: int  # deployments of which these are the best
    curve: list[CurvePoint]
    front: list[FrontPoint]
    tiers: list[KvTier]
    basis: str
    log_deviation: float
    price_text: str
    benchmark: Benchmark | None = None  # of a closed load without a number of requests
    drafts: PlannedDrafts | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.chosen.holds
