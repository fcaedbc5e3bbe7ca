"""Requests and answers as a client sees them.

An `Answer` holds all that has come; unread output is not stored twice. So what an answer holds is limited by its
`max_tokens`, however slow its reader is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from craton.ml.serving.clients.errors import InferenceError
from craton.ml.serving.messages import Alternatives, Finish, Sampling

PromptKind = Literal["token", "text", "chat"]


@dataclass(frozen=True)
class InferenceRequest:
    """A prompt (token ids, a text, or the messages of a chat), to be answered `copies` times.

    Copy i has seed + i; without a seed the client draws one. `generated` continues an answer: limits, penalties,
    grammar, stop strings and seed count these tokens as generated. `continues_message`: the last message of a chat is
    the assistant's, and the answer goes on behind its text."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    sampling: Sampling = field(default_factory=Sampling)
    copies: int = 1
    generated: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    priority: int = 0  # smaller is sooner
    adapter: str | None = None
    continues_message: bool = False

    @property
    def prompt_kind(self) -> PromptKind:
        if isinstance(self.prompt, str):
            return "text"
        return "chat" if self.prompt and isinstance(self.prompt[0], Mapping) else "token"


@dataclass(slots=True)
class AnswerDelta:
    """What has come since the last delta. The last one has `finish`."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)  # empty if the endpoint gives no token ids
    logprobs: list[float] = field(default_factory=list)  # of the sampled tokens, if requested
    alternatives: list[Alternatives] = field(default_factory=list)  # if requested
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    finish: Finish | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    stop_logprob: float | None = None  # of the stop token, which is not among `tokens`
    stop_version: int | None = None  # of the weights that sampled the stop token


class Answer:
    """One copy of a request, or one branch of a fork, with all that has come.

    `request` is that of this copy alone, with its seed. `generated` are the tokens before the first new one."""

    def __init__(self, request: InferenceRequest, index: int = 0) -> None:
        self.request = request
        self.index = index
        self.generated: tuple[int, ...] = request.generated
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives: list[Alternatives] = []
        self.versions: list[int] = []
        self.prompt_tokens: int | None = None  # None: the endpoint did not say
        self.prompt_logprobs: list[Alternatives | None] | None = None
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None
        self.stop_logprob: float | None = None
        self.stop_version: int | None = None
        self.failure: InferenceError | None = None
        self.started_at = 0.0  # by the event loop's clock
        self.heard_at: float | None = None  # when the newest token came, by the event loop's clock
        self.num_characters = 0
        self.num_deltas = 0  # that have come; an estimate of the tokens where the endpoint gives no token ids
        self.remote: tuple[str, int] | None = None  # the endpoint's id of it, and the index of its choice
        self._texts: list[str] = []
        self._num_read = [0, 0, 0, 0, 0]  # texts, tokens, logprobs, alternatives, versions
        self._is_end_read = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def has_begun(self) -> bool:
        return self.num_deltas > 0

    @property
    def is_done(self) -> bool:
        return self.finish is not None or self.failure is not None

    @property
    def num_tokens(self) -> int:
        """The number of new tokens; where the endpoint gives neither ids nor log-probabilities, of deltas."""
        return len(self.tokens) or len(self.logprobs) or self.num_deltas

    @property
    def stop_token(self) -> int | None:
        """The stop token that ended it, which is not among `tokens`. Foreign endpoints have theirs among `tokens`."""
        return self.stop_reason if isinstance(self.stop_reason, int) and self.stop_logprob is not None else None

    @property
    def sampled_tokens(self) -> list[int]:
        """All tokens that were sampled, the stop token included."""
        return self.tokens if self.stop_token is None else [*self.tokens, self.stop_token]

    @property
    def sampled_logprobs(self) -> list[float]:
        """The log-probabilities of `sampled_tokens`; empty if none were requested."""
        is_given = len(self.logprobs) == len(self.tokens)
        return [*self.logprobs, self.stop_logprob] if is_given and self.stop_logprob is not None else self.logprobs

    @property
    def sampled_versions(self) -> list[int]:
        """The versions of the weights that sampled `sampled_tokens`, if the endpoint gives them."""
        return self.versions if self.stop_version is None else [*self.versions, self.stop_version]

    def continuation(self, **sampling: Any) -> InferenceRequest:
        """Return the request that continues this answer from all its tokens, on any endpoint with the same model.

        Keywords replace fields of its sampling, for example a larger `max_tokens`."""
        changed = replace(self.request.sampling, **sampling)
        return replace(self.request, sampling=changed, generated=(*self.generated, *self.tokens))

    async def next_delta(self) -> AnswerDelta | None:
        """Wait for what has not been read; None after the end. Raise the failure after all that had come."""
        while True:
            if (delta := self._unread()) is not None:
                return delta
            if self.failure is not None:
                raise self.failure
            if self.finish is not None:
                return None
            await self.wait()

    async def wait(self) -> None:
        """Wait until something comes, or the answer ends."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    # -- for clients ----------------------------------------------------------------------------------------------

    def add(self, delta: AnswerDelta, now: float | None = None) -> None:
        """Add what came from the endpoint, unless the answer has ended. `now`: by default the event loop's clock."""
        if self.is_done:
            return
        if delta.text or delta.tokens:
            self.num_deltas += 1
            self.heard_at = asyncio.get_running_loop().time() if now is None else now
        if delta.text:
            self._texts.append(delta.text)
            self.num_characters += len(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.alternatives += delta.alternatives
        self.versions += delta.versions
        self.finish, self.stop_reason = delta.finish, delta.stop_reason
        self.stop_logprob, self.stop_version = delta.stop_logprob, delta.stop_version
        self.wake()

    def fail(self, error: InferenceError) -> None:
        if not self.is_done:
            self.failure = error
            self.wake()

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _unread(self) -> AnswerDelta | None:
        lists: list[list[Any]] = [self._texts, self.tokens, self.logprobs, self.alternatives, self.versions]
        unread = [items[count:] for items, count in zip(lists, self._num_read, strict=True)]
        is_last = self.finish is not None and not self._is_end_read
        if not any(unread) and not is_last:
            return None
        self._num_read = [len(items) for items in lists]
        self._is_end_read = self.finish is not None
        texts, tokens, logprobs, alternatives, versions = unread
        return AnswerDelta(
            "".join(texts),
            tokens,
            logprobs,
            alternatives,
            versions,
            self.finish,
            self.stop_reason,
            self.stop_logprob,
            self.stop_version,
        )
