"""Convergence of fp8 compared with bf16: the loss of the same model on the same text, step by step, on one GPU.

    python benchmarks/train_fp8_curve.py OUT.json [--model llama-3.1-8b] [--steps 200] [--batch 1] [--recipe tensorwise]

Three runs from the same weights over the same samples: bf16, bf16 again with other bits in stochastic rounding, and
fp8. The two bf16 runs show how much equal runs differ; the difference of fp8 is compared with that. Text: the Python
sources of the interpreter.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch

from craton.job import parse_job
from craton.job.model import model_preset
from craton.ml.data import Loader, open_source, prepare
from craton.ml.models import Decoder, config_from_shape
from craton.ml.training import AdamW, Batch
from craton.ml.training.float8 import convert
from craton.ml.training.head import linear_log_prob_loss

SEQUENCE, WARMUP, LEARNING_RATE = 4096, 20, 1e-4
LAST = 50  # steps whose mean is compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--recipe", default="tensorwise", choices=["tensorwise", "rowwise"])
    arguments = parser.parse_args()
    losses = {
        "bf16": run(arguments, "", seed=0),
        "bf16 again": run(arguments, "", seed=1),
        f"fp8 {arguments.recipe}": run(arguments, arguments.recipe, seed=0),
    }
    plain, again, fp8 = losses.values()
    ends = [statistics.mean(each[-LAST:]) for each in losses.values()]
    apart = [statistics.mean(abs(a - b) for a, b in zip(plain, other, strict=True)) for other in (again, fp8)]
    print(
        f"mean loss of the last {LAST} steps: " + ", ".join(f"{n} {e:.4f}" for n, e in zip(losses, ends, strict=True))
    )
    print(f"mean distance of a step's loss from bf16: bf16 again {apart[0]:.4f}, fp8 {apart[1]:.4f}")
    meta = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()}
    text = json.dumps({"meta": meta, "arguments": vars(arguments), "losses": losses}, indent=1)
    Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace, recipe: str, seed: int) -> list[float]:
    job = parse_job(
        f"""
kind: pretrain
model: {arguments.model}
data: {{path: stdlib, tokenizer: "bpe:16384", sequence: {SEQUENCE}}}
train: {{global_batch_sequences: {arguments.batch}, steps: {arguments.steps}, weights: bf16}}
cluster: p5en.48xlarge x 1
"""
    )
    prepare(job)
    with torch.device("meta"):
        model = Decoder(config_from_shape(model_preset(arguments.model)))
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    model.initialize(0)
    if recipe:
        convert(model, recipe)
    optimizer = AdamW(model.named_parameters(), weights="bf16", seed=seed)
    source = open_source(job, vocab=model_preset(arguments.model).vocab)
    losses = []
    start = time.perf_counter()
    with Loader(source, arguments.batch, 0, 1, arguments.batch) as loader:
        for step in range(1, arguments.steps + 1):
            batch = Batch.from_arrays(loader.next()[0]).pin().to("cuda")
            hidden = model(batch.tokens, batch.positions, batch.documents).flatten(0, 1)
            coefficients = -batch.weight.flatten() / batch.count
            loss, _ = linear_log_prob_loss(hidden, model.head_weight, batch.labels.flatten(), coefficients)
            loss.backward()
            optimizer.step(LEARNING_RATE * min(1.0, step / WARMUP), clip=1.0)
            optimizer.zero_grad()
            losses.append(loss.detach())
    values = [float(loss) for loss in losses]
    seconds = (time.perf_counter() - start) / arguments.steps
    print(
        f"{recipe or 'bf16'} seed {seed}: {seconds:.3f} s a step, loss {values[0]:.3f} to {values[-1]:.3f}", flush=True
    )
    del model, optimizer, hidden, loss, batch
    gc.collect()
    torch.cuda.empty_cache()
    return values


if __name__ == "__main__":
    main()
