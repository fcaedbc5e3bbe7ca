"""What a request may ask of an engine: lengths and token ids. Pure checks, before anything is scheduled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from craton.ml.serving.messages import Sampling, Submit
from craton.ml.serving.settings import ServingError


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a model and its KV cache."""

    max_length: int  # tokens of prompt and answer together
    vocabulary: int
    stop_tokens: frozenset[int]  # the model's own

    def check(self, request: Submit) -> None:
        """Raise ServingError if prompt, sampling or tokens to continue from are not possible."""
        if not request.prompt:
            raise ServingError("the prompt has no tokens; give at least one")
        if len(request.prompt) >= self.max_length:
            raise ServingError(
                f"the prompt has {len(request.prompt)} tokens; prompt and answer together may have {self.max_length}; "
                "shorten it"
            )
        self.check_sampling(request.sampling)
        self._check_generated(request)
        self._check_tokens((*request.prompt, *request.generated))

    def check_sampling(self, sampling: Sampling) -> None:
        if sampling.max_tokens < 1:
            raise ServingError(f"max_tokens is {sampling.max_tokens}; it must be 1 or more")
        self._check_tokens(sampling.logit_bias)

    def stops(self, sampling: Sampling) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self.stop_tokens)

    def _check_tokens(self, tokens: Iterable[int]) -> None:
        outside = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if outside is not None:
            raise ServingError(f"token {outside} is not in the model's vocabulary of {self.vocabulary}")

    def _check_generated(self, request: Submit) -> None:
        count = len(request.generated)
        if count > request.sampling.max_tokens:
            raise ServingError(
                f"{count} generated tokens to continue from exceed max_tokens {request.sampling.max_tokens}, which "
                "counts them; raise it"
            )
        if len(request.prompt) + count > self.max_length:
            raise ServingError(
                f"the prompt's {len(request.prompt)} tokens and {count} generated tokens exceed the {self.max_length} "
                "that prompt and answer together may have"
            )
        stops = self.stops(request.sampling)
        ends = [token for token in request.generated if token in stops]
        if ends:
            raise ServingError(
                f"token {ends[0]} among the generated tokens ends an answer; continue from the tokens before it, or "
                "set ignore_eos"
            )
