"""Prometheus metrics: under vLLM's names, which dashboards and routers know, and under our own, with the plan's values.

Engine metrics come from its newest report at each scrape; requests and latencies are counted here. All have the label
model_name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from craton.ml.serving.messages import STEP_BOUNDS, OutputDelta, Stats

if TYPE_CHECKING:
    from craton.ml.serving.server.link import EngineLink

# vLLM's buckets, so that quantiles of both engines can be compared.
FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BOUNDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
COUNT_BOUNDS = tuple(number * 10**power for power in range(6) for number in (1, 2, 5))
COPIES_BOUNDS = (1, 2, 5, 10, 20)

SLEEP_STATES = {"running": "awake", "paused": "awake", "asleep": "weights_offloaded"}
LABELS = ("model_name",)
REFUSED_SECONDS, MAX_REFUSALS = 30.0, 1000

disable_created_metrics()


class Metrics:
    """All metrics of /metrics."""

    def __init__(self, link: EngineLink, served_name: str | None) -> None:
        self._link = link
        self._served_name = served_name
        self.last_first_token_seconds = 0.0
        self._refused: deque[float] = deque(maxlen=MAX_REFUSALS)  # when, monotonic
        registry = self._registry = CollectorRegistry()
        registry.register(_EngineMetrics(link, self))

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, buckets=bounds, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=registry)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of started requests")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache")
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._success = counter("request_success", "Finished answers", "finished_reason")
        self._first_token = histogram("time_to_first_token_seconds", "From request to first token", FIRST_TOKEN_BOUNDS)
        self._inter_token = histogram("inter_token_latency_seconds", "From one token to the next", TOKEN_BOUNDS)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per output token after the first", TOKEN_BOUNDS
        )
        self._whole = histogram("e2e_request_latency_seconds", "From request to last token", REQUEST_BOUNDS)
        # These add up: queue, prefill (until the first token), decode.
        self._queue = histogram("request_queue_time_seconds", "From request to its first step", REQUEST_BOUNDS)
        self._prefill = histogram("request_prefill_time_seconds", "From first step to first token", REQUEST_BOUNDS)
        self._decode = histogram("request_decode_time_seconds", "From first to last token", REQUEST_BOUNDS)
        self._inference = histogram("request_inference_time_seconds", "From first step to last token", REQUEST_BOUNDS)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", COUNT_BOUNDS)
        self._request_generation = histogram("request_generation_tokens", "Tokens of an answer", COUNT_BOUNDS)
        self._params_n = histogram("request_params_n", "The parameter n", COPIES_BOUNDS)
        self._params_max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens", COUNT_BOUNDS)

        def own(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"craton_serve_{name}", text, (*LABELS, *labels), registry=registry)

        self._strategies = own("strategies", "Answers chosen by a strategy", "kind")
        self._strategy_samples = own("strategy_samples", "Samples of strategies", "kind")
        self._strategy_tokens = own("strategy_tokens", "Tokens of these samples, chosen or discarded", "kind", "fate")
        self._strategy_early_stops = own("strategy_early_stops", "Votes that ended before all their samples", "kind")
        self._strategy_limited = own("strategy_limited", "Answers at a limit (tokens, seconds)", "kind", "limit")
        self._verifier_scores = own("verifier_scores", "Samples that a verifier or reward model scored", "verifier")
        self._verifier_failures = own("verifier_failures", "Samples that a verifier gave no score", "verifier")

    def verified(self, name: str, scored: int, failed: int) -> None:
        """Count samples with and without a score."""
        self._verifier_scores.labels(self.model_name, name).inc(scored)
        self._verifier_failures.labels(self.model_name, name).inc(failed)

    def strategy_ended(
        self, kind: str, samples: int, chosen_tokens: int, discarded_tokens: int, limited_by: str, is_early: bool
    ) -> None:
        """Count the answer of a strategy."""
        self._strategies.labels(self.model_name, kind).inc()
        self._strategy_samples.labels(self.model_name, kind).inc(samples)
        self._strategy_tokens.labels(self.model_name, kind, "chosen").inc(chosen_tokens)
        self._strategy_tokens.labels(self.model_name, kind, "discarded").inc(discarded_tokens)
        if limited_by:
            self._strategy_limited.labels(self.model_name, kind, limited_by).inc()
        if is_early:
            self._strategy_early_stops.labels(self.model_name, kind).inc()

    def refused(self) -> None:
        """Count a request that was answered with 429."""
        self._refused.append(time.monotonic())

    @property
    def recently_refused(self) -> int:
        """Requests answered with 429 in the last REFUSED_SECONDS."""
        since = time.monotonic() - REFUSED_SECONDS
        return sum(moment >= since for moment in self._refused)

    @property
    def model_name(self) -> str:
        """Empty until the engine is ready."""
        ready = self._link.ready
        return "" if ready is None else self._served_name or ready.model

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def meter(self, prompt_tokens: int, copies: int, max_tokens: int) -> ServerMeter:
        self._params_n.labels(self.model_name).observe(copies)
        self._params_max_tokens.labels(self.model_name).observe(max_tokens)
        self._request_prompt.labels(self.model_name).observe(prompt_tokens)
        return ServerMeter(self, prompt_tokens)


class ServerMeter:
    """Measures one prompt and its answers, from its construction on."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._started = time.monotonic()
        self._admitted = 0.0  # when its prefill began; 0: unknown
        self._times: dict[int, tuple[float, float, int]] = {}  # first, last, tokens of each copy
        self._inter_token = metrics._inter_token.labels(metrics.model_name)
        self._generation_tokens = metrics._generation_tokens.labels(metrics.model_name)

    def note(self, piece: OutputDelta, now: float, finish: str | None) -> None:
        """Record a delta; `finish` is the finish reason of the last one."""
        count = len(piece.tokens)
        times = self._times.get(piece.index)
        if times is None:
            self._begin(piece, now)
            times = (now, now, count)
        elif count:
            self._inter_token.observe((now - times[1]) / count)
            times = (times[0], now, times[2] + count)
        self._times[piece.index] = times
        self._generation_tokens.inc(count)
        if finish is not None:
            self._end(*times, "abort" if piece.finish == "abort" else finish)

    def _begin(self, piece: OutputDelta, now: float) -> None:
        if self._times:
            return  # the copies share their prompt
        metrics, name = self._metrics, self._metrics.model_name
        metrics.last_first_token_seconds = now - self._started
        metrics._first_token.labels(name).observe(now - self._started)
        if piece.admitted:
            self._admitted = max(piece.admitted, self._started)
            metrics._queue.labels(name).observe(self._admitted - self._started)
            metrics._prefill.labels(name).observe(now - self._admitted)
        metrics._prompt_tokens.labels(name).inc(self._prompt_tokens)
        metrics._cached_tokens.labels(name).inc(piece.cached_tokens)

    def _end(self, first: float, last: float, tokens: int, finish: str) -> None:
        metrics, name = self._metrics, self._metrics.model_name
        metrics._success.labels(name, finish).inc()
        metrics._whole.labels(name).observe(last - self._started)
        metrics._decode.labels(name).observe(last - first)
        if self._admitted:
            metrics._inference.labels(name).observe(last - self._admitted)
        metrics._request_generation.labels(name).observe(tokens)
        if tokens > 1:
            metrics._per_token.labels(name).observe((last - first) / (tokens - 1))


