"""Cost of checkpoints: how long they block the quickstart, and write throughput compared with dd and the S3 client.

    python benchmarks/checkpoint.py [OUT.json] [--megabytes 512] [--rounds 5] [--steps 200] [--s3 s3://bucket/prefix]

The writers take turns on the same machine. dd copies random bytes from memory to a file and syncs it. The S3 client
alone uploads one buffer with the tier's number of parallel parts. The tiers save a state of the same size, with
checksums, index and the COMPLETE marker. Then the client alone reads its object with the parallel ranges of a restore,
and the tier restores its step and checks every block. The result is the ratio of the medians; cleanup is not timed.
Without --s3, a moto server on this machine shares the cores with the client. The quickstart's ranks save to three tiers
every 20, 40 and 80 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
import yaml

from craton.infrastructure.storage import open_store
from craton.infrastructure.storage.s3 import PART_BYTES, PARTS_IN_FLIGHT
from craton.infrastructure.storage.store import READS_IN_FLIGHT, STREAM_BYTES
from craton.job import load_job
from craton.ml.data import prepare
from craton.ml.training import Trainer
from craton.ml.training.build import RankIdentity, build
from craton.ml.training.checkpoint import Checkpointer, TierFolder
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder

JOB = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
RANKS = 2
MEGA = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--s3", help="writable prefix; default: a moto server on this machine")
    arguments = parser.parse_args()
    prefix, server = (arguments.s3, None) if arguments.s3 else start_server()
    try:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            rows = compare_writes(Path(folder), prefix, arguments.megabytes, arguments.rounds)
            rows |= stall(Path(folder), prefix, arguments.steps)
    finally:
        if server is not None:
            server.kill()
            server.wait()
    rows |= {"torch": torch.__version__, "cores": os.cpu_count(), "date": date.today().isoformat()}
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def start_server() -> tuple[str, subprocess.Popen[bytes]]:
    """Start moto's S3 server with one bucket, and set the environment variables that point to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    import http.client

    for _ in range(600):
        try:
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            asked.request("PUT", "/checkpoints")
            asked.getresponse().read()
            return "s3://checkpoints/benchmark", server
        except OSError:
            time.sleep(0.1)
    raise SystemExit("moto's server did not start; is craton[test] installed?")


