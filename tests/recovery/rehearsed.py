"""Runs that are broken on purpose: real agents, keepers and ranks on this machine, and what must be true of them after.

`expect_same_end` is what every disturbed run has to meet: the losses of the undisturbed one to the bit, no step lost
beyond the interval of peer memory, books that sum to wall time, no process and no shared memory left.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import waiting

from craton.bench.recovery.rehearsal import EXPERTS, Rehearsal, end_rehearsal, running, write_rehearsal
from craton.orchestration import start_agents
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines
from craton.telemetry.rank import LedgerReader

LIMIT_SECONDS = 240.0
SHARED_MEMORY = "/dev/shm"
HARMS_MEMORY = ("corrupt", "kill keeper", "kill agent", "kill coordinator", "lose-node")
# name → what of a Rehearsal differs; two nodes with two ranks each
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"layout": {"fsdp": 4, "micro_batch": 4}},
    "hsdp": {"layout": {"replicate": 2, "fsdp": 2, "micro_batch": 4}},
    "tp": {"layout": {"fsdp": 2, "tp": 2, "micro_batch": 4}},
    "pp": {"layout": {"pp": 2, "fsdp": 2, "micro_batch": 4}},
    "experts": {"model": EXPERTS, "layout": {"fsdp": 4, "ep": 2, "micro_batch": 4}},
    "hsdp experts": {"model": EXPERTS, "layout": {"replicate": 2, "fsdp": 2, "ep": 2, "micro_batch": 4}},
}


def finish(run: RunDirectory, seconds: float = LIMIT_SECONDS) -> None:
    """Until the run is done and its agents are gone."""
    wait_until(lambda: run.has("DONE") or run.has("FATAL"), f"{run.name} ends", run, seconds)
    assert not run.has("FATAL"), run.marker_text("FATAL") + last_words(run)
    wait_until(lambda: not processes_of(run), f"the processes of {run.name} end", run)


def wait_until(condition: Callable[[], Any], what: str, run: RunDirectory, seconds: float = LIMIT_SECONDS) -> Any:
    return waiting.wait_until(condition, lambda: f"{what}{last_words(run)}", seconds)


def last_words(run: RunDirectory) -> str:
    told = [
        f"\n{event['time']:.2f} {event['node']} {event['event']} {json.dumps(event)[:300]}" for event in events(run)
    ]
    logs = [
        f"\n== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:])
        for path in sorted((run.path / "logs").glob("*.log"))
    ]
    left = [f"\n{pid} {text}" for pid, text in processes_of(run).items()]
    return "".join(told[-40:] + logs + ["\n== processes", *left])


def events(run: RunDirectory, name: str | None = None) -> list[dict[str, Any]]:
    lines = [line for path in (run.path / "events").glob("*.jsonl") for line in read_lines(path)[0]]
    return sorted((line for line in lines if name in (None, line["event"])), key=lambda line: float(line["time"]))


def losses(run: RunDirectory) -> dict[int, float]:
    """step → the loss that counts: that of the last time it was done."""
    lines = [line for path in (run.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0]]
    ordered = sorted((line for line in lines if "run_loss" in line), key=lambda line: float(line["time"]))
    return {int(line["step"]): line["run_loss"] for line in ordered}


def processes_of(run: RunDirectory) -> dict[int, str]:
    """pid → state, parent and command of all whose command line has the run: agents, fork servers, their ranks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        is_ours = re.search(rf"craton\.(agent|ml\.fork_server|ml\.training) {re.escape(str(run.path))}( |$)", command)
        if is_ours and state != "Z" and int(folder.name) != os.getpid():
            found[int(folder.name)] = f"{state}, child of {parent}: {command}"
    return found


def shared_memory() -> int:
    """Bytes of the mount that are in use; slots have no names there."""
    mount = os.statvfs(SHARED_MEMORY)
    return (mount.f_blocks - mount.f_bfree) * mount.f_frsize


