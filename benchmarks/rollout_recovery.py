"""Recovery time of reinforcement learning with a rollout server: seconds from a kill to the end of the next step.

    python benchmarks/rollout_recovery.py [--kills 5]

A tiny model on this machine, mode separate, one server. Killed with SIGKILL: the trainer's rank, the server's rank (its
engine), and the server as a whole (its agent and everything below it). The next step of a killed rank is the one that
its recovery ends with, that of a killed server the first one recorded after it was back. Prints each time, the median
and the worst.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from craton import load_job
from craton import run as start_run_of
from craton.ml.data.tokenizer import train_bpe
from craton.orchestration import living_agents
from craton.orchestration.start import kill_run
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines
from craton.telemetry.members import MEMBERS_FOLDER

LIMIT_SECONDS = 300.0
PAUSE_SECONDS = 3.0  # of calm steps between two kills
SERVER = "rollout-0"
JOB = """
name: recovery
kind: grpo
model: {{name: adder, layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, vocab: 259, tied_embeddings: true}}
data: {{path: {folder}/sums.jsonl, tokenizer: {folder}/tokenizer, sequence: 16}}
policy: {{loss: grpo}}
rollout: {{prompts: 4, group: 4, max_tokens: 6, mode: separate, staleness: 1}}
reward: "length_reward:score"
verify: {{workers: 1, sandbox: "off"}}
train: {{steps: 1000000, precision: fp32, learning_rate: 1e-4, initialize: random}}
cluster: local
layout: {{micro_batch: 4}}
checkpoint: {{peer: 1 steps, tiers: [{{to: shared, every_steps: 1000000}}]}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each kind (default: 5)")
    given = parser.parse_args()
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{date.today().isoformat()} · {platform.machine()}, {os.cpu_count()} cores, load {load} · Python "
        f"{platform.python_version()}, torch {torch.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CRATON_RUNS"], os.environ["CRATON_CACHE"] = f"{folder}/runs", f"{folder}/cache"
        run = start(Path(folder))
        try:
            measure("killed rank of the trainer", given.kills, run, lambda: kill_rank(run, run))
            server = RunDirectory(run.path / MEMBERS_FOLDER / SERVER)
            measure("killed rank of the server", given.kills, run, lambda: kill_rank(run, server))
            measure("killed server with its agent", given.kills, run, lambda: kill_agent(run, server))
        finally:
            if living_agents(run):
                kill_run(run)


def start(folder: Path) -> RunDirectory:
    train_bpe([], 259, folder / "tokenizer")
    rows = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(200)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "length_reward.py").write_text(
        "def score(prompt, completion, row, transcript):\n    return float(len(completion))\n"
    )
    (folder / "recovery.yaml").write_text(JOB.format(folder=folder))
    run = start_run_of(load_job(folder / "recovery.yaml")).directory
    wait_for(run, lambda: [line for line in metrics(run) if line["step"] >= 5], "step 5")
    return run


def measure(what: str, kills: int, run: RunDirectory, kill: Callable[[], float]) -> None:
    server = RunDirectory(run.path / MEMBERS_FOLDER / SERVER)
    seconds = []
    for _ in range(kills):
        wait_for(run, lambda: has_standby(server), "the server's fork server")
        time.sleep(PAUSE_SECONDS)
        seconds.append(kill())
        print(f"  {what}: {seconds[-1]:.2f} s", flush=True)
    print(f"{what}: median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s of {kills}", flush=True)


def has_standby(server: RunDirectory) -> bool:
    """Whether the newest agent of the server has a fork server that is ready."""
    return bool(_since(events(server, "fork_server_ready"), events(server, "agent_started")[-1]["time"]))


def kill_rank(run: RunDirectory, killed: RunDirectory) -> float:
    """Kill the only rank of the trainer or of the server; return the seconds until the next step."""
    return seconds_after(run, killed, int(events(killed, "rank_started")[-1]["pid"]))


def kill_agent(run: RunDirectory, killed: RunDirectory) -> float:
    return seconds_after(run, killed, living_agents(killed)[0].pid)


def seconds_after(run: RunDirectory, killed: RunDirectory, pid: int) -> float:
    moment = time.time()
    os.kill(pid, signal.SIGKILL)
    name = "recovered" if killed is run else "rollout_server_restored"
    back = wait_for(run, lambda: _since(events(run, name), moment), name)[0]
    # The event of a rank is written once its step is done; that of a server before its next one.
    after = back["time"] if killed is not run else moment
    step = wait_for(run, lambda: _since(metrics(run), after), "the next step")[0]
    return float((step if killed is not run else back)["time"]) - moment


def wait_for(run: RunDirectory, condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := condition()):
        if run.has("FATAL") or time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come: {run.marker_text('FATAL')}")
        time.sleep(0.02)
    return found


def events(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [line for line in _lines(run, "events") if line["event"] == name]


def metrics(run: RunDirectory) -> list[dict[str, Any]]:
    """Steps of the trainer, with the times at which they were recorded: after their end."""
    return [line for line in _lines(run, "metrics") if "run_reward" in line]


def _lines(run: RunDirectory, folder: str) -> list[dict[str, Any]]:
    lines = [line for path in (run.path / folder).glob("*.jsonl") for line in read_lines(path)[0]]
    return sorted(lines, key=lambda line: float(line["time"]))


def _since(lines: list[dict[str, Any]], moment: float) -> list[dict[str, Any]]:
    return [line for line in lines if line["time"] > moment]


if __name__ == "__main__":
    main()