class _EngineMetrics(Collector):
    """Collects the engine's newest report at each scrape."""

    def __init__(self, link: EngineLink, metrics: Metrics) -> None:
        self._link = link
        self._metrics = metrics

    def _own_gauges(self) -> list[tuple[str, str, float]]:
        now = time.monotonic()
        silent = [now - exchange.heard_at for exchange in self._link.exchanges if exchange.has_begun]
        return [
            (
                "craton_serve_recently_refused",
                "Requests answered with 429 in the last half minute",
                self._metrics.recently_refused,
            ),
            (
                "craton_serve_longest_stall_seconds",
                "Longest current wait of a running request for its next token",
                max(silent, default=0.0),
            ),
            (
                "craton_serve_admin_request_seconds",
                "Age of the oldest admin request under way, such as an update of the weights",
                self._link.control_seconds,
            ),
        ]

    def collect(self) -> Iterator[Metric]:
        if not self._metrics.model_name:
            return
        stats = self._link.stats
        for name, text, value in (*_gauges(stats), *self._own_gauges()):
            family = GaugeMetricFamily(name, text, labels=LABELS)
            family.add_metric([self._metrics.model_name], value)
            yield family
        for name, text, value in _counters(stats):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric([self._metrics.model_name], value)
            yield counter
        yield self._step_tokens(stats)
        yield self._cache(stats)
        yield self._sleep_state(stats)
        yield from self._tiers(stats)
        yield self._adapters()

    def _step_tokens(self, stats: Stats) -> Metric:
        bounds = [*(str(float(bound)) for bound in STEP_BOUNDS), "+Inf"]
        counts = accumulate(stats.steps_by_tokens or [0] * len(bounds))
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed in a step", labels=LABELS)
        family.add_metric(
            [self._metrics.model_name], list(zip(bounds, map(float, counts), strict=True)), float(stats.step_tokens)
        )
        return family

    def _cache(self, stats: Stats) -> Metric:
        """Return vLLM's info metric: a gauge of 1 with the values as labels."""
        ready = self._link.ready
        assert ready is not None
        values = {
            "block_size": ready.page,
            "cache_dtype": ready.kv_precision,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": ready.memory,
            "num_gpu_blocks": stats.blocks,
            "num_cpu_blocks": stats.host_blocks,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "KV cache configuration", labels=(*LABELS, *values))
        family.add_metric([self._metrics.model_name, *map(str, values.values())], 1.0)
        return family

    def _sleep_state(self, stats: Stats) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the current state", labels=(*LABELS, "sleep_state")
        )
        now = SLEEP_STATES.get(stats.state, stats.state)
        for state in ("awake", "weights_offloaded", "discard_all"):
            family.add_metric([self._metrics.model_name, state], float(state == now))
        return family

    def _tiers(self, stats: Stats) -> Iterator[Metric]:
        ratio = GaugeMetricFamily(
            "craton_serve_prefix_hit_ratio", "Prefix cache hit share of prompt tokens", labels=(*LABELS, "tier")
        )
        tokens = CounterMetricFamily(
            "craton_serve_prefix_hit_tokens", "Prompt tokens found in the prefix cache", labels=(*LABELS, "tier")
        )
        for tier, hits in (("device", stats.prefix_hits), ("host", stats.host_hits)):
            ratio.add_metric([self._metrics.model_name, tier], _share(hits, stats.prefix_queries))
            tokens.add_metric([self._metrics.model_name, tier], hits)
        yield ratio
        yield tokens

    def _adapters(self) -> Metric:
        """Return vLLM's adapter metric, which routers read: names as labels, the time as the value."""
        running: set[str] = set()
        waiting: set[str] = set()
        for exchange in self._link.exchanges:
            (running if exchange.has_begun else waiting).update(exchange.adapters)
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use", labels=(*LABELS, *labels))
        ready = self._link.ready
        loaded = len(ready.adapters) if ready is not None else 0
        values = [str(loaded), ",".join(sorted(running)), ",".join(sorted(waiting))]
        family.add_metric([self._metrics.model_name, *values], time.time())
        return family


