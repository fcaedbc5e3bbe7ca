"""The model that a job serves: weights from a folder, a run, or drawn at random, on this rank's device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from craton.errors import CratonError
from craton.job import Job
from craton.job.model import vocabulary_mismatch
from craton.ml.collectives import Peers, local, own_slices
from craton.ml.data import end_of_document, end_of_turn, find_tokenizer, load_tokenizer
from craton.ml.export import FolderModel, RunModel, open_model, open_run
from craton.ml.models import Decoder, DecoderConfig, config_from_huggingface, config_from_shape, load_weights
from craton.ml.serving.device.float8 import quantize_model
from craton.ml.serving.device.int4 import is_packed, load_packed, round_model
from craton.ml.serving.device.tensor_parallel_group import cut_model
from craton.ml.serving.device.weights import named_targets, read_layers, update_from_state
from craton.ml.serving.settings import ServingError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16, "int4": torch.bfloat16}


@dataclass(frozen=True)
class Served:
    """A loaded model with its tensor-parallel peers, tokenizer folder and stop tokens."""

    model: Decoder
    peers: Peers | None
    tokenizer_folder: Path | None
    stop_tokens: tuple[int, ...]
    draft: Decoder | None = None  # for speculative decoding, whole on every rank


def load_served(job: Job, device: torch.device) -> Served:
    """Load this rank's shard of the model; all ranks of the process group call it."""
    assert job.serve is not None
    opened = open_run(str(job.trained_run)) if job.trained_run is not None else None
    folder = None if opened is not None else job.weights_folder
    config = _config(job, opened, folder)
    tokenizer = _tokenizer_folder(opened, folder)
    draft = _load_draft(job, tokenizer, device)
    dtype = DTYPES[job.serve.precision]
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype)
    ep = job.served_layout.ep
    peers = cut_model(model, device, ep) if dist.is_initialized() and dist.get_world_size() > 1 else None
    if opened is not None and job.serve.precision == "int4":
        model = _rounded(model, device, opened.model(torch.device("cpu"), dtype).state_dict().items())
    elif opened is not None:
        model = model.to_empty(device=device)
        _fill(model, opened, dtype)
    else:
        model = _filled(model, folder, device, job.serve.precision, job.serve.seed)
    if job.serve.precision == "fp8":
        quantize_model(model)
    return Served(model, peers, tokenizer, stop_tokens_of(folder, tokenizer), draft)


def _filled(model: Decoder, folder: Path | None, device: torch.device, precision: str, seed: int) -> Decoder:
    """Return a model on the meta device with the weights of a folder, or random ones, in 4 bits or not quantized."""
    if folder is not None and is_packed(folder):
        return load_packed(model, folder, device)
    if folder is not None and precision == "int4":
        return _rounded(model, device, read_layers(model, folder))
    model = model.to_empty(device=device)
    if folder is not None:
        load_weights(model, folder)
    else:
        model.initialize(seed)
    if precision == "int4":
        round_model(model)
    return model


@torch.no_grad()
def _rounded(model: Decoder, device: torch.device, tensors: Iterable[tuple[str, Tensor]]) -> Decoder:
    """Return a model on the meta device with these whole tensors, rounded to 4 bits one by one: it may be larger in 16
    bits than the device."""
    round_model(model)
    model = model.to_empty(device=device)
    needed = named_targets(model)
    update_from_state(model, ((name, tensor) for name, tensor in tensors if name in needed))
    return model


def _load_draft(job: Job, tokenizer: Path | None, device: torch.device) -> Decoder | None:
    """Load the draft model, after checking that its tokens are those of the model's tokenizer."""
    assert job.serve is not None
    if job.serve.draft_model is None:
        return None
    drafting = job.with_model(job.serve.draft_model)
    folder = drafting.weights_folder
    if tokenizer is not None and folder is not None and (mismatch := vocabulary_mismatch(tokenizer, folder)):
        raise ServingError(f"serve.speculate: {mismatch}")
    with torch.device("meta"):
        model = Decoder(_config(drafting, None, folder))
    precision = job.draft_precision
    model = _filled(model.to(DTYPES[job.serve.precision]), folder, device, precision, job.serve.seed)
    if precision == "fp8":
        quantize_model(model)
    return model


def load_named(name: str, step: int | None, device: torch.device, dtype: torch.dtype) -> Served:
    """Load the whole model of a run (at a checkpoint), of a folder, or of a Hub id."""
    opened = open_model(name, step)
    run, folder = (opened, None) if isinstance(opened, RunModel) else (None, opened.folder)
    config = config_from_huggingface(opened.folder) if isinstance(opened, FolderModel) else opened.config
    if not config.has_token_head:
        raise ServingError(f"{name} is a reward model: it scores texts and cannot generate any")
    with torch.device("meta"):
        model = Decoder(replace(config, heads="tokens"))
    model = model.to(dtype)
    if isinstance(opened, FolderModel):
        model = _filled(model, opened.folder, device, "bf16", seed=0)
    else:
        model = model.to_empty(device=device)
        _fill(model, opened, dtype)
    tokenizer = _tokenizer_folder(run, folder)
    return Served(model, None, tokenizer, stop_tokens_of(folder, tokenizer))


def _config(job: Job, opened: RunModel | None, folder: Path | None) -> DecoderConfig:
    if opened is not None:
        return _generating(opened.config, job)
    if folder is not None:
        return _generating(config_from_huggingface(folder), job)
    if job.model_shape is None:
        raise ServingError(
            f"model {job.model} is a custom function; only models of Craton's own decoder families can be served"
        )
    return config_from_shape(job.model_shape)


def _generating(config: DecoderConfig, job: Job) -> DecoderConfig:
    """Return the config without a scalar head."""
    if not config.has_token_head:
        raise ServingError(f"model {job.model} is a reward model: it scores texts and cannot generate any")
    return replace(config, heads="tokens")


@torch.no_grad()
def _fill(model: Decoder, opened: RunModel, dtype: torch.dtype) -> None:
    """Read the whole checkpoint into host memory and copy this rank's shard."""
    whole = dict(opened.model(torch.device("cpu"), dtype).state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in whole:
            local(tensor).copy_(whole[name][own_slices(tensor)])


def _tokenizer_folder(opened: RunModel | None, folder: Path | None) -> Path | None:
    try:
        if opened is not None:
            return opened.tokenizer_folder()
        return None if folder is None else find_tokenizer(str(folder))
    except CratonError:
        return None  # token ids can be served without a tokenizer


def stop_tokens_of(folder: Path | None, tokenizer: Path | None) -> tuple[int, ...]:
    """Return the stop tokens: those of generation_config.json, else the eos_token_id of config.json or the tokenizer's
    end-of-text token, and the token that ends a turn of a chat."""
    if listed := _eos_of("generation_config.json", folder, tokenizer):
        return listed
    if tokenizer is None:
        return _eos_of("config.json", folder)
    end = end_of_document(tokenizer, load_tokenizer(tokenizer))
    tokens = _eos_of("config.json", folder, tokenizer) or (() if end is None else (end,))
    turn = end_of_turn(tokenizer)
    return tokens if turn is None or turn in tokens else (*tokens, turn)


def _eos_of(file: str, *places: Path | None) -> tuple[int, ...]:
    for place in places:
        if place is not None and (place / file).is_file():
            eos = json.loads((place / file).read_text(encoding="utf-8")).get("eos_token_id")
            if eos is not None:
                return tuple(eos) if isinstance(eos, list) else (int(eos),)
    return ()
