"""Training steps on one GPU: Craton compared with transformers, with and without Liger kernels, in one run.

    python benchmarks/train_gpu.py OUT.json [--cases 8b:1,small:16/4,qwen3:4] [--weights bf16|fp32] [--fp8 tensorwise]
                                   [--systems craton,graphs,run,liger | craton,transformers] [--profile]

Shapes with an untied head, random tokens. A case is SHAPE:ROWS, the rows of one optimizer step, or
SHAPE:ROWS/MICRO_BATCH with gradient accumulation. The systems `craton` (eager), `graphs` (CUDA graphs), `liger` and
`transformers` run bare steps without clipping (the peers have none). `run` is `craton run` of the same step, with its
whole loop: loader, clipping, metrics, peer snapshots. It has fp32 master weights unless `--weights` says otherwise, and
the result is the mean of the steps after the first SETTLED_STEPS. TFLOP/s by 6 · (N − input embedding) + 6 · layers ·
heads · head_dim · sequence per token, N without inactive experts. Systems take turns, so that thermal throttling slows
all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SETTLED_STEPS = 40  # of `run`: compile, measure launches, capture graphs, measure the cost of snapshots


@dataclass(frozen=True)
class Shape:
    """A model, and the sequence it is measured with."""

    layers: int
    hidden: int
    ffn: int  # of one expert, if there are experts
    heads: int
    kv_heads: int
    vocabulary: int = 128256
    sequence: int = 4096
    head_dim: int = 0
    is_qwen: bool = False  # q/k norm
    experts: int = 0
    top_k: int = 0

    @property
    def width(self) -> int:
        return self.head_dim or self.hidden // self.heads


SHAPES = {
    "small": Shape(8, 1024, 2816, 16, 8, vocabulary=4096, sequence=1024),
    "gpt2": Shape(12, 768, 2048, 12, 12, vocabulary=50304, sequence=1024),
    "qwen3": Shape(28, 1024, 3072, 16, 8, vocabulary=151936, sequence=8192, head_dim=128, is_qwen=True),  # 0.6B
    "1b": Shape(16, 2048, 8192, 32, 8),
    "3b": Shape(28, 3072, 8192, 24, 8),
    "8b": Shape(32, 4096, 14336, 32, 8),
    # as Qwen3-MoE is built: 5.5B parameters, 1.3B active
    "moe": Shape(16, 2048, 768, 16, 4, head_dim=128, is_qwen=True, experts=64, top_k=8),
}


@dataclass(frozen=True)
class Case:
    """One step: a model, and its rows in micro-batches."""

    name: str
    rows: int
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> Case:
        name, _, size = text.partition(":")
        rows, _, micro_batch = size.partition("/")
        return cls(name, int(rows), int(micro_batch or rows))

    @property
    def shape(self) -> Shape:
        return SHAPES[self.name]

    @property
    def tokens(self) -> int:
        return self.rows * self.shape.sequence

    def micro_batches(self) -> list[Tensor]:
        """Return random tokens, [micro-batch, sequence] each."""
        shape = (self.rows, self.shape.sequence)
        return list(torch.randint(0, self.shape.vocabulary, shape, device="cuda").split(self.micro_batch))


def main() -> None:
    arguments = parse()
    rows = []
    meta = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()}
    systems = arguments.systems.split(",")
    if {"transformers", "liger"} <= set(systems):
        sys.exit("Liger changes transformers for the whole process: run them in two calls")
    for case in map(Case.parse, arguments.cases.split(",")):
        for system in systems:
            row: dict[str, Any] = {"model": case.name, "rows": case.rows, "micro_batch": case.micro_batch}
            row |= {"system": system, "weights": arguments.weights or ("fp32" if system == "run" else "bf16")}
            try:
                row |= (measure_run if system == "run" else measure)(system, case, arguments)
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
    parser.add_argument("--weights", default="", choices=["", "bf16", "fp32"])
    parser.add_argument("--fp8", default="", choices=["", "tensorwise", "rowwise"])
    parser.add_argument("--compile", action="store_true", help="Craton: torch.compile per block instead of its kernels")
    parser.add_argument("--steps", type=int, default=5, help="steps in each of three blocks; the result is the median")
    parser.add_argument("--run-steps", type=int, default=240, help="steps of `run`")
    parser.add_argument("--data", default="walks", choices=["walks", "stdlib"], help="of `run`: rows, or documents")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def measure(system: str, case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    build = {
        "craton": craton,
        "graphs": craton_with_graphs,
        "liger": transformers_with_liger,
        "transformers": transformers_alone,
    }[system]
    step, parameters = build(case, arguments)
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
    shape = case.shape
    if shape.experts:
        parameters -= shape.layers * (shape.experts - shape.top_k) * 3 * shape.hidden * shape.ffn
    attention = 6 * shape.layers * shape.heads * shape.width * shape.sequence
    flops = 6 * (parameters - shape.vocabulary * shape.hidden) + attention
    median = statistics.median(seconds)
    result = {
        "step_seconds": round(median, 5),
        "tokens_per_second": round(case.tokens / median),
        "tflops": round(case.tokens * flops / median / 1e12, 1),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }
    if arguments.profile:
        profile(step, f"{system} {case.name} {case.rows}")
    return result


def measure_run(_system: str, case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run `craton run`; return the speed that its metrics have, beside that of its plan."""
    from craton.telemetry import RunDirectory
    from craton.telemetry.files import read_lines

    shape = case.shape
    model = {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "ffn_hidden": shape.ffn,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.width,
        "vocab": shape.vocabulary,
        "qk_norm": shape.is_qwen,
    }
    if shape.experts:
        model |= {"experts": shape.experts, "top_k": shape.top_k, "moe_ffn_hidden": shape.ffn}
    data: dict[str, Any] = {"source": "craton.ml.data.patterns:walks"}
    if arguments.data == "stdlib":
        data = {"path": "stdlib", "tokenizer": "bpe:4096"}
    job = {
        "name": "bench",
        "kind": "pretrain",
        "model": model,
        "data": {**data, "sequence": shape.sequence},
        "train": {
            "global_batch_sequences": case.rows,
            "steps": arguments.run_steps,
            "weights": arguments.weights or "fp32",
        },
        "cluster": "local",
        "layout": {"micro_batch": case.micro_batch},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "craton", "run", str(path)]
        done = subprocess.run(command, env={**os.environ, "CRATON_RUNS": folder}, capture_output=True, text=True)
        if done.returncode:
            return {"error": (done.stdout + done.stderr)[-600:]}
        run = RunDirectory(Path(folder) / "bench")
        lines = [line for line in read_lines(run.metrics_path("node-0"))[0] if "run_step_seconds" in line]
        plan = json.loads(run.plan_path.read_text(encoding="utf-8"))
    steps = [line for line in lines if line["step"] > SETTLED_STEPS]
    mean = statistics.mean(line["run_step_seconds"] for line in steps)
    phases = ("data", "compute", "communication", "optimizer", "checkpoint")
    return {
        "step_seconds": round(mean, 5),
        "tokens_per_second": round(case.tokens / mean),
        "median_step_seconds": round(statistics.median(line["run_step_seconds"] for line in steps), 5),
        "phases": {name: round(statistics.mean(line[f"run_{name}_seconds"] for line in steps), 5) for name in phases},
        "planned_step_seconds": plan["step_seconds"],
        "loss": steps[-1]["run_loss"],
    }


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


