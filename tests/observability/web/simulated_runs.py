"""Run directories as agents write them, made up: many runs, or one of many ranks. The same seed makes the same files.

python simulated_runs.py FOLDER --runs 500
python simulated_runs.py FOLDER --name wide --nodes 1250 --ranks-per-node 8
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from craton.telemetry import RunDirectory
from craton.telemetry.rank import SampleRecorder

PHASES = {"data": 0.01, "compute": 0.72, "communication": 0.2, "optimizer": 0.06, "checkpoint": 0.01}  # of a step
ROLLOUT_STEP = {"rollout": 0.5, "reward": 0.08, "sync": 0.02} | {name: 0.4 * share for name, share in PHASES.items()}
STEP_SECONDS = 2.0
TOKENS_PER_STEP = 4_194_304
STATES = ("done", "done", "done", "stopped", "failed", "lost", "running")


def write_run(
    root: Path,
    name: str,
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    steps: int = 40,
    planned_steps: int = 400,
    state: str = "running",
    slow_rank: int | None = None,
    leaf_nodes: int = 16,
    seed: int = 0,
    now: float | None = None,
    kind: str = "pretrain",
) -> RunDirectory:
    """One run that has just done its newest step; `slow_rank` computes for half as long again, so that all others
    wait for it."""
    now = time.time() if now is None else now
    chance = random.Random(f"{name}{seed}")
    run = RunDirectory.create(root, name)
    names = [f"node-{number}" for number in range(nodes)]
    leaves = {node: f"leaf-{number // leaf_nodes}" for number, node in enumerate(names)}
    _write_json(run.plan_path, plan_document(name, planned_steps, kind))
    run.job_path.write_text(f"name: {name}\nkind: command\ncommand: [sleep, '1']\ncluster: local\n", encoding="utf-8")
    launch = {"generation": 0, "nodes": names, "num_nodes": nodes, "ranks_per_node": ranks_per_node, "leaves": leaves}
    _write_json(run.launch_path, {**launch, "command": ["sleep", "1"], "metrics_port": 0})
    member = {"number": 0, "nodes": names, "ranks_per_node": ranks_per_node, "store": "127.0.0.1:1", "time": now - 900}
    _write_json(run.generation_path(0), member)
    began = now - steps * STEP_SECONDS
    for number, node in enumerate(names):
        ranks = range(number * ranks_per_node, (number + 1) * ranks_per_node)
        lines, books = [], []
        for step in range(1, steps + 1):
            moment = began + step * STEP_SECONDS
            lines += [metrics_line(step, rank, node, moment, chance, slow_rank, kind) for rank in ranks]
            books += [ledger_line(step, rank, node, moment) for rank in ranks]
        run.metrics_path(node).write_text("".join(lines), encoding="utf-8")
        run.ledger_path(node).write_text("".join(books), encoding="utf-8")
        _write_status(run, node, ranks, steps, now)
        _write_heartbeat(run, node, state, now)
    _write_events(run, names[0], began, steps)
    if kind == "grpo":
        write_samples(run, names[0], steps)
    for rank in range(min(nodes * ranks_per_node, 64)):
        run.log_path(rank).write_text(f"rank {rank} began\n<b>step 1</b> & more\n", encoding="utf-8")
    if state in ("done", "stopped", "failed"):
        marker = {"done": "DONE", "stopped": "STOP", "failed": "FATAL"}[state]
        run.mark(marker, "rank 1 ended with code 1\nRuntimeError: out of memory" if state == "failed" else "")  # type: ignore[arg-type]
    return run


def write_runs(root: Path, count: int, steps: int = 40) -> None:
    """Many small runs in all states."""
    for number in range(count):
        state = STATES[number % len(STATES)]
        write_run(root, f"llama-8b-{number:03d}", nodes=1 + number % 3, steps=steps, state=state, seed=number)


def metrics_line(
    step: int,
    rank: int,
    node: str,
    moment: float,
    chance: random.Random,
    slow_rank: int | None = None,
    kind: str = "pretrain",
) -> str:
    shares = ROLLOUT_STEP if kind == "grpo" else PHASES
    parts = {phase: STEP_SECONDS * share * chance.gauss(1.0, 0.01) for phase, share in shares.items()}
    if slow_rank is not None:
        late = 0.5 * parts["compute"]
        parts["compute" if rank == slow_rank else "communication"] += late
    values = {f"run_{phase}_seconds": seconds for phase, seconds in parts.items()}
    total = sum(parts.values())
    line: dict[str, Any] = {"time": moment, "step": step, "generation": 0, "run_step_seconds": total, **values}
    line |= {"run_memory_bytes": 61e9 + 1e8 * chance.random(), "run_recording_share": 0.0002}
    line["run_rank_gradient_norm"] = 0.8 + 0.02 * chance.random()
    if rank == 0:
        loss = 2.0 + 9.0 / (1 + 0.08 * step) + chance.gauss(0, 0.03)
        line |= {
            "run_loss": loss,
            "run_tokens_per_second": TOKENS_PER_STEP / total,
            "run_mfu": 0.41 * STEP_SECONDS / total,
        }
        line |= {"run_learning_rate": 3e-4, "run_gradient_norm": 1 + chance.random(), "run_skipped_steps": 0}
        line |= {"run_tokens": step * TOKENS_PER_STEP}
        if step % 20 == 0:
            line["run_evaluation_loss"] = loss + 0.1
        line |= results_of(kind, step, chance)
    return json.dumps({**line, "node": node, "rank": rank}, separators=(",", ":")) + "\n"


def results_of(kind: str, step: int, chance: random.Random) -> dict[str, float]:
    """What rank 0 of a run of this kind records of post-training."""
    learnt = 1.0 - 1.0 / (1 + 0.02 * step)
    noise = chance.gauss(0.0, 0.02)
    if kind == "dpo":
        values = {"chosen_reward": learnt + noise, "rejected_reward": -learnt, "reward_margin": 2 * learnt + noise}
        values["reward_accuracy"] = 0.5 + 0.4 * learnt + noise
        if step % 20 == 0:
            values |= {"validation_reward_accuracy": 0.5 + 0.35 * learnt, "validation_reward_margin": 1.5 * learnt}
    elif kind == "grpo":
        values = {
            "reward": 0.1 + 0.7 * learnt + noise,
            "reward_std": 0.4 - 0.2 * learnt,
            "completion_tokens": 140.0 + 80.0 * learnt + 5 * noise,
            "longest_completion_tokens": 512.0,
            "truncated_share": 0.04,
            "kl": 0.02 * learnt,
            "entropy": 1.8 - 0.9 * learnt + noise,
            "logprob_gap": 0.004 + abs(noise) / 50,
            "logprob_k3": 0.0001,
            "clipped_share": 0.01,
            "corrected_share": 0.002,
            "staleness": 1.0,
            "rollout_tokens_per_second": 24800.0 * (1 + noise),
            "rollout_idle_share": 0.12,
            "rollout_tail_share": 0.2,
            "trainer_idle_share": 0.31,
            "verifier_failure_share": 0.01,
            "advantage_zero_share": 0.25,
            "step_tokens": 110000.0,
        }
        if step % 20 == 0:
            values["validation_reward"] = 0.1 + 0.6 * learnt
    elif kind == "sft" and step % 20 == 0:
        accuracy = 0.2 + 0.6 * learnt
        values = {
            "evaluation_accuracy": accuracy,
            "evaluation_accuracy_low": accuracy - 0.05,
            "evaluation_accuracy_high": accuracy + 0.05,
            "evaluation_failure_share": 0.01,
            "evaluation_problems": 200.0,
            "evaluation_tokens": 51200.0,
            "evaluation_seconds": 12.0,
        }
    else:
        values = {}
    return {f"run_{name}": value for name, value in values.items()}


def write_samples(run: RunDirectory, node: str, step: int) -> None:
    """Texts as a model may write them: markup, long ones, and one without a verdict."""
    recorder = SampleRecorder(run, node, generation=0)
    recorder.record(step - 1, "What is 12 + 30?", "12 + 30 = 42", 1.0, {"math": 1.0}, tokens=9, versions=[step - 2])
    recorder.record(step, "Write <b>bold</b>", "<script>alert(1)</script> & more", 0.0, {"regex": 0.0}, tokens=12)
    chat = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Sort [3, 1, 2] in Python."}]
    recorder.record(step, chat, "Let me think. " * 900, None, {"code": None}, error="timeout after 10 s", tokens=4096)
    recorder.close()


def ledger_line(step: int, rank: int, node: str, moment: float) -> str:
    seconds = {"productive": 1.9, "data": 0.05, "checkpoint": 0.05} if step > 1 else {"start": 2.0}
    stamp = {"time": moment, "step": step, "generation": 0, "node": node, "rank": rank}
    return json.dumps({**stamp, "seconds": seconds}, separators=(",", ":")) + "\n"


def plan_document(name: str, steps: int, kind: str = "pretrain") -> dict[str, Any]:
    shares = ROLLOUT_STEP if kind == "grpo" else PHASES
    share = {phase: STEP_SECONDS * part for phase, part in shares.items()}
    tokens_per_second = TOKENS_PER_STEP / STEP_SECONDS
    return {
        "schema": 1,
        "job": name,
        "kind": kind,
        "steps": steps,
        "step_seconds": STEP_SECONDS,
        "step_seconds_low": 0.9 * STEP_SECONDS,
        "step_seconds_high": 1.15 * STEP_SECONDS,
        "phases": share,
        "tokens_per_second": tokens_per_second,
        "mfu": 0.41,
        "memory_bytes": 60e9,
        "goodput": 0.96,
        "cost": {"dollars_per_day": 9600.0, "cost_dollars": 12000.0},
        "layout": {"pp": 1, "replicate": 1, "fsdp": 4, "cp": 1, "tp": 1, "ep": 1},
        "storage": {"tiers": [{"tier": "nvme", "every_seconds": 300.0}, {"tier": "shared", "every_seconds": 1800.0}]},
    }


def _write_status(run: RunDirectory, node: str, ranks: range, step: int, now: float) -> None:
    of_ranks = [
        {"rank": rank, "pid": 1000 + rank, "kind": "productive", "beside": [], "step": step}
        | {"progress_age_seconds": 0.4, "step_seconds": STEP_SECONDS, "is_stopped": False}
        for rank in ranks
    ]
    _write_json(run.path / "status" / f"{node}.json", {"time": now, "generation": 0, "node": node, "ranks": of_ranks})


def _write_heartbeat(run: RunDirectory, node: str, state: str, now: float) -> None:
    said = {"running": "running", "lost": "running"}.get(state, state)
    path = run.heartbeat_path(node)
    _write_json(path, {"generation": 0, "state": said, "pid": 1, "metrics_port": 0})
    if state == "lost":
        os.utime(path, (now - 60, now - 60))


def _write_events(run: RunDirectory, node: str, began: float, steps: int) -> None:
    def line(moment: float, event: str, **fields: Any) -> str:
        return json.dumps({"time": moment, "generation": 0, "node": node, "rank": 0, "event": event, **fields}) + "\n"

    lines = [line(began, "agent_started", step=0)]
    for step in range(10, steps + 1, 10):
        tier = "shared" if step % 40 == 0 else "nvme"
        moment = began + step * STEP_SECONDS
        saved = {"tier": tier, "bytes": 2**34, "seconds": 3.25, "reason": None}
        lines.append(line(moment, "checkpoint_saved", step=step, **saved))
    run.events_path(node).write_text("".join(lines), encoding="utf-8")


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--name", default="wide")
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    write_runs(given.folder, given.runs, given.steps)
    if given.nodes:
        shape = {"nodes": given.nodes, "ranks_per_node": given.ranks_per_node, "steps": given.steps}
        write_run(given.folder, given.name, **shape, slow_rank=given.nodes * given.ranks_per_node // 3)


if __name__ == "__main__":
    main()
