"""Plans built by hand, so that reports are tested without the planner: a giant run, a small one with everything a
search adds, and one that does not fit. The numbers are plausible, not predictions."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from craton.infrastructure import Cluster, Gpu, Instance, Price
from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning import CostPlan, Plan
from craton.planning.result import (
    Alternative,
    Bottleneck,
    GoodputPlan,
    RecoveryPlan,
    ScalingPoint,
    Sensitivity,
    StoragePlan,
    TierPlan,
)

DAY = 86400.0
GIB = float(2**30)

LLAMA_405B = ModelShape("llama-3.1-405b", 126, 16384, 53248, 128, 8, 128, 128256)
LLAMA_8B = ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256)
H100 = Gpu("H100-SXM", "hopper", {"bf16": 989.5e12, "fp8": 1979e12}, {}, 81559 * 2**20, 3.35e12, 450e9, 700)
H200 = Gpu("H200-SXM", "hopper", {"bf16": 989.5e12, "fp8": 1979e12}, {}, 143771 * 2**20, 4.8e12, 450e9, 700)
P5_PRICE = Price(55.04, "on-demand", date(2026, 7, 20), "us-east-1", "AWS price list")
P5EN_PRICE = Price(49.928, "capacity-block", date(2026, 9, 19), "us-east-1", "AWS capacity block prices")


def instance(name: str, gpu: Gpu, price: Price) -> Instance:
    return Instance(
        name=name,
        gpu=gpu,
        num_gpus=8,
        nvlink_domain_gpus=8,
        host_link="pcie5",
        host_link_bytes_per_second=55e9,
        network_bytes_per_second=400e9,
        network_interfaces=32,
        efa_version=2,
        vcpus=192,
        host_memory_bytes=2048 * GIB,
        nvme_bytes=30.4e12,
        nvme_read_bytes_per_second=24e9,
        nvme_write_bytes_per_second=12e9,
        prices=(price,),
    )


@pytest.fixture
def giant_plan() -> Plan:
    """Llama 3.1 405B on 16,384 H100: one cluster, one price (stale), nothing searched but layouts."""
    step_seconds = 6.48
    parts = {
        "data": {"waiting for a batch": 0.004},
        "compute": {
            "matmul": 4.302,
            "attention": 0.498,
            "pipeline bubble": 0.583,
            "norms and elementwise": 0.211,
            "embedding and head": 0.031,
        },
        "communication": {"tensor parallel": 0.418, "fsdp": 0.231, "pipeline": 0.072},
        "optimizer": {"adamw": 0.066, "gradient norm": 0.021},
    }
    parts["checkpoint"] = {"snapshot": step_seconds - sum(sum(part.values()) for part in parts.values())}
    memory_parts = {
        "parameters": 5.9 * GIB,
        "gradients": 11.8 * GIB,
        "optimizer": 0.3 * GIB,
        "activations": 41.2 * GIB,
        "logits": 3.9 * GIB,
        "unsharded layers": 0.0,
        "communication buffers": 3.4 * GIB,
        "allocator slack": 2.6 * GIB,
    }
    chosen = Layout(pp=16, fsdp=128, tp=8, vpp=8, zero=1, schedule="interleaved")
    productive_seconds = 1_190_186 * step_seconds

    def other(layout: Layout, slower: float, memory_gib: float, why: str, fits: bool = True) -> Alternative:
        run_seconds = productive_seconds * slower / 0.968
        return Alternative(
            "p5.48xlarge x 2048",
            layout,
            step_seconds * slower,
            memory_gib * GIB,
            run_seconds,
            run_seconds / 3600 * 55.04 * 2048,
            why,
            fits,
        )

    run_seconds = productive_seconds / 0.968
    dollars_per_day = 55.04 * 2048 * 24
    return Plan(
        job="llama-405b",
        kind="pretrain",
        model=LLAMA_405B,
        cluster=Cluster("p5.48xlarge x 2048", instance("p5.48xlarge", H100, P5_PRICE), 2048, price=P5_PRICE),
        layout=chosen,
        profile="megatron-core, prior for H100-SXM",
        calibrated=False,
        sequence=8192,
        global_batch_sequences=1600,
        tokens=15.6e12,
        steps=1_190_186,
        step_seconds=step_seconds,
        step_seconds_low=5.31,
        step_seconds_high=7.92,
        phases={phase: sum(part.values()) for phase, part in parts.items()},
        parts=parts,
        hidden_communication_seconds=1.273,
        tokens_per_second=1600 * 8192 / step_seconds,
        mfu=0.3217,
        flops_per_token=2.54e12,
        memory_bytes=sum(memory_parts.values()),
        memory_limit_bytes=81559 * 2.0**20,
        memory_parts=memory_parts,
        memory_instants={"last warm-up forward": sum(memory_parts.values()), "optimizer step": 24.1 * GIB},
        storage=StoragePlan(
            data_bytes_per_second=8.1e6,
            data_tier="shared",
            data_limit_bytes_per_second=240e9,
            checkpoint_bytes=5.68e12,
            tiers=[
                TierPlan("peer", 120.0, 6.8, 0.31, 7.4),
                TierPlan("nvme", 300.0, 2.9, 0.34, 0.9),
                TierPlan("shared", 1800.0, 47.3, 0.34, 31.5),
                TierPlan("object", 7200.0, 284.0, 0.34, 189.0),
            ],
        ),
        goodput=GoodputPlan(
            goodput=0.968,
            goodput_low=0.946,
            goodput_high=0.981,
            method="peer",
            interval_seconds=120.0,
            failures_per_day=7.78,
            mean_hours_between_failures=3.08,
            recoveries=[
                RecoveryPlan("peer", 84.0, 60.0, 210.0, 42.0, 0.968, 0.947, 0.981),
                RecoveryPlan("nvme", 88.0, 60.0, 420.0, 44.0, 0.949, 0.915, 0.969),
                RecoveryPlan("shared", 90.0, 60.0, 660.0, 45.0, 0.928, 0.879, 0.956),
                RecoveryPlan("object", 91.0, 60.0, 900.0, 330.0, 0.880, 0.801, 0.928),
            ],
            curve=[
                (interval, 1 / (1 + 0.31 / interval) * (1 - (270 + interval / 2) / 11090))
                for interval in (2, 5, 10, 20, 40, 80, 120, 300, 600, 1200, 1800, 3600, 7200)
            ],
        ),
        cost=CostPlan(
            cost_dollars=run_seconds / DAY * dollars_per_day,
            cost_dollars_low=run_seconds / DAY * dollars_per_day * 0.81,
            cost_dollars_high=run_seconds / DAY * dollars_per_day * 1.26,
            dollars_per_day=dollars_per_day,
            dollars_per_trillion_tokens=run_seconds / DAY * dollars_per_day / 15.6,
            dollars_per_hour_per_instance=55.04,
            purchase="on-demand",
            price_date="2026-07-20",
            price_age_days=118,
            price_source="AWS price list, us-east-1",
        ),
        run_seconds=run_seconds,
        run_seconds_low=run_seconds * 0.81,
        run_seconds_high=run_seconds * 1.26,
        bottleneck=Bottleneck(
            layer="ml software",
            phase="compute",
            part="matmul",
            share=4.302 / step_seconds,
            text="Matrix products run at 66% of the card's measured peak.",
            relief="fp8 halves them where the loss allows it",
        ),
        alternatives=[
            other(replace(chosen, vpp=4), 1.034, 66.0, "3.4% slower: larger pipeline bubble"),
            other(replace(chosen, pp=8, fsdp=256, zero=2), 1.061, 78.8, "6.1% slower: fsdp gathers twice the weights"),
            other(
                replace(chosen, recompute="selective", pp=8, fsdp=256, vpp=16),
                1.083,
                71.4,
                "8.3% slower: attention computed twice",
            ),
            other(
                replace(chosen, tp=16, fsdp=64, vpp=1, schedule="1f1b"),
                1.31,
                44.0,
                "31% slower: tensor parallel crosses nodes",
            ),
            other(replace(chosen, tp=4, fsdp=256), 0.97, 97.6, "does not fit: needs 97.6 of 79.6 GiB", fits=False),
        ],
        sensitivities=[
            Sensitivity("matrix product efficiency", "-10%", 0.074),
            Sensitivity("network bandwidth", "-50%", 0.052),
            Sensitivity("micro_batch 1 → 2", "", -0.013),
            Sensitivity("NVLink bandwidth", "-10%", 0.007),
            Sensitivity("failures per node-day", "x 2", 0.0),
        ],
        layouts_evaluated=1874,
        warnings=[
            "The p5.48xlarge price is 118 days old (2026-07-20); put your own in the cluster file.",
            "No leaf size is known for this cluster: every node is taken to be under one leaf.",
        ],
    )


@pytest.fixture
def small_plan() -> Plan:
    """Llama 3.1 8B on 128 H200 with all that a search over clusters adds, on a calibrated profile."""
    chosen = Layout(fsdp=128, micro_batch=2)
    step_seconds = 7.83
    parts = {
        "data": {"waiting for a batch": 0.002},
        "compute": {"matmul": 5.871, "attention": 0.964, "norms and elementwise": 0.402, "head": 0.221},
        "communication": {"fsdp": 0.214},
        "optimizer": {"adamw": 0.062},
    }
    parts["checkpoint"] = {"snapshot": step_seconds - sum(sum(part.values()) for part in parts.values())}
    memory_parts = {
        "parameters": 0.1 * GIB,
        "gradients": 0.2 * GIB,
        "optimizer": 0.7 * GIB,
        "activations": 88.6 * GIB,
        "logits": 7.8 * GIB,
        "unsharded layers": 1.6 * GIB,
        "communication buffers": 2.1 * GIB,
        "allocator slack": 4.3 * GIB,
    }
    steps = 119_209
    tokens_per_step = 1024 * 8192
    run_seconds = steps * step_seconds / 0.999
    dollars_per_day = 49.928 * 16 * 24

    def candidate(
        cluster: str, layout: Layout, step: float, memory_gib: float, dollars_per_hour: float, goodput: float, why: str
    ) -> Alternative:
        seconds = steps * step / goodput
        return Alternative(
            cluster, layout, step, memory_gib * GIB, seconds, seconds / 3600 * dollars_per_hour, why, goodput=goodput
        )

    slower = "slower and dearer than p5en.48xlarge x 16"
    front = [
        candidate("p6-b200.48xlarge x 64", Layout(replicate=4, fsdp=128), 0.98, 71, 64 * 113.93, 0.961, "fastest"),
        candidate(
            "p6-b200.48xlarge x 32",
            Layout(replicate=2, fsdp=128),
            1.84,
            71,
            32 * 113.93,
            0.974,
            "4.1 x faster, 10% dearer",
        ),
        candidate(
            "p6-b200.48xlarge x 16",
            Layout(fsdp=128, micro_batch=2),
            3.55,
            118,
            16 * 113.93,
            0.985,
            "2.2 x faster, 5% dearer",
        ),
        candidate("p5en.48xlarge x 32", Layout(replicate=2, fsdp=128), 4.06, 62, 32 * 49.928, 0.979, slower),
        candidate(
            "p5en.48xlarge x 16", chosen, step_seconds, 105.4, 16 * 49.928, 0.999, "chosen: cheapest within 11 days"
        ),
        candidate(
            "p5.48xlarge x 16",
            Layout(fsdp=128, recompute="selective"),
            8.61,
            68,
            16 * 41.528,
            0.999,
            "misses 11 days by 22 h",
        ),
        candidate(
            "p5.48xlarge x 8", Layout(fsdp=64, recompute="selective"), 16.9, 69, 8 * 41.528, 0.993, "misses 11 days"
        ),
    ]

    def at(num_gpus: int, efficiency: float, layout: Layout) -> ScalingPoint:
        tokens_per_second = tokens_per_step / step_seconds / 128 * num_gpus * efficiency
        seconds = 1e12 / tokens_per_second / 0.999
        return ScalingPoint(
            num_gpus,
            tokens_per_step / tokens_per_second,
            tokens_per_second,
            seconds,
            seconds / 3600 * 49.928 * num_gpus / 8,
            layout,
            f"p5en.48xlarge x {num_gpus // 8}",
        )

    def same_cluster(layout: Layout, slower: float, memory_gib: float, why: str, fits: bool = True) -> Alternative:
        seconds = run_seconds * slower
        return Alternative(
            "p5en.48xlarge x 16",
            layout,
            step_seconds * slower,
            memory_gib * GIB,
            seconds,
            seconds / DAY * dollars_per_day,
            why,
            fits,
        )

    return Plan(
        job="llama-8b",
        kind="pretrain",
        model=LLAMA_8B,
        cluster=Cluster("p5en.48xlarge x 16", instance("p5en.48xlarge", H200, P5EN_PRICE), 16, price=P5EN_PRICE),
        layout=chosen,
        profile="torchtitan 0.2 on H200-SXM",
        calibrated=True,
        sequence=8192,
        global_batch_sequences=1024,
        tokens=1e12,
        steps=steps,
        step_seconds=step_seconds,
        step_seconds_low=7.21,
        step_seconds_high=8.52,
        phases={phase: sum(part.values()) for phase, part in parts.items()},
        parts=parts,
        hidden_communication_seconds=1.731,
        tokens_per_second=tokens_per_step / step_seconds,
        mfu=0.452,
        flops_per_token=5.34e10,
        memory_bytes=sum(memory_parts.values()),
        memory_limit_bytes=143771 * 2.0**20,
        memory_parts=memory_parts,
        memory_instants={
            "forward end": 101.0 * GIB,
            "backward start": sum(memory_parts.values()),
            "optimizer step": 9.7 * GIB,
        },
        storage=StoragePlan(
            data_bytes_per_second=4.28e6,
            data_tier="shared",
            data_limit_bytes_per_second=12e9,
            checkpoint_bytes=112.4e9,
            tiers=[
                TierPlan("peer", 60.0, 1.1, 0.055, 1.2),
                TierPlan("nvme", 300.0, 0.6, 0.061, 0.3),
                TierPlan("shared", 1800.0, 9.4, 0.061, 7.1),
                TierPlan("object", None, 21.0, 0.061, 14.0),
            ],
        ),
        goodput=GoodputPlan(
            goodput=0.999,
            goodput_low=0.998,
            goodput_high=0.9995,
            method="shared",
            interval_seconds=1800.0,
            failures_per_day=0.061,
            mean_hours_between_failures=394.7,
            recoveries=[
                RecoveryPlan("peer", 410.0, 60.0, 45.0, 205.0, 0.9989, 0.998, 0.9993),
                RecoveryPlan("nvme", 426.0, 60.0, 95.0, 213.0, 0.9984, 0.997, 0.999),
                RecoveryPlan("shared", 426.0, 60.0, 310.0, 213.0, 0.9978, 0.996, 0.9987),
                RecoveryPlan("object", 1210.0, 60.0, 480.0, 605.0, 0.9961, 0.993, 0.998),
            ],
            curve=[
                (interval, 1 / (1 + 0.061 / interval) * (1 - (370 + interval / 2) / 1.42e6))
                for interval in (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200)
            ],
        ),
        cost=CostPlan(
            cost_dollars=run_seconds / DAY * dollars_per_day,
            cost_dollars_low=run_seconds / DAY * dollars_per_day * 0.92,
            cost_dollars_high=run_seconds / DAY * dollars_per_day * 1.09,
            dollars_per_day=dollars_per_day,
            dollars_per_trillion_tokens=run_seconds / DAY * dollars_per_day,
            dollars_per_hour_per_instance=49.928,
            purchase="capacity-block",
            price_date="2026-09-19",
            price_age_days=57,
            price_source="AWS capacity block prices, us-east-1",
        ),
        run_seconds=run_seconds,
        run_seconds_low=run_seconds * 0.92,
        run_seconds_high=run_seconds * 1.09,
        bottleneck=Bottleneck(
            layer="ml software",
            phase="compute",
            part="matmul",
            share=5.871 / step_seconds,
            text="Matrix products fill three quarters of the step; the network is hidden behind them.",
            relief="fp8, or a faster card: p6-b200.48xlarge x 16 halves the step",
        ),
        alternatives=[
            same_cluster(Layout(fsdp=128), 1.021, 58.9, "2.1% slower: smaller matrix products"),
            same_cluster(Layout(replicate=16, fsdp=8), 1.027, 66.0, "2.7% slower: gradients cross nodes whole"),
            same_cluster(Layout(fsdp=128, micro_batch=2, recompute="selective"), 1.068, 71.2, "6.8% slower: recompute"),
            same_cluster(Layout(fsdp=64, tp=2, micro_batch=2), 1.092, 68.4, "9.2% slower: tensor parallel exposed"),
            same_cluster(
                Layout(fsdp=128, micro_batch=4), 0.991, 196.4, "does not fit: needs 196 of 140 GiB", fits=False
            ),
        ],
        runner_up=candidate(
            "p6-b200.48xlarge x 16",
            Layout(fsdp=128, micro_batch=2),
            3.55,
            118,
            16 * 113.93,
            0.985,
            "2.2 x faster, 5% dearer",
        ),
        scaling=[
            at(32, 1.024, Layout(fsdp=32)),
            at(64, 1.013, Layout(fsdp=64, micro_batch=2)),
            at(128, 1.0, chosen),
            at(256, 0.964, Layout(replicate=2, fsdp=128)),
            at(512, 0.893, Layout(replicate=4, fsdp=128)),
            at(1024, 0.741, Layout(replicate=8, fsdp=128)),
        ],
        front=front,
        sensitivities=[
            Sensitivity("matrix product efficiency", "-10%", 0.083),
            Sensitivity("precision bf16 → fp8", "", -0.214),
            Sensitivity("network bandwidth", "-50%", 0.119),
            Sensitivity("micro_batch 2 → 1", "", 0.021),
            Sensitivity("memory bandwidth", "-10%", 0.006),
        ],
        layouts_evaluated=412,
    )


@pytest.fixture
def unfit_plan(giant_plan: Plan) -> Plan:
    """The 405B asked onto four nodes with a fixed layout: no price, no search, and too big by far."""
    memory_parts = {name: size * 3.1 for name, size in giant_plan.memory_parts.items()}
    cluster = Cluster("lab", replace(giant_plan.cluster.instance, name="dgx-h100", prices=()), 4)
    return replace(
        giant_plan,
        job="too-big",
        kind="sft",
        cluster=cluster,
        layout=Layout(fsdp=4, tp=8, recompute="full"),
        tokens=2.1e8,
        steps=50,
        memory_parts=memory_parts,
        memory_bytes=sum(memory_parts.values()),
        memory_instants={},
        cost=None,
        run_seconds=50 * 6.48,
        run_seconds_low=50 * 5.31,
        run_seconds_high=50 * 7.92,
        storage=replace(giant_plan.storage, tiers=[]),
        goodput=GoodputPlan(1.0, 1.0, 1.0, "none", float("inf"), 0.0, float("inf"), [], []),
        bottleneck=Bottleneck(
            layer="infrastructure",
            phase="compute",
            part="memory",
            share=0.0,
            text="The optimizer state alone is larger than the cards.",
            relief="at least 28 nodes, or recompute full with offload optimizer",
        ),
        alternatives=[],
        sensitivities=[],
        layouts_evaluated=1,
        warnings=[],
    )
