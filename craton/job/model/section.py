"""The `model:` key and its shape.

Allowed: a preset, a Hub id in the local cache, a folder (local or an s3:// URL) or config.json, an inline shape, a
training run, or `package.module:function`. The shape of a function is unknown: it runs, but cannot be planned.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, model_validator

from craton.job.document import KeyConflictError, Section, Size, Whole, read_document
from craton.job.errors import ModelError
from craton.job.model.huggingface import cached_config, read_config
from craton.job.model.presets import find_preset, preset_names
from craton.job.model.shape import MlaShape, ModelShape
from craton.nearest import did_you_mean
from craton.remote import is_url, remote_config, remote_weights
from craton.telemetry import RunDirectory, runs_root

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


# Ten to a thousand times the largest published model: more is most likely a typo, and its plan meaningless.
MAX_MODEL_NUMBERS = {
    "layers": 10_000,
    "hidden": 1_000_000,
    "ffn_hidden": 10_000_000,
    "moe_ffn_hidden": 10_000_000,
    "heads": 100_000,
    "kv_heads": 100_000,
    "head_dim": 100_000,
    "vocab": 100_000_000,
    "experts": 100_000,
    "max_sequence": 1_000_000_000,
}


class MlaNumbers(Section):
    """The inline shape of multi-head latent attention."""

    q_lora: Whole
    kv_lora: Size
    qk_nope: Size
    qk_rope: Size
    v_head: Size


class ModelNumbers(Section):
    """An inline model: the keys of ModelShape, with the usual defaults."""

    name: str = "inline"
    layers: Size
    hidden: Size
    ffn_hidden: Size | None = None
    heads: Size
    kv_heads: Size | None = None
    head_dim: Size | None = None
    vocab: Size
    tied_embeddings: bool = False
    gated_mlp: bool = True
    mla: MlaNumbers | None = None
    experts: Whole = 0
    top_k: Whole = 0
    moe_ffn_hidden: Whole = 0
    shared_experts: Whole = 0
    dense_layers: Whole = 0
    mtp_layers: Whole = 0
    sliding_window: Whole = 0
    sliding_layers: Whole = 0
    qk_norm: bool = False
    causal: bool = True
    max_sequence: Whole = 0

    @model_validator(mode="after")
    def _numbers_are_possible(self) -> ModelNumbers:
        for key, largest in MAX_MODEL_NUMBERS.items():
            if (getattr(self, key) or 0) > largest:
                raise KeyConflictError(
                    f"model: {key} {getattr(self, key):,} is too large; the maximum is {largest:,}", (key,)
                )
        return self

    @model_validator(mode="after")
    def _numbers_agree(self) -> ModelNumbers:
        if self.head_dim is None and self.mla is None and self.hidden % self.heads:
            raise KeyConflictError(
                f"model: heads {self.heads} does not divide hidden {self.hidden}; give head_dim", ("heads",)
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise KeyConflictError(f"model: kv_heads {self.kv_heads} does not divide heads {self.heads}", ("kv_heads",))
        if self.experts and not (self.moe_ffn_hidden and 0 < self.top_k <= self.experts):
            raise KeyConflictError("model: experts requires moe_ffn_hidden and a top_k from 1 to experts", ("experts",))
        if not self.experts and (self.top_k or self.moe_ffn_hidden or self.shared_experts or self.dense_layers):
            raise KeyConflictError("model: top_k, moe_ffn_hidden, shared_experts and dense_layers require experts")
        if self.ffn_hidden is None and (not self.experts or self.dense_layers):
            raise KeyConflictError("model: ffn_hidden is missing; layers without experts require it")
        if max(self.dense_layers, self.sliding_layers) > self.layers:
            raise KeyConflictError(f"model: dense_layers and sliding_layers cannot exceed layers {self.layers}")
        if self.sliding_layers and not self.sliding_window:
            raise KeyConflictError("model: sliding_layers requires sliding_window", ("sliding_layers",))
        return self

    def shape(self) -> ModelShape:
        numbers: dict[str, Any] = self.model_dump(exclude={"mla"})
        mla = MlaShape(**self.mla.model_dump()) if self.mla else None
        numbers["kv_heads"] = self.kv_heads or self.heads
        numbers["head_dim"] = self.head_dim or (mla.qk_nope + mla.qk_rope if mla else self.hidden // self.heads)
        numbers["ffn_hidden"] = self.ffn_hidden or self.moe_ffn_hidden
        if self.sliding_window and not self.sliding_layers:
            numbers["sliding_layers"] = self.layers
        return ModelShape(mla=mla, source="the job file", **numbers)


def is_function(text: str) -> bool:
    """Return whether a text has the form `package.module:function`."""
    return _FUNCTION.fullmatch(text) is not None


def model_shape(model: str | ModelNumbers) -> ModelShape | None:
    """Return the shape of the model; None for a function."""
    if isinstance(model, ModelNumbers):
        return model.shape()
    if is_function(model):
        return None
    if (preset := find_preset(model)) is not None:
        return preset
    if is_url(model):
        return read_config(remote_config(model), name=model.rstrip("/").rpartition("/")[2])
    path = Path(model).expanduser()
    if (run := run_folder(model)) is not None:
        return _shape_of_run(run)
    if path.exists() or looks_like_path(model):
        return read_config(path)
    if _HUB_ID.fullmatch(model):
        return read_config(cached_config(model), name=model)
    raise ModelError(
        f"{model!r} is not a model preset, a Hub id (organisation/name), a folder with a config.json, a run or "
        f"package.module:function; `craton catalog models` lists the presets{did_you_mean(model, preset_names())}"
    )


def weights_folder(model: str) -> Path | None:
    """Return the folder with the weights of a folder, a URL or a cached Hub id; None if it is not on this machine."""
    if is_function(model):
        return None
    if is_url(model):
        return remote_weights(model)
    path = Path(model).expanduser()
    if not path.exists():
        if not _HUB_ID.fullmatch(model):
            return None
        try:
            path = cached_config(model)
        except ModelError:
            return None
    folder = path if path.is_dir() else path.parent
    return folder if any(folder.glob("*.safetensors")) else None


def run_folder(model: str) -> Path | None:
    """Return the run directory at this absolute path; None if it is not one."""
    path = Path(model)
    is_run = path.is_absolute() and (path / "job.yaml").is_file() and RunDirectory(path).looks_like_a_run()
    return path if is_run else None


def trains_reward_model(run: Path) -> bool:
    """Return whether a run trains a scalar head instead of a token head, from its job file."""
    preference = read_document(run / "job.yaml").data.get("preference")
    return isinstance(preference, dict) and preference.get("loss") == "reward"


def _shape_of_run(run: Path) -> ModelShape | None:
    """Return the shape of the model that a run trains, from its job file."""
    job = read_document(run / "job.yaml").data
    trained = job.get("model")
    while isinstance(trained, dict) and isinstance(inner := trained.get("job"), dict):
        trained = inner.get("model")  # a run of `model: {job: FILE}` trains the model of that job
    if "train" not in job or trained is None:
        raise ModelError(f"the run {run.name} has kind {job.get('kind')}, which trains no model; give a training run")
    if isinstance(trained, dict):
        return ModelNumbers.model_validate(trained).shape()
    return model_shape(str(trained))


def parse_model(value: object, info: ValidationInfo) -> str | ModelNumbers:
    """Check that the model is found, and make a path absolute."""
    if isinstance(value, ModelNumbers):
        return value
    if isinstance(value, dict):
        return ModelNumbers.parse(value, info)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a model; give a preset name, a Hub id, a path or a mapping with its shape")
    model = value.strip()
    if not is_function(model) and not is_url(model) and find_preset(model) is None:
        path = (Path((info.context or {}).get("folder", ".")) / Path(model).expanduser()).resolve()
        if path.exists() or looks_like_path(model):
            model = str(path)
        elif "/" not in model and run_folder(str(runs_root() / model)) is not None:
            model = str(runs_root() / model)
    model_shape(model)
    return model


ModelSpec = Annotated[str | ModelNumbers, BeforeValidator(parse_model)]


def looks_like_path(text: str) -> bool:
    """Return whether a text can only be a path, even if it does not exist."""
    return text.startswith((".", "/", "~")) or text.endswith((".json", "/"))
