"""How a served model is distributed over GPUs: the sizes of one replica, and the number of replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from craton.job.model import ModelShape


@dataclass(frozen=True)
class ServedLayout:
    """One replica has tp · pp · attention_dp GPUs; replicas are independent servers behind a router.

    tp shards attention and dense MLPs. attention_dp replicates attention: each of its ranks has its own requests and
    KV cache. Experts are split ep ways over the tp · attention_dp ranks of a pipeline stage, and each expert is sharded
    over the rest, `moe_tp`; Craton's own engine copies it to them instead."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1
    replicas: int = 1

    @property
    def stage_gpus(self) -> int:
        """GPUs of a pipeline stage of one replica."""
        return self.tp * self.attention_dp

    @property
    def replica_gpus(self) -> int:
        return self.stage_gpus * self.pp

    @property
    def gpus(self) -> int:
        return self.replica_gpus * self.replicas

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert, or have a copy of it each."""
        return self.stage_gpus // self.ep

    def __str__(self) -> str:
        """The sizes above 1: `tp 4 · ep 8 · attention_dp 2 · replicas 3`; `tp 1` for one GPU."""
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "ep", "attention_dp", "replicas")}
        return " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "tp 1"


def own_layouts(shape: ModelShape, tps: Sequence[int], ep: int | None) -> Iterator[ServedLayout]:
    """Yield the layouts of Craton's own engine with these sizes of tp. With `ep` None a rank has all experts, or as few
    as possible."""
    for tp in tps:
        free = sorted({1, math.gcd(tp, shape.experts)}) if shape.is_moe else [1]
        for size in free if ep is None else [ep]:
            yield ServedLayout(tp=tp, ep=size)
