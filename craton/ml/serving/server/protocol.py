"""Request bodies: OpenAI's fields, and those that vLLM adds.

Everything with a length is limited, and validation of a list stops at its first invalid entry: a large body could have
too many to report. `fields` handles unknown fields.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from craton.ml.serving.grammar import GrammarError, check_size
from craton.ml.serving.messages import Grammar, LogprobsMode
from craton.ml.serving.server.errors import BadRequestError
from craton.ml.serving.server.fields import unknown_fields

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_TOOLS = 512
MAX_MESSAGES = 8192
MAX_PARTS = 1024  # of a message's content, and calls in it
MAX_BIASED = 1024  # tokens of a logit_bias; OpenAI allows 300
MAX_STOP_TOKENS = 1024
MAX_ROW_FIELDS = 32  # of what a verifier compares with

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
MAX_ROW_TEXT = 65_536  # characters of a value of `verifier_row`


def _check_row_value(value: object) -> object:
    is_text = isinstance(value, str) and len(value) <= MAX_ROW_TEXT
    if is_text or value is None or isinstance(value, bool | int | float):
        return value
    raise PydanticCustomError(
        "row_value", f"must be a text of at most {MAX_ROW_TEXT:,} characters, a number, true, false or null"
    )


RowValue = Annotated[str | bool | int | float | None, BeforeValidator(_check_row_value)]
TokenCount = Annotated[int, Field(ge=0, lt=1 << 31)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
RequestId = Annotated[str, Field(min_length=1, max_length=128)]  # the `id` of a response


class Body(BaseModel):
    """The JSON body of a request."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    def ignored(self, n: int = 1) -> list[str]:
        """Return the names of ignored unknown fields. Raise BadRequestError for one that must not be ignored."""
        return unknown_fields(self.model_extra or {}, type(self).model_fields, n)


class StreamOptions(Body):
    include_usage: bool = False


class SchemaFormat(Body):
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's format; at most one field is set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class GenerationRequest(Body):
    """The common fields of chats and completions."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=0, lt=1 << 31)  # 0: prefill only
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: int = Field(default=0, ge=0, lt=1 << 31)
    ignore_eos: bool = False
    prompt_logprobs: LogprobCount | None = None
    logprobs_mode: LogprobsMode = "model"
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    return_token_ids: bool = False
    continue_from: TokenIds = []  # generated tokens of this answer, which the new ones follow
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    strategy: Any = None  # of test-time compute: a text or a mapping, which `strategies` reads
    verifier_row: Annotated[dict[str, RowValue], Field(max_length=MAX_ROW_FIELDS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        """Treat null as a field that is not set, as OpenAI does."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def grammar(self) -> Grammar | None:
        """Return the grammar of the answer, if one is given; raise for more than one."""
        grammars: list[tuple[str, Grammar]] = []
        if (form := self.response_format) is not None and form.type == "json_object":
            grammars.append(("response_format", Grammar("json_object")))
        elif form is not None and form.type == "json_schema":
            if form.json_schema is None or form.json_schema.schema_ is None:
                raise BadRequestError(
                    "response_format of type json_schema needs json_schema.schema", "response_format.json_schema"
                )
            grammars.append(("response_format", Grammar("json_schema", json.dumps(form.json_schema.schema_))))
        outputs = self.structured_outputs or StructuredOutputs()
        schemas = {"guided_json": self.guided_json, "structured_outputs.json": outputs.json_}
        for name, schema in schemas.items():
            if schema is not None:
                grammars.append((name, Grammar("json_schema", _schema_text(schema, name))))
        for name, regex in {"guided_regex": self.guided_regex, "structured_outputs.regex": outputs.regex}.items():
            if regex is not None:
                grammars.append((name, Grammar("regex", regex)))
        for name, text in {
            "guided_grammar": self.guided_grammar,
            "structured_outputs.grammar": outputs.grammar,
        }.items():
            if text is not None:
                grammars.append((name, Grammar("lark", text)))
        for name, choice in {"guided_choice": self.guided_choice, "structured_outputs.choice": outputs.choice}.items():
            if choice is not None:
                grammars.append((name, _one_of(choice, name)))
        if outputs.json_object:
            grammars.append(("structured_outputs.json_object", Grammar("json_object")))
        if len(grammars) > 1:
            names = " and ".join(name for name, _ in grammars)
            raise BadRequestError(f"{names} are given; use only one of them", grammars[1][0])
        if not grammars:
            return None
        name, grammar = grammars[0]
        check_grammar(grammar, name)
        return grammar


class CompletionRequest(GenerationRequest):
    prompt: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=2048, fail_fast=True)]
    echo: bool = False
    logprobs: LogprobCount | None = None
    add_special_tokens: bool = True


class BranchSampling(Body):
    """How a branch of a fork samples; what is not given is as in the request that is forked, except for the seed."""

    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)  # counts the tokens before the fork, too
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASED)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=1 << 31)
    ignore_eos: bool | None = None
    logprobs_mode: LogprobsMode | None = None


class ForkRequest(Body):
    """Branches of a running completion. Stop strings and grammar are those of the request."""

    id: RequestId
    index: int = Field(default=0, ge=0, lt=MAX_CHOICES)  # of the choice
    branches: Annotated[list[BranchSampling], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    logprobs: LogprobCount | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


class AbortRequest(Body):
    id: RequestId
    index: int | None = Field(default=None, ge=0, lt=MAX_CHOICES)  # of a choice; default: all


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(Body):
    type: str
    text: str | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatRequest(GenerationRequest):
    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # leave the last message open, which is the assistant's
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: TokenCount | None = None
    thinking_budget: TokenCount | None = None  # the same by another name
    enable_thinking: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: true")
        return self


class TokenizeRequest(Body):
    """A text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class LoadAdapterRequest(Body):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapterRequest(Body):
    lora_name: str = Field(min_length=1, max_length=256)


class UpdateWeightsRequest(Body):
    """A weight update from a folder, or from a trainer that sends to an address of the engine's machine."""

    folder: str | None = None
    address: str | None = None
    version: int | None = Field(None, ge=0)  # of a folder's weights; default: the next one
    recompute: bool = False  # also recompute the KV cache of running requests
    wait_seconds: float = Field(600.0, gt=0, le=3600)  # for the sender

    @model_validator(mode="after")
    def _check(self) -> UpdateWeightsRequest:
        if (self.folder is None) == (self.address is None):
            raise ValueError("give either folder or address")
        return self


def check_grammar(grammar: Grammar, name: str) -> None:
    """Raise for a grammar that the engine would refuse for its size."""
    try:
        check_size(grammar)
    except GrammarError as error:
        raise BadRequestError(str(error), name, "grammar_too_large") from None


def _schema_text(schema: dict[str, Any] | str, name: str) -> str:
    if not isinstance(schema, str):
        return json.dumps(schema)
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{name} is not JSON: {error}", name) from None
    return schema


def _one_of(choice: list[str], name: str) -> Grammar:
    if not choice or not all(choice):
        raise BadRequestError(f"{name} needs at least one text, and no empty ones", name)
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice))
