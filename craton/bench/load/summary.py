"""Statistics of one load, as pure functions: latencies, throughput, goodput, errors, and a timeline.

Latencies and tokens are those of completely answered requests; a failed one counts as sent and as an error. Throughput
is answered requests or tokens divided by the time from the first due request to the end of the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from craton.bench.load.samples import Objectives, RequestSample


@dataclass(frozen=True)
class Distribution:
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Failure:
    """One kind of error: its count, and the message of the first."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True)
class Summary:
    """The results of a load. A latency is None if no request has one, such as ITL with one token per answer."""

    requests: int
    answered: int
    duration_seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the server does not report them
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput_requests_per_second: float | None  # None: no objectives were given
    good_share: float | None  # of all requests
    ttft_seconds: Distribution | None
    itl_seconds: Distribution | None
    tpot_seconds: Distribution | None
    e2e_seconds: Distribution | None
    late_seconds: Distribution | None  # delay of the client between due and sent
    tokens_per_chunk: float | None
    has_usage: bool  # False: some answer had no usage, so its chunks were counted
    failures: tuple[Failure, ...] = ()

    @property
    def failed(self) -> int:
        return self.requests - self.answered

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Timeline:
    """A load over time, in bins of equal width; `seconds` are their centres."""

    seconds: np.ndarray
    running: np.ndarray  # requests sent and not ended, mean over the bin
    tokens_per_second: np.ndarray


def summarize(samples: Sequence[RequestSample], objectives: Objectives | None = None) -> Summary:
    answered = [sample for sample in samples if not sample.error]
    duration = _span(samples)
    output_tokens = sum(sample.output_tokens for sample in answered)
    prompt_tokens = sum(sample.prompt_tokens or 0 for sample in answered)
    cached = [sample.cached_tokens for sample in answered if sample.cached_tokens is not None]
    chunks = sum(len(sample.chunk_seconds) for sample in answered)
    good = sum(map(objectives.met_by, samples)) if objectives else 0
    gaps = [sample.gap_seconds for sample in answered]
    return Summary(
        requests=len(samples),
        answered=len(answered),
        duration_seconds=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        requests_per_second=_rate(len(answered), duration),
        output_tokens_per_second=_rate(output_tokens, duration),
        total_tokens_per_second=_rate(prompt_tokens + output_tokens, duration),
        goodput_requests_per_second=_rate(good, duration) if objectives else None,
        good_share=good / len(samples) if objectives and samples else None,
        ttft_seconds=_distribution([sample.ttft_seconds for sample in answered]),
        itl_seconds=_distribution(np.concatenate(gaps) if gaps else []),
        tpot_seconds=_distribution([sample.tpot_seconds for sample in answered]),
        e2e_seconds=_distribution([sample.e2e_seconds for sample in answered]),
        late_seconds=_distribution([sample.late_seconds for sample in samples]),
        tokens_per_chunk=output_tokens / chunks if chunks else None,
        has_usage=all(sample.has_usage for sample in answered),
        failures=_failures(samples),
    )


def timeline(samples: Sequence[RequestSample], bins: int = 200) -> Timeline:
    """Return the timeline. Tokens of a request are spread evenly over its chunks; failed requests are left out."""
    start = min((sample.due_seconds for sample in samples), default=0.0)
    edges = np.linspace(start, start + max(_span(samples), 1e-9), bins + 1)
    width = edges[1] - edges[0]
    tokens = np.zeros(bins)
    for sample in samples:
        if not sample.error and len(sample.chunk_seconds):
            hits = np.histogram(sample.chunk_seconds, edges)[0]
            tokens += hits * (sample.output_tokens / len(sample.chunk_seconds))
    sent = np.array([sample.sent_seconds for sample in samples])
    ended = np.array([sample.end_seconds for sample in samples])
    # The integral of "running" up to each edge; its differences are exact means, even for short requests.
    until = [(np.clip(edge, sent, ended) - sent).sum() for edge in edges]
    return Timeline((edges[:-1] + edges[1:]) / 2, np.diff(until) / width, tokens / width)


def _span(samples: Sequence[RequestSample]) -> float:
    if not samples:
        return 0.0
    return max(sample.end_seconds for sample in samples) - min(sample.due_seconds for sample in samples)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _distribution(values: Sequence[float | None] | np.ndarray) -> Distribution | None:
    known_values = np.array([value for value in values if value is not None])
    if not len(known_values):
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(known_values, (50, 95, 99)))
    return Distribution(float(known_values.mean()), p50, p95, p99)


def _failures(samples: Sequence[RequestSample]) -> tuple[Failure, ...]:
    counts = Counter(sample.error for sample in samples if sample.error)
    examples = {sample.error: sample.error_detail for sample in reversed(samples)}
    return tuple(Failure(kind, number, examples[kind]) for kind, number in counts.most_common())
