"""Inject faults into a small training run and print what happened and how long it took, one row per fault.

`python benchmarks/faults.py` prints the table of docs/measurements.md, `--fault NAME` one row. Each fault has its own
run with real agents, ranks and disks on this machine. Faults of disks mount small file systems and need root.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craton.agent import newest_generation
from craton.bench.recovery.rehearsal import Rehearsal, end_rehearsal, running, write_rehearsal
from craton.job import parse_fault
from craton.orchestration import start_agents
from craton.orchestration.changes import arm_faults
from craton.orchestration.start import newest_checkpoint
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.files import read_lines

STEPS = 24
BREAK_AT = 10
LIMIT_SECONDS = 300.0
SMALL, LARGE = "1m", "64m"  # a disk too small for the state, and one that is large enough


class BenchmarkError(RuntimeError):
    """The outcome of a run differs from its row."""


@dataclass(frozen=True)
class Row:
    """The outcome of a fault."""

    outcome: str
    seconds: float | None  # until the run continued, or had saved its state
    repeated_steps: int  # that rank 0 recorded more than once


def broken_by(*chaos: str, **more: Any) -> Callable[[Path], Row]:
    """Inject a fault with the run's `chaos` and wait for the recovery."""

    def measure(root: Path) -> Row:
        wanted = Rehearsal("run", ranks_per_node=1, steps=STEPS, chaos=chaos, **more)
        with running(root, wanted) as run:
            return recovery(run, chaos)

    return measure


def node_lost(root: Path) -> Row:
    """Lose a node that has ranks; the spare is known only when the first generation has begun."""
    with running(root, Rehearsal("run", ranks_per_node=1, steps=STEPS, spares=1)) as run:
        generation = wait_for(lambda: newest_generation(run), run)
        node = next(node for node in generation.nodes if node != generation.by)
        fault = parse_fault(f"lose-node {node}@step={BREAK_AT}")
        arm_faults(run, [fault])
        return recovery(run, [fault.text])


def recovery(run: RunDirectory, chaos: Sequence[str]) -> Row:
    """Return the outcome of a run after its injected fault."""
    wait_for(lambda: run.has("DONE") or run.has("FATAL"), run)
    if run.has("FATAL"):
        return Row("FATAL: " + run.marker_text("FATAL").splitlines()[0], None, repeated_steps(run))
    fired, recovered = events(run, "chaos_fired"), events(run, "recovered")
    if not fired or not recovered:
        what = "nothing was recovered from it" if fired else "it did not happen"
        raise BenchmarkError(f"{', '.join(chaos)}: {what}")
    seconds = max(each["seconds"] for each in recovered)
    tiers = ", ".join(dict.fromkeys(str(each["restored_from"]) for each in recovered))
    return Row(f"restored from {tiers}, done", seconds, repeated_steps(run))


def tier_full_on_the_way(root: Path) -> Row:
    """Measure from space being freed to the next checkpoint on that tier."""
    with disk(root / "tier", SMALL) as tier, running(root, rehearsal(tier, every=2)) as run:
        wait_for(lambda: events(run, "checkpoint_failed"), run)
        resize(tier, LARGE)
        began = time.time()
        saved = wait_for(lambda: events(run, "checkpoint_saved"), run)[0]
        wait_for(lambda: run.has("DONE"), run)
        return Row("training continues, the tier joins the next save", saved["time"] - began, repeated_steps(run))


def tier_at_the_end(is_read_only: bool) -> Callable[[Path], Row]:
    """Measure from the failed save to the end of the run."""

    def measure(root: Path) -> Row:
        with disk(root / "tier", LARGE if is_read_only else SMALL) as tier, running(root, rehearsal(tier)) as run:
            wait_for(lambda: summarize(run).step >= 2, run)
            if is_read_only:
                subprocess.run(["mount", "-o", "remount,ro", str(tier)], check=True)
            failed = wait_for(lambda: events(run, "checkpoint_failed"), run)[0]
            wait_for(lambda: run.has("DONE"), run)
            return Row(f"saved to tier {saved_tier(run)}, done", time.time() - failed["time"], repeated_steps(run))

    return measure


def all_disks_full_at_the_end(root: Path) -> Row:
    """Measure from space being freed to the end of the run; until then the ranks stay alive with the state."""
    run, launch = write_rehearsal(root, rehearsal(root / "tier"))
    with disk(root / "tier", SMALL) as tier, disk(run.path / "checkpoints" / "rescue", "8k"):
        try:
            start_agents(run, launch)
            wait_for(lambda: summarize(run).unsaved, run)
            resize(tier, LARGE)
            began = time.time()
            wait_for(lambda: run.has("DONE"), run)
            where = "the tier" if saved_tier(run) == str(tier) else saved_tier(run)
            outcome = f"ranks hold the state; saved to {where} once there is space, done"
            return Row(outcome, time.time() - began, repeated_steps(run))
        finally:
            end_rehearsal(run)


