"""Pipeline schedules: the order of work of every pipeline rank and the layers it holds; the same on all ranks.

Chunk c of pipeline rank r is stage c · pp + r. A rank does one thing at a time: the forward or backward pass of a chunk
for one micro-batch. Zero-bubble splits the backward pass into the gradient of the input, which the previous stage waits
for, and the gradients of the weights, which no other rank waits for. Between two stages, messages are sent in the order
in which they are received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from craton.job.layout.layout import Schedule

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """One pass of a chunk; `backward` is the whole backward pass, `input` and `weight` are its two halves."""

    kind: Kind
    chunk: int
    micro_batch: int


def stage_layers(layers: int, pp: int, vpp: int) -> list[range]:
    """Return the layers of each of the pp · vpp stages: split evenly; if that is not possible, the last stages, which
    also have the head, get one less. Pipeline rank r holds the stages r, r + pp, …"""
    fewest, more = divmod(layers, pp * vpp)
    firsts = [stage * fewest + min(stage, more) for stage in range(pp * vpp + 1)]
    return [range(first, last) for first, last in pairwise(firsts)]


def schedule_actions(schedule: Schedule, pp: int, vpp: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of each pipeline rank in a step, in order."""
    orders = [list(_one_forward_one_backward(rank, pp, vpp, micro_batches)) for rank in range(pp)]
    if schedule == "zero-bubble":
        return _with_late_weights(orders, pp, vpp)
    return orders


def forward_actions(pp: int, vpp: int, micro_batches: int) -> list[Action]:
    """Return the actions of every rank in a forward-only step: pp micro-batches pass a chunk, then the next chunk
    (arXiv:2104.04473, section 2.2)."""
    return [
        Action("forward", chunk, micro_batch)
        for first in range(0, micro_batches, pp)
        for chunk in range(vpp)
        for micro_batch in range(first, min(first + pp, micro_batches))
    ]


def lane_of(link: int, pp: int) -> int:
    """Return the lane of the link from rank `link` to the next rank; it differs from the lanes of both adjacent links.
    The last link leads back to the first rank's next chunk."""
    return 2 if link == pp - 1 and pp % 2 else link % 2


def num_lanes(pp: int, vpp: int) -> int:
    return 1 + max(lane_of(link, pp) for link in range(pp if vpp > 1 else pp - 1))


def in_flight_limit(pp: int, vpp: int) -> int:
    """Return the maximum number of chunk forward passes whose activations a rank holds: those of the first rank before
    its first backward pass."""
    return _warm_up(0, pp, vpp) + 1


def _warm_up(rank: int, pp: int, vpp: int) -> int:
    """Return the number of forward passes before the first one that is followed by a backward pass."""
    if vpp == 1:
        return pp - rank - 1
    return 2 * (pp - rank - 1) + (vpp - 1) * pp


def _one_forward_one_backward(rank: int, pp: int, vpp: int, micro_batches: int) -> Iterator[Action]:
    """Yield 1F1B, interleaved if a rank holds several chunks: after the warm-up a backward follows each forward."""
    forwards = forward_actions(pp, vpp, micro_batches)
    backwards = [Action("backward", vpp - 1 - item.chunk, item.micro_batch) for item in forwards]
    warm_up = min(_warm_up(rank, pp, vpp), len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


def _with_late_weights(orders: list[list[Action]], pp: int, vpp: int) -> list[list[Action]]:
    """Return the same order, with weight gradients moved to where a rank would wait, or would hold more activations
    than 1F1B (ZB-H1, arXiv:2401.10241, section 2.3).

    Computed by simulating the step, with one unit of time per action.
    """
    limit = in_flight_limit(pp, vpp)
    todo = [
        deque(action._replace(kind="input") if action.kind == "backward" else action for action in order)
        for order in orders
    ]
    late: list[deque[Action]] = [deque() for _ in orders]
    in_flight = [0] * pp
    done: set[tuple[Kind, int, int]] = set()  # kind, stage, micro-batch
    plans: list[list[Action]] = [[] for _ in orders]
    while any(todo) or any(late):
        now = []
        for rank in range(pp):
            following = todo[rank][0] if todo[rank] else None
            is_full = in_flight[rank] == limit and late[rank]
            if (
                following
                and not (following.kind == "forward" and is_full)
                and _is_ready(following, rank, pp, vpp, done)
            ):
                now.append((rank, todo[rank].popleft()))
            elif late[rank]:
                now.append((rank, late[rank].popleft()))
        assert now, "deadlock in a pipeline schedule"
        for rank, action in now:
            plans[rank].append(action)
            done.add((action.kind, action.chunk * pp + rank, action.micro_batch))
            if action.kind == "forward":
                in_flight[rank] += 1
            elif action.kind == "input":
                late[rank].append(action._replace(kind="weight"))
            else:
                in_flight[rank] -= 1
    return plans


def _is_ready(action: Action, rank: int, pp: int, vpp: int, done: set[tuple[Kind, int, int]]) -> bool:
    stage = action.chunk * pp + rank
    if action.kind == "forward":
        return stage == 0 or ("forward", stage - 1, action.micro_batch) in done
    if stage == pp * vpp - 1:
        return ("forward", stage, action.micro_batch) in done
    return ("input", stage + 1, action.micro_batch) in done
