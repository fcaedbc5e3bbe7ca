"""What a front end and an engine say to each other: plain data, no torch, sent as it is between processes.

An engine knows tokens only. Texts, chat templates, stop strings and tool calls are the front end's; it ends a request
whose text is complete with `Abort`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["stop", "length", "abort", "error"]
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens, by which steps are counted


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like. `text`: a JSON schema, a regular expression, or a grammar in Lark's form."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults leave the model's distribution as it is."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0: always the likeliest
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # of the likeliest token's probability
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: another each time
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0  # before which no stop token is chosen
    stop_tokens: tuple[int, ...] = ()  # beside the model's own
    ignore_eos: bool = False
    logprobs: int | None = None  # of so many likeliest tokens beside the chosen one; None: of none at all
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """A prompt, to be answered `copies` times; the copies share its keys and values."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    copies: int = 1
    priority: int = 0  # smaller is sooner
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this request any more. `index` None: for none of its copies."""

    id: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """One of the engine's methods for those who run it: pause, resume, sleep, wake, load_adapter, …"""

    id: int
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The likeliest tokens at one place, with the chosen one first."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class OutputDelta:
    """What one copy of a request got in one step. The last one says why it ended."""

    id: int
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the chosen tokens, always
    alternatives: list[Alternatives] = field(default_factory=list)  # when they were asked for
    versions: list[int] = field(default_factory=list)  # of the weights that chose each token
    prompt_logprobs: list[Alternatives | None] | None = None  # of the whole prompt, once; the first has none
    cached_tokens: int = 0  # of the prompt, found computed
    admitted: float = 0.0  # in the first piece: when its computation began, on the clock that all processes share
    finish: Finish | None = None
    stop_token: int | None = None  # the one that ended it; it is not among `tokens`
    error: str = ""
    is_ours: bool = False  # the error is the engine's: the same request may go through another time


@dataclass(frozen=True, slots=True)
class EngineReply:
    """To a Control: its result, or why there is none."""

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
    memory: float = 0.0  # share of the device's that the engine may fill


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on; what to tell everyone who waits."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """How the engine does, a few times a second. Counts are totals since its start."""

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
    drafts: int = 0  # guesses, of one or more tokens
    drafted: int = 0  # tokens of these
    accepted: int = 0
    steps: int = 0
    step_tokens: int = 0  # computed in all of these
    steps_by_tokens: tuple[int, ...] = ()  # steps up to each of STEP_BOUNDS and above the one before; last: larger ones
    step_seconds: float = 0.0  # of the last steps, mean
    plan_step_seconds: float = 0.0  # what the roofs of this machine allow for the same steps
    roofline: float = 0.0  # plan_step_seconds / step_seconds
    tokens_per_second: float = 0.0  # generated, over the last seconds
    weights_version: int = 0
    state: str = "running"  # or paused, asleep
    refusal: str = ""  # why no request is taken, though it runs: its weights are not whole


Request = Submit | Abort | Control
Reply = list[OutputDelta] | EngineReply | Ready | Failed | Stats
