"""The live line of a server: what the job wants of its latency, beside the plan and what is measured."""

from __future__ import annotations

import json
from pathlib import Path

from craton.cli.views.server import state_line
from craton.orchestration import ServerAddress, ServerTargets, ServerWatch
from craton.telemetry import RunDirectory

METRICS = {"time_to_first_token_seconds": (60.0, 10), "request_time_per_output_token_seconds": (1.2, 100)}
JOB = """\
name: srv
kind: serve
model: llama-3.1-8b
cluster: local
serve: {initialize: random, slo: {ttft: 500ms, tpot: {mean: 20ms}}}
"""


def metrics() -> str:
    """100 requests: a tenth of the first tokens come within 500 ms, the others within 1 s; 12 ms per token."""
    lines = ["vllm:num_requests_running 3", "vllm:num_requests_waiting 1"]
    for name, (total, quick) in METRICS.items():
        lines += [f'vllm:{name}_bucket{{le="0.5"}} {quick}', f'vllm:{name}_bucket{{le="1.0"}} 100']
        lines += [f'vllm:{name}_bucket{{le="+Inf"}} 100', f"vllm:{name}_sum {total}", f"vllm:{name}_count 100"]
    return "\n".join([*lines, ""])


def test_the_live_line_names_a_missed_limit_beside_the_plan(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "srv")
    run.job_path.write_text(JOB, encoding="utf-8")
    load = {"ttft_seconds": 0.045, "ttft_p95_seconds": 0.3, "tpot_seconds": 0.011}
    run.plan_path.write_text(json.dumps({"kind": "serve", "load": load}), encoding="utf-8")
    targets = ServerTargets.of(run)
    assert targets.limits_text() == "TTFT p95 ≤ 500 ms (planned 300 ms), TPOT mean ≤ 20 ms (planned 11.0 ms)"
    assert targets.latency_text("ttft") == "planned 45.0 ms on average; limit p95 ≤ 500 ms"
    assert targets.latency_text("e2e") == ""
    state = ServerWatch(ServerAddress("127.0.0.1", 1)).take(metrics(), 0.0)
    line = state_line("srv", state, "running", None, targets)
    assert line.startswith("srv: 3 running, 1 waiting · misses TTFT p95 ≤ 500 ms: about 972 ms · ")
    assert "(planned 45.0 ms) · TPOT 12.0 ms (planned 11.0 ms)" in line
    assert "misses" not in state_line("srv", state, "running", None, ServerTargets({("tpot", "mean"): 0.02}))
