"""Data sources that sleep, block, raise, repeat themselves, or return what the model cannot read."""

from __future__ import annotations

from craton.bench.why.faults.fault import Expected, JobRecipe, LiveFault

SOURCE = {"data": {"path": None, "tokenizer": None, "source": "data_source:samples"}}


def _recipe(fault: str, victim: int | None = None, **env: str) -> JobRecipe:
    return JobRecipe(keys=SOURCE, program="data_source", fault=fault, victim=victim, env=env)


FAULTS = (
    LiveFault(
        name="source-raises",
        family="data_source",
        summary="A record without the expected field makes the data source raise a KeyError on one rank.",
        source="https://github.com/huggingface/datasets/issues/7637",
        job=_recipe("raises", victim=1),
        expected=Expected(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"KeyError", r"data[_ ]source", r"no field 'text'"),
            misleading=(r"drain", r"reboot", r"replace the node"),
        ),
    ),
)
