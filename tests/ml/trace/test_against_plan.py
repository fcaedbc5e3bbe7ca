"""The trace of the real step against the planner's count, from 8 to 16,384 ranks: bytes and FLOPs within 1%, memory
within 5%. One rank of the first and the last stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from warm_processes import warm_context

from craton.job import load_job, parse_job
from craton.job.layout import Layout
from craton.ml.trace.comparison import Comparison, ComparisonRow, compare
from craton.ml.trace.trace import trace

DENSE_8B, DENSE_70B, DENSE_405B = "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"
QWEN, QWEN_14B, DEEPSEEK = "qwen3-30b-a3b", "qwen3-14b", "deepseek-v3"

Case = tuple[str, int, int, Layout]  # model, sequence, micro-batches of a step, layout

# What costs a trace its time is layers times micro-batches, whatever the world: here as few as tell one place of the
# step from another, below as many as fill the pipeline and go on.
CASES: list[Case] = [
    (DENSE_8B, 8192, 3, Layout(fsdp=8)),
    (DENSE_8B, 8192, 1, Layout(pp=2, fsdp=4, tp=2, recompute="full")),
    (QWEN, 4096, 1, Layout(pp=2, fsdp=8, ep=8)),
]
MORE_CASES: list[Case] = [
    (DENSE_8B, 8192, 3, Layout(pp=2, fsdp=4, schedule="zero-bubble")),
    (DEEPSEEK, 4096, 1, Layout(fsdp=128, tp=4, ep=64, recompute="full")),
    (DENSE_70B, 32768, 1, Layout(fsdp=32, cp=4, tp=8, recompute="full")),
    (DENSE_8B, 8192, 2, Layout(fsdp=8, zero=2)),
    (DENSE_8B, 32768, 1, Layout(fsdp=8, cp=4, recompute="selective")),
    (DENSE_8B, 8192, 3, Layout(pp=2, fsdp=8)),
    (DENSE_8B, 8192, 2, Layout(pp=2, fsdp=4, vpp=2, schedule="interleaved")),
    (DENSE_405B, 8192, 2, Layout(pp=16, fsdp=128, tp=8)),
    (QWEN, 4096, 1, Layout(fsdp=8, ep=8)),
    (QWEN_14B, 8192, 1, Layout(fsdp=8)),
    (QWEN_14B, 8192, 1, Layout(fsdp=4, tp=2, recompute="selective")),
    (QWEN, 4096, 1, Layout(fsdp=4, tp=2, ep=4, recompute="full")),
    (DENSE_8B, 8192, 1, Layout(fsdp=8, tp=8)),
    (DENSE_70B, 8192, 2, Layout(fsdp=32, tp=8, recompute="selective")),
    (DENSE_8B, 8192, 1, Layout(fsdp=64)),
    (DENSE_8B, 8192, 1, Layout(replicate=8, fsdp=8)),
    (DENSE_8B, 32768, 1, Layout(fsdp=4, cp=4, tp=4)),
    (DENSE_70B, 8192, 2, Layout(pp=4, fsdp=16, tp=4)),
    (QWEN, 8192, 1, Layout(fsdp=8, cp=2, ep=8)),
    (DENSE_8B, 8192, 2, Layout(fsdp=64, recompute="full")),
    (DENSE_8B, 8192, 2, Layout(replicate=8, recompute="full")),
    (DENSE_8B, 8192, 2, Layout(fsdp=8, zero=1)),
    (DENSE_70B, 8192, 1, Layout(fsdp=256, recompute="full")),
    (DENSE_70B, 8192, 1, Layout(replicate=4, fsdp=16, tp=8)),
    (DENSE_405B, 8192, 1, Layout(fsdp=2048, tp=8, recompute="full")),
    (DENSE_405B, 8192, 1, Layout(replicate=8, fsdp=256, tp=8, recompute="full")),
    (DENSE_405B, 8192, 1, Layout(pp=8, fsdp=128, tp=8, recompute="selective")),
    (QWEN, 4096, 1, Layout(fsdp=64, recompute="selective")),
    (QWEN, 4096, 1, Layout(replicate=4, fsdp=16, ep=16)),
    (DEEPSEEK, 4096, 1, Layout(fsdp=512, ep=64, recompute="full")),
    (DENSE_8B, 8192, 8, Layout(pp=4, fsdp=8)),
    (DENSE_8B, 8192, 4, Layout(pp=4, fsdp=2, tp=2, recompute="selective")),
    (DENSE_8B, 8192, 16, Layout(pp=4, fsdp=4, vpp=2, schedule="interleaved")),
    (DENSE_8B, 8192, 4, Layout(pp=4, fsdp=4, vpp=4, schedule="interleaved", recompute="full")),
    (DENSE_8B, 8192, 16, Layout(pp=4, fsdp=4, schedule="zero-bubble")),
    (DENSE_8B, 8192, 16, Layout(pp=4, fsdp=4, schedule="zero-bubble", recompute="full")),
    (DENSE_8B, 8192, 16, Layout(pp=4, fsdp=2, tp=2, schedule="zero-bubble")),
    (DENSE_8B, 8192, 8, Layout(pp=4, fsdp=4, vpp=2, schedule="zero-bubble", recompute="selective")),
    (DENSE_70B, 8192, 16, Layout(pp=4, fsdp=16, tp=4)),
    (DENSE_405B, 8192, 16, Layout(pp=16, fsdp=128, tp=8)),
    (DENSE_405B, 8192, 16, Layout(pp=16, fsdp=128, tp=8, vpp=4, zero=2, schedule="interleaved")),
    (DENSE_405B, 131072, 16, Layout(pp=16, fsdp=8, cp=16, tp=8, recompute="full")),
    (QWEN, 4096, 1, Layout(fsdp=512)),
    (QWEN, 4096, 8, Layout(fsdp=64, recompute="selective")),
    (QWEN, 4096, 8, Layout(pp=2, fsdp=8, ep=8)),
    (QWEN, 4096, 16, Layout(pp=4, fsdp=4, ep=4, schedule="zero-bubble", recompute="full")),
    (DEEPSEEK, 4096, 4, Layout(fsdp=512, ep=64, recompute="full")),
    (DEEPSEEK, 4096, 16, Layout(pp=8, fsdp=64, ep=32, recompute="full")),
    (DEEPSEEK, 4096, 16, Layout(pp=4, fsdp=64, tp=2, ep=32, recompute="selective")),
    (DEEPSEEK, 4096, 16, Layout(pp=16, fsdp=64, ep=64, recompute="full", schedule="zero-bubble")),
]


def names(case: Case) -> str:
    return f"{case[0]} on {case[3].world}: {case[3]}, {case[2]} micro-batches"


every_case = pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=names(case)) for case in CASES),
        *(pytest.param(case, id=names(case), marks=pytest.mark.slow) for case in MORE_CASES),
    ],
)


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Comparison]]:
    """The comparison of each case that was asked for, two traced at a time."""
    asked = {
        item.callspec.params["case"]: None
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and "case" in item.fixturenames
    }
    with ProcessPoolExecutor(2, warm_context()) as pool:
        found = {case: pool.submit(comparison, case) for case in asked}
        yield lambda case: found[case].result()


def comparison(case: Case, lora: str = "") -> Comparison:
    model, sequence, micro_batches, layout = case
    job = parse_job(
        f"""
        kind: pretrain
        model: {model}
        data: {{sequence: {sequence}}}
        train: {{global_batch_sequences: {micro_batches * layout.data_parallel}, tokens: 1T, {lora}}}
        cluster: p5.48xlarge x {max(1, layout.world // 8)}
        """
    )
    last = layout.world - layout.world // layout.pp
    found = trace(job, layout, ranks=sorted({0, last}))
    assert found.findings == () or layout.pp > 1
    return compare(job, layout, found)


@every_case
def test_the_step_sends_and_computes_what_was_planned(case: Case, compared: Callable[[Case], Comparison]) -> None:
    rows = [row for rank in compared(case).ranks for row in (*rank.collectives, *rank.flops)]
    assert len(rows) >= 5
    assert [shown(row) for row in rows if not row.agrees] == []


@every_case
def test_the_step_holds_what_was_planned(case: Case, compared: Callable[[Case], Comparison]) -> None:
    rows = compared(case).memory
    assert rows[0].agrees, [shown(row) for row in rows]


def shown(row: ComparisonRow) -> str:
    calls = f" in {row.planned_count:g} and {row.traced_count:g} calls" if row.planned_count or row.traced_count else ""
    return f"{row.name}: planned {row.planned:.5g}, traced {row.traced:.5g}{calls}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "micro_batches", "layout"),
    [
        (16, 1, Layout(fsdp=8, tp=2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (16, 1, Layout(fsdp=8)),
                (16, 2, Layout(fsdp=8, recompute="full")),
                (16, 1, Layout(pp=2, fsdp=8, recompute="selective")),
                (128, 1, Layout(fsdp=8)),
                (128, 2, Layout(fsdp=8, recompute="full")),
                (128, 1, Layout(fsdp=8, tp=2)),
                (128, 1, Layout(pp=2, fsdp=8, recompute="selective")),
            )
        ),
    ],
    ids=str,
)
def test_adapters_are_planned_too(rank: int, micro_batches: int, layout: Layout) -> None:
    found = comparison((DENSE_8B, 8192, micro_batches, layout), lora=f"lora: {{rank: {rank}}}")
    assert [shown(row) for rank in found.ranks for row in (*rank.collectives, *rank.flops) if not row.agrees] == []
    assert found.memory[0].agrees, [shown(row) for row in found.memory]


@pytest.mark.slow
def test_405b_on_16384_gpus() -> None:
    job = load_job(Path(__file__).parents[3] / "examples" / "llama-405b.yaml")
    layout = job.fixed_layout(16384)
    assert layout is not None
    found = trace(job, layout)
    assert found.world == 16384
    assert [rank.stage for rank in found.ranks] == [0, 1, 14, 15]
