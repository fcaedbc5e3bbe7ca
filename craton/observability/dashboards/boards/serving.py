"""Serving, by vLLM's names, which Craton's server and vLLM itself both serve; steps against the machine's roofs."""

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
    "What users notice",
    (
        Panel(
            "Time to the first token",
            "Compare with queue and prefill below: a long queue asks for more servers, long prefill for shorter chunks "
            "or prompts that share a beginning.",
            _quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
            unit="s",
            alerts=("FirstTokenSlow",),
        ),
        Panel(
            "Time between tokens",
            "A quarter of a second is slower than people read: fewer requests at once, or shorter prefill chunks.",
            _quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99),
            unit="s",
            alerts=("TokensSlow",),
        ),
        Panel(
            "Whole request",
            "From request to last token; long answers take long.",
            _quantiles("e2e_request_latency_seconds", 0.5, 0.95),
            unit="s",
        ),
        Panel(
            "Where a request's time goes",
            "Means of waiting, reading the prompt, and writing the answer; they add up.",
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
            "Computed now, and waiting. A queue that is longer than what runs: load is above what the server can do.",
            (
                PanelQuery(_sum(f"vllm:num_requests_running{{{OF_RUN}}}"), f"{NAME} computed"),
                PanelQuery(_sum(f"vllm:num_requests_waiting{{{OF_RUN}}}"), f"{NAME} waiting"),
            ),
            unit="short",
            alerts=("QueueLong",),
        ),
        Panel(
            "Answers that ended, by reason",
            "`length` is max_tokens, `abort` a client that went away or an engine that failed: its log has the reason.",
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
    "Speed, predicted and measured",
    (
        Panel(
            "Tokens generated a second",
            "Dashed is what the machine's roofs (memory bandwidth, FLOPs) allow for the same steps.",
            (
                PanelQuery(_sum(f"craton_run_tokens_per_second{{{OF_SERVER}}}"), NAME),
                PanelQuery(_sum(f"craton_plan_tokens_per_second{{{OF_SERVER}}}"), f"{NAME} at the roofs", is_plan=True),
            ),
            unit="short",
        ),
        Panel(
            "Step",
            "Mean of the last steps, and what the roofs allow for them. Far above: launches, sampling or the host.",
            (
                PanelQuery(f"max by (run, model_name) (craton_run_step_seconds{{{OF_SERVER}}})", NAME),
                PanelQuery(
                    f"max by (run, model_name) (craton_plan_step_seconds{{{OF_SERVER}}})",
                    f"{NAME} at the roofs",
                    is_plan=True,
                ),
            ),
            unit="s",
        ),
        Panel(
            "Share of the roofs",
            "Planned over measured step time. It is low while few requests run; look at it under load.",
            (PanelQuery(f"min by (run, model_name) (craton_serve_roofline{{{OF_RUN}}})", NAME),),
            unit="percentunit",
        ),
        Panel(
            "Tokens by rate",
            "Read and written, counted where clients see them.",
            (
                PanelQuery(_sum(f"rate(vllm:prompt_tokens_total{{{OF_RUN}}}{RATE})"), f"{NAME} read"),
                PanelQuery(_sum(f"rate(vllm:generation_tokens_total{{{OF_RUN}}}{RATE})"), f"{NAME} written"),
            ),
            unit="short",
        ),
        Panel(
            "Tokens a step",
            "Mean. Small steps under load mean that the limit on tokens or requests is too low.",
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
            "Guessed tokens that were right",
            "Of speculative decoding. Below a third it costs more than it gives: guess fewer tokens.",
            (
                PanelQuery(
                    f"{_sum(f'rate(vllm:spec_decode_num_accepted_tokens_total{{{OF_RUN}}}{RATE})')}"
                    f" / {_sum(f'rate(vllm:spec_decode_num_draft_tokens_total{{{OF_RUN}}}{RATE})')}",
                    NAME,
                ),
            ),
            unit="percentunit",
        ),
    ),
)

CACHE = PanelRow(
    "Keys and values",
    (
        Panel(
            "Blocks in use",
            "Full and nobody waits: well used. Full while requests wait: more memory, or more servers.",
            (
                PanelQuery(f"max by (run, model_name) (vllm:kv_cache_usage_perc{{{OF_RUN}}})", f"{NAME} on the device"),
                PanelQuery(
                    f"max by (run, model_name) (craton_serve_host_blocks_used_ratio{{{OF_RUN}}})", f"{NAME} in the host"
                ),
            ),
            unit="percentunit",
            alerts=("KvCacheExhausted",),
        ),
        Panel(
            "Requests taken out again",
            "Each is computed anew later. Lower the number of requests that run at once.",
            (PanelQuery(_sum(f"rate(vllm:num_preemptions_total{{{OF_RUN}}}{RATE})"), NAME),),
            unit="ops",
            alerts=("RequestsPreempted",),
        ),
        Panel(
            "Prompt tokens found computed",
            "By where they were found, of all that were looked up. Low where prompts should share a beginning: it "
            "differs early, or blocks are evicted too soon.",
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
            "1 each. While a model loads the front end answers already.",
            (PanelQuery('max by (run, node) (up{job="craton-serve", run=~"$run"})', "{{run}} {{node}}"),),
            unit="short",
            kind="stat",
            height=5,
            warn=1,
            bad=0.5,
            alerts=("ServerDown",),
        ),
        Panel(
            "Version of the weights",
            "Servers of one model that differ: an update reached only some.",
            (PanelQuery(f"max by (run, model_name) (craton_serve_weights_version{{{OF_RUN}}})", NAME),),
            unit="short",
            kind="stat",
            height=5,
        ),
        Panel(
            "State",
            "1 at the state the engine is in.",
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
    "Latency that users notice, speed against the machine's roofs, and the cache of keys and values.",
    (SERVER,),
    (LATENCY, SPEED, CACHE),
    since="now-1h",
)
