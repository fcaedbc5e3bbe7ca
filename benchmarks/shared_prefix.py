"""Decode attention that reads a shared prefix once, against attention that reads it for every request.

    python benchmarks/shared_prefix.py [--case NAME …] [--rounds 3] [--json FILE]

Each case answers one prompt many times (`copies`), with `shared_prefix` on and off in turns. The prompt is prefilled
once on both sides. Cases for one GPU: 8b, 8b-32, 0.6b; for a CPU: cpu, cpu-short. The default is all cases of this
machine.

`ratio` is seconds without ÷ seconds with sharing, the median over rounds, from submit to the last token; `cpu ratio` is
the same in CPU seconds of this process, which other processes on the machine disturb less. `ideal` is the ratio of the
bytes of weights and KV cache that the decode steps read. Weights are random; a GPU runs bf16, a CPU fp32 on one thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from craton.job.model import ModelShape, model_preset
from craton.ml.models import Decoder, config_from_shape
from craton.ml.serving.engine.build import build_engine
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Sampling, Submit
from craton.ml.serving.settings import EngineSettings
from craton.planning.serving import PLAIN_BYTES, ServedModel

SMALL = ModelShape("small", layers=4, hidden=256, ffn_hidden=512, heads=8, kv_heads=4, head_dim=32, vocab=1024)


@dataclass(frozen=True)
class Case:
    model: str
    copies: int
    prompt: int
    output: int
    device: str = "cuda"


CASES = {
    "8b": Case("llama-3.1-8b", 64, 4096, 1024),
    "8b-32": Case("llama-3.1-8b", 32, 4096, 1024),
    "0.6b": Case("qwen3-0.6b", 64, 4096, 1024),
    "cpu": Case("small", 32, 1024, 64, "cpu"),
    "cpu-short": Case("small", 8, 256, 64, "cpu"),
}


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--case", nargs="+", choices=CASES, help="default: all of this machine")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", help="file for the results")
    chosen = options.parse_args()
    names = chosen.case or [name for name, case in CASES.items() if case.device == device]
    if missing := [name for name in names if CASES[name].device != device]:
        print(f"error: case {missing[0]} needs a {CASES[missing[0]].device} device; this machine has {device}")
        return 2
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, one thread"
    print(f"{where}, torch {torch.__version__}, Python {platform.python_version()}")
    results = {name: measure(CASES[name], chosen.rounds) for name in names}
    for name, result in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in result.items()))
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump({name: {**asdict(CASES[name]), **result} for name, result in results.items()}, file, indent=1)
    return 0


def measure(case: Case, rounds: int) -> dict[str, Any]:
    model = make_model(case)
    wall: dict[str, list[float]] = {"on": [], "off": []}
    cpu: dict[str, list[float]] = {"on": [], "off": []}
    tokens: dict[str, list[list[int]]] = {}
    saved = 0.0
    for setting in [setting for _ in range(rounds) for setting in ("on", "off")]:
        engine = make_engine(model, case, setting)
        answer(engine, case, Sampling(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True))  # warm-up
        engine.reset()
        before = engine.stats()
        began, began_cpu = time.perf_counter(), time.process_time()
        tokens[setting] = answer(engine, case, Sampling(case.output, temperature=1.0, seed=7, ignore_eos=True))
        wall[setting].append(time.perf_counter() - began)
        cpu[setting].append(time.process_time() - began_cpu)
        if setting == "on":
            stats = engine.stats()
            saved = (stats.shared_tokens - before.shared_tokens) / (stats.context_tokens - before.context_tokens)
        del engine
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()
    equal = sum(ours == theirs for ours, theirs in zip(tokens["on"], tokens["off"], strict=True))
    return {
        "ratio": round(ratio_of(wall), 2),
        "cpu ratio": round(ratio_of(cpu), 2),
        "ideal": round(ideal(model, case), 2),
        "seconds with": round(statistics.median(wall["on"]), 2),
        "without": round(statistics.median(wall["off"]), 2),
        "share of KV cache tokens not read": round(saved, 3),
        "equal texts": f"{equal} of {case.copies}",
    }


def ratio_of(seconds: dict[str, list[float]]) -> float:
    return statistics.median(off / on for on, off in zip(seconds["on"], seconds["off"], strict=True))


def make_model(case: Case) -> Decoder:
    config = config_from_shape(SMALL if case.model == "small" else model_preset(case.model))
    with torch.device("meta"):
        model = Decoder(config)
    dtype = torch.bfloat16 if case.device == "cuda" else torch.float32
    model = model.to(dtype).to_empty(device=case.device)
    model.initialize(0)
    return model


def make_engine(model: Decoder, case: Case, setting: str) -> Engine:
    length = case.prompt + case.output + 16
    settings = EngineSettings(
        max_length=length,
        max_running=case.copies,
        blocks=0
        if case.device == "cuda"
        else (case.prompt + case.copies * (case.output + 32)) // 16 + 2 * length // 16,
        shared_prefix=setting,  # type: ignore[arg-type]
    )
    return build_engine(model, settings)


def answer(engine: Engine, case: Case, sampling: Sampling) -> list[list[int]]:
    generator = random.Random(0)
    prompt = tuple(generator.randrange(engine.vocabulary) for _ in range(case.prompt))
    tokens: list[list[int]] = [[] for _ in range(case.copies)]
    engine.submit(Submit(1, prompt, sampling, case.copies))
    while not engine.is_idle:
        for piece in engine.step():
            assert not piece.error, piece.error
            tokens[piece.index] += piece.tokens
    return tokens


def ideal(model: Decoder, case: Case) -> float:
    """Return the bytes that decode steps read without sharing, over those with sharing."""
    shape, precision = model.config.shape, "bf16" if case.device == "cuda" else "fp32"
    served = ServedModel(shape, precision)
    unread = 0.0 if shape.tied_embeddings else shape.embedding_parameters * PLAIN_BYTES[precision]
    weights = case.output * (served.weight_bytes - unread)
    shared = (case.copies - 1) * (case.prompt // 16 * 16)
    contexts = [case.copies * (case.prompt + step) for step in range(case.output)]
    without = weights + served.kv_bytes_per_token * sum(contexts)
    return without / (without - served.kv_bytes_per_token * shared * case.output)


if __name__ == "__main__":
    sys.exit(main())
