"""Load and save weights in Hugging Face folders of safetensors.

Loading checks every name and shape before it changes a parameter, and reads only this rank's rows of a sharded
parameter. Saving writes beside the target and renames at the end, so an existing folder is always complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from craton.errors import CratonError
from craton.formatting import stored
from craton.ml.collectives import local, own_slices
from craton.ml.data import end_of_turn
from craton.ml.models.config import DecoderConfig
from craton.ml.models.decoder import SCORE, Decoder
from craton.ml.models.huggingface import INDEX, config_to_huggingface, huggingface_family
from craton.ml.models.packed import PackedWeight, in_place_of_parts, packed_weights
from craton.ml.models.weight_names import ExpertNames, WeightEntry, experts_named, their_shapes, weight_entries

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}
_SHOWN = 8  # names in one message
_NOT_TRAINED = "training cannot start from quantized weights"


# Fills an entry of the decoder from the 4-bit weights that it needs, by their names.
TakePacked = Callable[[WeightEntry, Mapping[str, PackedWeight]], bool]


class WeightsError(CratonError):
    """The weights do not fit the model, or cannot be read or written."""


@torch.no_grad()
def load_weights(
    model: nn.Module, folder: str | Path, config: DecoderConfig | None = None, take: TakePacked | None = None
) -> tuple[str, ...]:
    """Fill a decoder's parameters, sharded or not, from a folder; return the names of unused tensors in the folder. A
    scalar head that the folder does not have starts at zero.

    `config` is needed if a wrapper hides `model.config`. Weights in 4 bits need `take`: it fills an entry from them and
    returns True, or False if the entry is to be filled with the weights in 16 bits.
    """
    config = config or model.config  # type: ignore[assignment]
    assert isinstance(config, DecoderConfig)
    _fetch(Path(folder))
    with ExitStack() as stack:
        files = _open(Path(folder), stack)
        packed = packed_weights(files, Path(folder))
        if packed and take is None:
            raise WeightsError(f"{folder}: {_NOT_TRAINED}: {_listing(list(packed))}; use bf16 or fp32")
        entries = weight_entries(config, experts_named(files))
        files = in_place_of_parts(files, packed, their_shapes(entries))
        targets = _targets(model, entries)
        if config.has_score and SCORE not in files:
            entries = [entry for entry in entries if entry.ours != SCORE]
            if SCORE in targets:
                local(targets[SCORE]).zero_()
        unused = _check(files, entries, config, str(folder))

        @lru_cache(maxsize=3)  # a fused projection reads from three tensors in turn
        def opened(name: str) -> Any:
            return files[name].get_slice(name)

        def part(name: str, slices: tuple[slice, ...]) -> Tensor:
            rows: Tensor = opened(name)[slices]
            return rows

        for entry in entries:
            if entry.ours not in targets:  # in a pipeline each rank reads its own layers
                continue
            theirs = {name: packed[name] for name in entry.their_shapes if name in packed}
            if take is None or not theirs or not take(entry, theirs):
                _fill(targets[entry.ours], entry, part)
    return unused


@contextmanager
def open_packed(folder: str | Path) -> Iterator[tuple[dict[str, PackedWeight], ExpertNames]]:
    """Yield the 4-bit weights of a folder by the names that they have in 16 bits, and how the folder names experts."""
    _fetch(Path(folder))
    with ExitStack() as stack:
        files = _open(Path(folder), stack)
        yield packed_weights(files, Path(folder)), experts_named(files)


@torch.no_grad()
def save_folder(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write whole tensors under the decoder's names as a folder that transformers loads. The values of a policy with
    both heads are left out: transformers has no such class.

    Accesses `state` one tensor at a time, so it may read them lazily; one file's worth is held in memory.
    """
    folder = Path(folder)
    if dtype not in _DTYPES:
        raise WeightsError(f"weights cannot be saved as {dtype}; allowed: {', '.join(_DTYPES.values())}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} exists and is not an empty folder; choose another name, or remove it")
    if config.heads == "both":
        config = replace(config, heads="tokens")
        state = _Without(state, SCORE)
    names = "mixtral" if huggingface_family(config) == "mixtral" else "each"
    entries = weight_entries(config, names)  # type: ignore[arg-type]
    _check_state(state, entries)
    shards = _plan_shards(entries, dtype, max_shard_bytes)
    fields = config_to_huggingface(config) | {"dtype": _DTYPES[dtype]}
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if tokenizer_folder is not None:
            fields |= _copy_tokenizer(Path(tokenizer_folder), partial)
        (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        _write_shards(state, entries, shards, partial, dtype)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        needed = sum(_bytes(entry, dtype) for entry in entries)
        raise WeightsError(f"{folder} cannot be written ({error}); it needs {stored(needed)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


class _Without(Mapping[str, Tensor]):
    """A mapping without one of its names; tensors are still read on access."""

    def __init__(self, state: Mapping[str, Tensor], name: str) -> None:
        self._state, self._names = state, [key for key in state if key != name]

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _fetch(folder: Path) -> None:
    """Fetch the missing files of a folder that mirrors one in an object store; one process per machine does it."""
    from craton.infrastructure.storage import CachedFolder

    if (cached_place := CachedFolder.of(folder)) is not None:
        cached, inside = cached_place
        for name in cached.listing:
            if name.startswith(inside) and name.endswith((".safetensors", ".json")):
                cached.path(name)


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return every tensor's name and the open file that holds it."""
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder; give one with *.safetensors")
    index = folder / INDEX
    if index.exists():
        try:
            listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} cannot be read as an index of weights: {error!r}") from None
        if missing := [file for file in listed if not (folder / file).is_file()]:
            raise WeightsError(f"{folder}: {INDEX} lists missing files: {_listing(missing)}; download them")
        paths = [folder / file for file in listed]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sorted(file.name for file in folder.glob("*.bin"))
        hint = f" (only {_listing(others)}, which is not loaded because it can run code)" if others else ""
        raise WeightsError(f"{folder} has no *.safetensors{hint}")
    tensors: dict[str, Any] = {}
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is truncated or not a safetensors file ({error}); download it again") from None
        tensors |= dict.fromkeys(file.keys(), file)
    return tensors


def _check(
    files: Mapping[str, Any], entries: Sequence[WeightEntry], config: DecoderConfig, folder: str
) -> tuple[str, ...]:
    """Return unused names; raise WeightsError if a tensor is missing, unexpected or of the wrong shape."""
    expected = their_shapes(entries)
    slices = {name: files[name].get_slice(name) for name in expected if name in files}
    shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
    quantized = [name for name, piece in slices.items() if piece.get_dtype() not in ("F32", "BF16", "F16", "F64")]
    if quantized:
        raise WeightsError(f"{folder}: {_NOT_TRAINED}: {_listing(quantized)}; use bf16 or fp32")
    problems = []
    if missing := [name for name in expected if name not in files]:
        problems.append(f"missing: {_listing(missing)}")
    if wrong := [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape in shapes.items()
        if shape != expected[name]
    ]:
        problems.append(f"of another shape: {_listing(wrong)}")
    left = [name for name in files if name not in expected]
    unused = tuple(name for name in left if _is_unused(name, config))
    if extra := [name for name in left if name not in unused]:
        problems.append(f"not part of the model: {_listing(extra)}")
    if problems:
        raise WeightsError(f"{folder}: the weights do not fit model {config.shape.name!r}; {'; '.join(problems)}")
    return unused


def _is_unused(name: str, config: DecoderConfig) -> bool:
    """Whether an unused tensor is harmless: an old rotary table, a copy of a tied head, the token head that a reward
    model does not have, or a multi-token prediction layer."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return config.shape.tied_embeddings or not config.has_token_head
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    first = config.shape.layers
    return layer is not None and first <= int(layer[1]) < first + config.shape.mtp_layers


def _targets(model: nn.Module, entries: Sequence[WeightEntry]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {_WRAPPERS.sub("", name): tensor for name, tensor in model.named_parameters()}
    tensors |= {_WRAPPERS.sub("", name): tensor for name, tensor in model.named_buffers() if "router_bias" in name}
    names = [entry.ours for entry in entries if not isinstance(model, Decoder) or model.keeps(entry.ours)]
    absent = [name for name in names if name not in tensors]
    unfilled = sorted(set(tensors) - set(names))
    if absent or unfilled:
        lists = [f"absent: {_listing(absent)}"] * bool(absent) + [f"unknown: {_listing(unfilled)}"] * bool(unfilled)
        raise WeightsError(
            f"the model's parameters do not match its config; {'; '.join(lists)}; load before adding adapters"
        )
    return tensors


def _fill(target: Tensor, entry: WeightEntry, part: Any) -> None:
    rows, *rest = own_slices(target)
    start, stop, _ = rows.indices(entry.shape[0])
    local(target).copy_(entry.read(part, start, stop)[(slice(None), *rest)])


def _check_state(state: Mapping[str, Tensor], entries: Sequence[WeightEntry]) -> None:
    names = {entry.ours for entry in entries}
    missing, extra = sorted(names - set(state)), sorted(set(state) - names)
    if missing or extra:
        lists = [f"missing: {_listing(missing)}"] * bool(missing) + [f"unknown: {_listing(extra)}"] * bool(extra)
        raise WeightsError(f"the weights to save do not match the model's config; {'; '.join(lists)}")


def _bytes(entry: WeightEntry, dtype: torch.dtype) -> int:
    size = 4 if entry.is_fp32 else dtype.itemsize
    return size * torch.Size(entry.shape).numel()


def _plan_shards(entries: Sequence[WeightEntry], dtype: torch.dtype, max_shard_bytes: int) -> dict[str, int]:
    """Return the file number, from 0, of each published tensor, in writing order."""
    shards: dict[str, int] = {}
    number = used = 0
    for entry in entries:
        size = 4 if entry.is_fp32 else dtype.itemsize
        for name, shape in entry.their_shapes.items():
            needed = size * torch.Size(shape).numel()
            if used and used + needed > max_shard_bytes:
                number, used = number + 1, 0
            shards[name] = number
            used += needed
    return shards


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the mode of the umask; the library's own is for the owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def _write_shards(
    state: Mapping[str, Tensor],
    entries: Sequence[WeightEntry],
    shards: Mapping[str, int],
    folder: Path,
    dtype: torch.dtype,
) -> None:
    count = max(shards.values()) + 1
    files = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    if count == 1:
        files = ["model.safetensors"]
    held: dict[str, Tensor] = {}
    number = 0

    def write() -> None:
        save_tensors(held, folder / files[number], {"format": "pt"})
        held.clear()

    for entry in entries:
        tensor = state[entry.ours]
        if isinstance(tensor, DTensor):
            raise WeightsError(f"{entry.ours} is sharded; gather it before saving")
        if tuple(tensor.shape) != entry.shape:
            raise WeightsError(f"{entry.ours} is {list(tensor.shape)}; the model's config needs {list(entry.shape)}")
        for name, published in entry.split(tensor.detach().cpu(), dtype):
            if shards[name] != number:
                write()
                number = shards[name]
            held[name] = published
    write()
    if count > 1:
        total = sum(_bytes(entry, dtype) for entry in entries)
        places = {name: files[shard] for name, shard in sorted(shards.items())}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Copy the tokenizer; return its special-token ids for the configuration."""
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not files:
        raise WeightsError(f"{source} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    generation = source / "generation_config.json"  # lists every end token; the tokenizer has only one
    for file in (*files, generation) if generation.is_file() else files:
        shutil.copyfile(file, target / file.name)
    try:
        settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    special = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            special[key + "_id"] = ids[text]
    turn = end_of_turn(source)
    if turn is not None and turn != special.get("eos_token_id") and not generation.is_file():
        ends = [end for end in (special.get("eos_token_id"), turn) if end is not None]
        (target / generation.name).write_text(json.dumps({"eos_token_id": ends}) + "\n", encoding="utf-8")
    return special


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
