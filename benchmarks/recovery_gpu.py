"""Cost of peer memory on a GPU, and recovery time of a killed trainer: a compiled 1B model copies its state to shared
memory after every step.

    python benchmarks/recovery_gpu.py [OUT_FOLDER] [--model llama-3.2-1b] [--batch 8] [--steps 50] [--kills 3]

Runs under a real agent, one after the other: without peer memory, with a copy after every step, and without again; the
cost is the ratio of the mean steps. Then a run whose trainer is killed with SIGKILL several times: the seconds from the
kill to the end of the next step, by kind of the ledger, restored from shared memory without a disk read. Last, some
steps of the same training in this process under torch's profiler: how much of the copy overlapped with compute, and the
trace.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from craton.agent import Generation, Launch, write_launch
from craton.agent.memory import Keeper
from craton.job import dump_job, parse_job
from craton.job.layout import Layout
from craton.ml.training import Trainer
from craton.ml.training.build import RankIdentity, build
from craton.ml.training.orders import Order
from craton.orchestration import start_agents
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.files import read_lines
from craton.telemetry.rank import LedgerClock, Recorder

WARMUP = 12
LIMIT_SECONDS = 400.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default=".")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--compile", default="true")
    given = parser.parse_args()
    out = Path(given.out)
    rows: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__, "model": given.model}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        before = mean_step(train(root, "before", given, "off", given.steps))
        kept = mean_step(train(root, "kept", given, "1 steps", given.steps))
        after = mean_step(train(root, "after", given, "off", given.steps))
        plain = (before + after) / 2
        rows["step_seconds"] = {"before": before, "kept": kept, "after": after, "cost": kept / plain - 1}
        print(
            f"mean step {plain * 1e3:.1f} ms without ({before * 1e3:.1f}, {after * 1e3:.1f}), {kept * 1e3:.1f} ms with "
            f"a copy after every step: {kept / plain - 1:+.2%}",
            flush=True,
        )
        rows["kills"] = kill(root, given)
        (out / "recovery_gpu.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        rows["overlap"] = profile(root, given, out)
    rows["gpu"] = torch.cuda.get_device_name()
    (out / "recovery_gpu.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def start(root: Path, name: str, given: argparse.Namespace, peer: str, steps: int) -> RunDirectory:
    run = RunDirectory.create(root, name)
    job = parse_job(
        f"name: {name}\nkind: pretrain\nmodel: {given.model}\n"
        f'data: {{source: "craton.ml.data.patterns:walks", sequence: {given.sequence}}}\n'
        f"train: {{global_batch_sequences: {given.batch}, steps: {steps}, precision: bf16, weights: bf16, "
        f"compile: {given.compile}}}\ncluster: local\ncheckpoint: {{peer: {peer}}}\n",
        name,
    )
    run.job_path.write_text(dump_job(job), encoding="utf-8")
    launch = Launch(
        generation=0,
        nodes=["node-0"],
        ranks_per_node=1,
        command=[sys.executable, "-m", "craton.ml.training", str(run.path)],
        nursery=[sys.executable, "-m", "craton.ml.fork_server", str(run.path)],
        gpus=True,
        threads_per_rank=8,
        layouts={"1": asdict(Layout(micro_batch=given.batch, precision="bf16"))},
    )
    write_launch(run, launch)
    start_agents(run, launch)
    return run


def train(root: Path, name: str, given: argparse.Namespace, peer: str, steps: int) -> RunDirectory:
    run = start(root, name, given, peer, steps)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not run.has("DONE") and not run.has("FATAL") and not run.has("STOP") and time.monotonic() < deadline:
        if summarize(run).step >= steps - 1:  # the final save to disk does not matter here
            stop(run)
        time.sleep(0.2)
    stop(run)
    for name_of_log in ("rank-00000.log", "agent-node-0.log"):
        lines = (run.path / "logs" / name_of_log).read_text().splitlines()[-4:]
        print("\n".join(f"  {line[:200]}" for line in lines), flush=True)
    return run


def stop(run: RunDirectory) -> None:
    """End the agent, and with it all other processes."""
    for agent in json.loads((run.path / "agents.json").read_text()):
        try:
            os.kill(agent["pid"], signal.SIGKILL)
        except ProcessLookupError:
            continue
    time.sleep(2.0)
    run.mark("STOP")


def mean_step(run: RunDirectory) -> float:
    lines = [line for line in read_lines(run.metrics_path("node-0"))[0] if "run_step_seconds" in line]
    return statistics.mean(line["run_step_seconds"] for line in lines if line["step"] > WARMUP)


def kill(root: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill the trainer repeatedly, each time some steps after it has recovered."""
    run = start(root, "killed", given, "1 steps", 10_000)
    found: list[dict[str, Any]] = []
    wait_for_step(run, 15, 0)
    for number in range(given.kills):
        ledger = summarize(run).ledger
        pid = rank_pid(run)
        moment = time.time()
        os.kill(pid, signal.SIGKILL)
        while len(recovered := [each for each in events(run) if each["event"] == "recovered"]) <= number:
            time.sleep(0.02)
            if run.has("FATAL") or time.time() - moment > 200:
                raise SystemExit(f"not back: {run.marker_text('FATAL')}")
        seconds = recovered[-1]["time"] - moment
        time.sleep(1.5)
        spent = {kind: value - ledger.get(kind, 0.0) for kind, value in summarize(run).ledger.items()}
        entry = {name: recovered[-1][name] for name in ("step", "lost_steps", "restored_from", "restored_step")}
        found.append({"seconds": seconds, **entry, "ledger": spent})
        print(json.dumps(found[-1]), flush=True)
        wait_for_step(run, recovered[-1]["step"] + 8, recovered[-1]["generation"])
    stop(run)
    return found


