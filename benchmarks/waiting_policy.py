"""Waiting policies of OpenMP threads: step time of one rank with several threads.

    python benchmarks/waiting_policy.py [OUT.json] [--rounds 9] [--steps 8] [--threads 2] [--hogs 0 2]

Each policy has a separate process, because libgomp reads its environment once. The processes take turns of `--steps`
training steps; the others block. For each number of busy processes (`--hogs`), the result of a policy is the median
over rounds of its step time divided by that of the `default` policy in the same round. On a shared machine only these
ratios are meaningful.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path

POLICIES: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "spin 30000": {"GOMP_SPINCOUNT": "30000"},
}
JOB = """
name: waiting
kind: pretrain
model: {name: tiny, layers: 4, hidden: 192, ffn_hidden: 512, heads: 6, kv_heads: 2, vocab: 1024, tied_embeddings: true}
data: {path: stdlib, tokenizer: "bpe:1024", sequence: 256}
train: {global_batch_sequences: 8, steps: 100000, precision: fp32, learning_rate: 3e-3}
cluster: local
layout: {micro_batch: 8}
"""
WARM_STEPS = 3


class Rank:
    """A process with one trainer, which runs steps on request."""

    def __init__(self, job: Path, threads: int, settings: dict[str, str]) -> None:
        cleared = {name for policy in POLICIES.values() for name in policy}
        environment = {name: value for name, value in os.environ.items() if name not in cleared}
        environment |= {"OMP_NUM_THREADS": str(threads), **settings}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--rank", str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def step_seconds(self, steps: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        while not (line := self._process.stdout.readline()).startswith("seconds "):
            if not line:
                raise SystemExit("a rank has ended")
        return float(line.split()[1])


def serve_steps(job: Path) -> None:
    """In a rank: train the number of steps in each line of standard input."""
    from craton.ml.training import Trainer
    from craton.ml.training.build import RankIdentity, build
    from craton.telemetry import RunDirectory
    from craton.telemetry.rank import LedgerClock, Recorder

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as root:
        run = RunDirectory.create(Path(root), "waiting")
        run.job_path.write_text(job.read_text(encoding="utf-8"), encoding="utf-8")
        place = RankIdentity(0, 1, 0, job.parent)
        trainer = Trainer(build(run, place, Recorder.from_environment(run), LedgerClock()))
        trainer._begin(None)
        trainer.timer.begin()
        for line in sys.stdin:
            start = time.perf_counter()
            for _ in range(int(line)):
                trainer._train_step()
            print(f"seconds {(time.perf_counter() - start) / int(line)}", flush=True)


def busy(stack: ExitStack, count: int) -> None:
    """Start processes that use one core each."""
    for _ in range(count):
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(hog.wait)
        stack.callback(hog.kill)


def measure(job: Path, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return hogs → policy → seconds of a step, one per round."""
    from craton.job import load_job
    from craton.ml.data import prepare

    prepare(load_job(job))
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        ranks = {name: stack.enter_context(Rank(job, arguments.threads, set_)) for name, set_ in POLICIES.items()}
        for rank in ranks.values():
            rank.step_seconds(WARM_STEPS)
        for hogs in arguments.hogs:
            seconds: dict[str, list[float]] = {name: [] for name in ranks}
            with ExitStack() as beside:
                busy(beside, hogs)
                for number in range(arguments.rounds):
                    order = list(ranks)[number % len(ranks) :] + list(ranks)[: number % len(ranks)]
                    for name in order:
                        seconds[name].append(ranks[name].step_seconds(arguments.steps))
            found[str(hogs)] = seconds
            report(hogs, seconds)
    return found


def report(hogs: int, seconds: dict[str, list[float]]) -> None:
    print(f"{hogs} busy processes, load {os.getloadavg()[0]:.1f}:", flush=True)
    for name, rounds in seconds.items():
        ratio = statistics.median(mine / base for mine, base in zip(rounds, seconds["default"], strict=True))
        spread = f"{min(rounds) * 1e3:.0f} to {max(rounds) * 1e3:.0f}"
        print(f"  {name:12} {statistics.median(rounds) * 1e3:7.1f} ms ({spread})  {ratio:.3f} x default", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--hogs", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        serve_steps(arguments.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(JOB, encoding="utf-8")
        found = measure(job, arguments)
    if arguments.out:
        import torch

        row = {"seconds": found, "threads": arguments.threads, "torch": torch.__version__}
        row |= {"machine": platform.machine(), "cores": os.cpu_count(), "date": date.today().isoformat()}
        Path(arguments.out).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
