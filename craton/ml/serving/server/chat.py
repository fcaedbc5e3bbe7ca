"""/v1/chat/completions: messages in, the assistant's next message out, with tool calls and reasoning separated."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from craton.ml.serving.messages import Grammar, Sampling
from craton.ml.serving.server.errors import BadRequestError
from craton.ml.serving.server.generation import Answers, Choice, SubmittedPrompt, respond, to_json
from craton.ml.serving.server.http_service import HttpService, message_text
from craton.ml.serving.server.protocol import ChatRequest, NamedTool, check_grammar
from craton.ml.serving.server.thinking import CLOSING, Thinking, thinking_of
from craton.ml.serving.server.tools import (
    CallPart,
    Parsed,
    Parser,
    ReasoningParser,
    Schemas,
    ToolChoice,
    begins_inside,
    choice_grammar,
    ends_inside,
    keeps_special_tokens,
    make_parser,
)
from craton.ml.serving.text import Addition, AnswerReader, ThinkingCounter, chat_logprobs, prompt_logprobs

SHOWN_TOOLS = 8  # in an error message


async def chat(service: HttpService, http: Request, request: ChatRequest) -> Response:
    ignored = request.ignored(request.n)
    with service.admitted():
        answers = await _submit(service, request)
    return await respond(http, answers, [*ignored, *answers.ignored_fields])


@dataclass(frozen=True)
class ReadyChat:
    """A chat that was checked and rendered: what the engine gets, and how its answer is read."""

    tokens: tuple[int, ...]
    sampling: Sampling
    adapter: str | None
    choice: ToolChoice
    schemas: Schemas
    thinking: Thinking
    has_reasoning: bool
    is_inside: bool  # the prompt has opened the reasoning
    is_continued: bool  # the prompt has the beginning of the answer


async def ready_chat(service: HttpService, request: ChatRequest) -> ReadyChat:
    """Check a chat and render it."""
    adapter = service.adapter(request.model)
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequestError("prompt_logprobs is not supported with stream: true", "prompt_logprobs")
    choice, schemas = _tool_choice(request), _schemas(request)
    if choice.kind == "named" and choice.name not in schemas:
        names = ", ".join(list(schemas)[:SHOWN_TOOLS]) or "none"
        raise BadRequestError(f"tool_choice names {choice.name!r}, which is not a tool; tools: {names}", "tool_choice")
    tools = None if choice.kind == "none" else request.tools
    grammar = _grammar(service, request, choice, schemas)
    thinking = thinking_of(service, request, grammar is not None)
    text = await service.render(
        request.messages, tools, request.add_generation_prompt, thinking.options, request.continue_final_message
    )
    known = message_text(request.messages[-1]) if request.continue_final_message else ""
    is_inside = begins_inside(text) or ends_inside(known)
    if thinking.budget == 0 and is_inside:
        text, known, is_inside = text.rstrip("\n") + CLOSING, "", False
    tokens = await service.encode(text, with_special_tokens=False)
    service.check_prompt(tokens)
    sampling = service.sampling(
        request,
        len(tokens),
        request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens,
        None,
        (request.top_logprobs or 0) if request.logprobs else None,
        request.prompt_logprobs,
        grammar,
    )
    # With a grammar there is no reasoning: the whole output is the answer.
    has_reasoning = service.settings.reasoning_style == "think" and sampling.grammar is None
    is_continued = bool(known) and not begins_inside(text)
    return ReadyChat(
        tuple(tokens), sampling, adapter, choice, schemas, thinking, has_reasoning, is_inside, is_continued
    )


async def _submit(service: HttpService, request: ChatRequest) -> ChatAnswers:
    ready = await ready_chat(service, request)
    answers = ChatAnswers(service, request, ready)
    keep_special = ready.choice.kind == "auto" and keeps_special_tokens(service.tool_style)
    await answers.submit(ready.tokens, ready.sampling, ready.adapter, keep_special=keep_special)
    return answers


class ChatChoice(Choice):
    """One message of the assistant, so far."""

    def __init__(self, index: int, prompt: SubmittedPrompt, reader: AnswerReader, parser: Parser) -> None:
        super().__init__(index, prompt, reader)
        self.parser = parser
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.num_replayed_calls = 0  # of these, begun in the tokens that the answer continues from
        self.scores: list[Any] = []


class ChatAnswers(Answers[ChatChoice]):
    id_prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, service: HttpService, request: ChatRequest, ready: ReadyChat) -> None:
        super().__init__(service, request)
        self._tool_choice = ready.choice
        self._schemas = ready.schemas
        self._has_reasoning = ready.has_reasoning
        self._is_inside, self._is_continued = ready.is_inside, ready.is_continued
        self._budget = ready.thinking.budget
        self.ignored_fields = ready.thinking.ignored

    def make_choice(self, index: int, prompt: SubmittedPrompt, reader: AnswerReader) -> ChatChoice:
        parser = make_parser(self._service.tool_style, self._schemas, self._tool_choice)
        if self._has_reasoning:
            parser = ReasoningParser(parser, self._is_inside, self._is_continued)
        return ChatChoice(index, prompt, reader, parser)

    def thinking(self) -> ThinkingCounter | None:
        return ThinkingCounter(self._is_inside, self._budget) if self._has_reasoning else None

    def closing_tokens(self) -> list[int]:
        return self._service.texts("messages").encode(CLOSING, with_special_tokens=False)

    def check_replayed(self, choice: ChatChoice) -> None:
        thinking = choice.reader.thinking
        if thinking is not None and thinking.is_spent:
            raise BadRequestError(
                f"continue_from has {thinking.num_tokens} tokens of thinking that has not ended, and the budget is "
                f"{thinking.budget}; raise the budget, or cut continue_from",
                "continue_from",
            )

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self._has_reasoning:
            counters = [choice.reader.thinking for choice in self.choices.values()]
            count = sum(counter.num_tokens for counter in counters if counter is not None)
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

    def text_fields(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def replay(self, choice: ChatChoice, text: str) -> None:
        self._deltas(choice, choice.parser.feed(text))
        choice.content.clear()
        choice.reasoning.clear()
        choice.num_replayed_calls = len(choice.calls)
        for call in choice.calls:
            call["function"]["arguments"] = ""

    def add(self, choice: ChatChoice, addition: Addition, events: list[str]) -> None:
        parsed_pieces = [choice.parser.feed(addition.text)] if addition.text else []
        if addition.finish is not None:
            parsed_pieces.append(choice.parser.finish())
        deltas = [delta for parsed in parsed_pieces for delta in self._deltas(choice, parsed)]
        if addition.finish == "stop" and choice.calls:
            choice.finish = "tool_calls"
        logprobs = None
        if self.request.logprobs:
            logprobs = chat_logprobs(addition.scores, self.request.top_logprobs or 0, self.vocabulary)
        if not self.request.stream:
            choice.scores += logprobs["content"] if logprobs is not None else ()
            return
        if not choice.has_begun:
            extra = {"prompt_token_ids": list(choice.prompt.tokens)} if self.request.return_token_ids else None
            first = {"role": "assistant", "content": ""}
            events.append(self._chunk(choice, first, fields={"seed": choice.seed}, extra=extra))
        self._stream(choice, deltas, addition, logprobs, events)

    def whole_choice(self, choice: ChatChoice) -> dict[str, Any]:
        content = "".join(choice.content)
        calls = [
            call
            for index, call in enumerate(choice.calls)
            if index >= choice.num_replayed_calls or call["function"]["arguments"]
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        message["refusal"] = None
        if self._has_reasoning:
            message["reasoning_content"] = "".join(choice.reasoning) or None
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": {"content": choice.scores, "refusal": None} if self.request.logprobs else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.reason,
            "seed": choice.seed,
            **self.token_fields(choice.tokens, choice.versions),
            **self.stop_fields(choice),
        }

    def whole_extra(self) -> dict[str, Any]:
        prompt = next(iter(self.choices.values())).prompt
        extra: dict[str, Any] = {"prompt_token_ids": list(prompt.tokens)} if self.request.return_token_ids else {}
        if self.request.prompt_logprobs is not None and prompt.logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(prompt.logprobs, self.request.prompt_logprobs, self.vocabulary)
        return extra

    def _stream(
        self,
        choice: ChatChoice,
        deltas: list[dict[str, Any]],
        addition: Addition,
        logprobs: dict[str, Any] | None,
        events: list[str],
    ) -> None:
        """Append one chunk per delta; the first has the log-probs and tokens, the last the finish reason."""
        tokens = self.token_fields(addition.tokens, addition.versions)
        if not deltas and (tokens or (logprobs is not None and logprobs["content"])):
            deltas = [{}]
        for delta in deltas:
            if logprobs is None and not tokens and list(delta) == ["content"]:
                events.append(choice.head + to_json(delta["content"]) + choice.tail)
            else:
                events.append(self._chunk(choice, delta, logprobs, tokens))
            logprobs, tokens = None, {}
        if addition.finish is not None:
            ending = {"finish_reason": choice.finish, "stop_reason": choice.reason, **self.stop_fields(choice)}
            events.append(self._chunk(choice, {}, fields=ending))

    def _chunk(
        self,
        choice: ChatChoice,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        fields: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        fields_before = {"delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self.event(choice, {**fields_before, **(fields or {})}, extra)

    def _deltas(self, choice: ChatChoice, parsed: Parsed) -> list[dict[str, Any]]:
        """Return the deltas of a chunk of text, and keep them for the whole message."""
        deltas: list[dict[str, Any]] = []
        if parsed.reasoning:
            choice.reasoning.append(parsed.reasoning)
            deltas.append({"reasoning_content": parsed.reasoning})
        if parsed.content:
            choice.content.append(parsed.content)
            deltas.append({"content": parsed.content})
        if parsed.calls:
            deltas.append({"tool_calls": [_call_delta(choice, part) for part in parsed.calls]})
        return deltas


def _call_delta(choice: ChatChoice, part: CallPart) -> dict[str, Any]:
    if part.name is None:
        choice.calls[part.index]["function"]["arguments"] += part.arguments
        return {"index": part.index, "function": {"arguments": part.arguments}}
    call = {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }
    choice.calls.append(call)
    return {"index": part.index, **call, "function": dict(call["function"])}  # type: ignore[arg-type]


def _tool_choice(request: ChatRequest) -> ToolChoice:
    chosen = request.tool_choice
    if isinstance(chosen, NamedTool):
        return ToolChoice("named", chosen.function.name)
    if chosen in (None, "auto", "none"):
        return ToolChoice("auto" if request.tools and chosen != "none" else "none")
    if not request.tools:
        raise BadRequestError('tool_choice "required" needs tools; the request has none', "tool_choice")
    return ToolChoice("required")


def _schemas(request: ChatRequest) -> Schemas:
    empty: dict[str, Any] = {"type": "object", "properties": {}}
    return {tool.function.name: tool.function.parameters or empty for tool in request.tools or ()}


def _grammar(service: HttpService, request: ChatRequest, choice: ToolChoice, schemas: Schemas) -> Grammar | None:
    grammar = request.grammar()
    called = choice_grammar(service.tool_style, schemas, choice, request.parallel_tool_calls is not False)
    if called is not None and grammar is not None:
        raise BadRequestError(
            "tool_choice forces a tool call and cannot be combined with another output format; request one of them",
            "tool_choice",
        )
    if called is not None:
        check_grammar(called, "tools")
    return called or grammar
