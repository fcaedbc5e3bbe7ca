"""A client of any endpoint with OpenAI's API. What it can give is found out by small requests, once, when it matters.

Copies are separate requests with their own seeds. A fork is a new request with a longer prompt: the text so far, or the
tokens where the endpoint gives and takes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from craton.ml.serving.clients.answer import Answer, AnswerDelta
from craton.ml.serving.clients.capabilities import Capabilities
from craton.ml.serving.clients.errors import (
    AnswerTimeoutError,
    BrokenStreamError,
    InferenceError,
    MissingCapabilityError,
    ProtocolError,
    RequestRefusedError,
    ServerFailedError,
)
from craton.ml.serving.clients.http_client import HttpClient
from craton.ml.serving.clients.server_client import COMPLETIONS, CONTINUED, ServerClient, is_ours
from craton.ml.serving.messages import Finish

CHAT = "/v1/chat/completions"
TRIAL_PROMPT = "Once upon a time"
TRIAL_TOKENS = [1, 2, 3]
TRIAL_QUESTION = {"role": "user", "content": TRIAL_PROMPT}
TRIAL_SPACE = "\n\n"  # ends the steps of a search
MAX_TRIAL_CHARACTERS = 100_000
SEEDED_TOKENS = 8  # of a trial with a seed, at a high temperature
# Of a trial that shows whether log-probabilities follow the temperature. The likeliest token becomes nearly certain;
# vLLM raises lower temperatures to this one.
LOW_TEMPERATURE, MIN_CHANGE = 0.01, 1e-3
SAMPLED_MODE = {"logprobs_mode": "sampled"}  # a field of our own server
FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "tool_calls": "stop", "content_filter": "stop"}


@dataclass(slots=True)
class TrialAnswer(AnswerDelta):
    """The whole answer to a trial request."""

    prompt_tokens: int | None = None  # None: the endpoint does not say


class OpenAIClient(HttpClient):
    """A text or chat without further wishes is sent without trials."""

    assumed = frozenset({"text_prompts", "chat_prompts", "stop_strings"})
    reads_usage = False  # ask for the number of prompt tokens, which come after the answer
    _takes_mode = False  # whether the endpoint takes SAMPLED_MODE

    async def weights_version(self) -> int:
        raise MissingCapabilityError(
            f"{self.endpoint} does not give weights versions; use a Craton server (ServerClient)"
        )

    async def _start(self, answers: list[Answer]) -> None:
        await self.models()
        for answer in answers:
            self._run([answer])

    async def _start_branches(self, parent: Answer, branches: list[Answer]) -> None:
        request = parent.request
        prompt: Any = request.prompt
        if request.prompt_kind == "chat":
            raise MissingCapabilityError(
                f"{self.endpoint} cannot continue the message of a chat, so it cannot be forked; send the chat as text"
            )
        if request.prompt_kind == "token" and not parent.tokens and parent.has_begun:
            raise MissingCapabilityError(f"{self.endpoint} gives no token ids, so a prompt of tokens cannot be forked")
        longer = prompt + parent.text if request.prompt_kind == "text" else (*prompt, *parent.tokens)
        for branch in branches:
            sampling = branch.request.sampling
            left = sampling.max_tokens - parent.num_tokens
            if left < 1:
                raise RequestRefusedError(
                    f"{self.endpoint}: the answer has already {parent.num_tokens} tokens; give the fork a larger "
                    f"max_tokens than {sampling.max_tokens}"
                )
            branch.request = replace(branch.request, prompt=longer, sampling=replace(sampling, max_tokens=left))
        for branch in branches:
            self._run([branch])

    def _can_continue(self, answer: Answer) -> bool:
        return False

    async def _read_answers(self, answers: list[Answer]) -> None:
        (answer,) = answers
        path, body = self._request(answer)
        last: AnswerDelta | None = None
        try:
            async with aclosing(self._events(path, body)) as events:
                async for event in events:
                    if self.reads_usage:
                        answer.prompt_tokens = _prompt_tokens(event) or answer.prompt_tokens
                    for choice in event.get("choices") or ():
                        delta = self._parse(path, choice)
                        if delta.finish is not None and self.reads_usage:
                            last = delta  # usage follows
                        else:
                            self._add(answer, delta)
                    if answer.is_done or (last is not None and answer.prompt_tokens is not None):
                        return  # [DONE] may follow
        finally:
            if last is not None and answer in self._open:
                self._add(answer, last)

    def _request(self, answer: Answer) -> tuple[str, dict[str, Any]]:
        """Return path and body, with OpenAI's fields and those that the endpoint was found to take."""
        request, sampling = answer.request, answer.request.sampling
        body: dict[str, Any] = {"model": self.model, "max_tokens": sampling.max_tokens, "stream": True}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        for name in ("presence_penalty", "frequency_penalty"):
            if value := getattr(sampling, name):
                body[name] = value
        if self.reads_usage:
            body["stream_options"] = {"include_usage": True}
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if request.stop:
            body["stop"] = list(request.stop)
        if self._capabilities is not None and self._capabilities.token_ids:
            body["return_token_ids"] = True
        if self._takes_mode and sampling.logprobs is not None:
            body["logprobs_mode"] = sampling.logprobs_mode
        if request.prompt_kind == "chat":
            body["messages"] = list(request.prompt)
            body |= CONTINUED if request.continues_message else {}
            body |= {"logprobs": True} if sampling.logprobs is not None else {}
            return CHAT, body
        body["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        # Some servers take 0 as "none".
        body |= {"logprobs": 1} if sampling.logprobs is not None else {}
        return COMPLETIONS, body

    def _parse(self, path: str, choice: Mapping[str, Any]) -> AnswerDelta:
        try:
            return _delta(choice)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                f"{self.endpoint}: a chunk of {path} has another form ({type(error).__name__}: {error})"
            ) from None

    # -- trials -------------------------------------------------------------------------------------------------------

    async def _find_capabilities(self) -> Capabilities:
        completion, refusal = await self._first_success(
            COMPLETIONS,
            {"prompt": TRIAL_PROMPT, "max_tokens": 2, "temperature": 0},
            [{"logprobs": 1, "return_token_ids": True}, {"logprobs": 1}, {"return_token_ids": True}, {}],
        )
        chat, _ = await self._first_success(
            CHAT,
            {"messages": [{"role": "user", "content": TRIAL_PROMPT}], "max_tokens": 2, "temperature": 0},
            [{"logprobs": True}, {}],
        )
        if completion is None and chat is None:
            raise ProtocolError(f"{self.endpoint}: neither {COMPLETIONS} nor {CHAT} answers a trial request: {refusal}")
        given = completion or chat
        assert given is not None
        by_tokens = None
        if completion is not None:
            body = {"prompt": TRIAL_TOKENS, "max_tokens": 2, "temperature": 0}
            by_tokens, _ = await self._first_success(COMPLETIONS, body, [{}])
        return Capabilities(
            text_prompts=completion is not None,
            chat_prompts=chat is not None,
            token_prompts=by_tokens is not None,
            token_ids=bool(completion and completion.tokens),
            logprobs=bool(given.logprobs),
            sampled_logprobs=bool(given.logprobs) and await self._has_sampled_logprobs(given, completion is None),
            seeds=await self._has_seeds(CHAT if completion is None else COMPLETIONS),
            stop_strings=True,
            **(await self._continued() if chat is not None else {}),
        )

    async def _continued(self) -> dict[str, bool]:
        """Whether an answer goes on behind the text of the assistant's last message, and behind its white space: the
        prompt then lacks what ends a message and begins another one, and has the white space. Servers may ignore
        fields that they do not know, so the number of prompt tokens decides."""
        counts = []
        for text, fields in (("Once", {}), ("Once", CONTINUED), ("Once" + TRIAL_SPACE, CONTINUED)):
            messages = [TRIAL_QUESTION, {"role": "assistant", "content": text}]
            body = {"messages": messages, "max_tokens": 1, "temperature": 0, "stream_options": {"include_usage": True}}
            answer, _ = await self._first_success(CHAT, {**body, **fields}, [{}])
            counts.append(None if answer is None else answer.prompt_tokens)
        ended, continued, spaced = counts
        continues = ended is not None and continued is not None and continued < ended
        keeps = continues and spaced is not None and continued is not None and spaced > continued
        return {"continued_chats": continues, "continued_whitespace": keeps}

    async def _has_sampled_logprobs(self, greedy: AnswerDelta, is_chat: bool) -> bool:
        """Whether log-probabilities are those of the distribution that is sampled: then one at a low temperature is
        larger than that of the model's likeliest token."""
        body: dict[str, Any] = {"prompt": TRIAL_PROMPT, "logprobs": 1}
        if is_chat:
            body = {"messages": [{"role": "user", "content": TRIAL_PROMPT}], "logprobs": True}
        body |= {"max_tokens": 2, "temperature": LOW_TEMPERATURE}
        path = CHAT if is_chat else COMPLETIONS
        for extra in (SAMPLED_MODE, {}):
            answer, _ = await self._first_success(path, body, [extra])
            if answer is not None and answer.logprobs and answer.logprobs[0] > greedy.logprobs[0] + MIN_CHANGE:
                self._takes_mode = bool(extra)
                return True
        return False

    async def _has_seeds(self, path: str) -> bool:
        """Whether a seed gives the same text twice, and another seed another one: then the server uses it. One after
        the other: some servers have one generator for all requests."""
        texts = []
        prompt: dict[str, Any] = {"prompt": TRIAL_PROMPT}
        if path == CHAT:
            prompt = {"messages": [{"role": "user", "content": TRIAL_PROMPT}]}
        for seed in (1, 1, 2):
            body = {**prompt, "max_tokens": SEEDED_TOKENS, "temperature": 2, "seed": seed}
            answer, _ = await self._first_success(path, body, [{}])
            texts.append(None if answer is None else answer.text)
        return texts[0] is not None and texts[0] == texts[1] != texts[2]

    async def _first_success(
        self, path: str, body: Mapping[str, Any], extras: list[dict[str, Any]]
    ) -> tuple[TrialAnswer | None, InferenceError | None]:
        """Return the answer to the first of several trial requests that is not refused, and the last refusal."""
        refusal: InferenceError | None = None
        for extra in extras:
            try:
                trial = {"model": self.model, **body, **extra, "stream": True}
                return await self._with_retries(partial(self._trial, path, trial)), refusal
            except (RequestRefusedError, ServerFailedError, BrokenStreamError) as error:
                refusal = error
        return None, refusal

    async def _trial(self, path: str, body: Mapping[str, Any]) -> TrialAnswer:
        whole = TrialAnswer()
        try:
            async with asyncio.timeout(self.timeouts.first_token or None), aclosing(self._events(path, body)) as events:
                async for event in events:
                    whole.prompt_tokens = _prompt_tokens(event) or whole.prompt_tokens
                    choices = event.get("choices") or []
                    for choice in choices if isinstance(choices, list) else []:
                        delta = self._parse(path, choice)
                        whole.text += delta.text
                        whole.tokens += delta.tokens
                        whole.logprobs += delta.logprobs
                    if len(whole.text) > MAX_TRIAL_CHARACTERS:
                        raise ProtocolError(f"{self.endpoint}: the answer to a trial request does not end")
        except TimeoutError:
            raise AnswerTimeoutError(f"{self.endpoint}: no answer to a trial request in time") from None
        return whole


