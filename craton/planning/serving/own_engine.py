"""Step times of Craton's own engine: its terms on a machine, with the constants that were fitted to its servers.

The plan of a server, rollouts, draft lengths, strategies and the engine itself all use these steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from craton.planning.rates import MachineRates
from craton.planning.serving.layout import ServedLayout
from craton.planning.serving.profile import ENGINE_NAMES, OWN_ENGINE, EngineProfile, find_engine_profile
from craton.planning.serving.served_model import ServedModel
from craton.planning.serving.step_times import ROOFLINE, ServedSteps
from craton.planning.serving.terms import ServedPrecision, ServingTerms, serving_terms

STEP_TOKENS, MAX_RUNNING = 2048, 256  # of an engine, where nothing else is set
DRAFT_TOKEN_SECONDS = 0.25e-3  # beside its model's kernels, on a GPU: llama-3.2-1b on one H200


def own_steps(
    model: ServedModel,
    machine: MachineRates,
    profile: EngineProfile | None = None,
    *,
    step_tokens: int = STEP_TOKENS,
    max_running: int = MAX_RUNNING,
) -> ServedSteps:
    """Return the step times of a model; `profile`: of the engine on this kind of machine, by default our own."""
    profile = profile or find_engine_profile(OWN_ENGINE, machine.gpu)
    terms = own_terms(model, machine, profile, step_tokens=step_tokens, max_running=max_running)
    return ServedSteps(terms, engine_constants(profile, profile.constants), profile.step_factor)


def draft_steps(model: ServedModel, machine: MachineRates, profile: EngineProfile | None = None) -> ServedSteps:
    """Return the step times of a draft model, which every rank holds whole. Its tokens are made on the device within a
    step of the other model."""
    steps = own_steps(replace(model, tp=1, ep=1), machine, profile)
    fixed = 0.0 if machine.gpu.generation == "cpu" else DRAFT_TOKEN_SECONDS
    constants = {**steps.constants, "step_seconds": fixed, "request_seconds": 0.0}
    return ServedSteps(steps.work, list(constants.values()), steps.factor)


def roofline_steps(steps: ServedSteps) -> ServedSteps:
    """Return the minimum times of the same steps: every kernel at its measured rate, and nothing else."""
    return ServedSteps(replace(steps.work, row_read_slowdown=1.0, read_slowdown=1.0), ROOFLINE)


def own_terms(
    model: ServedModel,
    machine: MachineRates,
    profile: EngineProfile,
    *,
    step_tokens: int = STEP_TOKENS,
    max_running: int = MAX_RUNNING,
    kv_tokens: int = 0,
) -> ServingTerms:
    """Return the terms of a model in the engine of a profile. Ranks of a CPU share it."""
    if machine.gpu.generation == "cpu" and model.tp > 1:
        machine = _share_of_cpu(machine, model.tp)
    compute = "fp32" if model.precision == "fp32" else "bf16"
    experts = "bf16" if model.precision == "int4" else None  # in 4 bits are linear layers only
    precision = ServedPrecision(model.precision, "fp8" if model.kv_precision == "fp8" else compute, experts)
    is_own = profile.engine == OWN_ENGINE
    layout = ServedLayout(tp=model.tp, ep=model.ep)
    terms = serving_terms(model.shape, machine, layout, precision, step_tokens, max_running, is_own=is_own)
    return replace(terms, kv_tokens=kv_tokens)


def engine_constants(profile: EngineProfile, constants: Any) -> list[Any]:
    """Return constants of a profile, or columns of them. The KV cache of our own engine is computed, not estimated."""
    known = {"kv_share": 1.0} if profile.engine == OWN_ENGINE else {}
    return [known.get(name, value) for name, value in zip(ENGINE_NAMES, constants, strict=True)]


def _share_of_cpu(machine: MachineRates, ranks: int) -> MachineRates:
    rates = machine.rates
    share = replace(
        rates,
        peak_flops={name: flops / ranks for name, flops in rates.peak_flops.items()},
        matrix_flops={name: flops / ranks for name, flops in rates.matrix_flops.items()},
        memory_bytes_per_second=rates.memory_bytes_per_second / ranks,
        streaming_bytes_per_second=rates.streaming_bytes_per_second / ranks,
        elementwise_bytes_per_second=rates.elementwise_bytes_per_second / ranks,
    )
    return replace(machine, rates=share)
