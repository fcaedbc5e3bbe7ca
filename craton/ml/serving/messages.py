"""Messages between a front end and an engine: plain data without torch.

The engine handles only tokens. The front end handles text, chat templates, stop strings and tool calls; it ends a
request whose text is complete with `Abort`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["stop", "length", "abort", "error"]
LogprobsMode = Literal["model", "sampled"]
SEEDS = 2**62  # seeds are taken modulo this number
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # histogram buckets: tokens per step


@dataclass(frozen=True, slots=True)
class Grammar:
    """The required form of an answer. `text`: a JSON schema, a regular expression, or a Lark grammar."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults leave the model's distribution as it is."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # as a share of the likeliest token's probability
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: random. Copy i of a request has seed + i
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0  # before which no stop token is chosen
    stop_tokens: tuple[int, ...] = ()  # in addition to the model's own
    ignore_eos: bool = False
    logprobs: int | None = None  # number of likeliest tokens beside the sampled one; None: no log-probabilities
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    # Whose log-probabilities are returned: the model's, or those of the distribution that was sampled, after
    # temperature, penalties, bias, masks and truncation. At temperature 0, and of the prompt, always the model's.
    logprobs_mode: LogprobsMode = "model"


@dataclass(frozen=True, slots=True)
class Submit:
    """A prompt, to be answered `copies` times; the copies share its KV cache blocks.

    `generated` continues an answer: all limits, penalties, grammar and seed count these tokens as generated, and the
    output is what follows them. Each copy continues from the same tokens."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    copies: int = 1
    priority: int = 0  # smaller is sooner
    adapter: str | None = None
    generated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForkBranch:
    """A request that a fork starts. Its sampling has its own seed, and the parent's grammar."""

    id: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Fork:
    """Starts requests that continue a running copy from its present tokens and share its KV cache blocks.

    The first output of a branch has the parent's tokens, `OutputDelta.generated`. A branch that cannot start, for
    example because the parent has ended, ends alone, with an error as its last delta."""

    id: int  # of the parent
    branches: tuple[ForkBranch, ...]
    index: int = 0  # of the parent's copy


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request. `index` None: all its copies."""

    id: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """An admin operation of the engine: pause, resume, sleep, wake, load_adapter, …"""

    id: int
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The likeliest tokens at one position, with the sampled one first."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class OutputDelta:
    """The output of one copy of a request in one step. The last one has `finish`, the reason it ended."""

    id: int
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the sampled tokens, always
    alternatives: list[Alternatives] = field(default_factory=list)  # if requested
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    prompt_logprobs: list[Alternatives | None] | None = None  # of the whole prompt, once; the first has none
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    admitted: float = 0.0  # in the first delta: when its prefill began, on the monotonic clock of the machine
    finish: Finish | None = None
    stop_token: int | None = None  # the one that ended it; it is not among `tokens`
    stop_logprob: float = 0.0  # of the stop token
    stop_version: int = 0  # of the weights that sampled the stop token
    error: str = ""
    is_ours: bool = False  # the error is the engine's: a retry of the same request may succeed
    generated: list[int] = field(default_factory=list)  # in the first delta of a fork: the parent's tokens before it


@dataclass(frozen=True, slots=True)
class EngineReply:
    """The reply to a Control: its result or its error."""

    id: int
    result: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can take requests."""

    model: str
    vocabulary: int
    max_length: int  # tokens of prompt and answer together
    adapters: tuple[str, ...] = ()
    weights_version: int = 0
    page: int = 0  # tokens of a block
    kv_precision: str = "auto"
    memory: float = 0.0  # share of the device memory that the engine may use


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine has failed; the front end sends the reason to all open requests."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine's statistics, twice a second. Counts are totals since its start."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks: int = 0
    host_blocks_used: int = 0
    host_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of these, found on the device
    host_hits: int = 0  # of these, found in host memory
    drafts: int = 0  # drafts, of one or more tokens
    drafted: int = 0  # draft tokens
    accepted: int = 0
    draft_tokens: int = 0  # of a request in the last step
    ended: int = 0  # requests, each copy
    aborted: int = 0  # of these: given up before their first token
    failed: int = 0  # of these: ended with an error
    steps: int = 0
    step_tokens: int = 0  # tokens of all steps
    context_tokens: int = 0  # KV cache tokens that all steps attended to
    shared_tokens: int = 0  # of these, not read again because a group of requests shares them
    steps_by_tokens: tuple[int, ...] = ()  # steps per bucket of STEP_BOUNDS; the last: larger ones
    step_seconds: float = 0.0  # mean of the last steps
    plan_step_seconds: float = 0.0  # predicted time of the same steps
    roofline: float = 0.0  # their minimum time / step_seconds
    tokens_per_second: float = 0.0  # generated, over the last seconds
    draft_acceptance: float = 0.0  # estimated probability that a token of the draft model is accepted; 0: no model
    draft_speedup: float = 0.0  # estimated speed-up of decode by the draft model; 0: no model
    weights_version: int = 0
    state: str = "running"  # or paused, asleep
    refusal: str = ""  # why a running engine refuses requests: its weights are missing or mixed


Request = Submit | Fork | Abort | Control
Reply = list[OutputDelta] | EngineReply | Ready | Failed | Stats


def seed_of_copy(seed: int, index: int) -> int:
    return (seed + index) % SEEDS
