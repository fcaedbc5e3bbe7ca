"""Rules for a server that misses the latency limits of its job: the part of a request that takes the time."""

from __future__ import annotations

from craton.formatting import counted, duration, percent
from craton.observability.diagnosis.latencies import LATENCY_NAMES, SnapshotLatencies
from craton.observability.diagnosis.rules.findings import finding
from craton.observability.diagnosis.snapshot import Serving, Snapshot
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import SLO, Finding, Symptoms

# Parts of each latency; they add up.
PARTS = {"ttft": ("queue", "prefill"), "tpot": ("decode",), "e2e": ("queue", "prefill", "decode")}


def examine_serving(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    serving = snapshot.serving
    if serving is None or serving.latencies is None or not symptoms.signed(SLO):
        return []
    findings = []
    for missed in serving.latencies.missed:
        means = {name: serving.latencies.mean(name) for name in PARTS[missed.latency]}
        part = max(means, key=lambda name: means[name])
        cause, message = _explained(serving, serving.latencies, missed.latency, part, means)
        evidence = [message, *_beside_plan(serving.latencies, missed.latency)]
        findings += finding(symptoms, cause, message, ("slow",), evidence=evidence, base=0.9, phases=(part,))
    return findings


def _explained(
    serving: Serving, latencies: SnapshotLatencies, latency: str, part: str, means: dict[str, float]
) -> tuple[str, str]:
    """Return the cause, and what is slow with numbers."""
    running = counted(serving.running, "running request")
    if latency == "tpot":
        text = f"decode steps take {duration(latencies.mean('tpot'))} per token on average, with {running} now"
        return "server_decode_slow", text
    share = percent(means[part] / sum(means.values())) if sum(means.values()) else "all"
    name = "TTFT" if latency == "ttft" else "the time of a request"
    time = f"{duration(means[part])} on average, {share} of {name}"
    if part == "queue":
        kv_share, preempted = serving.kv_share or 0.0, serving.preemptions or 0
        is_full = kv_share > threshold("kv_share") or preempted > threshold("preempted_share") * latencies.num_requests
        cache = f"{percent(kv_share)} of the KV cache is in use" + (
            f", {preempted} were preempted" if preempted else ""
        )
        text = f"requests wait in the queue for {time}; now {serving.waiting} wait, {serving.running} run and {cache}"
        return "server_memory_full" if is_full else "server_overloaded", text
    if part == "prefill":
        return "server_prefill_slow", f"prefill steps take {time}; the queue takes {duration(means['queue'])}"
    tpot = duration(latencies.mean("tpot"))
    return "server_decode_slow", f"decode steps take {time}, {tpot} per token, with {running}"


def _beside_plan(latencies: SnapshotLatencies, latency: str) -> list[str]:
    planned = latencies.planned.get(latency)
    if planned is None:
        return []
    mean = duration(latencies.mean(latency))
    return [f"mean {LATENCY_NAMES[latency]}: {mean}, planned {duration(planned)} for the job's load"]
