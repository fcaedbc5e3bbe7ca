"""Structured output: which tokens may come next, so that an answer fits a JSON schema, a regular expression, a grammar.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing. A client's grammar is tried out in another
process first, within limits (`grammar_worker`), and compiled here, on a thread, only if it passed: once for all who ask
for it at a time, and kept while there is room. What a request has written so far is a `GrammarState`, cheap to copy and
to take back. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from craton.formatting import duration, setting
from craton.ml.serving.grammar.check import GrammarChecker, GrammarCost
from craton.ml.serving.grammar.limits import (
    CACHE_BYTES,
    MAX_MASK_SECONDS,
    QUICK_SECONDS,
    GrammarError,
    check_size,
    parser_limits,
    source_of,
)
from craton.ml.serving.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

WORD = 32  # tokens in one number of a mask
MIN_COST_BYTES = 16 << 10  # of a compiled grammar, however little its compilation was seen to take
NICENESS = 10  # of the threads that compile: the engine's steps come first


def mask_words(vocabulary: int) -> int:
    """Numbers in the mask of one request."""
    return -(-vocabulary // WORD)


@dataclass
class _Compilation:
    """A grammar on its way, and the requests that wait for it."""

    grammar: Grammar
    waiting: list[Future[GrammarState]] = field(default_factory=list)
    check: int | None = None  # the number of its trial


class Grammars:
    """Compiles grammars for one tokenizer. `vocabulary` is the model's, which may have more tokens than the tokenizer:
    those are never allowed. An answer that is complete may be followed by any of the `stop_tokens`."""

    def __init__(self, tokenizer_folder: str | Path, vocabulary: int, stop_tokens: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self._folder = Path(tokenizer_folder)
        self._stop_tokens = tuple(stop_tokens)
        self._checker = GrammarChecker(self._folder, vocabulary, self._stop_tokens)
        self._preparer, self._quick, self._slow = (
            ThreadPoolExecutor(1, f"grammar-{name}", _be_nice) for name in ("preparer", "quick", "slow")
        )
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._compilations: dict[Grammar, _Compilation] = {}
        self._kept: OrderedDict[Grammar, tuple[LLMatcher, int]] = OrderedDict()
        self._kept_bytes = 0
        # Takes about a second for 128k tokens; whoever asks for the first grammar waits for it, the engine's start not.
        self._tokenizer = self._preparer.submit(self._read_tokenizer)
        self._executor: LLExecutor | None = None
        self._is_suspicious = False  # whether the last masks took so long that each is timed on its own

    def start(self, grammar: Grammar) -> Future[GrammarState]:
        """The state before the first token of an answer; the future raises GrammarError where there can be none."""
        future: Future[GrammarState] = Future()
        with self._lock:
            compilation = self._compilations.get(grammar)
            if compilation is not None:
                compilation.waiting.append(future)
                return future
            compilation = self._compilations[grammar] = _Compilation(grammar, [future])
        self._preparer.submit(self._prepare, compilation)
        return future

    def cancel(self, future: Future[GrammarState]) -> None:
        """The request that waits for it has ended. A grammar that no request waits for is given up."""
        with self._lock:
            matching = next(
                (compilation for compilation in self._compilations.values() if future in compilation.waiting), None
            )
            if matching is None:
                return
            matching.waiting.remove(future)
            if matching.waiting or matching.check is None:
                return
            del self._compilations[matching.grammar]
        # After its trial was asked for, which may take a while: the process may have to start.
        self._preparer.submit(self._checker.cancel, matching.check)

    @property
    def kept_bytes(self) -> int:
        """What the compiled grammars that are kept take, as far as was measured."""
        return self._kept_bytes

    def fill(self, states: Mapping[int, GrammarState], masks: np.ndarray) -> dict[int, str]:
        """Writes what each state allows next into its row of `masks`, int32 [rows, words], on several threads; other
        rows stay as they are. Those that have come to their limits, which allow stop tokens only, and why."""
        from llguidance import LLExecutor

        assert masks.shape[1:] == (mask_words(self.vocabulary),)
        assert masks.dtype == np.int32
        assert masks.flags.c_contiguous
        failed = {}
        began = time.perf_counter()
        is_timed = self._is_suspicious or len(states) == 1  # for one, waking threads would cost more than it saves
        if not is_timed:
            if self._executor is None:
                self._executor = LLExecutor()
            rows = [(state.matcher, row) for row, state in states.items()]
            self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))
        for row, state in states.items():
            try:
                if is_timed:
                    state.fill(masks[row])
                state.check()
            except GrammarError as error:
                failed[row] = str(error)
        self._is_suspicious = time.perf_counter() - began > MAX_MASK_SECONDS
        return failed

    def close(self) -> None:
        """Ends the threads and the process; what is being compiled here is waited for, which takes seconds at most."""
        self._checker.close()
        for pool in (self._preparer, self._quick, self._slow):
            pool.shutdown(cancel_futures=True)
        self._kept.clear()

    def _prepare(self, compilation: _Compilation) -> None:
        """What is cheap; then it is tried out, unless it is kept or our own."""
        grammar = compilation.grammar
        try:
            check_size(grammar)
            with self._lock:
                kept = self._kept.get(grammar)
            if kept is not None:
                self._finish(compilation, *kept)
                return
            self._tokenizer.result()
            source = source_of(grammar)
            if grammar.kind == "json_object":
                self._compile(compilation, source, GrammarCost(0.0, 0))
                return
            with self._lock:
                if not compilation.waiting:
                    self._compilations.pop(grammar, None)
                    return
                number = compilation.check = next(self._numbers)
            self._checker.check(number, source, lambda item: self._checked(compilation, source, item))
        except GrammarError as error:
            self._fail(compilation, error)
        except Exception as error:  # noqa: BLE001 -- whatever it is, those who wait must hear of it
            self._fail(compilation, GrammarError(f"{type(error).__name__}: {error}"))

    def _checked(self, compilation: _Compilation, source: str, outcome: GrammarCost | GrammarError) -> None:
        if isinstance(outcome, GrammarError):
            self._fail(compilation, GrammarError(f"the {compilation.grammar.kind} cannot be used: {outcome}"))
            return
        with self._lock:
            if not compilation.waiting:
                return
            compilation.check = None  # from here on it cannot be stopped
        pool = self._quick if outcome.seconds < QUICK_SECONDS else self._slow
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            pool.submit(self._compile, compilation, source, outcome)

    def _compile(self, compilation: _Compilation, source: str, cost: GrammarCost) -> None:
        from llguidance import LLMatcher

        grammar = compilation.grammar
        matcher = LLMatcher(self._tokenizer.result(), source, log_level=0, limits=parser_limits())
        if matcher.is_error():
            error = f"the {grammar.kind} cannot be used: {matcher.get_error().strip()[:2000]}"
            self._fail(compilation, GrammarError(error))
            return
        self._finish(compilation, matcher, max(cost.num_bytes, 4 * len(grammar.text), MIN_COST_BYTES))

    def _finish(self, compilation: _Compilation, matcher: LLMatcher, num_bytes: int) -> None:
        """Hands states out, and keeps the grammar: those used least recently leave for it."""
        with self._lock:
            self._compilations.pop(compilation.grammar, None)
            if self._kept.pop(compilation.grammar, None) is None:
                self._kept_bytes += num_bytes
            self._kept[compilation.grammar] = (matcher, num_bytes)
            while self._kept_bytes > CACHE_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1][1]
            waiting = list(compilation.waiting)
        for future in waiting:
            future.set_result(GrammarState(matcher.deep_copy(), self._stop_tokens, self.vocabulary))

    def _fail(self, compilation: _Compilation, error: GrammarError) -> None:
        """Nothing is kept of a grammar that is refused."""
        with self._lock:
            self._compilations.pop(compilation.grammar, None)
            waiting = list(compilation.waiting)
        for future in waiting:
            future.set_exception(error)

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
        began = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()
        if (seconds := time.thread_time() - began) > MAX_MASK_SECONDS:
            raise GrammarError(
                f"the grammar cannot be followed further: finding its next tokens took {duration(seconds)}, and may "
                f"take {setting(MAX_MASK_SECONDS)}"
            )

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


def _be_nice() -> None:
    """Of the calling thread alone, on Linux."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
