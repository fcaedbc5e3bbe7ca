"""Structured output: bitmasks of the next allowed tokens, so that an answer fits a JSON schema, a regex or a grammar.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing. A client's grammar is first checked in another
process, within limits (`worker`), and compiled here, on a thread, only if it passed. Concurrent requests for the same
grammar share one compilation; compiled grammars are cached. A `GrammarState` is one request's position in its grammar,
cheap to copy and roll back. Nothing here needs torch.
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
MIN_COST_BYTES = 16 << 10  # minimum size charged to the cache for a compiled grammar
NICENESS = 10  # of the compile threads: the engine's steps come first


def mask_words(vocabulary: int) -> int:
    """Return the int32 words in the bitmask of one request."""
    return -(-vocabulary // WORD)


@dataclass
class _Compilation:
    """A grammar being compiled, and the requests that wait for it."""

    grammar: Grammar
    waiting: list[Future[GrammarState]] = field(default_factory=list)
    check: int | None = None  # the number of its check


class Grammars:
    """Compiles grammars for one tokenizer. `vocabulary` is the model's; tokens that the tokenizer lacks are never
    allowed. Any of the `stop_tokens` may follow a complete answer."""

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
        # Takes about a second for 128k tokens: the first request with a grammar waits for it, not the engine's start.
        self._tokenizer = self._preparer.submit(self._read_tokenizer)
        self._executor: LLExecutor | None = None
        self._is_suspicious = False  # whether the last masks were so slow that each is timed separately

    def start(self, grammar: Grammar) -> Future[GrammarState]:
        """Return a future of the state before the first token; it raises GrammarError for a grammar that is refused."""
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
        """Cancel a request's wait; a check that no request waits for is cancelled too."""
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
        # Queued behind the start of its check, which may have to start the process first.
        self._preparer.submit(self._checker.cancel, matching.check)

    @property
    def kept_bytes(self) -> int:
        """Return the measured size of the compiled grammars in the cache."""
        return self._kept_bytes

    def fill(self, states: Mapping[int, GrammarState], masks: np.ndarray) -> dict[int, str]:
        """Write each state's allowed next tokens into its row of `masks`, int32 [rows, words], on several threads.

        Other rows keep their values. Return the rows whose grammar exceeded a limit, with the error; these allow stop
        tokens only."""
        from llguidance import LLExecutor

        assert masks.shape[1:] == (mask_words(self.vocabulary),)
        assert masks.dtype == np.int32
        assert masks.flags.c_contiguous
        failed = {}
        began = time.perf_counter()
        is_timed = self._is_suspicious or len(states) == 1  # for one state, waking threads costs more than it saves
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
        """End the threads and the process; wait for running compilations, which takes seconds."""
        self._checker.close()
        for pool in (self._preparer, self._quick, self._slow):
            pool.shutdown(cancel_futures=True)
        self._kept.clear()

    def _prepare(self, compilation: _Compilation) -> None:
        """Do the cheap checks, then send the grammar to the checker, unless it is cached or `json_object`."""
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
        except Exception as error:  # noqa: BLE001 -- report any error to the waiting requests
            self._fail(compilation, GrammarError(f"{type(error).__name__}: {error}"))

    def _checked(self, compilation: _Compilation, source: str, outcome: GrammarCost | GrammarError) -> None:
        if isinstance(outcome, GrammarError):
            self._fail(compilation, GrammarError(f"the {compilation.grammar.kind} cannot be compiled: {outcome}"))
            return
        with self._lock:
            if not compilation.waiting:
                return
            compilation.check = None  # from here on it cannot be cancelled
        pool = self._quick if outcome.seconds < QUICK_SECONDS else self._slow
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            pool.submit(self._compile, compilation, source, outcome)

    def _compile(self, compilation: _Compilation, source: str, cost: GrammarCost) -> None:
        from llguidance import LLMatcher

        grammar = compilation.grammar
        matcher = LLMatcher(self._tokenizer.result(), source, log_level=0, limits=parser_limits())
        if matcher.is_error():
            error = f"the {grammar.kind} cannot be compiled: {matcher.get_error().strip()[:2000]}"
            self._fail(compilation, GrammarError(error))
            return
        self._finish(compilation, matcher, max(cost.num_bytes, 4 * len(grammar.text), MIN_COST_BYTES))

    def _finish(self, compilation: _Compilation, matcher: LLMatcher, num_bytes: int) -> None:
        """Give each waiting request a state, and cache the grammar, evicting the least recently used ones."""
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
        """Fail the waiting requests; refused grammars are not cached."""
        with self._lock:
            self._compilations.pop(compilation.grammar, None)
            waiting = list(compilation.waiting)
        for future in waiting:
            future.set_exception(error)

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        from craton.ml.data import load_tokenizer

        if not self._stop_tokens:
            raise GrammarError("structured output needs a stop token, and the model defines none (eos_token_id)")
        text = load_tokenizer(self._folder).to_str()
        try:
            return LLTokenizer(text, n_vocab=self.vocabulary, eos_token=list(self._stop_tokens))
        except ValueError as error:
            raise GrammarError(f"structured output cannot use the tokenizer in {self._folder}: {error}") from None


