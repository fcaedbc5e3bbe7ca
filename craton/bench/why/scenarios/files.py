"""Write the run directory of a simulated training, as its agents would have, and the output of its scheduler.

The scheduler is Slurm: fake `squeue` and `scontrol` in a folder of the run print what the real ones would. That folder
is first in PATH while the snapshot is taken.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from craton.bench.why.scenarios.world import World
from craton.telemetry import RunDirectory

TIERS = {"nvme": 300.0, "shared": 1800.0}  # seconds from one save to the next
START_SECONDS = 40.0  # from the launch to the first step
NAP_SECONDS = 0.35  # from the last step to now, as a share of a step
BACK_SECONDS = 5.0  # from a failure to the next generation
JOB = 4711


def write_world(root: Path, name: str, world: World, now: float) -> tuple[RunDirectory, float]:
    """Write the run for a snapshot at `now`; return it and for how many seconds it has been slow."""
    run = RunDirectory.create(root, name)
    steps = world.simulate()
    lasting = [parts[0]["step"] for parts in steps]
    ended = (
        now
        - world.silence_seconds
        - (world.deaths[0].seconds_ago if world.deaths else NAP_SECONDS * world.step_seconds)
    )
    moments = [ended - sum(lasting[number + 1 :]) for number in range(len(lasting))]
    began = (moments[0] - lasting[0] if moments else now - world.silence_seconds) - START_SECONDS
    began = min(began, now - world.age_seconds)
    _write_plan(run, world)
    _write_membership(run, world, began, moments, now)
    _write_metrics(run, world, steps, moments, now)
    _write_events(run, world, began, moments, now)
    _write_signs_of_life(run, world, now)
    _write_logs(run, world, began, ended, now)
    _write_scheduler(run, world, now)
    if world.state == "done":
        run.mark("DONE")
    elif world.state == "stopped":
        run.mark("STOP", "stopped by user somebody")
    elif world.state == "failed" and world.fatal:
        run.mark("FATAL", world.fatal)
    lasts = [slowdown.last_steps for slowdown in world.slowdowns if slowdown.last_steps is not None]
    lasts += [world.network_last_steps] if world.network_last_steps else []
    seconds = sum(lasting[-max(lasts) :]) if lasts else 300.0
    return run, seconds + (now - ended)


@contextmanager
def scheduler_of(run: RunDirectory) -> Iterator[None]:
    """Put the run's fake Slurm commands first in PATH."""
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{run.path / 'slurm'}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _write_plan(run: RunDirectory, world: World) -> None:
    step = world.step_seconds * world.plan_error
    document = {
        "schema": 1,
        "job": run.name,
        "kind": world.kind,
        "steps": 100_000,
        "step_seconds": step,
        "step_seconds_low": 0.88 * step,
        "step_seconds_high": 1.14 * step,
        "phases": {phase: seconds * world.plan_error for phase, seconds in {**world.base, "checkpoint": 0.01}.items()},
        "cost": {"dollars_per_day": 24 * 98.32 * world.num_nodes},
        "layout": {
            "pp": world.pipeline,
            "replicate": 1,
            "fsdp": world.world // world.pipeline,
            "cp": 1,
            "tp": 1,
            "ep": 1,
        },
        "storage": {"tiers": [{"tier": tier, "every_seconds": seconds} for tier, seconds in _tiers(world).items()]},
    }
    _write(run.plan_path, document)
    job = f"name: {run.name}\nkind: {world.kind}\ncluster: local\n"
    run.job_path.write_text(job + ("model: llama-3.1-8b\n" if world.kind == "serve" else ""), encoding="utf-8")


def _write_membership(run: RunDirectory, world: World, began: float, moments: list[float], now: float) -> None:
    launch = {
        "generation": 0,
        "nodes": [*world.nodes, *world.spares],
        "num_nodes": world.num_nodes,
        "ranks_per_node": world.ranks_per_node,
        "leaves": {node: world.leaf_of(node) for node in world.nodes},
        "gpus": True,
        "gpus_per_node": world.ranks_per_node,
        "command": ["python", "train.py"],
        "metrics_port": 0,
    }
    _write(run.launch_path, launch)
    os.utime(run.launch_path, (began, began))
    if world.state == "waiting":
        return
    member = {
        "number": 0,
        "nodes": world.nodes,
        "ranks_per_node": world.ranks_per_node,
        "store": "10.0.0.1:1",
        "time": began,
    }
    _write(run.generation_path(0), member)
    for number, (at, _, reason) in enumerate(_breaks(world, moments), start=1):
        document = {**member, "number": number, "reason": reason, "time": at + BACK_SECONDS, "broke_at": at}
        _write(run.generation_path(number), document)


def _breaks(world: World, moments: list[float]) -> list[tuple[float, int, str]]:
    """Return when it failed, which rank, and the message of its agent, oldest first."""
    return [
        (moments[-left - 1], rank, f"rank {rank} on {world.node_of(rank)} {words}")
        for left, (rank, words) in world.breaks.items()
    ]


