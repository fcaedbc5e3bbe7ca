"""What is known of a suite before a model was asked: the tokens of its prompts, and the limit of an answer.

Guarantees: pure functions; what is an estimate or a limit says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from craton.formatting import count, counted
from craton.planning.strategies.evaluation_file import SampleRecord
from craton.planning.strategies.posterior import KnownAccuracy
from craton.planning.strategies.usage import BYTES_PER_TOKEN, SampleLengths, StrategyShape


@dataclass(frozen=True)
class SuitePrompts:
    """The prompts of a suite. `tokens`: of each problem; `tokenizer`: what counted them, empty for an estimate."""

    name: str
    tokens: tuple[int, ...]
    tokenizer: str
    max_tokens: int
    wanted: tuple[StrategyShape, ...] = ()


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text has, without its tokenizer."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def record_of_suite(suite: SuitePrompts, known: SampleRecord | None = None, source: str = "") -> SampleRecord:
    """Return what is known of a suite: its own prompts, and the accuracy and answers of `known`, which was measured on
    it. `source`: the run that measured it."""
    measured = known.lengths if known is not None else None
    prompt, completion = fmean(suite.tokens), float(suite.max_tokens)
    spread = _range(suite.tokens)
    if suite.tokenizer:
        of_prompt = f"prompts of {spread} tokens, by the tokenizer of {suite.tokenizer}"
    elif measured is not None and measured.prompt_tokens:
        prompt, of_prompt = measured.prompt_tokens, "prompts as measured"
    else:
        of_prompt = f"prompts of {spread} tokens, estimated: one token for {BYTES_PER_TOKEN} bytes"
    notes = []
    if measured is not None:
        completion, of_answer = measured.completion_tokens, "completions as measured"
    else:
        of_answer = f"completions at the suite's max_tokens of {count(suite.max_tokens)}, an upper bound"
        notes.append(
            "completions are counted at the suite's max_tokens, the most that they can have; give --tokens "
            "PROMPT,COMPLETION, or evaluate some problems: craton eval MODEL SUITE --problems 20"
        )
    title = f"{suite.name}: {counted(len(suite.tokens), 'problem')}"
    record = known or SampleRecord(KnownAccuracy(len(suite.tokens)), None, "")
    return replace(
        record,
        lengths=SampleLengths(prompt, completion),
        title=title + (f", accuracy of {record.title} in run {source}" if source else ""),
        notes=(*record.notes, *notes),
        wanted=suite.wanted,
        lengths_source=f"{of_prompt}; {of_answer}",
    )


def _range(tokens: Sequence[int]) -> str:
    low, high = count(min(tokens)), count(max(tokens))
    return low if low == high else f"{low} to {high}"
