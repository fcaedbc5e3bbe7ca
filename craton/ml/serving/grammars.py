"""Structured output: which tokens may come next, so that an answer fits a JSON schema, a regular expression, a grammar.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing. A grammar is compiled on a thread, once for all
requests that ask for it; what a request has written so far is a `GrammarState`, cheap to copy and to take back. Nothing
here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from craton.errors import CratonError
from craton.ml.serving.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEPT = 256  # compiled grammars
COMPILERS = 2  # threads, so that one slow grammar does not hold up the others
WORD = 32  # tokens in one number of a mask
# Between the parts of a JSON text: room for a line break and ten levels of indentation. Without a bound a model that
# has lost its way writes blanks until it runs out of tokens.
_BLANKS = r"[\x20\x0A\x0D\x09]{1,41}"


class GrammarError(CratonError):
    """A grammar that cannot be compiled, or a token that it does not allow."""


def mask_words(vocabulary: int) -> int:
    """Numbers in the mask of one request."""
    return -(-vocabulary // WORD)


class Grammars:
    """Compiles grammars for one tokenizer. `vocabulary` is the model's, which may have more tokens than the tokenizer:
    those are never allowed. An answer that is complete may be followed by any of the `stop_tokens`."""

    def __init__(self, tokenizer_folder: str | Path, vocabulary: int, stop_tokens: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self._folder = Path(tokenizer_folder)
        self._stop_tokens = tuple(stop_tokens)
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._compiled = lru_cache(KEPT)(self._compile)
        # Takes about a second for 128k tokens; whoever asks for the first grammar waits for it, the engine's start not.
        self._tokenizer = self._compilers.submit(self._read_tokenizer)
        self._executor: LLExecutor | None = None

    def start(self, grammar: Grammar) -> Future[GrammarState]:
        """The state before the first token of an answer; the future raises GrammarError where there can be none."""
        return self._compilers.submit(self._start, grammar)

    def fill(self, states: Mapping[int, GrammarState], masks: np.ndarray) -> dict[int, str]:
        """Writes what each state allows next into its row of `masks`, int32 [rows, words], on several threads; other
        rows stay as they are. Those that have come to their limits, which allow stop tokens only, and why."""
        from llguidance import LLExecutor

        assert masks.shape[1:] == (mask_words(self.vocabulary),)
        assert masks.dtype == np.int32
        assert masks.flags.c_contiguous
        failed = {}
        if len(states) > 1:
            if self._executor is None:
                self._executor = LLExecutor()
            rows = [(state.matcher, row) for row, state in states.items()]
            self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))
        for row, state in states.items():
            try:
                if len(states) == 1:  # waking threads would cost more than it saves
                    state.fill(masks[row])
                state.check()
            except GrammarError as error:
                failed[row] = str(error)
        return failed

    def close(self) -> None:
        """Ends the threads; what is being compiled is waited for."""
        self._compilers.shutdown(cancel_futures=True)

    def _start(self, grammar: Grammar) -> GrammarState:
        return GrammarState(self._compiled(grammar).deep_copy(), self._stop_tokens, self.vocabulary)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer.result(), _source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"the {grammar.kind} cannot be used: {matcher.get_error().strip()}")
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        from craton.ml.data import load_tokenizer

        if not self._stop_tokens:
            raise GrammarError("structured output needs a token that ends an answer; the model names none")
        text = load_tokenizer(self._folder).to_str()
        try:
            return LLTokenizer(text, n_vocab=self.vocabulary, eos_token=list(self._stop_tokens))
        except ValueError as error:
            raise GrammarError(f"structured output cannot use the tokenizer in {self._folder}: {error}") from None


class GrammarState:
    """What may follow the tokens accepted so far."""

    def __init__(self, matcher: LLMatcher, stop_tokens: tuple[int, ...], vocabulary: int) -> None:
        self.matcher = matcher
        self._stop_tokens = stop_tokens
        self._vocabulary = vocabulary
        self._stops = 0  # stop tokens after an answer that could not go on; the matcher does not count these

    def fill(self, mask: np.ndarray) -> None:
        """Sets bit t % 32 of number t // 32 of the mask, int32 [words], for every token t that may come next, and
        clears all others."""
        assert mask.shape == (mask_words(self._vocabulary),)
        assert mask.dtype == np.int32
        assert mask.flags.c_contiguous
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()

    def accept(self, token: int) -> None:
        """One token further. A token that is not allowed raises GrammarError and leaves the state as it was."""
        if token in self._stop_tokens and self.is_finished:
            self._stops += 1
            return
        # a number outside of the vocabulary would spoil the matcher for good
        if not 0 <= token < self._vocabulary or not self.matcher.try_consume_tokens([token]):
            self.check()
            raise GrammarError(f"token {token} is not allowed here by the grammar")

    def rollback(self, count: int) -> None:
        """Takes the last `count` accepted tokens back."""
        of_stops = min(count, self._stops)
        self._stops -= of_stops
        if count > of_stops and not self.matcher.rollback(count - of_stops):
            raise AssertionError(f"{count} tokens cannot be taken back: {self.matcher.get_error()}")

    @property
    def is_finished(self) -> bool:
        """Whether nothing but a stop token may follow, or one has come."""
        self.check()
        return bool(self.matcher.is_stopped())

    def fork(self) -> GrammarState:
        """A state of its own that has accepted the same."""
        copy = GrammarState(self.matcher.deep_copy(), self._stop_tokens, self._vocabulary)
        copy._stops = self._stops
        return copy

    def check(self) -> None:
        """A matcher that ran into a limit of its size stays so, and allows stop tokens only."""
        if self.matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed further: {self.matcher.get_error().strip()}")


def _source(grammar: Grammar) -> str:
    """What llguidance takes."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = {"type": "object"}
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.text)
        except ValueError as error:
            raise GrammarError(f"the json_schema is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise GrammarError(f"the json_schema is {grammar.text.strip()[:40]!r}; it must be a JSON object")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _BLANKS})
