"""A step as it goes to the device, and to every other rank of a tensor-parallel engine: numbers only.

Requests with a single token come first and take it from the device's own table, where the last step left it: the host
need not have seen it. Tokens of the others are sent.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import numpy as np

from craton.ml.serving.messages import Sampling
from craton.ml.serving.schedule.prefix import Move
from craton.ml.serving.schedule.scheduler import ScheduledChunk, ScheduledStep
from craton.ml.serving.schedule.sequence import Sequence

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
FORBIDDEN = -1e30  # added to the logit of a token that must not be chosen


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence gets a row."""

    row: int
    seed: int
    adapter: int
    sampling: Sampling
    prompt: tuple[int, ...] = ()  # with penalties only
    written: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of a prompt whose log-probabilities are asked for: `targets` follow the tokens from `begin` on."""

    part: int  # of the step
    begin: int  # in the flattened tokens
    targets: tuple[int, ...]
    alternatives: int


@dataclass(slots=True)
class StepInput:
    """`rows`, `counts` and `lengths` are of each request: its row, its tokens in this step, all its tokens so far."""

    rows: Integers
    counts: Integers
    lengths: Integers
    decode: int  # the first so many requests have one token
    tokens: Integers  # of the others
    sampled: Integers  # which of the flattened tokens give another
    sampled_rows: Integers
    moves: Several[Move] = ()
    table: Several[tuple[int, int, int]] = ()
    starts: Several[RowStart] = ()
    next_tokens: Several[tuple[int, int]] = ()  # row, token: of requests with a single one, where the host knows it
    is_tuned: bool = False
    added: Several[tuple[int, int, float]] = ()  # sampled index, token, what is added to its logit
    allowed: Integers | None = None  # [sampled, words]: bits of the tokens that may be chosen
    alternatives: int = 0
    prompts: list[PromptPart] = field(default_factory=list)


def pack(step: ScheduledStep, allowed: Integers | None = None) -> StepInput:
    """What the device has to do for a step."""
    parts = step.parts
    decode = sum(part.count == 1 for part in parts)
    rows = np.fromiter((part.sequence.row for part in parts), np.int32, len(parts))
    counts = np.fromiter((part.count for part in parts), np.int32, len(parts))
    lengths = np.fromiter((part.begin + part.count for part in parts), np.int32, len(parts))
    tokens: list[int] = []
    for part in parts[decode:]:
        prompt = part.sequence.tokens
        end = part.begin + part.count
        tokens += prompt[part.begin : end]
        if end > len(prompt):
            tokens += part.sequence.drafts[: end - len(prompt)]
    sampled, sampled_rows = _sampled(parts, decode)
    work = StepInput(
        rows,
        counts,
        lengths,
        decode,
        np.asarray(tokens, np.int32),
        sampled,
        sampled_rows,
        moves=step.moves,
        table=step.table,
        starts=[_start(sequence) for sequence in step.started if sequence.row >= 0],
        next_tokens=[
            (part.sequence.row, part.sequence.tokens[part.begin])
            for part in parts[:decode]
            if part.begin < len(part.sequence.tokens)
        ],
        allowed=allowed,
    )
    _tune(work, parts)
    return work


def _sampled(parts: Several[ScheduledChunk], decode: int) -> tuple[Integers, Integers]:
    indices: list[int] = [index for index, part in enumerate(parts[:decode]) if part.samples]
    rows = [parts[index].sequence.row for index in indices]
    begin = decode
    for part in parts[decode:]:
        if part.samples:
            first = part.count - 1 - len(part.sequence.drafts)  # every draft gives a token too
            indices += range(begin + first, begin + part.count)
            rows += [part.sequence.row] * (part.count - first)
        begin += part.count
    return np.asarray(indices, np.int32), np.asarray(rows, np.int32)


def _start(sequence: Sequence) -> RowStart:
    sampling = sequence.sampling
    counted = has_penalties(sampling)
    prompt, written = (
        sequence.tokens[: sequence.prompt_length],
        sequence.tokens[sequence.prompt_length :],
    )
    return RowStart(
        sequence.row,
        sequence.seed,
        sequence.adapter_slot,
        sampling,
        tuple(prompt) if counted else (),
        tuple(written) if counted else (),
    )


def _tune(work: StepInput, parts: Several[ScheduledChunk]) -> None:
    """What some of the requests ask for beside a temperature."""
    work.is_tuned = work.allowed is not None
    if all(part.sequence.is_plain for part in parts):
        return
    added: list[tuple[int, int, float]] = []
    index = begin = 0
    for number, part in enumerate(parts):
        sequence, sampling = part.sequence, part.sequence.sampling
        if part.samples:
            if is_tuned(sampling):
                work.is_tuned = True
                added += [(index, token, value) for token, value in sampling.logit_bias.items()]
                if sequence.outputs <= sampling.min_tokens:
                    added += [(index, token, FORBIDDEN) for token in sequence.stops]
            if sampling.logprobs:
                work.alternatives = max(work.alternatives, sampling.logprobs)
            index += 1 + len(sequence.drafts)
        if sequence.prompt_logprobs is None and sampling.prompt_logprobs is not None:
            end = min(part.begin + part.count + 1, sequence.prompt_length)
            if targets := tuple(sequence.tokens[part.begin + 1 : end]):
                work.prompts.append(PromptPart(number, begin, targets, sampling.prompt_logprobs))
        begin += part.count
    work.added = added


def has_penalties(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def is_plain(sampling: Sampling) -> bool:
    """Whether only the next token is asked for, and a temperature decides."""
    return not is_tuned(sampling) and not sampling.logprobs and sampling.prompt_logprobs is None


def is_tuned(sampling: Sampling) -> bool:
    """Whether more than a temperature decides."""
    return bool(
        sampling.top_k
        or sampling.top_p < 1.0
        or sampling.min_p
        or sampling.logit_bias
        or sampling.min_tokens
        or has_penalties(sampling)
    )
