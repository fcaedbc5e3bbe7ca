"""`craton bench recover`: measures how long a small training run on this machine takes to recover from a fault.

Each case starts a run of two nodes (`Rehearsal`) and injects several faults. Its events and ledger give the time from
the fault to the end of the next step, split by kind. For comparison, the same training runs under torchrun, which
restarts all ranks and restores from disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from craton.bench.recovery.rehearsal import Rehearsal, running, write_rehearsal
from craton.errors import CratonError
from craton.formatting import setting
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.files import paths_in, read_lines

CASES = ("respawn", "spare", "hang", "torchrun")
SHOWN_KINDS = ("detect", "regroup", "restore", "compile", "redo", "waiting", "start")
LIMIT_SECONDS = 120.0
SETTLED_STEPS = 8  # between two faults
ENDLESS_STEPS = 100_000
TORCHRUN_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # otherwise, on gloo, restarted workers connect to the old addresses of dead ones (torch 2.13)
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

Progress = Callable[[str, int, int], None]


class RecoveryBenchError(CratonError):
    """A case is invalid or did not recover."""


@dataclass
class RecoveryCase:
    """One kind of fault, and the duration of each recovery."""

    name: str
    ranks: int
    step_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)  # from the fault to the end of the next step
    noticed: list[float] = field(default_factory=list)  # from the fault to the next generation
    kinds: list[dict[str, float]] = field(default_factory=list)
    restored_from: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def median_kinds(self) -> dict[str, float]:
        return {kind: statistics.median(item.get(kind, 0.0) for item in self.kinds) for kind in SHOWN_KINDS}

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.name,
            "ranks": self.ranks,
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "median_seconds": self.median,
            "noticed_seconds": self.noticed,
            "kinds": self.median_kinds() if self.kinds else {},
            "restored_from": sorted(set(self.restored_from)),
        }


def bench_recover(
    root: Path,
    ranks: Sequence[int] = (4,),
    rounds: int = 5,
    cases: Sequence[str] = CASES,
    progress: Progress | None = None,
) -> list[RecoveryCase]:
    """Run every case for every number of ranks, one after the other; nothing else should run on the machine."""
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        raise RecoveryBenchError(f"unknown case {', '.join(unknown)}; allowed: {', '.join(CASES)}")
    if any(number < 2 or number % 2 for number in ranks):
        given = ", ".join(map(str, ranks))
        raise RecoveryBenchError(f"ranks is {given}; two nodes share the ranks, so give even numbers of 2 or more")
    result = []
    for number in ranks:
        for case in cases:
            report = (lambda done, name=f"{case}, {number} ranks": progress(name, done, rounds)) if progress else _quiet
            result.append(_measure(root, case, number, rounds, report))
    return result


def _layout(ranks: int) -> dict[str, int]:
    return {"fsdp": ranks, "micro_batch": max(1, Rehearsal.batch // ranks)}


def _quiet(done: int) -> None:
    """Report no progress."""


def _measure(root: Path, name: str, ranks: int, rounds: int, report: Callable[[int], None]) -> RecoveryCase:
    case = RecoveryCase(name, ranks)
    report(0)
    if name == "torchrun":
        _under_torchrun(root, case, rounds, report)
        return case
    spares = rounds if name == "spare" else 0
    # one spare suffices, which keeps the processes few: a lost node returns as the next spare
    rehearsal = Rehearsal(
        f"{name}-{ranks}", ranks_per_node=ranks // 2, layout=_layout(ranks), steps=ENDLESS_STEPS, spares=min(spares, 1)
    )
    with running(root, rehearsal) as run:
        generation = 0
        _wait_for_step(run, SETTLED_STEPS, generation)
        for number in range(rounds):
            case.step_seconds = summarize(run).step_seconds or 0.0
            before = summarize(run).ledger
            moment = _break(run, name, number)
            recovered = _wait_for(run, partial(_event, run, "recovered", moment), f"{name}: no step after the fault")
            began = _event(run, "generation_started", moment)
            assert began is not None
            case.seconds.append(recovered["time"] - moment)
            case.noticed.append(began["time"] - moment)
            case.restored_from.append(recovered["restored_from"])
            time.sleep(1.2)  # until the agents have written their ledgers
            after = summarize(run).ledger
            case.kinds.append({kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in SHOWN_KINDS})
            report(number + 1)
            generation = int(recovered["generation"])
            _wait_for_step(run, int(recovered["step"]) + SETTLED_STEPS, generation)
            if name == "spare":
                _wait_for(run, partial(_spare, run), "the lost node did not come back as a spare")
    return case


def _break(run: RunDirectory, name: str, number: int) -> float:
    """Inject the fault; return its time."""
    last = max(_ranks(run))
    if name == "spare":  # the agent with all its processes, as in a machine failure
        pid = _agent_of(run, _node_of(run, last))
    else:
        pid = _ranks(run)[number % (last + 1)]
    moment = time.time()
    os.kill(pid, signal.SIGSTOP if name == "hang" else signal.SIGKILL)
    return moment


def _events(run: RunDirectory) -> list[dict[str, Any]]:
    lines = [line for path in paths_in(run.path / "events", "*.jsonl") for line in read_lines(path)[0]]
    return sorted(lines, key=lambda line: float(line["time"]))


def _event(run: RunDirectory, name: str, after: float) -> dict[str, Any] | None:
    return next((line for line in _events(run) if line["event"] == name and line["time"] > after), None)


def _ranks(run: RunDirectory) -> dict[int, int]:
    """Return rank → pid of its present process."""
    return {int(line["rank"]): int(line["pid"]) for line in _events(run) if line["event"] == "rank_started"}


def _node_of(run: RunDirectory, rank: int) -> str:
    started = [line for line in _events(run) if line["event"] == "rank_started" and line["rank"] == rank]
    return str(started[-1]["node"])


def _agent_of(run: RunDirectory, node: str) -> int:
    started = [line for line in _events(run) if line["event"] == "agent_started" and line["node"] == node]
    return int(started[-1]["pid"])


def _spare(run: RunDirectory) -> bool:
    """Whether a spare is ready: every agent's keeper has started since the agent did."""
    started = [line for line in _events(run) if line["event"] in ("agent_started", "keeper_ready")]
    last = {line["node"]: line["event"] for line in started}
    return all(event == "keeper_ready" for event in last.values())


