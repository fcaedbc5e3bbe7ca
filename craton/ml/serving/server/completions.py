"""/v1/completions: completes one or several prompts, given as text or token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from craton.ml.serving.messages import Sampling
from craton.ml.serving.server.errors import BadRequestError
from craton.ml.serving.server.generation import Answers, Choice, SubmittedPrompt, respond, to_json
from craton.ml.serving.server.http_service import HttpService
from craton.ml.serving.server.protocol import MAX_CHOICES, CompletionRequest
from craton.ml.serving.text import (
    Addition,
    AnswerReader,
    TokenScore,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)

DEFAULT_TOKENS = 16  # OpenAI's


async def complete(service: HttpService, http: Request, request: CompletionRequest) -> Response:
    ignored = request.ignored(request.n)
    with service.admitted():
        answers = await _submit(service, request)
    return await respond(http, answers, ignored)


@dataclass(frozen=True)
class ReadyPrompt:
    """A prompt that was checked and tokenized. `echo`: its text, if the answer begins with it."""

    tokens: tuple[int, ...]
    sampling: Sampling
    echo: str


async def ready_prompts(service: HttpService, request: CompletionRequest) -> list[ReadyPrompt]:
    """Check the prompts of a request and tokenize them."""
    prompts = _prompts(request.prompt)
    if len(prompts) * request.n > MAX_CHOICES:
        raise BadRequestError(
            f"{len(prompts)} prompts with n {request.n} are {len(prompts) * request.n} answers; the maximum is "
            f"{MAX_CHOICES} per request",
            "prompt",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequestError("prompt_logprobs is not supported with stream: true", "prompt_logprobs")
    if request.continue_from and (len(prompts) > 1 or request.echo):
        raise BadRequestError(
            f"continue_from continues the answer to one prompt, without echo; got {len(prompts)} prompts, echo "
            f"{str(request.echo).lower()}",
            "continue_from",
        )
    grammar = request.grammar()
    scored = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        scored = max(request.logprobs, scored or 0)
    ready = []
    for prompt in prompts:
        tokens = await service.encode(prompt, request.add_special_tokens) if isinstance(prompt, str) else prompt
        service.check_prompt(tokens)
        sampling = service.sampling(
            request, len(tokens), request.max_tokens, DEFAULT_TOKENS, request.logprobs, scored, grammar
        )
        echo = ""
        if request.echo:
            echo = prompt if isinstance(prompt, str) else service.texts("echo").decode(list(tokens))
        ready.append(ReadyPrompt(tuple(tokens), sampling, echo))
    return ready


async def _submit(service: HttpService, request: CompletionRequest) -> CompletionAnswers:
    adapter = service.adapter(request.model)
    ready = await ready_prompts(service, request)
    answers = CompletionAnswers(service, request)
    for prompt in ready:
        await answers.submit(prompt.tokens, prompt.sampling, adapter, prompt.echo)
    return answers


class CompletionChoice(Choice):
    """Also collects the text and log-probs of a response that is not streamed."""

    def __init__(self, index: int, prompt: SubmittedPrompt, reader: AnswerReader) -> None:
        super().__init__(index, prompt, reader)
        self.texts: list[str] = []
        self.logprobs: dict[str, list[Any]] = {}


class CompletionAnswers(Answers[CompletionChoice]):
    id_prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"
    request: CompletionRequest

    def make_choice(self, index: int, prompt: SubmittedPrompt, reader: AnswerReader) -> CompletionChoice:
        return CompletionChoice(index, prompt, reader)

    def text_fields(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def add(self, choice: CompletionChoice, addition: Addition, events: list[str]) -> None:
        is_first = not choice.has_begun
        text = choice.prompt.echo + addition.text if is_first else addition.text
        logprobs = None if self.request.logprobs is None else self._logprobs(choice, addition, is_first)
        if not self.request.stream:
            choice.texts.append(text)
            for key, values in (logprobs or {}).items():
                choice.logprobs.setdefault(key, []).extend(values)
            return
        if logprobs is None and addition.finish is None and not self.request.return_token_ids and not is_first:
            if text:
                events.append(choice.head + to_json(text) + choice.tail)
            return
        events.append(self.event(choice, self._fields(choice, text, logprobs, is_first, addition)))

    def whole_choice(self, choice: CompletionChoice) -> dict[str, Any]:
        logprobs = None if self.request.logprobs is None else choice.logprobs
        whole = Addition(tokens=choice.tokens, versions=choice.versions, finish=choice.finish, reason=choice.reason)
        fields = self._fields(choice, "".join(choice.texts), logprobs, True, whole)
        if self.request.prompt_logprobs is not None and choice.prompt.logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                choice.prompt.logprobs, self.request.prompt_logprobs, self.vocabulary
            )
        return {"index": choice.index, **fields}

    def _fields(
        self,
        choice: CompletionChoice,
        text: str,
        logprobs: dict[str, Any] | None,
        is_first: bool,
        addition: Addition,
    ) -> dict[str, Any]:
        fields = {
            **self.text_fields(text),
            "logprobs": logprobs,
            "finish_reason": addition.finish,
            "stop_reason": addition.reason,
            **self.token_fields(addition.tokens, addition.versions),
            **self.stop_fields(choice),
        }
        if is_first:
            fields["seed"] = choice.seed
            if self.request.return_token_ids:
                fields |= self.first_token_fields(choice)
        return fields

    def first_token_fields(self, choice: CompletionChoice) -> dict[str, Any]:
        """Return the token ids before the answer, for its first chunk."""
        return {"prompt_token_ids": list(choice.prompt.tokens)}

    def _logprobs(self, choice: CompletionChoice, addition: Addition, is_first: bool) -> dict[str, list[Any]]:
        top = self.request.logprobs or 0
        scores = addition.scores
        if addition.stop is not None and not self.request.return_token_ids:
            # As vLLM does: clients count on a log-prob for each generated token (lm-eval cuts off the last one).
            assert isinstance(addition.reason, int)
            scores = [*scores, TokenScore(addition.reason, addition.stop[0], None, choice.reader.num_characters)]
        result = completion_logprobs(scores, top, self.vocabulary, len(choice.prompt.echo))
        if is_first and self.request.echo and choice.prompt.logprobs is not None:
            echoed = echoed_logprobs(choice.prompt.tokens, choice.prompt.logprobs, top, self.vocabulary)
            return {key: echoed[key] + result[key] for key in result}
        return result


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts: `prompt` may be a text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return list(prompt) or [[]]
