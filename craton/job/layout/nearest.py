"""The valid layout nearest to an invalid one, for error messages.

Distance is the number of doublings or halvings of the requested sizes. Changing what the user did not write is free:
remaining ranks go to fsdp, as in a layout that names only some sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from math import log2

from craton.job.layout.check import layout_is_valid
from craton.job.layout.layout import Layout
from craton.job.model import ModelShape

# Weight of each requested size in the distance.
WEIGHTS = {"pp": 1.0, "replicate": 0.5, "fsdp": 0.5, "cp": 1.0, "tp": 1.0, "ep": 1.0, "vpp": 0.5, "micro_batch": 0.5}


def nearest_layout(
    asked: Layout,
    shape: ModelShape,
    world: int,
    global_batch_sequences: int,
    sequence: int,
    *,
    trained: bool = False,
    written: Collection[str] = tuple(WEIGHTS),
) -> Layout | None:
    """Return the nearest valid layout; None if none fits the job on `world` ranks. `written`: sizes the user gave."""
    best, best_distance = None, float("inf")
    for layout in _around(asked, shape, world):
        distance = _distance(asked, layout, written)
        if distance < best_distance and layout_is_valid(
            layout, shape, world, global_batch_sequences, sequence, trained=trained
        ):
            best, best_distance = layout, distance
    return best


def layout_line(layout: Layout) -> str:
    """Return `layout: {fsdp: 4, tp: 2}`: the non-default sizes, ready for a job file."""
    defaults = Layout()
    changed = {
        field.name: getattr(layout, field.name)
        for field in fields(Layout)
        if field.name != "precision" and getattr(layout, field.name) != getattr(defaults, field.name)
    }
    if not changed.keys() & {"replicate", "fsdp"}:
        changed = {"fsdp": 1, **changed}
    ordered = [name for name in (field.name for field in fields(Layout)) if name in changed]
    return "layout: {" + ", ".join(f"{name}: {changed[name]}" for name in ordered) + "}"


def _around(asked: Layout, shape: ModelShape, world: int) -> Iterator[Layout]:
    """Yield every split of the world, with ep, vpp and micro_batch nearest to the requested ones."""
    for tp in divisors(world):
        for cp in divisors(world // tp):
            for pp in divisors(world // (tp * cp)):
                copies = world // (tp * cp * pp)
                vpp, schedule = (asked.vpp, asked.schedule) if pp > 1 else (1, "1f1b")
                for replicate in divisors(copies):
                    fsdp = copies // replicate
                    for ep in _expert_sizes(asked.ep, shape, copies * cp):
                        sizes = replace(asked, pp=pp, replicate=replicate, fsdp=fsdp, cp=cp, tp=tp, ep=ep)
                        for micro_batch in {asked.micro_batch, 1}:
                            yield replace(sizes, micro_batch=micro_batch, vpp=vpp, schedule=schedule)
                            if vpp > 1 or schedule != "1f1b":
                                yield replace(sizes, micro_batch=micro_batch, vpp=1, schedule="1f1b")


def _expert_sizes(asked: int, shape: ModelShape, ranks: int) -> list[int]:
    """Return the valid sizes of ep next to the requested one, on both sides, and 1."""
    if not shape.is_moe or asked == 1:
        return [1]
    valid = [ep for ep in divisors(ranks) if shape.experts % ep == 0]
    below = [ep for ep in valid if ep <= asked][-2:]
    above = [ep for ep in valid if ep > asked][:1]
    return sorted({1, *below, *above})


def _distance(asked: Layout, layout: Layout, written: Collection[str]) -> float:
    total = 0.0 if layout.schedule == asked.schedule else 0.5
    for name, weight in WEIGHTS.items():
        change = abs(log2(getattr(layout, name) / getattr(asked, name)))
        # an unwritten fsdp takes the remaining ranks for free; no other unwritten dimension should appear
        total += change * (weight if name in written else 0.01 if name == "fsdp" else 2.0)
    return total


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
