"""The `serve:` section: where a server listens, what it may use, and how its model computes.

`auto` is None here: the engine settles it when the device's memory is known, a plan when it predicts one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator

from craton.job.document import (
    KeyConflictError,
    Section,
    Size,
    Variable,
    Whole,
    parse_bytes,
    parse_token_count,
    whole_number,
)
from craton.job.sections.recover import Wait
from craton.nearest import did_you_mean

ServedPrecision = Literal["bf16", "fp8", "fp32"]
KvPrecision = Literal["auto", "fp8"]
AttentionBackend = Literal["auto", "torch", "triton"]
ToolParser = Literal["auto", "off", "llama3", "hermes", "qwen3", "qwen3-coder"]
ReasoningParser = Literal["off", "think"]

DEFAULT_RUNNING = 256  # requests computed together, where `max_running` is auto
DEFAULT_LENGTH = 4096  # tokens of prompt and answer, where neither `max_length` nor the model says
DEFAULT_CHUNK_TOKENS = 2048  # tokens of a step, where `chunk_tokens` is auto
ADAPTER_CONFIG = "adapter_config.json"  # what makes a folder one of an adapter, as PEFT writes it

REMOVED_BACKENDS = ("flash3", "flashinfer")  # of attention, until November 2026

# What a layout may say of training and not of a server, and what to do instead.
NOT_OF_A_SERVER = {
    "pp": "the stages of a pipeline would wait for one another at every token; use tp",
    "replicate": "a server is one copy of the model; start another one on another port",
    "fsdp": "weights that are gathered at every token are too slow to serve; use tp",
    "cp": "a long prompt is computed in chunks instead; use tp",
    "ep": "every rank of a server holds all experts; use tp",
    "precision": "write serve.precision",
    **dict.fromkeys(("vpp", "micro_batch", "recompute", "zero", "schedule", "offload"), "it belongs to training"),
}


def _auto_or(parse: Callable[[object], int]) -> Callable[[object], int | None]:
    return lambda value: None if value in (None, "auto") else parse(value)


def _parse_share(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    raise ValueError(f"{value!r} is not a share of the device's memory; write a number between 0 and 1, e.g. 0.9")


def _parse_host_memory(value: object) -> int:
    """Bytes, and none at all is fine."""
    return 0 if str(value).strip() in ("0", "0.0", "off") else round(parse_bytes(value))


def _parse_host(value: object) -> str:
    if isinstance(value, str) and value and not any(letter.isspace() or letter == "/" for letter in value):
        return value
    raise ValueError(f"{value!r} is not an address to listen at; write e.g. 127.0.0.1, or 0.0.0.0 for all networks")


def _parse_served_name(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("it is empty; write the name that clients call the model by, or leave it out")
    return value


def _parse_backend(value: object) -> object:
    if value in REMOVED_BACKENDS:
        raise ValueError(
            f"{value!r} was removed, because nothing ever ran it on a GPU; allowed: "
            + ", ".join(get_args(AttentionBackend))
        )
    return value


def _parse_adapters(value: object, info: ValidationInfo) -> object:
    """Name → absolute folder, each with an adapter in it."""
    if not isinstance(value, dict):
        return value
    start = Path((info.context or {}).get("folder", "."))
    result = {}
    for name, folder in value.items():
        if not isinstance(folder, str) or not folder.strip():
            raise KeyConflictError(f"serve.adapters: {folder!r} is not a folder; write name: folder", (name,))
        path = (start / Path(folder).expanduser()).resolve()
        if not (path / ADAPTER_CONFIG).is_file():
            raise KeyConflictError(
                f"serve.adapters: {folder!r} holds no adapter ({ADAPTER_CONFIG} is missing)", (name,)
            )
        result[name] = str(path)
    return result


def _parse_speculate(value: object, info: ValidationInfo) -> Speculate | None:
    if value in (None, "off"):
        return None
    if isinstance(value, Speculate):
        return value
    if isinstance(value, dict):
        return Speculate.parse(value, info)
    near = did_you_mean(str(value), ("off",))
    raise ValueError(f"{value!r} is not allowed; write off, or how tokens are guessed, e.g. {{ngram: 4}}{near}")


Auto = Annotated[int | None, PlainValidator(_auto_or(whole_number(1)))]
AutoTokens = Annotated[int | None, PlainValidator(_auto_or(parse_token_count))]


class Speculate(Section):
    """Tokens that are guessed and then checked together, which changes no answer."""

    ngram: Size  # so many at a time, from where the text said the same before


class Serve(Section):
    """A server of one model."""

    port: Annotated[int, PlainValidator(whole_number(1, 65535))] = 8000
    host: Annotated[str, BeforeValidator(_parse_host)] = "127.0.0.1"
    served_name: Annotated[str | None, BeforeValidator(_parse_served_name)] = None  # what clients call the model
    max_length: AutoTokens = None  # of a prompt and its answer together
    max_running: Auto = None
    max_waiting: Auto = None  # more are refused
    chunk_tokens: AutoTokens = None
    page: Size = 16  # tokens of a block of keys and values
    memory: Annotated[float, PlainValidator(_parse_share)] = 0.9
    host_memory: Annotated[int, PlainValidator(_parse_host_memory)] = 0  # bytes for blocks that leave the device
    precision: ServedPrecision = "bf16"
    kv_precision: KvPrecision = "auto"  # auto: as the model computes
    speculate: Annotated[Speculate | None, BeforeValidator(_parse_speculate)] = None
    adapters: Annotated[dict[str, str], BeforeValidator(_parse_adapters)] = Field(default_factory=dict)
    max_adapters: Annotated[int | None, PlainValidator(_auto_or(whole_number(0)))] = None  # auto: those named
    max_adapter_rank: Auto = None  # auto: the largest of those named
    backend: Annotated[AttentionBackend, BeforeValidator(_parse_backend)] = "auto"
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "off"
    api_keys: Variable | None = None  # whose value in the caller's environment holds them, separated by commas
    admin: bool = False  # whether requests may pause, put to sleep and change what is served
    admin_key: Variable | None = None  # whose value such requests have to carry; None: a key is made for the run
    drain: Wait = 30.0  # seconds that a stop leaves for the requests under way
    initialize: Literal["auto", "random"] = "auto"  # random: to measure, not to talk to
    seed: Whole = 0  # of random weights

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.max_adapters is not None and self.max_adapters < len(self.adapters):
            raise KeyConflictError(
                f"serve: {len(self.adapters)} adapters are named and max_adapters is {self.max_adapters}; give it "
                f"{len(self.adapters)} or more",
                ("max_adapters",),
                ("adapters",),
            )
        if self.admin_key is not None and not self.admin:
            raise KeyConflictError("serve: admin_key is given and admin is not; write admin: true", ("admin_key",))
        if self.admin_key is not None and self.admin_key == self.api_keys:
            raise KeyConflictError(
                f"serve: {self.admin_key} cannot hold both the API keys and the admin key; give the admin key another "
                "variable",
                ("admin_key",),
                ("api_keys",),
            )
        if self.served_name in self.adapters:
            raise KeyConflictError(
                f"serve: an adapter and the model are both called {self.served_name!r}; rename one of them",
                ("served_name",),
                ("adapters",),
            )
        return self

    @property
    def adapter_slots(self) -> int:
        """How many adapters can be loaded at a time."""
        return len(self.adapters) if self.max_adapters is None else self.max_adapters

    @property
    def draft_tokens(self) -> int:
        """Tokens guessed at a time; 0: none."""
        return self.speculate.ngram if self.speculate else 0

    @property
    def running(self) -> int:
        """Requests computed together at most."""
        return self.max_running or DEFAULT_RUNNING

    @property
    def step_tokens(self) -> int:
        """Tokens computed in one step at most."""
        return self.chunk_tokens or DEFAULT_CHUNK_TOKENS
