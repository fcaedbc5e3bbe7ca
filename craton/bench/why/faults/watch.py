"""Runs one fault: start the job, wait until it has settled, break it, diagnose once a second, keep what was said.

The verdict at the judgement is scored (`rubric.py`): `judge_seconds` after the onset, or ENDED_SECONDS after the run
has ended. Alarms before the onset are false alarms.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from craton.bench.why.faults.environment import RefusedError, Workshop, missing
from craton.bench.why.faults.fault import LiveFault
from craton.bench.why.faults.running import RunningJob
from craton.observability.diagnosis import Verdict, diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.observability.diagnosis.snapshot import Snapshot
from craton.telemetry import RunDirectory

LOOK_SECONDS = 1.0
SETTLE_LIMIT_SECONDS = 300.0
SETTLED_SECONDS = 4.0  # of a command without steps, after its ranks are up
ENDED_SECONDS = 3.0


@dataclass(frozen=True)
class Look:
    """One diagnosis of the run."""

    seconds: float  # after the onset; before it: negative, before the job settled
    verdict: Verdict


@dataclass
class FaultRecord:
    """What happened to one fault."""

    fault: LiveFault
    not_run: str = ""  # what this machine lacks
    error: str = ""  # the bench failed: the job did not settle, or the fault did not begin
    looks: list[Look] = field(default_factory=list)  # after the onset, the last one is scored
    early: list[Verdict] = field(default_factory=list)  # alarms before the onset
    has_ended: bool = False  # the run was over at the judgement
    steps: int = 0
    seconds: float = 0.0  # of the whole test

    @property
    def final(self) -> Verdict | None:
        return self.looks[-1].verdict if self.looks else None


def run_fault(fault: LiveFault, workshop: Workshop, keep: Path) -> FaultRecord:
    """Run one fault and keep its snapshot, verdicts and logs in `keep`."""
    record = FaultRecord(fault)
    for need in fault.needs:
        if reason := missing(need):
            record.not_run = reason
            return record
    started = time.monotonic()
    folder = workshop.root / "faults" / fault.name
    try:
        with workshop.start(fault.job, folder, f"{fault.name}-{os.getpid()}") as job:
            snapshot = _observe(fault, job, record)
            record.steps = job.step()
            _keep(keep / fault.name, job.run, snapshot, record)
    except (TimeoutError, RefusedError, LookupError, OSError, RuntimeError) as problem:
        record.error = f"{type(problem).__name__}: {problem}"
        if not isinstance(problem, TimeoutError | RefusedError):
            record.error += f"\n{traceback.format_exc()}"
    record.seconds = time.monotonic() - started
    shutil.rmtree(folder, ignore_errors=True)
    return record


def look(run: RunDirectory) -> tuple[Snapshot, Verdict]:
    """Diagnose a run, as `craton why` does."""
    snapshot = take_snapshot(run)
    return snapshot, diagnose(snapshot)


def _observe(fault: LiveFault, job: RunningJob, record: FaultRecord) -> Snapshot:
    """Diagnose the run from its start to the judgement; return the last snapshot."""
    begun = time.monotonic()
    if fault.begins_by != "start":
        begun = _wait_for_onset(fault, job, record)
    elif fault.inject is not None:
        fault.inject(job)
    ended: float | None = None
    while True:
        began_look = time.monotonic()
        snapshot, verdict = look(job.run)
        now = time.monotonic()
        record.looks.append(Look(now - begun, verdict))
        if ended is None and snapshot.run.has_ended and not job.processes():  # a diagnosis may take a live run for dead
            ended = now
        record.has_ended = ended is not None
        if now - begun >= fault.judge_seconds or (ended is not None and now - ended >= ENDED_SECONDS):
            return snapshot
        time.sleep(max(0.0, LOOK_SECONDS - (now - began_look)))


def _wait_for_onset(fault: LiveFault, job: RunningJob, record: FaultRecord) -> float:
    """Wait until the fault has begun, diagnosing meanwhile; return the moment."""
    settling = Settling(fault, job)
    deadline = time.monotonic() + SETTLE_LIMIT_SECONDS
    while time.monotonic() < deadline:
        if fault.inject is not None and settling.is_settled():
            begun = time.monotonic()
            fault.inject(job)
            return begun
        if fault.inject is None and job.onset.exists():
            return time.monotonic()
        began_look = time.monotonic()
        snapshot, verdict = look(job.run)
        if job.onset.exists():
            continue
        if verdict.is_alarm:
            record.early.append(verdict)
        if snapshot.run.has_ended:
            raise TimeoutError(f"the run ended before its fault began: {verdict.sentence}")
        time.sleep(max(0.0, LOOK_SECONDS - (time.monotonic() - began_look)))
    raise TimeoutError(f"the fault did not begin within {SETTLE_LIMIT_SECONDS:g} seconds, at step {job.step()}")


class Settling:
    """Says when a job runs as usual: a training by its steps, a server by its health, a command by its age."""

    def __init__(self, fault: LiveFault, job: RunningJob) -> None:
        self._fault, self._job, self._up_since = fault, job, 0.0

    def is_settled(self) -> bool:
        recipe = self._fault.job
        if recipe.kind == "serve":
            return _answers(f"{self._job.url}/health")
        if recipe.kind != "command" or "progress" in recipe.keys:
            return self._job.step() >= recipe.settled_step
        if len(self._job.rank_pids()) < recipe.nodes:
            return False
        self._up_since = self._up_since or time.monotonic()
        return time.monotonic() - self._up_since >= SETTLED_SECONDS


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _keep(folder: Path, run: RunDirectory, snapshot: Snapshot, record: FaultRecord) -> None:
    """Keep the last snapshot, all verdicts, and the run's logs and events."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "snapshot.json").write_text(snapshot.to_json())
    looks = [{"seconds": round(item.seconds, 2), **item.verdict.to_json()} for item in record.looks]
    early = [verdict.to_json() for verdict in record.early]
    (folder / "verdicts.json").write_text(json.dumps({"looks": looks, "before_onset": early}, indent=1, default=str))
    for name in ("logs", "events", "status"):
        if (run.path / name).is_dir():
            shutil.copytree(run.path / name, folder / name, dirs_exist_ok=True, ignore_dangling_symlinks=True)
