"""Print every accuracy number of docs/measurements.md: `python benchmarks/plan_accuracy.py` (two minutes).

Prints as Markdown: the targets, errors by family, hardware, precision and quality for each holdout, the groups of
decisions, the comparison with other planners, and vTrain's steps, to which no shipped constant is fitted.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np

from craton.bench import bench_plan
from craton.bench.planner import (
    Bench,
    CaseResult,
    Holdout,
    Statistics,
    decisions,
    family_median,
    statistics,
    tables,
)
from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.calibration import Case, corpus, row_of
from craton.planning.calibration.cases import CaseMachine
from craton.planning.calibration.published_rows import corpus_path
from craton.planning.fitting import Fit
from craton.planning.software import Traits
from craton.planning.step import TRAINING_STEP, StepTerms

OTHER_HOLDOUTS: tuple[Holdout, ...] = ("model", "gpu", "release")
LARGE_LINE = 20  # rows from which a line's coverage is judged
DATA = Path(__file__).parent.parent / "data"
# Rows of data/training_results.json on which Calculon, llm-analysis and SimuMax were run (published errors, percent).
PEERS = {
    "korthikanti22-a100-22B-full": ("22B full recompute", "−1.7", "+2.7", "−8.0"),
    "korthikanti22-a100-22B-selective": ("22B selective", "+3.3", "+70.9", "−9.1"),
    "korthikanti22-a100-530B-full": ("530B full recompute", "+1.7", "+24.3", "–"),
    "korthikanti22-a100-530B-selective": ("530B selective", "−8.9", "+24.3", "+3.4"),
    "titan-8b-8g-compile": ("TorchTitan 8B FSDP-8 bf16", "+26", "+149", "−26"),
    "titan-8b-128g-compile": ("TorchTitan 8B FSDP-128 bf16", "+40", "+143", "no FSDP"),
    "titan-405b-512g-1f1b": ("TorchTitan 405B 1F1B fp8", "−48", "−70", "–"),
    "titan-405b-512g-interleaved1f1b": ("TorchTitan 405B interleaved fp8", "−35", "–", "–"),
    "nemo-24.12-h100-llama3-70b-64g-gbs128": ("NeMo 70B on 64, fp8 (another row of that table)", "+9", "−26", "+22"),
}


def main() -> None:
    group = bench_plan(corpus_path(), "group")
    family = bench_plan(corpus_path(), "family")
    given = bench_plan(corpus_path(), "family", 5)
    others = [(f"leave one {name} out", bench_plan(corpus_path(), name)) for name in OTHER_HOLDOUTS]
    print("### Bars\n")
    bars(group, family, given)
    for bench, title in (
        (group, "Leave one group out"),
        (family, "Leave one family out"),
        (given, "… with 5 runs given"),
    ):
        print(f"\n### {title}\n")
        print("| | n | median | mean | p90 | bias | inside 80 % | high/low |\n|---|--:|--:|--:|--:|--:|--:|--:|")
        print(line("all", statistics(bench.results)))
        for view, entries in tables(bench).items():
            for name, entry in entries.items():
                print(line(f"{view}: {name}", entry))
    print("\n### Intervals by holdout\n")
    intervals([("leave one group out", group), ("leave one family out", family), *others, ("five runs given", given)])
    print("\n### Decisions (leave one group out)\n")
    print("| family | GPUs | model | layouts | loss |\n|---|---|---|--:|--:|")
    for choice in decisions(group.results):
        gpus = f"{choice.num_gpus} {choice.gpu}"
        print(f"| {choice.family} | {gpus} | {choice.model} | {choice.layouts} | {choice.loss:.1%} |")
    peers(group, family)
    vtrain()
    print(f"\nskipped: {len(group.skipped)}, of quality A or B: {sum(s.quality in 'AB' for s in group.skipped)}")


def bars(group: Bench, family: Bench, given: Bench) -> None:
    dense_a = [r for r in group.results if r.case.quality == "A" and not r.case.shape.is_moe]
    moe = [r for r in group.results if r.case.shape.is_moe]
    large = [r for r in group.results if r.case.machine.num_gpus >= 256]
    right = [choice.loss <= 0.05 for choice in decisions(group.results)]
    calibrated = statistics(group.results)
    dense = statistics(dense_a)
    assert dense
    assert calibrated
    rows = [
        ("leave one group out: dense, quality A, median", dense.median, "≤ 7 %"),
        ("the same, p90", dense.p90, "≤ 20 %"),
        ("the same, median of family medians", family_median(dense_a), "≤ 9 %"),
        ("all rows, median of family medians", family_median(group.results), ""),
        ("MoE, quality A and B, median", _median(moe), "≤ 15 %"),
        ("256 GPUs or more, median", _median(large), "≤ 10 %"),
        ("leave one family out: median", _median(family.results), "≤ 18 %"),
        ("the same, MoE", _median([r for r in family.results if r.case.shape.is_moe]), "≤ 17 %"),
        ("the same, 256 GPUs or more", tables(family)["size"]["256 GPUs or more"].median, "≤ 12.5 %"),
        ("leave one family out, 5 of its rows given", _median(given.results), "≤ 10 %"),
        ("decisions within 5 % of the best measured", float(np.mean(right)), "≥ 80 %"),
        ("inside the 80 % interval, group / family left out", calibrated.inside, "72 to 92 %"),
    ]
    print("| | measured | bar |\n|---|--:|--:|")
    for name, value, bar in rows:
        print(f"| {name} | {value:.1%} | {bar} |")
    left = statistics(family.results)
    assert left
    print(f"| the same, family left out | {left.inside:.1%} | 72 to 92 % |")
    print(f"| median high/low, group left out | {calibrated.width:.2f} | ≤ 1.6 |")


def intervals(benches: list[tuple[str, Bench]]) -> None:
    """Print the error and coverage of each holdout, and the lines whose interval is too narrow or too wide."""
    print("| | n | median | MoE | 256 GPUs or more | inside 80 % | MoE | lines outside 68 to 95 %, of |")
    print("|---|--:|--:|--:|--:|--:|--:|---|")
    for name, bench in benches:
        every, views = statistics(bench.results), tables(bench)
        moe, large = views["kind"]["moe"], views["size"]["256 GPUs or more"]
        lines = {line: entry for view in views.values() for line, entry in view.items() if entry.n >= LARGE_LINE}
        outside = [f"{line} {entry.inside:.0%}" for line, entry in lines.items() if not 0.68 <= entry.inside <= 0.95]
        assert every
        medians = f"{every.median:.1%} | {moe.median:.1%} | {large.median:.1%}"
        print(
            f"| {name} | {every.n} | {medians} | {every.inside:.0%} | {moe.inside:.0%} | "
            f"{', '.join(outside) or 'none'}, of {len(lines)} |"
        )


def peers(group: Bench, family: Bench) -> None:
    print("\n### Comparison with other planners\n")
    print(
        "| row | Craton, group left out | Craton, family left out | Calculon | llm-analysis, efficiency 0.5 | SimuMax |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    by_id = {result.case.id: result for result in group.results}
    uncalibrated = {result.case.id: result for result in family.results}
    for identity, (name, *others) in PEERS.items():
        if identity in by_id:
            own = f"{by_id[identity].error:+.1%} | {uncalibrated[identity].error:+.1%}"
            print(f"| {name} | {own} | {' | '.join(others)} |")


def vtrain() -> None:
    """1,549 steps of Megatron-DeepSpeed on A100 (arXiv:2312.12391), outside every fit."""
    entries = json.loads((DATA / "vtrain_steps.json").read_text(encoding="utf-8"))
    cases = [vtrain_case(entry, f"vtrain-{index}") for index, entry in enumerate(entries)]
    fit = Fit(TRAINING_STEP, [row_of(case) for case in corpus()])
    multi = [case for case in cases if case.machine.num_gpus > 8]
    single = [case for case in cases if case.machine.num_gpus <= 8]
    print("\n### vTrain\n")
    print("| | n | median | mean | p90 | bias | inside 80 % | high/low |\n|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, chosen in (("several nodes, uncalibrated", multi), ("one node, small models, uncalibrated", single)):
        print(line(name, statistics(_results(fit, chosen))))
    shuffled = random.Random(0).sample(multi, len(multi))
    fitted = Fit(TRAINING_STEP, [row_of(case) for case in (*corpus(), *shuffled[:40])])
    print(line("several nodes, 40 rows given, the others", statistics(_results(fitted, shuffled[40:]))))
    for name, chosen in (("several nodes", multi), ("one node", single)):
        losses = [_loss(members) for members in _same_job(_results(fit, chosen)) if len(members) >= 3]
        right = sum(loss <= 0.05 for loss in losses)
        print(
            f"\nDecisions, {name}, uncalibrated: within 5 % of the best in {right} of {len(losses)}, "
            f"median loss {np.median(losses):.1%}"
        )


def vtrain_case(entry: dict[str, float], identity: str) -> Case:
    heads, hidden, gpus = int(entry["a"]), int(entry["h"]), int(entry["n"])
    shape = ModelShape(
        name=f"{hidden}x{int(entry['l'])}",
        layers=int(entry["l"]),
        hidden=hidden,
        ffn_hidden=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=51200,
        tied_embeddings=True,
        gated_mlp=False,
    )
    layout = Layout(
        pp=int(entry["pp"]),
        replicate=int(entry["dp"]),
        tp=int(entry["tp"]),
        micro_batch=int(entry["mbs"]),
        recompute="full",
        precision="fp16",
    )
    traits = Traits(attention="unfused", compiled=True, sequence_parallel=False, gradient_overlap=False)
    node = min(8, gpus)
    machine = CaseMachine("A100-80-SXM", gpus, node, node, 12.5e9, 0)  # 800 Gb/s InfiniBand a node
    batch, sequence = int(entry["gbs"]), int(entry["s"])
    return Case(
        identity,
        "vtrain",
        "",
        "A",
        "dense",
        identity,
        machine,
        shape,
        layout,
        sequence,
        batch,
        False,
        traits,
        float(entry["step_s"]),
    )


def line(name: str, entry: Statistics | None) -> str:
    assert entry
    numbers = f"{entry.median:.1%} | {entry.mean:.1%} | {entry.p90:.1%} | {entry.bias:+.1%} | {entry.inside:.0%}"
    return f"| {name} | {entry.n} | {numbers} | {entry.width:.2f} |"


def _results(fit: Fit[StepTerms], cases: list[Case]) -> list[CaseResult]:
    rows = [(case, row_of(case)) for case in cases]
    return [
        CaseResult(case, fit.predict(row.terms, row.labels, row.prior_log, row.noise, row.unshared))
        for case, row in rows
    ]


def _same_job(results: list[CaseResult]) -> list[list[CaseResult]]:
    groups = defaultdict(list)
    for result in results:
        case = result.case
        groups[(case.shape.name, case.machine.num_gpus, case.global_batch_sequences, case.sequence)].append(result)
    return list(groups.values())


def _loss(members: list[CaseResult]) -> float:
    best = min(result.case.measured_step_seconds for result in members)
    chosen = min(members, key=lambda result: result.prediction.seconds)
    return chosen.case.measured_step_seconds / best - 1.0


def _median(results: list[CaseResult]) -> float:
    entry = statistics(results)
    assert entry
    return entry.median


if __name__ == "__main__":
    main()
