"""The result of a plan. Every number has a measured counterpart: `plan_X` here is `run_X` in the metrics of the run.

Seconds of a step are exposed seconds, so the phases add up to `step_seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from craton.infrastructure import Cluster
from craton.job.layout import Layout
from craton.job.model import ModelShape

LAYERS = ("infrastructure", "orchestration", "ml software", "observability")
INTERVAL_LEVEL = 0.8  # share of measurements that every `_low`..`_high` should contain


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck: its layer, the part of the step, that part's share, and how to relieve it."""

    layer: str  # one of LAYERS
    phase: str
    part: str  # "tensor parallel", "matmul", "pipeline bubble", ...
    share: float  # of step_seconds
    text: str  # one sentence
    relief: str  # what to change


@dataclass(frozen=True)
class Alternative:
    """Another layout (or another cluster) and why it was not chosen."""

    cluster: str  # "p5en.48xlarge x 16"
    layout: Layout
    step_seconds: float
    memory_bytes: float
    run_seconds: float
    cost_dollars: float | None
    reason: str  # "11% slower: tensor parallel crosses nodes", "does not fit: needs 93 of 79 GiB"
    fits: bool = True
    goodput: float | None = None  # if the search computed it


@dataclass(frozen=True)
class ScalingPoint:
    """The best layout at another number of GPUs, same job."""

    num_gpus: int
    step_seconds: float
    tokens_per_second: float
    run_seconds: float
    cost_dollars: float | None
    layout: Layout
    cluster: str


@dataclass(frozen=True)
class Sensitivity:
    """Effect of one input on the step: a change of a hardware rate, or one standard deviation of a constant."""

    name: str  # "network bandwidth", "micro_batch 1 → 2", "constant gemm_efficiency"
    change: str  # "-10%"
    effect: float  # relative change of step_seconds, signed


@dataclass(frozen=True)
class TierPlan:
    """A checkpoint to and from one tier."""

    tier: str
    every_seconds: float | None
    write_seconds: float
    blocked_seconds: float  # training is blocked this long per checkpoint
    read_seconds: float


@dataclass(frozen=True)
class StoragePlan:
    data_bytes_per_second: float  # throughput of the data loader, whole job
    data_tier: str
    data_limit_bytes_per_second: float
    checkpoint_bytes: float
    tiers: list[TierPlan]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RecoveryPlan:
    """Goodput if failures are recovered from one tier."""

    method: str  # "peer", "nvme", "shared", "object"
    interval_seconds: float  # the best checkpoint interval
    detect_seconds: float
    restart_seconds: float  # from detection to the first step, including restore
    redo_seconds: float
    goodput: float
    goodput_low: float
    goodput_high: float
    restore_seconds: float = 0.0  # the part of restart_seconds that restores the state


@dataclass(frozen=True)
class GoodputPlan:
    goodput: float  # productive share of wall time with the job's own checkpoint settings
    goodput_low: float
    goodput_high: float
    method: str  # the tier most failures are recovered from; "start" where no checkpoint survives them
    interval_seconds: float
    failures_per_day: float
    mean_hours_between_failures: float
    recoveries: list[RecoveryPlan]
    curve: list[tuple[float, float]]  # (checkpoint interval seconds, goodput) for the chosen method
    failures_per_day_low: float = 0.0
    failures_per_day_high: float = 0.0
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CostPlan:
    cost_dollars: float
    cost_dollars_low: float
    cost_dollars_high: float
    dollars_per_day: float
    dollars_per_trillion_tokens: float
    dollars_per_hour_per_instance: float
    purchase: str  # on-demand, capacity-block, spot, own
    price_date: str
    price_age_days: int
    price_source: str
    num_instances: int = 0  # billed, spares included


@dataclass(frozen=True)
class RolloutPlan:
    """The rollouts of a step of reinforcement learning."""

    mode: str  # sync, overlap, separate
    prompts: int
    group: int
    prompt_tokens: float  # mean, of the first rows or assumed
    completion_tokens: float  # mean, assumed
    engines: int  # that share the samples
    running: int  # samples of an engine at once
    seconds: float  # of generation, also where training hides it
    tokens_per_second: float  # generated, of all engines
    kv_bytes: float  # per rank


@dataclass(frozen=True)
class Plan:
    job: str
    kind: str
    model: ModelShape
    cluster: Cluster
    layout: Layout
    profile: str  # "megatron-bridge 26.06 on H100-SXM"
    calibrated: bool
    sequence: int
    global_batch_sequences: int
    tokens: float
    steps: int
    step_seconds: float
    step_seconds_low: float  # 80% interval
    step_seconds_high: float
    phases: dict[str, float]  # exposed seconds per step, adds up to step_seconds
    parts: dict[str, dict[str, float]]  # phase → part → seconds; parts add up to their phase
    hidden_communication_seconds: float  # overlapped with compute, not in the phases
    tokens_per_second: float
    mfu: float
    flops_per_token: float
    memory_bytes: float  # per GPU, at the worst instant
    memory_limit_bytes: float
    memory_parts: dict[str, float]  # adds up to memory_bytes
    memory_instants: dict[str, float]  # "forward end": bytes, ...; memory_bytes is their maximum
    storage: StoragePlan
    goodput: GoodputPlan
    cost: CostPlan | None  # None: no price known
    run_seconds: float  # wall time of the whole run, failures included
    run_seconds_low: float
    run_seconds_high: float
    bottleneck: Bottleneck
    alternatives: list[Alternative] = field(default_factory=list)
    runner_up: Alternative | None = None  # on other hardware
    scaling: list[ScalingPoint] = field(default_factory=list)
    front: list[Alternative] = field(default_factory=list)  # cost-time front over clusters
    sensitivities: list[Sensitivity] = field(default_factory=list)
    layouts_evaluated: int = 0
    evaluate_seconds: float = 0.0  # mean per step, on top of step_seconds: part of the run, not of the step
    rollout: RolloutPlan | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.memory_limit_bytes
