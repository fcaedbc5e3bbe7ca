"""What a strategy returns, and how far it is meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from craton.ml.serving.clients import Answer
from craton.ml.serving.messages import Finish


@dataclass
class StrategySample:
    """One sample, or one branch of a search from its root. `counted`: its vote, if it has one."""

    index: int
    text: str
    tokens: tuple[int, ...] = ()  # empty if the endpoint gives no token ids
    num_tokens: int = 0
    finish: Finish | None = None
    score: float | None = None
    counted: str | None = None
    answer: Answer | None = None  # of a search: that of the branch's last step


@dataclass(frozen=True)
class StrategyUsage:
    """Tokens of all samples. `prompt_tokens`: for each request again, as endpoints bill them; a text that only the
    endpoint can tokenize is estimated."""

    prompt_tokens: int
    completion_tokens: int
    chosen_tokens: int
    discarded_tokens: int
    num_samples: int


@dataclass
class StrategyOutcome:
    """The answer of a strategy. `limited_by`: the limit that ended it (tokens, seconds, dollars), or an empty text."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish | None
    chosen: Answer
    samples: list[StrategySample]
    usage: StrategyUsage
    limited_by: str = ""
    report: dict[str, Any] = field(default_factory=dict)  # JSON
    reasoning: str | None = None  # the chain of thought, where the strategy separates it
    seconds: float = 0.0
    dollars: float | None = None  # None: no prices


@dataclass(frozen=True)
class StrategyProgress:
    """How far a strategy is."""

    kind: str
    samples: int  # that have ended
    num_samples: int  # maximum
    tokens: int
    note: str = ""
