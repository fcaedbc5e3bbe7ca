"""Published measurements of servers as cases to check the planner against.

A case file has the format of `data/inference_results.json`. A row gives a `ServingCase` for each metric that it states,
or one `Skipped` with the reason: no row is dropped silently. Fields that a source leaves open are searched over: the
case has all layouts that they allow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from craton.job.model import ModelShape
from craton.planning.calibration import (
    GPU_NAMES,
    USUAL_NIC_GBPS,
    Skipped,
    UnrepresentableError,
    data_folder,
    read_case_file,
    whole,
)
from craton.planning.rates import MachineRates, machine
from craton.planning.serving.engine_fitting.models import shape_of_config
from craton.planning.serving.layout import ServedLayout
from craton.planning.serving.terms import ServedPrecision, serving_terms

Metric = Literal["tpot_seconds", "ttft_seconds", "tokens_per_second_per_gpu"]
LoadKind = Literal["closed", "open", "offline", "decode", "prefill", "batch"]

# What a load shows of its server: in an open one the tokens/s are those offered, in an offline one TTFT is the queue.
SHOWN: dict[LoadKind, tuple[Metric, ...]] = {
    "closed": ("tpot_seconds", "ttft_seconds", "tokens_per_second_per_gpu"),
    "open": ("tpot_seconds", "ttft_seconds"),
    "offline": ("tokens_per_second_per_gpu",),
    "decode": ("tpot_seconds", "tokens_per_second_per_gpu"),
    "prefill": ("tokens_per_second_per_gpu",),
    "batch": ("tokens_per_second_per_gpu",),
}

INFERENCEX_MEAN = 0.9  # of the nominal lengths: drawn between 80 and 100%
FIRST_WAVE = 0.1  # share of the requests that start together: InferenceX sends ten times the concurrency
MAX_TOKENS = 1e8  # of a request
MAX_LOAD = 1e7  # requests, and requests per second
MIN_VALUE, MAX_VALUE = 1e-6, 1e7  # credible seconds, and tokens/s per GPU
ENGINES = (("sglang", "sglang"), ("vllm", "vllm"), ("tensorrt|trt", "trtllm"), ("craton", "craton"))


@dataclass(frozen=True)
class ServingLoad:
    kind: LoadKind
    prompt: float
    output: float
    concurrency: float = 0.0  # closed: of the deployment; decode: running requests; batch: all requests
    rate: float = 0.0  # open: requests per second
    first_wave: float = 0.0  # share of the requests that start together
    cached: float = 0.0  # tokens of each prompt that the prefix cache has
    draft_tokens: int = 0  # per step
    accepted_tokens: float = 1.0  # per step, with the one that needs no draft


@dataclass(frozen=True)
class ServingCase:
    id: str
    metric: Metric
    measured: float
    source: str
    engine: str
    version: str
    gpu: str  # catalog name
    nvlink_domain: int
    shape: ModelShape
    layouts: tuple[ServedLayout, ...]  # of the servers, or of the decode pool; several where fields are open
    prefill: ServedLayout | None  # of the prefill pool
    precision: ServedPrecision
    load: ServingLoad
    open_fields: tuple[str, ...] = ()
    own_machine: MachineRates | None = None  # of a reader's cluster

    @property
    def group(self) -> tuple[str, str, str, str]:
        """What a holdout leaves out together. Models of one architecture count as one: sources rename them."""
        return (self.source, self.gpu, architecture(self.shape), self.engine)

    @property
    def kind(self) -> str:
        return "moe" if self.shape.is_moe else "dense"

    @property
    def machine(self) -> MachineRates:
        return self.own_machine or published_machine(self.gpu, self.nvlink_domain)


def published_machine(gpu: str, nvlink_domain: int) -> MachineRates:
    """Return a machine of this GPU with the usual network of its generation."""
    nic = USUAL_NIC_GBPS.get(gpu, 400) * 1e9 / 8
    return machine(gpu, min(8, nvlink_domain), nvlink_domain, nic, 0)


def architecture(shape: ModelShape) -> str:
    experts = f"-{shape.experts}x{shape.moe_ffn_hidden}" if shape.is_moe else ""
    return f"{shape.layers}x{shape.hidden}{experts}"


def load_serving_cases(path: str | Path) -> tuple[list[ServingCase], list[Skipped]]:
    """Read a case file; a row may name a model of the shipped file instead of stating its architecture."""
    rows, document = read_case_file(path)
    models = document.get("models")
    return read_serving_rows(rows, {**_shipped_models(), **(models if isinstance(models, dict) else {})})


@lru_cache(maxsize=1)
def serving_corpus() -> tuple[ServingCase, ...]:
    """Return the cases of the shipped file."""
    return tuple(load_serving_cases(serving_corpus_path())[0])


@lru_cache(maxsize=1)
def own_serving_cases() -> tuple[ServingCase, ...]:
    """Return the measurements of Craton's own server on one H200: data/craton_servers.json."""
    return tuple(load_serving_cases(data_folder() / "craton_servers.json")[0])


