"""`craton doctor NODES`: check many nodes of a Slurm cluster with one `srun`, then compare them: a GPU with different
results, a node that is slow with all others.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from craton.agent.processes import free_port
from craton.formatting import setting
from craton.infrastructure import Instance, resolve_cluster
from craton.infrastructure.topology import expand as expand_hosts
from craton.infrastructure.topology import natural
from craton.job.cluster import ClusterFile, ClusterRef, load_cluster
from craton.orchestration.draft import gres_gpus
from craton.orchestration.errors import SchedulerError, StartError
from craton.orchestration.preflight import (
    GANG_CHECKS,
    MEASURED_BYTES,
    SECRET_VARIABLE,
    Diagnosis,
    PreflightFinding,
    bandwidth_command,
    check_bandwidth,
    check_compute,
    ordered,
)
from craton.orchestration.slurm.tools import own_environment, read_nodes
from craton.planning.rates import pair_bytes_per_second
from craton.telemetry import runs_root
from craton.telemetry.files import read_regular

LIMIT_SECONDS = 600.0
LIMIT = f"--time={int(LIMIT_SECONDS / 60)}"


def diagnose_nodes(nodes: str, cluster: str | None, *, compute: bool = False, bandwidth: bool = False) -> Diagnosis:
    """Diagnose every node, then compare all of them."""
    file = slurm_cluster(nodes, cluster) if cluster and is_file(cluster) else None
    hosts = sorted(expand_hosts(nodes), key=natural)
    # The nodes themselves write these files, so they must be on a path that every node sees.
    shared = Path(file.runs) if file and file.runs and "://" not in file.runs else runs_root()
    shared.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=shared) as folder:
        options = ["--json", *(["--compute"] if compute else [])]
        if cluster:
            options += ["--cluster", str(Path(cluster).absolute()) if is_file(cluster) else cluster]
        # Named by task, because Slurm's node name may differ from the host name; the report names its node.
        words = [*srun_words(file, nodes, len(hosts)), f"--output={folder}/%t.json", f"--error={folder}/%t.err"]
        problem = _run([*words, sys.executable, "-m", "craton", "doctor", *options])
        documents = [_document(path) for path in sorted(Path(folder).glob("*.json"))]
        errors = "".join(path.read_text(encoding="utf-8", errors="replace") for path in Path(folder).glob("*.err"))
    findings, entries = joined(hosts, [document for document in documents if document], problem or _last_line(errors))
    if compute:
        findings += check_compute({entry["node"]: entry["compute"] for entry in entries if entry["compute"]})
    measured = None
    if bandwidth and len(hosts) > 1:
        try:
            measured = _measure(file, nodes, hosts)
            findings += check_bandwidth(measured)
        except StartError as error:  # keep the nodes' own reports
            remedy = "look for a hanging node or GPU; measure in two halves to find it"
            findings.append(PreflightFinding("infrastructure", "bandwidth", "fail", str(error), remedy))
    return Diagnosis(ordered(findings), entries, measured)


def is_file(cluster: str) -> bool:
    """Whether this is a cluster file, not a catalog name."""
    return cluster.endswith((".yaml", ".yml"))


def slurm_cluster(nodes: str, cluster: str) -> ClusterFile:
    file = load_cluster(cluster)
    if file.scheduler is None or file.scheduler.kind != "slurm":
        raise StartError(
            f"other nodes ({nodes}) are checked through Slurm, but {cluster} has no `scheduler: {{kind: slurm}}`; "
            "remove --cluster to use this machine's Slurm, or remove NODES to check this machine"
        )
    return file


def srun_words(file: ClusterFile | None, nodes: str, count: int, tasks_per_node: int = 1) -> list[str]:
    """Return the `srun` command for these nodes, with the cluster file's options or Slurm's defaults; no shell."""
    words = ["srun", f"--nodelist={nodes}", f"--nodes={count}", f"--ntasks-per-node={tasks_per_node}"]
    for option in ("partition", "account", "qos") if file else ():
        value = getattr(file.scheduler, option) if file else None
        words += [f"--{option}={value}"] if value else []
    gpus = _gpus(file, nodes)
    words += [f"--gres=gpu:{gpus}"] if gpus else []
    return [
        *words,
        "--mpi=none",
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        LIMIT,
        "--job-name=craton-doctor",
    ]


def joined(
    hosts: Sequence[str], documents: Sequence[dict[str, Any]], problem: str = ""
) -> tuple[list[PreflightFinding], list[dict[str, Any]]]:
    """Return the findings of all nodes and their entries; a node without a report is a finding itself."""
    entries = [entry for document in documents for entry in document["nodes"]]
    messages = [PreflightFinding(**finding) for document in documents for finding in document["findings"]]
    findings = [finding for finding in messages if finding.what not in GANG_CHECKS]
    for entry in entries:  # a self-test that died leaves too little to compare
        findings += [replace(PreflightFinding(**item), node=entry["node"]) for item in entry.get("compute_failed", ())]
    answered = {entry["node"] for entry in entries}
    why = f": {problem}" if problem else ""
    for host in hosts:
        if host not in answered:
            remedy = f"check `scontrol show node {host}`, and that Craton is installed there"
            findings.append(
                PreflightFinding("orchestration", "answer", "fail", f"{host} did not respond{why}", remedy, host)
            )
    return findings, sorted(entries, key=lambda entry: natural(entry["node"]))


def _measure(file: ClusterFile | None, nodes: str, hosts: Sequence[str]) -> dict[str, Any]:
    machine, gpus = _machine(file), _gpus(file, nodes)
    expected = pair_bytes_per_second(machine, MEASURED_BYTES) if machine and gpus else 0.0
    words = srun_words(file, nodes, len(hosts), max(gpus, 1))
    address = next((node.address for node in read_nodes(hosts[0]) if node.address), hosts[0])
    command = [*words, *bandwidth_command(address, free_port(), gpus, expected)]
    with tempfile.TemporaryFile() as printed:
        problem = _run(command, printed, {SECRET_VARIABLE: secrets.token_hex(32)})
        printed.seek(0)
        lines = [line for line in printed.read().decode(errors="replace").splitlines() if line.startswith("{")]
    if not lines:
        raise StartError(f"the bandwidth test gave no result: {problem or 'no output from srun'}")
    document = json.loads(lines[-1])
    assert isinstance(document, dict)
    return document


def _machine(file: ClusterFile | None) -> Instance | None:
    """Return the instance of the nodes; None if unknown, or if it is `local`: this may be a login node."""
    if file is None or file.machine == "local":
        return None
    return resolve_cluster(ClusterRef(instance=file.machine, num_nodes=1, file=file)).instance


def _gpus(file: ClusterFile | None, nodes: str) -> int:
    """Return the GPUs per node; without a cluster file, by Slurm's GRES."""
    if file is None:
        try:
            return min((gres_gpus(node.gres) for node in read_nodes(nodes)), default=0)
        except SchedulerError as error:
            raise StartError(
                f"other nodes ({nodes}) are checked through Slurm, which this machine cannot reach ({error}); run this "
                "on a login node of the cluster, or `craton doctor` without NODES on each node"
            ) from None
    machine = _machine(file)
    return 0 if machine is None or machine.gpu.generation == "cpu" else machine.num_gpus


def _run(command: list[str], output: Any = subprocess.DEVNULL, environment: Mapping[str, str] | None = None) -> str:
    """Run srun and return its last error line; a failing check on a node causes one too."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=LIMIT_SECONDS,
            env={**own_environment(), **(environment or {})},
            check=False,
        )
    except FileNotFoundError:
        raise StartError(
            "srun is not installed here; run `craton doctor NODES` on a login node of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise StartError(
            f"the nodes did not respond within {setting(LIMIT_SECONDS)}; `squeue --name=craton-doctor` shows why"
        ) from None
    return _last_line(done.stderr.decode(errors="replace")) if done.returncode else ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _document(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "findings" in document else None
