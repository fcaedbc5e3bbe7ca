"""The `serve:` section: the address, memory and precision of a server.

`auto` is stored as None: the engine resolves it when the device memory is known, the planner when it predicts a server.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator

from craton.http_guard import is_loopback
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
from craton.job.errors import StrategyError
from craton.job.model import is_function, parse_model, run_folder
from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.job.sections.recover import Wait
from craton.job.sections.serving.load import LoadSection, SloSection
from craton.job.sections.strategy import LOGPROBS, StrategyBounds, StrategySpec, check_score
from craton.nearest import did_you_mean

# Of weights. `fp8_block`: one scale per block, as DeepSeek's; `int4`: weights only, as AWQ and GPTQ.
ServedPrecision = Literal["bf16", "fp8", "fp32", "fp8_block", "int4", "nvfp4", "mxfp4"]
ActivationPrecision = Literal["auto", "bf16", "fp8", "nvfp4"]  # of the inputs of matmuls
KvPrecision = Literal["auto", "bf16", "fp8"]
AttentionBackend = Literal["auto", "torch", "triton"]
SharedPrefix = Literal["auto", "on", "off"]
ToolParser = Literal["auto", "off", "llama3", "hermes", "qwen3", "qwen3-coder"]
ReasoningParser = Literal["off", "think"]

DEFAULT_RUNNING = 256  # concurrent requests, if `max_running` is auto
DEFAULT_LENGTH = 4096  # tokens of prompt plus output, if neither `max_length` nor the model gives a limit
DEFAULT_CHUNK_TOKENS = 2048  # tokens per step, if `chunk_tokens` is auto
MAX_REPLICAS = 10_000  # of a planned deployment
MAX_DRAFT_TOKENS = 16  # of a draft model, per request and step
MAX_AUTO_TOKENS = 8  # the largest number that `tokens: auto` chooses
ADAPTER_CONFIG = "adapter_config.json"  # marks a folder with an adapter, as PEFT writes it

SHARE_TOLERANCE = 1e-9  # of sums of shares

REMOVED_BACKENDS = ("flash3", "flashinfer")  # attention backends removed in November 2026

VERIFIER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
CODE_AT_A_SERVER = (
    "verifier code runs the tests of a data row, and a request must not bring code; use python: "
    "package.module:function, or `craton eval`"
)

OWN_PRECISIONS = ("bf16", "fp8", "int4", "fp32")  # of Craton's engine, which chooses the precision of activations
# Precisions in which weights can be multiplied.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "fp32": ("auto",),
    "bf16": ("auto", "bf16"),
    "fp8": ("auto", "bf16", "fp8"),
    "fp8_block": ("auto", "bf16", "fp8"),
    "int4": ("auto", "bf16"),
    "nvfp4": ("auto", "bf16", "nvfp4"),
    "mxfp4": ("auto", "bf16", "fp8"),
}

# Layout keys for training only, and what to use for a server instead.
PLANNED_ENGINES = ("vllm", "sglang", "trtllm")  # `software` of servers that Craton plans but does not run
PLANNED_LAYOUT = ("tp", "pp", "ep")  # layout keys of these
NOT_OF_A_SERVER = {
    "pp": "pipeline stages would wait for each other at every token; use tp",
    "replicate": "a server is one replica of the model; start another server on another port",
    "fsdp": "gathering weights at every token is too slow; use tp",
    "cp": "long prompts use chunked prefill instead; use tp",
    "precision": "write serve.precision",
    **dict.fromkeys(("vpp", "micro_batch", "recompute", "zero", "schedule", "offload"), "it applies to training only"),
}


def _auto_or(parse: Callable[[object], int]) -> Callable[[object], int | None]:
    return lambda value: None if value in (None, "auto") else parse(value)


def _parse_share(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    raise ValueError(f"{value!r} is not a fraction of the GPU memory; write a number between 0 and 1, e.g. 0.9")


def _parse_reward_share(value: object) -> float | None:
    return None if value in (None, "off") else _parse_share(value)


def _parse_host_memory(value: object) -> int:
    """Parse bytes; 0 and off mean none."""
    return 0 if str(value).strip() in ("0", "0.0", "off") else round(parse_bytes(value))


def _parse_host(value: object) -> str:
    if isinstance(value, str) and value and not any(letter.isspace() or letter == "/" for letter in value):
        return value
    raise ValueError(f"{value!r} is not an address to listen on; write e.g. 127.0.0.1, or 0.0.0.0 for all interfaces")


def _parse_served_name(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("the name is empty; write the model name that clients use, or omit the key")
    return value


def _parse_backend(value: object) -> object:
    if value in REMOVED_BACKENDS:
        raise ValueError(
            f"{value!r} was removed because it was never run on a GPU; allowed: "
            + ", ".join(get_args(AttentionBackend))
        )
    return value


def _parse_adapters(value: object, info: ValidationInfo) -> object:
    """Return name → absolute folder; each folder must hold an adapter."""
    if not isinstance(value, dict):
        return value
    start = Path((info.context or {}).get("folder", "."))
    result = {}
    for name, folder in value.items():
        if not isinstance(folder, str) or not folder.strip():
            raise KeyConflictError(f"serve.adapters: {folder!r} is not a folder; write NAME: FOLDER", (name,))
        path = (start / Path(folder).expanduser()).resolve()
        if not (path / ADAPTER_CONFIG).is_file():
            raise KeyConflictError(
                f"serve.adapters: {folder!r} contains no adapter ({ADAPTER_CONFIG} is missing)", (name,)
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
    raise ValueError(
        f"{value!r} is not allowed; write off, or the draft method, e.g. {{ngram: 4}} or {{model: ./small-model}}{near}"
    )


def _parse_draft_model(value: object, info: ValidationInfo) -> str | None:
    """Return the draft model as a preset, Hub id, URL or absolute path; its config must be readable."""
    if value is None:
        return None
    model = parse_model(value, info)
    if not isinstance(model, str) or is_function(model) or run_folder(model) is not None:
        raise ValueError(f"{value!r} cannot draft; give a model folder or a Hub id that is in the local cache")
    return model


def _parse_verifiers(value: object, info: ValidationInfo) -> object:
    """Return name → term; requests call them by these names."""
    if not isinstance(value, dict):
        return value
    result = {}
    for name, term in value.items():
        if not isinstance(name, str) or not VERIFIER_NAME.fullmatch(name) or name == LOGPROBS:
            raise KeyConflictError(
                f"serve.verifiers: {name!r} is not a name for a verifier; use letters, digits, '.', '_' and '-', and "
                f"not {LOGPROBS}",
                (str(name),),
            )
        if isinstance(term, str):
            term = {"python": term} if is_function(term) else {"verifier": term}
        parsed = term if isinstance(term, RewardTerm) else RewardTerm.parse(term, info)
        if parsed.verifier == "code":
            raise KeyConflictError(f"serve.verifiers: {CODE_AT_A_SERVER}", (name,))
        result[name] = parsed
    return result


Auto = Annotated[int | None, PlainValidator(_auto_or(whole_number(1)))]
AutoTokens = Annotated[int | None, PlainValidator(_auto_or(parse_token_count))]


class Speculate(Section):
    """Speculative decoding: draft tokens are verified together, which does not change the output."""

    ngram: Size | None = None  # number of draft tokens, copied from after an earlier occurrence of the last tokens
    model: Annotated[str | None, BeforeValidator(_parse_draft_model)] = None  # a smaller one with the same tokenizer
    tokens: Annotated[int | None, PlainValidator(_auto_or(whole_number(1, MAX_DRAFT_TOKENS)))] = None  # of the model

    @model_validator(mode="after")
    def _has_one_method(self) -> Self:
        if self.ngram is None and self.model is None:
            raise KeyConflictError("serve.speculate: give ngram or model")
        if self.ngram is not None and self.model is not None:
            raise KeyConflictError(
                "serve.speculate: draft tokens come from ngram or from model; remove one of them",
                ("ngram",),
                ("model",),
            )
        if self.tokens is not None and self.model is None:
            raise KeyConflictError(
                "serve.speculate: tokens applies to model; the number of n-gram draft tokens is ngram", ("tokens",)
            )
        return self


class Serve(Section):
    """The settings of a server."""

    port: Annotated[int, PlainValidator(whole_number(1, 65535))] = 8000
    host: Annotated[str, BeforeValidator(_parse_host)] = "127.0.0.1"
    served_name: Annotated[str | None, BeforeValidator(_parse_served_name)] = None  # model name in the API
    max_length: AutoTokens = None  # of prompt plus output
    max_running: Auto = None
    max_waiting: Auto = None  # requests in the queue; more are refused
    chunk_tokens: AutoTokens = None
    page: Size = 16  # tokens per KV cache block
    memory: Annotated[float, PlainValidator(_parse_share)] = 0.9
    host_memory: Annotated[int, PlainValidator(_parse_host_memory)] = (
        0  # bytes for KV cache blocks offloaded to the host
    )
    precision: ServedPrecision = "bf16"
    activation_precision: ActivationPrecision = "auto"  # auto: the narrowest that weights and GPU allow
    kv_precision: KvPrecision = "auto"  # auto: the compute precision of the model
    speculate: Annotated[Speculate | None, BeforeValidator(_parse_speculate)] = None
    adapters: Annotated[dict[str, str], BeforeValidator(_parse_adapters)] = Field(default_factory=dict)
    max_adapters: Annotated[int | None, PlainValidator(_auto_or(whole_number(0)))] = (
        None  # auto: the number of `adapters`
    )
    max_adapter_rank: Auto = None  # auto: the largest rank in `adapters`
    shared_prefix: SharedPrefix = "auto"  # attention reads common beginnings of requests once; auto: on
    backend: Annotated[AttentionBackend, BeforeValidator(_parse_backend)] = "auto"
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "off"
    api_keys: Variable | None = None  # variable in the caller's environment that holds the keys, separated by commas
    standby: bool = False  # keep a fork server, so that a rank which dies is back in about a second
    admin: bool = False  # enable the admin API: pause, sleep, change weights and adapters
    admin_key: Variable | None = None  # variable that holds the admin key; None: generate a key for the run
    drain: Wait = 30.0  # seconds for open requests at a stop
    initialize: Literal["auto", "random"] = "auto"  # random: for benchmarks
    seed: Whole = 0  # of random weights
    strategy: StrategySpec | None = None  # default of requests that name none
    strategies: StrategyBounds = StrategyBounds()  # of every request
    verifiers: Annotated[dict[str, RewardTerm], BeforeValidator(_parse_verifiers)] = Field(default_factory=dict)
    verify: VerifySection = VerifySection()  # limits of the verifiers
    attention_dp: Size = 1  # attention-data-parallel ranks; plans of other engines only
    replicas: Annotated[int, PlainValidator(whole_number(1, MAX_REPLICAS))] | None = (
        None  # servers behind a router; plans only, None: as many as the load needs
    )
    load: LoadSection | None = None  # the requests that plans are for
    slo: SloSection = SloSection()  # the latency that plans look for
    reward_memory: Annotated[float | None, BeforeValidator(_parse_reward_share)] = None  # of the GPU; None: on the CPU

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.max_adapters is not None and self.max_adapters < len(self.adapters):
            raise KeyConflictError(
                f"serve: {len(self.adapters)} adapters are given but max_adapters is {self.max_adapters}; set it to "
                f"{len(self.adapters)} or more",
                ("max_adapters",),
                ("adapters",),
            )
        if self.admin_key is not None and not self.admin:
            raise KeyConflictError("serve: admin_key requires admin; write admin: true", ("admin_key",))
        if self.admin_key is not None and self.admin_key == self.api_keys:
            raise KeyConflictError(
                f"serve: {self.admin_key} cannot hold both the API keys and the admin key; use another "
                "variable for the admin key",
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

    @model_validator(mode="after")
    def _thinks_safely(self) -> Self:
        if self.verifiers and self.verify.sandbox == "off" and not is_loopback(self.host):
            raise KeyConflictError(
                f"serve: verify.sandbox off is refused on {self.host}, which other machines can reach; remove it, or "
                "listen on 127.0.0.1",
                ("verify", "sandbox"),
                ("host",),
            )
        num_models = sum(term.model is not None for term in self.verifiers.values())
        if self.reward_memory is not None and self.memory + num_models * self.reward_memory > 1 + SHARE_TOLERANCE:
            raise KeyConflictError(
                f"serve: memory {self.memory:g} and {num_models} × reward_memory {self.reward_memory:g} are more than "
                "the GPU has; together they may be 1",
                ("reward_memory",),
                ("memory",),
            )
        if self.reward_memory is not None and not num_models:
            raise KeyConflictError("serve: reward_memory needs a reward model in verifiers", ("reward_memory",))
        if self.strategy is None:
            return self
        if self.strategy.max_dollars is not None:
            raise KeyConflictError(
                "serve: a strategy of our own server has no prices, so max_dollars cannot be enforced; use max_tokens",
                ("strategy",),
            )
        try:
            check_score(self.strategy, self.verifiers, "serve.strategy")
            self.strategies.bound(self.strategy, "serve.strategy")
        except StrategyError as error:
            raise KeyConflictError(str(error), ("strategy",), ("strategies",)) from None
        return self

    @property
    def adapter_slots(self) -> int:
        """Number of adapters that can be loaded at the same time."""
        return len(self.adapters) if self.max_adapters is None else self.max_adapters

    @property
    def has_own_precision(self) -> bool:
        """Whether Craton's engine could serve weights and activations in these precisions."""
        return self.precision in OWN_PRECISIONS and self.activation_precision == "auto"

    @property
    def shard_precision(self) -> Literal["bf16", "fp8", "fp32"]:
        """The precision whose rules the shards of a layout follow; 4-bit weights have none of their own."""
        if self.precision == "fp32":
            return "fp32"
        return "fp8" if self.precision in ("fp8", "fp8_block") else "bf16"

    @property
    def draft_tokens(self) -> int:
        """Number of draft tokens, or its maximum if it is auto; 0: no speculative decoding."""
        if self.speculate is None:
            return 0
        return self.speculate.ngram or self.speculate.tokens or MAX_AUTO_TOKENS

    @property
    def draft_model(self) -> str | None:
        return self.speculate.model if self.speculate else None

    @property
    def draft_auto(self) -> bool:
        """Whether the number of a draft model's tokens is chosen from its acceptance."""
        return self.draft_model is not None and self.speculate is not None and self.speculate.tokens is None

    @property
    def running(self) -> int:
        """Maximum number of concurrent requests."""
        return self.max_running or DEFAULT_RUNNING

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens per step."""
        return self.chunk_tokens or DEFAULT_CHUNK_TOKENS
