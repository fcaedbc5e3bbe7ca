"""Models of serving's layers, whole and in parts: what the ranks of a gang run. No rank imports transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from craton.ml.collectives import Peers, local
from craton.ml.models import Decoder, DecoderConfig, Linear, config_from_huggingface, load_weights, save_folder
from craton.ml.serving.device import Adapters
from craton.ml.serving.device.float8 import quantize_model
from craton.ml.serving.device.int4 import ServedInt4Linear, load_packed
from craton.ml.serving.device.tensor_parallel_group import cut_model
from craton.ml.serving.device.weight_deltas import HeldWeights
from craton.ml.serving.device.weights import WeightsReceiver, named_targets, update_from_folder, update_from_state


def save_random(folder: Path, config: DecoderConfig, seed: int = 0, **sizes: int) -> Path:
    """A model of this kind in other sizes, with random weights wide enough that a mistake in any of them shows."""
    model = random_model(config, seed, **sizes)
    return save_folder(model.state_dict(), model.config, folder, dtype=torch.float32)


def random_model(config: DecoderConfig, seed: int = 0, **sizes: int) -> Decoder:
    model = Decoder(replace(config, shape=replace(config.shape, **sizes), initializer_range=0.2))
    model.initialize(seed)
    return model.eval().requires_grad_(False)


def load_model(folder: str | Path) -> Decoder:
    model = Decoder(config_from_huggingface(folder)).eval().requires_grad_(False)
    load_weights(model, folder)
    return model


def load_part(folder: str | Path, ep: int = 1) -> Decoder:
    """This rank's part of a model, over all ranks of the group."""
    model = empty_part(folder, ep).to_empty(device="cpu")
    load_weights(model, folder)
    return model


def empty_part(folder: str | Path, ep: int = 1) -> Decoder:
    """The same without memory; the whole model on a rank without peers."""
    with torch.device("meta"):
        model = Decoder(config_from_huggingface(folder)).eval().requires_grad_(False)
    if dist.is_initialized():
        cut_model(model, torch.device("cpu"), ep)
    return model


@torch.no_grad()
def hidden(model: Decoder, tokens: Tensor) -> Tensor:
    """[rows, sequence, hidden], on every rank."""
    out: Tensor = model(tokens)
    peers = model.blocks[0].attention.connections.tensor
    return out if peers is None else peers.gather(out).view(*tokens.shape, -1)


def hidden_with_adapters(folder: str, adapters: list[str], of_rows: list[int], tokens: Tensor, ep: int = 1) -> Tensor:
    model = load_part(folder, ep) if dist.is_initialized() else load_model(folder)
    added = Adapters(model, slots=len(adapters), rank=4)
    for adapter in adapters:
        added.load(Path(adapter).name, adapter)
    added.of_tokens = torch.tensor(of_rows, dtype=torch.int32).repeat_interleave(tokens.shape[1])
    return hidden(model, tokens)


def hidden_in_fp8(folder: str, tokens: Tensor, ep: int = 1) -> Tensor:
    model = load_part(folder, ep) if dist.is_initialized() else load_model(folder)
    quantize_model(model)
    return hidden(model, tokens)


@torch.no_grad()
def hidden_in_int4(
    folder: str, tokens: Tensor, adapter: str | None = None, update: str | None = None
) -> tuple[Tensor, list[str]]:
    """Hidden states of a folder in 4 bits, perhaps with an adapter or after an update; the layers in 16 bits."""
    model = load_packed(empty_part(folder), folder, torch.device("cpu"))
    plain = [name for name, module in model.blocks.named_modules() if isinstance(module, Linear)]
    plain = [name for name in plain if not isinstance(model.blocks.get_submodule(name), ServedInt4Linear)]
    if adapter is not None:
        added = Adapters(model, slots=2, rank=4)
        slot = added.load("adapter", adapter)
        added.of_tokens = torch.full((tokens.numel(),), slot, dtype=torch.int32)
    if update is not None:
        update_from_folder(model, update)
    return hidden(model, tokens), plain


