"""Data sources that sleep, block, raise, repeat themselves, run dry, or return what the model cannot read."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

KEYS = {
    "data": {"path": None, "tokenizer": None, "source": "data_source:samples"},
    "layout": {"fsdp": 2, "micro_batch": 4},
}
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")


def _recipe(fault: str, victim: int | None = None, **env: str) -> JobRecipe:
    return JobRecipe(keys=KEYS, program="data_source", fault=fault, victim=victim, env=env)


FAULTS = (
    LiveFault(
        name="source-sleeps-everywhere",
        family="data_source",
        summary="The data source sleeps half a second per sample on every rank; no file system is involved.",
        source="https://github.com/open-edge-platform/geti/pull/5958",
        job=_recipe("sleeps"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"data[._ ]?source", r"data ?load", r"wait(s|ing)? for data", r"input pipeline"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=45,
    ),
    LiveFault(
        name="source-sleeps-on-one-rank",
        family="data_source",
        summary="The data source sleeps half a second per sample on rank 1 only; rank 0 waits for it.",
        source="https://github.com/mosaicml/streaming/issues/686",
        job=_recipe("sleeps", victim=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset({1}),
            remedy=(
                r"data[._ ]?source",
                r"data ?load",
                r"wait(s|ing)? for data",
                r"input pipeline",
                r"rank 1.*\bdata\b",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=45,
    ),
    LiveFault(
        name="source-blocks",
        family="data_source",
        summary="The data source of rank 1 waits forever for a queue that its writer never fills.",
        source="https://github.com/RolnickLab/ami-data-companion/issues/140",
        job=_recipe("blocks", victim=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung",),
            ranks=frozenset({1}),
            remedy=(r"data[._ ]?source", r"data ?load", r"wait(s|ing)? for (its )?data", r"data_source\.py", r"stack"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=45,
    ),
    LiveFault(
        name="source-raises",
        family="data_source",
        summary="A record without the expected field makes the data source raise a KeyError on rank 1.",
        source="https://github.com/cure-lab/MagicDrive/issues/91",
        job=_recipe("raises", victim=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"KeyError", r"no field 'text'", r"data_source\.py"),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="source-repeats",
        family="data_source",
        summary="From one step on the data source returns the same sample again and again; the loss collapses.",
        source="https://github.com/pytorch/torchtitan/issues/3907",
        job=_recipe("repeats"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"repeat",
                r"same (sample|batch|data)",
                r"data[._ ]?source",
                r"check the data",
                r"loss (fell|falls|dropped)",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=60,
    ),
    LiveFault(
        name="source-wrong-shape",
        family="data_source",
        summary="The data source of rank 0 returns a sample with half as many labels as tokens.",
        source="https://github.com/lucidrains/imagen-pytorch/issues/288",
        job=_recipe("wrong-shape", victim=0),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"\b32\b.*\b64\b", r"\b64\b.*\b32\b", r"shape", r"length", r"data[._ ]?source"),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="source-bad-ids",
        family="data_source",
        summary="A sample of rank 1 has a token id beyond the model's vocabulary.",
        source="https://github.com/huggingface/tokenizers/issues/1609",
        job=_recipe("bad-ids", victim=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"\b519\b", r"vocab", r"token id", r"out of range", r"data[._ ]?source"),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="source-runs-dry",
        family="data_source",
        summary="The data source has no more samples and returns None on every rank.",
        source="https://github.com/mlfoundations/dclm/issues/62",
        job=_recipe("ends"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            remedy=(r"\bNone\b", r"data[._ ]?source", r"NoneType"),
            misleading=NODE_ACTIONS,
        ),
    ),
    LiveFault(
        name="source-slow-first-batch",
        family="data_source",
        summary="The data source scans all its shards before the first sample; no step for minutes.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/795",
        job=_recipe("slow-first-batch"),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("starting", "hung", "slow"),
            ranks=frozenset(),
            remedy=(r"data[._ ]?source", r"data ?load", r"\bdata\b.*(first|start)", r"first (batch|sample|step)"),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=45,
    ),
)
