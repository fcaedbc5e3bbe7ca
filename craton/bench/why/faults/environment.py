"""Prepares and starts one real run of a recipe in a folder of its own, and ends it without leaving anything behind.

The run is started by `craton run JOB --detach`, as a user does it. Each of its processes carries a marker in its
environment; at the end all processes with that marker are killed, mounts and namespaces are removed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from craton.agent.processes import free_port
from craton.bench.why.faults.fault import JobRecipe
from craton.bench.why.faults.injections import program_path
from craton.bench.why.faults.running import RunningJob, environments
from craton.bench.why.faults.slurm import LocalSlurm, slurm_missing
from craton.telemetry import RunDirectory

CRATON = (sys.executable, "-m", "craton")
MARKER = "LIVE_FAULT_RUN"
START_SECONDS = 240.0  # of `craton run` on a busy machine
KILL_SECONDS = 20.0
VOCABULARY, SEQUENCE = 512, 64
CGROUP = Path("/sys/fs/cgroup")
TINY_MODEL = {"name": "tiny", "layers": 2, "hidden": 64, "ffn_hidden": 128, "heads": 4, "vocab": VOCABULARY}
TINY_TRAIN = {
    "global_batch_sequences": 8,
    "steps": 100_000,
    "precision": "fp32",
    "learning_rate": 3e-3,
    "warmup_steps": 20,
}
RANDOM: dict[str, Any] = {"initialize": "random", "precision": "fp32", "max_length": 2048}
# 4 layers · 2 · 32 heads · 256 · 4 B = 256 KiB of KV cache per token: 1 GiB holds 4,096 tokens.
WIDE_MODEL: dict[str, Any] = {
    **{"name": "wide", "layers": 4, "hidden": 64, "ffn_hidden": 64, "heads": 32, "head_dim": 256},
    **{"vocab": 512, "max_sequence": 2048},
}
# The tiny job of each kind, without name, cluster and environment.
TINY: dict[str, dict[str, Any]] = {
    "pretrain": {
        "model": TINY_MODEL,
        "data": {"path": "{data}/corpus.txt", "tokenizer": f"bpe:{VOCABULARY}", "sequence": SEQUENCE},
        "train": TINY_TRAIN,
        "recover": {"tries": 0},
    },
    "sft": {
        "model": "{model}",
        "data": {"path": "{data}/chats.jsonl", "sequence": SEQUENCE},
        "train": {**TINY_TRAIN, "learning_rate": 3e-4},
        "recover": {"tries": 0},
    },
    "command": {"processes": 1, "recover": {"tries": 0}},
    "serve": {"model": "{model}", "serve": {"precision": "fp32", "max_length": 256}, "recover": {"tries": 0}},
}


class RefusedError(RuntimeError):
    """`craton run` refused the job, so there is no run to diagnose."""


class Workshop:
    """A folder with tiny data and a tiny exported model, shared by all faults of a bench."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.model = root / "model"
        self._model_lock = threading.Lock()
        self._start_lock = threading.Lock()  # two starts cannot tokenize the same text at once
        write_data(root / "data")

    def environment(self, folder: Path, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "CRATON_RUNS": str(folder / "runs"),
            "CRATON_CACHE": str(self.root / "cache"),
            "OMP_NUM_THREADS": "1",
            MARKER: name,
        }

    def need_model(self) -> Path:
        """Train and export the model on first use."""
        with self._model_lock:
            if not (self.model / "config.json").exists():
                self._export_model()
        return self.model

    def _export_model(self) -> None:
        folder = self.root / "exported"
        keys = {"train": {"steps": 30}, "checkpoint": {"peer": "off"}}
        with self.start(JobRecipe(nodes=1, keys=keys), folder, f"model-{os.getpid()}") as job:
            job.wait(lambda: job.run.has("DONE") or job.run.has("FATAL"), "the tiny model is trained", START_SECONDS)
            command = [*CRATON, "export", str(job.run.path), str(self.model), "--dtype", "fp32"]
            subprocess.run(command, env=job.environment, check=True, capture_output=True, timeout=START_SECONDS)

    @contextmanager
    def start(self, recipe: JobRecipe, folder: Path, name: str) -> Iterator[RunningJob]:
        """Start a run of the recipe; end it for certain, with everything that injectors left in `undo`."""
        if recipe.kind in ("serve", "sft"):
            self.need_model()
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "runs").mkdir(parents=True)
        with ExitStack() as undo:
            environment = self.environment(folder, name)
            undo.callback(end_processes, f"{MARKER}={name}")
            mounts = {role: _mount(folder, role, options, undo) for role, options in recipe.mounts.items()}
            cgroups = {
                controller: _make_cgroup(controller, name, files, undo) for controller, files in recipe.cgroups.items()
            }
            slurm = _start_slurm(environment, undo) if recipe.on == "slurm" else None
            port = free_port()
            document = self._document(recipe, folder, mounts, name, port)
            job = RunningJob(
                name=name,
                folder=folder / "job",
                run=RunDirectory(folder / "runs" / document["name"]),
                marker=f"{MARKER}={name}",
                onset=folder / "onset",
                environment=environment,
                undo=undo,
                mounts=mounts,
                cgroups=cgroups,
                network=_make_network(name, undo) if recipe.network else "",
                url=f"http://127.0.0.1:{port}" if recipe.kind == "serve" else "",
                slurm=slurm,
            )
            self._write_job(recipe, job, document)
            if recipe.prepare is not None:
                recipe.prepare(job)
            try:
                with self._start_lock:
                    _run_craton(recipe, job)
                yield job
            finally:
                end_processes(job.marker)  # before mounts and cgroups go

    def _document(
        self, recipe: JobRecipe, folder: Path, mounts: Mapping[str, Path], name: str, port: int
    ) -> dict[str, Any]:
        data = self.root / "data"
        if "data" in mounts:
            shutil.copytree(data, mounts["data"], dirs_exist_ok=True)
            data = mounts["data"]
        document: dict[str, Any] = {
            "name": name,
            "kind": recipe.kind,
            "cluster": f"local x {recipe.nodes}",
            **TINY[recipe.kind],
        }
        if recipe.kind == "serve":
            document = merged(document, {"serve": {"port": port}})
        variables = {
            "ONSET": str(folder / "onset"),
            "FAULT": recipe.fault,
            "VICTIM": "" if recipe.victim is None else str(recipe.victim),
            **recipe.env,
        }
        document = merged(document, {"run": {"env": {key: value for key, value in variables.items() if value}}})
        document = merged(document, recipe.keys)
        places = {"data": data, "model": self.model, "folder": folder, "python": Path(sys.executable), **mounts}
        filled: dict[str, Any] = _filled(document, {key: str(path) for key, path in places.items()})
        return filled

    def _write_job(self, recipe: JobRecipe, job: RunningJob, document: Mapping[str, Any]) -> None:
        job.folder.mkdir()
        if recipe.program:
            shutil.copy(program_path(recipe.program), job.folder)
        for name, text in recipe.files.items():
            (job.folder / name).write_text(text)
        (job.folder / "job.yaml").write_text(yaml.safe_dump(dict(document), sort_keys=False))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = dict(value) if isinstance(value, Mapping) else value
    return result