def receive_part(
    folder: str, key: bytes, addresses: str, tokens: Tensor, fp8: bool, ep: int = 1
) -> tuple[int, Tensor, bool]:
    """Tells its address in a file, takes new weights for its part: (version, hidden states with them, all in place)."""
    model = load_part(folder, ep)
    if fp8:
        quantize_model(model)
    places = [local(tensor).data_ptr() for tensor in named_targets(model).values()]
    with WeightsReceiver("127.0.0.1:0", key) as receiver:
        draft = Path(addresses) / f"{dist.get_rank()}.draft"
        draft.write_text(receiver.address)
        draft.rename(draft.with_suffix(""))
        version = receiver.receive(model, wait_seconds=60)
    stayed = places == [local(tensor).data_ptr() for tensor in named_targets(model).values()]
    return version, hidden(model, tokens), stayed


def receive_parts(folder: str, key: bytes, addresses: str, updates: int) -> list[int]:
    """Takes one update after the other for its part, each from an address in a file; their versions."""
    model, held = load_part(folder), HeldWeights()
    versions = []
    for number in range(1, updates + 1):
        with WeightsReceiver("127.0.0.1:0", key) as receiver:
            draft = Path(addresses) / f"{dist.get_rank()}-{number}.draft"
            draft.write_text(receiver.address)
            draft.rename(draft.with_suffix(""))
            versions.append(receiver.receive(model, 60, held))
    return versions


def take_parts_from_memory(folder: str, other: str, tokens: Tensor, ep: int = 1) -> tuple[Tensor, Tensor]:
    """Hidden states after an update from whole tensors, and after one from sharded ones."""
    model, whole, cut = load_part(folder, ep), load_model(other), load_part(other, ep)
    update_from_state(model, whole.named_parameters())
    first = hidden(model, tokens)
    update_from_folder(model, folder)
    update_from_state(model, cut.named_parameters())
    return first, hidden(model, tokens)


def hidden_of_parts(cases: list[tuple[DecoderConfig, int]], batches: list[Tensor]) -> list[tuple[Any, ...]]:
    """For each model and ep, this rank's parameters of experts and others, and hidden states of each batch."""
    found = []
    for config, ep in cases:
        model, _ = random_part(config, ep)
        found.append((*parameters_of(model), *(hidden(model, tokens) for tokens in batches)))
    return found


def random_part(config: DecoderConfig, ep: int) -> tuple[Decoder, Peers]:
    """This rank's part of a model of `random_model`."""
    with torch.device("meta"):
        model = Decoder(replace(config, initializer_range=0.2)).eval().requires_grad_(False)
    peers = cut_model(model, torch.device("cpu"), ep)
    model.to_empty(device="cpu").initialize(0)
    return model, peers


def hidden_after_sleep(config: DecoderConfig, ep: int, tokens: Tensor) -> tuple[Tensor, int]:
    """Hidden states of this rank's part after its weights were in host memory, and the bytes it had meanwhile."""
    from craton.ml.serving.device import EngineRank
    from craton.ml.serving.engine import build_runner
    from craton.ml.serving.settings import EngineSettings

    model, peers = random_part(config, ep)
    rank = EngineRank(build_runner(model, EngineSettings(max_length=32, page=4, blocks=40), peers)[0])
    rank.sleep(1)
    kept = sum(local(parameter).untyped_storage().nbytes() for parameter in model.parameters())
    rank.wake(("weights", "kv_cache"))
    return hidden(model, tokens), kept


def parameters_of(model: Decoder) -> tuple[int, int]:
    """How many parameters of routed experts, and others, this rank has."""
    sizes = {name: local(parameter).numel() for name, parameter in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    return routed, sum(sizes.values()) - routed


class ShortRank:
    """A rank whose first one has too little memory for anything."""

    def wake(self, parts: object) -> None:
        if dist.get_rank() == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")

    update_from_folder = wake


def failure_together(method: str) -> tuple[str, str]:
    """How a call that only one rank cannot do ends on this one."""
    from craton.ml.serving.device.tensor_parallel_group import together

    try:
        together(ShortRank(), method, (None,))  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 -- the test says which it must be
        return type(error).__name__, str(error)
    return "", ""
