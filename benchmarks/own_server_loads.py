"""Measure Craton's own server on this GPU: `python benchmarks/own_server_loads.py measure FOLDER [SERVER …]` starts one
server after the other with default settings and random weights, and keeps what `craton bench serve --json` prints for
each load; `rows FOLDER` writes these loads to data/craton_servers.json, to which the shipped profile is fitted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT = 8377
URL = f"http://127.0.0.1:{PORT}"
READY_SECONDS, STOP_SECONDS = 240.0, 60.0
CRATON = (sys.executable, "-m", "craton")
ROWS = Path(__file__).parent.parent / "data" / "craton_servers.json"


@dataclass(frozen=True)
class Load:
    """`requests` of `prompt` tokens, for `output` tokens each: of so many users at once, or so many a second."""

    prompt: str
    output: int
    requests: int
    users: int = 0
    rate: int = 0

    @property
    def name(self) -> str:
        return f"rate_{self.rate}_{self.prompt}" if self.rate else f"{self.users}_{self.prompt}"

    def options(self, seed: int) -> list[str]:
        arrivals = ["--rate", str(self.rate)] if self.rate else ["--concurrency", str(self.users)]
        sizes = ["--input", self.prompt, "--output", str(self.output), "--requests", str(self.requests)]
        return [*arrivals, *sizes, "--ignore-eos", "--seed", str(seed), "--json"]


@dataclass(frozen=True)
class Server:
    preset: str
    model: str  # as in the case file
    loads: tuple[Load, ...]
    precision: str = "bf16"

    def job(self, name: str) -> str:
        serve = f"port: {PORT}, initialize: random, precision: {self.precision}"
        if self.precision == "fp8":
            serve += ", kv_precision: fp8"
        return f"name: {name}\nkind: serve\nmodel: {self.preset}\nserve: {{{serve}}}\ncluster: local\n"


SERVERS = {
    "8b": Server(
        "llama-3.1-8b",
        "Llama-3.1-8B",
        (
            Load("100..1024", 256, 360, rate=24),
            Load("1024", 256, 300, rate=20),
            Load("1024", 256, 375, rate=25),
            Load("1024", 256, 168, rate=14),
            Load("512", 256, 5, users=1),
            Load("16384", 128, 3, users=1),
            Load("2048", 128, 32, users=8),
            Load("1024", 256, 96, users=32),
            Load("512", 256, 640, users=256),
            Load("4096", 128, 96, users=64),
            Load("16384", 128, 24, users=16),
        ),
    ),
    "8bint4": Server("llama-3.1-8b", "Llama-3.1-8B", (Load("512", 256, 5, users=1),), precision="int4"),
    "8bfp8": Server(
        "llama-3.1-8b",
        "Llama-3.1-8B",
        (
            Load("512", 256, 5, users=1),
            Load("1024", 256, 96, users=32),
            Load("512", 256, 640, users=256),
            Load("8192", 128, 24, users=8),
        ),
        precision="fp8",
    ),
    "06b": Server(
        "qwen3-0.6b",
        "Qwen3-0.6B",
        (Load("512", 256, 6, users=1), Load("1024", 256, 192, users=64), Load("512", 256, 768, users=256)),
    ),
    "14b": Server(
        "qwen3-14b",
        "Qwen3-14B",
        (Load("512", 128, 5, users=1), Load("1024", 256, 64, users=32), Load("512", 256, 256, users=128)),
    ),
}


def main(action: str, folder: Path, *names: str) -> None:
    if action == "measure":
        folder.mkdir(parents=True, exist_ok=True)
        for name in names or SERVERS:
            measure(name, SERVERS[name], folder)
    else:
        write_rows(folder)


def measure(name: str, server: Server, folder: Path) -> None:
    job = f"{name}.yaml"
    (folder / job).write_text(server.job(f"own-{name}"))
    with (folder / f"{name}.log").open("w") as log:
        began = time.monotonic()
        process = subprocess.Popen([*CRATON, "run", job], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_ready(process)
            print(f"{name}: answers {time.monotonic() - began:.1f} s after the command", flush=True)
            for seed, load in enumerate(server.loads):
                measure_load(folder / f"{name}_{load.name}.json", load, seed)
        finally:
            subprocess.run([*CRATON, "stop", f"own-{name}"], cwd=folder, check=False)
            process.wait(STOP_SECONDS)


def wait_ready(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise SystemExit("the server did not start: see its log")


def measure_load(file: Path, load: Load, seed: int) -> None:
    command = [*CRATON, "bench", "serve", URL, *load.options(seed)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    file.write_text(printed)
    summary = json.loads(printed)["summary"]
    shown = [f"{summary['output_tokens_per_second']:8.0f} tokens/s"]
    for metric in ("ttft", "tpot", "itl"):
        values = summary[f"{metric}_seconds"]
        shown.append(f"{metric} " + " ".join(f"{key} {1e3 * values[key]:.1f}" for key in ("mean", "p50", "p99")))
    print(f"{file.stem:24}", " | ".join(shown), flush=True)


def write_rows(folder: Path) -> None:
    document = json.loads(ROWS.read_text())
    document["cases"] = [
        row(f"craton_{name}_{load.name}", server, load, json.loads(file.read_text()))
        for name, server in SERVERS.items()
        for load in server.loads
        if (file := folder / f"{name}_{load.name}.json").exists() and ".." not in load.prompt
    ]
    ROWS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(document['cases'])} loads in {ROWS}")


def row(identifier: str, server: Server, load: Load, bench: dict[str, Any]) -> dict[str, Any]:
    summary = bench["summary"]
    answered, prompts = summary["answered"], summary["prompt_tokens"]
    kv = "fp8" if server.precision == "fp8" else "bf16"
    workload: dict[str, Any] = {
        "isl": round(prompts / answered),
        "osl": round(summary["output_tokens"] / answered),
        "requests": answered,
        "load": "open loop, Poisson" if load.rate else "closed loop",
        **({"qps": load.rate} if load.rate else {"concurrency": load.users}),
    }
    if share := round((summary["cached_tokens"] or 0) / prompts, 3):
        workload["prefix_hits"] = share
    metrics = {
        "tpot_ms": round(1e3 * summary["tpot_seconds"]["mean"], 3),
        "ttft_ms": round(1e3 * summary["ttft_seconds"]["mean"], 2),
        "p99_ttft_ms": round(1e3 * summary["ttft_seconds"]["p99"], 1),
    }
    if not load.rate:
        metrics["output_tokens_per_s_per_gpu"] = round(summary["output_tokens_per_second"], 1)
    return {
        "id": identifier,
        "kind": "e2e",
        "source": {"url": "docs/measurements.md", "table": "Our own server over lengths and loads"},
        "engine": {"name": "craton", "version": ""},
        "hardware": {"gpu": "H200 SXM", "count": 1},
        "model": {"name": server.model, "arch_ref": server.model},
        "precision": {"weights": server.precision, "kv": kv},
        "parallelism": {"tp": 1, "pp": 1, "ep": 1, "attention_dp": 1},
        "workload": workload,
        "metrics": metrics,
        "notes": f"Whole server, default settings, `craton bench serve`, {bench['started'][:10]}.",
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
