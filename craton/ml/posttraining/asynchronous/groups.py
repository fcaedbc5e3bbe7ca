"""Groups of completions on their way: what has been generated so far, by which weights, and the verdicts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from craton.ml.data import Prompt
from craton.ml.posttraining.asynchronous.selection import GroupState
from craton.ml.posttraining.samples import RolloutSample
from craton.ml.verifiers import Verdict

ENVIRONMENT = -1  # in place of a version: the environment wrote this token


@dataclass
class RolloutCopy:
    """One copy of a prompt: its tokens so far, and its verdict once it has one.

    `tokens`, `logprobs` and `versions` have the same length: a token, its log-probability in the distribution that was
    sampled, and the version of the weights that sampled it. Stop tokens are among them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    completion: str = ""  # text of the last turn
    is_truncated: bool = False
    has_ended: bool = False  # all its tokens are there
    is_complete: bool = False  # there is nothing more to generate or to verify
    seconds: float = 0.0  # of its generation
    verdict: Verdict | None = None
    transcript: list[dict[str, Any]] = field(default_factory=list)  # of an environment: role and content
    content: Any = None  # the prompt that an environment gave instead of the row's
    prompt: list[int] = field(default_factory=list)  # its tokens

    @property
    def oldest(self) -> int | None:
        """The oldest version of a token; None: it has none."""
        return min((version for version in self.versions if version != ENVIRONMENT), default=None)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Add what came completely: as many tokens as have all three numbers."""
        count = min(len(tokens), len(logprobs), len(versions))
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.versions += versions[:count]

    def snapshot(self, received: tuple[list[int], list[float], list[int]] = ([], [], [])) -> RolloutCopy:
        """Return a copy that does not change, with what else has come. An unfinished episode begins again, because its
        environment is not kept."""
        if not self.is_complete and (self.transcript or self.prompt):
            return RolloutCopy()
        kept = replace(self, tokens=list(self.tokens), logprobs=list(self.logprobs), versions=list(self.versions))
        kept.add(*received)
        return kept

    def sample(self, prompt: Prompt, copy: int) -> RolloutSample:
        """Return the sample that this generation of a prompt is."""
        if self.content is not None:
            row = {**prompt.row, "prompt": self.content}
            prompt = replace(prompt, tokens=tuple(self.prompt), row=row)
        return RolloutSample(
            prompt,
            copy,
            [*prompt.tokens, *self.tokens],
            len(prompt.tokens),
            [version != ENVIRONMENT for version in self.versions],
            list(self.logprobs),
            [version for version in self.versions if version != ENVIRONMENT],
            self.completion,
            list(self.transcript),
            self.is_truncated,
            self.seconds,
            self.verdict,
        )


@dataclass
class RolloutGroup:
    """The copies of one prompt index; none if it has not begun."""

    index: int
    copies: list[RolloutCopy] = field(default_factory=list)
    begun: int | None = None  # the version of the weights when it was first submitted
    fingerprint: str = ""  # of the prompt that it continues; empty: it has not begun

    @property
    def is_finished(self) -> bool:
        return bool(self.copies) and all(copy.is_complete for copy in self.copies)

    @property
    def oldest(self) -> int | None:
        """The oldest version that sampled a token, or may be about to: that of the submission until every copy has
        begun. None: it has not begun."""
        versions = [copy.oldest for copy in self.copies if copy.is_complete or copy.versions]
        known = [version for version in versions if version is not None]
        is_all = len(versions) == len(self.copies) and bool(known)
        return min(known) if is_all else self.begun

    @property
    def state(self) -> GroupState:
        return GroupState(self.index, self.oldest, self.is_finished)


def fingerprint_of(prompt: Prompt) -> str:
    """Return what tells a prompt from others: its tokens, and its row as far as it is JSON, which verifiers read."""
    row = json.dumps(dict(prompt.row), skipkeys=True, default=lambda value: type(value).__name__)
    return digest(json.dumps(prompt.tokens), row)


def digest(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
