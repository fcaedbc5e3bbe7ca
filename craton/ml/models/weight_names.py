"""The mapping between the decoder's tensors and published tensors; read forwards to load, backwards to save.

Both sides hold the same numbers in a different order: fused projections are grouped by key/value head, experts are
stacked, and rotary dimensions that are interleaved in the published weights are in halves here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from craton.ml.models.config import DecoderConfig

# How experts are named: one tensor each (most folders), Mixtral's own names, or stacked as in transformers' memory.
ExpertNames = Literal["each", "mixtral", "stacked"]


@dataclass(frozen=True)
class TensorSlice:
    """Rows [start, stop) of one published tensor, which are contiguous in ours."""

    theirs: str
    start: int
    stop: int
    in_pairs: bool = False  # published: interleaved pairs; ours: all first elements before all second ones
    expert: int | None = None  # fills this row of ours, a whole matrix
    stacked: bool = False  # the published tensor has an expert dimension too

    @property
    def rows(self) -> int:
        """Rows of our tensor that it fills."""
        return self.stop - self.start if self.expert is None else 1


@dataclass(frozen=True)
class WeightEntry:
    """One tensor of the decoder and the published slices that make it, in the order of its rows."""

    ours: str
    shape: tuple[int, ...]
    pieces: tuple[TensorSlice, ...]
    is_fp32: bool = False  # whatever the dtype of the other weights

    @cached_property
    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """The minimum shape of each published tensor."""
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in self.pieces:
            rest = self.shape[1:] if piece.expert is None else self.shape[2:]
            lead = (self.shape[0],) if piece.stacked else ()
            rows = max(piece.stop, shapes[piece.theirs][len(lead)] if piece.theirs in shapes else 0)
            shapes[piece.theirs] = (*lead, rows, *rest)
        return shapes

    def read(self, part: Callable[[str, tuple[slice, ...]], Tensor], start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of our tensor; `part(name, slices)` reads only what is needed from the files."""
        parts = []
        first = 0
        for piece in self.pieces:
            low, high = max(start - first, 0), min(stop - first, piece.rows)
            if low < high:
                parts.append(_read_piece(piece, part, low, high))
            first += piece.rows
        if not parts:
            return torch.empty(0, *self.shape[1:])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors of ours, one after the other, each in its own memory."""
        places: dict[str, list[tuple[int, TensorSlice]]] = {}
        first = 0
        for piece in self.pieces:
            places.setdefault(piece.theirs, []).append((first, piece))
            first += piece.rows
        for name, pieces in places.items():
            out = torch.empty(self.their_shapes[name], dtype=torch.float32 if self.is_fp32 else dtype)
            for place, piece in pieces:
                rows = tensor[place] if piece.expert is not None else tensor[place : place + piece.rows]
                out[piece.start : piece.stop] = _to_pairs(rows) if piece.in_pairs else rows
            yield name, out


def weight_entries(config: DecoderConfig, experts: ExpertNames = "each") -> list[WeightEntry]:
    """Return every tensor of the decoder, the heads last."""
    shape = config.shape
    entries = [_whole("embedding.weight", "model.embed_tokens.weight", shape.vocab, shape.hidden)]
    for index in range(shape.layers):
        ours, theirs = f"blocks.{index}.", f"model.layers.{index}."
        entries.append(_whole(ours + "attention_norm.weight", theirs + "input_layernorm.weight", shape.hidden))
        attention = _attention if shape.mla is None else _latent_attention
        entries += attention(config, ours + "attention.", theirs + "self_attn.")
        entries.append(_whole(ours + "mlp_norm.weight", theirs + "post_attention_layernorm.weight", shape.hidden))
        if shape.is_moe and index >= shape.dense_layers:
            entries += _experts(config, ours + "mlp.", theirs, experts)
        else:
            entries += _mlp(ours + "mlp.", theirs + "mlp.", shape.hidden, shape.ffn_hidden)
    entries.append(_whole("norm.weight", "model.norm.weight", shape.hidden))
    if config.has_token_head and not shape.tied_embeddings:
        entries.append(_whole("head.weight", "lm_head.weight", shape.vocab, shape.hidden))
    if config.has_score:
        entries.append(_whole("score.weight", "score.weight", 1, shape.hidden))
    return entries


def their_shapes(entries: Iterable[WeightEntry]) -> dict[str, tuple[int, ...]]:
    """Return every published tensor and its shape; one shared by several of ours has the size they need together."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        for name, shape in entry.their_shapes.items():
            shapes[name] = tuple(map(max, shape, shapes.get(name, shape)))
    return shapes


def experts_named(names: Iterable[str]) -> ExpertNames:
    """Return how a folder with these tensors names its experts."""
    for name in names:
        if ".block_sparse_moe." in name:
            return "mixtral"
        if name.endswith(".experts.gate_up_proj"):
            return "stacked"
    return "each"


def _read_piece(piece: TensorSlice, part: Callable[[str, tuple[slice, ...]], Tensor], low: int, high: int) -> Tensor:
    if piece.expert is not None:
        rows = slice(piece.start, piece.stop)
        if piece.stacked:
            return part(piece.theirs, (slice(piece.expert, piece.expert + 1), rows))
        return part(piece.theirs, (rows,)).unsqueeze(0)
    if piece.in_pairs:
        return _to_halves(part(piece.theirs, (slice(piece.start, piece.stop),)))[low:high]
    return part(piece.theirs, (slice(piece.start + low, piece.start + high),))


