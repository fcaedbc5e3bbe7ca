"""Packed batches of post-training and the same numbers as padded sequences, [sequences, tokens], as TRL has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from craton.ml.training import Batch

PROMPT = 2  # tokens before each completion
SEQUENCE = 32
LENGTHS = ((5, 1, 7), (4, 6))  # completions of the sequences in each row; a slot of the second row is empty
SLOTS = 3
TOKENS = max(max(row) for row in LENGTHS)


@dataclass(frozen=True)
class Packed:
    """A batch, and where the completion of each sequence lies in it."""

    batch: Batch
    rows: Tensor  # [sequences, tokens]
    columns: Tensor
    mask: Tensor  # 1 on tokens of completions
    padded: dict[str, Tensor]  # the extras as [sequences, tokens]

    def pack(self, padded: Tensor) -> Tensor:
        """[sequences, tokens] → [rows, sequence], differentiable; prompts and padding get other numbers."""
        inside = self.mask.bool()
        filler = torch.linspace(-9.0, -1.0, SEQUENCE, dtype=padded.dtype).expand(len(LENGTHS), -1).clone()
        return filler.index_put((self.rows[inside], self.columns[inside]), padded[inside])


def log_probs(seed: int, shift: float = 0.0) -> Tensor:
    """Plausible log-probabilities of labels, [sequences, tokens]; those of one seed are near to each other."""
    generator = torch.Generator().manual_seed(0)
    base = -3 * torch.rand(sum(map(len, LENGTHS)), TOKENS, generator=generator, dtype=torch.float64) - 0.05
    noise = torch.randn(base.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return base + shift * noise


def places() -> tuple[Tensor, Tensor, Tensor]:
    """(row, column, mask) of every token of a completion."""
    count = sum(map(len, LENGTHS))
    rows, columns, mask = (torch.zeros(count, TOKENS, dtype=torch.int64) for _ in range(3))
    number = 0
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            at += PROMPT
            rows[number, :length], columns[number, :length] = row, torch.arange(at, at + length)
            mask[number, :length] = 1
            at += length
            number += 1
    return rows, columns, mask


def policy_batch(has_old: bool, dtype: torch.dtype = torch.float64) -> Packed:
    """Sequences of which each row packs up to SLOTS."""
    rows, columns, mask = places()
    generator = torch.Generator().manual_seed(5)
    advantage = torch.randn(len(mask), 1, generator=generator, dtype=torch.float64).expand(-1, TOKENS)
    padded = {
        "advantage": advantage,
        "rollout_logprob": log_probs(1, 0.5),
        "reference_logprob": log_probs(2, 0.5),
        "teacher_logprob": log_probs(3, 1.0),
        "old_value": torch.randn(mask.shape, generator=generator, dtype=torch.float64),
        "return_": torch.randn(mask.shape, generator=generator, dtype=torch.float64),
    }
    if has_old:
        padded["old_logprob"] = log_probs(4, 0.3)
    empty = Packed(None, rows, columns, mask, padded)  # type: ignore[arg-type]
    extra: dict[str, Tensor] = {name: empty.pack(value).to(dtype) for name, value in padded.items()}
    sequence = torch.full((len(LENGTHS), SEQUENCE), -1)
    start = torch.zeros(sequence.shape, dtype=dtype)
    tokens = torch.zeros(len(LENGTHS), SLOTS, dtype=dtype)
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for number, length in enumerate(lengths):
            sequence[row, at : at + PROMPT + length] = number
            start[row, at + PROMPT], tokens[row, number] = 1, length
            at += PROMPT + length
    extra |= {"sequence": sequence, "sequence_start": start, "sequence_tokens": tokens}
    weight = torch.zeros(sequence.shape, dtype=dtype)
    weight[rows[mask.bool()], columns[mask.bool()]] = 1
    return Packed(_batch(weight, extra), rows, columns, mask, padded)


PAIRS = (((5, 3), (2, 6)), ((4, 4),))  # (chosen, rejected) lengths of the pairs in each row


def preference_batch(seed: int = 0) -> tuple[Batch, Tensor, list[tuple[int, int, slice, slice]]]:
    """(batch, log-probabilities of its labels, (row, slot, chosen, rejected) of each pair)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(PAIRS), SEQUENCE)
    pair = torch.full(shape, -1)
    side, start, last, weight = (torch.zeros(shape, dtype=torch.float64) for _ in range(4))
    found = []
    for row, pairs in enumerate(PAIRS):
        at = 0
        for slot, lengths in enumerate(pairs):
            slices = []
            for sign, length in zip((1.0, -1.0), lengths, strict=True):
                inside = slice(at + PROMPT, at + PROMPT + length)
                pair[row, at : inside.stop], side[row, at : inside.stop] = slot, sign
                weight[row, inside], last[row, inside.stop - 1] = 1, 1
                slices.append(inside)
                at = inside.stop
            start[row, slices[0].start] = 1
            found.append((row, slot, *slices))
    reference = -5 * torch.rand(len(PAIRS), SLOTS, 2, generator=generator, dtype=torch.float64)
    extra = {"pair": pair, "side": side, "pair_start": start, "last": last, "reference": reference}
    values = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.05
    return _batch(weight, extra), values, found  # type: ignore[return-value]


def _batch(weight: Tensor, extra: dict[str, Tensor]) -> Batch:
    tokens = torch.zeros(weight.shape, dtype=torch.int64)
    return Batch(tokens, tokens, tokens, weight, None, extra)


def numeric_gradient(function: Any, at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences."""
    found = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        moved = [at.copy(), at.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        found[index] = (function(moved[0]) - function(moved[1])) / (2 * step)
    return found
