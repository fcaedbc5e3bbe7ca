"""A client of a Craton server: everything that its engine gives, over HTTP.

The copies of a request are one HTTP request, so they share the KV cache of their prompt. A stream that breaks off is
continued with the tokens that it had, and gives the tokens that it would have given (in fp32).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from craton.ml.serving.clients.answer import Answer, AnswerDelta, InferenceRequest
from craton.ml.serving.clients.capabilities import Capabilities
from craton.ml.serving.clients.errors import BrokenStreamError, InferenceError, ProtocolError
from craton.ml.serving.clients.http_client import HttpClient
from craton.ml.serving.messages import Finish, Sampling

COMPLETIONS, FORK, ABORT = "/v1/completions", "/v1/fork", "/v1/abort"
OWNER, VERSION = "craton", "weights_version"  # of a model's card
GRAMMAR_KEYS = {"json_schema": "json", "regex": "regex", "lark": "grammar"}  # of `structured_outputs`


# Fields that continue the last message of a chat: those of vLLM and SGLang, and ours.
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


class ServerClient(HttpClient):
    """The server itself refuses text prompts and chats if it has no tokenizer or template."""

    async def _find_capabilities(self) -> Capabilities:
        if not is_ours(await self.models()):
            raise ProtocolError(f"{self.endpoint}: not a Craton server with forks; use OpenAIClient")
        return Capabilities(
            text_prompts=True,
            chat_prompts=True,
            token_prompts=True,
            token_ids=True,
            logprobs=True,
            sampled_logprobs=True,
            seeds=True,
            stop_strings=True,
            extended_sampling=True,
            grammars=True,
            adapters=True,
            continued_requests=True,
            continued_chats=True,
            continued_whitespace=True,
            shared_forks=True,
            weights_versions=True,
        )

    async def weights_version(self) -> int:
        """Return the version that the engine reported last; it reports twice a second."""
        await self.require("weights_versions")
        path = f"/v1/models/{quote(str(self.model))}"
        card = await self._get(path)
        if not isinstance(version := card.get(VERSION), int):
            raise ProtocolError(f"{self.endpoint}: {path} has no {VERSION}")
        return version

    async def prompt_tokens(self, request: InferenceRequest) -> tuple[int, ...] | None:
        if request.prompt_kind == "token":
            return await super().prompt_tokens(request)
        await self.models()
        asked: dict[str, Any] = {"prompt": request.prompt}
        if request.prompt_kind == "chat":
            asked = {"messages": list(request.prompt), **(CONTINUED if request.continues_message else {})}
        return await self._tokenize({"model": request.adapter or self.model, **asked})

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        await self.models()
        return await self._tokenize({"model": self.model, "prompt": text, "add_special_tokens": False})

    async def _tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(_integers((await self._post("/tokenize", body)).get("tokens")))

    async def _start(self, answers: list[Answer]) -> None:
        request = answers[0].request
        if request.prompt_kind == "chat":
            tokens = await self.prompt_tokens(request)
            for answer in answers:
                answer.request = replace(answer.request, prompt=tokens or ())
        # The server continues one answer at a time.
        for group in [[answer] for answer in answers] if request.generated else [answers]:
            self._run(group)

    async def _start_branches(self, parent: Answer, branches: list[Answer]) -> None:
        while parent.remote is None and not parent.is_done:
            await parent.wait()
        if parent.is_done or parent.remote is None:
            raise self._ended_error()
        self._read_in_background(branches, self._read_branches(*parent.remote, branches))

    async def _read_branches(self, id: str, index: int, branches: list[Answer]) -> None:  # noqa: A002
        fields = [sampling_fields(branch.request.sampling) for branch in branches]
        asked = [branch.request.sampling.logprobs for branch in branches]
        logprobs = max((count for count in asked if count is not None), default=None)
        common = ("logprobs", "structured_outputs")  # once for all branches, or as in the parent
        samplings = [{key: value for key, value in each.items() if key not in common} for each in fields]
        body = {"id": id, "index": index, "branches": samplings, "logprobs": logprobs}
        error: InferenceError = BrokenStreamError(f"{self.endpoint}: the stream ended before its branches")
        try:
            await self._with_retries(lambda: self._read_stream(FORK, body, branches))
        except InferenceError as failure:
            error = failure
        for branch in branches:
            if branch.has_begun and isinstance(error, BrokenStreamError):
                self._run([branch], tries=1)
            elif not branch.is_done:
                self._fail(branch, error)

    async def _read_answers(self, answers: list[Answer]) -> None:
        request = answers[0].request
        body: dict[str, Any] = {"model": request.adapter or self.model, "prompt": request.prompt, "n": len(answers)}
        body |= sampling_fields(request.sampling)
        body |= {"stop": list(request.stop), "priority": request.priority}
        if len(answers) == 1:
            body["continue_from"] = [*answers[0].generated, *answers[0].tokens]
        await self._read_stream(COMPLETIONS, body, answers)

    async def _read_stream(self, path: str, body: Mapping[str, Any], answers: list[Answer]) -> None:
        body = {**body, "stream": True, "return_token_ids": True}
        async with aclosing(self._events(path, body)) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    try:
                        self._take(answers[choice["index"]], str(event["id"]), choice)
                    except InferenceError:
                        raise
                    except (KeyError, IndexError, TypeError, ValueError) as error:
                        raise ProtocolError(
                            f"{self.endpoint}: a chunk of {path} has another form ({type(error).__name__}: {error})"
                        ) from None

    def _take(self, answer: Answer, id: str, choice: Mapping[str, Any]) -> None:  # noqa: A002
        if answer not in self._open:
            if answer.remote is None:  # it was aborted before its id was known
                answer.remote = (id, choice["index"])
                self._abort_copy(answer)
            return
        answer.remote = (id, choice["index"])
        if "generated_token_ids" in choice:
            answer.generated = tuple(_integers(choice["generated_token_ids"]))
        if "prompt_token_ids" in choice:
            answer.prompt_tokens = len(choice["prompt_token_ids"])
        scores = (answer.request.sampling.logprobs is not None and choice.get("logprobs")) or {}
        finish: Finish | None = choice.get("finish_reason")
        reason = choice.get("stop_reason")
        if finish == "length" and reason == "abort":
            finish, reason = "abort", None
        delta = AnswerDelta(
            str(choice["text"]),
            _integers(choice.get("token_ids")),
            [float(value) for value in scores.get("token_logprobs") or ()],
            versions=_integers(choice.get("weights_versions")),
            finish=finish,
            stop_reason=reason,
            stop_logprob=choice.get("stop_logprob"),
            stop_version=choice.get("stop_weights_version"),
        )
        self._add(answer, delta)

    def _can_continue(self, answer: Answer) -> bool:
        return True

    def _abort_copy(self, answer: Answer) -> None:
        if answer.remote is not None:
            self._spawn(self._send_abort(*answer.remote))

    async def _send_abort(self, id: str, index: int) -> None:  # noqa: A002
        with suppress(InferenceError):  # it may have ended, and the end of its stream ends it as well
            await self._post(ABORT, {"id": id, "index": index})


def is_ours(cards: list[dict[str, object]]) -> bool:
    return bool(cards) and all(card.get("owned_by") == OWNER and VERSION in card for card in cards)


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return all fields of a sampling as our server names them: none is left to the model's defaults."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "logprobs_mode": sampling.logprobs_mode,
    }
    grammar = sampling.grammar
    if grammar is not None:
        is_any = grammar.kind == "json_object"
        fields["structured_outputs"] = {"json_object": True} if is_any else {GRAMMAR_KEYS[grammar.kind]: grammar.text}
    return fields


def _integers(values: Any) -> list[int]:
    if not all(type(value) is int for value in values or ()):
        raise ValueError("token ids are not whole numbers")
    return list(values or ())
