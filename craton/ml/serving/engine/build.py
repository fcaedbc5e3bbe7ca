"""An engine for a model: how many blocks there is room for, and everything put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from craton.ml.collectives import Peers
from craton.ml.models import Decoder
from craton.ml.serving.device import Adapters, Runner, block_shape
from craton.ml.serving.engine.engine import Engine, Executor
from craton.ml.serving.engine.measurements import Rates
from craton.ml.serving.settings import EngineSettings, ServingError
from craton.planning.serving import CPU_KV_BYTES, GPU_RESERVE_BYTES, passing_bytes

if TYPE_CHECKING:
    from craton.ml.serving.grammar import Grammars

SHORTEST = 128  # tokens of a text, below which a model whose own length does not fit is not served at all


def build_engine(
    model: Decoder,
    settings: EngineSettings | None = None,
    stop_tokens: Iterable[int] = (),
    tokenizer_folder: Path | None = None,
    peers: Peers | None = None,
) -> Engine:
    """An engine on the device of the model, ready for requests; on a GPU its graphs are captured."""
    settings = settings or EngineSettings()
    stops = tuple(stop_tokens)
    runner, settings, max_length = build_runner(model, settings, peers)
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
) -> Engine:
    """An engine over the blocks of a runner, whose steps the executor computes: the runner itself, or its gang."""
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
    )


def build_runner(
    model: Decoder, settings: EngineSettings, peers: Peers | None = None, adapters: Adapters | None = None
) -> tuple[Runner, EngineSettings, int]:
    """The device's half, with as many blocks as there is room for; settings and longest text as they came out."""
    max_length = settings.max_length or model.config.shape.max_sequence or 4096
    rope = model.config.rope
    if rope.scaling == "dynamic" and max_length > rope.original_sequence:
        raise ServingError(
            f"the model's rotation changes with the length of a text beyond {rope.original_sequence} tokens, which "
            f"keys and values that are kept cannot follow; set max_length to {rope.original_sequence}"
        )
    ranks = 1 if peers is None else peers.size
    block_bytes = bytes_of_block(model, settings, ranks)
    blocks = settings.blocks or _blocks(model, settings, block_bytes)
    if peers is not None:  # all ranks have the same blocks: as many as the one with the least room
        blocks = -int(peers.sum(torch.tensor([-blocks], device=next(model.parameters()).device), "max"))
    room = (blocks - 2) * settings.page
    if not settings.max_length and room >= SHORTEST:
        max_length = min(max_length, room)
    if room < max_length:
        raise ServingError(
            f"there is room for {max(room, 0)} tokens of keys and values and one text may have {max_length}; lower "
            "max_length, chunk_tokens or max_running, raise `memory`, use fp8 for weights or keys and values, or more "
            "GPUs (tp)"
        )
    host_blocks = settings.host_bytes // block_bytes
    runner = Runner(model, settings, max_length, blocks, host_blocks, peers, adapters)
    runner.capture()
    return runner, replace(settings, blocks=blocks, max_length=max_length), max_length


def bytes_of_block(model: Decoder, settings: EngineSettings, ranks: int = 1) -> int:
    """Of keys and values of one block, all layers."""
    dtype = next(model.parameters()).dtype
    size = 1 if settings.kv_precision == "fp8" else dtype.itemsize
    return size * torch.Size(block_shape(model, settings.page, ranks)).numel()


def _blocks(model: Decoder, settings: EngineSettings, block_bytes: int) -> int:
    device = next(model.parameters()).device
    if device.type != "cuda":
        return CPU_KV_BYTES // block_bytes
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    size = next(model.parameters()).element_size()
    passing = passing_bytes(model.config.shape, settings.chunk_tokens, settings.max_running, size)
    room = free - (1 - settings.memory) * total - passing - GPU_RESERVE_BYTES
    return max(0, int(room // block_bytes))
