"""Step times of candidate deployments: of every layout that an engine and a machine allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from craton.job import Job
from craton.job.layout import Layout, check_served_layout
from craton.job.model import ModelShape
from craton.planning.rates import MachineRates
from craton.planning.serving.layout import ServedLayout, own_layouts
from craton.planning.serving.load import ServedLoad, ServedReplica
from craton.planning.serving.own_engine import engine_constants
from craton.planning.serving.planner import served_kv_tokens
from craton.planning.serving.profile import ENGINE_NAMES, OWN_ENGINE, EngineProfile
from craton.planning.serving.search.drafts import acceptance_deviation, speculative_steps
from craton.planning.serving.search.precision import ServedFormats
from craton.planning.serving.served_model import kv_bytes_per_token
from craton.planning.serving.step_times import ServedSteps
from craton.planning.serving.terms import KV_BYTES, ServingTerms, serving_terms, stack_terms

MAX_REPLICA_GPUS = 72  # one NVLink domain of the largest UltraServer
TYPICAL_BATCH = 32.0  # of the decode step whose deviation stands for all
DEFAULT_STEP_TOKENS = 8192  # prefill tokens per step of other engines, where the job states none
DEFAULT_MAX_RUNNING = 1024


@dataclass(frozen=True)
class ServedCandidates:
    """Layouts of one replica on one kind of machine, with their step times as arrays in the same order."""

    layouts: tuple[ServedLayout, ...]
    terms: ServingTerms
    replica: ServedReplica
    log_deviation: float  # of step times
    ttft_deviation: float  # of the logarithm of TTFT
    log_scale: float  # of step times, that the profile's constants do not explain
    kv_bytes_per_token: float  # over all GPUs of a replica
    formats: ServedFormats

    def __len__(self) -> int:
        return len(self.layouts)

    def only(self, indices: Sequence[int]) -> ServedCandidates:
        layouts = tuple(self.layouts[index] for index in indices)
        fields: dict[str, Any] = {name: np.asarray(value)[list(indices)] for name, value in vars(self.terms).items()}
        terms = ServingTerms(**fields)
        replica = replace(self.replica, steps=_with_terms(self.replica.steps, terms), attention_dp=terms.attention_dp)
        return replace(self, layouts=layouts, terms=terms, replica=replica)

    def without_prefill(self) -> ServedCandidates:
        """Return the same deployments as decode pools."""
        return replace(self, replica=replace(self.replica, steps=DecodeSteps(self.replica.steps)))


def _with_terms(steps: Any, terms: ServingTerms) -> Any:
    if isinstance(steps, ServedSteps):
        return ServedSteps(terms, list(steps.constants.values()))
    return replace(steps, steps=_with_terms(steps.steps, terms))


def candidates_of(
    job: Job, shape: ModelShape, machine: MachineRates, profile: EngineProfile, load: ServedLoad
) -> ServedCandidates | None:
    """Return every layout of one replica that has room for its weights; None if the model is too large."""
    serve = job.serve
    assert serve is not None
    own = profile.engine == OWN_ENGINE
    step_tokens = serve.step_tokens if own or serve.chunk_tokens else DEFAULT_STEP_TOKENS
    running = serve.running if own or serve.max_running else DEFAULT_MAX_RUNNING
    formats = ServedFormats.of(job, shape, machine.gpu)
    precision, machine = formats.stored, formats.machine(machine)
    found, rows = [], []
    for layout in _layouts(job, shape, machine, own):
        terms = serving_terms(shape, machine, layout, precision, step_tokens, running * layout.attention_dp, is_own=own)
        if own:
            terms = replace(terms, kv_tokens=served_kv_tokens(job, shape, machine, layout))
        if terms.fits:
            found.append(layout)
            rows.append(terms)
    if not rows:
        return None
    prediction = profile.predict(
        "tpot_seconds",
        lambda constants: ServedSteps(rows[0], constants).decode_seconds(TYPICAL_BATCH, load.context_tokens),
    )
    first = profile.predict("ttft_seconds", lambda constants: _idle_ttft(rows[0], constants, load))
    terms = stack_terms(rows)
    steps: Any = ServedSteps(terms, engine_constants(profile, profile.constants))
    unknown = 0.0
    if serve.draft_tokens:
        steps = speculative_steps(job, machine, profile, steps, load.acceptance)
        if load.acceptance is None:
            unknown = acceptance_deviation(steps, TYPICAL_BATCH, load.context_tokens)
    outside = profile["first_token_seconds"] * float(rows[0].first_token_factor)  # alike of all layouts
    replica = ServedReplica(steps, terms.attention_dp, outside, profile["prefill_slowdown"])
    kv_bytes = kv_bytes_per_token(shape, KV_BYTES[precision.kv])
    deviation, ttft_deviation = math.hypot(prediction.log_deviation, unknown), first.log_deviation
    return ServedCandidates(
        tuple(found), terms, replica, deviation, ttft_deviation, profile.log_scales[0], kv_bytes, formats
    )


def _idle_ttft(terms: ServingTerms, constants: Any, load: ServedLoad) -> Any:
    """Return the TTFT of a server without other requests."""
    outside = constants[ENGINE_NAMES.index("first_token_seconds")] * terms.first_token_factor
    prompt, cached = load.prefill.mean, load.prefix_hits * load.input.mean
    return outside + ServedSteps(terms, constants).prefill_seconds(prompt, cached)


def _layouts(job: Job, shape: ModelShape, machine: MachineRates, own: bool) -> Iterator[ServedLayout]:
    """Yield every layout of one replica. A stated tp states the whole replica: sizes that the job omits are 1."""
    assert job.serve is not None
    spec, domain = job.layout, max(machine.network.nvlink_domain, machine.node_gpus)
    widest = machine.node_gpus if own else min(domain, MAX_REPLICA_GPUS)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 72) if size <= widest]
    tps = [spec.tp] if spec and spec.tp else [tp for tp in sizes if _splits(shape, tp, job, own)]
    if own:
        yield from own_layouts(shape, tps, job.served_layout.ep if spec else None)
        return
    if spec and spec.tp:
        yield ServedLayout(tp=spec.tp, pp=spec.pp or 1, ep=spec.ep or 1, attention_dp=job.serve.attention_dp)
        return
    stages = [spec.pp] if spec and spec.pp else [1]
    ranks = [job.serve.attention_dp] if job.serve.attention_dp > 1 else sizes if shape.is_moe else [1]
    for tp in tps:
        for attention_dp in ranks:
            stage = tp * attention_dp
            wanted = {1, stage} if shape.is_moe else {1}
            experts = [spec.ep] if spec and spec.ep else sorted(wanted)
            for ep in experts:
                if stage % ep or (ep > 1 and shape.experts % ep):
                    continue
                for pp in stages:
                    if spec or stage * pp <= MAX_REPLICA_GPUS:
                        yield ServedLayout(tp=tp, pp=pp, ep=ep, attention_dp=attention_dp)


def _splits(shape: ModelShape, tp: int, job: Job, own: bool) -> bool:
    return not check_served_layout(Layout(tp=tp, precision=job.precision), shape, padded=not own)


@dataclass(frozen=True)
class DecodeSteps:
    """Steps of a decode pool: prompts arrive with their KV cache."""

    steps: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def mixed_seconds(self, batch: Any, context: Any, tokens: Any, prompt: Any) -> Any:
        return self.steps.decode_seconds(batch, context) + 0.0 * tokens * prompt