def craton(case: Case, arguments: argparse.Namespace) -> tuple[Callable[[], None], int]:
    step, optimizer, parameters = craton_parts(case, arguments)
    batches, count = craton_batches(case)

    def whole_step() -> None:
        for index, batch in enumerate(batches):
            step(batch, count)
            if index < len(batches) - 1:
                optimizer.accumulate()
        optimizer.step(1e-4, clip=0.0)
        optimizer.zero_grad()

    return whole_step, parameters


def craton_with_graphs(case: Case, arguments: argparse.Namespace) -> tuple[Callable[[], None], int]:
    from craton.ml.training.graphs import MicroStepGraphs

    step, optimizer, parameters = craton_parts(case, arguments)
    batches, count = craton_batches(case)
    graphs = MicroStepGraphs("on", step, optimizer)

    def whole_step() -> None:
        if graphs.run(batches, count) is None:
            for batch in batches:
                step(batch, count)
                optimizer.zero_grad()
            return  # the first step, which only compiles
        optimizer.step(1e-4, clip=0.0)
        optimizer.zero_grad()

    return whole_step, parameters


def craton_batches(case: Case) -> tuple[list[Any], Tensor]:
    from craton.ml.training.batch import Batch

    positions = torch.arange(case.shape.sequence, device="cuda").expand(case.micro_batch, -1).contiguous()
    weight = torch.ones(positions.shape, device="cuda")
    batches = [Batch(tokens, tokens.roll(-1, 1), positions, weight) for tokens in case.micro_batches()]
    return batches, torch.tensor(float(case.tokens), device="cuda")


