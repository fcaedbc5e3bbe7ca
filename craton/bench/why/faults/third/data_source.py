"""Data sources of the third set: expired tokens, a dead thread, endless skipping, slow tokenizing, wrong labels."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.program_injections import SERVICE_PORT
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.third.system_injections import refuse, start_store

NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
FILES = 64  # of the scratch folder of each node
EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


def _source(
    fault: str,
    layout: Mapping[str, int],
    victim: int | None = None,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[RunningJob], None] | None = None,
) -> JobRecipe:
    data = {"path": None, "tokenizer": None, "source": "third_data_source:samples"}
    return JobRecipe(
        keys={"data": data, "layout": {**layout, "micro_batch": 4}},
        program="third_data_source",
        fault=fault,
        victim=victim,
        env=env or {},
        prepare=prepare,
        settled_step=60,
    )


def write_scratch(job: RunningJob) -> None:
    for node in ("node-0", "node-1"):
        folder = job.folder.parent / "scratch" / node
        folder.mkdir(parents=True)
        for number in range(FILES):
            (folder / f"{number}.txt").write_text("sample")


def purge_scratch(job: RunningJob) -> None:
    """Remove the samples of one node, as a clean-up of old files on scratch disks does."""
    shutil.rmtree(job.folder.parent / "scratch" / "node-1")


FAULTS = (
    LiveFault(
        name="store-credentials-expire",
        family="data_source",
        summary="The token for the object store expires during the run; every read gets 403 and the ranks raise.",
        source="https://github.com/scaleapi/llm-engine/issues/168",
        job=_source("expired", {"tp": 2}, env=SERVICE_PORT, prepare=start_store),
        inject=lambda job: refuse(job, EXPIRED),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            remedy=(r"\b403\b|Forbidden|Expired|credential|\btoken has\b|third_data_source",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="prefetch-thread-dies",
        family="data_source",
        summary="A bad record ends the prefetch thread of rank 1 with an exception; the main thread waits for batches.",
        source="https://github.com/RadarML/red-rover/issues/23",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", "third_data_source.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"},
            },
            program="third_data_source",
            fault="prefetch",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(
                r"cannot reshape|ValueError|Exception in thread|prefetch|thread",
                r"py-spy|stack|third_data_source|wait(s|ing)? for (its )?data|queue",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="source-skips-every-sample",
        family="data_source",
        summary="A clean-up purges the samples of node-1; its source skips each missing file and never returns.",
        source="https://github.com/huggingface/pytorch-image-models/pull/2508",
        job=_source("skips", {"fsdp": 2}, victim=1, env={"SCRATCH": "{folder}/scratch"}, prepare=write_scratch),
        inject=purge_scratch,
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(
                r"No such file|cannot load sample|missing|trying the next",
                r"data[._ ]?source|third_data_source|wait(s|ing)? for (its )?data|stack",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=35,
    ),
    LiveFault(
        name="tokenizer-meets-long-words",
        family="data_source",
        summary="From one shard on documents are single long words; tokenizing them takes quadratic time on each rank.",
        source="https://github.com/huggingface/transformers/issues/28629",
        job=_source("tokenizer", {"replicate": 2}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(
                r"data[._ ]?source|data ?load|wait(s|ing)? for (its )?data|input pipeline|tokeniz",
                r"py-spy|profil|third_data_source",
            ),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=40,
    ),
    LiveFault(
        name="labels-not-shifted",
        family="data_source",
        summary="From one shard on labels are the tokens themselves; the model copies its input, the loss goes to 0.",
        source="https://github.com/KempnerInstitute/KempnerForge/issues/154",
        job=_source("labels", {"pp": 2}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"label|shift|leak|repeat|same (sample|batch|data)|check the data|data[._ ]?source",
                r"loss (fell|falls|dropped|collapsed|is (near|almost|about)? ?0|goes to)",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=60,
    ),
)