def _to_halves(rows: Tensor) -> Tensor:
    return torch.cat((rows[0::2], rows[1::2]))


def _to_pairs(rows: Tensor) -> Tensor:
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def _whole(ours: str, theirs: str, rows: int, *rest: int, is_fp32: bool = False) -> WeightEntry:
    return WeightEntry(ours, (rows, *rest), (TensorSlice(theirs, 0, rows),), is_fp32)


def _attention(config: DecoderConfig, ours: str, theirs: str) -> list[WeightEntry]:
    shape = config.shape
    dim = shape.head_dim
    queries = shape.heads // shape.kv_heads * dim

    def grouped(kind: str, *rest: int) -> WeightEntry:
        pieces = []
        for head in range(shape.kv_heads):
            pieces.append(TensorSlice(f"{theirs}q_proj.{kind}", head * queries, (head + 1) * queries))
            pieces += [TensorSlice(f"{theirs}{name}_proj.{kind}", head * dim, (head + 1) * dim) for name in "kv"]
        return WeightEntry(f"{ours}qkv.{kind}", (shape.kv_heads * (queries + 2 * dim), *rest), tuple(pieces))

    entries = [grouped("weight", shape.hidden)]
    if config.qkv_bias:
        entries.append(grouped("bias"))
    if shape.qk_norm:
        entries += [_whole(f"{ours}{name}_norm.weight", f"{theirs}{name}_norm.weight", dim) for name in "qk"]
    entries.append(_whole(ours + "output.weight", theirs + "o_proj.weight", shape.hidden, shape.heads * dim))
    return entries


def _latent_attention(config: DecoderConfig, ours: str, theirs: str) -> list[WeightEntry]:
    shape = config.shape
    mla = shape.mla
    assert mla is not None
    in_pairs = config.rope.interleaved

    def queries(name: str, width: int) -> WeightEntry:
        head = mla.qk_nope + mla.qk_rope
        published = f"{theirs}{name}_proj.weight"
        pieces = []
        for start in range(0, shape.heads * head, head):
            pieces.append(TensorSlice(published, start, start + mla.qk_nope))
            pieces.append(TensorSlice(published, start + mla.qk_nope, start + head, in_pairs))
        return WeightEntry(f"{ours}{name}.weight", (shape.heads * head, width), tuple(pieces))

    if mla.q_lora:
        entries = [
            _whole(ours + "q_a.weight", theirs + "q_a_proj.weight", mla.q_lora, shape.hidden),
            _whole(ours + "q_a_norm.weight", theirs + "q_a_layernorm.weight", mla.q_lora),
            queries("q_b", mla.q_lora),
        ]
    else:
        entries = [queries("q", shape.hidden)]
    latent, rows = theirs + "kv_a_proj_with_mqa.weight", mla.kv_lora + mla.qk_rope
    pieces = (TensorSlice(latent, 0, mla.kv_lora), TensorSlice(latent, mla.kv_lora, rows, in_pairs))
    expanded = shape.heads * (mla.qk_nope + mla.v_head)
    return [
        *entries,
        WeightEntry(ours + "kv_a.weight", (rows, shape.hidden), pieces),
        _whole(ours + "kv_a_norm.weight", theirs + "kv_a_layernorm.weight", mla.kv_lora),
        _whole(ours + "kv_b.weight", theirs + "kv_b_proj.weight", expanded, mla.kv_lora),
        _whole(ours + "output.weight", theirs + "o_proj.weight", shape.hidden, shape.heads * mla.v_head),
    ]


def _mlp(ours: str, theirs: str, hidden: int, ffn_hidden: int) -> list[WeightEntry]:
    return [
        _whole(ours + "gate.weight", theirs + "gate_proj.weight", ffn_hidden, hidden),
        _whole(ours + "up.weight", theirs + "up_proj.weight", ffn_hidden, hidden),
        _whole(ours + "down.weight", theirs + "down_proj.weight", hidden, ffn_hidden),
    ]


def _experts(config: DecoderConfig, ours: str, layer: str, names: ExpertNames) -> list[WeightEntry]:
    shape = config.shape
    hidden, ffn_hidden = shape.hidden, shape.moe_ffn_hidden
    theirs = layer + ("block_sparse_moe." if names == "mixtral" else "mlp.")
    entries = [_whole(ours + "router.weight", theirs + "gate.weight", shape.experts, hidden)]
    if config.routing.scoring == "sigmoid":
        bias = theirs + "gate.e_score_correction_bias"
        entries.append(_whole(ours + "router_bias", bias, shape.experts, is_fp32=True))
    for name, mixtral, rows, columns in (
        ("gate", "w1", ffn_hidden, hidden),
        ("up", "w3", ffn_hidden, hidden),
        ("down", "w2", hidden, ffn_hidden),
    ):
        if names == "stacked":
            published = f"{theirs}experts.{'down_proj' if name == 'down' else 'gate_up_proj'}"
            start = rows if name == "up" else 0
            pieces = [TensorSlice(published, start, start + rows, expert=e, stacked=True) for e in range(shape.experts)]
        else:
            own = mixtral if names == "mixtral" else f"{name}_proj"
            pieces = [TensorSlice(f"{theirs}experts.{e}.{own}.weight", 0, rows, expert=e) for e in range(shape.experts)]
        entries.append(WeightEntry(f"{ours}experts.{name}", (shape.experts, rows, columns), tuple(pieces)))
    if shape.shared_experts:
        entries += _mlp(ours + "shared.", theirs + "shared_experts.", hidden, shape.shared_experts * ffn_hidden)
    return entries
