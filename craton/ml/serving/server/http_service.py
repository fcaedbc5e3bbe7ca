"""The state that all endpoints share: the engine, the tokenizer and chat template, and whether requests are accepted.

Prompts are checked here, before the engine sees them: they are not empty, their tokens are in the vocabulary, and
prompt and answer fit the model's context.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from craton.formatting import whole_duration
from craton.ml.serving.messages import Grammar, Sampling
from craton.ml.serving.server.errors import BadRequestError, BusyError, NotFoundError, UnavailableError
from craton.ml.serving.server.gate import BodyLimits
from craton.ml.serving.server.link import EngineLink, Exchange
from craton.ml.serving.server.metrics import Metrics
from craton.ml.serving.server.protocol import MAX_CHOICES, GenerationRequest, Message, Tool
from craton.ml.serving.server.settings import ServerSettings, ToolStyle
from craton.ml.serving.server.tools import guess_style
from craton.ml.serving.text import ChatTemplate, ChatTemplateError, TextTooLongError, Vocabulary, load_template

LONG_CHARACTERS = 4_000  # longer texts are rendered and encoded on a thread
ENCODERS = 2  # threads for long texts; another one would take a core from the engine
# Of a body: OpenAI's fields beside the prompt, and the prompt's tokens as JSON with every letter escaped.
BODY_BYTES, BODY_BYTES_PER_TOKEN, MAX_BODY_BYTES = 2 << 20, 64, 16 << 20
# Values of a body: the maximum is parsed and checked in less than 100 ms, which block all other clients.
BODY_VALUES, MAX_BODY_VALUES = 100_000, 400_000
TOOL_CHARACTERS, MESSAGE_CHARACTERS = 200, 20  # cost of rendering one, beside its content
TOO_LONG = "context_length_exceeded"
MAX_PROMPT_LOGPROBS = 1 << 17  # values of one prompt
MAX_RETRY_SECONDS = 60
DRAWN_SEEDS = (1 << 53) - MAX_CHOICES  # below: every choice's seed is a whole number in JavaScript, too
ADVISED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of a generation_config.json

logger = logging.getLogger("craton.serving")
_SEEDS = random.SystemRandom()

Result = TypeVar("Result")


@dataclass(frozen=True)
class Readiness:
    """The server's status; `reason` says why it is not ready, and the remedy if there is one."""

    status: Literal["loading", "ready", "draining", "failed", "silent", "asleep", "paused", "without weights"]
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"

    def body(self) -> dict[str, str]:
        return {"status": self.status, **({"reason": self.reason} if self.reason else {})}


