"""Fault injection: check faults against a run, write the order for its agents, and report which faults fired.

An order is RUN/chaos/ID.json, written atomically; a fault in a member goes to the member's own agents. The agents
record `chaos_armed` when they have read it, and `chaos_fired` with the fault's text when they inject it.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from craton.agent import Launch, newest_generation, read_launch
from craton.formatting import setting
from craton.job import (
    RANDOM_KINDS,
    TRAINING_KINDS,
    FaultError,
    InjectedFault,
    Job,
    check_fault,
    check_member,
    load_job,
    parse_fault,
    random_faults,
)
from craton.orchestration.draft import tier_names
from craton.orchestration.run_files import write_whole
from craton.orchestration.watching import check_is_seen, check_running
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.files import paths_in, read_lines
from craton.telemetry.members import MEMBERS_FOLDER, member_runs, owner_of, read_members

SOON_STEPS = 2  # minimum distance of the first random fault: an order takes half a second to arrive


def check_can_break(run: RunDirectory) -> None:
    check_running(run, "break")
    check_is_seen(run, "run `kubectl exec POD -- craton chaos …` in any of its pods")


def faults_for(run: RunDirectory, texts: Sequence[str]) -> list[InjectedFault]:
    """Parse fault lines and check that each one is possible now, in this run or in a member of it."""
    check_can_break(run)
    faults = [parse_fault(text) for text in texts]
    for fault in faults:
        check_member(fault, _member_names(run))
    for broken, theirs in _by_run(run, faults).items():
        check_can_break(broken)
        _check_faults(broken, theirs)
    return faults


def _check_faults(run: RunDirectory, faults: Sequence[InjectedFault]) -> None:
    job, launch = load_job(run.job_path), read_launch(run)
    world, nodes = _membership(run, launch)
    step = summarize(run).step
    for fault in faults:
        check_fault(
            fault,
            world=world,
            nodes=sorted({*nodes, *launch.nodes}, key=[*launch.nodes, *nodes].index),
            tiers=tier_names(job),
            step=step,
            steps=job.steps,
            trains=job.kind in TRAINING_KINDS,
            watched=launch.watched_rank,
            parts=job.fault_parts,
        )
        if fault.step is not None and not (launch.nursery or launch.progress.get("has_steps") or step):
            raise FaultError(
                f"{fault.text!r}: this command reports no steps; write `progress:` in its job, or omit @step"
            )


def random_faults_for(
    run: RunDirectory, count: int, seed: int, kinds: Iterable[str] = RANDOM_KINDS
) -> list[InjectedFault]:
    """Draw faults from a seed, spread over the remaining steps."""
    check_can_break(run)
    job = load_job(run.job_path)
    world, nodes = _membership(run, read_launch(run))
    if job.steps is None:
        raise FaultError(f"--random spreads faults over the steps of a job, and {run.name} has no number of steps")
    first = summarize(run).step + SOON_STEPS
    return random_faults(count, seed, job.steps, world, nodes, tier_names(job), kinds, first)


def arm_faults(run: RunDirectory, faults: Sequence[InjectedFault]) -> Path:
    """Write the order, and one for each member with faults; the agents of these runs execute them."""
    check_can_break(run)
    name = f"{time.time_ns()}-{os.getpid()}.json"
    for broken, theirs in _by_run(run, faults).items():
        order = {"faults": [fault.text for fault in theirs], "by": getpass.getuser(), "time": time.time()}
        write_whole(broken.chaos_folder / name, json.dumps(order, indent=1) + "\n")
    return run.chaos_folder / name


def fired_faults(run: RunDirectory, since: float = 0.0) -> dict[str, float]:
    """Return text → epoch seconds of every fault that fired since then, oldest first. A fault that every node injects
    itself, such as a flipped byte in its own memory, counts from the first node on."""
    result: dict[str, float] = {}
    in_members = (
        event for member in member_runs(run) for event in _events(member) if "member=" in str(event.get("fault"))
    )
    for event in sorted([*_events(run), *in_members], key=lambda event: float(event.get("time", 0.0))):
        moment = float(event.get("time", 0.0))
        if event.get("event") == "chaos_fired" and moment >= since:
            result.setdefault(str(event.get("fault")).partition(": ")[0], moment)  # the action follows the fault's text
    return result


def faults_left(run: RunDirectory, job: Job, before: Launch, launch: Launch, step: int) -> list[str]:
    """Return the faults that a resume keeps: not fired, not in the past, and possible on the new nodes."""
    happened = fired_faults(run)
    left = []
    for text in before.chaos:
        try:
            check_fault(
                parse_fault(text),
                world=launch.world_size,
                nodes=launch.nodes,
                tiers=tier_names(job),
                step=step,
                steps=job.steps,
                trains=job.kind in TRAINING_KINDS,
                watched=launch.watched_rank,
                parts=job.fault_parts,
            )
        except FaultError:
            continue
        if text not in happened:
            left.append(text)
    return left


def what_happens(fault: InjectedFault) -> str:
    """Describe a fault: `at step 40, rank 3 is killed (SIGKILL)`."""
    when = "at once"
    if fault.during is not None:
        when = f"during {fault.during}" + (f" from step {fault.step:,} on" if fault.step else "")
    elif fault.step is not None:
        when = f"at step {fault.step:,}"
    lasting = f" for {setting(fault.for_seconds)}" if fault.for_seconds else " to the end"
    target = f"rank {fault.rank}" if fault.target == "rank" else f"the {fault.target}"
    if fault.target == "member":
        target = f"member {fault.member} with its agents"
    if fault.target == "verifier":
        target = f"every verifier worker of rank {fault.rank}"
    if fault.target in ("agent", "keeper"):
        target = f"the {fault.target} of {fault.node}"
    effect = {
        "kill": f"{target} is killed (SIGKILL)",
        "hang": f"{target} is stopped (SIGSTOP)" if fault.how == "stop" else f"{target} hangs in an endless loop",
        "fail": f"{target} raises an exception",
        "slow-disk": f"every write to tier {fault.tier} takes {setting(fault.seconds or 0)} longer{lasting}",
        "lose-node": f"{fault.node} is lost for good: its agent and every process on it are killed",
        "corrupt": f"a byte of the newest step in tier {fault.tier} is flipped",
    }[fault.kind]
    if fault.kind == "corrupt" and fault.tier == "peer":
        whose = {"own": "the ranks' own state", "copies": "the replicas on their peers", "all": "own and replicas"}
        of = "every rank" if fault.rank is None else f"rank {fault.rank}"
        effect = f"a byte of the newest step of {of} in peer memory is flipped ({whose[fault.how or 'all']})"
    if fault.target == "journal":
        effect = f"the newest entry of the rollout journal is {'cut off' if fault.how == 'cut' else 'changed by a bit'}"
    if fault.target == "weights":
        effect = "a bit of the next weights for the rollout servers is flipped on the way"
    inside = f" in member {fault.member}" if fault.member is not None and fault.target != "member" else ""
    return f"{when}, {effect}{inside}"


def _by_run(run: RunDirectory, faults: Sequence[InjectedFault]) -> dict[RunDirectory, list[InjectedFault]]:
    """Return the run and its members that get faults, each with its own; the run itself always."""
    result: dict[RunDirectory, list[InjectedFault]] = {run: []}
    for fault in faults:
        is_own = fault.member is None or (fault.member == run.path.name and not read_members(run).member(fault.member))
        place = run if is_own else RunDirectory(run.path / MEMBERS_FOLDER / str(fault.member))
        result.setdefault(place, []).append(fault)
    return result


def _member_names(run: RunDirectory) -> list[str]:
    """Return the members that faults may name; a member may be named by itself."""
    return [*(member.name for member in read_members(run).members), *([run.path.name] if owner_of(run) else [])]


def _membership(run: RunDirectory, launch: Launch) -> tuple[int, list[str]]:
    """Return (number of ranks, nodes) that work now."""
    newest = newest_generation(run)
    if newest is None:
        return launch.world_size, launch.nodes[: launch.working_nodes]
    return newest.world, newest.nodes


def _events(run: RunDirectory) -> Iterator[dict[str, Any]]:
    for path in paths_in(run.path / "events", "*.jsonl"):
        yield from read_lines(path)[0]