def _wait_for(run: RunDirectory, look: Callable[[], Any], problem: str) -> Any:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if (result := look()) is not None and result is not False:
            return result
        if run.has("FATAL"):
            raise RecoveryBenchError(f"{problem}: {run.marker_text('FATAL')}")
        time.sleep(0.02)
    raise RecoveryBenchError(f"{problem} within {setting(LIMIT_SECONDS)}; see {run.path / 'logs'}")


def _wait_for_step(run: RunDirectory, step: int, generation: int) -> None:
    def reached() -> bool:
        lines = [line for path in paths_in(run.path / "metrics", "*.jsonl") for line in read_lines(path)[0]]
        return any(line.get("step", 0) >= step and line.get("generation", 0) >= generation for line in lines)

    _wait_for(run, reached, f"step {step} was not reached")


def _under_torchrun(root: Path, case: RecoveryCase, rounds: int, report: Callable[[int], None]) -> None:
    """Run the same training under torchrun, which restarts all workers from a checkpoint up to five steps old."""
    rehearsal = Rehearsal(
        f"torchrun-{case.ranks}",
        ranks_per_node=case.ranks // 2,
        layout=_layout(case.ranks),
        steps=ENDLESS_STEPS,
        checkpoint="{peer: off, tiers: [{to: shared, every_steps: 5, keep: 2}]}",
    )
    run, _ = write_rehearsal(root, rehearsal)
    log = run.path / "logs" / "torchrun.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"),
                *(f"--max-restarts={rounds}", "--monitor-interval=0.1"),
                *("-m", "craton.ml.training", str(run.path)),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **TORCHRUN_ENVIRONMENT, "CRATON_RUN": str(run.path)},
            start_new_session=True,
        )
    try:
        for number in range(rounds):
            _wait_for_steps(run, time.time(), SETTLED_STEPS, log)
            workers = _children_of(process.pid)
            case.step_seconds = summarize(run).step_seconds or 0.0
            moment = time.time()
            os.kill(workers[number % len(workers)], signal.SIGKILL)
            restored = _wait_for(run, partial(_event, run, "restored", moment), f"torchrun did not recover; see {log}")
            first = _wait_for_steps(run, float(restored["time"]), 1, log)
            case.seconds.append(first - moment)
            case.restored_from.append(str(restored.get("tier", "shared")))
            report(number + 1)
    finally:
        for pid in [process.pid, *_children_of(process.pid)]:  # its workers have their own sessions
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _wait_for_steps(run: RunDirectory, since: float, count: int, log: Path) -> float:
    """Wait for `count` steps; return the time of the first."""

    def steps() -> list[float] | None:
        return moments if len(moments := _steps_since(run, since)) >= count else None

    return float(_wait_for(run, steps, f"no steps under torchrun; see {log}")[0])


def _steps_since(run: RunDirectory, moment: float) -> list[float]:
    """Return the times at which rank 0 recorded a step."""
    lines = [line for path in paths_in(run.path / "metrics", "*.jsonl") for line in read_lines(path)[0]]
    return [line["time"] for line in lines if line.get("rank") == 0 and line["time"] > moment and "run_loss" in line]


def _children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return sorted(int(word) for word in listed.stdout.split())
