"""Random requests of token ids or words, each a pure function of (seed, stream, index).

So two servers get the same requests, and the same seed repeats a run. A stream is one load: warm-up, or one level of a
sweep. No two streams share a prompt, so a level gets no prefix cache hits from an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import count

import numpy as np

from craton.bench.load.lengths import Lengths

# Streams. WARM_UP and FIRST_LEVEL upwards are loads; the others only separate random draws.
WARM_UP, PREFIXES, TRIAL, ARRIVALS, FIRST_LEVEL = range(5)
_FIRST_ID = 10  # most vocabularies begin with special tokens, such as the end of a text

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Request:
    """One request. `at_seconds`: when it is due after the start of the load, from a trace."""

    prompt: str | list[int]
    output_tokens: int
    at_seconds: float | None = None


@dataclass(frozen=True)
class Ids:
    """Prompts are token ids below `vocabulary`, with exact lengths."""

    vocabulary: int

    def units(self, tokens: float) -> int:
        return round(tokens)


@dataclass(frozen=True)
class Words:
    """Prompts are words; the two numbers, which convert tokens to words, come from the server's usage."""

    tokens_per_word: float = 1.0
    template_tokens: float = 0.0  # of the chat template, in every prompt

    def units(self, tokens: float) -> int:
        """Return how many words make `tokens` tokens of text, without the template."""
        return max(0, round(tokens / self.tokens_per_word))


@dataclass(frozen=True)
class Prefixes:
    """A `share` of the requests begins with one of `groups` shared prefixes of `tokens` tokens, the others with as many
    unique tokens, so that lengths do not depend on the share."""

    tokens: int = 0
    groups: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class RandomRequests:
    """An endless source of random requests. `input` is the length after the prefix."""

    input: Lengths
    output: Lengths
    seed: int
    form: Ids | Words
    prefixes: Prefixes = field(default_factory=Prefixes)

    def stream(self, stream: int) -> Iterator[Request]:
        return (self.request(stream, index) for index in count())

    def request(self, stream: int, index: int) -> Request:
        generator = np.random.default_rng([self.seed, stream, index])
        # Everything else is drawn before the prompt, so lengths do not depend on the form of prompts.
        own_tokens, output_tokens = self.input.draw(generator), self.output.draw(generator)
        shared = self.prefixes.tokens > 0 and generator.random() < self.prefixes.share
        group = int(generator.integers(self.prefixes.groups))
        template_tokens = self.form.template_tokens if isinstance(self.form, Words) else 0.0
        total = self.form.units(self.prefixes.tokens + own_tokens - template_tokens)
        prefix = _prefix(self.seed, stream, group, self.prefixes.tokens, self.form) if shared else _NOTHING
        units = np.concatenate([prefix, _draw(generator, max(1, total - len(prefix)), self.form)])
        return Request(_render(units, self.form), output_tokens)


def trial_prompt(tokens: int, form: Ids | Words, seed: int) -> str | list[int]:
    """Return a prompt outside all loads, to check a server with. The last token id is the largest of the vocabulary."""
    units = _draw(np.random.default_rng([seed, TRIAL]), form.units(tokens), form)
    if isinstance(form, Ids):
        units[-1] = form.vocabulary - 1
    return _render(units, form)


def _draw(generator: np.random.Generator, units: int, form: Ids | Words) -> np.ndarray:
    if isinstance(form, Ids):
        return generator.integers(min(_FIRST_ID, form.vocabulary // 2), form.vocabulary, size=units)
    return generator.integers(len(_words()), size=units)


@cache
def _prefix(seed: int, stream: int, group: int, tokens: int, form: Ids | Words) -> np.ndarray:
    return _draw(np.random.default_rng([seed, PREFIXES, stream, group]), form.units(tokens), form)


def _render(units: np.ndarray, form: Ids | Words) -> str | list[int]:
    if isinstance(form, Ids):
        ids: list[int] = units.tolist()
        return ids
    words = _words()
    return " ".join(words[unit] for unit in units)


@cache
def _words() -> list[str]:
    """Return short, common words, for which nearly every tokenizer has one token (with the space before it)."""
    return files(__package__).joinpath("words.txt").read_text(encoding="utf-8").split()
