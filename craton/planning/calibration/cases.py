"""Published training runs as cases to check the planner against.

A case file has the format of `data/training_results.json`. Every row becomes a `Case`, or a `Skipped` with the reason:
no row is dropped silently. Fields that a source does not state are not invented: a missing micro-batch or number of
virtual stages stays open (`open_fields`), and the prediction uses the planner's own choice.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from craton.errors import CratonError
from craton.job.layout import Layout
from craton.job.model import MlaShape, ModelShape
from craton.job.sections import Weights
from craton.planning.software import Traits

# For rows that name a model and no vocabulary: Megatron's GPT default; Nemotron's tokenizer has 256,000 entries.
DEFAULT_VOCAB = 51200
NEMOTRON_VOCAB = 256000
MIN_SECONDS, MAX_SECONDS = 1e-5, 1e6  # range of a credible step
MAX_SIZE = 10**8  # maximum credible size of a model, batch or cluster
# First releases of Megatron-Bridge with HybridEP (pull request 1367) and with fused experts on racks of 72 GPUs.
HYBRIDEP_RELEASE, FUSED_RELEASE = "25.11", "26.06"
MODEL_SIZES = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_hidden",
    "vocab",
    "experts",
    "top_k",
    "moe_ffn_hidden",
    "shared_experts",
    "dense_layers",
    "mtp_layers",
)


class CaseFileError(CratonError):
    """A case file that cannot be read."""


@dataclass(frozen=True)
class CaseMachine:
    """The hardware of a case, as published."""

    gpu: str  # catalog name
    num_gpus: int
    node_gpus: int
    nvlink_domain: int
    nic_bytes_per_second: float  # per GPU
    efa_version: int


@dataclass(frozen=True)
class Case:
    id: str
    family: str
    release: str  # version or variant of the software; "" where the source has only one
    quality: str
    kind: str  # dense | moe
    dup_group: str
    machine: CaseMachine
    shape: ModelShape
    layout: Layout
    sequence: int
    global_batch_sequences: int
    lora: bool
    traits: Traits
    measured_step_seconds: float
    open_fields: tuple[str, ...] = ()
    weights: Weights = "fp32"

    @property
    def group(self) -> tuple[str, str, str]:
        return (self.family, self.machine.gpu, self.shape.name)


@dataclass(frozen=True)
class Skipped:
    id: str
    quality: str
    reason: str


def load_cases(path: str | Path) -> tuple[list[Case], list[Skipped]]:
    """Read a case file; rows that cannot be represented are returned with the reason."""
    rows, _ = read_case_file(path)
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for position, row in enumerate(rows):
        if not isinstance(row, dict):
            raise CaseFileError(f"{path}: run {position + 1} is {type(row).__name__}, expected an object")
        identity = str(row.get("id") or f"run-{position + 1}")
        try:
            cases.append(read_case(row, identity))
        except UnrepresentableError as reason:
            skipped.append(Skipped(identity, str(row.get("quality") or ""), str(reason)))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            skipped.append(
                Skipped(identity, str(row.get("quality") or ""), f"malformed row: {type(error).__name__}: {error}")
            )
    return cases, skipped


def read_case_file(path: str | Path, keys: Sequence[str] = ("cases",)) -> tuple[list[Any], dict[str, Any]]:
    """Return the rows of a case file, a list or under one of these keys, and its whole object; {} of a list."""
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CaseFileError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CaseFileError(f"{path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise CaseFileError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise CaseFileError(f"{path}: nested too deeply to be a list of runs") from None
    rows = document
    if isinstance(document, dict):
        rows = next((document[key] for key in keys if key in document), None)
    if not isinstance(rows, list) or not rows:
        raise CaseFileError(f"{path}: expected a list of runs, or an object with a list under '{keys[-1]}'")
    return rows, document if isinstance(document, dict) else {}


class UnrepresentableError(ValueError):
    """Why a row cannot be predicted."""


def read_case(row: dict[str, Any], identity: str) -> Case:
    """Parse one row of a case file, or raise UnrepresentableError."""
    seconds = step_seconds_of(row)
    shape = shape_of(row.get("model") or {})
    machine = machine_of(row.get("hardware") or {})
    sequence = whole(row.get("seq_len"), "sequence length")
    batch = whole(row.get("global_batch"), "global batch")
    layout, open_fields = layout_of(row, machine.num_gpus, batch)
    family = family_of(str(row.get("source") or ""))
    return Case(
        id=identity,
        family=family,
        release=release_of(row),
        quality=str(row.get("quality") or ""),
        kind=str(row.get("kind") or ("moe" if shape.is_moe else "dense")),
        dup_group=str(row.get("dup_group") or identity),
        machine=machine,
        shape=shape,
        layout=layout,
        sequence=sequence,
        global_batch_sequences=batch,
        lora=row.get("task") == "lora",
        traits=traits_of(row, family, machine),
        measured_step_seconds=seconds,
        open_fields=open_fields,
    )


def step_seconds_of(row: dict[str, Any]) -> float:
    measured, derived = row.get("measured") or {}, row.get("derived") or {}
    seconds = measured.get("step_time_s") or derived.get("step_time_s")
    rate = measured.get("tokens_per_s_per_gpu") or derived.get("tokens_per_s_per_gpu")
    gpus = (row.get("hardware") or {}).get("num_gpus")
    if not seconds and rate and row.get("global_batch") and row.get("seq_len") and gpus:
        seconds = row["global_batch"] * row["seq_len"] / (rate * gpus)
    if not seconds:
        raise UnrepresentableError("no step time and no throughput published")
    if isinstance(seconds, bool) or not MIN_SECONDS < seconds < MAX_SECONDS:
        raise UnrepresentableError(f"a step of {seconds} seconds is not credible")
    return float(seconds)


def whole(value: Any, quantity: str, default: int | None = None) -> int:
    """Return a positive whole number of credible size; a missing one takes the default, if there is one."""
    if value is None or value == 0 or value == "":
        if default is None:
            raise UnrepresentableError(f"{quantity} not stated")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_SIZE or value != int(value):
        raise UnrepresentableError(f"{quantity} {value!r} is not a positive whole number")
    return int(value)


def shape_of(model: dict[str, Any]) -> ModelShape:
    name = str(model.get("name") or "unnamed")
    missing = [key for key in ("layers", "hidden", "heads") if not model.get(key)]
    if not model.get("ffn_hidden") and not model.get("moe_ffn_hidden"):
        missing.append("ffn_hidden")
    if model.get("experts"):
        missing += [key for key in ("top_k", "moe_ffn_hidden") if not model.get(key)]
    if missing:
        raise UnrepresentableError(f"architecture of {name} not stated: {', '.join(missing)}")
    sizes = {key: whole(model.get(key), key, default=0) for key in MODEL_SIZES}
    layers, hidden, heads = sizes["layers"], sizes["hidden"], sizes["heads"]
    mla = None
    if model.get("mla"):
        mla = MlaShape(**{key: whole(value, f"mla {key}", default=0) for key, value in model["mla"].items()})
    elif "mla" in str(model.get("attention") or "").lower():
        raise UnrepresentableError(f"latent attention of {name} without its ranks")
    window = re.search(r"(\d+)-token sliding window", str(model.get("attention") or ""))
    alternating = "alternating" in str(model.get("attention") or "")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn_hidden=sizes["ffn_hidden"] or sizes["moe_ffn_hidden"],
        heads=heads,
        kv_heads=sizes["kv_heads"] or heads,
        head_dim=sizes["head_dim"] or max(1, hidden // heads),
        vocab=sizes["vocab"] or (NEMOTRON_VOCAB if "nemotron" in name.lower() else DEFAULT_VOCAB),
        tied_embeddings=model.get("tied_embeddings") is not False,
        gated_mlp=bool(model.get("gated_mlp")),
        mla=mla,
        experts=sizes["experts"],
        top_k=sizes["top_k"],
        moe_ffn_hidden=sizes["moe_ffn_hidden"],
        shared_experts=sizes["shared_experts"],
        dense_layers=min(sizes["dense_layers"], layers),
        mtp_layers=sizes["mtp_layers"],
        sliding_window=int(window.group(1)) if window else 0,
        sliding_layers=(layers // 2 if alternating else layers) if window else 0,
        source=str(model.get("arch_source") or ""),
    )


# Published spellings → catalog GPU. The order matters: the first match decides.
GPU_NAMES: tuple[tuple[str, str], ...] = (
    (r"GB300", "GB300"),
    (r"GB200", "GB200"),
    (r"B300", "B300"),
    (r"B200", "B200"),
    (r"H100.*(96 ?GB|500 ?W)", "H100-SXM-96-500W"),
    (r"H100", "H100-SXM"),
    (r"H200", "H200-SXM"),
    (r"H800", "H800-SXM"),
    (r"A100.*40|A100.*PCIe", "A100-40-SXM"),
    (r"A100", "A100-80-SXM"),
    (r"V100", "V100-SXM"),
    (r"L40S", "L40S"),
    (r"A10G", "A10G"),
)
# Network per GPU if the source does not state it: the usual rail of that generation (DGX and HGX data sheets).
USUAL_NIC_GBPS: dict[str, float] = {
    "GB300": 800,
    "GB200": 400,
    "B300": 800,
    "B200": 400,
    "V100-SXM": 100,
    "A100-40-SXM": 200,
    "A100-80-SXM": 200,
    "L40S": 50,
    "A10G": 12.5,
}


def machine_of(hardware: dict[str, Any]) -> CaseMachine:
    label = str(hardware.get("gpu") or "")
    name = next((name for pattern, name in GPU_NAMES if re.search(pattern, label)), None)
    if name is None:
        raise UnrepresentableError(f"GPU {label or 'not stated'} is not in the catalog")
    if name == "A100-80-SXM" and hardware.get("gpu_memory_gb") == 40:
        name = "A100-40-SXM"
    num_gpus = whole(hardware.get("num_gpus"), "number of GPUs")
    full_node = whole(hardware.get("gpus_per_node"), "GPUs per node", default=8)
    node_gpus = min(full_node, num_gpus)
    link = str(hardware.get("intra_node_link") or "") + str(hardware.get("product_spec_hint") or "")
    domain = 72 if "NVL72" in link else node_gpus
    per_node = hardware.get("inter_node_gbps_per_node")
    if per_node is not None and (isinstance(per_node, bool) or not 0 < per_node < MAX_SIZE):
        raise UnrepresentableError(f"network of {per_node!r} Gb/s per node is not credible")
    gbps = per_node / full_node if per_node else USUAL_NIC_GBPS.get(name, 400)
    amazon = re.search(r"p\d\w*-?\w*\.|EFA", label + link)
    efa = {"A": 1, "H": 2, "B": 4, "G": 4}.get(name[0], 0) if amazon else 0
    return CaseMachine(name, num_gpus, node_gpus, domain, gbps * 1e9 / 8, efa)


def layout_of(row: dict[str, Any], num_gpus: int, batch: int) -> tuple[Layout, tuple[str, ...]]:
    stated = row.get("parallelism") or {}
    if not all(stated.get(key) for key in ("dp", "tp", "pp")):
        raise UnrepresentableError("layout not stated")
    dp, tp, pp = (whole(stated[key], key) for key in ("dp", "tp", "pp"))
    cp = whole(stated.get("cp"), "cp", default=1)
    if dp * tp * pp * cp != num_gpus:
        raise UnrepresentableError(f"layout as printed gives {dp * tp * pp * cp} ranks, the row has {num_gpus} GPUs")
    open_fields: list[str] = []
    micro_batch = whole(row.get("micro_batch"), "micro-batch", default=0)
    if batch % (dp * max(micro_batch, 1)):
        times = f" x micro-batch {micro_batch}" if micro_batch else ""
        raise UnrepresentableError(f"global batch {batch} is not a multiple of dp {dp}{times}")
    if not micro_batch:
        open_fields.append("micro_batch")
        micro_batch = 1
    notes = f"{stated.get('pp_schedule') or ''} {row.get('notes') or ''}".lower()
    interleaved = "interleaved" in notes or "vpp on" in notes
    vpp = whole(stated.get("virtual_pp"), "virtual stages", default=2 if interleaved and pp > 1 else 1)
    stack = str(row.get("framework") or "")
    if pp > 1 and not stated.get("virtual_pp") and re.match(r"Megatron-Bridge /|Megatron-Core|NeMo \d", stack):
        open_fields.append("vpp")  # these stacks interleave by default and their tables often leave the number out
    if not stated.get("ep") and (row.get("model") or {}).get("experts"):
        open_fields.append("ep")
    sharding = str(stated.get("fsdp_or_zero") or "").lower()
    replicate, fsdp, zero = sharding_of(sharding, dp)
    return Layout(
        pp=pp,
        replicate=replicate,
        fsdp=fsdp,
        cp=cp,
        tp=tp,
        ep=whole(stated.get("ep"), "ep", default=1),
        vpp=vpp,
        micro_batch=micro_batch,
        recompute=recompute_of(row, open_fields),
        precision=precision_of(str(row.get("precision") or "bf16")),
        zero=zero,  # type: ignore[arg-type]
        schedule="interleaved" if vpp > 1 else "1f1b",
    ), tuple(open_fields)


def sharding_of(text: str, dp: int) -> tuple[int, int, int]:
    """Return (replicate, fsdp, zero) from a source's description of its data parallelism."""
    if dp == 1:
        return 1, 1, 3
    if "hsdp" in text:
        shard = 8 if dp % 8 == 0 else dp
        return dp // shard, shard, 3
    if "zero-2" in text or "grad_op" in text:
        return 1, dp, 2
    if "zero-1" in text or "distributed optimizer" in text:
        return 1, dp, 1
    if "zero-0" in text or text in ("ddp", "none"):
        return dp, 1, 3
    if "fsdp" in text or "zero-3" in text:
        return 1, dp, 3
    return 1, dp, 1  # Megatron's default since 2023: optimizer states over the data-parallel ranks


