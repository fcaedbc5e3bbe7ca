"""Serving on vLLM's metric names, which Craton's server and vLLM both export; steps against the roofline."""

from __future__ import annotations

from craton.observability.dashboards.model import SERVER, Board, Panel, PanelQuery, PanelRow

OF_RUN = 'run=~"$run"'
NAME = "{{run}} {{model_name}}"
RATE = "[$__rate_interval]"
OF_SERVER = 'run=~"$run", model_name!=""'


def _quantiles(histogram: str, *shares: float) -> tuple[PanelQuery, ...]:
    return tuple(
        PanelQuery(
            f"histogram_quantile({share}, sum by (run, model_name, le)"
            f" (rate(vllm:{histogram}_bucket{{{OF_RUN}}}{RATE})))",
            f"{NAME} p{share * 100:g}",
        )
        for share in shares
    )


def _sum(expr: str) -> str:
    return f"sum by (run, model_name) ({expr})"


LATENCY = PanelRow(
    "Latency",
    (
        Panel(
            "Time to first token (TTFT)",
            "Compare with queue and prefill below. Long queue: add servers. Long prefill: shorter chunks, or prompts "
            "with a shared prefix.",
            _quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
            unit="s",
            alerts=("FirstTokenSlow",),
        ),
        Panel(
            "Inter-token latency",
            "250 ms is slower than people read: run fewer concurrent requests, or shorter prefill chunks.",
            _quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99),
            unit="s",
            alerts=("TokensSlow",),
        ),
        Panel(
            "End-to-end latency",
            "From request to last token; it grows with the output length.",
            _quantiles("e2e_request_latency_seconds", 0.5, 0.95),
            unit="s",
        ),
        Panel(
            "Request time by phase",
            "Means of queue, prefill and decode; they add up.",
            tuple(
                PanelQuery(
                    f"{_sum(f'rate(vllm:request_{part}_time_seconds_sum{{{OF_RUN}}}{RATE})')}"
                    f" / {_sum(f'rate(vllm:request_{part}_time_seconds_count{{{OF_RUN}}}{RATE})')}",
                    f"{NAME} {part}",
                )
                for part in ("queue", "prefill", "decode")
            ),
            unit="s",
            stacked=True,
            alerts=("FirstTokenSlow", "QueueLong"),
        ),
        Panel(
            "Requests",
            "Running and waiting. More waiting than running: the load exceeds the server's capacity.",
            (
                PanelQuery(_sum(f"vllm:num_requests_running{{{OF_RUN}}}"), f"{NAME} computed"),
                PanelQuery(_sum(f"vllm:num_requests_waiting{{{OF_RUN}}}"), f"{NAME} waiting"),
            ),
            unit="short",
            alerts=("QueueLong",),
        ),
        Panel(
            "Finished requests, by reason",
            "`length` is max_tokens; `abort` is a client that disconnected or a failed engine: see its log.",
            (
                PanelQuery(
                    f"sum by (run, model_name, finished_reason) (rate(vllm:request_success_total{{{OF_RUN}}}{RATE}))",
                    f"{NAME} {{{{finished_reason}}}}",
                ),
            ),
            unit="reqps",
            alerts=("RequestsAborted",),
        ),
    ),
)