class GrammarState:
    """A position in a grammar: what may follow the accepted tokens."""

    def __init__(self, matcher: LLMatcher, stop_tokens: tuple[int, ...], vocabulary: int) -> None:
        self.matcher = matcher
        self._stop_tokens = stop_tokens
        self._vocabulary = vocabulary
        self._stops = 0  # stop tokens after a finished answer; the matcher does not count these

    def fill(self, mask: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 of the mask, int32 [words], for each allowed token t; clear the others."""
        assert mask.shape == (mask_words(self._vocabulary),)
        assert mask.dtype == np.int32
        assert mask.flags.c_contiguous
        began = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()
        if (seconds := time.thread_time() - began) > MAX_MASK_SECONDS:
            raise GrammarError(
                f"the grammar is too expensive: computing its next tokens took {duration(seconds)}; the limit is "
                f"{setting(MAX_MASK_SECONDS)}"
            )

    def accept(self, token: int) -> None:
        """Advance by one token. A token that is not allowed raises GrammarError and leaves the state unchanged."""
        if token in self._stop_tokens and self.is_finished:
            self._stops += 1
            return
        # a token id outside the vocabulary would put the matcher into a permanent error state
        if not 0 <= token < self._vocabulary or not self.matcher.try_consume_tokens([token]):
            self.check()
            raise GrammarError(f"token {token} is not allowed by the grammar here")

    def accept_all(self, tokens: Sequence[int]) -> None:
        """Advance by the tokens that an answer already has; raise GrammarError if one is not allowed."""
        accepted = self.matcher.try_consume_tokens(list(tokens))
        if accepted < len(tokens):
            self.check()
            raise GrammarError(
                f"the grammar does not allow token {tokens[accepted]}, number {accepted + 1} of the "
                f"{len(tokens)} generated tokens to continue from"
            )

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        of_stops = min(count, self._stops)
        self._stops -= of_stops
        if count > of_stops and not self.matcher.rollback(count - of_stops):
            raise AssertionError(f"cannot roll back {count} tokens: {self.matcher.get_error()}")

    @property
    def is_finished(self) -> bool:
        """Whether only a stop token may follow, or one was accepted."""
        self.check()
        return bool(self.matcher.is_stopped())

    def fork(self) -> GrammarState:
        """Return an independent copy of this state."""
        copy = GrammarState(self.matcher.deep_copy(), self._stop_tokens, self._vocabulary)
        copy._stops = self._stops
        return copy

    def check(self) -> None:
        """Raise if the matcher exceeded a limit, after which it allows stop tokens only."""
        if self.matcher.is_error():
            raise GrammarError(f"the grammar exceeded a limit: {self.matcher.get_error().strip()}")


def _be_nice() -> None:
    """Lower the priority of the calling thread only (Linux)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