def _write_metrics(
    run: RunDirectory, world: World, steps: list[dict[int, dict[str, float]]], moments: list[float], now: float
) -> None:
    lines: dict[str, list[str]] = {node: [] for node in world.nodes}
    chance, before = world.chance, _steps_before(world)
    for number, (parts, moment) in enumerate(zip(steps, moments, strict=True)):
        left = len(steps) - number
        generation = world.generation_of(left)
        norm = (0.6 + 3.0 / (1 + 0.15 * (before + number))) * chance.lognormvariate(0.0, 0.06)
        for rank, part in parts.items():
            line: dict[str, Any] = {"time": round(moment, 3), "step": before + number + 1, "generation": generation}
            if world.queue is not None:
                running, waiting = world.queue(now - moment)
                line |= {"run_step_seconds": round(part["step"], 5), "serve_running": running, "serve_waiting": waiting}
                lines[world.node_of(rank)].append(json.dumps({**line, "node": world.node_of(rank), "rank": rank}))
                continue
            line |= {f"run_{phase}_seconds": round(seconds, 5) for phase, seconds in part.items()}
            line["run_memory_bytes"] = 61e9 + 1e8 * (rank % 3)
            own = norm / math.sqrt(world.world) * chance.lognormvariate(0.0, 0.05)
            last, factor = world.norm_factor.get(rank, (0, 1.0))
            line["run_rank_gradient_norm"] = own * factor if left <= last else own
            if rank == 0:
                loss: float | None = 2.1 + 8.0 / (1 + 0.06 * (before + number)) + chance.gauss(0.0, 0.02)
                later = [world.loss_after[first] for first in sorted(world.loss_after) if left <= first]
                if later:
                    loss = None if later[0] is None or loss is None else loss + later[0]
                line |= {
                    "run_loss": loss,
                    "run_gradient_norm": None if loss is None else norm,
                    "run_learning_rate": 3e-4,
                }
            line |= {"node": world.node_of(rank), "rank": rank}
            lines[world.node_of(rank)].append(json.dumps(line, separators=(",", ":")))
    for node, item in lines.items():
        run.metrics_path(node).write_text("\n".join(item) + ("\n" if item else ""), encoding="utf-8")


def _steps_before(world: World) -> int:
    """Return the number of steps of an old run before the first one that is written."""
    return max(0, int(world.age_seconds / world.step_seconds) - world.steps) if world.steps else 0


def _write_events(run: RunDirectory, world: World, began: float, moments: list[float], now: float) -> None:
    if world.state == "waiting":
        return
    events: dict[str, list[dict[str, Any]]] = {node: [] for node in world.nodes}
    newest = world.generation

    def record(moment: float, event: str, node: str, rank: int | None = None, generation: int = 0, **more: Any) -> None:
        stamp = {"time": moment, "generation": generation, "node": node, "rank": rank, "event": event}
        events[node].append({**stamp, **more})

    first = world.nodes[0]
    record(began, "generation_started", first, reason="start")
    for node in world.nodes:
        record(began, "agent_started", node, pid=900)
        for rank in world.ranks_of(node):
            record(began + 1, "rank_started", node, rank, pid=1000 + rank)
    for number, (at, broken, reason) in enumerate(_breaks(world, moments), start=1):
        code = -9 if "SIGKILL" in reason else 1
        record(at + 1, "rank_ended", world.node_of(broken), broken, number - 1, code=code, during="productive")
        record(at + BACK_SECONDS, "generation_started", first, generation=number, reason=reason)
        for rank in range(world.world):
            record(at + BACK_SECONDS + 1, "rank_started", world.node_of(rank), rank, number, pid=2000 + rank)
    for tier, saves in _saves(world, began, moments, now).items():
        for save in saves:
            moment, event = float(save["time"]), str(save["event"])
            record(
                moment,
                event,
                first,
                0,
                newest,
                tier=tier,
                **{key: save[key] for key in save if key not in ("time", "event")},
            )
    for death in world.deaths:
        record(
            now - death.seconds_ago,
            "rank_ended",
            world.node_of(death.rank),
            death.rank,
            newest,
            code=death.code,
            during=death.during,
        )
    for node, lines in events.items():
        lines.sort(key=lambda line: float(line["time"]))
        run.events_path(node).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _saves(world: World, began: float, moments: list[float], now: float) -> dict[str, list[dict[str, Any]]]:
    """Return healthy saves at each interval, with the outcomes of the newest ones that the world defines."""
    result: dict[str, list[dict[str, Any]]] = {}
    last_moment = moments[-1] if moments else now
    for tier, every in _tiers(world).items():
        changed = list(world.saves.get(tier, ()))
        times: list[float] = []
        at = last_moment - world.chance.uniform(0.05, 0.7) * every
        while at > min(began, last_moment - 5 * every) and len(times) < 12:
            times.append(at)
            at -= every
        times.reverse()
        saves = []
        seconds = 14.0 if tier == "shared" else 4.0
        for number, moment in enumerate(times):
            took = seconds * world.chance.lognormvariate(0.0, 0.12)
            save = {
                "event": "checkpoint_saved",
                "time": moment,
                "step": 10 * number + 10,
                "bytes": 2.4e11,
                "seconds": took,
            }
            change = changed[number - len(times)] if number - len(times) >= -len(changed) else {}
            saves.append({**save, **change})
        result[tier] = [save for save in saves if save["event"] != "nothing"]
    return result


