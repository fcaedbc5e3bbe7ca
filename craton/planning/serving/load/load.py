"""What users ask of a server: requests, their lengths, and how much of their prompts is cached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from craton.planning.serving.load.lengths import TokenLengths


@dataclass(frozen=True)
class ServedLoad:
    """Open load: requests arrive at a rate, whether or not the server keeps up. Closed load: `concurrency` users; each
    sends the next request when the last one ends. Neither: only what one request looks like."""

    input: TokenLengths
    output: TokenLengths
    rate: float | None = None  # requests per second
    concurrency: int | None = None
    prefix_hits: float = 0.0  # share of prompt tokens that the prefix cache has
    acceptance: float | None = None  # of a draft token; None: not stated
    burstiness: float = 1.0  # squared coefficient of variation of the gaps between requests; 1: Poisson
    requests: int | None = None  # of a benchmark, that begins with all users at once; None: users come and go

    @property
    def burst_share(self) -> float:
        """Share of the requests that begin at once."""
        if self.requests is None or self.concurrency is None:
            return 0.0
        return min(1.0, self.concurrency / self.requests)

    @cached_property
    def prefill(self) -> TokenLengths:
        """Prompt tokens that are computed."""
        return self.input.scaled(1.0 - self.prefix_hits)

    @cached_property
    def prompt_tokens(self) -> float:
        """Length of the prompt with the same attention: half of its keys for each token, and all that are cached."""
        return self.prefill.mean + 2.0 * self.prefix_hits * self.input.mean

    @cached_property
    def context_tokens(self) -> float:
        """Mean KV cache tokens of a request in decode; long outputs stay longer, and count for more."""
        return self.input.mean + self.output.second_moment / (2.0 * self.output.mean)

    @cached_property
    def decode_steps(self) -> float:
        """Mean tokens after the first one."""
        return max(self.output.mean - 1.0, 1e-9)

    @cached_property
    def context_dispersion(self) -> float:
        """E[context²] / E²[context] of a request in decode: sizes that vary fill the KV cache less evenly."""
        output, prompt = self.output, self.input
        made_squared = float((output.array**3).mean()) / (3.0 * output.mean)
        made = output.second_moment / (2.0 * output.mean)
        return (prompt.second_moment + 2.0 * prompt.mean * made + made_squared) / self.context_tokens**2
