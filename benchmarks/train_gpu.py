"""Training steps on one GPU: Craton compared with transformers, with and without Liger kernels, in one run.

    python benchmarks/train_gpu.py OUT.json [--cases 8b:1,8b:2,3b:4,1b:8] [--weights bf16|fp32] [--fp8 tensorwise]
                                   [--systems craton,liger | craton,transformers] [--profile]

Llama shapes with an untied head, random tokens, one optimizer step without gradient accumulation or clipping (the
peers have none). TFLOP/s by 6 · (N − input embedding) + 6 · layers · heads · head_dim · sequence per token, N without
inactive experts. Systems take turns, so that thermal throttling slows all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

VOCABULARY, SEQUENCE = 128256, 4096
SHAPES = {  # layers, hidden, ffn (of one expert), heads, kv heads
    "1b": (16, 2048, 8192, 32, 8),
    "3b": (28, 3072, 8192, 24, 8),
    "8b": (32, 4096, 14336, 32, 8),
    "moe": (16, 2048, 768, 16, 4),  # as Qwen3-MoE is built, 64 experts, 8 per token: 5.5B, 1.3B active
}
EXPERTS, TOP_K, HEAD_DIM = 64, 8, 128  # of "moe"


def main() -> None:
    arguments = parse()
    rows = []
    meta = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()}
    systems = arguments.systems.split(",")
    if {"transformers", "liger"} <= set(systems):
        sys.exit("Liger changes transformers for the whole process: run them in two calls")
    for case in arguments.cases.split(","):
        name, batch = case.split(":")
        for system in systems:
            row: dict[str, Any] = {"model": name, "batch": int(batch), "system": system, "weights": arguments.weights}
            try:
                row |= measure(system, name, int(batch), arguments)
            except torch.OutOfMemoryError as error:
                row["error"] = str(error)[:120]
            rows.append(row)
            print(json.dumps(row), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            Path(arguments.out).write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--cases", default="8b:1,8b:2,3b:4,1b:8")
    parser.add_argument("--systems", default="craton,liger")
    parser.add_argument("--weights", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--fp8", default="", choices=["", "tensorwise", "rowwise"])
    parser.add_argument("--compile", action="store_true", help="Craton: torch.compile per block instead of its kernels")
    parser.add_argument("--steps", type=int, default=5, help="steps in each of three blocks; the result is the median")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def measure(system: str, name: str, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    build = {"craton": craton, "liger": transformers_with_liger, "transformers": transformers_alone}[system]
    step, parameters = build(name, batch, arguments)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(arguments.steps):
            step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / arguments.steps)
    layers, hidden, ffn, heads, _ = SHAPES[name]
    if name == "moe":
        parameters -= layers * (EXPERTS - TOP_K) * 3 * hidden * ffn
    flops = 6 * (parameters - VOCABULARY * hidden) + 6 * layers * heads * head_dim(name) * SEQUENCE
    median = statistics.median(seconds)
    tokens = batch * SEQUENCE
    result = {
        "step_seconds": round(median, 5),
        "tokens_per_second": round(tokens / median),
        "tflops": round(tokens * flops / median / 1e12, 1),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }
    if arguments.profile:
        profile(step, f"{system} {name} {batch}")
    return result


def head_dim(name: str) -> int:
    return HEAD_DIM if name == "moe" else SHAPES[name][1] // SHAPES[name][3]


def profile(step: Callable[[], None], title: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    events = [event for event in recorded.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"--- {title}: {total / 1e3:.1f} ms in kernels")
    for event in events[:32]:
        print(f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:5d} x  {event.key[:110]}")


def craton(name: str, batch: int, arguments: argparse.Namespace) -> tuple[Callable[[], None], int]:
    from craton.job.model import ModelShape
    from craton.ml.models import Decoder, DecoderConfig
    from craton.ml.models.rope import RopeConfig
    from craton.ml.training import AdamW
    from craton.ml.training.head import linear_log_prob_loss

    layers, hidden, ffn, heads, kv_heads = SHAPES[name]
    experts = {"experts": EXPERTS, "top_k": TOP_K, "moe_ffn_hidden": ffn, "qk_norm": True} if name == "moe" else {}
    shape = ModelShape(name, layers, hidden, ffn, heads, kv_heads, head_dim(name), VOCABULARY, **experts)
    with torch.device("meta"):
        model = Decoder(DecoderConfig(shape, RopeConfig(theta=500_000.0)))
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    model.initialize(0)
    if arguments.fp8:
        from craton.ml.training.float8 import convert

        convert(model, arguments.fp8)
    if arguments.compile:
        for block in model.blocks:
            block.compile()
    optimizer = AdamW(model.named_parameters(), weights=arguments.weights)
    tokens = torch.randint(0, VOCABULARY, (batch, SEQUENCE), device="cuda")
    labels = torch.randint(0, VOCABULARY, (batch * SEQUENCE,), device="cuda")
    coefficients = torch.full((batch * SEQUENCE,), -1.0 / (batch * SEQUENCE), device="cuda")

    def step() -> None:
        hidden_states = model(tokens).flatten(0, 1)
        loss, _ = linear_log_prob_loss(hidden_states, model.head_weight, labels, coefficients)
        loss.backward()
        optimizer.step(1e-4, clip=0.0)
        optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in model.parameters())


def transformers_alone(name: str, batch: int, arguments: argparse.Namespace) -> tuple[Callable[[], None], int]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    layers, hidden, ffn, heads, kv_heads = SHAPES[name]
    numbers: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    if name == "moe":
        numbers |= {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": ffn}
        config = Qwen3MoeConfig(**numbers, head_dim=HEAD_DIM, norm_topk_prob=True)
    else:
        config = LlamaConfig(**numbers, intermediate_size=ffn)
    full = arguments.weights == "fp32"
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if full else torch.bfloat16, attn_implementation="sdpa"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (batch, SEQUENCE), device="cuda")

    def step() -> None:
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            torch.autocast("cuda", torch.bfloat16, enabled=full),
        ):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, sum(parameter.numel() for parameter in model.parameters())


def transformers_with_liger(name: str, batch: int, arguments: argparse.Namespace) -> tuple[Callable[[], None], int]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3_moe

    (apply_liger_kernel_to_qwen3_moe if name == "moe" else apply_liger_kernel_to_llama)()  # for the rest of the process
    return transformers_alone(name, batch, arguments)


if __name__ == "__main__":
    sys.exit(main())
