"""The scope of `craton heal`: a cluster file, or the cluster or machine of a run; its runs and their issues. Runs on
this machine have no scheduler, so their nodes are managed here."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from craton.agent import read_launch
from craton.agent.coordination import avoid_node, read_avoided
from craton.errors import CratonError
from craton.formatting import setting
from craton.job import load_job
from craton.job.cluster import ClusterFile, SchedulerSettings, load_cluster
from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect import chosen_run, take_snapshot
from craton.observability.healing.issues import Issue, of_doctor, of_verdict, rules
from craton.orchestration import NodeService, RunStateError, ServiceNode, read_submission, service_of
from craton.orchestration.changes import come_back, hosts_of, plan_evacuation, working_nodes
from craton.orchestration.watching import MOVING, settled_summaries
from craton.telemetry import RunDirectory, RunSummary, list_runs, runs_root, summarize
from craton.telemetry.files import open_regular, paths_in
from craton.telemetry.members import with_members

DEFAULT_MODE, DEFAULT_SHARE = "advise", 0.1
MAX_REPORT_BYTES = 64 << 20  # of a `craton doctor` report on thousands of nodes
AGENT_ERRORS = (CratonError, OSError)  # an unreadable run must not hide the others


@dataclass(frozen=True)
class HealingScope:
    name: str
    service: NodeService
    runs: tuple[RunDirectory, ...]  # that are active
    root: Path  # where the ledger is
    mode: str = DEFAULT_MODE
    share: float = DEFAULT_SHARE
    hands_over: bool = False  # whether machines may be handed over for reboot or replacement
    ended: tuple[tuple[RunDirectory, float], ...] = ()  # recently failed or lost runs, and when they ended

    def runs_on(self) -> dict[str, list[tuple[RunDirectory, str]]]:
        """Return node of the cluster → the runs that compute there, with their own name for it."""
        result: dict[str, list[tuple[RunDirectory, str]]] = {}
        for run in self.runs:
            try:
                hosts, working = hosts_of(run), working_nodes(run)
            except AGENT_ERRORS:
                continue
            for node, host in hosts.items():
                if node in working:
                    result.setdefault(host, []).append((run, node))
        return result

    def avoid(self, host: str, mark: str) -> None:
        """Keep all runs from using a node that was taken out as their spare."""
        for run in self.runs:
            with contextlib.suppress(*AGENT_ERRORS):
                working = working_nodes(run)
                for node in [node for node, theirs in hosts_of(run).items() if theirs == host and node not in working]:
                    avoid_node(run, node, mark)


class RunService:
    """The nodes of one run on this machine. A node is out when the run avoids it; taking it out moves the run to one of
    its spares."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def nodes(self) -> list[ServiceNode]:
        avoided, working = read_avoided(self._run), working_nodes(self._run)
        return [
            ServiceNode(
                node,
                node in avoided,
                "the run avoids it" if node in avoided else "",
                node in working,
                avoided.get(node, ""),
            )
            for node in read_launch(self._run).nodes
        ]

    def take_out(self, node: str, mark: str, reason: str) -> None:
        """Refuse if the run cannot move; the caller moves it. A spare need not move."""
        way = plan_evacuation(self._run, node)
        if not way.how and node in working_nodes(self._run):
            raise RunStateError(way.sentence)

    def can_hand_over(self, action: str) -> bool:
        return False

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        return False

    def give_back(self, node: str, mark: str) -> str:
        is_back = node in come_back(self._run, mark)
        return "" if is_back else f"{self._run.name} does not avoid {node} because of this action"


def place_of(target: str | None) -> HealingScope:
    """Return the scope of a cluster file, or of a run by name or folder [default: the newest run]."""
    if target is not None and target.endswith((".yaml", ".yml")):
        return _of_cluster(load_cluster(target))
    return _of_run(chosen_run(target))


def look(place: HealingScope, prometheus: str | None = None, notes: list[str] | None = None) -> list[Issue]:
    """Return the issues of the nodes, by the verdicts on their runs and by their pre-flight checks."""
    issues: list[Issue] = []
    problems = notes if notes is not None else []
    for run, ended in [*((run, None) for run in place.runs), *place.ended]:
        try:
            issues += of_verdict(diagnose(take_snapshot(run, prometheus)), hosts_of(run), run.name, ended)
            for path in paths_in(run.path / "preflight", "*.json"):
                with open_regular(path) as file:
                    issues += _of_report(file, path, problems)
        except Exception as error:  # noqa: BLE001 - reported, and must not hide other runs
            problems.append(f"{run.name} could not be diagnosed: {str(error) or type(error).__name__}")
    return issues