def write_data(folder: Path) -> None:
    """Write a tiny corpus, validation text and chats, the same for every bench."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(1)
    words = ["".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randint(2, 8))) for _ in range(400)]
    lines = [" ".join(draw.choice(words) for _ in range(12)) for _ in range(3000)]
    (folder / "corpus.txt").write_text("\n".join(lines))
    (folder / "validation.txt").write_text(
        "\n".join(" ".join(draw.choice(words) for _ in range(12)) for _ in range(300))
    )
    chats = [
        f'{{"messages": [{{"role": "user", "content": "{ask}"}}, {{"role": "assistant", "content": "{answer}"}}]}}'
        for ask, answer in zip(lines[:500], lines[500:1000], strict=True)
    ]
    (folder / "chats.jsonl").write_text("\n".join(chats) + "\n")


def end_processes(marker: str) -> None:
    """Kill every process with the marker in its environment; RuntimeError if one survives."""
    deadline = time.monotonic() + KILL_SECONDS
    while pids := [pid for pid, variables in environments() if marker.encode() in variables and pid != os.getpid()]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of {marker} survived SIGKILL: {pids}")
        for pid in pids:
            for number in (signal.SIGKILL, signal.SIGCONT):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        time.sleep(0.05)


def missing(need: str) -> str:
    """Why this machine lacks something that a fault needs; empty if it has it."""
    if need == "root":
        return "" if os.geteuid() == 0 else "needs root"
    if need == "slurm":
        return slurm_missing()
    if need.startswith("cgroup:"):
        controller = need.partition(":")[2]
        has_it = os.access(CGROUP / controller / "tasks", os.W_OK)
        return "" if has_it else f"needs a writable cgroup v1 controller {controller}"
    if need.startswith("kernel:"):
        return _kernel_missing(need.partition(":")[2])
    if need.startswith("never:"):
        return need.partition(":")[2]
    return "" if shutil.which(need) else f"needs the program {need}"


def _kernel_missing(discipline: str) -> str:
    """Try a queueing discipline in a network namespace of its own."""
    parent = () if discipline == "clsact" else ("root",)
    attempt = ["unshare", "-n", "tc", "qdisc", "add", "dev", "lo", *parent, *discipline.split()]
    if shutil.which("tc") is None or shutil.which("unshare") is None:
        return "needs tc and unshare"
    done = subprocess.run(attempt, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"the kernel has no `tc qdisc … {discipline}`: {done.stderr.strip()}"


def _run_craton(recipe: JobRecipe, job: RunningJob) -> None:
    """Run `craton run`, inside the recipe's cgroups, network namespace and wrapper."""
    command = [*CRATON, "run", "job.yaml", "--detach", "--yes", "--json", "--on", recipe.on]
    command = [*recipe.wrap, *command]
    if job.network:
        command = ["ip", "netns", "exec", job.network, *command]
    if job.cgroups:
        joins = " && ".join(f"echo $$ > '{group}/cgroup.procs'" for group in job.cgroups.values())
        command = ["/bin/sh", "-c", f'{joins} && exec "$@"', "sh", *command]
    log = job.folder.parent / "craton-run.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command,
            cwd=job.folder,
            env=job.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=START_SECONDS,
            check=False,
        ).returncode
    if not job.run.job_path.exists():
        raise RefusedError(f"craton run ended with code {code}: {log.read_text(errors='replace')[-2000:]}")