def _gauges(stats: Stats) -> list[tuple[str, str, float]]:
    plan_tokens = 0.0
    if stats.plan_step_seconds:
        plan_tokens = stats.tokens_per_second * stats.step_seconds / stats.plan_step_seconds
    return [
        ("vllm:num_requests_running", "Running requests", stats.running),
        ("vllm:num_requests_waiting", "Waiting requests", stats.waiting),
        ("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use", _share(stats.blocks_used, stats.blocks)),
        ("craton_serve_blocks", "KV cache blocks on the device", stats.blocks),
        ("craton_serve_host_blocks", "KV cache blocks in host memory", stats.host_blocks),
        (
            "craton_serve_host_blocks_used_ratio",
            "Share of KV cache blocks in host memory in use",
            _share(stats.host_blocks_used, stats.host_blocks),
        ),
        ("craton_run_step_seconds", "Mean duration of the last steps", stats.step_seconds),
        ("craton_plan_step_seconds", "Predicted duration of the same steps", stats.plan_step_seconds),
        ("craton_run_tokens_per_second", "Tokens generated per second", stats.tokens_per_second),
        ("craton_plan_tokens_per_second", "Tokens per second with steps as predicted", plan_tokens),
        ("craton_serve_roofline", "Roofline step duration over measured step duration", stats.roofline),
        ("craton_serve_weights_version", "Version of the weights", stats.weights_version),
        ("craton_serve_draft_tokens", "Draft tokens of a request in the last step", stats.draft_tokens),
        (
            "craton_serve_draft_mean_length",
            "Mean tokens that a verified draft gave, the accepted ones and one more",
            1 + _share(stats.accepted, stats.drafts),
        ),
        (
            "craton_serve_draft_acceptance",
            "Estimated probability that a draft model's token is accepted; 0: no draft model",
            stats.draft_acceptance,
        ),
        (
            "craton_serve_draft_speedup",
            "Estimated speed-up of decode by the draft model; 0: no draft model",
            stats.draft_speedup,
        ),
    ]


def _counters(stats: Stats) -> list[tuple[str, str, float]]:
    return [
        ("vllm:num_preemptions", "Preempted requests", stats.preemptions),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries),
        ("vllm:prefix_cache_hits", "Of these, found on the device", stats.prefix_hits),
        (
            "vllm:external_prefix_cache_queries",
            "Prompt tokens not found on the device",
            max(stats.prefix_queries - stats.prefix_hits, 0),
        ),
        ("vllm:external_prefix_cache_hits", "Of these, found in host memory", stats.host_hits),
        ("vllm:spec_decode_num_drafts", "Drafts, of one or more tokens", stats.drafts),
        ("vllm:spec_decode_num_draft_tokens", "Draft tokens", stats.drafted),
        ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens", stats.accepted),
        ("craton_serve_steps", "Steps", stats.steps),
        ("craton_serve_context_tokens", "KV cache tokens that steps attended to", stats.context_tokens),
        ("craton_serve_shared_prefix_tokens", "Of these, read once for a group of requests", stats.shared_tokens),
    ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
