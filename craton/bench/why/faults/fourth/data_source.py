"""Data sources of the fourth set: a stalled download, pauses at epochs, cut answers, an index on one node, few data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import program_path
from craton.bench.why.faults.program_injections import SERVICE_PORT, service_folder
from craton.bench.why.faults.running import RunningJob

PROGRAM = "fourth_data_source"
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
INPUT = r"data[._ ]?source|data ?load|wait(s|ing)? for (its |the )?data|input pipeline|fourth_data_source"


def _source(
    fault: str,
    layout: Mapping[str, int],
    keys: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[RunningJob], None] | None = None,
    nodes: int = 2,
) -> JobRecipe:
    data = {"path": None, "tokenizer": None, "source": f"{PROGRAM}:samples"}
    return JobRecipe(
        nodes=nodes,
        keys={"data": data, "layout": layout, **(keys or {})},
        program=PROGRAM,
        fault=fault,
        env=env or {},
        prepare=prepare,
        settled_step=60,
    )


def start_store(job: RunningJob) -> None:
    folder = service_folder(job)
    folder.mkdir()
    job.spawn([sys.executable, str(program_path(PROGRAM)), "serve", str(folder)])
    job.wait(lambda: (folder / "port").exists(), "the store listens")


def stall_the_store(job: RunningJob) -> None:
    (service_folder(job) / "stalled").touch()


def make_local_disks(job: RunningJob) -> None:
    for node in range(3):
        (job.folder.parent / "local" / f"node-{node}").mkdir(parents=True)


FAULTS = (
    LiveFault(
        name="download-stalls-half-way",
        family="data_source",
        summary="The store stops sending in the middle of an object; the source of rank 1 reads without a time limit.",
        source="https://github.com/deeplearning4j/deeplearning4j/issues/6628",
        job=_source("stalls", {"fsdp": 2, "micro_batch": 4}, env=SERVICE_PORT, prepare=start_store),
        inject=stall_the_store,
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(INPUT, r"read_object|urlopen|socket|recv|time(d)?[ -]?out|\bhttp|stack|py-spy"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="every-epoch-starts-with-a-pause",
        family="data_source",
        summary="The loader restarts at each epoch of 24 steps and all ranks wait 5 s; all other steps are fast.",
        source="https://github.com/visionml/pytracking/issues/374",
        job=_source("epochs", {"replicate": 2, "micro_batch": 4}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(INPUT, r"epoch|stack|py-spy"),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=40,
    ),
    LiveFault(
        name="answers-cut-off",
        family="data_source",
        summary="From one shard on prompts fill the sequence: of 64 labels two are left, the others are masked.",
        source="https://github.com/OpenBMB/MiniCPM-V/issues/662",
        job=_source("truncated", {"pp": 2, "micro_batch": 4}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "healthy"),
            ranks=frozenset(),
            remedy=(
                r"label|mask|truncat|padding|weight",
                r"check the data|data source",
            ),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="index-only-on-first-node",
        family="data_source",
        summary="Rank 0 builds the sample index on its node's own disk; ranks 1 and 2 do not find it and raise.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/907",
        job=_source(
            "index",
            {"fsdp": 3},
            {"train": {"global_batch_sequences": 6}},
            {"CACHE": "{folder}/local"},
            make_local_disks,
            nodes=3,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=frozenset({1, 2}),
            remedy=(r"sample_index|FileNotFoundError|No such file|fourth_data_source",),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="few-documents-memorised",
        family="data_source",
        summary="A filter left 24 documents, which the model learns by heart: the loss falls, evaluations get worse.",
        source="https://github.com/huggingface/transformers/issues/22934",
        job=_source(
            "memorised",
            {"fsdp": 2, "micro_batch": 4},
            {"train": {"evaluate": {"every_steps": 25, "sequences": 16}}},
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"over-?fit|memori[sz]|by heart|validation|evaluation|distinct",
                r"repeat|same (sample|batch|data|document|row)|check the data|data source",
            ),
            misleading=(*NODE_ACTIONS, r"network"),
        ),
        judge_seconds=45,
    ),
)
