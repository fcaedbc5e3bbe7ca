"""What GRPO adds to a fine-tuned model: `make bench-grpo`.

    python benchmarks/grpo.py FOLDER [--seeds 3]

The task is the lifecycle's (examples/lifecycle): sums of two- and three-digit numbers. Each seed runs three
continuations of the same SFT model: GRPO, GRPO whose advantages are zero because every reward is the same, and SFT
continued on new sums for about as many seconds as GRPO took. Accuracy is the share of right answers to 1,000 held-out
sums, at temperature 1 with four samples each, and greedily. Differences have a 95 % interval over sums. FOLDER gets
grpo.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIFECYCLE = ROOT / "examples" / "lifecycle"
sys.path.insert(0, str(LIFECYCLE))

import sums  # noqa: E402
import yaml  # noqa: E402
from accuracy import Accuracy, measure, read_rows  # noqa: E402

from craton.telemetry import RunDirectory, summarize  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("config.json", "pretrain.yaml", "sft.yaml"):
        shutil.copy(LIFECYCLE / name, folder)
    sums.write(folder / "data")
    os.environ["CRATON_RUNS"] = str(folder / "runs")
    rows = read_rows(folder / "data" / "test.jsonl")
    run(folder / "sft.yaml")
    start = measure("sft", rows)
    print(f"SFT: {start.mean:.1%} at temperature 1, {start.greedy_mean:.1%} greedily")
    results = []
    for seed in range(options.seeds):
        found = {name: continued(folder, name, seed, rows) for name in ("grpo", "zeroed")}
        found["sft"] = continued(folder, "sft", seed, rows, seconds=found["grpo"][1])
        for name, (accuracy, seconds) in found.items():
            row = {"seed": seed, "continuation": name, "seconds": seconds, **difference(start, accuracy)}
            results.append(row)
            print(
                f"seed {seed} {name}: {accuracy.mean:.1%} at temperature 1 ({row['points']:+.1f} points, 95 % interval "
                f"{row['low']:+.1f} to {row['high']:+.1f}), {accuracy.greedy_mean:.1%} greedily, {seconds:.0f} s"
            )
    document = {"sft": {"accuracy": start.mean, "greedy": start.greedy_mean}, "continuations": results}
    (folder / "grpo.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def run(file: Path) -> float:
    """Run a job file; return its seconds."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "craton", "run", str(file), "--yes"], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


def continued(
    folder: Path, name: str, seed: int, rows: list[dict[str, Any]], seconds: float = 0.0
) -> tuple[Accuracy, float]:
    """Continue the SFT model in one way; return its accuracy, and how long training took."""
    base = "sft" if name == "sft" else "grpo"
    job = yaml.safe_load((LIFECYCLE / f"{base}.yaml").read_text(encoding="utf-8"))
    job |= {"name": f"{name}-{seed}", "model": {"job": "sft.yaml"}}
    job["train"]["seed"] = seed
    if name == "zeroed":  # equal rewards: every advantage is zero
        job["reward"] = "constant_reward:constant"
        (folder / "constant_reward.py").write_text("def constant(*_):\n    return 0.0\n", encoding="utf-8")
    if name == "sft":
        per_step = summarize(RunDirectory(folder / "runs" / "sft")).step_seconds or 0.1
        job["train"] |= {"steps": max(1, round(seconds / per_step)), "learning_rate": 1e-3, "warmup_steps": 0}
        job["data"]["path"] = "data/sft_more.jsonl"
        more = (
            {"prompt": row["prompt"], "completion": row["answer"]} for row in read_rows(folder / "data" / "rl.jsonl")
        )
        (folder / "data" / "sft_more.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in more), encoding="utf-8"
        )
    file = folder / f"{name}-{seed}.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    took = run(file)
    return measure(f"{name}-{seed}", rows), took


def difference(before: Accuracy, after: Accuracy) -> dict[str, float]:
    """Return accuracies, and their difference in points with its 95 % interval, paired by sums."""
    changes = [b - a for a, b in zip(before.sampled, after.sampled, strict=True)]
    mean = sum(changes) / len(changes)
    deviation = math.sqrt(sum((change - mean) ** 2 for change in changes) / (len(changes) - 1) / len(changes))
    return {
        "accuracy": after.mean,
        "greedy": after.greedy_mean,
        "points": 100 * mean,
        "low": 100 * (mean - 1.96 * deviation),
        "high": 100 * (mean + 1.96 * deviation),
    }


if __name__ == "__main__":
    main()