def read_report(path: Path, notes: list[str] | None = None) -> list[Issue]:
    """Read the saved output of `craton doctor NODES --json`."""
    try:
        with open(path, "rb") as file:
            return _of_report(file, path, notes if notes is not None else [])
    except OSError as error:
        raise CratonError(f"cannot read --report {path}: {error.strerror}") from None
    except ValueError as error:
        raise CratonError(
            f"--report {path} is not JSON ({error}); write it with `craton doctor NODES --json > FILE`"
        ) from None


def _of_report(file: BinaryIO, path: Path, notes: list[str]) -> list[Issue]:
    """Return the issues in a `craton doctor` report, unless it is too old: nodes get repaired meanwhile."""
    measured = os.fstat(file.fileno()).st_mtime
    document = json.loads(file.read(MAX_REPORT_BYTES))
    if not isinstance(document, dict):
        raise CratonError(f"{path} is not a JSON object; write it with `craton doctor NODES --json > FILE`")
    result = of_doctor(document, measured)
    if result and time.time() - measured > rules().report_seconds:
        notes.append(f"{path} is older than {setting(rules().report_seconds)} and is ignored")
        return []
    return result


def ledger_root(file: ClusterFile | None) -> Path:
    """Return the folder of the cluster's runs, so that all users share one ledger."""
    return Path(file.runs) if file is not None and file.runs and "://" not in file.runs else runs_root()


def _of_cluster(file: ClusterFile) -> HealingScope:
    scheduler = file.scheduler or SchedulerSettings(kind="local")
    root = ledger_root(file)
    moving, ended = _in_time(root, scheduler.kind)
    return _with_policy(HealingScope(file.name, service_of(scheduler), tuple(moving), root, ended=tuple(ended)), file)


def _of_run(run: RunDirectory) -> HealingScope:
    job, on = load_job(run.job_path), read_submission(run).on
    file = job.cluster.file
    (summary,) = settled_summaries([summarize(run)])
    moves = summary.state in MOVING
    runs = (run,) if moves else ()
    ended = () if moves else ((run, _ended_at(run, summary)),)
    if on == "local":
        return _with_policy(HealingScope(run.name, RunService(run), runs, run.root, ended=ended), file)
    scheduler = file.scheduler if file is not None else None
    if scheduler is None or scheduler.kind != on:
        scheduler = SchedulerSettings(kind=on, **_own_keys(on, job.run))
    root = ledger_root(file) if file is not None and file.runs else run.root
    return _with_policy(HealingScope(file.name if file else on, service_of(scheduler), runs, root, ended=ended), file)


def _own_keys(on: str, run: Any) -> dict[str, Any]:
    return {"partition": run.partition} if on == "slurm" else {"namespace": run.namespace}


def _with_policy(place: HealingScope, file: ClusterFile | None) -> HealingScope:
    if file is None:
        return place
    health = file.health
    return replace(place, mode=health.heal, share=health.share, hands_over=health.policy == "replace")


def _in_time(root: Path, kind: str) -> tuple[list[RunDirectory], list[tuple[RunDirectory, float]]]:
    """Return the active runs, and those that failed or were lost recently."""
    runs = [run for run in with_members(list_runs(root)) if read_submission(run).on == kind]
    summaries = settled_summaries([summarize(run) for run in runs])
    moving, ended, oldest = [], [], time.time() - rules().ended_seconds
    for run, summary in zip(runs, summaries, strict=True):
        if summary.state in MOVING:
            moving.append(run)
        elif summary.state in ("failed", "lost") and (moment := _ended_at(run, summary)) >= oldest:
            ended.append((run, moment))
    return moving, ended


def _ended_at(run: RunDirectory, summary: RunSummary) -> float:
    """Return when a run ended; without any step, when its directory last changed; 0 if that was just removed."""
    if summary.updated_at is not None:
        return summary.updated_at
    try:
        return run.path.stat().st_mtime
    except OSError:
        return 0.0
