"""What every endpoint needs: the engine, the texts of its model, and whether a request may be taken now.

Prompts are checked here, before the engine sees them: they have tokens, the tokens are the model's, and prompt and
answer fit into its context.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from craton.ml.serving.messages import Grammar, Sampling
from craton.ml.serving.server.errors import BadRequestError, BusyError, NotFoundError, UnavailableError
from craton.ml.serving.server.link import EngineLink, Exchange
from craton.ml.serving.server.metrics import Metrics
from craton.ml.serving.server.protocol import GenerationRequest, Message, Tool
from craton.ml.serving.server.settings import ServerSettings, ToolStyle
from craton.ml.serving.server.templates import ChatTemplate, load_template
from craton.ml.serving.server.tools import guess_style
from craton.ml.serving.server.vocabulary import Vocabulary

LONG_CHARACTERS = 20_000  # a text that takes longer to encode than others should wait for
MAX_RETRY_SECONDS = 60
ADVISED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of a generation_config.json

logger = logging.getLogger("craton.serving")

Result = TypeVar("Result")


class Service:
    """One model, served."""

    def __init__(self, settings: ServerSettings, link: EngineLink) -> None:
        self.settings = settings
        self.link = link
        self.metrics = Metrics(link, settings.served_name)
        self.is_draining = False
        self._num_preparing = 0
        folder = settings.model_folder
        self.vocabulary: Vocabulary | None = None if folder is None else Vocabulary(folder)
        self.template: ChatTemplate | None = None if folder is None else load_template(folder)
        self._defaults = {} if folder is None else generation_defaults(folder)
        self.tool_style: ToolStyle = settings.tool_style
        if self.tool_style == "auto":
            self.tool_style = guess_style(self.template.source) if self.template is not None else "none"

    @property
    def name(self) -> str:
        """Under which the model is served."""
        return self.settings.served_name or self.link.working().model

    def status(self) -> Literal["loading", "ready", "draining", "failed", "silent"]:
        if self.link.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        if self.link.silent_seconds > self.settings.silent_seconds:
            return "silent"
        return "loading" if self.link.ready is None else "ready"

    def check_taken(self) -> None:
        """Raises why no request is taken now, if none is."""
        if self.is_draining:
            raise UnavailableError("the server is shutting down", code="draining", retry_seconds=5)
        self.link.working()
        if self.link.waiting + self._num_preparing >= self.settings.max_waiting:
            raise BusyError(
                f"{self.settings.max_waiting} requests are waiting, which is as many as may",
                code="too_many_requests",
                retry_seconds=min(max(math.ceil(self.metrics.last_first_token_seconds), 1), MAX_RETRY_SECONDS),
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Within it a request is prepared and submitted, and counts among those that wait. Raises why none is taken."""
        self.check_taken()
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def exchange(self) -> Exchange:
        return Exchange(self.link, self.settings.request_seconds)

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a model's name stands for; None: the model itself."""
        adapters = self.link.working().adapters
        if model is None or model == self.name:
            return None
        if model in adapters:
            return model
        known = ", ".join(repr(name) for name in (self.name, *adapters))
        raise NotFoundError(f"the model {model!r} does not exist; there is {known}", "model", "model_not_found")

    async def encode(self, text: str, with_special_tokens: bool) -> list[int]:
        vocabulary = self.texts("prompt")
        return await self._aside(text, lambda: _encode(vocabulary, text, with_special_tokens))

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        options: dict[str, Any] | None,
    ) -> str:
        """The prompt of a chat as text."""
        self.texts("messages")
        template = self.template
        if template is None:
            raise BadRequestError(
                "the model has no chat template; use /v1/completions, or put a chat_template.jinja into its folder",
                "messages",
            )
        plain = [_plain_message(message, "developer" in template.source) for message in messages]
        plain_tools = [tool.model_dump(exclude_unset=True) for tool in tools or ()]
        return template.render(plain, plain_tools, add_generation_prompt, options)

    def texts(self, parameter: str) -> Vocabulary:
        if self.vocabulary is None:
            raise BadRequestError("the server has no tokenizer; send token ids as the prompt", parameter)
        return self.vocabulary

    def check_prompt(self, prompt: Sequence[int]) -> None:
        ready = self.link.working()
        if not prompt:
            raise BadRequestError("the prompt has no tokens; it needs at least one", "prompt")
        self.check_tokens(prompt, "prompt")
        if len(prompt) >= ready.max_length:
            raise BadRequestError(
                f"the prompt has {len(prompt)} tokens; the model's context is {ready.max_length} tokens, of which the "
                "answer needs at least one",
                "prompt",
                "context_length_exceeded",
            )

    def check_tokens(self, tokens: Sequence[int], parameter: str) -> None:
        vocabulary = self.link.working().vocabulary
        if tokens and (largest := max(tokens)) >= vocabulary:
            raise BadRequestError(
                f"{parameter} has token {largest}, which is not one of the model's {vocabulary:,}", parameter
            )

    def sampling(
        self,
        request: GenerationRequest,
        prompt_tokens: int,
        max_tokens: int | None,
        default_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        grammar: Grammar | None,
    ) -> Sampling:
        """How the engine is to answer. `default_tokens` is the length where none is asked for; None: what fits."""
        ready = self.link.working()
        room = ready.max_length - prompt_tokens
        if max_tokens is None:
            max_tokens = room if default_tokens is None else min(default_tokens, room)
        elif max_tokens > room:
            raise BadRequestError(
                f"the prompt's {prompt_tokens} tokens and max_tokens {max_tokens} are more than the model's context of "
                f"{ready.max_length} tokens; ask for at most {room}",
                "max_tokens",
                "context_length_exceeded",
            )
        if request.min_tokens > max_tokens:
            raise BadRequestError(f"min_tokens {request.min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
        stop_tokens = tuple(dict.fromkeys(request.stop_token_ids or ()))
        self.check_tokens(stop_tokens, "stop_token_ids")
        chosen = {name: value for name, value in self._defaults.items() if name not in request.model_fields_set}
        return Sampling(
            max_tokens=max(max_tokens, 1),
            temperature=chosen.get("temperature", request.temperature),
            top_k=max(int(chosen.get("top_k", request.top_k)), 0),
            top_p=chosen.get("top_p", request.top_p),
            min_p=chosen.get("min_p", request.min_p),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=chosen.get("repetition_penalty", request.repetition_penalty),
            seed=request.seed,
            logit_bias=_logit_bias(request.logit_bias or {}, ready.vocabulary),
            min_tokens=request.min_tokens,
            stop_tokens=stop_tokens,
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )

    @staticmethod
    async def _aside(text: str, work: Callable[[], Result]) -> Result:
        """Long texts are encoded in a thread, so that answers go on streaming meanwhile."""
        return await asyncio.to_thread(work) if len(text) > LONG_CHARACTERS else work()


def generation_defaults(folder: Path) -> dict[str, float]:
    """What the makers of a model advise, where a request says nothing; nothing where their file cannot be used."""
    try:
        advised = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {}
    for name in ADVISED:
        value = advised.get(name) if isinstance(advised, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                GenerationRequest.model_validate({name: value})
            except ValidationError:
                logger.warning("%s: %s %r is left out: no request could ask for it", folder, name, value)
                continue
            found[name] = float(value)
    return found


def _encode(vocabulary: Vocabulary, text: str, with_special_tokens: bool) -> list[int]:
    try:
        return vocabulary.encode(text, with_special_tokens)
    except (UnicodeEncodeError, TypeError):
        raise BadRequestError("the text has half a surrogate pair, which no encoding can hold", "prompt") from None


def _plain_message(message: Message, has_developers: bool) -> dict[str, Any]:
    """As templates expect it: content as one text, the arguments of calls as objects."""
    plain: dict[str, Any] = message.model_dump(exclude_unset=True)
    plain["content"] = _content(message)
    if message.role == "developer" and not has_developers:
        plain["role"] = "system"
    for call in plain.get("tool_calls") or ():
        function = call["function"]
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"])
    return plain


def _content(message: Message) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise BadRequestError(f"content of type {part.type!r} cannot be read; only text can", "messages")
        texts.append(part.text)
    return "".join(texts)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text  # what a model once wrote goes back to it as it was


def _logit_bias(bias: dict[str, float], vocabulary: int) -> dict[int, float]:
    found = {}
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise BadRequestError(
                f"logit_bias has {token!r}, which is not one of the model's {vocabulary:,} tokens", "logit_bias"
            )
        found[int(token)] = value
    return found