class HttpService:
    """The HTTP service of one model."""

    def __init__(self, settings: ServerSettings, link: EngineLink) -> None:
        self.settings = settings
        self.link = link
        self.metrics = Metrics(link, settings.served_name)
        self.is_draining = False
        self.running: dict[str, object] = {}  # `Answers` of open requests, by the id of their response
        self._num_preparing = 0
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        folder = settings.model_folder
        self.vocabulary: Vocabulary | None = None if folder is None else Vocabulary(folder)
        self.template: ChatTemplate | None = None if folder is None else load_template(folder)
        self._defaults = {} if folder is None else generation_defaults(folder)
        self.tool_style: ToolStyle = settings.tool_style
        if self.tool_style == "auto":
            self.tool_style = guess_style(self.template.source) if self.template is not None else "none"

    @property
    def name(self) -> str:
        """The name of the served model."""
        return self.settings.served_name or self.link.working().model

    def readiness(self) -> Readiness:
        """Return whether requests are accepted and computed now."""
        link = self.link
        if link.failure is not None:
            return Readiness("failed", link.failure)
        if self.is_draining:
            return Readiness("draining", "the server is shutting down")
        if link.silent_seconds > self.settings.silent_seconds:
            return Readiness("silent", f"the engine has not reported for {whole_duration(link.silent_seconds)}")
        if link.ready is None:
            return Readiness("loading", "the model is loading")
        if link.stats.state == "asleep":
            return Readiness("asleep", "the engine is asleep; POST /wake_up")
        if link.stats.refusal:
            return Readiness("without weights", link.stats.refusal)
        if link.stats.state == "paused":
            return Readiness("paused", "the engine is paused; POST /resume")
        return Readiness("ready")

    def body_limits(self) -> BodyLimits:
        """Return the body limits, which follow from the context length: a body is mostly its prompts."""
        length = 0 if self.link.ready is None else self.link.ready.max_length
        by_context = min(BODY_BYTES + BODY_BYTES_PER_TOKEN * length, MAX_BODY_BYTES)
        values = max(BODY_VALUES, min(MAX_CHOICES * length, MAX_BODY_VALUES), 2 * length)
        return BodyLimits(self.settings.max_body_bytes or by_context, values)

    def check_taken(self) -> None:
        """Raise if no request is accepted now."""
        if self.is_draining:
            raise UnavailableError("the server is shutting down", code="draining", retry_seconds=5)
        self.link.working()
        if self.link.waiting + self._num_preparing >= self.settings.max_waiting:
            self.metrics.refused()
            raise BusyError(
                f"{self.settings.max_waiting} requests are waiting, which is the maximum; retry later",
                code="too_many_requests",
                retry_seconds=min(max(math.ceil(self.metrics.last_first_token_seconds), 1), MAX_RETRY_SECONDS),
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as waiting while it is prepared and submitted. Raise if no request is accepted now."""
        self.check_taken()
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def exchange(self) -> Exchange:
        return Exchange(self.link, self.settings.request_seconds)

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter with a model name; None: the model itself."""
        adapters = self.link.working().adapters
        if model is None or model == self.name:
            return None
        if model in adapters:
            return model
        models = ", ".join(repr(name) for name in (self.name, *adapters))
        raise NotFoundError(f"the model {model!r} does not exist; available: {models}", "model", "model_not_found")

    async def encode(self, text: str, with_special_tokens: bool, must_fit: bool = True) -> list[int]:
        """Tokenize a text. `must_fit`: raise if it has more tokens than the context."""
        vocabulary = self.texts("prompt")
        self._check_fits(len(text))
        limit = self.link.working().max_length if must_fit else None
        return await self.aside(len(text), lambda: _encode(vocabulary, text, with_special_tokens, limit))

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        options: dict[str, Any] | None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt of a chat as text."""
        if continue_final_message:
            _check_continued(messages[-1], add_generation_prompt)
        self.texts("messages")
        template = self.template
        if template is None:
            raise BadRequestError(
                "the model has no chat template; use /v1/completions, or add a chat_template.jinja to its folder",
                "messages",
            )
        plain = [_plain_message(message, "developer" in template.source) for message in messages]
        plain_tools = [tool.model_dump(exclude_unset=True) for tool in tools or ()]
        characters = sum(len(message["content"]) for message in plain)
        self._check_fits(characters)
        if len(plain) > (length := self.link.working().max_length):
            raise BadRequestError(
                f"got {len(plain)} messages; the model's context is {length} tokens", "messages", TOO_LONG
            )
        size = characters + TOOL_CHARACTERS * len(plain_tools) + MESSAGE_CHARACTERS * len(plain)
        try:
            return await self.aside(
                size,
                lambda: template.render(plain, plain_tools, add_generation_prompt, options, continue_final_message),
            )
        except ChatTemplateError as error:
            raise BadRequestError(str(error), "messages") from None

    def texts(self, parameter: str) -> Vocabulary:
        if self.vocabulary is None:
            raise BadRequestError("the server has no tokenizer; send token ids as the prompt", parameter)
        return self.vocabulary

    def check_prompt(self, prompt: Sequence[int]) -> None:
        ready = self.link.working()
        if not prompt:
            raise BadRequestError("the prompt has no tokens; give at least one", "prompt")
        if len(prompt) >= ready.max_length:
            raise BadRequestError(
                f"the prompt has {len(prompt)} tokens; the model's context is {ready.max_length} tokens, and the "
                "answer needs at least one",
                "prompt",
                TOO_LONG,
            )
        self.check_tokens(prompt, "prompt")

    def check_tokens(self, tokens: Sequence[int], parameter: str) -> None:
        vocabulary = self.link.working().vocabulary
        if tokens and (largest := max(tokens)) >= vocabulary:
            raise BadRequestError(
                f"{parameter} has token {largest}, which is not in the model's vocabulary of {vocabulary:,}", parameter
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
        """Return the sampling parameters for the engine. `default_tokens` replaces a missing max_tokens; None: all that
        fits."""
        ready = self.link.working()
        room = ready.max_length - prompt_tokens
        if max_tokens is None:
            max_tokens = room if default_tokens is None else min(default_tokens, room)
        elif max_tokens > room:
            raise BadRequestError(
                f"the prompt's {prompt_tokens} tokens plus max_tokens {max_tokens} exceed the model's context of "
                f"{ready.max_length} tokens; lower max_tokens to {room} or less",
                "max_tokens",
                TOO_LONG,
            )
        if prompt_logprobs is not None and prompt_tokens * (prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
            raise BadRequestError(
                f"prompt_logprobs {prompt_logprobs} for the prompt's {prompt_tokens} tokens gives more than "
                f"{MAX_PROMPT_LOGPROBS:,} values; request fewer, or shorten the prompt",
                "prompt_logprobs",
            )
        self._check_continued(request, prompt_tokens, max_tokens)
        if request.min_tokens > max_tokens:
            raise BadRequestError(f"min_tokens {request.min_tokens} exceeds max_tokens {max_tokens}", "min_tokens")
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
            seed=draw_seed() if request.seed is None else request.seed,
            logit_bias=logit_bias_of(request.logit_bias or {}, ready.vocabulary),
            min_tokens=request.min_tokens,
            stop_tokens=stop_tokens,
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            logprobs_mode=request.logprobs_mode,
        )

    def _check_continued(self, request: GenerationRequest, prompt_tokens: int, max_tokens: int) -> None:
        """Check the tokens that an answer continues from."""
        count, length = len(request.continue_from), self.link.working().max_length
        if not count:
            return
        if request.n > 1:
            raise BadRequestError(
                f"continue_from continues one answer, and n is {request.n}; send one request for each answer",
                "continue_from",
            )
        self.check_tokens(request.continue_from, "continue_from")
        if prompt_tokens + count > length:
            raise BadRequestError(
                f"the prompt's {prompt_tokens} tokens plus the {count} of continue_from exceed the model's context of "
                f"{length} tokens",
                "continue_from",
                TOO_LONG,
            )
        if count > max_tokens:
            raise BadRequestError(
                f"continue_from has {count} tokens, and max_tokens, which counts them, is {max_tokens}; raise it to "
                f"{count} or more",
                "continue_from",
            )

    def _check_fits(self, characters: int) -> None:
        """Raise for a text that cannot fit the context however it is tokenized, before tokenizing it."""
        length, longest = self.link.working().max_length, self.texts("prompt").longest_token_bytes
        if characters > length * longest:
            raise BadRequestError(
                f"the text has {characters:,} characters; the maximum for the model's context is {length * longest:,} "
                f"({length:,} tokens, the longest of {longest} bytes)",
                "prompt",
                TOO_LONG,
            )

    async def aside(self, characters: int, work: Callable[[], Result]) -> Result:
        """Run the work, for long texts on a thread, so that streams continue meanwhile."""
        if characters <= LONG_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work)


def draw_seed() -> int:
    return _SEEDS.randrange(DRAWN_SEEDS)


def generation_defaults(folder: Path) -> dict[str, float]:
    """Return the model's recommended sampling parameters (generation_config.json), the defaults of a request. Empty if
    the file is missing or invalid."""
    try:
        advised = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    result = {}
    for name in ADVISED:
        value = advised.get(name) if isinstance(advised, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                GenerationRequest.model_validate({name: value})
            except ValidationError:
                logger.warning("%s/generation_config.json: ignoring %s %r: out of range", folder, name, value)
                continue
            result[name] = float(value)
    return result


def _encode(vocabulary: Vocabulary, text: str, with_special_tokens: bool, max_tokens: int | None) -> list[int]:
    try:
        return vocabulary.encode(text, with_special_tokens, max_tokens)
    except TextTooLongError as error:
        raise BadRequestError(
            f"the prompt has {error.num_tokens} tokens; the model's context is {max_tokens} tokens, and the answer "
            "needs at least one",
            "prompt",
            TOO_LONG,
        ) from None
    except (UnicodeEncodeError, TypeError):
        raise BadRequestError("the text has half a surrogate pair and cannot be encoded; remove it", "prompt") from None


def _check_continued(message: Message, add_generation_prompt: bool) -> None:
    """Raise for a last message that cannot be continued."""
    name = "continue_final_message"
    if add_generation_prompt:
        raise BadRequestError(
            f"{name} and add_generation_prompt (default true) are both true; set one of them to false", name
        )
    if message.role != "assistant":
        raise BadRequestError(f"{name} needs a last message of the assistant; its role is {message.role!r}", name)
    if message.content is None or message.tool_calls:
        what = "no content" if message.content is None else "tool calls, which follow it"
        raise BadRequestError(f"{name} continues the content of the last message, which has {what}", name)


def _plain_message(message: Message, has_developers: bool) -> dict[str, Any]:
    """Return a message as templates expect it: content as one text, arguments of tool calls as objects."""
    plain: dict[str, Any] = message.model_dump(exclude_unset=True)
    plain["content"] = message_text(message)
    if message.role == "developer" and not has_developers:
        plain["role"] = "system"
    for call in plain.get("tool_calls") or ():
        function = call["function"]
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"])
    return plain


def message_text(message: Message) -> str:
    """Return the content of a message as one text."""
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise BadRequestError(f"content of type {part.type!r} is not supported; use text", "messages")
        texts.append(part.text)
    return "".join(texts)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text  # pass the model's own text back unchanged


def logit_bias_of(bias: dict[str, float], vocabulary: int) -> dict[int, float]:
    result = {}
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise BadRequestError(
                f"logit_bias has {token!r}, which is not in the model's vocabulary of {vocabulary:,}", "logit_bias"
            )
        result[int(token)] = value
    return result