def craton_parts(case: Case, arguments: argparse.Namespace) -> tuple[Callable[..., dict[str, Tensor]], Any, int]:
    """Return a micro-step, the optimizer, and the number of parameters."""
    from craton.job.model import ModelShape
    from craton.ml.models import Decoder, DecoderConfig
    from craton.ml.models.rope import RopeConfig
    from craton.ml.training import AdamW
    from craton.ml.training.objectives import CROSS_ENTROPY, batch_loss

    shape = case.shape
    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {"experts": shape.experts, "top_k": shape.top_k, "moe_ffn_hidden": shape.ffn}
    numbers = (shape.layers, shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.width, shape.vocabulary)
    with torch.device("meta"):
        config = DecoderConfig(
            ModelShape(case.name, *numbers, qk_norm=shape.is_qwen, **experts), RopeConfig(theta=500_000.0)
        )
        model = Decoder(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    model.initialize(0)
    if arguments.fp8:
        from craton.ml.training.float8 import convert

        convert(model, arguments.fp8)
    if arguments.compile:
        for block in model.blocks:
            block.compile()
    optimizer = AdamW(model.named_parameters(), weights=arguments.weights or "bf16")

    def step(batch: Any, count: Tensor) -> dict[str, Tensor]:
        loss, _ = batch_loss(model, batch, CROSS_ENTROPY, count)
        loss.backward()
        return {"loss": loss.detach()}

    return step, optimizer, sum(parameter.numel() for parameter in model.parameters())


def transformers_alone(case: Case, arguments: argparse.Namespace) -> tuple[Callable[[], None], int]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    shape = case.shape
    numbers: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    if shape.experts:
        numbers |= {"num_experts": shape.experts, "num_experts_per_tok": shape.top_k}
        config = Qwen3MoeConfig(
            **numbers, moe_intermediate_size=shape.ffn, head_dim=shape.head_dim, norm_topk_prob=True
        )
    elif shape.is_qwen:
        config = Qwen3Config(**numbers, intermediate_size=shape.ffn, head_dim=shape.head_dim)
    else:
        config = LlamaConfig(**numbers, intermediate_size=shape.ffn)
    full = arguments.weights == "fp32"
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if full else torch.bfloat16, attn_implementation="sdpa"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = case.micro_batches()

    def step() -> None:
        for tokens in batches:
            with (
                sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
                torch.autocast("cuda", torch.bfloat16, enabled=full),
            ):
                loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, sum(parameter.numel() for parameter in model.parameters())


def transformers_with_liger(case: Case, arguments: argparse.Namespace) -> tuple[Callable[[], None], int]:
    from liger_kernel.transformers import (
        apply_liger_kernel_to_llama,
        apply_liger_kernel_to_qwen3,
        apply_liger_kernel_to_qwen3_moe,
    )

    if case.shape.experts:
        apply_liger_kernel_to_qwen3_moe()  # for the rest of the process
    elif case.shape.is_qwen:
        apply_liger_kernel_to_qwen3()
    else:
        apply_liger_kernel_to_llama()
    return transformers_alone(case, arguments)


if __name__ == "__main__":
    sys.exit(main())
