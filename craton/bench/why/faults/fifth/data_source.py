"""Data sources of the fifth set: a wrong encoding, an empty pool, compressed shards, unlike orders, a web page."""

from __future__ import annotations

import gzip
import random
import sys
from collections.abc import Callable, Mapping

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import program_path
from craton.bench.why.faults.program_injections import SERVICE_PORT, service_folder
from craton.bench.why.faults.running import RunningJob

PROGRAM = "fifth_data_source"
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
INPUT = r"data[._ ]?source|data ?load|wait(s|ing)? for (its |the )?data|input pipeline|fifth_data_source"
SMALL_BYTES, LARGE_BYTES = 1 << 14, 64 << 20


def _source(
    fault: str,
    layout: Mapping[str, int],
    keys: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[RunningJob], None] | None = None,
    nodes: int = 2,
    victim: int | None = None,
) -> JobRecipe:
    data = {"path": None, "tokenizer": None, "source": f"{PROGRAM}:samples"}
    return JobRecipe(
        nodes=nodes,
        keys={"data": data, "layout": layout, **(keys or {})},
        program=PROGRAM,
        fault=fault,
        victim=victim,
        env=env or {},
        prepare=prepare,
        settled_step=60,
    )


def write_shards(job: RunningJob) -> None:
    """Write a small and a large compressed shard of text, each with its size."""
    folder = job.folder.parent / "shards"
    folder.mkdir()
    draw = random.Random(1)
    for name, size in (("small", SMALL_BYTES), ("large", LARGE_BYTES)):
        block = " ".join(str(draw.randrange(10_000)) for _ in range(4000)).encode()
        content = (block * (size // len(block) + 1))[:size]
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
        (folder / f"{name}.size").write_text(str(size))


def start_store(job: RunningJob) -> None:
    folder = service_folder(job)
    folder.mkdir()
    job.spawn([sys.executable, str(program_path(PROGRAM)), "serve", str(folder)])
    job.wait(lambda: (folder / "port").exists(), "the store listens")


def answer_with_page(job: RunningJob) -> None:
    (service_folder(job) / "page").touch()


FAULTS = (
    LiveFault(
        name="shard-in-another-encoding",
        family="data_source",
        summary="A shard on the node of rank 1 is Latin-1 instead of UTF-8; its data source raises UnicodeDecodeError.",
        source="https://github.com/mosaicml/streaming/issues/820",
        job=_source("encoding", {"fsdp": 2, "micro_batch": 4}, victim=1),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"UnicodeDecodeError|utf-?8|codec|encoding|invalid (start|continuation) byte|fifth_data_source",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="pool-of-connections-empty",
        family="data_source",
        summary="Each reset read of rank 1 keeps its connection; the pool runs empty, and rank 1 waits for ever.",
        source="https://github.com/civictechdc/spicy-regs/pull/100",
        job=_source("pool", {"fsdp": 3}, {"train": {"global_batch_sequences": 6}}, nodes=3, victim=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(INPUT, r"acquire|semaphore|\block\b|pool|connection|read_from_pool|stack|py-spy"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="compressed-shard-without-index",
        family="data_source",
        summary="From one step on shards are large: each sample on every rank decompresses half of one to seek in it.",
        source="https://github.com/pauldmccarthy/indexed_gzip/issues/33",
        job=_source(
            "archive", {"replicate": 2, "micro_batch": 4}, env={"SHARDS": "{folder}/shards"}, prepare=write_shards
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(INPUT, r"gzip|decompress|seek|read_archive|py-spy|stack|profil"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="stages-read-different-samples",
        family="data_source",
        summary="In its second epoch each stage of a pipeline shuffles by its own seed: labels do not fit the tokens.",
        source="https://github.com/EvolvingLMMs-Lab/lmms-engine/pull/60",
        job=_source("chain", {"pp": 2, "micro_batch": 4}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=frozenset(),
            remedy=(
                r"loss (jump|rose|rises|climb|grow|is|went|spike)|spike|diverge|explod",
                r"data source|check the data|(different|other|unlike|unequal) (data|samples|batches)|shuffle|seed",
            ),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="store-answers-with-a-web-page",
        family="data_source",
        summary="Over its quota, a store answers 200 with a web page instead of the object; all sources raise.",
        source="https://github.com/pytorch/vision/issues/2992",
        job=_source("page", {"tp": 2, "micro_batch": 4}, env=SERVICE_PORT, prepare=start_store),
        inject=answer_with_page,
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"JSONDecodeError|Expecting value|html|web page|quota|store|fifth_data_source|data source",),
            misleading=NODE_ACTIONS,
        ),
    ),
)
