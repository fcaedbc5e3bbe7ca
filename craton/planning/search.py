"""Evaluate and rank every layout worth considering on one cluster.

The search space: tp over powers of two up to twice the NVLink domain, pp over divisors of the world, cp over powers of
two that leave 1,024 tokens per rank, every ep that divides the experts and its ranks, DDP, ZeRO-1, ZeRO-2, FSDP and
HSDP over an NVLink domain, interleaving up to eight stages per rank, zero-bubble where the stack has it, micro-batches
up to 16 and 65,536 tokens. Activation checkpointing (recompute) and offload only cost time, so each layout uses the
minimum with which it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from craton.job.layout import Layout, Precision, Recompute, Schedule, divisors, layout_is_valid
from craton.job.model import ModelShape
from craton.planning.memory import memory_bytes, memory_bytes_of
from craton.planning.rates import MachineRates
from craton.planning.software import SoftwareProfile
from craton.planning.step import StepModel, StepTerms, compose, stack

MICRO_BATCHES = (1, 2, 4, 8, 16)
STAGES_A_RANK = (1, 2, 4, 8)
MIN_TOKENS_A_RANK = 1024
MAX_TOKENS_A_RANK = 65536  # of a micro-batch: more does not improve matmul efficiency
SIMPLER = 0.003  # a layout must beat one with one dimension fewer by this share of the step
NEARLY_FITS = 1.5  # layouts up to this factor over the GPU's memory are evaluated too, to show the gain of more memory
SAFE_SHARE = 0.95  # of the GPU's memory: the rest is a margin for the error of the memory model
LAYOUTS_A_CALL = 4096  # of the memory model: enough to be fast, few enough to show progress
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    terms: StepTerms
    step_seconds: float
    memory_bytes: float
    fits: bool

    @property
    def rank(self) -> float:
        """Step time with a small penalty per dimension of parallelism, so that the simpler of equal layouts wins."""
        layout = self.layout
        used = sum(size > 1 for size in (layout.pp, layout.replicate, layout.fsdp, layout.cp, layout.tp, layout.vpp))
        return self.step_seconds * (1.0 + SIMPLER * used)


@dataclass(frozen=True)
class Search:
    candidates: list[Candidate]  # those that fit, best first
    too_large: list[Candidate]  # fastest first
    evaluated: int


def search(
    model: StepModel,
    machine: MachineRates,
    profile: SoftwareProfile,
    world: int,
    precision: Precision,
    like: Layout | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Search:
    """Evaluate all layouts of the search space on `world` GPUs; `like` keeps that layout's tp, cp and ep (for scaling
    curves). `progress` is called with the number of evaluated layouts and the total."""
    limit = SAFE_SHARE * machine.gpu.memory_bytes
    shape, batch, sequence = model.shape, model.global_batch_sequences, model.sequence
    bases = layouts(shape, world, batch, sequence, precision, machine, like, model.traits.zero_bubble)
    if model.traits.own_layers:  # choose only layouts that can be trained
        bases = (base for base in bases if layout_is_valid(base, shape, world, batch, sequence, trained=True))
    listed = list(bases)
    fitting: list[tuple[Layout, float]] = []
    larger: list[tuple[Layout, float]] = []
    evaluated = 0
    for first in range(0, len(listed), LAYOUTS_A_CALL):
        some = listed[first : first + LAYOUTS_A_CALL]
        if progress:
            progress(first, len(listed))
        fit, larger_ones, count = _needs(model, machine, some, limit)
        fitting += fit
        larger += larger_ones
        evaluated += count
        if progress:
            progress(first + len(some), len(listed))
    near = sorted(larger, key=lambda pair: pair[1])[:2000]
    near = [pair for pair in near if pair[1] <= NEARLY_FITS * limit] or near[:50]
    if fitting:  # a layout inside the margin is neither a candidate nor too large
        near = [pair for pair in near if pair[1] > machine.gpu.memory_bytes]
    constants = np.exp(np.array(profile.log_constants))
    candidates = _candidates(model, fitting, constants, fits=True)
    just = [pair for pair in near if pair[1] <= machine.gpu.memory_bytes]
    candidates = candidates or _candidates(model, just, constants, fits=True)
    too_large = _candidates(model, [pair for pair in near if pair not in just], constants, fits=False)
    return Search(
        sorted(candidates, key=lambda candidate: candidate.rank),
        sorted(too_large, key=lambda candidate: candidate.memory_bytes if not candidates else candidate.step_seconds),
        evaluated,
    )


def evaluate(model: StepModel, machine: MachineRates, profile: SoftwareProfile, layout: Layout) -> Candidate:
    """Evaluate one layout."""
    need = memory_bytes(model.workload(layout), model.traits, machine.node_gpus)
    constants = np.exp(np.array(profile.log_constants))
    return _candidates(model, [(layout, need)], constants, fits=need <= machine.gpu.memory_bytes)[0]


def layouts(
    shape: ModelShape,
    world: int,
    global_batch_sequences: int,
    sequence: int,
    precision: Precision,
    machine: MachineRates,
    like: Layout | None = None,
    zero_bubble: bool = False,
) -> Iterator[Layout]:
    """Yield valid layouts without activation checkpointing."""
    domain = machine.network.nvlink_domain
    for tp in _tensor_sizes(shape, sequence, min(2 * domain, world)) if like is None else [like.tp]:
        for cp in _context_sizes(sequence, tp, world // tp) if like is None else [like.cp]:
            for pp in divisors(world // (tp * cp)) if world % (tp * cp) == 0 else []:
                dp = world // (tp * cp * pp)
                if pp > shape.layers or global_batch_sequences % dp:
                    continue
                per_rank = global_batch_sequences // dp
                micro_batches = [
                    size
                    for size in MICRO_BATCHES
                    if per_rank % size == 0 and (size == 1 or size * sequence <= MAX_TOKENS_A_RANK * cp)
                ]
                pipelines = _pipelines(pp, shape.layers, zero_bubble)
                experts = (
                    _expert_sizes(shape, dp * cp) if like is None else [like.ep] if (dp * cp) % like.ep == 0 else []
                )
                for replicate, fsdp, zero in _shardings(dp, pp, max(1, domain // (tp * cp))):
                    for ep in experts:
                        for vpp, schedule in pipelines:
                            for micro_batch in micro_batches:
                                yield Layout(
                                    pp=pp,
                                    replicate=replicate,
                                    fsdp=fsdp,
                                    cp=cp,
                                    tp=tp,
                                    ep=ep,
                                    vpp=vpp,
                                    micro_batch=micro_batch,
                                    precision=precision,
                                    zero=zero,  # type: ignore[arg-type]
                                    schedule=schedule,
                                )


def _needs(
    model: StepModel, machine: MachineRates, bases: list[Layout], limit: float
) -> tuple[list[tuple[Layout, float]], list[tuple[Layout, float]], int]:
    """Return (layouts that fit with the least recompute or offload, those that do not, memory evaluations)."""

    def sizes(changed: dict[int, Layout]) -> list[float]:
        needs = memory_bytes_of(model.workload(bases[0]), list(changed.values()), model.traits, machine.node_gpus)
        return [float(need) for need in needs]

    fit: dict[int, tuple[Layout, float]] = {}
    pending, needs, evaluated = dict(enumerate(bases)), [], 0
    for recompute in RECOMPUTES:
        if recompute != "none":
            pending = {position: replace(layout, recompute=recompute) for position, layout in pending.items()}
        needs = sizes(pending)
        evaluated += len(needs)
        fit |= {at: (layout, need) for (at, layout), need in zip(pending.items(), needs, strict=True) if need <= limit}
        needs = [need for need in needs if need > limit]
        pending = {at: layout for at, layout in pending.items() if at not in fit}
    if not model.traits.own_layers:  # Craton's own loop does not offload the optimizer
        offloaded = {at: replace(layout, offload="optimizer") for at, layout in pending.items()}
        with_host = sizes(offloaded)
        evaluated += len(with_host)
        fit |= {
            at: (layout, need) for (at, layout), need in zip(offloaded.items(), with_host, strict=True) if need <= limit
        }
    return [fit[at] for at in sorted(fit)], list(zip(pending.values(), needs, strict=True)), evaluated


def _candidates(
    model: StepModel, pairs: list[tuple[Layout, float]], constants: np.ndarray, fits: bool
) -> list[Candidate]:
    if not pairs:
        return []
    terms = [model.terms(layout) for layout, _ in pairs]
    seconds = np.atleast_1d(compose(stack(terms), constants).step_seconds)
    return [
        Candidate(layout, term, float(second), need, fits)
        for (layout, need), term, second in zip(pairs, terms, seconds, strict=True)
    ]


def _tensor_sizes(shape: ModelShape, sequence: int, most: int) -> list[int]:
    sizes = []
    tp = 1
    while tp <= most:
        whole_heads = shape.heads % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
        if tp == 1 or (whole_heads and sequence % tp == 0):
            sizes.append(tp)
        tp *= 2
    return sizes


def _context_sizes(sequence: int, tp: int, most: int) -> list[int]:
    sizes = [1]
    cp = 2
    while cp <= most and sequence % (2 * cp) == 0 and sequence // cp >= MIN_TOKENS_A_RANK:
        if (sequence // cp) % tp == 0:
            sizes.append(cp)
        cp *= 2
    return sizes


def _expert_sizes(shape: ModelShape, ranks: int) -> list[int]:
    if not shape.is_moe:
        return [1]
    return [ep for ep in divisors(shape.experts) if ranks % ep == 0]


def _shardings(dp: int, pp: int, domain_ranks: int) -> list[tuple[int, int, int]]:
    """Return (replicate, fsdp, zero). In a pipeline weights stay gathered, so ZeRO-2 replaces FSDP there."""
    if dp == 1:
        return [(1, 1, 3)]
    full = 3 if pp == 1 else 2
    result = [(dp, 1, 3), (1, dp, 1), (1, dp, full)]
    if pp == 1:
        result.append((1, dp, 2))
    if 1 < domain_ranks < dp and dp % domain_ranks == 0:
        result.append((dp // domain_ranks, domain_ranks, full))
    return result


def _pipelines(pp: int, layers: int, zero_bubble: bool) -> list[tuple[int, Schedule]]:
    """Return (stages per rank, schedule)."""
    if pp == 1:
        return [(1, "1f1b")]
    pipelines: list[tuple[int, Schedule]] = [
        (v, "interleaved" if v > 1 else "1f1b") for v in STAGES_A_RANK if pp * v <= layers
    ]
    return [*pipelines, (1, "zero-bubble")] if zero_bubble else pipelines