SPEED = PanelRow(
    "Throughput, predicted and measured",
    (
        Panel(
            "Generated tokens per second",
            "Dashed is the prediction for the same steps.",
            (
                PanelQuery(_sum(f"craton_run_tokens_per_second{{{OF_SERVER}}}"), NAME),
                PanelQuery(_sum(f"craton_plan_tokens_per_second{{{OF_SERVER}}}"), f"{NAME} planned", is_plan=True),
            ),
            unit="short",
        ),
        Panel(
            "Step time",
            "Mean of the last steps, and the prediction for them. Far above: the GPU is slow, or the host is busy.",
            (
                PanelQuery(f"max by (run, model_name) (craton_run_step_seconds{{{OF_SERVER}}})", NAME),
                PanelQuery(
                    f"max by (run, model_name) (craton_plan_step_seconds{{{OF_SERVER}}})",
                    f"{NAME} planned",
                    is_plan=True,
                ),
            ),
            unit="s",
        ),
        Panel(
            "Roofline efficiency",
            "Minimum over measured step time. It is low with few requests; check it under load.",
            (PanelQuery(f"min by (run, model_name) (craton_serve_roofline{{{OF_RUN}}})", NAME),),
            unit="percentunit",
        ),
        Panel(
            "Prompt and generated tokens per second",
            "Counted as clients see them.",
            (
                PanelQuery(_sum(f"rate(vllm:prompt_tokens_total{{{OF_RUN}}}{RATE})"), f"{NAME} read"),
                PanelQuery(_sum(f"rate(vllm:generation_tokens_total{{{OF_RUN}}}{RATE})"), f"{NAME} written"),
            ),
            unit="short",
        ),
        Panel(
            "Tokens per step",
            "Mean. Small steps under load: the limit on tokens or requests is too low.",
            (
                PanelQuery(
                    f"{_sum(f'rate(vllm:iteration_tokens_total_sum{{{OF_RUN}}}{RATE})')}"
                    f" / {_sum(f'rate(vllm:iteration_tokens_total_count{{{OF_RUN}}}{RATE})')}",
                    NAME,
                ),
            ),
            unit="short",
        ),
        Panel(
            "Accepted draft tokens",
            "Acceptance rate of speculative decoding. Below a third it costs more than it gains: draft fewer tokens.",
            (
                PanelQuery(
                    f"{_sum(f'rate(vllm:spec_decode_num_accepted_tokens_total{{{OF_RUN}}}{RATE})')}"
                    f" / {_sum(f'rate(vllm:spec_decode_num_draft_tokens_total{{{OF_RUN}}}{RATE})')}",
                    NAME,
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Speed-up by a draft model",
            "Estimated for decode, from the acceptance and the step times of both models. 1: drafts are off.",
            (PanelQuery(f"max by (run, model_name) (craton_serve_draft_speedup{{{OF_RUN}}} > 0)", NAME),),
            unit="short",
        ),
    ),
)

CACHE = PanelRow(
    "KV cache",
    (
        Panel(
            "KV-cache blocks in use",
            "Full without waiting requests is fine. Full with waiting requests: add memory or servers.",
            (
                PanelQuery(f"max by (run, model_name) (vllm:kv_cache_usage_perc{{{OF_RUN}}})", f"{NAME} GPU"),
                PanelQuery(
                    f"max by (run, model_name) (craton_serve_host_blocks_used_ratio{{{OF_RUN}}})", f"{NAME} host"
                ),
            ),
            unit="percentunit",
            alerts=("KvCacheExhausted",),
        ),
        Panel(
            "Preemptions",
            "Each preempted request is recomputed later. Lower the number of concurrent requests.",
            (PanelQuery(_sum(f"rate(vllm:num_preemptions_total{{{OF_RUN}}}{RATE})"), NAME),),
            unit="ops",
            alerts=("RequestsPreempted",),
        ),
        Panel(
            "Prefix cache hit rate",
            "By tier, over all prompt tokens looked up. Low although prompts share a prefix: they differ early, or "
            "blocks are evicted too soon.",
            (
                PanelQuery(
                    f"sum by (run, model_name, tier) (rate(craton_serve_prefix_hit_tokens_total{{{OF_RUN}}}{RATE}))"
                    " / on (run, model_name) group_left ()"
                    f" {_sum(f'rate(vllm:prefix_cache_queries_total{{{OF_RUN}}}{RATE})')}",
                    f"{NAME} {{{{tier}}}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Servers that answer",
            "1 each. The front end already answers while a model loads.",
            (PanelQuery('max by (run, node) (up{job="craton-serve", run=~"$run"})', "{{run}} {{node}}"),),
            unit="short",
            kind="stat",
            height=5,
            warn=1,
            bad=0.5,
            alerts=("ServerDown",),
        ),
        Panel(
            "Weights version",
            "Servers of one model that differ: an update reached only some of them.",
            (PanelQuery(f"max by (run, model_name) (craton_serve_weights_version{{{OF_RUN}}})", NAME),),
            unit="short",
            kind="stat",
            height=5,
        ),
        Panel(
            "Sleep state",
            "1 for the current state of the engine.",
            (
                PanelQuery(
                    f"max by (run, model_name, sleep_state) (vllm:engine_sleep_state{{{OF_RUN}}}) == 1",
                    f"{NAME} {{{{sleep_state}}}}",
                ),
            ),
            unit="short",
            kind="stat",
            height=5,
        ),
    ),
)

SERVING = Board(
    "serving",
    "Serving",
    "Latency, throughput against the roofline, and the KV cache.",
    (SERVER,),
    (LATENCY, SPEED, CACHE),
    since="now-1h",
)
