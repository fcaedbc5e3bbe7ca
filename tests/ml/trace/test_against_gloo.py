"""The trace of a fake rank against the same step on real ranks: every collective, to the byte.

Models are deeper and batches longer than what is traced, so that what the trace concludes for the rest is tested too.
"""

from __future__ import annotations

from typing import Any

import pytest
from gang import Gang
from real_step import Counts, counted_step, small_job

from craton.job.layout import Layout
from craton.ml.trace.records import RankTrace
from craton.ml.trace.trace import trace

LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp 2 · tp 2": ({"fsdp": 2, "tp": 2, "recompute": "selective"}, "dense"),
}
MORE_LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "pp 2, interleaved": ({"pp": 2, "vpp": 2, "schedule": "interleaved"}, "dense"),
    "pp 2 · ep 2, zero-bubble": ({"pp": 2, "fsdp": 2, "ep": 2, "schedule": "zero-bubble"}, "experts"),
    "cp 2 · tp 2": ({"cp": 2, "tp": 2}, "dense"),
    "replicate 2 · fsdp 2": ({"replicate": 2, "fsdp": 2}, "dense"),
    "fsdp 2 · ep 2": ({"fsdp": 2, "ep": 2}, "experts"),
    "fsdp 4, full recompute": ({"fsdp": 4, "recompute": "full"}, "dense"),
    "fsdp 2, zero 1": ({"fsdp": 2, "zero": 1}, "dense"),
    "fsdp 2, zero 2": ({"fsdp": 2, "zero": 2}, "dense"),
    "replicate 2": ({"replicate": 2}, "dense"),
    "experts, fsdp 2": ({"fsdp": 2}, "experts"),
    "fsdp 2 · cp 2": ({"fsdp": 2, "cp": 2, "recompute": "full"}, "dense"),
    "fsdp 2 · tp 2 · ep 2": ({"fsdp": 2, "tp": 2, "ep": 2, "recompute": "full"}, "experts"),
    "pp 2 · fsdp 2": ({"pp": 2, "fsdp": 2}, "dense"),
    "pp 2 · tp 2": ({"pp": 2, "tp": 2}, "dense"),
    "pp 2 · cp 2": ({"pp": 2, "cp": 2, "recompute": "selective"}, "dense"),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)])
def test_a_trace_counts_what_real_ranks_send(gang: Gang, name: str) -> None:
    sizes, model = (LAYOUTS | MORE_LAYOUTS)[name]
    sizes = {"precision": "bf16", **sizes}
    layout = Layout(**sizes)
    real = gang.run(counted_step, sizes, model, ranks=layout.world)
    for rank in (0,) if layout.pp == 1 else (0, layout.world - 1):
        (traced,) = trace(small_job(layout, model), layout, ranks=[rank]).ranks
        assert counts_of(traced) == routed(real[rank])
        assert sum(size for _, size in real[rank].values()) > 1e5


def counts_of(rank: RankTrace) -> Counts:
    counts: Counts = {}
    for each in rank.collectives:
        key = (each.operation, each.group_size)
        calls, size = counts.get(key, (0, 0))
        counts[key] = (calls + round(each.count), size + round(each.bytes))
    return routed(counts)


def routed(counts: Counts) -> Counts:
    """How many rows a real router sends is its own choice; a trace takes them to be balanced."""
    return {key: (calls, 0 if key[0] == "all_to_all" else size) for key, (calls, size) in counts.items()}