def serving_corpus_path() -> Path:
    return data_folder() / "inference_results.json"


@lru_cache(maxsize=1)
def _shipped_models() -> dict[str, Any]:
    return dict(read_case_file(serving_corpus_path())[1].get("models") or {})


def read_serving_rows(
    rows: list[Any], models: Mapping[str, Any] | None = None
) -> tuple[list[ServingCase], list[Skipped]]:
    """Return the cases of all rows, and the rows without a case; a hostile row never raises. `models`: architectures
    that rows name, by default the shipped ones."""
    known: Mapping[str, Any] = _shipped_models() if models is None else models
    cases: list[ServingCase] = []
    skipped: list[Skipped] = []
    for position, row in enumerate(rows):
        identity = str(row.get("id") or f"row-{position + 1}") if isinstance(row, dict) else f"row-{position + 1}"
        try:
            if not isinstance(row, dict):
                raise UnrepresentableError(f"the row is {type(row).__name__}, not an object")
            cases += read_serving_row(row, identity, known)
        except UnrepresentableError as reason:
            skipped.append(Skipped(identity, "", str(reason)))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            skipped.append(Skipped(identity, "", f"malformed row: {type(error).__name__}: {error}"))
    return cases, skipped


def is_serving_row(row: object) -> bool:
    """Training rows have a step time and no workload; inference rows an engine or a workload."""
    return isinstance(row, dict) and ("workload" in row or "engine" in row)


def read_serving_row(row: dict[str, Any], identity: str, models: Mapping[str, Any]) -> list[ServingCase]:
    """Parse one row, or raise UnrepresentableError."""
    if "LAYOUT INCONSISTENT" in str(row.get("notes") or ""):
        raise UnrepresentableError("the layout contradicts itself (marked by the source's reader)")
    hardware, parallelism = _part(row, "hardware"), _part(row, "parallelism")
    gpu, domain = _gpu(hardware)
    shape = _shape(_part(row, "model"), models)
    engine, version = _engine(_part(row, "engine"))
    precision = _precision(_part(row, "precision"), shape, engine, gpu)
    count = whole(hardware.get("count"), "GPU count", default=0)
    prefill: ServedLayout | None = None
    open_fields: list[str] = []
    if parallelism.get("mode") == "disagg":
        prefill, layouts = _pools(parallelism, shape, count, open_fields)
    else:
        layouts = _layouts(parallelism, shape, count, domain, open_fields)
    for layout in (*layouts, *([prefill] if prefill else [])):
        _check_layout(layout, shape)
    machine = published_machine(gpu, domain)
    layouts = tuple(layout for layout in layouts if serving_terms(shape, machine, layout, precision).fits)
    if not layouts or (prefill and not serving_terms(shape, machine, prefill, precision).fits):
        raise UnrepresentableError(f"the weights of {shape.name} do not fit into the GPUs of the layout as printed")
    load = _load(row, layouts[0], prefill)
    if load.kind == "closed" and not _part(row, "workload").get("concurrency"):
        open_fields.append("concurrency")  # a maximum batch was printed instead
    measured = _metrics(row, load, count)
    return [
        ServingCase(
            id=identity,
            metric=metric,
            measured=value,
            source=_source(row, identity),
            engine=engine,
            version=version,
            gpu=gpu,
            nvlink_domain=domain,
            shape=shape,
            layouts=layouts,
            prefill=prefill,
            precision=precision,
            load=load,
            open_fields=tuple(open_fields),
        )
        for metric, value in measured.items()
    ]


