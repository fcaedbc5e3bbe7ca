"""Cost of checkpoints on a GPU: a 1B model saves every 20 steps and resumes from each tier.

    python benchmarks/checkpoint_gpu.py [OUT.json] [--model llama-3.2-1b] [--batch 8] [--folder DIR] [--s3 PREFIX]

Runs of the same steps, one after the other: without saves; with saves to a local disk every 20 steps, to a shared
folder every 40 and to S3 every 80; and without saves again. The result is the mean step, including the first save. Then
training resumes from each tier alone, and its first loss is compared with that of the other tiers: from the same state
it is bitwise equal, while later steps on a GPU are not. Without --s3, a moto server on this machine takes a minute or
more for each save of a 1B model. Text: the Python sources of the interpreter.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml
from checkpoint import start_server

from craton.job import load_job
from craton.ml.data import prepare
from craton.ml.training import Trainer
from craton.ml.training.build import RankIdentity, build
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines
from craton.telemetry.rank import LedgerClock, Recorder

STOP, STEPS = 100, 102
WARMUP = 10
GIGA = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--folder", help="fast disk with space for four copies of the state")
    parser.add_argument("--s3", help="writable prefix; default: a moto server on this machine")
    arguments = parser.parse_args()
    prefix, server = (arguments.s3, None) if arguments.s3 else start_server()
    try:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows = compare(Path(folder), prefix, arguments.model, arguments.batch)
    finally:
        if server is not None:
            server.kill()
            server.wait()
    rows |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()}
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def compare(folder: Path, prefix: str, model: str, batch: int) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = [
        {"to": "nvme", "every_steps": 20, "keep": 1},
        {"to": "shared", "every_steps": 40, "keep": 1},
        {"to": prefix, "every_steps": 80, "keep": 1},
    ]
    never = [{"to": "shared", "keep": 1}]
    document = {
        "kind": "pretrain",
        "model": model,
        "data": {"path": "stdlib", "tokenizer": "bpe:16384", "sequence": 4096},
        "train": {"global_batch_sequences": batch, "steps": STEPS, "precision": "bf16", "weights": "bf16"},
        "cluster": "p5en.48xlarge x 1",
        "layout": {"micro_batch": batch},
    }
    before = train(folder, "before", document, never, STEPS)
    shutil.rmtree(folder / "before")
    saving = train(folder, "saving", document, tiers, STOP)
    again = train(folder, "again", document, never, STOP)
    after = [train(folder, "saving", document, [tier], STEPS) for tier in tiers]
    plain = statistics.mean((before["mean_step_seconds"], again["mean_step_seconds"]))
    cost = saving["mean_step_seconds"] / plain - 1
    print(
        f"mean step {plain * 1e3:.1f} ms without saves ({before['mean_step_seconds'] * 1e3:.1f} and "
        f"{again['mean_step_seconds'] * 1e3:.1f}), {saving['mean_step_seconds'] * 1e3:.1f} ms with: {cost:+.2%}; "
        f"blocked {saving['blocked_seconds'] * 1e3:.0f} ms in {STOP} steps"
    )
    first = str(STOP + 1)
    for tier, resumed in zip(tiers, after, strict=True):
        is_same = resumed["losses"][first] == after[0]["losses"][first]
        print(
            f"resumed from {tier['to']} in {resumed['restore_seconds']:.1f} s "
            f"({resumed['bytes'] / GIGA / resumed['restore_seconds']:.2f} GB/s); loss of step {first} "
            + (f"{resumed['losses'][first]:.6f}" if is_same else "DIFFERS from that of the first tier")
        )
    return {"before": before, "saving": saving, "again": again, "resumed": after, "cost": cost}


def train(folder: Path, name: str, document: dict[str, Any], tiers: Sequence[Any], stop_at: int) -> dict[str, Any]:
    """Train or resume until this step; return the measurements."""
    run = RunDirectory(folder / name) if (folder / name).is_dir() else RunDirectory.create(folder, name)
    text = yaml.safe_dump({**document, "checkpoint": {"tiers": list(tiers)}})
    run.job_path.write_text(text, encoding="utf-8")
    prepare(load_job(run.job_path))
    metrics = run.metrics_path("node-0")
    _, offset = read_lines(metrics) if metrics.is_file() else ([], 0)
    events = run.events_path("node-0")
    _, events_offset = read_lines(events) if events.is_file() else ([], 0)
    began = time.perf_counter()
    place = RankIdentity(0, 1, 0, folder)
    trainer = Trainer(build(run, place, Recorder.from_environment(run), LedgerClock()), stop_at=stop_at)
    trainer.fit()
    checkpointer = trainer.parts.checkpointer
    restored = checkpointer.restored
    checkpointer.close()
    trainer.parts.recorder.close()
    lines = [line for line in read_lines(metrics, offset)[0] if "run_step_seconds" in line]
    saves = [line for line in read_lines(events, events_offset)[0] if "checkpoint" in str(line.get("event"))]
    measured = [line for line in lines if WARMUP < line["step"] <= STOP]
    row = {
        "wall_seconds": time.perf_counter() - began,
        "mean_step_seconds": statistics.mean(line["run_step_seconds"] for line in measured) if measured else None,
        "blocked_seconds": sum(line["run_checkpoint_seconds"] for line in measured),
        "blocked_steps": {
            line["step"]: round(line["run_checkpoint_seconds"], 4)
            for line in measured
            if line["run_checkpoint_seconds"] > 1e-3
        },
        "losses": {str(line["step"]): line["run_loss"] for line in lines},
        "restore_seconds": restored.seconds if restored else None,
        "bytes": restored.bytes if restored else None,
        "saves": [{key: line.get(key) for key in ("event", "step", "tier", "bytes", "seconds")} for line in saves],
    }
    print(json.dumps({"run": name, "tiers": [tier["to"] for tier in tiers], **row}), flush=True)
    del trainer, checkpointer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


if __name__ == "__main__":
    main()
