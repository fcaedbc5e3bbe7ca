"""Plan a serve job: ranks, memory, KV cache tokens, step time, throughput.

Times are those of `ServedSteps` with the fitted profile of the engine that the job names. Without a load in the job,
the plan states its own: one request, and as many as run at once, of prompts and answers of the same length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from craton.infrastructure import CatalogError, Cluster, resolve_cluster
from craton.job import ContentError, Job, check_job
from craton.job.layout import Layout, check_served_layout
from craton.job.model import ModelShape
from craton.planning.rates import MachineRates, machine_of
from craton.planning.serving.layout import ServedLayout, own_layouts
from craton.planning.serving.own_engine import draft_steps, engine_constants, own_steps, own_terms
from craton.planning.serving.profile import (
    OWN_ENGINE,
    EngineProfile,
    EngineProfileError,
    find_engine_profile,
    unmeasured_version,
)
from craton.planning.serving.served_model import PLAIN_BYTES, ServedModel
from craton.planning.serving.speculation import (
    ASSUMED_ACCEPTANCE,
    SpeculationPlan,
    plan_speculation,
    speculation_costs,
)
from craton.planning.serving.speed import server_speed
from craton.planning.serving.step_times import ServedSteps
from craton.planning.setting import PlanError

PROMPT_TOKENS = OUTPUT_TOKENS = 512  # of a request, assumed where the job states no load
REQUEST_TOKENS = PROMPT_TOKENS + OUTPUT_TOKENS
ROOMY_REQUESTS = 16  # of REQUEST_TOKENS that must fit before fewer ranks are preferred
SHORTEST = 2048  # minimum KV cache tokens of a useful server, where the job states none
SHOWN_BATCHES = (1, 8, 32, 128)
SHOWN_CONTEXTS = (512, 2048, 8192)
# As the engine has them (craton.ml.serving.engine.build).
GPU_RESERVE_BYTES = 2**30  # libraries, code, CUDA graphs
# Beside the weights when the engine sizes its KV cache: contexts of its processes, kernels, buffers. Of one server, 8B
# on an H200: 862,736 tokens (2026-11-18).
GPU_HELD_BYTES = 3.4e9
SAMPLER_BYTES = 48  # per vocabulary entry and request: fp32 copies, order and sums of sorted logits, noise, counts
CPU_KV_BYTES = 2**30  # KV cache on a CPU


@dataclass(frozen=True)
class DecodePoint:
    """`batch` requests with `context` tokens each, all in decode."""

    batch: int
    context: int
    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class PlannedLoad:
    """Predictions for the load that the job states, all of it on this server; latencies in seconds."""

    rate: float  # requests per second that it serves
    saturation_rate: float
    ttft_seconds: float  # mean
    ttft_seconds_low: float
    ttft_seconds_high: float
    ttft_p95_seconds: float
    tpot_seconds: float  # mean
    tpot_seconds_low: float
    tpot_seconds_high: float
    tokens_per_second: float  # generated


@dataclass(frozen=True)
class ServePlan:
    """The plan of a server. Seconds and tokens per second are predictions, except fields named `roof`: the roofline."""

    job: str
    kind: str
    model: ModelShape
    served_name: str
    cluster: Cluster
    tp: int
    ep: int
    precision: str
    kv_precision: str
    page: int
    software: str  # as the job names it
    engine: str  # whose profile predicts
    basis: str  # what that profile was fitted to
    max_length: int
    max_running: int
    chunk_tokens: int
    memory_bytes: float  # per rank, while serving
    memory_limit_bytes: float  # what the device has
    memory_parts: dict[str, float]  # adds up to memory_bytes
    kv_bytes_per_token: float  # over all ranks
    kv_tokens: int
    host_kv_tokens: int  # additional tokens in host memory
    needed_tokens: int  # minimum to serve at all
    prompt_tokens: int  # of a request below
    output_tokens: int
    single_tokens_per_second: float  # one request in decode
    single_tokens_per_second_low: float  # of the 80% interval
    single_tokens_per_second_high: float
    single_roof_tokens_per_second: float
    best_batch: int  # requests at once, the next starts when one ends
    best_tpot_seconds: float
    best_tokens_per_second: float  # generated; prompts are computed beside it
    best_tokens_per_second_low: float
    best_tokens_per_second_high: float
    best_roof_tokens_per_second: float  # without prompts
    bound: str  # the largest part of a decode step of the best batch
    first_token_seconds: float  # an idle server
    prefill_tokens_per_second: float
    decode: list[DecodePoint]
    dollars_per_hour: float | None  # of the node
    dollars_per_million_tokens: float | None  # generated, with best_batch
    speculation: SpeculationPlan | None = None  # with a draft model
    load: PlannedLoad | None = None  # where the job states one
    warnings: list[str] = field(default_factory=list)

    @property
    def layout(self) -> ServedLayout:
        return ServedLayout(tp=self.tp, ep=self.ep)

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.needed_tokens

    @property
    def requests(self) -> int:
        """Number of requests of these lengths that fit in the KV cache at once."""
        return self.kv_tokens // (self.prompt_tokens + self.output_tokens)


def plan_serving(job: Job, *, cluster: Cluster | None = None, acceptance: float = ASSUMED_ACCEPTANCE) -> ServePlan:
    """Plan a server with the ranks the job names, or the fewest that leave enough KV cache. `acceptance` of a draft
    model's tokens: assumed, unless one was measured."""
    serve, shape = job.serve, job.model_shape
    if serve is None:
        raise PlanError(f"{job.where('kind')}kind {job.kind} does not serve; plan training jobs with `plan`")
    assert shape is not None, "a job that serves has a model of known numbers"
    try:
        cluster = cluster or resolve_cluster(job.cluster, job.price)
        check_job(job, cluster.instance.num_gpus)
    except CatalogError as error:
        raise PlanError(f"{job.where('cluster')}cluster: {error}") from None
    except ContentError as error:
        raise PlanError("; ".join(error.problems)) from None
    if not job.has_own_precision:
        raise PlanError(
            f"{job.where('serve', 'precision')}precision {serve.precision} with activations in "
            f"{serve.activation_precision} is planned for a load only; give serve.load, or --rate or --concurrency"
        )
    machine = machine_of(cluster)
    multiplied = "bf16" if serve.precision == "int4" else serve.precision
    if multiplied not in machine.rates.matrix_flops:
        raise PlanError(f"{job.where('serve', 'precision')}{machine.gpu.name} does not support {serve.precision}")
    try:
        profile = find_engine_profile(job.software, machine.gpu)
    except EngineProfileError as error:
        raise PlanError(f"{job.where('software')}software: {error}") from None
    is_own = profile.engine == OWN_ENGINE
    candidates = [_Candidate.of(job, shape, machine, layout) for layout in _layouts(job, shape, cluster, is_own)]
    roomy = [item for item in candidates if item.is_roomy]
    fitting = [candidate for candidate in candidates if candidate.fits]
    chosen = (roomy or fitting[-1:] or candidates[-1:])[0]
    alike = [item for item in roomy if item.model.tp == chosen.model.tp] or [chosen]
    plans = [candidate.plan(job, cluster, profile, acceptance) for candidate in alike]
    return max(plans, key=lambda plan: plan.best_tokens_per_second)


