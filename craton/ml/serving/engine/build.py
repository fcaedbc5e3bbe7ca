"""Builds an engine for a model: sizes its KV cache and connects its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from craton.ml.collectives import Peers
from craton.ml.models import Decoder
from craton.ml.serving.device import MAX_DRAFTED, Adapters, Drafter, Runner, block_shape
from craton.ml.serving.engine.drafting import Drafting
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.engine.execution import Executor
from craton.ml.serving.engine.measurements import Rates
from craton.ml.serving.settings import EngineSettings, ServingError, SharingCosts
from craton.planning.serving import (
    CPU_KV_BYTES,
    GPU_RESERVE_BYTES,
    ServedModel,
    SpeculationCosts,
    passing_bytes,
    roofline_costs,
)

if TYPE_CHECKING:
    from craton.ml.serving.grammar import Grammars

# What sharing costs on a GPU, in bytes of a layer's KV cache and as a share of what is still read: measured on one H200
# (docs/measurements.md, shared prefixes)
SHARING_BYTES, SHARING_SHARE = 41e6, 0.2
SHORTEST = 128  # minimum tokens of a request; with less room in the KV cache, `max_length: auto` is refused


def build_engine(
    model: Decoder,
    settings: EngineSettings | None = None,
    stop_tokens: Iterable[int] = (),
    tokenizer_folder: Path | None = None,
    peers: Peers | None = None,
    draft: Decoder | None = None,
) -> Engine:
    """Return an engine on the model's device, ready for requests; on a GPU with its CUDA graphs captured.

    `draft` is a draft model with the same tokens, on the same device; `settings.draft_tokens` is how many it makes."""
    settings = settings or EngineSettings()
    stops = tuple(stop_tokens)
    runner, settings, max_length = build_runner(model, settings, peers, draft=draft)
    grammars = None
    if tokenizer_folder is not None:
        from craton.ml.serving.grammar import Grammars

        grammars = Grammars(tokenizer_folder, runner.vocabulary, stops)
    return join_engine(runner, runner, settings, max_length, stops, grammars)


def join_engine(
    executor: Executor,
    runner: Runner,
    settings: EngineSettings,
    max_length: int,
    stop_tokens: Iterable[int] = (),
    grammars: Grammars | None = None,
    adapters: Mapping[str, int] | None = None,
    rates: Rates | None = None,
    costs: SpeculationCosts | None = None,
) -> Engine:
    """Return an engine over a runner's KV cache blocks. The executor runs its steps: the runner itself, or its
    tensor-parallel group. `costs` of a draft model, default: at the roofline of a GPU."""
    if runner.drafter is not None and costs is None:
        shapes = [model.config.shape for model in (runner.model, runner.drafter.runner.model)]
        costs = roofline_costs(*(ServedModel(shape) for shape in shapes))
    host_blocks = 0 if runner.host_cache is None else len(runner.host_cache)
    return Engine(
        executor,
        settings,
        runner.vocabulary,
        max_length,
        len(runner.past.cache),
        host_blocks,
        stop_tokens,
        grammars,
        adapters,
        rates,
        Drafting(settings, max_length, costs),
    )


def build_runner(
    model: Decoder,
    settings: EngineSettings,
    peers: Peers | None = None,
    adapters: Adapters | None = None,
    draft: Decoder | None = None,
) -> tuple[Runner, EngineSettings, int]:
    """Return the runner, with as many KV cache blocks as fit, and the resulting settings and max_length."""
    if draft is not None:
        check_draft(model, draft, settings)
    max_length = settings.max_length or model.config.shape.max_sequence or 4096
    rope = model.config.rope
    if rope.scaling == "dynamic" and max_length > rope.original_sequence:
        raise ServingError(
            f"the model uses dynamic RoPE scaling beyond {rope.original_sequence} tokens, which does not work with a "
            f"KV cache; set max_length to {rope.original_sequence}"
        )
    ranks = 1 if peers is None else peers.size
    block_bytes = bytes_of_block(model, settings, ranks)
    if draft is not None:
        block_bytes += bytes_of_block(draft, settings)
    blocks = settings.blocks or _blocks(model, settings, block_bytes, draft)
    if peers is not None:  # the rank with the fewest blocks decides for all
        blocks = -int(peers.sum(torch.tensor([-blocks], device=next(model.parameters()).device), "max"))
    room = (blocks - 2) * settings.page
    if not settings.max_length and room >= SHORTEST:
        max_length = min(max_length, room)
    if room < max_length:
        raise ServingError(
            f"the KV cache has room for {max(room, 0)} tokens, and max_length is {max_length}; lower max_length, "
            "chunk_tokens or max_running, raise memory, use fp8 (precision, kv_precision), or use more GPUs (tp)"
        )
    host_blocks = settings.host_bytes // block_bytes
    if settings.shared_prefix == "auto":
        settings = replace(settings, shared_prefix="on")
    if next(model.parameters()).device.type == "cuda":
        layer_bytes = bytes_of_block(model, settings, ranks) / settings.page / model.config.shape.layers
        settings = replace(settings, sharing_costs=SharingCosts(SHARING_BYTES / layer_bytes, SHARING_SHARE))
    runner = Runner(model, settings, max_length, blocks, host_blocks, peers, adapters)
    if draft is not None:
        runner.drafter = Drafter(Runner(draft, settings, max_length, blocks, host_blocks, main=runner), peers)
    runner.capture()
    return runner, replace(settings, blocks=blocks, max_length=max_length), max_length


def bytes_of_block(model: Decoder, settings: EngineSettings, ranks: int = 1) -> int:
    """Return the bytes of one KV cache block, all layers."""
    dtype = next(model.parameters()).dtype
    size = 1 if settings.kv_precision == "fp8" else dtype.itemsize
    return size * torch.Size(block_shape(model, settings.page, ranks)).numel()


def check_draft(model: Decoder, draft: Decoder, settings: EngineSettings) -> None:
    """Raise ServingError if a draft model cannot draft for a model."""
    if not settings.draft_tokens:
        raise ServingError("a draft model needs draft_tokens of 1 or more")
    sizes = model.config.shape.vocab, draft.config.shape.vocab
    if sizes[1] > sizes[0]:
        raise ServingError(
            f"the draft model's vocabulary of {sizes[1]:,} tokens exceeds the model's, {sizes[0]:,}; use a draft model "
            "with the same tokenizer"
        )
    devices = next(model.parameters()).device, next(draft.parameters()).device
    assert devices[0] == devices[1], "the draft model is on another device"


def _blocks(model: Decoder, settings: EngineSettings, block_bytes: int, draft: Decoder | None = None) -> int:
    device = next(model.parameters()).device
    if device.type != "cuda":
        return CPU_KV_BYTES // block_bytes
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    size = next(model.parameters()).element_size()
    passing = passing_bytes(model.config.shape, settings.chunk_tokens, settings.max_running, size)
    if draft is not None:  # the two models run one after the other; the logits of draft graphs stay
        drafting = passing_bytes(draft.config.shape, settings.chunk_tokens, settings.max_running, size)
        passing = max(passing, drafting) + MAX_DRAFTED * draft.config.shape.vocab * size
    room = free - (1 - settings.memory) * total - passing - GPU_RESERVE_BYTES
    return max(0, int(room // block_bytes))
