"""Steps of Craton's engine on one thread of this CPU, beside the plan: the source of its profile on a CPU.

    python benchmarks/serving_cpu.py [--model NAME …] [--json FILE]

Every model decodes and prefills several batches, in fp32 and bf16, with random weights. Times are CPU seconds of this
process: of decode the lower quartile of the steps, of prefill the sum of the steps until all prompts are computed.
Planned: the profile of Craton's engine on a CPU, over the memory bandwidth and FLOP/s that one thread reaches now.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from typing import Any

import torch

from craton.job.model import ModelShape, model_preset
from craton.ml.models import Decoder, config_from_shape
from craton.ml.serving.engine import build_engine, measured_machine
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Sampling, Submit
from craton.ml.serving.settings import EngineSettings
from craton.planning.rates import MachineRates
from craton.planning.serving import ServedModel, own_steps

SHAPES = {
    "tiny": ModelShape("tiny", layers=2, hidden=64, ffn_hidden=128, heads=4, kv_heads=2, head_dim=16, vocab=512),
    "small": ModelShape("small", layers=4, hidden=256, ffn_hidden=512, heads=8, kv_heads=4, head_dim=32, vocab=1024),
    "mid": ModelShape("mid", layers=12, hidden=512, ffn_hidden=2048, heads=8, kv_heads=4, head_dim=64, vocab=8192),
    "qwen3-0.6b": model_preset("qwen3-0.6b"),
}
LOADS = ((1, 64), (1, 512), (1, 1500), (8, 64), (32, 16))  # requests and prompt tokens
CHUNK, OUTPUT = 512, 20  # tokens
ROUNDS = 2


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", nargs="+", choices=SHAPES, default=["tiny", "small", "mid"])
    options.add_argument("--json", help="file for the results")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, one thread, torch {torch.__version__}, Python {platform.python_version()}")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        machine = measured_machine(torch.device("cpu"), dtype)
        for name in chosen.model:
            for requests, prompt in LOADS:
                rows.append(row_of(SHAPES[name], dtype, machine, requests, prompt))
                print(
                    "  ".join(
                        f"{key} {value:.3g}" if isinstance(value, float) else value for key, value in rows[-1].items()
                    )
                )
    for kind in ("decode", "prefill"):
        ratios = [row[f"planned_{kind}"] / row[kind] for row in rows]
        errors = statistics.median(abs(ratio - 1.0) for ratio in ratios)
        print(f"{kind}: planned / measured {min(ratios):.2f} to {max(ratios):.2f}, median error {errors:.0%}")
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def row_of(shape: ModelShape, dtype: torch.dtype, machine: MachineRates, requests: int, prompt: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = Decoder(config_from_shape(shape))
    model = model.to(dtype).to_empty(device="cpu")
    model.initialize(0)
    blocks = requests * (prompt + OUTPUT + 32) // 16 + 2 * 2048 // 16
    settings = EngineSettings(2048, requests, CHUNK, blocks=blocks, shared_prefix="off", overlap=False)
    engine = build_engine(model, settings)
    found = [times_of(engine, requests, prompt, seed) for seed in range(ROUNDS + 1)][1:]
    decode = statistics.quantiles([seconds for steps, _ in found for seconds in steps], n=4)[0]
    steps = own_steps(
        ServedModel(shape, "fp32" if dtype == torch.float32 else "bf16"),
        machine,
        step_tokens=CHUNK,
        max_running=requests,
    )
    return {
        "model": f"{shape.name} {str(dtype).removeprefix('torch.')}",
        "load": f"{requests} x {prompt}",
        "decode": decode,
        "planned_decode": float(steps.decode_seconds(float(requests), prompt + OUTPUT / 2)),
        "prefill": min(seconds for _, seconds in found),
        "planned_prefill": float(steps.prompts_seconds(float(requests * prompt), float(prompt))),
    }


def times_of(engine: Engine, requests: int, prompt: int, seed: int) -> tuple[list[float], float]:
    """Return the seconds of steps in decode, and of all steps in prefill together."""
    generator = random.Random(seed)
    for number in range(requests):
        tokens = tuple(generator.randrange(engine.vocabulary) for _ in range(prompt))
        engine.submit(Submit(number, tokens, Sampling(OUTPUT, 1.0, seed=number, ignore_eos=True)))
    decode, prefill = [], 0.0
    before, last = engine.stats().step_tokens, time.process_time()
    while not engine.is_idle:
        engine.step()
        after, now = engine.stats().step_tokens, time.process_time()
        if after - before == requests:
            decode.append(now - last)
        elif after > before:
            prefill += now - last
        before, last = after, now
    return decode, prefill


if __name__ == "__main__":
    main()
