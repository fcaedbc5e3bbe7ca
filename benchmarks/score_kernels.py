"""Score the planner's kernel times against published measurements and ours.

    python benchmarks/score_kernels.py           # the table of docs/collectives.md
    python benchmarks/score_kernels.py --worst   # and the twenty worst points

Reads data/microbench.json, data/measured_ops.json and data/measured_kernels.json. `level` is the median of measured
over predicted time, which a software profile absorbs. `shape` is the remaining error without that factor. Kernels under
20 µs of the last file (60 forward and 200 backward for attention) measure the host and are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from craton.planning.rates import GpuRates, attention_seconds, gemm_seconds, grouped_gemm_seconds
from craton.planning.rates.kernels import OPERAND_BYTES, elementwise_seconds, gpu_rates

DATA = Path(__file__).parents[1] / "data"
TERA = 1e12
# Dense peaks, best published matmuls and memory bandwidths: the catalog's numbers (stas00/ml-engineering, data sheets).
GPUS: dict[str, GpuRates] = {
    "A100": gpu_rates("ampere", {"bf16": 312 * TERA}, {"bf16": 271.2 * TERA}, 2.0 * TERA),
    "H100": gpu_rates(
        "hopper", {"bf16": 989.5 * TERA, "fp8": 1979 * TERA}, {"bf16": 794.5 * TERA, "fp8": 1402.6 * TERA}, 3.35 * TERA
    ),
    "H200": gpu_rates(
        "hopper", {"bf16": 989.5 * TERA, "fp8": 1979 * TERA}, {"bf16": 794.5 * TERA, "fp8": 1453.4 * TERA}, 4.8 * TERA
    ),
    "B200": gpu_rates(
        "blackwell",
        {"bf16": 2250 * TERA, "fp8": 4500 * TERA, "fp4": 9000 * TERA},
        {"bf16": 1745 * TERA, "fp8": 3432.5 * TERA},
        8.0 * TERA,
    ),
    "GB200": gpu_rates(
        "blackwell",
        {"bf16": 2500 * TERA, "fp8": 5000 * TERA, "fp4": 10000 * TERA},
        {"bf16": 1822 * TERA, "fp8": 3615.6 * TERA},
        8.0 * TERA,
    ),
}
PRECISIONS = {"bfloat16": "bf16", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp8_block": "mxfp8", "nvfp4": "nvfp4"}


class Point(NamedTuple):
    kind: str  # row of the table
    shape: str
    flops: float
    measured: float
    predicted: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the kernel curves.")
    parser.add_argument("--worst", action="store_true", help="list the worst points")
    arguments = parser.parse_args()
    points = [point for point in load_points() if point.flops >= 1e9 or "elementwise" in point.kind]
    print_table(points)
    if arguments.worst:
        for point in sorted(points, key=lambda point: -abs(math.log(point.predicted / point.measured)))[:20]:
            error = point.predicted / point.measured - 1
            print(f"{error:+6.0%} {point.measured * 1e6:9.1f} µs  {point.kind}  {point.shape}")


def load_points() -> list[Point]:
    read = {name: json.loads((DATA / f"{name}.json").read_text()) for name in ("microbench", "measured_ops")}
    own = json.loads((DATA / "measured_kernels.json").read_text())["rows"]
    return [*_microbench(read["microbench"]["gemm"]), *_tensorrt(read["measured_ops"]["rows"]), *_torch(own)]


def print_table(points: Iterable[Point]) -> None:
    kinds: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        kinds[point.kind].append(point)
    print(f"{'from 1 GFLOP':53} {'n':>4} {'median':>7} {'p90':>6}   {'level':>5} {'shape':>6} {'p90':>6}")
    for kind, members in sorted(kinds.items()):
        level = statistics.median(point.measured / point.predicted for point in members)
        plain, shape = (
            sorted(abs(factor * point.predicted / point.measured - 1) for point in members) for factor in (1.0, level)
        )
        last = math.ceil(0.9 * len(members)) - 1
        print(
            f"{kind:53} {len(members):4} {statistics.median(plain):7.1%} {plain[last]:6.1%}   "
            f"{level:5.2f} {statistics.median(shape):6.1%} {shape[last]:6.1%}"
        )


def _microbench(rows: list[dict[str, Any]]) -> Iterable[Point]:
    for row in rows:
        name, precision = row["gpu"].split("-")[0], PRECISIONS[row["dtype"]]
        m, n, k = row["m"], row["n"], row["k"]
        flops = 2.0 * m * n * k
        predicted = gemm_seconds(m, n, k, precision, GPUS[name])
        kind = f"gemm      {row['dtype']:10}{name:6} cuBLASLt, Azure"
        yield Point(kind, f"{m}x{n}x{k}", flops, flops / (row["tflops"] * TERA), predicted)


def _tensorrt(rows: list[dict[str, Any]]) -> Iterable[Point]:
    for row in rows:
        name = row["system"].removesuffix("_sxm").upper()
        gpu, operation = GPUS[name], row["op"]
        if operation == "gemm":
            m, n, k, precision = row["m"], row["n"], row["k"], PRECISIONS[row["dtype"]]
            predicted = gemm_seconds(m, n, k, precision, gpu)
            if precision != "bf16":  # the timed operator casts its input first
                predicted += elementwise_seconds(2.0 * m * k, OPERAND_BYTES[precision] * m * k, gpu) + 4e-6
            kind = f"gemm      {row['dtype']:10}{name:6} TensorRT-LLM"
            yield Point(kind, f"{m}x{n}x{k}", 2.0 * m * n * k, row["latency_us"] / 1e6, predicted)
        elif operation in ("context_attention_causal_gqa", "context_mla_causal"):
            mla = operation == "context_mla_causal"
            precision = PRECISIONS[row["kv_dtype"]]
            heads, kv_heads = row["heads"], row["heads"] if mla else row["kv_heads"]
            width, value_dim = (192, 128) if mla else (row["head_dim"], row["head_dim"])
            predicted = attention_seconds(
                row["batch"], row["seq"], row["seq"], heads, kv_heads, width, gpu, value_dim=value_dim,
                precision=precision,
            )  # fmt: skip
            # the timed operator also rotates queries and keys and writes the cache
            projected = 2.0 * row["batch"] * row["seq"] * (heads * width + kv_heads * (width + value_dim))
            predicted += elementwise_seconds(projected, projected, gpu, kernels=3)
            flops = row["batch"] * heads * float(row["seq"]) ** 2 * (width + value_dim)
            kind = f"{'mla' if mla else 'attention':10}{precision:10}{name:6} TensorRT-LLM forward"
            yield Point(kind, f"{row['batch']}x{row['seq']} heads {heads}", flops, row["latency_us"] / 1e6, predicted)
        elif operation == "moe_grouped_gemm" and row["dtype"] in PRECISIONS and row["num_tokens"] >= 8192:
            precision, experts = PRECISIONS[row["dtype"]], row["experts"] / row["moe_ep"]
            rows_each = row["num_tokens"] * row["topk"] / row["experts"]
            hidden, inner = row["hidden"], row["inter"]
            predicted = grouped_gemm_seconds(rows_each, 2 * inner, hidden, experts, precision, gpu)
            predicted += grouped_gemm_seconds(rows_each, hidden, inner, experts, precision, gpu)
            moved = 2.0 * rows_each * experts * (4 * hidden + 3 * inner)
            predicted += elementwise_seconds(moved, 0.0, gpu, kernels=6)
            routing = "all experts" if row["moe_ep"] == 1 else "busiest of 8"
            kind = f"moe       {row['dtype']:10}{name:6} TensorRT-LLM {routing}"
            flops = 6.0 * rows_each * experts * hidden * inner
            yield Point(kind, f"{row['model']} {row['num_tokens']}", flops, row["latency_us"] / 1e6, predicted)


def _torch(rows: list[dict[str, Any]]) -> Iterable[Point]:
    gpu = GPUS["H200"]
    for row in rows:
        seconds = row.get("seconds", 0.0)
        if row["op"] in ("gemm", "grouped_gemm") and seconds > 20e-6:
            m, n, k, groups = row["m"], row["n"], row["k"], row.get("groups", 1)
            if row["op"] == "gemm":
                predicted = gemm_seconds(m, n, k, row["dtype"], gpu)
            else:
                predicted = grouped_gemm_seconds(m, n, k, groups, row["dtype"], gpu)
            kind = f"{'gemm' if groups == 1 else 'grouped':10}{row['dtype']:10}H200   torch 2.11"
            yield Point(kind, f"{groups}x{m}x{n}x{k}", 2.0 * groups * m * n * k, seconds, predicted)
        elif row["op"] == "attention" and seconds > (60e-6 if row.get("pass") == "forward" else 200e-6):
            backward = row["pass"] == "backward"
            width = row["head_dim"] + row["value_dim"]
            predicted = attention_seconds(
                row["batch"], row["sequence"], row["sequence"], row["heads"], row["kv_heads"], row["head_dim"], gpu,
                causal=row["causal"], backward=backward, value_dim=row["value_dim"],
                kernel="flash2" if row["backend"] == "flash" else "best",
            )  # fmt: skip
            flops = row["batch"] * row["heads"] * float(row["sequence"]) ** 2 * width
            kind = f"attention bf16      H200   torch 2.11 {row['backend']} {row['pass']}"
            shape = f"{row['batch']}x{row['sequence']} heads {row['heads']} width {row['head_dim']}"
            yield Point(kind, shape, flops, seconds, predicted)
        elif row["op"] == "elementwise" and seconds > 20e-6:
            predicted = elementwise_seconds(row["bytes"], 0.0, gpu)
            yield Point("elementwise         H200   torch 2.11", f"{row['bytes']} bytes", 0.0, seconds, predicted)


if __name__ == "__main__":
    main()
