"""`craton doctor NODES`: the same on many nodes of a Slurm cluster, by one `srun`, and then what only all of them
together can tell: a card that computes another result, a node that is slow with everybody.
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
    """Every node's own diagnosis, and the gang's."""
    file = slurm_cluster(nodes, cluster) if cluster and is_file(cluster) else None
    hosts = sorted(expand_hosts(nodes), key=natural)
    # Slurm lets the nodes themselves write the files, so they must be where every node sees them.
    shared = Path(file.runs) if file and file.runs and "://" not in file.runs else runs_root()
    shared.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=shared) as folder:
        options = ["--json", *(["--compute"] if compute else [])]
        if cluster:
            options += ["--cluster", str(Path(cluster).absolute()) if is_file(cluster) else cluster]
        # By task, for Slurm's name of a node need not be its host name; who it was stands in what it wrote.
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
        except StartError as error:  # what the nodes said by themselves is not lost with it
            remedy = "look for a node or a GPU that hangs; measure in two halves to find it"
            findings.append(PreflightFinding("infrastructure", "bandwidth", "fail", str(error), remedy))
    return Diagnosis(ordered(findings), entries, measured)


def is_file(cluster: str) -> bool:
    """Not a name of the catalog."""
    return cluster.endswith((".yaml", ".yml"))


def slurm_cluster(nodes: str, cluster: str) -> ClusterFile:
    file = load_cluster(cluster)
    if file.scheduler is None or file.scheduler.kind != "slurm":
        raise StartError(
            f"other nodes ({nodes}) are asked through Slurm, but {cluster} does not say `scheduler: {{kind: slurm}}`; "
            "leave --cluster out to ask the Slurm of this machine, or NODES to check this machine"
        )
    return file


def srun_words(file: ClusterFile | None, nodes: str, count: int, tasks_per_node: int = 1) -> list[str]:
    """`srun` on these nodes, as the cluster file says, else as Slurm itself has them; no shell is between."""
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
    """The findings of all nodes, and their entries; a node that did not answer is a finding itself."""
    entries = [entry for document in documents for entry in document["nodes"]]
    messages = [PreflightFinding(**finding) for document in documents for finding in document["findings"]]
    findings = [finding for finding in messages if finding.what not in GANG_CHECKS]
    for entry in entries:  # a self-test that died on its node leaves too little to judge anew
        findings += [replace(PreflightFinding(**item), node=entry["node"]) for item in entry.get("compute_failed", ())]
    answered = {entry["node"] for entry in entries}
    why = f": {problem}" if problem else ""
    for host in hosts:
        if host not in answered:
            remedy = f"`scontrol show node {host}`; look whether Craton is installed there"
            findings.append(
                PreflightFinding("orchestration", "answer", "fail", f"{host} did not answer{why}", remedy, host)
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
        raise StartError(f"the bandwidth test gave no result: {problem or 'srun said nothing'}")
    document = json.loads(lines[-1])
    assert isinstance(document, dict)
    return document


def _machine(file: ClusterFile | None) -> Instance | None:
    """None where no file says what the nodes are, or that they are like this machine: it may be a login node."""
    if file is None or file.machine == "local":
        return None
    return resolve_cluster(ClusterRef(instance=file.machine, num_nodes=1, file=file)).instance


def _gpus(file: ClusterFile | None, nodes: str) -> int:
    """Of each node: without a file, what Slurm has of them."""
    if file is None:
        try:
            return min((gres_gpus(node.gres) for node in read_nodes(nodes)), default=0)
        except SchedulerError as error:
            raise StartError(
                f"other nodes ({nodes}) are asked through Slurm, which this machine cannot reach ({error}); run this "
                "on a login node of the cluster, or `craton doctor` without NODES on each node"
            ) from None
    machine = _machine(file)
    return 0 if machine is None or machine.gpu.generation == "cpu" else machine.num_gpus


def _run(command: list[str], output: Any = subprocess.DEVNULL, environment: Mapping[str, str] | None = None) -> str:
    """The last thing srun complained about; a check that fails on a node makes it complain too."""
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
            f"the nodes did not answer within {setting(LIMIT_SECONDS)}; `squeue --name=craton-doctor` tells why"
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