async def connect(url: str, **options: Any) -> ServerClient | OpenAIClient:
    """Return the client for a server: ServerClient for one of ours, else OpenAIClient; `options` are theirs."""
    ours = ServerClient(url, **options)
    try:
        if is_ours(await ours.models()):
            return ours
    except BaseException:
        await ours.close()
        raise
    await ours.close()
    return OpenAIClient(url, **options)


def _delta(choice: Mapping[str, Any]) -> AnswerDelta:
    """Return what a chunk of a completion or a chat adds."""
    message = choice.get("delta")
    text = choice.get("text") if message is None else message.get("content")
    reason = choice.get("finish_reason")
    finish: Finish | None = None if reason is None else FINISHES.get(reason, "stop")
    return AnswerDelta(
        str(text or ""),
        [int(token) for token in choice.get("token_ids") or ()],
        _logprobs(choice.get("logprobs")),
        finish=finish,
        stop_reason=choice.get("stop_reason"),
        stop_logprob=choice.get("stop_logprob"),
        stop_version=choice.get("stop_weights_version"),
    )


def _prompt_tokens(event: Mapping[str, Any]) -> int | None:
    """Return the number of prompt tokens in an event with usage, if it is one."""
    usage = event.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    return count if type(count) is int else None


def _logprobs(scores: Mapping[str, Any] | None) -> list[float]:
    """Return the log-probabilities of the sampled tokens, of a completion or a chat."""
    if not scores:
        return []
    if (content := scores.get("content")) is not None:
        return [float(entry["logprob"]) for entry in content]
    return [float(value) for value in scores.get("token_logprobs") or () if value is not None]
