"""A request as the engine sees it: its tokens, and how many of them are computed.

Prefill, chunks of it, prefix hits, decoding, drafts and coming back after a preemption are all the same: tokens that
are there and not computed yet are computed. Drafts are guesses from the text itself: after the last few tokens, what
followed them before. A wrong guess costs a little computation and never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from craton.ml.serving.messages import Alternatives, Finish, Sampling

if TYPE_CHECKING:
    from craton.ml.serving.grammar import GrammarState
    from craton.ml.serving.schedule.prefix import PrefixNode

LONGEST, SHORTEST = 4, 2  # tokens that must be the same for a guess
LOOKED_AT = 4096  # of the text, from its end


@dataclass(slots=True, eq=False)
class Sequence:
    """One text that grows. `tokens` are those known here; `in_flight` more have been chosen on the device."""

    id: int
    index: int
    tokens: list[int]
    sampling: Sampling
    seed: int
    prompt_length: int
    stops: frozenset[int] = frozenset()  # tokens that end it
    is_plain: bool = True  # only the next token is asked for, and a temperature decides
    priority: int = 0
    adapter: str | None = None
    copies: int = 1  # of which this is the first, until its prompt is computed
    skipped: set[int] = field(default_factory=set)  # copies that nobody waits for any more, before they were made
    computed: int = 0  # tokens whose keys and values are there, or on their way
    in_flight: int = 0
    drafts: list[int] = field(default_factory=list)  # guesses after the last token, not yet computed
    blocks: list[int] = field(default_factory=list)
    nodes: list[PrefixNode] = field(default_factory=list)  # of the prefix tree, for the first of the blocks
    version: int = 0  # of the weights under which its first token was computed
    is_private: bool = False  # what it computed since is of several versions, or forgotten: its blocks are its own
    row: int = -1  # of the device's tables; -1: it is not running
    admitted: float = 0.0  # moment at which it first ran; 0: it has not yet
    adapter_slot: int = -1
    grammar: GrammarState | None = None
    cached_tokens: int = 0
    is_new: bool = True  # nobody has been told of its cached tokens yet
    prompt_found: dict[int, Alternatives] = field(default_factory=dict)  # place → log-probabilities there
    prompt_logprobs: list[Alternatives | None] | None = None  # all of them, when they are complete
    finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens, known here or only on the device."""
        return len(self.tokens) + self.in_flight

    @property
    def outputs(self) -> int:
        return self.length - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens that are to be computed next; the last of them, and every draft, gives another."""
        return len(self.tokens) + self.in_flight + len(self.drafts) - self.computed

    @property
    def is_at_limit(self) -> bool:
        """Whether as many tokens as were asked for are chosen, known here or not."""
        return len(self.tokens) + self.in_flight - self.prompt_length >= self.sampling.max_tokens


def guess(tokens: Several[int], count: int) -> list[int]:
    """At most so many tokens; none when the end of the text does not occur earlier in it."""
    text = tokens[-LOOKED_AT:]
    for length in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        end = list(text[-length:])
        last = end[-1]
        for place in range(len(text) - 2, length - 2, -1):
            if text[place] == last and list(text[place - length + 1 : place + 1]) == end:
                return list(text[place + 1 : place + 1 + count])
    return []
