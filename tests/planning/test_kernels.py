"""Kernel times: against measured curves, and the orderings a planner's search relies on."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craton.planning.rates import GpuRates, attention_seconds, gemm_seconds, grouped_gemm_seconds
from craton.planning.rates.kernels import elementwise_seconds, gpu_rates

TERA = 1e12
A100 = gpu_rates("ampere", {"bf16": 312 * TERA}, {"bf16": 271.2 * TERA}, 2.0 * TERA)
H100_PEAKS = {"bf16": 989.5 * TERA, "fp8": 1979 * TERA}
H100 = gpu_rates("hopper", H100_PEAKS, {"bf16": 794.5 * TERA, "fp8": 1402.6 * TERA}, 3.35 * TERA)
B200 = gpu_rates(
    "blackwell",
    {"bf16": 2250 * TERA, "fp8": 4500 * TERA, "fp4": 9000 * TERA},
    {"bf16": 1745 * TERA, "fp8": 3432.5 * TERA},
    8.0 * TERA,
)
GPUS = st.sampled_from([A100, H100, B200])
PRECISIONS = st.sampled_from(["fp16", "bf16", "fp8", "mxfp8", "nvfp4"])
EXTENTS = st.floats(1.0, 1e6)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "score_kernels.py"
    spec = importlib.util.spec_from_file_location("score_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["score_kernels"] = module
    spec.loader.exec_module(module)
    return module


def errors_of(benchmark: ModuleType, kind: str) -> list[float]:
    points = [p for p in benchmark.load_points() if p.kind.startswith(kind) and p.flops >= 1e9]
    assert points
    return [p.predicted / p.measured - 1 for p in points]


def test_measured_products_are_met(benchmark: ModuleType) -> None:
    errors = sorted(abs(error) for error in errors_of(benchmark, "gemm"))
    assert len(errors) > 300
    assert statistics.median(errors) < 0.10
    assert errors[int(0.9 * len(errors))] < 0.20


@pytest.mark.parametrize("precision", ["bfloat16", "bf16", "fp16", "fp8 ", "fp8_block", "nvfp4"])
def test_every_precision_of_a_product_is_met(benchmark: ModuleType, precision: str) -> None:
    assert statistics.median(abs(error) for error in errors_of(benchmark, f"gemm      {precision}")) < 0.15


@pytest.mark.parametrize("kind", ["grouped   bf16      H200", "attention bf16      H200   torch"])
def test_measured_training_kernels_are_met(benchmark: ModuleType, kind: str) -> None:
    assert statistics.median(abs(error) for error in errors_of(benchmark, kind)) < 0.10


@given(EXTENTS, EXTENTS, EXTENTS, st.floats(1.0, 8.0), PRECISIONS, GPUS)
def test_larger_products_are_never_faster(
    m: float, n: float, k: float, factor: float, precision: str, gpu: GpuRates
) -> None:
    now = gemm_seconds(m, n, k, precision, gpu)
    grouped = grouped_gemm_seconds(m, n, k, 8, precision, gpu)
    for shape in ((m * factor, n, k), (m, n * factor, k), (m, n, k * factor)):
        assert gemm_seconds(*shape, precision, gpu) >= now
        assert grouped_gemm_seconds(*shape, 8, precision, gpu) >= grouped


@given(EXTENTS, EXTENTS, EXTENTS, st.floats(1.0, 10.0), st.floats(1.0, 10.0), PRECISIONS)
def test_a_faster_card_is_never_slower(
    m: float, n: float, k: float, flops: float, bandwidth: float, precision: str
) -> None:
    faster = gpu_rates("hopper", {name: flops * peak for name, peak in H100_PEAKS.items()}, {}, bandwidth * 3.35 * TERA)
    base = gpu_rates("hopper", H100_PEAKS, {}, 3.35 * TERA)
    assert gemm_seconds(m, n, k, precision, faster) <= gemm_seconds(m, n, k, precision, base)
    tokens = 1.0 + m / 10
    assert attention_seconds(1, tokens, tokens, 32, 8, 128, faster) <= attention_seconds(
        1, tokens, tokens, 32, 8, 128, base
    )
    assert elementwise_seconds(m, n, faster) <= elementwise_seconds(m, n, base)


@given(st.floats(1.0, 1e6), st.floats(1.0, 4.0), st.floats(1.0, 256.0), st.booleans(), st.booleans(), GPUS)
def test_longer_sequences_more_heads_and_batches_are_never_faster(
    tokens: float, factor: float, width: float, causal: bool, backward: bool, gpu: GpuRates
) -> None:
    def seconds(batch: float, sequence: float, heads: float) -> float:
        return attention_seconds(batch, sequence, sequence, heads, heads, width, gpu, causal=causal, backward=backward)

    now = seconds(1, tokens, 8)
    assert seconds(factor, tokens, 8) >= now
    assert seconds(1, tokens * factor, 8) >= now
    assert seconds(1, tokens, 8 * factor) >= now


def test_small_products_waste_the_card() -> None:
    """Half of the peak needs about 2048³ (Azure, H100 fp8: 274, 1011, 1290 TFLOP/s at 1024³, 2048³, 8192³)."""
    rate = {n: 2 * n**3 / gemm_seconds(n, n, n, "fp8", H100) / TERA for n in (1024, 2048, 8192)}
    assert rate[1024] < 500
    assert rate[2048] == pytest.approx(1011, rel=0.3)
    assert rate[8192] == pytest.approx(1290, rel=0.05)


def test_few_rows_are_limited_by_memory() -> None:
    """One row through 8192 × 8192 in bf16 took 49 µs on H100 (TensorRT-LLM): its 134 MB are read once."""
    assert gemm_seconds(1, 8192, 8192, "bf16", H100) == pytest.approx(49.2e-6, rel=0.1)
    assert gemm_seconds(1, 8192, 8192, "bf16", H100) == pytest.approx(
        gemm_seconds(64, 8192, 8192, "bf16", H100), rel=0.05
    )


def test_experts_with_few_rows_pay_for_their_weights() -> None:
    one_large = gemm_seconds(8192, 4096, 7168, "bf16", H100)
    many_small = grouped_gemm_seconds(32, 4096, 7168, 256, "bf16", H100)
    assert many_small > 5 * one_large
    busiest = grouped_gemm_seconds(2048, 4096, 7168, 8, "bf16", H100, imbalance=1.5)
    assert busiest == pytest.approx(1.5 * grouped_gemm_seconds(2048, 4096, 7168, 8, "bf16", H100), rel=0.02)


def test_a_card_without_a_precision_runs_at_the_next_wider_ones_rate() -> None:
    assert A100.matrix_flops["fp8"] == A100.matrix_flops["bf16"]
    assert H100.matrix_flops["nvfp4"] == H100.matrix_flops["fp8"]
    assert B200.matrix_flops["nvfp4"] > B200.matrix_flops["fp8"] > B200.matrix_flops["bf16"]
    assert gemm_seconds(8192, 8192, 8192, "fp8", H100) < 0.65 * gemm_seconds(8192, 8192, 8192, "bf16", H100)


def test_causal_attention_costs_half_at_length_and_context_parallelism_divides_it() -> None:
    full = attention_seconds(1, 65536, 65536, 32, 8, 128, H100, causal=False)
    causal = attention_seconds(1, 65536, 65536, 32, 8, 128, H100)
    eighth = attention_seconds(1, 65536 / 8, 65536, 32, 8, 128, H100)
    assert causal == pytest.approx(full / 2, rel=0.03)
    assert eighth == pytest.approx(causal / 8, rel=0.1)


def test_flash_attention_2_does_not_use_hoppers_matrix_unit_well() -> None:
    best = attention_seconds(1, 8192, 8192, 32, 8, 128, H100)
    flash2 = attention_seconds(1, 8192, 8192, 32, 8, 128, H100, kernel="flash2")
    assert 1.6 < flash2 / best < 2.1
    on_a100 = [attention_seconds(1, 8192, 8192, 32, 8, 128, A100, kernel=kernel) for kernel in ("best", "flash2")]
    assert on_a100[0] == on_a100[1]


def test_unknown_generations_take_the_nearest_ones_constants() -> None:
    ultra = gpu_rates("blackwell-ultra", {"bf16": 2250 * TERA}, {"bf16": 1745 * TERA}, 8.0 * TERA)
    assert gemm_seconds(4096, 4096, 4096, "bf16", ultra) == gemm_seconds(4096, 4096, 4096, "bf16", B200)
    cpu = gpu_rates("cpu", {"fp32": 1e11}, {}, 2e10)
    assert gemm_seconds(512, 512, 512, "bf16", cpu) == pytest.approx(2 * 512**3 / 1e11, rel=0.1)
    assert attention_seconds(1, 512, 512, 8, 8, 64, cpu) > 0