def precision_of(text: str) -> Any:
    text = text.lower()
    for name in ("nvfp4", "mxfp8", "fp8", "fp16", "bf16", "fp32"):
        if name in text:
            return name
    raise UnrepresentableError(f"precision {text} is not known")


def recompute_of(row: dict[str, Any], open_fields: list[str]) -> Any:
    text = str(row.get("activation_recompute") or "").lower()
    if "full" in text or text.startswith("on"):
        return "full"
    if "selective" in text:
        modules = re.search(r"\[(.*)\]", text)
        return "none" if modules and not modules.group(1).strip() else "selective"
    if not text and re.match(r"Megatron-LM \((2019|2020)\)", str(row.get("framework") or "")):
        return "full"  # "activation checkpointing after every transformer layer": arXiv:1909.08053 §4
    if not text:
        open_fields.append("recompute")
    return "none"


def traits_of(row: dict[str, Any], family: str, machine: CaseMachine) -> Traits:
    """Return the software traits from the row's framework and notes."""
    text = " ".join(str(row.get(key) or "") for key in ("framework", "notes", "activation_recompute")).lower()
    nvidia = family in ("megatron-bridge", "nemo", "aws-awsome") or "r0.8" in text
    recipe = row.get("recipe_head") or {}
    rack = family == "megatron-bridge" and machine.nvlink_domain > 8
    if "uccl" in text or "nvshmem" in text or "deepep" in text:
        dispatcher = "deepep"
    elif "hybridep" in text + str(recipe) or (rack and release_of(row) >= HYBRIDEP_RELEASE):
        dispatcher = "hybridep"
    elif "modulelist" in text or "packed bmm" in text:
        dispatcher = "loop"
    elif family == "megatron-bridge" and not rack:
        dispatcher = "deepep"
    else:
        dispatcher = "nccl"
    old = bool(re.search(r"\b20(19|20|21|22)\b", text)) or family in ("narayanan-2021", "korthikanti-2022", "vtrain")
    old = old or (family == "megatron-lm" and "fp16" in str(row.get("precision") or ""))
    fused = old and not re.search(r"\b(2019|2020)\b", text)  # fused softmax, bias and dropout: arXiv:2104.04473 §4.2
    if "selective layer" in text:
        selective = "every second layer"
    elif family in ("torchtitan", "fms-fsdp", "kempnerforge", "nemo-automodel") or "selective op" in text:
        selective = "operators"
    elif nvidia:
        selective = "modules"
    else:
        selective = "attention"
    return Traits(
        attention="unfused" if old else "best" if nvidia or " te" in text else "flash2",
        compiled=("compile" in text and "no torch.compile" not in text and "no compile" not in text) or nvidia or fused,
        tensor_overlap="asynctp" in text
        or "tp-comm-overlap" in text
        or "reduce_scatter async" in text
        or (nvidia and family != "aws-awsome"),
        expert_overlap="overlap=on" in text,
        dispatcher=dispatcher,  # type: ignore[arg-type]
        sequence_parallel="no sequence parallel" not in text and (not old or "sequence parallel" in text),
        gradient_overlap=not old,
        selective=selective,  # type: ignore[arg-type]
        master_gradients=_reduces_in_fp32(row, family, old, nvidia),
        fused_experts=rack and _fuses_experts(row),
    )


