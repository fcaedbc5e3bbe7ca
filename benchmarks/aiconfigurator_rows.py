"""Plans of served models beside those of aiconfigurator, row by row: `python benchmarks/aiconfigurator_rows.py PYTHON`.

PYTHON: the interpreter of an environment with `pip install aiconfigurator==0.12.0`, or docs/measurements.md, which has
its answers and gets our new predictions. Rows: closed loads of data/inference_results.json on replicas whose layout is
stated, without pools. Ours are predicted with the row's group left out (ten minutes), or read from what `craton bench
plan data/inference_results.json --json` printed (`--ours FILE`). `--rows N`: the first N only. Prints the tables of
docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any

METRICS = {"tpot_seconds": "tpot", "ttft_seconds": "ttft"}  # ours → theirs, in milliseconds
SYSTEMS = {"H200-SXM": "h200_sxm", "H100-SXM": "h100_sxm", "B200": "b200_sxm", "B300": "b300_sxm"}
KV_MODES = {"bf16": "bfloat16", "fp8": "fp8"}
# (our name, weights) → the checkpoint that their configuration comes from.
CHECKPOINTS = {
    ("DeepSeek-R1", "fp8"): "deepseek-ai/DeepSeek-R1",
    ("DeepSeek-R1", "nvfp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("DeepSeek-V3", "fp8"): "deepseek-ai/DeepSeek-V3",
    ("DeepSeek-V3", "nvfp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("GLM-5", "fp8"): "zai-org/GLM-5-FP8",
    ("GLM-5", "nvfp4"): "nvidia/GLM-5-NVFP4",
    ("Kimi-K2.5", "nvfp4"): "nvidia/Kimi-K2.5-NVFP4",
    ("Meta-Llama-3.1-70B", "fp8"): "nvidia/Llama-3.1-70B-Instruct-FP8",
    ("Meta-Llama-3.1-8B", "bf16"): "meta-llama/Meta-Llama-3.1-8B",
    ("Meta-Llama-3.1-8B", "fp8_block"): "meta-llama/Meta-Llama-3.1-8B",
    ("MiniMax-M2.5", "fp8"): "MiniMaxAI/MiniMax-M2.5",
    ("MiniMax-M2.5", "nvfp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("Qwen3-32B", "fp8"): "Qwen/Qwen3-32B-FP8-Static-PerTensor",
    ("Qwen3.5-397B-A17B", "bf16"): "Qwen/Qwen3.5-397B-A17B",
    ("Qwen3.5-397B-A17B", "fp8"): "Qwen/Qwen3.5-397B-A17B",
    ("Qwen3.5-397B-A17B", "nvfp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("gpt-oss-120b", "bf16"): "openai/gpt-oss-120b",
}
# Precisions that these configurations do not have.
MODES = {
    ("Meta-Llama-3.1-8B", "fp8_block"): {"gemm_quant_mode": "fp8_block"},
    ("Qwen3.5-397B-A17B", "fp8"): {"gemm_quant_mode": "fp8_block", "moe_quant_mode": "fp8_block"},
}
NAMES, COLUMNS = 5, 11  # of a printed row
HEADER = (
    "| engine, GPU | model, weights | in / out | users | layout | TPOT ms: measured | ours | theirs "
    "| TTFT ms: measured | ours | theirs |\n|---|---|--:|--:|---|--:|--:|--:|--:|--:|--:|"
)
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--ours", metavar="FILE", type=Path)
    parser.add_argument("--rows", type=int)
    options = parser.parse_args()
    asked = dict(list(questions().items())[: options.rows])
    answers = printed_answers(options.python, asked) if options.python.endswith(".md") else ask(options.python, asked)
    ours = {(case["id"], case["metric"]): case for case in our_cases(options.ours)}
    rows = []
    for name, answer in answers.items():
        pair = [ours.get((name, metric)) for metric in METRICS]
        if "error" not in answer and all(pair):
            theirs = [answer[key] / 1e3 for key in METRICS.values()]
            rows.append((asked[name], [(each["measured"], each["predicted"]) for each in pair if each], theirs))
    print_summary(rows)
    print("\n" + HEADER)
    print("\n".join(row_lines(rows)))
    if options.python.endswith(".md"):
        renew(Path(options.python), row_lines(rows))


def renew(page: Path, new_lines: list[str]) -> None:
    """Replace the rows of a page."""
    text = page.read_text(encoding="utf-8")
    before, _, after = text.partition(HEADER)
    page.write_text(before + "\n".join([HEADER, *new_lines]) + "\n\n" + after.partition("\n\n")[2], encoding="utf-8")


def our_cases(file: Path | None) -> list[dict[str, Any]]:
    from craton.bench import bench_inference, inference_json
    from craton.planning.serving.engine_fitting import serving_corpus_path

    document = json.loads(file.read_text()) if file else inference_json(bench_inference(serving_corpus_path(), "group"))
    cases: list[dict[str, Any]] = document["cases"]
    return cases


def ask(python: str, asked: dict[str, Any]) -> dict[str, Any]:
    process = subprocess.run(
        [python, __file__, "--answer"], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
    )
    answers: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    unanswered = Counter(answer["error"][:80] for answer in answers.values() if "error" in answer)
    seconds = median(answer["seconds"] for answer in answers.values())
    print(f"{len(answers) - unanswered.total()} of {len(answers)} answered, {seconds:.1f} s each; not: {unanswered}")
    return answers


def printed_answers(page: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answers that a page has in its rows."""
    printed = {}
    for line in Path(page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == COLUMNS and cells[0].partition(",")[0] in ENGINES:
            printed[tuple(cells[:NAMES])] = [float(cells[place].replace(",", "")) for place in (7, 10)]
    return {
        name: dict(zip(METRICS.values(), printed[key], strict=True))
        for name, each in asked.items()
        if (key := row_names(each)) in printed
    }


def questions() -> dict[str, dict[str, Any]]:
    """Return what is asked of each pair of TPOT and TTFT, by the row's name."""
    from craton.planning.serving.engine_fitting import serving_corpus

    found = {}
    for case in serving_corpus():
        load = case.load
        if case.open_fields or load.kind != "closed" or case.prefill is not None or case.metric not in METRICS:
            continue
        layout, stored = case.layouts[0], case.precision
        found[case.id] = {
            "engine": case.engine,
            "gpu": case.gpu,
            "model": case.shape.name,
            "weights": stored.weights,
            "experts": stored.experts,
            "kv": stored.kv,
            "layout": [layout.tp, layout.pp, layout.ep, layout.attention_dp, layout.replicas],
            "is_moe": case.shape.is_moe,
            "prompt": round(load.prompt),
            "output": round(load.output),
            "users": round(load.concurrency),
            "drafts": [load.draft_tokens, load.accepted_tokens],
        }
    return found


def answer() -> None:
    """Answer the questions on standard input with aiconfigurator; its logs are not ours."""
    import logging

    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

    logging.disable(logging.CRITICAL)
    answers = {}
    for name, asked in json.load(sys.stdin).items():
        key, (tp, pp, ep, attention_dp, replicas) = (asked["model"], asked["weights"]), asked["layout"]
        settings = {
            **{"backend_name": asked["engine"], "isl": asked["prompt"], "osl": asked["output"]},
            **{"tp_size": tp, "pp_size": pp, "attention_dp_size": attention_dp},
            "batch_size": max(1, round(asked["users"] / replicas / attention_dp)),
            "kvcache_quant_mode": KV_MODES[asked["kv"]],
            **MODES.get(key, {}),
        }
        if asked["is_moe"]:
            settings |= {"moe_tp_size": tp * attention_dp // ep, "moe_ep_size": ep}
        if asked["drafts"][0]:
            settings |= {"nextn": int(asked["drafts"][0]), "nextn_accepted": asked["drafts"][1] - 1.0}
        started = time.monotonic()
        try:
            found = cli_estimate(CHECKPOINTS[key], SYSTEMS[asked["gpu"]], **settings)
            answers[name] = {"ttft": found.ttft, "tpot": found.tpot}
        except Exception as error:  # noqa: BLE001 -- what it cannot answer is part of the result
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
        answers[name]["seconds"] = time.monotonic() - started
    print(json.dumps(answers))


def print_summary(rows: list[Any]) -> None:
    print("\n| slice | rows | TPOT median error, ours / theirs | mean | within 20 % | TTFT median error | mean |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for engine, title in {"": "all", **ENGINES}.items():
        chosen = [row for row in rows if engine in ("", row[0]["engine"])]
        if not chosen:
            continue
        cells = [str(len(chosen))]
        for place in range(len(METRICS)):
            errors = [
                (abs(ours[place][1] / ours[place][0] - 1.0), abs(theirs[place] / ours[place][0] - 1.0))
                for _, ours, theirs in chosen
            ]
            columns = list(zip(*errors, strict=True))
            statistics = [median, fmean]
            if place == 0:
                statistics.append(lambda column: fmean(error < 0.2 for error in column))
            cells += [" / ".join(f"{100 * each(column):.1f} %" for column in columns) for each in statistics]
        print(f"| {title} | " + " | ".join(cells) + " |")
    for place, metric in enumerate(("TPOT", "TTFT")):
        closer = sum(
            abs(ours[place][1] - ours[place][0]) < abs(theirs[place] - ours[place][0]) for _, ours, theirs in rows
        )
        print(f"{metric}: ours is closer in {closer} of {len(rows)}")


def row_lines(rows: list[Any]) -> list[str]:
    lines = []
    order = ("engine", "gpu", "model", "weights", "prompt", "output", "users")
    for asked, ours, theirs in sorted(rows, key=lambda row: [row[0][name] for name in order]):
        numbers = [number for pair, other in zip(ours, theirs, strict=True) for number in (*pair, other)]
        cells = [f"{1e3 * number:,.0f}" if number >= 0.1 else f"{1e3 * number:.3g}" for number in numbers]
        lines.append("| " + " | ".join([*row_names(asked), *cells]) + " |")
    return lines


def row_names(asked: dict[str, Any]) -> tuple[str, ...]:
    tp, pp, ep, attention_dp, _ = asked["layout"]
    sizes = {"ep": ep, "dp": attention_dp, "pp": pp}
    layout = " ".join([f"tp {tp}", *(f"{name} {size}" for name, size in sizes.items() if size > 1)])
    return (
        f"{asked['engine']}, {asked['gpu']}",
        f"{asked['model']}, {asked['experts'] or asked['weights']}",
        f"{asked['prompt']:,} / {asked['output']:,}",
        f"{asked['users']:,}",
        layout,
    )


if __name__ == "__main__":
    answer() if sys.argv[1:] == ["--answer"] else main()
