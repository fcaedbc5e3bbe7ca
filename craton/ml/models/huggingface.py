"""Hugging Face configurations: read into a DecoderConfig, written so that transformers loads them; find folders and Hub
ids.

A field that would change the computation and that the decoder does not support is an error, never dropped.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from craton.job import Job, ModelError
from craton.job.model import SCORED, ModelShape, is_reward_model, load_config, model_from_config
from craton.ml.models.config import DecoderConfig, Heads, RoutingConfig
from craton.ml.models.rope import RopeConfig
from craton.remote import is_url

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "kimi_k2")
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_SIGMOID = ("deepseek_v3", "kimi_k2")
UNSTATED_SEQUENCE = 4096  # written if the shape gives no maximum sequence; transformers needs one
INDEX = "model.safetensors.index.json"

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_BIAS_UPDATE_KEY = "router_bias_update"  # ours; transformers keeps unknown fields
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]


def config_from_huggingface(source: str | Path | Mapping[str, Any]) -> DecoderConfig:
    """Read a folder with a config.json, the file itself, or its contents."""
    if isinstance(source, Mapping):
        return _read(source, "config.json", "")
    config, file = load_config(Path(source).expanduser())
    return _read(config, str(file), file.resolve().parent.name)


def config_from_shape(shape: ModelShape) -> DecoderConfig:
    """Return the decoder of a job's model: a preset with its published values, a shape from a config.json with the
    values of that file, inline numbers with common defaults."""
    _check_buildable(shape)
    source = Path(shape.source)
    if source.name == "config.json" and source.is_file():
        return config_from_huggingface(source)
    for pattern, numbers in _families().items():
        if fnmatchcase(shape.name, pattern):
            rope, routing = RopeConfig(**numbers["rope"]), RoutingConfig(**numbers.get("routing", {}))
            return DecoderConfig(shape, rope=rope, norm_epsilon=numbers["norm_epsilon"], routing=routing)
    if shape.mla:
        # as in DeepSeek-V3, which is also the only form that transformers has for this attention
        routing = RoutingConfig(scoring="sigmoid", bias_update=0.001)
        return DecoderConfig(shape, rope=RopeConfig(interleaved=True), norm_epsilon=1e-6, routing=routing)
    # without load balancing some experts get no tokens
    return DecoderConfig(shape, routing=RoutingConfig(auxiliary_loss=0.001 if shape.is_moe else 0.0))


def config_of_job(job: Job) -> DecoderConfig:
    """Return the decoder that a job trains: reward models have a scalar head instead of the token head, policies of
    loss ppo both."""
    assert job.model_shape is not None
    heads: Heads = "tokens"
    if job.preference is not None and job.preference.loss == "reward":
        heads = "score"
    elif job.policy is not None and job.policy.loss == "ppo":
        heads = "both"
    return replace(config_from_shape(job.model_shape), heads=heads)


def config_to_huggingface(config: DecoderConfig) -> dict[str, Any]:
    """Return a config.json that transformers 5 loads; also 4, so position fields are written in both forms."""
    family = huggingface_family(config)
    shape = config.shape
    parameters = config.rope.to_huggingface()
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.mla.qk_rope if shape.mla else shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_sequence or UNSTATED_SEQUENCE,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": parameters,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.scaling == "none" else parameters,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        # without these transformers uses the defaults of its first model
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family != "qwen2":
        fields["attention_bias"] = False
    if not config.has_token_head:
        architecture = _ARCHITECTURES[family].replace("ForCausalLM", SCORED)
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
        fields |= {"architectures": [architecture], "problem_type": "regression", **labels}
    fields |= _window_fields(shape, family)
    fields |= _expert_fields(config, family)
    return fields


def huggingface_family(config: DecoderConfig) -> str:
    """Return the model_type with the same computation; ModelError names what no family supports."""
    shape, routing = config.shape, config.routing
    _check_buildable(shape)
    softmax = routing.scoring == "softmax" and routing.groups == 1 and routing.routed_scale == 1.0
    some_slide = 0 < shape.sliding_layers < shape.layers
    if shape.mla:
        wrong = {
            "experts without a shared expert": shape.is_moe and not shape.shared_experts,
            "a QKV bias": config.qkv_bias,
            "a sliding window": shape.sliding_layers > 0,
        }
        if not shape.is_moe or routing.scoring == "sigmoid":
            return _family("deepseek_v3", "latent attention", wrong)
        wrong |= {
            "routing weights that sum to one": routing.normalize_top_k,
            "a balancing bias": routing.bias_update > 0,
            "rotary dimensions in halves": not config.rope.interleaved,
        }
        return _family("deepseek_v2", "latent attention and softmax routing", wrong)
    if shape.is_moe:
        wrong = {
            "shared experts": shape.shared_experts > 0,
            "sigmoid, grouped or scaled routing": not softmax,
            "a balancing bias": routing.bias_update > 0,
            "a QKV bias": config.qkv_bias,
            "a sliding window in some layers": some_slide,
        }
        if shape.qk_norm:
            return _family("qwen3_moe", "experts", wrong | {"a sliding window": shape.sliding_layers > 0})
        wrong |= {
            "leading layers without experts": shape.dense_layers > 0,
            "routing weights that do not sum to one": not routing.normalize_top_k,
        }
        return _family("mixtral", "experts and no QK norm", wrong)
    if shape.qk_norm:
        return _family("qwen3", "a QK norm", {"a QKV bias": config.qkv_bias})
    if config.qkv_bias:
        return "qwen2"
    if shape.sliding_layers:
        return _family("mistral", "a sliding window", {"a sliding window in some layers only": some_slide})
    return "llama"


def model_folder(model: str | Path) -> Path:
    """Return the folder of a model: the folder itself, the cached copy of one at an s3:// URL, or the Hub's local cache
    of an id, downloaded if that is incomplete.

    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE have the same meaning as in huggingface_hub.
    """

    if is_url(str(model)):
        from craton.infrastructure.storage import mirror

        return mirror(str(model), lambda name: any(fnmatchcase(name, pattern) for pattern in _HUB_FILES))
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise ModelError(f"{str(model)!r} is not a folder or a Hub id (organisation/name) of a Hugging Face model")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ModelError(f"{str(model)!r} is a Hub id, which needs huggingface_hub; install `craton[train]`") from None
    hub_id = str(model)
    try:
        cached = Path(snapshot_download(hub_id, local_files_only=True))
        if has_weights(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # the Hub client raises its own errors, httpx's and the operating system's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{hub_id!r} is not complete in the local Hub cache and cannot be downloaded: {reason}; fetch it where "
            f"there is network access with `hf download {hub_id}` (HF_TOKEN for gated models, HF_HOME: cache), or "
            "give a folder"
        ) from error


def has_weights(folder: str | Path) -> bool:
    """Whether a folder holds all safetensors files that its index lists."""
    folder = Path(folder)
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return all((folder / file).is_file() for file in set(index["weight_map"].values()))
    except FileNotFoundError:
        return any(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _read(config: Mapping[str, Any], source: str, name: str) -> DecoderConfig:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"{source}: model_type {family!r} cannot be built by Craton's decoder; allowed: {', '.join(FAMILIES)}"
        )
    fields = dict(config)
    # defaults of the transformers classes that differ from those of the format
    fields.setdefault("rope_theta", 1_000_000.0 if family == "mixtral" else None)
    fields.setdefault("rope_interleave", family in _LATENT)
    _refuse_unknown(fields, family, source)
    shape = model_from_config(fields, name, source)
    if shape.is_moe and shape.dense_layers == shape.layers:
        shape = replace(shape, experts=0, top_k=0, moe_ffn_hidden=0, shared_experts=0, dense_layers=0)
    _check_buildable(shape)
    rope = RopeConfig.from_huggingface(fields, source)
    if rope.partial_rotary_factor != 1.0:
        # in transformers these families ignore it with some scalings and fail with others
        raise ModelError(f"{source}: partial_rotary_factor {rope.partial_rotary_factor} is not supported; allowed: 1.0")
    return DecoderConfig(
        shape=shape,
        rope=rope,
        norm_epsilon=float(fields.get("rms_norm_eps") or 1e-6),
        qkv_bias=family == "qwen2",
        routing=_routing(fields, family) if shape.is_moe else RoutingConfig(),
        initializer_range=float(fields.get("initializer_range") or 0.02),
        heads=_heads(fields, source),
    )


def _heads(config: Mapping[str, Any], source: str) -> Heads:
    """Return the head of the class that wrote the folder; a classifier must have one label."""
    if not is_reward_model(config):
        return "tokens"
    labels = config.get("num_labels") or len(config.get("id2label") or range(2))  # transformers' default is 2
    if labels != 1:
        raise ModelError(f"{source}: a classifier with {labels} labels is not a reward model; allowed: one label")
    return "score"


def _routing(config: Mapping[str, Any], family: str) -> RoutingConfig:
    if family == "deepseek_v2":
        grouped = config.get("topk_method") == "group_limited_greedy"
        return RoutingConfig(
            normalize_top_k=False,
            routed_scale=float(config.get("routed_scaling_factor") or 1.0),
            groups=int(config.get("n_group") or 1) if grouped else 1,
            top_groups=int(config.get("topk_group") or 1) if grouped else 1,
            auxiliary_loss=float(config.get("router_aux_loss_coef") or 0.0),
        )
    sigmoid = family in _SIGMOID
    return RoutingConfig(
        scoring="sigmoid" if sigmoid else "softmax",
        normalize_top_k=family == "mixtral" or bool(config.get("norm_topk_prob", sigmoid)),
        routed_scale=float(config.get("routed_scaling_factor") or 2.5) if sigmoid else 1.0,
        groups=int(config.get("n_group", 8) or 1) if sigmoid else 1,
        top_groups=int(config.get("topk_group", 4) or 1) if sigmoid else 1,
        auxiliary_loss=float(config.get("router_aux_loss_coef") or 0.0),
        bias_update=float(config.get(_BIAS_UPDATE_KEY) or 0.0),
    )


def _refuse_unknown(config: Mapping[str, Any], family: str, source: str) -> None:
    """Raise ModelError for fields whose value the decoder does not support."""
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu", "swish"),
        "mlp_bias": (None, False),
        "scoring_func": (None, "sigmoid" if family in _SIGMOID else "softmax"),
        "topk_method": (None, "greedy", "group_limited_greedy") if family == "deepseek_v2" else (None, "noaux_tc"),
        "is_causal": (None, True),
    }
    if family != "qwen2":
        allowed["attention_bias"] = (None, False)
    if family == "qwen3_moe":
        allowed["use_sliding_window"] = (None, False)
    if family == "deepseek_v2":  # transformers computes it so, whatever the file says
        allowed |= {"norm_topk_prob": (None, False), "rope_interleave": (None, True)}
    for key, values in allowed.items():
        if config.get(key) not in values:
            choices = " or ".join(repr(value) for value in values if value is not None)
            raise ModelError(f"{source}: {key} {config[key]!r} is not supported; allowed: {choices}")
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and layer_types != sorted(layer_types):  # "full…" comes before "sliding…"
        raise ModelError(
            f"{source}: layer_types {layer_types!r} is not supported; layers with a sliding window must come last"
        )


def _check_buildable(shape: ModelShape) -> None:
    """Raise ModelError for shapes that can be planned but not trained."""
    reasons = {
        "its MLP has no gate": not shape.gated_mlp,
        "its attention is not causal": not shape.causal,
        "its attention has sinks and its experts biases": shape.name.startswith("gpt-oss"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ModelError(
                f"model {shape.name!r} can be planned but not built: {reason}; Craton's decoder has a gated MLP and "
                f"causal attention ({', '.join(FAMILIES)}); for other models, use your own `package.module:function`"
            )


def _family(family: str, description: str, wrong: Mapping[str, bool]) -> str:
    if reasons := [reason for reason, holds in wrong.items() if holds]:
        raise ModelError(
            f"transformers has no family for this decoder: with {description}, {family} is nearest, but it does "
            f"not support {', '.join(reasons)}; keep the weights as a checkpoint, not as a Hugging Face folder"
        )
    return family


def _window_fields(shape: ModelShape, family: str) -> dict[str, Any]:
    if family in ("mistral", "mixtral"):
        return {"sliding_window": shape.sliding_window if shape.sliding_layers else None}
    if family not in ("qwen2", "qwen3"):
        return {}
    full = shape.layers - shape.sliding_layers
    return {
        "use_sliding_window": shape.sliding_layers > 0,
        "sliding_window": shape.sliding_window if shape.sliding_layers else None,
        "max_window_layers": full,
        "layer_types": ["full_attention"] * full + ["sliding_attention"] * shape.sliding_layers,
    }


def _expert_fields(config: DecoderConfig, family: str) -> dict[str, Any]:
    shape, routing = config.shape, config.routing
    fields: dict[str, Any] = {"router_aux_loss_coef": routing.auxiliary_loss}
    if family == "mixtral":
        # here the single MLP width field is the width of the experts
        widths = {"intermediate_size": shape.moe_ffn_hidden}
        return fields | widths | {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top_k}
    if family == "qwen3_moe":
        return fields | {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.moe_ffn_hidden,
            "norm_topk_prob": routing.normalize_top_k,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(shape.dense_layers)),
        }
    return _latent_fields(config, family) | fields if family in _LATENT else {}


def _latent_fields(config: DecoderConfig, family: str) -> dict[str, Any]:
    shape, routing, mla = config.shape, config.routing, config.shape.mla
    assert mla is not None
    fields = {
        "q_lora_rank": mla.q_lora or None,
        "kv_lora_rank": mla.kv_lora,
        "qk_nope_head_dim": mla.qk_nope,
        "qk_rope_head_dim": mla.qk_rope,
        "v_head_dim": mla.v_head,
        # a dense model is one whose layers all count as leading layers without experts
        "first_k_dense_replace": shape.dense_layers if shape.is_moe else shape.layers,
        "n_routed_experts": shape.experts or 1,
        "num_experts_per_tok": shape.top_k or 1,
        "n_shared_experts": shape.shared_experts or 1,
        "moe_intermediate_size": shape.moe_ffn_hidden or shape.ffn_hidden,
        "moe_layer_freq": 1,
        "n_group": routing.groups,
        "topk_group": routing.top_groups,
        "norm_topk_prob": routing.normalize_top_k,
        "routed_scaling_factor": routing.routed_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }
    if family == "deepseek_v2":
        greedy = "group_limited_greedy" if routing.groups > 1 else "greedy"
        return fields | {"scoring_func": "softmax", "topk_method": greedy}
    fields["rope_interleave"] = config.rope.interleaved
    return fields | ({_BIAS_UPDATE_KEY: routing.bias_update} if routing.bias_update else {})


@cache
def _families() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("craton.ml.models").joinpath("families.toml").read_text(encoding="utf-8"))
