"""One step of a served model: its terms against measured kernels, and what must hold for every model and layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from craton.infrastructure.catalog import gpu
from craton.job.model import MlaShape, ModelShape
from craton.planning.rates import MachineRates, machine
from craton.planning.serving.closed_load import closed_loop
from craton.planning.serving.layout import ServedLayout
from craton.planning.serving.profile import (
    ENGINE_NAMES,
    EngineProfileError,
    engine_names,
    find_engine_profile,
    load_engine_profile,
    save_engine_profile,
)
from craton.planning.serving.step_times import ServedSteps
from craton.planning.serving.terms import ServedPrecision, serving_terms, stack_terms

OPERATIONS = json.loads((Path(__file__).parents[2] / "data" / "measured_ops.json").read_text(encoding="utf-8"))["rows"]
DENSE = ModelShape("8b", 32, 4096, 14336, 32, 8, 128, 128256)
MOE = dataclasses.replace(DENSE, name="moe", experts=64, top_k=4, moe_ffn_hidden=2048, kv_heads=4)
LATENT = dataclasses.replace(MOE, name="latent", heads=64, kv_heads=64, mla=MlaShape(1536, 512, 128, 64, 128))
SHAPES = pytest.mark.parametrize("shape", [DENSE, MOE, LATENT], ids=lambda shape: shape.name)


def h200(domain: int = 8) -> MachineRates:
    return machine("H200-SXM", 8, domain, 50e9, 0)


def steps_of(shape: ModelShape) -> ServedSteps:
    terms = serving_terms(shape, h200(), ServedLayout(), ServedPrecision())
    return ServedSteps(terms, find_engine_profile("vllm", gpu("H200-SXM")).constants)


@SHAPES
def test_more_work_never_makes_a_step_shorter(shape: ModelShape) -> None:
    steps = steps_of(shape)
    batches, contexts = np.array([1.0, 2, 7, 64, 512]), np.array([1.0, 128, 4096, 65536])
    grid = steps.decode_seconds(batches[:, None], contexts[None, :])
    assert grid.shape == (5, 4)
    assert (np.diff(grid, axis=0) > 0).all()
    assert (np.diff(grid, axis=1) >= 0).all()
    mixed = steps.mixed_seconds(8.0, 1000.0, np.array([0.0, 1, 64, 512, 8192]), 8192.0)
    assert (np.diff(mixed) > 0).all()
    assert mixed[0] == pytest.approx(steps.decode_seconds(8.0, 1000.0))


@SHAPES
def test_stacked_rows_are_the_single_rows(shape: ModelShape) -> None:
    layouts = [ServedLayout(tp=tp) for tp in (1, 2, 4)] + [ServedLayout(attention_dp=4, ep=4)]
    terms = [serving_terms(shape, h200(), layout, ServedPrecision()) for layout in layouts]
    constants = find_engine_profile("unknown", gpu("H200-SXM")).constants
    stacked = ServedSteps(stack_terms(terms), constants).decode_seconds(16.0, 1000.0)
    assert stacked == pytest.approx([ServedSteps(row, constants).decode_seconds(16.0, 1000.0) for row in terms])


@SHAPES
def test_parts_add_up_to_the_step(shape: ModelShape) -> None:
    steps = steps_of(shape)
    assert sum(steps.terms(32.0, 2000.0).values()) == pytest.approx(steps.decode_seconds(32.0, 2000.0))
    assert (steps.terms(32.0, 2000.0)["experts"] > 0) == shape.is_moe


def test_a_request_waits_longer_outside_steps_where_the_host_launches_more_kernels() -> None:
    linear = dataclasses.replace(MOE, sliding_window=256, sliding_layers=24, linear_layers=24)
    deep = dataclasses.replace(DENSE, layers=80)

    def factor(shape: ModelShape, *, is_own: bool = False) -> float:
        terms = serving_terms(shape, h200(), ServedLayout(), ServedPrecision(), is_own=is_own)
        return float(terms.first_token_factor)

    assert factor(dataclasses.replace(DENSE, layers=2)) == factor(DENSE) == 1.0, "HTTP and tokenizer know no layers"
    assert factor(deep) == 2.0
    assert 1.0 < factor(MOE) < factor(linear) < factor(LATENT)
    assert factor(LATENT, is_own=True) < factor(LATENT)


def test_every_rank_holds_the_latents_of_its_requests() -> None:
    """Tensor parallelism shards grouped heads but not latents; attention data parallelism shards requests."""
    one, tp, dp = (
        serving_terms(LATENT, h200(), layout, ServedPrecision())
        for layout in (ServedLayout(), ServedLayout(tp=4), ServedLayout(attention_dp=4, ep=4))
    )
    assert tp.context_seconds == one.context_seconds
    assert dp.kv_tokens > 2.5 * tp.kv_tokens
    assert serving_terms(DENSE, h200(), ServedLayout(tp=4), ServedPrecision()).context_seconds == pytest.approx(
        serving_terms(DENSE, h200(), ServedLayout(), ServedPrecision()).context_seconds / 4
    )


def test_our_engine_reads_latents_as_others_do_and_does_not_expand_them_in_prefill() -> None:
    for layout in (ServedLayout(), ServedLayout(tp=4)):
        others, own = (
            serving_terms(LATENT, h200(), layout, ServedPrecision(), is_own=is_own) for is_own in (False, True)
        )
        assert own.context_seconds == others.context_seconds
        assert own.context_flops_seconds == others.context_flops_seconds > 0
        assert own.pair_seconds == pytest.approx(others.pair_seconds * (576 + 512) / (192 + 128))


def test_decode_attention_agrees_with_measured_kernels() -> None:
    names = {"h100_sxm": "H100-SXM", "h200_sxm": "H200-SXM", "b200_sxm": "B200"}
    errors = []
    for row in OPERATIONS:
        if row["op"] != "decode_attention_gqa" or row["system"] not in names:
            continue
        shape = ModelShape("one", 1, 8192, 8192, row["heads"], row["kv_heads"], row["head_dim"], 1000)
        precision = ServedPrecision(kv="fp8" if row["kv_dtype"] == "fp8" else "bf16")
        terms = serving_terms(shape, machine(names[row["system"]], 8, 8, 50e9, 0), ServedLayout(), precision)
        ideal = ServedSteps(terms, [1.0 if "rate" in name or "slowdown" in name else 0.0 for name in ENGINE_NAMES])
        predicted = ideal.terms(float(row["batch"]), float(row["kv_len"]))["attention"]
        errors.append(abs(float(predicted) * 1e6 / row["latency_us"] - 1.0))
    assert len(errors) > 90
    assert np.median(errors) < 0.25


def test_a_closed_loop_obeys_littles_law() -> None:
    steps = steps_of(DENSE)
    concurrency = np.array([1.0, 16, 256])
    load = closed_loop(steps, concurrency, 1000.0, 300.0)
    in_flight = load.requests_per_second * (load.steady_ttft_seconds + 299.0 * load.tpot_seconds)
    assert in_flight == pytest.approx(concurrency, rel=0.02)
    assert load.tpot_seconds[0] == pytest.approx(steps.decode_seconds(1.0, 1150.0), rel=1e-3)
    assert (np.diff(load.tpot_seconds) > 0).all()


def test_requests_beyond_the_kv_cache_wait() -> None:
    steps = steps_of(DENSE)
    fitting = steps.kv_tokens / 1150.0
    below, above = (closed_loop(steps, share * fitting, 1000.0, 300.0) for share in (0.9, 3.0))
    assert above.running == pytest.approx(fitting)
    assert above.steady_ttft_seconds > 10 * below.steady_ttft_seconds
    assert above.requests_per_second == pytest.approx(below.requests_per_second, rel=0.15)


def test_a_profile_is_the_nearest_that_was_measured() -> None:
    h100 = find_engine_profile("sglang", gpu("H200-SXM"))
    assert (h100.gpu, h100.version) == ("H200-SXM", "")
    version = find_engine_profile("sglang 0.5.9", gpu("H200-SXM"))
    assert version.version == "0.5.9"
    assert find_engine_profile("sglang 9.9", gpu("H200-SXM")) == h100
    elsewhere = find_engine_profile("sglang", gpu("L40S"))
    assert elsewhere.gpu == ""
    assert {"vllm", "sglang", "trtllm", "craton", "unknown"} <= set(engine_names())
    with pytest.raises(EngineProfileError, match=r"did you mean .*vllm"):
        find_engine_profile("vlm", gpu("H200-SXM"))


def test_what_was_never_measured_has_a_wider_interval() -> None:
    def width(engine: str, card: str) -> float:
        terms = serving_terms(DENSE, machine(card, 8, 8, 50e9, 0), ServedLayout(), ServedPrecision())
        prediction = find_engine_profile(engine, gpu(card)).predict(
            "tpot_seconds", lambda constants: ServedSteps(terms, constants).decode_seconds(16.0, 1000.0)
        )
        return prediction.high / prediction.low

    assert width("craton", "H200-SXM") < width("vllm", "H200-SXM") < width("unknown", "A100-80-SXM")


def test_a_profile_file_keeps_everything(tmp_path: Path) -> None:
    profile = find_engine_profile("vllm", gpu("B200"))
    save_engine_profile(profile, tmp_path / "mine.json")
    assert find_engine_profile(str(tmp_path / "mine.json"), gpu("B200")) == profile
    for text in ("{}", "[1]", "no json", json.dumps({"format": 1, "engine": "vllm"})):
        (tmp_path / "wrong.json").write_text(text, encoding="utf-8")
        with pytest.raises(EngineProfileError, match=r"wrong\.json"):
            load_engine_profile(tmp_path / "wrong.json")
