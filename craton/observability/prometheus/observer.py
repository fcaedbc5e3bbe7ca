"""`craton observe up`: Prometheus and Alertmanager for one run, all runs, or a cluster, with up-to-date targets.

Targets and rules are in RUNS/.observe, where other machines can read them. Data and configuration of the two programs
are on this machine (`data_folder`): Prometheus does not support its database on a network file system.

`Observer` starts both, `refresh()` finds targets and writes them, `look()` queries the state of targets and alerts, and
leaving the context stops both.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from craton.infrastructure import CatalogError, TopologyError
from craton.infrastructure.catalog import instance as catalog_instance
from craton.infrastructure.topology import read_topology
from craton.job.cluster import ClusterFile
from craton.observability.prometheus.alertmanager import alertmanager_config, write_private
from craton.observability.prometheus.errors import ObserveError
from craton.observability.prometheus.processes import (
    ALERTMANAGER,
    PROMETHEUS,
    ObserverProcess,
    find_program,
    start_alertmanager,
    start_prometheus,
)
from craton.observability.prometheus.rules import SEVERAL_HOSTS, efa_per_node, rule_groups
from craton.observability.prometheus.scrape import (
    OWN_JOB,
    SLURM_PORT,
    file_jobs,
    kubernetes_jobs,
    own_job,
    prometheus_config,
    slurm_jobs,
)
from craton.observability.prometheus.targets import (
    FoundTargets,
    ScrapedMachine,
    ScrapeTarget,
    SearchedExporters,
    joined,
    look_at,
    merged,
    serves_metrics,
    write_targets,
)
from craton.orchestration import read_submission
from craton.remote import is_url
from craton.telemetry import RunDirectory, list_runs, runs_root
from craton.telemetry.members import with_members
from craton.yaml_text import to_yaml

FOLDER = ".observe"
ALERTMANAGER_OFFSET = 3  # the usual ports: 9090 and 9093
COMMAND_SECONDS = 10.0
NODES_SECONDS = 60.0  # between two queries for Slurm's nodes


@dataclass(frozen=True)
class ObserverSettings:
    """Runs or cluster to observe, and the options of `craton observe up`."""

    runs: tuple[RunDirectory, ...] = ()  # none: all runs of the root
    cluster: ClusterFile | None = None
    host: str = "127.0.0.1"
    port: int = 9090
    every_seconds: float = 5.0  # interval of scrapes, rule evaluations and target discovery
    alertmanager: bool = True
    webhook: str | None = None
    runbooks: str | None = None  # URL of the runbook folder
    data: Path | None = None  # where metrics are kept; None: `data_folder` of the root

    @property
    def root(self) -> Path:
        """Folder of the run directories: from the runs given, from the cluster file, or the default one."""
        if self.runs:
            return self.runs[0].root
        return Path(self.cluster_runs).expanduser() if self.cluster_runs else runs_root()

    @property
    def cluster_runs(self) -> str:
        """The folder of runs that the cluster file names; "": none."""
        stated = (self.cluster.runs if self.cluster else None) or ""
        return "" if is_url(stated) else stated

    @property
    def interval(self) -> str:
        return f"{max(1, round(self.every_seconds * 1000))}ms"


@dataclass(frozen=True)
class Observed:
    """State of targets and alerts at one moment."""

    targets: tuple[Mapping[str, str], ...]  # job, address, run, node, health, error
    alerts: tuple[Mapping[str, Any], ...]  # name, state, severity, layer, action, summary, labels

    @property
    def firing(self) -> list[Mapping[str, Any]]:
        return [alert for alert in self.alerts if alert["state"] == "firing"]


@dataclass
class TargetKeeper:
    """Discover targets periodically and write them for file_sd."""

    settings: ObserverSettings
    folder: Path
    exporters: SearchedExporters = field(default_factory=SearchedExporters)
    targets: list[ScrapeTarget] = field(default_factory=list)
    trouble: str = ""  # why the last discovery failed; the targets are then those of the one before
    _runs: list[RunDirectory] = field(default_factory=list)
    _slurm_asked: float = float("-inf")
    _slurm_machines: tuple[ScrapedMachine, ...] = ()

    def refresh(self) -> list[RunDirectory]:
        """Return the runs found. A file system that fails for a while is reported in `trouble`."""
        try:
            self._look()
        except OSError as error:
            self.trouble = f"target discovery failed, keeping the last targets: {error}"
        else:
            self.trouble = ""
        return self._runs

    def why_empty(self) -> str:
        """Say why there is nothing to scrape."""
        if not self.settings.runs:
            return f"no active run in {self.settings.root}: targets appear when one starts"
        names = ", ".join(run.name for run in self.settings.runs)
        return f"{names} is not running: targets appear when it is resumed"

    def _look(self) -> None:
        runs = list(with_members(list(self.settings.runs) or list_runs(self.settings.root)))
        found_targets: FoundTargets = look_at(runs)
        self._ask_slurm()
        # Slurm's first: a node's address is then the same whether or not a run uses it.
        machines = merged([*self._slurm_machines, *found_targets.machines])
        targets = [*found_targets.targets, *self.exporters.look(machines)]
        write_targets(self.folder, targets)
        self._runs, self.targets = runs, targets

    def _ask_slurm(self) -> None:
        """List all Slurm nodes, whether or not a run uses them."""
        if _is_on("slurm", self.settings.cluster) and time.monotonic() - self._slurm_asked > NODES_SECONDS:
            self._slurm_asked = time.monotonic()
            names = dict.fromkeys(_output(["sinfo", "--noheader", "--Node", "--format=%N"]).split())
            leaves = _slurm_leaves()
            self._slurm_machines = tuple(ScrapedMachine(name, name, leaves.get(name, "")) for name in names)


class Observer:
    """Context manager that starts Prometheus and Alertmanager and stops them on exit."""

    def __init__(self, settings: ObserverSettings) -> None:
        find_program(PROMETHEUS)
        if settings.alertmanager:
            find_program(ALERTMANAGER)
        elif settings.webhook:
            raise ObserveError("--webhook needs Alertmanager; remove --no-alertmanager")
        self.settings = settings
        self.folder = (settings.root / FOLDER).absolute()
        self.data = (settings.data or data_folder(settings.root)).absolute()
        self.keeper = TargetKeeper(settings, self.folder / "targets")
        self.prometheus: ObserverProcess | None = None
        self.alertmanager: ObserverProcess | None = None
        self._lock: IO[str] | None = None
        self._slurm = _slurm_address(settings.cluster)
        self._runs_of_jobs: dict[str, str] = {}
        self._in_files: dict[str, set[str]] = {}  # job → addresses that Kubernetes discovery may find as well

    def __enter__(self) -> Self:
        settings = self.settings
        try:
            (self.folder / "rules").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ObserveError(
                f"cannot write targets to {self.folder} ({error.strerror}): set CRATON_RUNS to a writable folder"
            ) from error
        try:
            self.data.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ObserveError(
                f"cannot store metrics in {self.data} ({error.strerror}): set --data to a writable folder on a local "
                "disk"
            ) from error
        self._lock = _locked(self.folder / "lock")
        try:
            self._note(self.keeper.refresh())
            efa = efa_per_node(settings.cluster)
            groups = rule_groups(gpus_per_node(settings.cluster), efa_per_node=efa, runbooks=settings.runbooks)
            rules = {"groups": groups}
            (self.folder / "rules" / "craton.yaml").write_text(to_yaml(rules), encoding="utf-8")
            if settings.alertmanager:
                config = alertmanager_config(settings.webhook, first_wait=_first_wait(settings.every_seconds))
                write_private(self.data / "alertmanager.yml", to_yaml(config))
                port = settings.port + ALERTMANAGER_OFFSET
                self.alertmanager = start_alertmanager(self.data, settings.host, port)
            self._write_config()
            self.prometheus = start_prometheus(self.data, settings.host, settings.port)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop both; their data stays."""
        for service in self.services:
            service.end()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def services(self) -> list[ObserverProcess]:
        return [service for service in (self.prometheus, self.alertmanager) if service is not None]

    def refresh(self) -> None:
        """Discover targets (`keeper.trouble` reports failures); ObserveError when one of the two programs exited."""
        runs = self.keeper.refresh()
        try:
            self._follow(runs)
        except OSError as error:
            self.keeper.trouble = self.keeper.trouble or f"cannot map Slurm jobs to runs, keeping the last map: {error}"
        for service in self.services:
            if not service.is_running:
                raise ObserveError(f"{service.name} exited unexpectedly: {service.last_words()}")

    def _follow(self, runs: Sequence[RunDirectory]) -> None:
        if self._note(runs):
            self._write_config()
            assert self.prometheus is not None
            self.prometheus.reload()

    def _note(self, runs: Sequence[RunDirectory]) -> bool:
        """Update the runs and targets of the configuration; return whether they changed."""
        before = self._runs_of_jobs, self._in_files
        self._runs_of_jobs = _runs_of_jobs(runs)
        if _is_on("kubernetes", self.settings.cluster):
            self._in_files = _addresses(self.keeper.targets)
        return before != (self._runs_of_jobs, self._in_files)

    def look(self) -> Observed:
        """Return the targets' health (without Prometheus itself) and the alerts; OSError when it does not answer."""
        assert self.prometheus is not None
        active = self.prometheus.ask("/api/v1/targets", state="active")["data"]["activeTargets"]
        targets = [item for item in active if item["labels"]["job"] != OWN_JOB]
        alerts = self.prometheus.ask("/api/v1/alerts")["data"]["alerts"]
        return Observed(
            tuple(
                sorted(map(_target_entry, targets), key=lambda entry: (entry["job"], entry["address"])),
            ),
            tuple(
                sorted(map(_alert_entry, alerts), key=lambda entry: (entry["severity"], entry["name"])),
            ),
        )

    def _write_config(self) -> None:
        settings, cluster = self.settings, self.settings.cluster
        own = own_job(joined(settings.host, settings.port))
        jobs = [own, *file_jobs(str(self.folder / "targets"), self._runs_of_jobs)]
        if self._slurm:
            jobs += slurm_jobs(self._slurm)
        if cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == "kubernetes":
            discovered = kubernetes_jobs(cluster.scheduler.gang, _kubeconfig(), leaf_label(cluster), self._in_files)
            jobs += [
                {**job, "job_name": f"{job['job_name']}-pods", "relabel_configs": _named(job)} for job in discovered
            ]
        alertmanager = self.alertmanager and self.alertmanager.address
        document = prometheus_config(
            jobs,
            scrape_every=settings.interval,
            rule_files=[str(self.folder / "rules" / "*.yaml")],
            alertmanager=alertmanager or None,
            external_labels={"cluster": cluster.name} if cluster else None,
        )
        (self.data / "prometheus.yml").write_text(to_yaml(document), encoding="utf-8")


