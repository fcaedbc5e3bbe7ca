"""The input of a step, as sent to the device and to every other rank of a tensor-parallel engine: numbers only.

Decoding requests come first. Their one token is in a table on the device, where the last step stored it: the host need
not have read it. The tokens of the others (prefill chunks, drafts) are sent.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import numpy as np

from craton.ml.serving.messages import Sampling
from craton.ml.serving.schedule.drafts import DraftInput
from craton.ml.serving.schedule.prefix import Move
from craton.ml.serving.schedule.scheduler import ScheduledChunk, ScheduledStep
from craton.ml.serving.schedule.sequence import Sequence
from craton.ml.serving.schedule.shared_prefix import Integers, PrefixGroups

FORBIDDEN = -1e30  # added to the logit of a forbidden token


@dataclass(frozen=True, slots=True)
class RowStart:
    """The state of a sequence that gets a new row."""

    row: int
    seed: int
    adapter: int
    sampling: Sampling
    prompt: tuple[int, ...] = ()  # with penalties only
    written: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens whose log-probabilities are requested: `targets` follow the tokens from `begin` on."""

    part: int  # index of the chunk in the step
    begin: int  # in the flattened tokens
    targets: tuple[int, ...]
    alternatives: int


@dataclass(slots=True)
class StepInput:
    """A batch. `rows`, `counts` and `lengths` give each request's row, tokens in this step, and total tokens."""

    rows: Integers
    counts: Integers
    lengths: Integers
    decode: int  # the number of decoding requests, which come first and have one token
    tokens: Integers  # of the others
    sampled: Integers  # indices of the flattened tokens whose logits are sampled
    sampled_rows: Integers
    moves: Several[Move] = ()
    table: Several[tuple[int, int, int]] = ()
    starts: Several[RowStart] = ()
    next_tokens: Several[tuple[int, int]] = ()  # row, token: of requests with one token that the host knows
    is_tuned: bool = False
    added: Several[tuple[int, int, float]] = ()  # sampled index, token, logit bias
    allowed: Integers | None = None  # [sampled, words]: bitmask of the allowed tokens
    alternatives: int = 0
    prompts: list[PromptPart] = field(default_factory=list)
    drafts: DraftInput | None = None  # of a draft model, whose tokens replace placeholders among `tokens`
    groups: PrefixGroups | None = None  # of the decoding requests


def pack(step: ScheduledStep, allowed: Integers | None = None) -> StepInput:
    """Return the input of a step."""
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
        groups=step.groups,
    )
    _tune(work, parts)
    return work


def _sampled(parts: Several[ScheduledChunk], decode: int) -> tuple[Integers, Integers]:
    indices: list[int] = [index for index, part in enumerate(parts[:decode]) if part.samples]
    rows = [parts[index].sequence.row for index in indices]
    begin = decode
    for part in parts[decode:]:
        if part.samples:
            first = part.count - 1 - len(part.sequence.drafts)  # every draft token is sampled after, too
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
    """Add the sampling parameters beside the temperature, for the requests that use any."""
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
    """Whether sampling needs only a temperature and no log-probabilities are requested."""
    return not is_tuned(sampling) and not sampling.logprobs and sampling.prompt_logprobs is None


def is_tuned(sampling: Sampling) -> bool:
    """Whether sampling needs more than a temperature."""
    return bool(
        sampling.top_k
        or sampling.top_p < 1.0
        or sampling.min_p
        or sampling.logit_bias
        or sampling.min_tokens
        or has_penalties(sampling)
    )