def wait_for_step(run: RunDirectory, step: int, generation: int) -> None:
    while True:
        lines = read_lines(run.metrics_path("node-0"))[0] if run.metrics_path("node-0").exists() else []
        if any(line["step"] >= step and line["generation"] >= generation for line in lines):
            return
        if run.has("FATAL"):
            raise SystemExit(run.marker_text("FATAL"))
        time.sleep(0.2)


def events(run: RunDirectory) -> list[dict[str, Any]]:
    return read_lines(run.events_path("node-0"))[0]


def rank_pid(run: RunDirectory) -> int:
    return int([each["pid"] for each in events(run) if each["event"] == "rank_started"][-1])


def profile(root: Path, given: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Run steps with a copy after each in this process; the keeper is a thread of it."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"craton-benchmark-{os.getpid()}"
    control.bind(f"\0{name}")
    control.listen()
    keeper = Keeper("node-0", b"benchmark", control, socket.create_server(("127.0.0.1", 0)), None)
    threading.Thread(target=keeper.serve_forever, daemon=True).start()
    run = RunDirectory.create(root, "profiled")
    run.job_path.write_text((root / "kept" / "job.yaml").read_text(), encoding="utf-8")
    layout = asdict(Layout(micro_batch=given.batch, precision="bf16"))
    order = Order(Generation(0, ["node-0"], 1, "", {}, layout), 0, "node-0", name)
    trainer = Trainer(
        build(run, RankIdentity(0, 1, 0, root), Recorder.from_environment(run), LedgerClock(), order),
        stop_at=WARMUP + 6,
    )
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    wanted = torch.profiler.schedule(wait=WARMUP, warmup=1, active=4)
    with torch.profiler.profile(activities=kinds, schedule=wanted) as profiler:
        step = trainer._train_step

        def one() -> bool:
            stopping = step()
            profiler.step()
            return stopping

        trainer._train_step = one  # type: ignore[method-assign]
        trainer.fit()
    profiler.export_chrome_trace(str(out / "recovery_gpu_trace.json.gz"))
    return spans_of(out / "recovery_gpu_trace.json.gz")


def spans_of(path: Path) -> dict[str, Any]:
    import gzip

    with gzip.open(path, "rt") as file:
        found = [each for each in json.load(file)["traceEvents"] if each.get("ph") == "X"]
    copies = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if "DtoH" in e.get("name", "") and e["dur"] > 50)
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e.get("cat") == "kernel")
    beside = covered(copies, kernels)
    total = sum(end - begin for begin, end in copies)
    row = {
        "copies": len(copies),
        "copy_seconds": total / 1e6,
        "beside_computation": beside / total if total else 0.0,
        "kernel_seconds": sum(end - begin for begin, end in kernels) / 1e6,
    }
    print(json.dumps(row), flush=True)
    return row


def covered(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return the share of the spans that lies inside the others."""
    merged: list[list[float]] = []
    for begin, end in others:
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in spans
        for other_begin, other_end in merged
        if other_begin < end and other_end > begin
    )


if __name__ == "__main__":
    main()