def _tiers(world: World) -> dict[str, float]:
    return TIERS if world.kind != "serve" else {}


def _write_signs_of_life(run: RunDirectory, world: World, now: float) -> None:
    if world.state == "waiting":
        return
    generation = world.generation
    run_state = {"failed": "failed", "done": "done", "stopped": "stopped"}.get(world.state, "running")
    for node in (*world.nodes, *world.spares):
        path, state = run.heartbeat_path(node), "spare" if node in world.spares else run_state
        _write(path, {"generation": 0, "state": state, "pid": 900, "metrics_port": 0, "host": f"host-of-{node}"})
        age = {**world.lost_nodes, **world.spares}.get(node, 0.6)
        os.utime(path, (now - age, now - age))
        if node in world.spares:
            continue
        if not world.has_status or world.deaths or run_state != "running":
            continue
        status = {
            "time": now - min(age, 2.0) if node not in world.lost_nodes else now - age,
            "generation": generation,
            "node": node,
        }
        _write(run.status_path(node), {**status, "ranks": [_status(world, rank) for rank in world.ranks_of(node)]})


def _status(world: World, rank: int) -> dict[str, Any]:
    """Return the status of a rank. All work since the last step; waiting in a collective counts as productive."""
    nap = NAP_SECONDS * world.step_seconds
    age = world.silence_seconds + nap if world.silence_seconds else world.chance.uniform(0.1, 1.0) * nap
    kind = world.kinds.get(rank, "productive")
    if world.checkpoint_now:
        kind = "checkpoint"
    return {
        "rank": rank,
        "pid": 1000 + rank,
        "kind": kind,
        "beside": [],
        "step": _steps_before(world) + world.steps + 1 if world.steps else 0,
        "progress_age_seconds": age,
        "step_seconds": world.step_seconds if world.steps > 3 else 0.0,
        "is_stopped": rank in world.stopped,
    }


def _write_logs(run: RunDirectory, world: World, began: float, ended: float, now: float) -> None:
    if not world.has_logs or world.state == "waiting":
        return
    for rank in range(world.world):
        lines = [f"[rank{rank}]: {world.node_of(rank)} NCCL INFO NET/OFI Selected provider is efa, fabric is efa"]
        lines = world.old_logs.get(rank, lines)
        lines = [*lines, f"step {world.steps}", *world.logs.get(rank, ())]
        path = run.log_path(rank)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        at = now - world.deaths[0].seconds_ago if world.deaths else ended
        os.utime(path, (at, at))
    if world.recordings:
        for rank, recording in world.recordings.items():
            path = run.recording_prefix.with_name(f"{run.recording_prefix.name}{rank}")
            path.write_bytes(pickle.dumps(recording))
            os.utime(path, (now - 5, now - 5))


def _write_scheduler(run: RunDirectory, world: World, now: float) -> None:
    _write(run.path / "backend.json", {"on": "slurm", "job": str(JOB), "details": {}})
    folder = run.path / "slurm"
    folder.mkdir()

    def number(value: float) -> dict[str, Any]:
        return {"set": True, "infinite": False, "number": int(value)}

    hosts = ",".join(f"host-of-{node}" for node in world.nodes)
    job = {
        "job_id": JOB,
        "job_state": [world.job_state],
        "name": run.name,
        "node_count": number(world.num_nodes),
        "nodes": "" if world.job_state == "PENDING" else hosts,
        "partition": "train",
        "priority": number(1000),
        "start_time": number(now + 3600 if world.job_state == "PENDING" else now - 7200),
        "end_time": number(now + 80_000),
        "time_limit": number(1440),
        "state_reason": world.job_reason,
        "user_name": "somebody",
        "restart_cnt": 0,
    }
    _write(folder / "squeue.json", {"jobs": [job]})
    text = (
        f"JobId={JOB} JobName={run.name}\n   UserId=somebody(1000) Priority=1000\n   JobState={world.job_state} "
        f"Reason={world.job_reason} Dependency=(null)\n   Partition=train\n   NumNodes={world.num_nodes}\n"
    )
    shown = {"job": text, "partition": "PartitionName=train\n   State=UP MaxTime=UNLIMITED MaxNodes=UNLIMITED\n"}
    busy = [f"NodeName=g{item} Arch=x86_64\n   State=ALLOCATED\n   Partitions=train \n" for item in range(4)]
    shown |= {"node": "\n".join(busy), "topology": "", "reservation": ""}
    for file_name, printed in shown.items():
        (folder / f"{file_name}.txt").write_text(printed, encoding="utf-8")
    programs = {"squeue": f'cat "{folder}/squeue.json"', "scontrol": f'cat "{folder}/$2.txt"'}
    for program, command in programs.items():
        path = folder / program
        path.write_text(f"#!/bin/sh\nexec {command}\n", encoding="utf-8")
        path.chmod(0o755)


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
