"""The input of a draft model: which requests of a step get draft tokens, and what the draft model computes first.

A block has the same number in both KV caches, and holds the same tokens there. The draft model computes a token only
when drafts need it, so it may be behind: after a prefill, a prefix hit, a preemption, or steps without drafts. It
catches up by a bounded number of tokens per step. What it has not computed costs acceptance or time, never an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from craton.ml.serving.schedule.scheduler import ScheduledStep
from craton.ml.serving.schedule.sequence import Sequence

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
LAST_TOKENS = 2  # computed first for every request: after a fully accepted draft the draft model lacks two tokens


@dataclass(slots=True)
class DraftInput:
    """`length` draft tokens for each of the first `requests` rows. The other rows only catch up.

    `counts` tokens of each row are computed first, the last of which is number `ends` of the request. Entry i of
    `places` is an index of the step's sent tokens; number `chosen[i]` of the draft tokens, flattened from
    [requests, length], belongs there.
    """

    length: int
    requests: int
    rows: Integers
    counts: Integers
    ends: Integers
    tokens: Integers
    places: Integers
    chosen: Integers


def draft_lag(sequence: Sequence) -> int:
    """Return how many tokens the draft model must compute before it can continue from the last two."""
    return max(0, len(sequence.tokens) - LAST_TOKENS - sequence.draft_computed)


def pack_drafts(step: ScheduledStep, late: Mapping[Sequence, int]) -> DraftInput | None:
    """Return the draft model's input for a step whose draft tokens are placeholders; None without any.

    `late` are sequences of which the draft model computes this many tokens, without draft tokens yet."""
    drafted = [part for part in step.parts if part.drafts]
    behind = [part.sequence for part in step.parts if part.sequence in late and part.count == 1]
    if not drafted and not behind:
        return None
    length = max((part.drafts for part in drafted), default=0)
    rows, counts, ends, tokens = [], [], [], []
    for sequence in [*(part.sequence for part in drafted), *behind]:
        if sequence in late:
            begin = sequence.draft_computed
            sequence.draft_computed = end = min(begin + late[sequence], len(sequence.tokens) - LAST_TOKENS)
        else:
            end = len(sequence.tokens)
            begin = max(0, min(sequence.draft_computed, end - LAST_TOKENS))
        rows.append(sequence.row)
        counts.append(end - begin)
        ends.append(end)
        tokens += sequence.tokens[begin:end]
    places, chosen = _places(step, length)
    arrays = (rows, counts, ends, tokens, places, chosen)
    return DraftInput(length, len(drafted), *(np.asarray(values, np.int32) for values in arrays))


def _places(step: ScheduledStep, length: int) -> tuple[list[int], list[int]]:
    """Return where draft tokens go among the sent tokens, those of chunks with more than one, and which go there."""
    places: list[int] = []
    chosen: list[int] = []
    begin = request = 0
    for part in step.parts:
        if part.count == 1:
            continue
        if part.drafts:
            places += range(begin + part.count - part.drafts, begin + part.count)
            chosen += range(request * length, request * length + part.drafts)
            request += 1
        begin += part.count
    return places, chosen
