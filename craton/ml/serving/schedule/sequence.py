"""A request as the engine sees it: its tokens, and how many of them are computed.

Prefill, chunked prefill, prefix cache hits, decode, draft tokens and recomputation after a preemption are the same
operation: compute the tokens that are not computed yet. Draft tokens come from a draft model, or from n-gram lookup in
the request's own tokens: what followed the last few tokens earlier. A rejected draft costs a little computation and
never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from craton.ml.serving.messages import Alternatives, Finish, Sampling

if TYPE_CHECKING:
    from craton.ml.serving.grammar import GrammarState
    from craton.ml.serving.schedule.prefix import PrefixNode

LONGEST, SHORTEST = 4, 2  # tokens of the n-gram that must match
LOOKED_AT = 4096  # the last tokens, in which n-grams are looked up


@dataclass(slots=True, eq=False)
class Sequence:
    """One copy of a request. `tokens` are known on the host; `in_flight` more have been sampled on the device."""

    id: int
    index: int
    tokens: list[int]
    sampling: Sampling
    seed: int
    prompt_length: int
    stops: frozenset[int] = frozenset()  # tokens that end it
    is_plain: bool = True  # sampling needs only a temperature, without log-probabilities
    priority: int = 0
    adapter: str | None = None
    copies: int = 1  # of which this is the first, until its prompt is computed
    skipped: set[int] = field(default_factory=set)  # copies that were aborted before they were made
    computed: int = 0  # tokens in the KV cache, or in a started step
    in_flight: int = 0
    drafts: list[int] = field(default_factory=list)  # draft tokens after the last token, not yet verified
    draft_computed: int = 0  # leading tokens in the draft model's KV cache
    draft_nodes: int = 0  # leading nodes whose blocks are known to be in the draft model's KV cache
    blocks: list[int] = field(default_factory=list)
    nodes: list[PrefixNode] = field(default_factory=list)  # of the prefix tree, for the first of the blocks
    num_shared: int = 0  # leading nodes that another running sequence had, too, when the batch was last grouped
    version: int = 0  # of the weights under which its first token was computed
    is_private: bool = False  # its blocks mix weight versions or were dropped from the prefix cache: do not share them
    carried: int = 0  # generated tokens that it began with
    is_fork: bool = False  # its first delta has these tokens
    row: int = -1  # of the device's tables; -1: it is not running
    admitted: float = 0.0  # time of its first admission; 0: never
    adapter_slot: int = -1
    grammar: GrammarState | None = None
    cached_tokens: int = 0
    is_new: bool = True  # its cached tokens have not been reported yet
    prompt_found: dict[int, Alternatives] = field(default_factory=dict)  # position → log-probabilities there
    prompt_logprobs: list[Alternatives | None] | None = None  # set when complete
    finish: Finish | None = None

    def forked(self, **changes: Any) -> Sequence:
        """Return another sequence with the same tokens, of which none is computed, and with these changes."""
        uncomputed = {"in_flight": 0, "drafts": [], "blocks": [], "nodes": [], "row": -1, "computed": 0}
        uncomputed |= {"draft_computed": 0, "draft_nodes": 0}
        grammar = None if self.grammar is None else self.grammar.fork()
        own: dict[str, Any] = {"tokens": list(self.tokens), "skipped": set(), "prompt_found": {}, "grammar": grammar}
        return replace(self, **{**uncomputed, **own, **changes})

    @property
    def length(self) -> int:
        """Return the number of tokens, on the host or only on the device."""
        return len(self.tokens) + self.in_flight

    @property
    def outputs(self) -> int:
        return self.length - self.prompt_length

    @property
    def pending(self) -> int:
        """Return the number of tokens to compute next; one is sampled after the last of them and after every draft."""
        return len(self.tokens) + self.in_flight + len(self.drafts) - self.computed

    @property
    def is_at_limit(self) -> bool:
        """Whether max_tokens have been sampled, read back or not."""
        return len(self.tokens) + self.in_flight - self.prompt_length >= self.sampling.max_tokens


def ngram_drafts(tokens: Several[int], count: int) -> list[int]:
    """Return up to `count` draft tokens by n-gram lookup; none if the last tokens do not occur earlier."""
    text = tokens[-LOOKED_AT:]
    for length in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        end = list(text[-length:])
        last = end[-1]
        for place in range(len(text) - 2, length - 2, -1):
            if text[place] == last and list(text[place - length + 1 : place + 1]) == end:
                return list(text[place + 1 : place + 1 + count])
    return []