def killed_in(run: RunDirectory) -> list[str]:
    """What ranks were doing when they were killed on purpose: the ledger's kind, and what went on beside it."""
    ended = [event for event in events(run, "rank_ended") if event["code"] == -signal.SIGKILL]
    found = []
    for fault in events(run, "chaos_fired"):
        if match := re.match(r"kill rank=(\d+)", str(fault["fault"])):
            of_rank = [event for event in ended if event["rank"] == int(match[1])]
            death = min(of_rank, key=lambda event: abs(event["time"] - fault["time"]), default=None)
            if death is not None:
                ended.remove(death)
                found.append(str(death["during"]))
    return found


def fired(run: RunDirectory) -> set[str]:
    """The faults that happened, by their place in the launch; one that every node does for itself counts once."""
    names = [re.match(r"launch-\d+-\d+", path.name) for path in run.chaos_folder.glob("*.fired")]
    return {name[0] for name in names if name}


def check_ledger(run: RunDirectory) -> None:
    """The books of the run sum to wall time within 1%, and a fifth of a second for its beginning and its end."""
    seconds = sum(LedgerReader(run).totals().values())
    told = events(run)
    wall = max(event["time"] for event in told) - min(
        event["time"] for event in told if event["event"] == "agent_started"
    )
    assert abs(seconds - wall) <= 0.01 * wall + 0.2, f"the ledger has {seconds:.2f} s of {wall:.2f}{last_words(run)}"


def check_steps(run: RunDirectory, interval: int) -> None:
    """Until memory itself is harmed, every recovery is from there and loses at most the policy's interval; one of the
    very first steps may find nothing there yet."""
    harm = [event["time"] for event in events(run, "chaos_fired") if str(event["fault"]).startswith(HARMS_MEMORY)]
    for event in events(run, "recovered"):
        if event["time"] >= min(harm, default=float("inf")):
            break
        if event["restored_from"] == "the beginning" and event["lost_steps"] < 3:
            continue
        assert event["restored_from"] == "peer", last_words(run)
        assert event["lost_steps"] <= interval, last_words(run)


@contextmanager
def shrunk_and_grown(root: Path, rehearsal: Rehearsal, lost: int, fewer: int) -> Iterator[RunDirectory]:
    """A run that loses a node at a step, goes on with fewer ranks, and has ended after the node came back."""
    run, launch = write_rehearsal(root, rehearsal)
    start_agents(run, launch)
    try:
        wait_until(lambda: len(events(run, "generation_started")) == 2, "it goes on with fewer nodes", run)
        assert events(run, "generation_started")[1]["world"] == fewer
        step = max(losses(run), default=0)
        wait_until(lambda: max(losses(run), default=0) >= step + 4, "it moves", run)
        (run.path / "heartbeat" / f".node-{lost}.lost").unlink()
        start_agents(run, launch, [lost])
        finish(run)
        assert sorted(losses(run)) == list(range(1, rehearsal.steps + 1))
        yield run
    finally:
        end_rehearsal(run)


@cache
def undisturbed(root: Path, name: str, steps: int) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    with running(root, Rehearsal(f"calm-{name.replace(' ', '-')}-{steps}", steps=steps, **LAYOUTS[name])) as run:
        finish(run)
        return losses(run)


def expect_same_end(run: RunDirectory, expected: dict[int, float], before: int, interval: int | None = 1) -> None:
    """`before` is what shared memory held; without an interval the run has no memory tier to recover from."""
    finish(run)
    found = losses(run)
    assert max(found) == max(expected), last_words(run)
    different = {step: (loss, expected[step]) for step, loss in found.items() if loss != expected.get(step, loss)}
    assert not different, f"step → (loss, that of the calm run): {different}{last_words(run)}"
    if interval is not None:
        check_steps(run, interval)
    check_ledger(run)
    assert not processes_of(run)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # beside other tests the mount is not this run's alone
        wait_until(lambda: shared_memory() <= before + 2**20, "its shared memory is given back", run)
