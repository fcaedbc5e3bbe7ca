"""The `layout:` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationInfo

from craton.formatting import counted
from craton.job.document import Section, Size
from craton.job.errors import LayoutError
from craton.job.layout.layout import Layout, Offload, Precision, Recompute, Schedule
from craton.nearest import did_you_mean


class LayoutSpec(Section):
    """A layout as written: omitted sizes default to 1, except that fsdp (else replicate) takes the remaining ranks."""

    pp: Size | None = None
    replicate: Size | None = None
    fsdp: Size | None = None
    cp: Size | None = None
    tp: Size | None = None
    ep: Size | None = None
    vpp: Size | None = None
    micro_batch: Size | None = None
    recompute: Recompute | None = None
    precision: Precision | None = None
    zero: Literal[1, 2, 3] | None = None
    schedule: Schedule | None = None
    offload: Offload | None = None

    def resolve(self, world: int, precision: Precision = "bf16") -> Layout:
        """Return the complete layout on `world` ranks; `precision` is the job's, used if the layout sets none."""
        sizes = {"precision": precision, **self.model_dump(exclude_none=True)}
        free = "fsdp" if self.fsdp is None else "replicate" if self.replicate is None else None
        if free:
            named = Layout(**sizes).world
            if world % named:
                raise LayoutError(
                    f"layout needs a multiple of {counted(named, 'rank')}, but the cluster has "
                    f"{counted(world, 'GPU')}; {free} cannot take the remaining ranks"
                )
            sizes[free] = world // named
        return self._whole(sizes)

    def named(self, precision: Precision = "bf16") -> Layout:
        """Return only the written sizes, the rest 1: for a layout that fits no world size."""
        return self._whole({"precision": precision, **self.model_dump(exclude_none=True)})

    def _whole(self, sizes: dict[str, Any]) -> Layout:
        if "schedule" not in sizes and sizes.get("vpp", 1) > 1:
            sizes["schedule"] = "interleaved"
        return Layout(**sizes)


def parse_layout(value: object, info: ValidationInfo) -> LayoutSpec | None:
    """Parse a layout; None means auto."""
    if value is None or value == "auto":
        return None
    if isinstance(value, LayoutSpec):
        return value
    if isinstance(value, dict):
        return LayoutSpec.parse(value, info)
    near = did_you_mean(str(value), ("auto",))
    raise ValueError(f"{value!r} is not a layout; write auto, or a mapping such as {{fsdp: 16, tp: 8}}{near}")
