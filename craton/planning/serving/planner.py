"""Plan a serve job: ranks, memory, KV cache tokens, step time, throughput.

Step times are the roofline of `step` divided by an assumed efficiency, plus a fixed time of kernels and collectives.
The plan states its loads; measurements of a run are compared with the roofline of the same steps instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from craton.infrastructure import CatalogError, Cluster, resolve_cluster
from craton.job import ContentError, Job, check_job
from craton.job.layout import Layout, check_served_layout
from craton.job.model import ModelShape
from craton.planning.rates import Group, MachineRates, all_gather_seconds, machine_of
from craton.planning.serving.speculation import (
    ASSUMED_ACCEPTANCE,
    HOST_SECONDS,
    SpeculationCosts,
    SpeculationPlan,
    plan_speculation,
)
from craton.planning.serving.step import (
    COLLECTIVES_PER_LAYER,
    PLAIN_BYTES,
    DevicePeaks,
    Roofline,
    ServedModel,
    peaks_of,
)
from craton.planning.setting import PlanError

EFFICIENCY = 0.85  # of the roofline, inside kernels; assumed for decode attention and matmuls on an H200
KERNELS_PER_LAYER = 8  # of a step in a CUDA graph; assumed
LAUNCH_SECONDS = 2.5e-6  # of a kernel on an H100 or H200 (rates/kernels.toml), where the GPU's own is not known
CPU_EFFICIENCY = 0.3  # assumed: plain torch; qwen3-0.6b in bf16 decoded 7.5 tokens/s on two Xeon cores, planned 7.2
CPU_STEP_SECONDS = 0.01  # assumed: Python and small operations
MEAN_CONTEXT = 1024  # tokens of context per request, assumed where loads are compared
PROMPT_TOKENS = 1024  # of the prompt for the time to first token
ROOMY_REQUESTS = 16  # of MEAN_CONTEXT that must fit before fewer ranks are preferred
SHORTEST = 2048  # minimum KV cache tokens of a useful server, where the job states none
SHOWN_BATCHES = (1, 8, 32, 128)
SHOWN_CONTEXTS = (512, 2048, 8192)
# As the engine has them (craton.ml.serving.engine.build).
GPU_RESERVE_BYTES = 2**30  # libraries, code, CUDA graphs
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
    precision: str
    kv_precision: str
    page: int
    roofs: DevicePeaks
    efficiency: float  # of the roofline, assumed
    overhead_seconds: float  # of a step, assumed
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
    mean_context: int  # of the loads below
    single_tokens_per_second: float  # one request
    single_roof_tokens_per_second: float
    best_batch: int
    best_step_seconds: float
    best_tokens_per_second: float
    best_roof_tokens_per_second: float
    bound: str  # of the best batch: "memory" or "computing"
    prompt_tokens: int
    first_token_seconds: float  # an idle server, a prompt of prompt_tokens
    prefill_tokens_per_second: float
    decode: list[DecodePoint]
    dollars_per_hour: float | None  # of the node
    dollars_per_million_tokens: float | None  # generated, at the best batch
    speculation: SpeculationPlan | None = None  # with a draft model
    load: PlannedLoad | None = None  # where the job states one
    warnings: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.needed_tokens

    @property
    def requests(self) -> int:
        """Number of requests of the mean context that fit in the KV cache at once."""
        return self.kv_tokens // self.mean_context


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
    machine = machine_of(cluster)
    if serve.precision not in machine.rates.matrix_flops:
        raise PlanError(f"{job.where('serve', 'precision')}{machine.gpu.name} does not support {serve.precision}")
    candidates = [_Candidate.of(job, shape, machine, tp) for tp in _tensor_sizes(job, shape, cluster)]
    roomy = [item for item in candidates if item.is_roomy]
    fitting = [candidate for candidate in candidates if candidate.fits]
    return (roomy or fitting[-1:] or candidates[-1:])[0].plan(job, cluster, acceptance)


def _tensor_sizes(job: Job, shape: ModelShape, cluster: Cluster) -> list[int]:
    """Return the tp of the job, else every tp that the node's GPU count and the model allow; 1 is always valid."""
    if job.layout and job.layout.tp:
        return [job.layout.tp]
    most = cluster.instance.num_gpus
    return [
        tp
        for tp in range(1, most + 1)
        if most % tp == 0 and not check_served_layout(Layout(tp=tp, precision=job.precision), shape)
    ]


