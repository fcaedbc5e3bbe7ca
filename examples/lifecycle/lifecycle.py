"""One model through all stages: pretrain, SFT, DPO, GRPO, serve. `make lifecycle` runs it.

    python examples/lifecycle/lifecycle.py FOLDER

Each stage is a `craton run` of a job file beside this one. After each, a verifier counts the right answers to 1,000
sums that no stage has seen. FOLDER gets the data, the runs, and lifecycle.html with the plots.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import sums
from accuracy import MAX_TOKENS, measure, read_rows
from page import Stage, write_page

import craton
from craton.ml.serving.clients import InferenceRequest, complete_all, connect
from craton.ml.serving.messages import Sampling
from craton.telemetry import RunDirectory

STAGES = ("pretrain", "sft", "dpo", "grpo")
SERVED_SUMS = 100


def main(folder: Path) -> None:
    here = Path(__file__).parent
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("config.json", *(f"{stage}.yaml" for stage in STAGES)):
        shutil.copy(here / name, folder)
    sums.write(folder / "data")
    os.environ["CRATON_RUNS"] = str(folder / "runs")
    rows = read_rows(folder / "data" / "test.jsonl")
    started = time.monotonic()
    stages = []
    for name in STAGES:
        begun = time.monotonic()
        subprocess.run([sys.executable, "-m", "craton", "run", str(folder / f"{name}.yaml"), "--yes"], check=True)
        seconds = time.monotonic() - begun
        print(f"{name}: answering {len(rows):,} sums", flush=True)
        found = measure(name, rows)
        stages.append(Stage(name, seconds, found, RunDirectory(folder / "runs" / name)))
        print(f"{name}: {found.mean:.1%} right at temperature 1, {found.greedy_mean:.1%} greedily, {seconds:.0f} s\n")
    served = ask_server(STAGES[-1], rows[:SERVED_SUMS])
    write_page(folder / "lifecycle.html", stages, served)
    write_numbers(folder / "lifecycle.json", stages, served)
    print(f"served: {served:.1%} of {SERVED_SUMS} sums right, greedily, over HTTP")
    print(f"the lifecycle took {time.monotonic() - started:.0f} s; see {folder / 'lifecycle.html'}")


def ask_server(run: str, rows: list[dict[str, str]]) -> float:
    """Serve the run, and return the share of right answers over HTTP."""

    async def answers(url: str) -> list[str]:
        async with await connect(url) as client:
            requests = [InferenceRequest(row["prompt"], Sampling(MAX_TOKENS, 0.0)) for row in rows]
            return [copies[0].text for copies in await complete_all(client, requests)]

    with craton.serve(run, f"serve-{run}", precision="fp32") as server:
        texts = asyncio.run(answers(server.url))
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def write_numbers(path: Path, stages: list[Stage], served: float) -> None:
    numbers = {
        stage.name: {"accuracy": stage.accuracy.mean, "greedy": stage.accuracy.greedy_mean, "seconds": stage.seconds}
        for stage in stages
    }
    path.write_text(json.dumps({**numbers, "served": served}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
