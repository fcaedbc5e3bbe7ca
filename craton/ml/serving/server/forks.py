"""/v1/fork and /v1/abort: what a client may do to its running requests, which it names by the id of their response.

An id is random, and only its own client receives it. It is valid until the response ends.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from craton.ml.serving.messages import OutputDelta, Sampling
from craton.ml.serving.server.completions import CompletionAnswers, CompletionChoice
from craton.ml.serving.server.errors import BadRequestError, NotFoundError
from craton.ml.serving.server.generation import TOKEN_CHARACTERS, Answers, SubmittedPrompt, respond
from craton.ml.serving.server.http_service import TOO_LONG, HttpService, draw_seed, logit_bias_of
from craton.ml.serving.server.protocol import AbortRequest, BranchSampling, ForkRequest

PLAIN_FIELDS = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "max_tokens", "logprobs_mode"),
)


async def fork_answer(service: HttpService, http: Request, request: ForkRequest) -> Response:
    ignored = request.ignored(len(request.branches))
    with service.admitted():
        parent = _running(service, request.id)
        if not isinstance(parent, CompletionAnswers):
            raise BadRequestError(
                "only completions can be forked, and this is a chat; send its messages to /tokenize and the tokens to "
                "/v1/completions",
                "id",
            )
        number, copy = _open_choice(parent, request.id, request.index)
        prompt = parent.choices[number, copy].prompt
        tokens = parent.prompt_tokens if isinstance(parent, ForkAnswers) else prompt.tokens
        samplings = [
            _sampling(service, prompt.sampling, len(tokens), branch, request.logprobs) for branch in request.branches
        ]
        answers = ForkAnswers(service, parent, request, tokens)
        answers.start(number, copy, samplings)
    return await respond(http, answers, ignored)


def abort_answers(service: HttpService, request: AbortRequest) -> int:
    """Abort a choice of a running request, or all; return how many had not ended."""
    request.ignored()
    answers = _running(service, request.id)
    if request.index is None:
        keys = [key for key, choice in answers.choices.items() if choice.finish is None]
    else:
        keys = [_open_choice(answers, request.id, request.index)]
    for number, copy in keys:
        answers.exchange.abort(number, copy)
    return len(keys)


class ForkAnswers(CompletionAnswers):
    """The branches of a completion. The tokens before the fork come with the first delta of each."""

    def __init__(
        self, service: HttpService, parent: CompletionAnswers, request: ForkRequest, prompt: tuple[int, ...]
    ) -> None:
        chosen = {name: getattr(request, name) for name in ("stream", "stream_options", "return_token_ids")}
        if request.logprobs is not None:
            chosen["logprobs"] = request.logprobs
        others: dict[str, Any] = {"n": len(request.branches), "max_tokens": None, "continue_from": [], "echo": False}
        super().__init__(service, parent.request.model_copy(update={**chosen, **others, "prompt_logprobs": None}))
        self.prompt_tokens = prompt  # of the request that was forked first
        self._generated: dict[int, list[int]] = {}  # before the fork, by choice

    def start(self, parent: int, copy: int, samplings: list[Sampling]) -> None:
        for number, sampling in zip(self.exchange.fork(parent, copy, samplings), samplings, strict=True):
            assert sampling.seed is not None
            # The prompt is in the usage of the request that is forked.
            prompt = SubmittedPrompt((), sampling, self._service.metrics.meter(0, 1, sampling.max_tokens))
            choice = self.make_choice(len(self.choices), prompt, self._reader(self.prompt_tokens, sampling))
            self._prepare(choice, sampling.seed)
            self._open(number, prompt, [choice])

    async def pieces(self) -> list[OutputDelta]:
        pieces = await super().pieces()
        for piece in pieces:
            choice = self.choices[piece.id, piece.index]
            if not piece.generated or choice.index in self._generated:
                continue
            self._generated[choice.index] = generated = piece.generated
            await self._service.aside(len(generated) * TOKEN_CHARACTERS, partial(choice.reader.replay, generated))
            if choice.reader.is_stopped:  # before the front end could end the parent
                piece.tokens, piece.logprobs, piece.alternatives, piece.versions = [], [], [], []
                piece.finish, piece.stop_token = "stop", None
                self.exchange.end(piece.id, piece.index)
        return pieces

    def first_token_fields(self, choice: CompletionChoice) -> dict[str, Any]:
        return {"generated_token_ids": self._generated.get(choice.index, [])}


def _running(service: HttpService, id: str) -> Answers[Any]:  # noqa: A002
    answers = service.running.get(id)
    if not isinstance(answers, Answers):
        raise NotFoundError(
            f"no running request has the id {id!r}; an id is valid from the first chunk of its response to the last",
            "id",
            "request_not_found",
        )
    return answers


def _open_choice(answers: Answers[Any], id: str, index: int) -> tuple[int, int]:  # noqa: A002
    for key, choice in answers.choices.items():
        if choice.index == index and choice.finish is None:
            return key
    if index < len(answers.choices):
        raise NotFoundError(f"choice {index} of {id!r} has ended", "index", "request_not_found")
    raise BadRequestError(f"{id!r} has {len(answers.choices)} choices, and index is {index}", "index")


def _sampling(
    service: HttpService, parent: Sampling, num_prompt_tokens: int, branch: BranchSampling, logprobs: int | None
) -> Sampling:
    """Return the sampling of a branch: what it gives, and the parent's otherwise."""
    branch.ignored()
    ready = service.link.working()
    room = ready.max_length - num_prompt_tokens
    if branch.max_tokens is not None and branch.max_tokens > room:
        raise BadRequestError(
            f"the prompt's {num_prompt_tokens} tokens plus max_tokens {branch.max_tokens} exceed the model's context "
            f"of {ready.max_length} tokens; lower max_tokens to {room} or less",
            "branches",
            TOO_LONG,
        )
    chosen = {name: value for name in PLAIN_FIELDS if (value := getattr(branch, name)) is not None}
    if branch.top_k is not None:
        chosen["top_k"] = max(branch.top_k, 0)
    if branch.logit_bias is not None:
        chosen["logit_bias"] = logit_bias_of(branch.logit_bias, ready.vocabulary)
    if branch.stop_token_ids is not None:
        service.check_tokens(branch.stop_token_ids, "branches")
        chosen["stop_tokens"] = tuple(dict.fromkeys(branch.stop_token_ids))
    if logprobs is not None:
        chosen["logprobs"] = logprobs
    seed = draw_seed() if branch.seed is None else branch.seed
    sampling = replace(parent, seed=seed, prompt_logprobs=None, **chosen)
    if sampling.min_tokens > sampling.max_tokens:
        raise BadRequestError(f"min_tokens {sampling.min_tokens} exceeds max_tokens {sampling.max_tokens}", "branches")
    return sampling
