"""Data sources of the second set: crashing workers, locks, stores that refuse, short and broken shards, noise."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable, Mapping

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.program_injections import SERVICE_PORT, service_folder, start_service
from craton.bench.why.faults.running import RunningJob

NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
BROKEN_SHARD = "node-1/shard-00005.jsonl.gz"  # reached after 40 steps of 8 sequences
REQUESTS_PER_SECOND = "6"


def _script(hang: str) -> dict[str, object]:
    return {
        "command": ["{python}", "second_data_source.py"],
        "progress": {"pattern": "step {step} loss {loss}", "hang": hang},
    }


def _source(
    fault: str,
    layout: Mapping[str, int],
    env: Mapping[str, str] | None = None,
    prepare: Callable[[RunningJob], None] | None = None,
    settled_step: int = 20,
) -> JobRecipe:
    data = {"path": None, "tokenizer": None, "source": "second_data_source:samples"}
    return JobRecipe(
        keys={"data": data, "layout": {**layout, "micro_batch": 4}},
        program="second_data_source",
        fault=fault,
        env=env or {},
        prepare=prepare,
        settled_step=settled_step,
    )


def write_database(job: RunningJob) -> None:
    with sqlite3.connect(job.folder.parent / "samples.db") as connection:
        connection.execute("CREATE TABLE samples (number INTEGER PRIMARY KEY, text TEXT)")
        connection.executemany("INSERT INTO samples VALUES (?, ?)", [(number, "text") for number in range(1000)])
    connection.close()


def lock_the_database(job: RunningJob) -> None:
    """Begin an exclusive transaction, as a writer or a backup does, and never end it."""
    path = job.folder.parent / "samples.db"
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    job.undo.callback(connection.close)
    connection.execute("BEGIN EXCLUSIVE")


def limit_the_store(job: RunningJob) -> None:
    (service_folder(job) / "per_second").write_text(REQUESTS_PER_SECOND)


def write_shards(job: RunningJob) -> None:
    """Write a copy of eight compressed shards for each node; the copy of one shard was interrupted."""
    text = "".join(json.dumps({"text": f"document {number} " * 20}) + "\n" for number in range(64))
    for node in ("node-0", "node-1"):
        folder = job.folder.parent / "shards" / node
        folder.mkdir(parents=True)
        for number in range(8):
            (folder / f"shard-{number:05d}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    broken = job.folder.parent / "shards" / BROKEN_SHARD
    broken.write_bytes(broken.read_bytes()[:-40])


FAULTS = (
    LiveFault(
        name="loader-worker-crashes",
        family="data_source",
        summary="A broken file makes the native decoder in a DataLoader worker of rank 1 crash; rank 1 raises.",
        source="https://github.com/huggingface/pytorch-image-models/issues/1269",
        job=JobRecipe(kind="command", keys=_script("15m"), program="second_data_source", fault="decoder", victim=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"DataLoader worker|Segmentation fault|SIGSEGV|num_workers",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="database-locked",
        family="data_source",
        summary="Another process locks the SQLite file with the samples; reads of every rank give up after 3 s.",
        source="https://github.com/TL-System/plato/issues/52",
        job=_source("locked", {"tp": 2}, {"DATABASE": "{folder}/samples.db"}, write_database),
        inject=lock_the_database,
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            remedy=(r"database is locked|sqlite|OperationalError|second_data_source",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="object-store-says-slow-down",
        family="data_source",
        summary="The object store answers six requests a second and 503 Slow Down to all others; sources retry.",
        source="https://github.com/huggingface/datatrove/issues/302",
        job=_source("refused", {"fsdp": 2}, SERVICE_PORT, start_service, settled_step=60),
        inject=limit_the_store,
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("slow", "hung"),
            ranks=frozenset(),
            remedy=(r"\b503\b|Slow Down|data[._ ]?source|data ?load|wait(s|ing)? for data|input pipeline",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="uneven-shards",
        family="data_source",
        summary="The shard of rank 2 of three has fewer batches: it ends its epoch, the others wait for its gradients.",
        source="https://github.com/microsoft/PyMarlin/issues/80",
        job=JobRecipe(
            kind="command", nodes=3, keys=_script("10x"), program="second_data_source", fault="uneven", victim=2
        ),
        expected=ExpectedVerdict(
            layers=("framework", "collective"),
            conditions=("hung", "dead"),
            ranks=frozenset({2}),
            remedy=(
                r"epoch 0 done|uneven|(fewer|number of) batches|waiting for the other ranks",
                r"py-spy|stack|second_data_source",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="shard-cut-off",
        family="data_source",
        summary="The copy of a compressed shard on the node of rank 1 was cut off; reading it raises EOFError.",
        source="https://github.com/togethercomputer/RedPajama-Data/issues/34",
        job=_source("truncated", {"replicate": 2}, {"SHARDS": "{folder}/shards"}, write_shards),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"EOFError|end-of-stream|shard-00005|truncated|cut off|corrupt",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="shard-of-noise",
        family="data_source",
        summary="From one step on the samples are random tokens, as from a corrupted shard; the loss jumps and stays.",
        source="https://github.com/stanford-crfm/mistral/issues/115",
        job=_source("noise", {"pp": 2}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(r"spike|diverge|loss (jump|rose|rise|is|went)|data|shard|batch",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
)