def killed_in_the_last_save(root: Path) -> Row:
    """Kill a rank while the last save fails on a full tier."""
    chaos = (f"kill rank=1@step={STEPS},during=saving",)
    with disk(root / "tier", SMALL) as tier, running(root, rehearsal(tier, chaos=chaos)) as run:
        wait_for(lambda: run.has("DONE") or run.has("FATAL"), run)
        recovered = events(run, "recovered")
        if not recovered:
            raise BenchmarkError(run.marker_text("FATAL") or "the fault did not happen")
        outcome = f"restored from {recovered[0]['restored_from']}, saved to tier {saved_tier(run)}, done"
        return Row(outcome, recovered[0]["seconds"], repeated_steps(run))


@dataclass(frozen=True)
class Fault:
    name: str
    measure: Callable[[Path], Row]
    needs_root: bool = False


FAULTS = {
    "kill-rank": Fault("a rank is killed", broken_by(f"kill rank=1@step={BREAK_AT}")),
    "raise": Fault("a rank raises", broken_by(f"fail rank=1@step={BREAK_AT}")),
    "stop-rank": Fault("a rank is stopped (SIGSTOP)", broken_by(f"hang rank=1@step={BREAK_AT},how=stop")),
    "kill-agent": Fault("an agent is killed", broken_by(f"kill agent=node-1@step={BREAK_AT}")),
    "kill-coordinator": Fault("the coordinating agent is killed", broken_by(f"kill coordinator@step={BREAK_AT}")),
    "kill-keeper": Fault("a keeper is killed", broken_by(f"kill keeper=node-1@step={BREAK_AT}")),
    "lose-node": Fault("a node is lost, a spare takes over", node_lost),
    "full-tier": Fault("a tier is full during training", tier_full_on_the_way, needs_root=True),
    "full-tier-end": Fault("the only tier is full at the end", tier_at_the_end(is_read_only=False), needs_root=True),
    "read-only-end": Fault(
        "the only tier is read-only at the end", tier_at_the_end(is_read_only=True), needs_root=True
    ),
    "all-full-end": Fault("tier and run directory are full at the end", all_disks_full_at_the_end, needs_root=True),
    "kill-last-save": Fault(
        "a rank is killed in the last save, the tier is full", killed_in_the_last_save, needs_root=True
    ),
}


def rehearsal(tier: Path, every: int | None = None, chaos: Sequence[str] = ()) -> Rehearsal:
    interval = f", every_steps: {every}" if every else ""
    checkpoint = f"{{peer: 1 steps, tiers: [{{to: {tier}{interval}}}]}}"
    return Rehearsal("run", ranks_per_node=1, steps=STEPS, checkpoint=checkpoint, chaos=chaos)


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def events(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    lines = [line for path in (run.path / "events").glob("*.jsonl") for line in read_lines(path)[0]]
    return sorted((line for line in lines if line.get("event") == name), key=lambda line: float(line["time"]))


def repeated_steps(run: RunDirectory) -> int:
    lines = [line for path in (run.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0]]
    steps = [line["step"] for line in lines if line.get("rank") == 0 and "run_loss" in line]
    return len(steps) - len(set(steps))


def saved_tier(run: RunDirectory) -> str:
    saved = newest_checkpoint(run)
    if saved is None or saved.step != STEPS:
        raise BenchmarkError(f"step {STEPS} was not saved")
    return saved.tier


def wait_for(condition: Callable[[], Any], run: RunDirectory) -> Any:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise BenchmarkError(f"{run.path}: nothing happened within {LIMIT_SECONDS:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="append", choices=tuple(FAULTS), help="may be repeated; default: all")
    wanted = parser.parse_args(arguments).fault or list(FAULTS)
    print("| fault | `--fault` | what happens | seconds | steps repeated |\n|---|---|---|--:|--:|", flush=True)
    failed = 0
    for name in wanted:
        fault = FAULTS[name]
        with tempfile.TemporaryDirectory(prefix="craton-faults-") as folder:
            try:
                row = fault.measure(Path(folder))
            except (BenchmarkError, subprocess.CalledProcessError) as error:
                failed += 1
                message = f"{error}; mounting needs root" if fault.needs_root else str(error)
                print(f"{name}: {message}", file=sys.stderr, flush=True)
                continue
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        print(f"| {fault.name} | `{name}` | {row.outcome} | {seconds} | {row.repeated_steps} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
