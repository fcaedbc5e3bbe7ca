"""Detokenizes one answer: whole characters, stop strings removed, with log-probs.

The result does not depend on how tokens are split into deltas. Text that may begin a stop string is held back until it
is known not to; the log-probs of a token come with the text it begins in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from craton.ml.serving.messages import Alternatives, OutputDelta
from craton.ml.serving.text.thinking import ThinkingCounter
from craton.ml.serving.text.vocabulary import Detokenizer, TokenNumbers


@dataclass(slots=True)
class TokenScore:
    """One token of the answer with its log-prob. `offset`: where its text begins in the answer."""

    token: int
    logprob: float
    alternatives: Alternatives | None
    offset: int


@dataclass(slots=True)
class Addition:
    """What one delta adds to an answer. `reason` is the stop string or token that ended it."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    finish: str | None = None
    reason: str | int | None = None
    stop: tuple[float, int] | None = None  # log-probability of the stop token, and the version that sampled it


class StopStrings:
    """Finds stop strings: the first complete one ends the text before it; of several at once, the longest."""

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty string would stop every text"
        self.found: str | None = None
        self._strings = sorted(strings, key=len, reverse=True)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; return what cannot belong to a stop string and was not returned yet."""
        text = self._held + text
        ends = [(at + len(string), string) for string in self._strings if (at := text.find(string)) >= 0]
        if ends:
            end, self.found = min(ends, key=lambda pair: pair[0])  # the longest comes first among equals
            self._held = ""
            return text[: end - len(self.found)]
        keep = max((self._begun(text, string) for string in self._strings), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begun(text: str, string: str) -> int:
        """Return how many characters at the end of the text begin the string."""
        for length in range(min(len(string) - 1, len(text)), 0, -1):
            if text.endswith(string[:length]):
                return length
        return 0


class AnswerReader:
    """Reads the deltas of one copy, until `is_complete`."""

    def __init__(
        self,
        detokenizer: Detokenizer | TokenNumbers,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        has_scores: bool = False,
        thinking: ThinkingCounter | None = None,
    ) -> None:
        self.num_tokens = 0  # generated, including the stop token and those of `replay`
        self.num_replayed = 0
        self.is_complete = False
        self.is_cut = False  # the budget of thinking is spent; deltas are not read until `force`
        self.thinking = thinking
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._has_scores = has_scores
        self._decoded = 0  # characters of text, held ones included
        self._released = 0  # characters returned
        self._scores: list[TokenScore] = []  # not returned yet

    @property
    def num_characters(self) -> int:
        """Decoded so far, without those of `replay`."""
        return self._decoded

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops is not None and self._stops.found is not None

    def replay(self, tokens: Sequence[int]) -> str:
        """Take the tokens that the answer already has, up to a stop string, and return the text that they released.

        Text that they hold back (half a character, what may begin a stop string) comes with the next tokens."""
        texts = []
        for token in tokens:
            self.num_tokens += 1
            texts.append(self._feed(token))
            if self.is_stopped:
                break
        text = "".join(texts)
        self.num_replayed = self.num_tokens
        self._decoded -= len(text)  # offsets count from the first new character
        return text

    def read(self, piece: OutputDelta) -> Addition:
        addition = Addition()
        texts: list[str] = []
        for place, token in enumerate(piece.tokens):
            self.num_tokens += 1
            addition.tokens.append(token)
            if piece.versions:
                addition.versions.append(piece.versions[place])
            if self._has_scores:
                alternatives = piece.alternatives[place] if piece.alternatives else None
                self._scores.append(TokenScore(token, piece.logprobs[place], alternatives, self._decoded))
            texts.append(self._feed(token))
            if self._stops is not None and self._stops.found is not None:
                self._complete(addition, "stop", self._stops.found)
                break
            if self.thinking is not None and self.thinking.is_spent:
                self.is_cut = True
                break
        else:
            if piece.finish is not None:
                self._finish(addition, piece, texts)
        addition.text = "".join(texts)
        if self._has_scores:
            self._release_scores(addition)
        return addition

    def force(self, tokens: Sequence[int], versions: Sequence[int]) -> Addition:
        """Go on with tokens that the model has not sampled and that end its thinking; they are certain."""
        assert self.thinking is not None
        self.is_cut = False
        self.thinking.close()
        return self.read(OutputDelta(0, tokens=list(tokens), logprobs=[0.0] * len(tokens), versions=list(versions)))

    def end_at_length(self, addition: Addition) -> None:
        """End the answer with its last delta: there is no room for more tokens."""
        self._complete(addition, "length", None)

    def _finish(self, addition: Addition, piece: OutputDelta, texts: list[str]) -> None:
        texts.append(self._check(self._detokenizer.finish()))
        if self._stops is not None:
            if self._stops.found is not None:
                self._complete(addition, "stop", self._stops.found)
                return
            texts.append(self._stops.finish())
        self.num_tokens += piece.stop_token is not None
        # OpenAI has no finish_reason for an aborted answer; it is incomplete, like one that reached its length, and
        # stop_reason distinguishes them.
        if piece.finish == "stop":
            self._complete(addition, "stop", piece.stop_token)
            if piece.stop_token is not None:
                addition.stop = (piece.stop_logprob, piece.stop_version)
        else:
            self._complete(addition, "length", "abort" if piece.finish == "abort" else None)

    def _feed(self, token: int) -> str:
        text = self._detokenizer.feed(token)
        if self.thinking is not None:
            self.thinking.feed(text)
        return self._check(text)

    def _check(self, text: str) -> str:
        self._decoded += len(text)
        if self._stops is None or self.num_tokens <= self._min_tokens:
            return text
        return self._stops.feed(text)

    def _complete(self, addition: Addition, finish: str, reason: str | int | None) -> None:
        self.is_complete = True
        addition.finish = finish
        addition.reason = reason

    def _release_scores(self, addition: Addition) -> None:
        self._released += len(addition.text)
        is_whole = addition.finish is not None and (self._stops is None or self._stops.found is None)
        if is_whole:
            addition.scores, self._scores = self._scores, []
            return
        kept = 0
        while kept < len(self._scores) and self._scores[kept].offset < self._released:
            kept += 1
        addition.scores, self._scores = self._scores[:kept], self._scores[kept:]
