"""The layout: world = pp · replicate · fsdp · cp · tp, with ranks in that order, tp innermost.

`replicate` is plain data parallel, `fsdp` shards what `zero` selects; `ep` divides replicate·fsdp·cp and adds no ranks;
`vpp` is the number of stages per pipeline rank. The ranks of a server are those of tp, and there ep divides tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
Offload = Literal["none", "optimizer", "activations"]

RECOMPUTES: tuple[str, ...] = get_args(Recompute)
PRECISIONS: tuple[str, ...] = get_args(Precision)
SCHEDULES: tuple[str, ...] = get_args(Schedule)
OFFLOADS: tuple[str, ...] = get_args(Offload)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job's model and batch are distributed over the ranks."""

    pp: int = 1
    replicate: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    vpp: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    zero: Literal[1, 2, 3] = 3  # what fsdp shards: 1 optimizer, 2 and gradients, 3 and parameters (FSDP2)
    schedule: Schedule = "1f1b"
    offload: Offload = "none"

    @property
    def world(self) -> int:
        return self.pp * self.replicate * self.fsdp * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of ranks that process different samples."""
        return self.replicate * self.fsdp

    def __str__(self) -> str:
        sizes = [
            f"{name} {getattr(self, name)}"
            for name in ("pp", "replicate", "fsdp", "cp", "tp", "ep", "vpp")
            if getattr(self, name) > 1
        ]
        zero = [f"zero {self.zero}"] if self.fsdp > 1 and self.zero < 3 else []
        schedule = [self.schedule] if self.pp > 1 else []
        offload = [f"offload {self.offload}"] if self.offload != "none" else []
        return " · ".join(
            [
                *sizes,
                *zero,
                *schedule,
                f"micro_batch {self.micro_batch}",
                f"recompute {self.recompute}",
                self.precision,
                *offload,
            ]
        )