def _mount(folder: Path, role: str, options: str, undo: ExitStack) -> Path:
    place = folder / ("runs" if role == "run" else role)
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, capture_output=True)
    undo.callback(subprocess.run, ["umount", "-l", str(place)], check=False, capture_output=True)
    return place


def _make_cgroup(controller: str, name: str, files: Mapping[str, str], undo: ExitStack) -> Path:
    group = CGROUP / controller / f"craton-{name}"
    group.mkdir()
    undo.callback(_remove_cgroup, group)
    for file, value in files.items():
        (group / file).write_text(value)
    return group


def _remove_cgroup(group: Path) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while group.exists():
        with suppress(OSError):  # busy until the kernel has let the last process go
            group.rmdir()
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{group} is still in use")
        time.sleep(0.1)


def _make_network(name: str, undo: ExitStack) -> str:
    network = f"craton-{name}"
    subprocess.run(["ip", "netns", "add", network], check=True, capture_output=True)
    undo.callback(subprocess.run, ["ip", "netns", "delete", network], check=False, capture_output=True)
    subprocess.run(["ip", "-n", network, "link", "set", "lo", "up"], check=True, capture_output=True)
    return network


def _start_slurm(environment: dict[str, str], undo: ExitStack) -> LocalSlurm:
    """Start Slurm; the diagnosis in this process finds it by the same variable as the run."""
    slurm = LocalSlurm()
    undo.callback(slurm.stop)
    slurm.start()
    before = os.environ.get("SLURM_CONF")
    undo.callback(_set_variable, "SLURM_CONF", before)
    environment["SLURM_CONF"] = os.environ["SLURM_CONF"] = str(slurm.config)
    return slurm


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _filled(value: Any, places: Mapping[str, str]) -> Any:
    """Replace `{data}`, `{model}`, `{folder}`, `{python}` and `{ROLE}` of mounts in all texts of a document."""
    if isinstance(value, str):
        for name, place in places.items():
            value = value.replace(f"{{{name}}}", place)
        return value
    if isinstance(value, Mapping):
        return {key: _filled(item, places) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, places) for item in value]
    return value
