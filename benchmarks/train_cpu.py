"""How well the plan of a local CPU cluster predicts the step: 30 small jobs, each planned and run by `craton run`.

    python benchmarks/train_cpu.py [OUT.json] [--half developed|held-out|both] [--busy] [--only NAME ...]

The jobs differ in layers, width, heads, vocabulary, sequence, batch, accumulation, ranks, layout, recompute, experts
and adapters. SEED draws them and splits them into two halves: constants of the plan were chosen with the first half
alone. A job runs for a few seconds; the result is its median step, the plan is the one that the run recorded.
`--busy` starts a process per core that computes all the time, before the plan is made. `others` in the table is what
else ran on the machine during a job.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from craton import load_job, plan
from craton.formatting import duration
from craton.telemetry import RunDirectory, read_json

SEED = 20261118
NUM_JOBS = 30
TOKENIZER = "bpe:512"  # one for all jobs: a model may have a larger vocabulary than its data
RUN_SECONDS = 3.0
MIN_STEPS, MAX_STEPS = 12, 100
SETTLE_SECONDS = 3.0  # after the busy processes start
MAX_RUN_SECONDS = 300.0
QUIET = 0.5  # other running processes below which a machine counts as idle
QUIET_WAIT_SECONDS = 10.0  # for such a moment before an idle run


@dataclass(frozen=True)
class SmallJob:
    name: str
    half: str  # "developed" or "held-out"
    document: dict[str, Any]

    @property
    def text(self) -> str:
        """Return the shape in a few words, for the table."""
        model, train = self.document["model"], self.document["train"]
        layout = {key: value for key, value in self.document["layout"].items() if value not in (1, "none")}
        more = [f"experts {model['experts']}"] if "experts" in model else []
        more += [f"lora {train['lora']['rank']}"] if "lora" in train else []
        return ", ".join(
            [
                f"{model['layers']} x {model['hidden']}, vocab {model['vocab']}",
                f"{train['global_batch_sequences']} x {self.document['data']['sequence']}",
                self.document["cluster"],
                *(f"{key} {value}" for key, value in layout.items()),
                *more,
            ]
        )


@dataclass(frozen=True)
class Outcome:
    name: str
    half: str
    text: str
    low: float
    predicted: float
    high: float
    measured: float
    planned_phases: dict[str, float]
    measured_phases: dict[str, float]
    others: float  # processes that ran beside the job and the busy ones, on average

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--half", choices=("developed", "held-out", "both"), default="both")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=SEED, help="draw other jobs, to develop against")
    arguments = parser.parse_args()
    chosen = [job for job in small_jobs(arguments.seed) if arguments.half in (job.half, "both")]
    chosen = [job for job in chosen if not arguments.only or job.name in arguments.only]
    state = "busy" if arguments.busy else "idle"
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as root, busy_cores(os.cpu_count() or 1 if arguments.busy else 0):
        for position, job in enumerate(chosen, 1):
            if not arguments.busy:
                wait_for_quiet(Path(root))
            outcome = run(job, Path(root))
            outcomes.append(outcome)
            print(f"{position:>2}/{len(chosen)} {state}  {line(outcome)}", flush=True)
            if arguments.out:
                save(arguments.out, state, outcomes)
    for half in ("developed", "held-out"):
        of_half = [outcome for outcome in outcomes if outcome.half == half]
        if of_half:
            inside = sum(outcome.is_inside for outcome in of_half)
            print(f"{half}, {state}: {inside} of {len(of_half)} inside ({inside / len(of_half):.0%})")


def save(path: str, state: str, outcomes: list[Outcome]) -> None:
    rows = [{**asdict(outcome), "ratio": outcome.ratio, "inside": outcome.is_inside} for outcome in outcomes]
    document = {"state": state, "date": date.today().isoformat(), "cores": os.cpu_count(), "jobs": rows}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def small_jobs(seed: int = SEED) -> list[SmallJob]:
    """Return the jobs, the same on every machine."""
    random_numbers = random.Random(seed)
    documents = [_document(random_numbers, index) for index in range(NUM_JOBS)]
    halves = ["developed", "held-out"] * (NUM_JOBS // 2)
    random_numbers.shuffle(halves)
    return [SmallJob(document["name"], half, document) for document, half in zip(documents, halves, strict=True)]


def _document(random_numbers: random.Random, index: int) -> dict[str, Any]:
    choose = random_numbers.choice
    hidden = choose((32, 64, 64, 96, 128, 192, 256))
    heads = choose([count for count in (2, 4, 8) if hidden // count >= 16 or count == 2])
    model: dict[str, Any] = {
        "layers": choose((1, 2, 2, 3, 4, 6)),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": choose((heads, 2)),
        "ffn_hidden": choose((2, 3, 4)) * hidden,
        "vocab": choose((512, 1024, 4096)),
    }
    sequence = choose((32, 64, 128, 256, 512))
    ranks = choose((1, 2, 2))
    layout: dict[str, Any] = {"micro_batch": choose((1, 2, 4))}
    if ranks == 2:
        layout[choose(("fsdp", "fsdp", "replicate", "tp"))] = 2
    layout["recompute"] = choose(("none", "none", "none", "full", "selective"))
    data_parallel = 1 if "tp" in layout else ranks
    train: dict[str, Any] = {"precision": "fp32", "learning_rate": 1e-3}
    train["global_batch_sequences"] = layout["micro_batch"] * data_parallel * choose((1, 2, 4))
    kind = choose(("dense", "dense", "dense", "dense", "experts", "lora"))
    if kind == "experts":
        model |= {"experts": choose((4, 8)), "top_k": 2, "moe_ffn_hidden": hidden}
    if kind == "lora":
        train["lora"] = {"rank": choose((4, 16))}
    return {
        "name": f"small-{index:02d}",
        "kind": "pretrain",
        "model": model,
        "data": {"path": "stdlib", "tokenizer": TOKENIZER, "sequence": sequence},
        "train": train,
        "cluster": f"local x {ranks}",
        "layout": layout,
    }


def wait_for_quiet(root: Path) -> None:
    """Return when little else runs, or after a while; the table says what ran beside each job."""
    end = time.monotonic() + QUIET_WAIT_SECONDS
    while time.monotonic() < end:
        with other_processes(str(root)) as others:
            time.sleep(2.0)
        if statistics.mean(others) < QUIET:
            return


def run(job: SmallJob, root: Path) -> Outcome:
    """Run one job for a few seconds and return its plan and its median step."""
    path = root / f"{job.name}.yaml"
    train = {**job.document["train"], "steps": MIN_STEPS}
    path.write_text(yaml.safe_dump({**job.document, "train": train}), encoding="utf-8")
    steps = int(RUN_SECONDS / plan(load_job(path)).step_seconds)
    train["steps"] = min(max(steps, MIN_STEPS), MAX_STEPS)
    path.write_text(yaml.safe_dump({**job.document, "train": train}), encoding="utf-8")
    shutil.rmtree(root / "runs" / job.name, ignore_errors=True)
    with other_processes(str(root)) as others:
        ran = subprocess.run(
            [sys.executable, "-m", "craton", "run", path.name, "--yes"],
            cwd=root,
            env={**os.environ, "CRATON_RUNS": str(root / "runs")},
            capture_output=True,
            text=True,
            timeout=MAX_RUN_SECONDS,
            check=False,
        )
    if ran.returncode:
        raise SystemExit(f"{job.name} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
    directory = RunDirectory(root / "runs" / job.name)
    predicted = read_json(directory.plan_path)
    summaries = [
        event
        for file in (directory.path / "events").glob("*.jsonl")
        for event in map(json.loads, file.read_text(encoding="utf-8").splitlines())
        if event.get("event") == "summary"
    ]
    measured = summaries[-1]["measured"]
    return Outcome(
        name=job.name,
        half=job.half,
        text=job.text,
        low=predicted["step_seconds_low"],
        predicted=predicted["step_seconds"],
        high=predicted["step_seconds_high"],
        measured=measured["step_seconds"],
        planned_phases=predicted["phases"],
        others=statistics.mean(others or [0.0]),
        measured_phases={phase: measured[f"{phase}_seconds"] for phase in predicted["phases"]},
    )


def line(outcome: Outcome) -> str:
    planned = " ".join(f"{duration(value):>7}" for value in (outcome.low, outcome.predicted, outcome.high))
    verdict = "inside " if outcome.is_inside else "outside"
    measured = f"{duration(outcome.measured):>7}  x{outcome.ratio:5.2f}"
    verdict += f"  others {outcome.others:3.1f}"
    return f"{outcome.name} {outcome.half:<9} {planned}  measured {measured}  {verdict}  {outcome.text}"


@contextmanager
def other_processes(own: str) -> Iterator[list[float]]:
    """Count the processes that run inside the context and whose command does not name `own`, twice a second."""
    counts: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            counts.append(sum(_is_other(process, own) for process in Path("/proc").glob("[0-9]*")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield counts
    finally:
        done.set()
        watcher.join()


def _is_other(process: Path, own: str) -> bool:
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        command = (process / "cmdline").read_text()
    except OSError:
        return False
    is_own = any(name in command for name in (own, "train_cpu", "multiprocessing.spawn"))
    return state == "R" and bool(command) and not is_own


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Compute on `count` cores inside the context."""
    context = multiprocessing.get_context("spawn")
    busy = [context.Process(target=_compute, args=(os.getpid(),), daemon=True) for _ in range(count)]
    for process in busy:
        process.start()
    time.sleep(SETTLE_SECONDS if busy else 0.0)
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def _compute(parent: int) -> None:
    """Compute until the benchmark ends, also if it is killed."""
    number = 1
    while os.getppid() == parent:
        for _ in range(100_000):
            number = number * 1103515245 % 2147483647


if __name__ == "__main__":
    main()