def _part(row: dict[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key) or {}
    if not isinstance(value, dict):
        raise UnrepresentableError(f"{key} is {type(value).__name__}, not an object")
    return value


def _number(value: Any, quantity: str, most: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UnrepresentableError(f"{quantity} {value!r} is not a positive number")
    if value > most:
        raise UnrepresentableError(f"{quantity} {value:g} is not credible: above {most:g}")
    return float(value)


def _tokens(value: Any, quantity: str) -> float:
    """Return a length; one below a token is a mistake, too."""
    tokens = _number(value, quantity, MAX_TOKENS)
    if tokens < 1.0:
        raise UnrepresentableError(f"{quantity} {value!r} is below one token")
    return tokens


def _gpu(hardware: dict[str, Any]) -> tuple[str, int]:
    """Return the catalog's name and the GPUs of one NVLink domain."""
    label = f"{hardware.get('gpu_key') or ''} {hardware.get('gpu') or ''}".strip()
    if re.search(r"H20\b", label):
        raise UnrepresentableError("GPU H20 is not in the catalog")
    name = next((name for pattern, name in GPU_NAMES if re.search(pattern, label, re.IGNORECASE)), None)
    if name is None:
        raise UnrepresentableError(f"GPU {label or 'not stated'} is not in the catalog")
    return name, 72 if name in ("GB200", "GB300") else 8


def _shape(model: dict[str, Any], models: Mapping[str, Any]) -> ModelShape:
    name = str(model.get("name") or model.get("arch_ref") or "unnamed")
    config = model.get("architecture")
    for key in (model.get("arch_ref"), model.get("name")):
        if not isinstance(config, dict) and isinstance(key, str) and isinstance(models.get(key), dict):
            config = models[key].get("architecture")
    if not isinstance(config, dict):
        raise UnrepresentableError(f"architecture of {name} not stated")
    return shape_of_config(name, config)


def _engine(engine: dict[str, Any]) -> tuple[str, str]:
    name = str(engine.get("name") or "").lower()
    known = next((label for pattern, label in ENGINES if re.search(pattern, name)), None)
    return known or re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown", str(engine.get("version") or "")


def _weights(text: str) -> str:
    for pattern, name in (
        ("fp8_block", "fp8_block"),
        ("mxfp4", "mxfp4"),
        ("fp4", "nvfp4"),
        ("int4|awq|gptq|w4a16", "int4"),
        ("fp8", "fp8"),
        ("bf16|bfloat16|fp16|float16", "bf16"),
    ):
        if re.search(pattern, text):
            return name
    raise UnrepresentableError(f"weight precision {text} is not known")


def _precision(stated: dict[str, Any], shape: ModelShape, engine: str, gpu: str) -> ServedPrecision:
    """A source that states no precision has the checkpoint's: 16 bits."""
    text = str(stated.get("gemm") or stated.get("weights") or "bf16").lower()
    weights = _weights(text)
    experts = _weights(str(stated.get("moe") or stated.get("weights") or "bf16").lower()) if shape.is_moe else None
    attention = None
    if shape.is_moe and shape.sliding_window == 128:  # gpt-oss: its checkpoint has 4-bit experts and 16-bit attention
        weights, experts, attention = "bf16", "mxfp4", "bf16"
    elif shape.mla and experts in ("nvfp4", "mxfp4"):  # the NVFP4 checkpoints quantize MLPs only
        attention = "bf16"
    kv = str(stated.get("kv") or "").lower()
    if not kv:
        quantized = weights != "bf16" or attention is not None
        kv = "fp8" if quantized and (engine in ("trtllm", "vllm") or gpu.lstrip("G").startswith("B")) else "bf16"
    return ServedPrecision(weights, "fp8" if "fp8" in kv else "bf16", experts, attention)


def _size(stated: dict[str, Any], key: str) -> int:
    return whole(stated.get(key), key, default=0)


def _layouts(
    stated: dict[str, Any], shape: ModelShape, count: int, domain: int, open_fields: list[str]
) -> tuple[ServedLayout, ...]:
    tp, pp, ep, dp, moe_tp = (_size(stated, key) for key in ("tp", "pp", "ep", "attention_dp", "moe_tp"))
    pp = pp or 1
    if not count:
        if not tp and not dp:
            raise UnrepresentableError("neither a GPU count nor a layout is stated")
        count = max(tp, 1) * max(dp, 1) * pp
    stage = count // pp
    if shape.is_moe and moe_tp > 1 and moe_tp == ep and stage == moe_tp * ep and stage > 8:
        # Some tables print the product of two views of the same GPUs: tp 8 and ep 8 of 8 GPUs as 64.
        open_fields.append("gpus")
        count, stage = ep * pp, ep
        tp, dp = (ep, 1) if tp > dp else (1, ep)
    if dp > 1 and tp == dp == stage:
        tp = 1  # attention data parallel over the ranks of tp
    if not tp and not dp:
        open_fields.append("tp")
    tp_choices = [tp] if tp else [max(1, stage // dp)] if dp else _divisors(stage)
    choices = []
    for size in tp_choices:
        if not shape.is_moe:
            choices.append(ServedLayout(tp=size, pp=pp, attention_dp=dp or max(1, stage // size)))
            continue
        for ranks in [dp] if dp else sorted({1, stage} if size == stage else {max(1, stage // size)}):
            width = stage // ranks if not dp and size == stage else size
            experts = [ep] if ep else [1, width * ranks]
            choices += [ServedLayout(tp=width, pp=pp, ep=expert, attention_dp=ranks) for expert in sorted(set(experts))]
    if shape.is_moe:
        open_fields += [key for key, value in (("ep", ep), ("attention_dp", dp)) if not value]
    valid = [layout for layout in choices if layout.replica_gpus == count and layout.stage_gpus % layout.ep == 0]
    if not valid:
        raise UnrepresentableError(f"layout as printed does not give the row's {count} GPUs")
    if valid[0].tp > domain and len(valid) == 1:
        raise UnrepresentableError(f"tensor parallel over {valid[0].tp} GPUs leaves the NVLink domain of {domain}")
    return tuple(valid)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _pools(
    stated: dict[str, Any], shape: ModelShape, count: int, open_fields: list[str]
) -> tuple[ServedLayout, tuple[ServedLayout, ...]]:
    pools = []
    for name in ("prefill", "decode"):
        pool = _part(stated, name)
        tp, pp, ep, dp, workers = (max(1, _size(pool, key)) for key in ("tp", "pp", "ep", "attention_dp", "workers"))
        moe_tp = _size(pool, "moe_tp")
        if not pool.get("workers"):
            open_fields.append(f"{name}.workers")
        if shape.is_moe and moe_tp and _size(pool, "ep") and moe_tp * ep != tp * dp:
            raise UnrepresentableError(f"{name} pool: moe_tp {moe_tp} x ep {ep} is not tp {tp} x attention_dp {dp}")
        if shape.is_moe and not _size(pool, "ep"):
            open_fields.append(f"{name}.ep")
        pools.append(ServedLayout(tp, pp, ep, dp, workers))
    prefill, decode = pools
    if count and not any("workers" in field for field in open_fields) and prefill.gpus + decode.gpus != count:
        raise UnrepresentableError(f"pools as printed have {prefill.gpus + decode.gpus} GPUs, the row {count}")
    return prefill, (decode,)


def _check_layout(layout: ServedLayout, shape: ModelShape) -> None:
    if layout.tp > 1 and shape.heads % layout.tp:
        raise UnrepresentableError(f"tp {layout.tp} does not divide {shape.heads} attention heads")
    if layout.stage_gpus % layout.ep or (shape.is_moe and shape.experts < layout.ep):
        raise UnrepresentableError(f"ep {layout.ep} does not divide {layout.stage_gpus} GPUs of a stage")


def _load(row: dict[str, Any], layout: ServedLayout, prefill: ServedLayout | None) -> ServingLoad:
    work = _part(row, "workload")
    text = str(work.get("load") or "").lower()
    inferencex = "InferenceX (InferenceMAX) measurement" in str(row.get("notes") or "")
    scale = INFERENCEX_MEAN if inferencex else 1.0
    prompt = work.get("isl") or work.get("kv_len")
    if prompt is None:
        raise UnrepresentableError("input length not stated")
    prompt = _tokens(prompt, "input length") * scale
    output = _tokens(work["osl"], "output length") * scale if work.get("osl") else 0.0
    per_gpu = work.get("batch_per_gpu")
    cached = prompt * _number(work["prefix_hits"], "prefix hits") if work.get("prefix_hits") else 0.0
    if cached >= prompt:
        raise UnrepresentableError(f"prefix hits {work['prefix_hits']!r} are not below 1")
    if work.get("qps"):
        return ServingLoad("open", prompt, max(output, 1.0), rate=_number(work["qps"], "qps", MAX_LOAD), cached=cached)
    if "decode only" in text and not per_gpu:
        raise UnrepresentableError("decode-only row without a batch")
    if "prefill only" in text or (not output and not work.get("kv_len") and not per_gpu) or output == 1.0:
        return ServingLoad("prefill", prompt, 1.0)
    metrics = _part(row, "metrics")
    if any(key.startswith("input_tokens") for key in metrics) and not any(
        key.startswith(("output", "ttft", "tpot", "mean")) for key in metrics
    ):
        return ServingLoad("prefill", prompt, 1.0)
    if work.get("kv_len") or (per_gpu and not work.get("concurrency")):
        if per_gpu is None:
            raise UnrepresentableError("decode-only row without a batch")
        running = _number(per_gpu, "batch per GPU", MAX_LOAD) * layout.replica_gpus * layout.replicas
        return ServingLoad("decode", prompt + 0.5 * output, 1.0, concurrency=running)
    concurrency = work.get("concurrency")
    if concurrency is None and work.get("batch_per_dp_rank"):
        concurrency = _number(work["batch_per_dp_rank"], "batch per rank", MAX_LOAD) * layout.attention_dp
    if concurrency is None and prefill is not None:
        batch = _part(_part(row, "parallelism"), "decode").get("batch")
        if batch:
            concurrency = _number(batch, "decode batch", MAX_LOAD) * layout.attention_dp * layout.replicas
    if not output:
        raise UnrepresentableError("output length not stated")
    if concurrency is None:
        if "max throughput" in text or "saturated" in text or "peak" in text:
            return ServingLoad("offline", prompt, output)
        raise UnrepresentableError(f"load {text or 'not stated'} has no concurrency")
    if work.get("mtp") is True:
        raise UnrepresentableError("speculative decoding without a number of draft tokens")
    if "start at once" in text:
        return ServingLoad("batch", prompt, output, concurrency=_number(concurrency, "concurrency", MAX_LOAD))
    running = _number(concurrency, "concurrency", MAX_LOAD)
    wave = min(1.0, running / _number(work["requests"], "requests", MAX_LOAD)) if work.get("requests") else FIRST_WAVE
    drafts = whole(work.get("mtp"), "draft tokens", default=0) if work.get("mtp") else 0
    accepted = metrics.get("mean_accepted_tokens_per_step")
    if drafts and accepted is None:
        raise UnrepresentableError("speculative decoding without accepted tokens per step")
    return ServingLoad(
        "closed",
        prompt,
        output,
        concurrency=running,
        first_wave=wave,
        cached=cached,
        draft_tokens=drafts,
        accepted_tokens=_number(accepted, "accepted tokens") if drafts else 1.0,
    )


def _metrics(row: dict[str, Any], load: ServingLoad, count: int) -> dict[Metric, float]:
    """Return the metrics of a row in seconds, and output tokens/s per GPU."""
    metrics = _part(row, "metrics")
    found: dict[Metric, float] = {}

    def take(metric: Metric, *keys: str, scale: float = 1.0) -> None:
        key = next((key for key in keys if metrics.get(key) is not None), None)
        if key is None or metric in found:
            return
        value = _number(metrics[key], key) * scale
        if not MIN_VALUE < value < MAX_VALUE:
            raise UnrepresentableError(f"{key} {metrics[key]!r} is not credible")
        found[metric] = value

    take("ttft_seconds", "ttft_ms", "mean_ttft_ms", scale=1e-3)
    take("tpot_seconds", "tpot_ms", "mean_itl_ms", scale=1e-3)
    if load.concurrency == 1 and load.kind == "closed" and metrics.get("output_tokens_per_s_per_user"):
        rate = _number(metrics["output_tokens_per_s_per_user"], "output_tokens_per_s_per_user")
        found.setdefault("tpot_seconds", 1.0 / rate)
    take("tokens_per_second_per_gpu", "output_tokens_per_s_per_gpu")
    take("tokens_per_second_per_gpu", "output_tokens_per_s_per_node", scale=1.0 / 8.0)
    if count:
        take("tokens_per_second_per_gpu", "output_tokens_per_s_total", scale=1.0 / count)
    if load.kind == "prefill":  # a prefill pool makes the first token of each prompt
        take("tokens_per_second_per_gpu", "input_tokens_per_s_per_gpu", scale=1.0 / load.prompt)
        take("tokens_per_second_per_gpu", "input_tokens_per_s_per_node", scale=1.0 / load.prompt / 8.0)
    found = {metric: value for metric, value in found.items() if metric in SHOWN[load.kind]}
    if not found:
        names = ", ".join(map(str, metrics)) or "none"
        raise UnrepresentableError(f"metrics {names}: none is TTFT, TPOT or tokens/s per GPU of a {load.kind} load")
    return found


def _source(row: dict[str, Any], identity: str) -> str:
    source = _part(row, "source")
    notes = str(row.get("notes") or "")
    if "InferenceX (InferenceMAX) measurement" in notes:
        return "InferenceX"
    if "gap-analysis" in notes:
        return "NVIDIA gap analysis"
    return str(source.get("url") or identity)[:200]