def compare_writes(folder: Path, prefix: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Return MB/s of dd, the S3 client and the tiers, and the ratios."""
    size = megabytes * 2**20
    state = {f"model.{index}": torch.randn(size // 4 // 16) for index in range(16)}
    data = torch.cat(list(state.values())).numpy().tobytes()
    source = Path("/dev/shm" if Path("/dev/shm").is_dir() else folder) / f"craton-{os.getpid()}"
    source.write_bytes(data)
    disk = Checkpointer([TierFolder("disk", folder / "tier")], 0, 1)
    objects = Checkpointer([TierFolder("s3", f"{prefix}/tier")], 0, 1)
    found: list[dict[str, float]] = []
    try:
        for step in range(rounds):
            row = {"dd": dd(source, folder / "dd"), "disk": save(disk, step, state)}
            shutil.rmtree(folder / "tier" / f"step-{step:08d}")
            row["client"], row["client read"] = client_alone(prefix, data)
            row |= {"s3": save(objects, step, state), "s3 read": restore(objects, state)}
            open_store(f"{prefix}/tier").delete_tree(f"step-{step:08d}")
            found.append({name: len(data) / MEGA / seconds for name, seconds in row.items()})
            print("   ".join(f"{name} {rate:6.0f} MB/s" for name, rate in found[-1].items()), flush=True)
    finally:
        source.unlink()
    disk.close()
    objects.close()
    median = {name: statistics.median(row[name] for row in found) for name in found[0]}
    pairs = {"folder_to_dd": ("disk", "dd"), "s3_to_client": ("s3", "client")}
    pairs |= {"s3_read_to_client": ("s3 read", "client read")}
    ratios = {name: median[tier] / median[peer] for name, (tier, peer) in pairs.items()}
    summary = "   ".join(f"{tier} / {peer} {ratios[name]:.2f}" for name, (tier, peer) in pairs.items())
    print(f"medians of {rounds}: {summary}")
    return {"rates": found, **ratios}


def dd(source: Path, target: Path) -> float:
    began = time.perf_counter()
    command = ["dd", f"if={source}", f"of={target}", "bs=8M", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    target.unlink()
    return seconds


def save(checkpointer: Checkpointer, step: int, state: dict[str, torch.Tensor]) -> float:
    """Return the seconds from the call until the step is complete."""
    began = time.perf_counter()
    checkpointer.save(step, state, {}, wait=True)
    seconds = time.perf_counter() - began
    (report,) = checkpointer.reports()
    assert report.error is None, report.error
    return seconds


def restore(checkpointer: Checkpointer, state: dict[str, torch.Tensor]) -> float:
    began = time.perf_counter()
    checkpointer.restore({name: torch.empty_like(tensor) for name, tensor in state.items()})
    return time.perf_counter() - began


def client_alone(prefix: str, data: bytes) -> tuple[float, float]:
    """Return the seconds to write and to read."""
    import obstore

    store: Any = open_store(f"{prefix}/alone")
    client = store._client
    began = time.perf_counter()
    obstore.put(client, "object", data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT)
    written = time.perf_counter()
    with ThreadPoolExecutor(READS_IN_FLIGHT) as pool:
        starts = range(0, len(data), STREAM_BYTES)
        for _ in pool.map(lambda at: obstore.get_range(client, "object", start=at, length=STREAM_BYTES), starts):
            pass
    read = time.perf_counter()
    obstore.delete(client, "object")
    return written - began, read - written


def stall(folder: Path, prefix: str, steps: int) -> dict[str, Any]:
    """Return the share of the quickstart's time that saves block."""
    document = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    tiers = [{"to": "nvme", "every_steps": 20, "keep": 2}, {"to": "shared", "every_steps": 40, "keep": 2}]
    document["checkpoint"] = {"tiers": [*tiers, {"to": prefix, "every_steps": 80, "keep": 2}]}
    document["train"] |= {"steps": steps}
    run = RunDirectory.create(folder, "quickstart")
    run.job_path.write_text(yaml.safe_dump(document), encoding="utf-8")
    prepare(load_job(run.job_path))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // RANKS))
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.start_processes(rank, (str(run.path), queue), RANKS)
    blocked, saves, seconds, first = queue.get()
    print(
        f"quickstart: {saves} saves blocked {seconds:.1f} s of training for {blocked * 1e3:.1f} ms: "
        f"{blocked / seconds:.3%}; {(blocked - first) / seconds:.3%} without the first, which takes the memory"
    )
    shutil.rmtree(run.path)
    return {"stall": blocked / seconds, "stall_after_first": (blocked - first) / seconds, "saves": saves}


def rank(number: int, path: str, queue: multiprocessing.SimpleQueue) -> None:
    names = {"RANK": number, "WORLD_SIZE": RANKS, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": 1}
    os.environ |= {name: str(value) for name, value in names.items()}
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = RunDirectory(path)
    place = RankIdentity(number, RANKS, 0, JOB.parent, node=f"node-{number}")
    trainer = Trainer(build(run, place, Recorder.from_environment(run), LedgerClock()))
    staged_save, blocked, ended = trainer.parts.checkpointer.save, [], [0.0]

    def timed(*arguments: Any, wait: bool = False) -> float:
        ended[0] = time.perf_counter()
        seconds = staged_save(*arguments, wait=wait)
        if not wait:
            blocked.append(seconds)
        return seconds

    trainer.parts.checkpointer.save = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    trainer.fit()
    if number == 0:
        queue.put((sum(blocked), len(blocked), ended[0] - began, blocked[0]))


if __name__ == "__main__":
    main()
