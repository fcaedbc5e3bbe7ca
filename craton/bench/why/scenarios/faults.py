"""Faults, and helpers for faults of several layers. A fault changes a simulated world; its strength and its victim are
drawn at random.

A fault knows its layer and its victim, because it was injected; neither is written into the data that the diagnosis
reads. The messages are those of drivers, NCCL, PyTorch, Python and kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from craton.bench.why.scenarios.world import GPU_CLOCK_MHZ, Signal, World

PEER_GONE = (
    "[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
)


@dataclass(frozen=True)
class Victim:
    node: str = ""
    ranks: frozenset[int] = frozenset()
    leaf: str = ""


@dataclass(frozen=True)
class ScenarioFault:
    name: str
    layers: tuple[str, ...]  # any of them is right; more than one only where the boundary is unclear
    conditions: tuple[str, ...]
    put: Callable[[World], Victim]


FAULTS: dict[str, ScenarioFault] = {}


def fault(layers: str, conditions: str) -> Callable[[Callable[[World], Victim]], Callable[[World], Victim]]:
    def register(put: Callable[[World], Victim]) -> Callable[[World], Victim]:
        FAULTS[put.__name__] = ScenarioFault(put.__name__, tuple(layers.split()), tuple(conditions.split()), put)
        return put

    return register


def of_rank(world: World, rank: int) -> Victim:
    return Victim(world.node_of(rank), frozenset((rank,)))


def of_node(world: World, node: str) -> Victim:
    return Victim(node, frozenset(world.ranks_of(node)))


def gpu_of(world: World, rank: int) -> dict[str, str]:
    return {"gpu": str(rank % world.ranks_per_node)}


def slower_card(world: World, rank: int, share: float) -> None:
    """Run a GPU at this share of its clock: most work scales with the clock, some is memory-bound."""
    world.slow((rank,), "compute", 1.0 / (0.12 + 0.88 * share))
    world.set("DCGM_FI_DEV_SM_CLOCK", world.node_of(rank), GPU_CLOCK_MHZ * share, **gpu_of(world, rank))


def show_xid(world: World, rank: int, code: int, seconds_ago: float) -> None:
    moment = Signal(world.now - seconds_ago, onset_seconds=seconds_ago)
    world.show("craton_gpu_xid_moment_seconds", world.node_of(rank), moment, xid=str(code), **gpu_of(world, rank))


def level(world: World, metric: str, node: str, **labels: str) -> float:
    return world.signals[(metric, node, tuple(sorted(labels.items())))].before


def make_server(world: World) -> None:
    """Turn the world into a server: one rank, short steps, no checkpoints; minutes of steps are written."""
    world.kind, world.step_seconds, world.steps = "serve", world.chance.uniform(0.15, 0.25), 900
    world.shrink(1, 1)


def break_again(world: World, times: int, how: Callable[[int], tuple[int, str]]) -> None:
    """Restart `times` times within the last steps; `how` returns the rank that fails and the message of the nth."""
    chosen = sorted(world.chance.sample(range(3, 64), times), reverse=True)
    world.breaks = {left: how(number) for number, left in enumerate(chosen)}
