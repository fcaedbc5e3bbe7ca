"""Latencies of a real server beside the limits of its job: what a limit is missed by, and which part takes the time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from live_server import make_model, serving

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.orchestration.histograms import LatencyHistogram, read_latencies

TTFT = "vllm:time_to_first_token_seconds"


def histogram() -> LatencyHistogram:
    """90 requests below 250 ms, 10 between 1 and 2.5 s."""
    cumulative = {"0.25": 90, "0.5": 90, "1.0": 90, "2.5": 100, "+Inf": 100}
    samples = [(f"{TTFT}_bucket", float(count), bound) for bound, count in cumulative.items()]
    found = read_latencies([*samples, (f"{TTFT}_sum", 30.0, ""), (f"{TTFT}_count", 100.0, ""), ("other", 1.0, "")])
    assert list(found) == ["ttft"]
    return found["ttft"]


def test_a_quantile_counts_as_missed_only_above_the_bucket_of_its_limit() -> None:
    ttft = histogram()
    assert ttft.statistics["mean"] == 0.3
    assert ttft.statistics["p95"] == pytest.approx(1.75)
    assert ttft.exceeds("p95", 0.5)
    assert ttft.exceeds("p95", 1.0)
    assert not ttft.exceeds("p95", 1.2), "both are between 1 and 2.5 s"
    assert not ttft.exceeds("p90", 0.25)
    assert ttft.exceeds("mean", 0.29)
    assert not ttft.exceeds("mean", 0.31)
    assert not LatencyHistogram().exceeds("mean", 0.1)


def test_why_names_the_missed_limit_of_a_server_and_the_part(tmp_path: Path) -> None:
    make_model(tmp_path / "model", 0)
    slo = ", slo: {ttft: {p95: 1ms}, e2e: {mean: 5m}}"
    with serving(tmp_path / "model", tmp_path / "runs", "limits", more=slo) as server:
        for number in range(24):
            server.complete([number + 1] * 100, 4)
        snapshot = take_snapshot(server.run)
    assert snapshot.serving is not None
    found = snapshot.serving.latencies
    assert found is not None
    assert found.num_requests == 24
    assert [(miss.latency, miss.statistic, miss.limit_seconds) for miss in found.missed] == [("ttft", "p95", 0.001)]
    parts = sum(found.mean(part) for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(found.mean("e2e"), rel=0.05)
    assert snapshot.from_json(snapshot.to_json()) == snapshot
    verdict = diagnose(snapshot)
    assert verdict.condition == "slow"
    assert "it misses its latency limit: TTFT p95 is about " in verdict.sentence
    assert "above the limit of 1 ms" in verdict.sentence
    assert "over 24 requests since the engine was started" in verdict.evidence
    alone = diagnose(replace(snapshot, nodes=()))  # without other programs on this machine
    assert alone.cause in ("server_prefill_slow", "server_overloaded")