@dataclass(frozen=True)
class _Candidate:
    """The job on a given number of ranks."""

    machine: MachineRates
    model: ServedModel
    roofs: DevicePeaks
    memory_bytes: float  # of a rank's device
    workspace_bytes: float
    kv_tokens: int
    needed_tokens: int
    draft: ServedModel | None = None  # whole on every rank

    @classmethod
    def of(cls, job: Job, shape: ModelShape, machine: MachineRates, tp: int) -> _Candidate:
        assert job.serve is not None
        serve, gpu = job.serve, machine.gpu
        is_cpu = gpu.generation == "cpu"
        model = ServedModel(shape, serve.precision, serve.kv_precision, tp)
        link = machine.network.nvlink_bytes_per_second * machine.network.nvlink_efficiency
        roofs = peaks_of(gpu, serve.precision, link if tp > 1 else 0.0)
        memory_bytes = gpu.memory_bytes
        if is_cpu and tp > 1:  # its ranks share the processor
            roofs = replace(roofs, bytes_per_second=roofs.bytes_per_second / tp, flops=roofs.flops / tp)
            memory_bytes /= tp
        workspace = passing_bytes(shape, serve.step_tokens, serve.running, PLAIN_BYTES[serve.precision])
        workspace += 0 if is_cpu else GPU_RESERVE_BYTES
        allowed = serve.memory * memory_bytes
        if is_cpu:
            allowed = min(allowed, model.weight_bytes + workspace + CPU_KV_BYTES)
        draft = None
        if (draft_shape := job.draft_shape) is not None:
            draft = ServedModel(draft_shape, serve.precision, serve.kv_precision)
        if is_cpu and draft is not None:  # its KV cache shares CPU_KV_BYTES
            allowed = min(serve.memory * memory_bytes, allowed + draft.weight_bytes)
        tokens = model.kv_tokens(allowed, workspace, serve.page, draft)
        needed = serve.max_length or min(job.served_length, SHORTEST)
        return cls(machine, model, roofs, memory_bytes, workspace, tokens, needed, draft)

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.needed_tokens

    @property
    def is_roomy(self) -> bool:
        return self.fits and self.kv_tokens >= ROOMY_REQUESTS * MEAN_CONTEXT

    def plan(self, job: Job, cluster: Cluster, acceptance: float) -> ServePlan:
        assert job.serve is not None
        serve, model = job.serve, self.model
        roofline = Roofline(model, self.roofs)
        efficiency = serving_efficiency(self.machine)
        max_length = serve.max_length or min(job.served_length, max(self.kv_tokens, self.needed_tokens))
        context = min(MEAN_CONTEXT, max_length)
        batch = max(1, min(serve.running, self.kv_tokens // context))

        def decode_seconds(requests: int, past: int) -> float:
            return roofline.decode_seconds(requests, past) / efficiency + self._idle_seconds(requests)

        batches = [entry for entry in SHOWN_BATCHES if entry < batch]
        contexts = [item for item in SHOWN_CONTEXTS if item <= max_length] or [context]
        points = [
            DecodePoint(requests, past, seconds, requests / seconds)
            for requests in (*batches, batch)
            for past in contexts
            if requests == 1 or requests * past <= self.kv_tokens
            for seconds in [decode_seconds(requests, past)]
        ]
        best_seconds, best_roof = decode_seconds(batch, context), roofline.decode_seconds(batch, context)
        chunk, prompt = serve.step_tokens, min(PROMPT_TOKENS, max_length)
        chunk_seconds = roofline.prefill_seconds(chunk, prompt) / efficiency + self._idle_seconds(chunk)
        first = roofline.prefill_seconds(prompt, prompt) / efficiency
        first += -(-prompt // chunk) * self._idle_seconds(min(prompt, chunk))
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
            precision=model.precision,
            kv_precision=model.kv_precision,
            page=serve.page,
            roofs=self.roofs,
            efficiency=efficiency,
            overhead_seconds=self._overhead_seconds,
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
            mean_context=context,
            single_tokens_per_second=1 / decode_seconds(1, context),
            single_roof_tokens_per_second=1 / roofline.decode_seconds(1, context),
            best_batch=batch,
            best_step_seconds=best_seconds,
            best_tokens_per_second=batch / best_seconds,
            best_roof_tokens_per_second=batch / best_roof,
            bound=_bound(roofline, batch, context),
            prompt_tokens=prompt,
            first_token_seconds=first,
            prefill_tokens_per_second=chunk / chunk_seconds,
            decode=points,
            dollars_per_hour=price,
            dollars_per_million_tokens=price / 3600 * 1e6 * best_seconds / batch if price is not None else None,
            speculation=self._speculation(job, roofline, context, acceptance),
            warnings=self._warnings(job, max_length),
        )

    def _speculation(self, job: Job, roofline: Roofline, context: int, acceptance: float) -> SpeculationPlan | None:
        if self.draft is None:
            return None
        assert job.serve is not None
        assert job.serve.speculate is not None
        costs = speculation_costs(
            roofline,
            Roofline(self.draft, self.roofs),
            is_cpu=self.machine.gpu.generation == "cpu",
            launch_seconds=self.machine.rates.kernel_launch_seconds,
        )
        return plan_speculation(self.draft.shape.name, costs, context, job.serve.speculate.tokens, acceptance)

    @property
    def _overhead_seconds(self) -> float:
        return decode_overhead_seconds(self.machine, self.model.shape)

    def _idle_seconds(self, tokens: int) -> float:
        """Return the step time beyond the roofline: gaps between kernels, and collective latency."""
        shape, tp = self.model.shape, self.model.tp
        if tp == 1:
            return self._overhead_seconds
        size = float(tokens * shape.hidden * PLAIN_BYTES[self.model.precision])
        whole = all_gather_seconds(size, Group(tp, tp, tp), self.machine.network)
        moved = (tp - 1) / tp * size / self.roofs.link_bytes_per_second
        return self._overhead_seconds + COLLECTIVES_PER_LAYER * shape.layers * max(0.0, whole - moved)

    def _warnings(self, job: Job, max_length: int) -> list[str]:
        shape, tp = self.model.shape, self.model.tp
        result = []
        if self.fits and max_length < job.served_length:
            result.append(
                f"the model allows {job.served_length:,} tokens but the KV cache holds {max_length:,}: longer requests "
                "are refused"
            )
        if shape.is_moe and tp > 1:
            result.append(f"each of the {tp} ranks holds all {shape.experts} experts")
        if shape.mla is not None:
            result.append("latent attention (MLA): the KV cache holds every head's keys and values, not the latents")
        return result


def served_kv_tokens(job: Job, shape: ModelShape, machine: MachineRates, tp: int) -> int:
    """Return the KV cache tokens of Craton's own engine with this job's settings; 0: the model does not fit."""
    return _Candidate.of(job, shape, machine, tp).kv_tokens


def serving_efficiency(machine: MachineRates) -> float:
    """Return the assumed share of the roofline that a step reaches."""
    return CPU_EFFICIENCY if machine.gpu.generation == "cpu" else EFFICIENCY


def decode_overhead_seconds(machine: MachineRates, shape: ModelShape) -> float:
    """Return the step time beyond the roofline on one rank: gaps between kernels, on a CPU Python."""
    if machine.gpu.generation == "cpu":
        return CPU_STEP_SECONDS
    return KERNELS_PER_LAYER * shape.layers * machine.rates.kernel_launch_seconds


def speculation_costs(
    model: Roofline, draft: Roofline, *, is_cpu: bool, launch_seconds: float = LAUNCH_SECONDS
) -> SpeculationCosts:
    """Return the step times of a model and its draft model as plans of servers predict them."""
    if is_cpu:
        return SpeculationCosts(model, draft, CPU_EFFICIENCY, CPU_STEP_SECONDS, CPU_STEP_SECONDS)
    gaps, draft_gaps = (KERNELS_PER_LAYER * roofline.model.shape.layers * launch_seconds for roofline in (model, draft))
    return SpeculationCosts(model, draft, EFFICIENCY, gaps, draft_gaps, HOST_SECONDS)


def _bound(roofline: Roofline, batch: int, context: int) -> str:
    tokens = batch * context
    memory = roofline.read_bytes(batch, tokens, batch) / roofline.roofs.bytes_per_second
    return "memory" if memory >= roofline.step_flops(batch, tokens, batch) / roofline.roofs.flops else "computing"


def passing_bytes(shape: ModelShape, chunk_tokens: int, running: int, size: int) -> float:
    """Return the bytes a step needs beside weights and KV cache: hidden states of its tokens, and per request logits,
    sorting for top-p, and the counts of penalties."""
    ffn = max(shape.ffn_hidden, shape.top_k * shape.moe_ffn_hidden)
    widths = 6 * shape.hidden + 3 * ffn + 3 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return float(chunk_tokens * widths * size + running * shape.vocab * (2 * size + SAMPLER_BYTES))
