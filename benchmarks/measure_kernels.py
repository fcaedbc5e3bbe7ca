"""Time matmuls, grouped matmuls, attention and element-wise passes on this machine's GPU and write one JSON file.

    python benchmarks/measure_kernels.py OUT.json

Needs a CUDA build of torch, but not craton. Uses random data (power and clock depend on the data), operands from a ring
of buffers larger than the L2 cache, and the median of several timed batches after a warm-up. The file of an H200 ships
as data/measured_kernels.json; benchmarks/score_kernels.py scores the planner's curves against it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

GEMM_SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (7168, 8192), (8192, 3584)]
GEMM_SHAPES += [(1280, 8192), (8192, 1024), (2048, 2048), (1024, 1024), (2304, 768), (128256, 4096), (16032, 8192)]
L2_BYTES = 100e6


def main(path: str) -> None:
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for measure in (launches, elementwise, gemms, quantisation, fp8, grouped, attention, sustained):
        before = len(rows)
        measure(rows)
        print(measure.__name__, len(rows) - before, flush=True)
    meta = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    meta |= {"date": date.today().isoformat(), "command": "python benchmarks/measure_kernels.py"}
    with open(path, "w") as file:
        file.write(json.dumps({"meta": meta, "rows": rows}).replace('{"op"', '\n{"op"') + "\n")


def seconds_of(call: Callable[[int], object], batches: int = 5, target: float = 4e-3) -> float:
    """Return the median seconds of one call; `call` gets a counter to rotate its buffers."""
    for index in range(3):
        call(index)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def batch(repeats: int) -> float:
        start.record()
        for index in range(repeats):
            call(index)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    repeats = max(2, min(200, int(target / batch(2))))
    return statistics.median(batch(repeats) for _ in range(batches))


def ring(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Return enough copies of one operand that a reused one has left the L2 cache."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    count = max(1, min(16, int(L2_BYTES / size) + 1))
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.5).to(dtype) for _ in range(count)]


def launches(rows: list[dict[str, Any]]) -> None:
    tiny = torch.zeros(32, device="cuda")
    rows.append({"op": "launch", "seconds": seconds_of(lambda _: tiny.add_(1.0), target=20e-3)})


def elementwise(rows: list[dict[str, Any]]) -> None:
    for mebibytes in (1, 4, 16, 64, 256, 1024, 4096):
        elements = mebibytes * 2**19
        sources = ring(elements)
        out = torch.empty(elements, device="cuda", dtype=torch.bfloat16)
        count = len(sources)
        seconds = seconds_of(lambda i, s=sources, o=out, c=count: torch.add(s[i % c], 1.0, out=o))
        rows.append({"op": "elementwise", "bytes": 4 * elements, "seconds": seconds})
        hidden = 4096
        view = [source.view(-1, hidden) for source in sources]
        weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        norm = seconds_of(lambda i, s=view, w=weight, c=count: torch.nn.functional.rms_norm(s[i % c], (4096,), w))
        rows.append({"op": "rms_norm", "bytes": 4 * elements, "seconds": norm})


def product(m: int, n: int, k: int, kind: str) -> float:
    """forward: x[m,k] w[n,k]^T; input gradient: g[m,k] w[k,n]; weight gradient: g[k,m]^T x[k,n]."""
    left = ring(m, k) if kind != "weight" else [tensor.t() for tensor in ring(k, m)]
    right = [tensor.t() for tensor in ring(n, k)] if kind == "forward" else ring(k, n)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return seconds_of(lambda i: torch.mm(left[i % len(left)], right[i % len(right)], out=out))


def gemms(rows: list[dict[str, Any]]) -> None:
    for m in (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768):
        for n, k in GEMM_SHAPES:
            if n * m > 2**32:
                continue
            rows.append({"op": "gemm", "dtype": "bf16", "m": m, "n": n, "k": k, "seconds": product(m, n, k, "forward")})
    for m, n, k in ((8192, 4096, 4096), (8192, 4096, 28672), (4096, 8192, 8192), (2048, 8192, 1280)):
        row = {"op": "gemm", "dtype": "bf16", "kind": "input", "m": m, "n": n, "k": k}
        rows.append({**row, "seconds": product(m, n, k, "input")})
    for m, n, k in ((4096, 4096, 8192), (28672, 4096, 8192), (8192, 8192, 4096), (1280, 8192, 2048)):
        row = {"op": "gemm", "dtype": "bf16", "kind": "weight", "m": m, "n": n, "k": k}
        rows.append({**row, "seconds": product(m, n, k, "weight")})


def quantisation(rows: list[dict[str, Any]]) -> None:
    for m in range(1024, 3200, 128):
        rows.append({"op": "gemm", "dtype": "bf16", "kind": "sweep", "m": m, "n": 4096, "k": 4096})
        rows[-1]["seconds"] = product(m, 4096, 4096, "forward")
    for k in (128, 256, 512, 1024, 2048, 4096, 16384):
        rows.append({"op": "gemm", "dtype": "bf16", "kind": "sweep", "m": 4096, "n": 4096, "k": k})
        rows[-1]["seconds"] = product(4096, 4096, k, "forward")


def fp8(rows: list[dict[str, Any]]) -> None:
    one = torch.ones((), device="cuda")
    for m in (256, 1024, 2048, 4096, 8192, 16384):
        for n, k in GEMM_SHAPES:
            left = ring(m, k, dtype=torch.float8_e4m3fn)
            right = [tensor.t() for tensor in ring(n, k, dtype=torch.float8_e4m3fn)]

            def call(i: int, a: list[torch.Tensor] = left, b: list[torch.Tensor] = right) -> torch.Tensor:
                return torch._scaled_mm(a[i % len(a)], b[i % len(b)], one, one, out_dtype=torch.bfloat16)

            rows.append({"op": "gemm", "dtype": "fp8", "m": m, "n": n, "k": k, "seconds": seconds_of(call)})


def grouped(rows: list[dict[str, Any]]) -> None:
    """Spread rows evenly over the experts of one launch, as after a balanced dispatch."""
    for experts, n, k in ((8, 14336, 4096), (16, 3072, 4096), (32, 4096, 7168), (128, 1536, 2048), (64, 2816, 2048)):
        weights = ring(experts, n, k)
        for per_expert in (64, 128, 256, 512, 1024, 4096):
            tokens = ring(experts * per_expert, k)
            ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * per_expert

            def call(
                i: int, x: list[torch.Tensor] = tokens, w: list[torch.Tensor] = weights, e: torch.Tensor = ends
            ) -> torch.Tensor:
                return torch._grouped_mm(x[i % len(x)], w[i % len(w)].transpose(-2, -1), offs=e)

            row = {"op": "grouped_gemm", "dtype": "bf16", "groups": experts, "m": per_expert, "n": n, "k": k}
            rows.append({**row, "seconds": seconds_of(call)})


def attention(rows: list[dict[str, Any]]) -> None:
    shapes = [(1, s, h, kv, 128, 128, True) for h, kv in ((32, 8), (8, 8), (64, 8)) for s in (512, 2048, 8192, 32768)]
    shapes += [(b, s, 32, 8, 128, 128, True) for b, s in ((8, 1024), (16, 512), (4, 4096))]
    shapes += [(2, s, 32, 32, 64, 64, True) for s in (512, 2048, 8192)] + [(2, 2048, 12, 12, 64, 64, True)]
    shapes += [(2, s, 32, 32, 128, 128, False) for s in (1024, 4096, 8192)]
    shapes += [(1, s, 128, 128, 192, 128, True) for s in (1024, 4096)] + [(1, 4096, 16, 16, 192, 128, True)]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for batch, sequence, heads, kv_heads, head_dim, value_dim, causal in shapes:
            row: dict[str, Any] = {"op": "attention", "backend": backend.name.lower().split("_")[0], "batch": batch}
            row |= {"sequence": sequence, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            row |= {"value_dim": value_dim, "causal": causal}
            try:
                forward, backward = attention_passes(backend, row)
            except RuntimeError as error:
                rows.append({**row, "error": str(error).splitlines()[0][:100]})
                continue
            rows.append({**row, "pass": "forward", "seconds": forward})
            rows.append({**row, "pass": "backward", "seconds": backward})


def attention_passes(backend: SDPBackend, row: dict[str, Any]) -> tuple[float, float]:
    def tensor(heads: int, width: int) -> torch.Tensor:
        shape = (row["batch"], row["sequence"], heads, width)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    query, key = tensor(row["heads"], row["head_dim"]), tensor(row["kv_heads"], row["head_dim"])
    value = tensor(row["kv_heads"], row["value_dim"])
    with sdpa_kernel(backend):

        def forward(_: int) -> torch.Tensor:
            grouped_heads = row["heads"] != row["kv_heads"]
            return scaled_dot_product_attention(query, key, value, is_causal=row["causal"], enable_gqa=grouped_heads)

        forward_seconds = seconds_of(forward, batches=3)
        out = forward(0)
        gradient = torch.randn_like(out)
        inputs = (query, key, value)
        backward_seconds = seconds_of(
            lambda _: torch.autograd.grad(out, inputs, gradient, retain_graph=True), batches=3
        )
    return forward_seconds, backward_seconds


def sustained(rows: list[dict[str, Any]]) -> None:
    """Run the same matmul for two seconds without a pause: unlike the short benchmark, at the power limit."""
    for n in (4096, 8192, 16384):
        left, right = ring(n, n), ring(n, n)
        out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
        short = seconds_of(lambda i, a=left, b=right, o=out: torch.mm(a[0], b[0].t(), out=o))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        repeats = int(2.0 / short)
        start.record()
        for _ in range(repeats):
            torch.mm(left[0], right[0].t(), out=out)
        end.record()
        end.synchronize()
        row = {"op": "sustained_gemm", "dtype": "bf16", "m": n, "n": n, "k": n, "short_seconds": short}
        rows.append({**row, "seconds": start.elapsed_time(end) / 1e3 / repeats})


if __name__ == "__main__":
    main(sys.argv[1])
