"""Groups of completions on their way: what has been generated so far, by which weights, and the verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from craton.ml.serving.clients import Answer
from craton.ml.serving.messages import Finish
from craton.ml.verifiers.verdict import Verdict

FOREIGN_VERSION = 0  # of all tokens of an endpoint that keeps its own weights


@dataclass
class Generation:
    """One copy of a prompt: its tokens so far, and its verdict once it has one.

    `tokens`, `logprobs` and `versions` have the same length: a token, its log-probability in the distribution that was
    sampled, and the version of the weights that sampled it. A stop token is among them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    text: str = ""  # of a finished completion, as the verifier reads it
    verdict: Verdict | None = None

    def extended(self, answer: Answer) -> Self:
        """Return this generation with the tokens of an answer that continues it. Of an unfinished one only what has
        come completely; a failed answer is unfinished."""
        tokens, logprobs = answer.sampled_tokens, answer.sampled_logprobs
        versions = answer.sampled_versions or [FOREIGN_VERSION] * len(tokens)
        count = min(len(tokens), len(logprobs), len(versions))
        return type(self)(
            [*self.tokens, *tokens[:count]],
            [*self.logprobs, *logprobs[:count]],
            [*self.versions, *versions[:count]],
            answer.finish if answer.failure is None else None,
        )


@dataclass
class Group:
    """The copies of one prompt index; none if it has not begun."""

    index: int
    copies: list[Generation] = field(default_factory=list)
    begun: int | None = None  # the version of the weights when it was first submitted

    @property
    def is_finished(self) -> bool:
        """Whether every copy has a verdict."""
        return bool(self.copies) and all(copy.verdict is not None for copy in self.copies)

    @property
    def oldest(self) -> int | None:
        """The oldest version that sampled a token, or may be about to: that of the submission until every copy has
        begun. None: it has not begun."""
        versions = [copy.versions[0] for copy in self.copies if copy.versions]
        if len(versions) < len(self.copies) or not self.copies:
            return self.begun
        return min(versions)