def _fuses_experts(row: dict[str, Any]) -> bool:
    """Recipes in 8 and 4 bits for racks fuse expert kernels and capture whole steps since that release (Megatron-Bridge
    pull requests 4173, 4211 and 4226), except where the page notes a regression of these kernels."""
    low = precision_of(str(row.get("precision") or "bf16")) in ("mxfp8", "nvfp4")
    return low and release_of(row) >= FUSED_RELEASE and "regression" not in str(row.get("notes") or "")


def _reduces_in_fp32(row: dict[str, Any], family: str, old: bool, nvidia: bool) -> bool:
    """Megatron-Bridge's recipes set grad_reduce_in_fp32 to False; TorchTitan's mixed precision reduces in fp32."""
    if family == "megatron-bridge":
        return False
    stated = "fp32 grad" in str(row.get("precision") or "").lower()
    return stated or old or nvidia or family == "torchtitan"


def release_of(row: dict[str, Any]) -> str:
    """Return the release that a source names, else the variant in its framework field."""
    source = str(row.get("source") or "")
    release = re.search(r"(?:section|summary) (\d\d\.\d\d(?:\.\d\d)?)", source)
    if release:
        return release.group(1)
    text = str(row.get("framework") or "")
    precision = str(row.get("precision") or "")
    return text + (" rowwise" if "rowwise" in precision else "")


@cache
def families() -> tuple[tuple[str, str], ...]:
    document = tomllib.loads((data_folder() / "families.toml").read_text(encoding="utf-8"))
    return tuple((entry["pattern"], entry["name"]) for entry in document["family"])


def family_of(source: str) -> str:
    for pattern, name in families():
        if re.search(pattern, source, re.IGNORECASE):
            return name
    return re.sub(r"[^a-z0-9]+", "-", source.lower()).strip("-")[:40] or "unknown"


def data_folder() -> Path:
    """Return the folder of published results: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[2]
    inside = package / "data"
    return inside if inside.is_dir() else package.parent / "data"