def gpus_per_node(cluster: ClusterFile | None) -> int | None:
    """Return the number of GPUs per node of a cluster; None: not known."""
    if cluster is None:
        return None
    if cluster.hardware is not None:
        return cluster.hardware.num_gpus
    try:
        machine = catalog_instance(cluster.instance or "")
    except CatalogError:
        return None
    return None if machine.name.startswith(SEVERAL_HOSTS) else machine.num_gpus or None


def data_folder(root: Path) -> Path:
    """Return the default local folder for the metrics of the runs in `root`."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    place = os.path.realpath(root)
    return state / "craton" / "observe" / f"{Path(place).name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def leaf_label(cluster: ClusterFile | None) -> str:
    """Return the Kubernetes node label that names a node's leaf switch; "": not known."""
    leaf = cluster.levels.leaf if cluster else None
    return (leaf.label if leaf else None) or ""


def _named(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Set the label `job` back to the plain name that rules use: two scrape jobs cannot share a name."""
    return [*job["relabel_configs"], {"target_label": "job", "replacement": job["job_name"]}]


def _first_wait(every_seconds: float) -> str:
    """Return Alertmanager's group_wait: alerts of one moment are sent together; short scrape intervals shorten it."""
    return f"{round(min(10.0, every_seconds) * 1000)}ms"


def _locked(path: Path) -> IO[str]:
    file: IO[str] | None = None
    try:
        file = path.open("a", encoding="utf-8")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if file is not None:
            file.close()
        if isinstance(error, BlockingIOError):
            raise ObserveError(
                f"another `craton observe up` already uses {path.parent}; use that one, or stop it first"
            ) from None
        raise ObserveError(
            f"cannot lock {path} ({error.strerror}): set CRATON_RUNS to your own folder on a file system with locks"
        ) from error
    return file


def _runs_of_jobs(runs: Sequence[RunDirectory]) -> dict[str, str]:
    """Return Slurm job ID → run, for runs that have not ended."""
    result = {}
    for run in runs:
        if not (run.has("DONE") or run.has("FATAL")):
            submission = read_submission(run)
            if submission.on == "slurm" and submission.job:
                result[submission.job] = run.name
    return result


def _addresses(targets: Iterable[ScrapeTarget]) -> dict[str, set[str]]:
    """Return job → addresses of its targets."""
    result: dict[str, set[str]] = {}
    for target in targets:
        result.setdefault(target.job, set()).add(target.address)
    return result


def _kubeconfig() -> str | None:
    """Return the kubeconfig file; None inside a cluster, where the pod's service account is used."""
    for stated in (*os.environ.get("KUBECONFIG", "").split(os.pathsep), "~/.kube/config"):
        if stated and Path(stated).expanduser().is_file():
            return str(Path(stated).expanduser())
    return None


def _is_on(kind: str, cluster: ClusterFile | None) -> bool:
    return cluster is not None and cluster.scheduler is not None and cluster.scheduler.kind == kind


def _slurm_leaves() -> dict[str, str]:
    """Return node → leaf switch, where Slurm has a topology configuration."""
    try:
        topology = read_topology(_output(["scontrol", "show", "topology"]))
    except TopologyError:
        return {}
    return {place.node: place.path[-1] for place in topology.places if place.path}


def _slurm_address(cluster: ClusterFile | None) -> str:
    """Return the address at which slurmctld serves metrics; "": it does not."""
    if not _is_on("slurm", cluster):
        return ""
    lines = (line.partition("=") for line in _output(["scontrol", "show", "config"]).splitlines())
    settings = {name.strip(): value.strip() for name, _, value in lines}
    host = settings.get("SlurmctldHost[0]", "localhost").partition("(")[0]
    port = settings.get("SlurmctldPort", str(SLURM_PORT)).partition("-")[0]
    return f"{host}:{port}" if serves_metrics(host, int(port), "/metrics/nodes") else ""


def _output(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _target_entry(target: Mapping[str, Any]) -> dict[str, str]:
    labels = target["labels"]
    return {
        "job": labels["job"],
        "address": labels["instance"],
        "run": labels.get("run", ""),
        "node": labels.get("node", ""),
        "health": target["health"],  # up, down, or unknown before the first scrape
        "error": target.get("lastError", ""),
    }


def _alert_entry(alert: Mapping[str, Any]) -> dict[str, Any]:
    labels, notes = alert["labels"], alert.get("annotations", {})
    return {
        "name": labels["alertname"],
        "state": alert["state"],
        "severity": labels.get("severity", ""),
        "layer": labels.get("layer", ""),
        "action": labels.get("action", ""),
        "summary": notes.get("summary", ""),
        "runbook": notes.get("runbook_url") or notes.get("runbook", ""),
        "labels": {name: value for name, value in labels.items() if name != "alertname"},
        "since": alert.get("activeAt", ""),
    }