def _layouts(job: Job, shape: ModelShape, cluster: Cluster, is_own: bool) -> list[ServedLayout]:
    """Return the layout of the job, else every tp that the node's GPU count and the model allow; 1 is always valid."""
    if job.layout and job.layout.tp:
        return [ServedLayout(tp=job.layout.tp, ep=job.served_layout.ep)]
    most = cluster.instance.num_gpus
    tps = [
        tp
        for tp in range(1, most + 1)
        if most % tp == 0 and not check_served_layout(Layout(tp=tp, precision=job.precision), shape)
    ]
    return list(own_layouts(shape, tps, None if is_own else 1))


@dataclass(frozen=True)
class _Candidate:
    """The job on a given number of ranks."""

    machine: MachineRates
    model: ServedModel
    memory_bytes: float  # of a rank's device
    workspace_bytes: float
    kv_tokens: int
    needed_tokens: int
    draft: ServedModel | None = None  # whole on every rank

    @classmethod
    def of(cls, job: Job, shape: ModelShape, machine: MachineRates, layout: ServedLayout) -> _Candidate:
        assert job.serve is not None
        serve, gpu = job.serve, machine.gpu
        is_cpu = gpu.generation == "cpu"
        model = ServedModel(shape, serve.precision, serve.kv_precision, layout.tp, layout.ep)
        memory_bytes = gpu.memory_bytes / (layout.tp if is_cpu else 1)  # ranks of a CPU share it
        workspace = passing_bytes(shape, serve.step_tokens, serve.running, PLAIN_BYTES[serve.precision])
        workspace += 0 if is_cpu else GPU_RESERVE_BYTES + GPU_HELD_BYTES
        allowed = serve.memory * memory_bytes
        if is_cpu:
            allowed = min(allowed, model.weight_bytes + workspace + CPU_KV_BYTES)
        draft = None
        if (draft_shape := job.draft_shape) is not None:
            draft = ServedModel(draft_shape, job.draft_precision, serve.kv_precision)
        if is_cpu and draft is not None:  # its KV cache shares CPU_KV_BYTES
            allowed = min(serve.memory * memory_bytes, allowed + draft.weight_bytes)
        tokens = model.kv_tokens(allowed, workspace, serve.page, draft)
        needed = serve.max_length or min(job.served_length, SHORTEST)
        return cls(machine, model, memory_bytes, workspace, tokens, needed, draft)

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.needed_tokens

    @property
    def is_roomy(self) -> bool:
        return self.fits and self.kv_tokens >= ROOMY_REQUESTS * REQUEST_TOKENS

    def plan(self, job: Job, cluster: Cluster, profile: EngineProfile, acceptance: float) -> ServePlan:
        assert job.serve is not None
        serve, model, chunk = job.serve, self.model, job.serve.step_tokens
        max_length = serve.max_length or min(job.served_length, max(self.kv_tokens, self.needed_tokens))
        output = min(OUTPUT_TOKENS, max(1, max_length // 2))
        prompt = min(PROMPT_TOKENS, max(1, max_length - output))
        batch = max(1, min(serve.running, self.kv_tokens // (prompt + output)))
        terms = own_terms(
            model, self.machine, profile, step_tokens=chunk, max_running=serve.running, kv_tokens=self.kv_tokens
        )
        steps = ServedSteps(terms, engine_constants(profile, profile.constants), profile.step_factor)
        speed = server_speed(terms, profile, batch, prompt, output)
        batches = [entry for entry in SHOWN_BATCHES if entry < batch]
        contexts = [item for item in SHOWN_CONTEXTS if item <= max_length] or [prompt + output // 2]
        points = [
            DecodePoint(requests, past, seconds, requests / seconds)
            for requests in (*batches, batch)
            for past in contexts
            if requests == 1 or requests * past <= self.kv_tokens
            for seconds in [float(steps.decode_seconds(float(requests), float(past)))]
        ]
        kv_bytes = self.kv_tokens * model.kv_bytes_per_token
        parts = {"weights": model.weight_bytes, "workspace": self.workspace_bytes, "keys and values": kv_bytes}
        if self.draft is not None:
            parts["draft model"] = self.draft.weight_bytes + self.kv_tokens * self.draft.kv_bytes_per_token
        price = cluster.price.dollars_per_hour if cluster.price else None
        return ServePlan(
            job=job.name,
            kind=job.kind,
            model=model.shape,
            served_name=job.served_name,
            cluster=cluster,
            tp=model.tp,
            ep=model.ep,
            precision=model.precision,
            kv_precision=model.kv_precision,
            page=serve.page,
            software=job.software,
            engine=profile.name,
            basis=profile.source,
            max_length=max_length,
            max_running=serve.running,
            chunk_tokens=chunk,
            memory_bytes=sum(parts.values()),
            memory_limit_bytes=self.memory_bytes,
            memory_parts=parts,
            kv_bytes_per_token=model.kv_bytes_per_token * model.tp,
            kv_tokens=self.kv_tokens,
            host_kv_tokens=int(serve.host_memory / (model.kv_bytes_per_token * model.tp)),
            needed_tokens=self.needed_tokens,
            prompt_tokens=prompt,
            output_tokens=output,
            single_tokens_per_second=1 / speed.single_token.seconds,
            single_tokens_per_second_low=1 / speed.single_token.high,
            single_tokens_per_second_high=1 / speed.single_token.low,
            single_roof_tokens_per_second=1 / speed.single_roof_seconds,
            best_batch=batch,
            best_tpot_seconds=speed.together_tpot.seconds,
            best_tokens_per_second=1 / speed.together_token.seconds,
            best_tokens_per_second_low=1 / speed.together_token.high,
            best_tokens_per_second_high=1 / speed.together_token.low,
            best_roof_tokens_per_second=1 / speed.together_roof_seconds,
            bound=speed.bound,
            first_token_seconds=speed.first_token_seconds,
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            decode=points,
            dollars_per_hour=price,
            dollars_per_million_tokens=price / 3600 * 1e6 * speed.together_token.seconds if price is not None else None,
            speculation=self._speculation(job, steps, profile, prompt + output / 2, acceptance),
            warnings=self._warnings(job, max_length),
        )

    def _speculation(
        self, job: Job, steps: ServedSteps, profile: EngineProfile, context: float, acceptance: float
    ) -> SpeculationPlan | None:
        if self.draft is None:
            return None
        assert job.serve is not None
        assert job.serve.speculate is not None
        drafting = draft_steps(self.draft, self.machine, profile)
        costs = speculation_costs(steps, drafting, is_cpu=self.machine.gpu.generation == "cpu")
        return plan_speculation(self.draft.shape.name, costs, context, job.serve.speculate.tokens, acceptance)

    def _warnings(self, job: Job, max_length: int) -> list[str]:
        shape, tp, ep = self.model.shape, self.model.tp, self.model.ep
        result = [text for text in (unmeasured_version(job.software, self.machine.gpu),) if text]
        if self.fits and max_length < job.served_length:
            result.append(
                f"the model allows {job.served_length:,} tokens but the KV cache holds {max_length:,}: longer requests "
                "are refused"
            )
        if shape.is_moe and tp > ep:
            held = f"all {shape.experts}" if ep == 1 else f"{shape.experts // ep} of {shape.experts}"
            finest = math.gcd(tp, shape.experts)
            remedy = f"; layout: {{tp: {tp}, ep: {finest}}} needs less memory" if finest > ep else ""
            result.append(f"each of the {tp} ranks holds {held} experts{remedy}")
        if self.model.precision == "int4":
            result.append("precision int4: its kernels have been timed, and no server with them")
        if self.model.precision == "int4" and shape.is_moe:
            result.append(
                "precision int4: routed experts stay in bf16, half the bytes of which precision fp8 would take"
            )
        if shape.mla is not None and tp > 1:
            result.append(f"each of the {tp} ranks holds the latents of all tokens (MLA)")
        return result


def served_kv_tokens(job: Job, shape: ModelShape, machine: MachineRates, layout: ServedLayout) -> int:
    """Return the KV cache tokens of Craton's own engine with this job's settings; 0: the model does not fit."""
    return _Candidate.of(job, shape, machine, layout).kv_tokens


def plan_steps(plan: ServePlan) -> ServedSteps:
    """Return the step times of a planned server."""
    machine = machine_of(plan.cluster)
    profile = find_engine_profile(plan.software, machine.gpu)
    model = ServedModel(plan.model, plan.precision, plan.kv_precision, plan.tp, plan.ep)
    return own_steps(model, machine, profile, step_tokens=plan.chunk_tokens, max_running=plan.max_running)


def passing_bytes(shape: ModelShape, chunk_tokens: int, running: int, size: int) -> float:
    """Return the bytes a step needs beside weights and KV cache: hidden states of its tokens, and per request logits,
    sorting for top-p, and the counts of penalties."""
    ffn = max(shape.ffn_hidden, shape.top_k * shape.moe_ffn_hidden)
    widths = 6 * shape.hidden + 3 * ffn + 3 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    widths += (
        3 * shape.top_k * shape.hidden
    )  # rows of routed tokens: before their experts, after, and in the tokens' order
    return float(chunk_tokens * widths * size + running * shape.vocab * (2 * size + SAMPLER_BYTES))
