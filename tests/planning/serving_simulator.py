"""A discrete-event simulator of a server's scheduler, to check the closed forms of craton.planning.serving.load;
`python tests/planning/serving_simulator.py` prints predicted latencies over simulated ones (two minutes).

Every step decodes one token of each running request; what the budget leaves goes to waiting prompts in order of their
arrival, in chunks. A request is admitted when a slot and KV cache for its whole length are free.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from craton.planning.serving.closed_load import closed_loop
from craton.planning.serving.load import (
    ServedLoad,
    ServedReplica,
    TokenLengths,
    closed_latencies,
    open_load,
    saturation,
)
from craton.planning.serving.search.evaluate import requests_per_second
from craton.planning.serving.step_times import chunk_tokens, least_chunk

KV_SHARE = 0.9  # of the KV cache that requests fill on average before one is preempted; as profiles have kv_share


@dataclass(frozen=True)
class LinearSteps:
    """A server whose step costs a fixed time, and time per request, context token and prompt token."""

    step_seconds: float = 8e-3
    request_seconds: float = 2e-5
    context_seconds: float = 4e-9  # per KV cache token that is read
    token_seconds: float = 2.5e-5  # per prompt token
    kv_tokens: int = 400_000
    step_tokens: int = 2048
    max_running: int = 256
    gpus: int = 1
    # Of a scheduler that spreads prompts: a step computes 1 / prefill_steps of what waits, or more, until it has
    # `least_tokens` with those of decode.
    least_tokens: int = 2048
    prefill_steps: int = 1
    join_steps: float = 0.5

    def least_chunk(self, decoding=0.0):  # type: ignore[no-untyped-def]
        return least_chunk(self.least_tokens, self.prefill_steps, decoding)

    def step_budget(self, waiting, decoding=0.0):  # type: ignore[no-untyped-def]
        return self.chunk_tokens(np.clip(waiting, self.least_chunk(decoding), 1e9), decoding)

    def chunk_tokens(self, waiting, decoding=0.0):  # type: ignore[no-untyped-def]
        return chunk_tokens(waiting, self.least_chunk(decoding), self.step_tokens, self.prefill_steps)

    def prefill_chunks(self, prompt, waiting, decoding=0.0):  # type: ignore[no-untyped-def]
        waited = np.minimum(self.prefill_steps, waiting / self.least_chunk(decoding))
        return np.maximum(prompt / self.chunk_tokens(prompt, decoding), waited)

    def decode_seconds(self, batch, context):  # type: ignore[no-untyped-def]
        return self.step_seconds + batch * (self.request_seconds + self.context_seconds * context)

    def mixed_seconds(self, batch, context, tokens, prompt):  # type: ignore[no-untyped-def]
        return self.decode_seconds(batch, context) + self.token_seconds * tokens + 0 * prompt

    def prefill_seconds(self, tokens, context):  # type: ignore[no-untyped-def]
        chunks = np.ceil(np.asarray(tokens, float) / self.chunk_tokens(np.asarray(tokens, float)))
        return chunks * self.step_seconds + self.token_seconds * tokens + 0 * context

    def prompts_seconds(self, tokens, prompt):  # type: ignore[no-untyped-def]
        return tokens / self.chunk_tokens(tokens) * self.step_seconds + self.token_seconds * tokens + 0 * prompt


@dataclass(frozen=True)
class Simulated:
    """Per request, in order of arrival."""

    ttft_seconds: np.ndarray
    tpot_seconds: np.ndarray
    completed_per_second: float


def open_arrivals(rate: float, number: int, burstiness: float, generator: np.random.Generator) -> np.ndarray:
    """Return arrival times with gamma-distributed gaps: `burstiness` is the squared coefficient of variation."""
    return np.cumsum(generator.gamma(1 / burstiness, burstiness / rate, number))


def simulate(
    steps: LinearSteps,
    arrivals: np.ndarray,
    prompts: np.ndarray,
    outputs: np.ndarray,
    concurrency: int = 0,
) -> Simulated:
    """Return the latency of each request. With `concurrency`, `arrivals` are pauses: all users begin at once, and each
    sends the next request after the last one ended and a pause."""
    number = len(prompts)
    sent, pauses = (np.zeros(number), arrivals) if concurrency else (arrivals.copy(), arrivals)
    first, last = np.zeros(number), np.zeros(number)
    waiting: deque[int] = deque()
    upcoming = min(concurrency, number) or number
    coming = list(zip(sent[:upcoming], range(upcoming), strict=True))  # a heap: (when it is sent, request)
    length, left, due = prompts.astype(int), prompts.astype(int), outputs.astype(int)  # of the next prefill; to decode
    started: list[int] = []  # admitted, whose prefill is not done
    running: dict[int, int] = {}  # → step of its last token, in order of admission
    ending: dict[int, list[int]] = defaultdict(list)
    used = context = step = done = 0  # used: KV cache tokens of all admitted requests
    now = before = 0.0
    while done < number:
        known = before if steps.join_steps > 1 else now  # a step is scheduled while one runs
        while coming and coming[0][0] <= known:
            waiting.append(heappop(coming)[1])
        if not waiting and not running and not started:
            now = before = max(now, coming[0][0])
            continue
        while used + len(running) > steps.kv_tokens:  # preempt the newest
            request, end = running.popitem()
            ending[end].remove(request)
            made = int(due[request]) - (end - step)
            used, context = used - int(length[request]) - made, context - int(length[request]) - made
            length[request] += made
            left[request], due[request] = length[request], due[request] - made
            waiting.appendleft(request)
        budget, taken, prefilled = steps.step_tokens - len(running), 0, []
        if steps.prefill_steps > 1:
            pending = int(left[started].sum() + length[list(waiting)].sum())
            least = max(steps.least_tokens - len(running), steps.least_tokens // 2)
            budget = min(budget, max(least, pending // steps.prefill_steps))
        while budget > 0:
            if len(prefilled) == len(started):
                is_full = len(running) + len(started) >= steps.max_running
                if not waiting or is_full or used + length[waiting[0]] + len(running) > steps.kv_tokens:
                    break
                started.append(waiting.popleft())
                used += int(length[started[-1]])
            request = started[len(prefilled)]
            chunk = min(budget, int(left[request]))
            left[request] -= chunk
            taken, budget = taken + chunk, budget - chunk
            if left[request] == 0:
                prefilled.append(request)
        mean = context / len(running) if running else 0.0
        before = now
        now += float(steps.mixed_seconds(len(running), mean, taken, 0))
        step, context, used = step + 1, context + len(running), used + len(running)
        ended = ending.pop(step, [])
        for request in ended:
            del running[request]
            context -= int(length[request] + due[request])
        for request in prefilled:
            started.remove(request)
            first[request] = first[request] or now
            due[request] -= 1
            if due[request] <= 0:
                used -= 1
                ended.append(request)
                continue
            used, context = used + 1, context + int(length[request]) + 1
            length[request] += 1
            running[request] = step + int(due[request])
            ending[running[request]].append(request)
        for request in ended:
            last[request], done = now, done + 1
            used -= int(length[request] + max(due[request], 0))
            if upcoming < number:
                sent[upcoming] = now + pauses[upcoming]
                heappush(coming, (sent[upcoming], upcoming))
                upcoming += 1
    assert used == 0
    assert context == 0
    return Simulated(first - sent, (last - first) / np.maximum(outputs - 1, 1), number / now)


SPREADS = (0.7, 0.6)  # of the logarithms of lognormal prompts and outputs
LOGNORMAL = ServedLoad(
    *(TokenLengths.lognormal_of_spread(mean, s) for mean, s in zip((1024, 256), SPREADS, strict=True))
)
FIXED = ServedLoad(TokenLengths.fixed(1024), TokenLengths.fixed(128))
CASES: dict[str, tuple[LinearSteps, ServedLoad]] = {
    "prefill-heavy, 1,024 + 128": (LinearSteps(), FIXED),
    "lognormal, 1,024 + 256": (LinearSteps(), LOGNORMAL),
    "decode-heavy, 256 + 512": (
        LinearSteps(request_seconds=1e-4, kv_tokens=2_000_000, max_running=1024),
        ServedLoad(TokenLengths.fixed(256), TokenLengths.fixed(512)),
    ),
    "long prompts, 16,384 + 128": (LinearSteps(), ServedLoad(TokenLengths.fixed(16_384), TokenLengths.fixed(128))),
    "max_running 32, 512 + 512": (
        LinearSteps(max_running=32),
        ServedLoad(TokenLengths.fixed(512), TokenLengths.fixed(512)),
    ),
    "KV cache 60k, lognormal": (LinearSteps(kv_tokens=60_000), LOGNORMAL),
    "prefill-heavy, bursty (4)": (LinearSteps(), replace(FIXED, burstiness=4.0)),
    "lognormal, bursty (4)": (LinearSteps(), replace(LOGNORMAL, burstiness=4.0)),
}
CLOSED_CASES: dict[str, tuple[LinearSteps, ServedLoad]] = {
    "lognormal, 1,024 + 256": (LinearSteps(), LOGNORMAL),
    "short prompts, 256 + 512": (LinearSteps(), ServedLoad(LOGNORMAL.input.scaled(0.25), LOGNORMAL.output.scaled(2.0))),
    "max_running 32, 512 + 512": (
        LinearSteps(max_running=32),
        ServedLoad(LOGNORMAL.input.scaled(0.5), LOGNORMAL.output.scaled(2.0)),
    ),
    "one length, 1,024 + 128": (LinearSteps(), FIXED),
}


def lengths_like(lengths: TokenLengths, spread: float, number: int, generator: np.random.Generator) -> np.ndarray:
    """Return whole lengths: lognormal ones with this spread, where the distribution is not of one length."""
    if len(lengths.values) == 1:
        return np.full(number, lengths.mean)
    drawn = generator.lognormal(math.log(lengths.mean) - spread**2 / 2, spread, number)
    return np.maximum(1, drawn.round())


def length_table(load: ServedLoad, number: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return whole lengths of prompts and outputs."""
    prompts, outputs = (
        lengths_like(lengths, spread, number, generator)
        for lengths, spread in zip((load.input, load.output), SPREADS, strict=True)
    )
    return prompts, outputs


PAUSE_SECONDS = 5e-3  # between an answer and the next request of a user: client and network


def closed_requests(server: LinearSteps, load: ServedLoad, users: int, number: int, seed: int) -> Simulated:
    """Simulate a benchmark of `number` requests, which begins with all users at once."""
    generator = np.random.default_rng(seed)
    prompts, outputs = length_table(load, number, generator)
    return simulate(server, generator.exponential(PAUSE_SECONDS, number), prompts, outputs, concurrency=users)


def main(requests: int = 20_000) -> None:
    print(f"{'open load':28} load   TTFT mean   p50   p95   p99   TPOT mean   p95")
    for name, (server, load) in CASES.items():
        replica = ServedReplica(replace(server, kv_tokens=KV_SHARE * server.kv_tokens))
        for share in (0.5, 0.7, 0.9):
            rate = share * float(saturation(replica, load).rate)
            generator = np.random.default_rng(1)
            prompts, outputs = length_table(load, requests, generator)
            arrivals = open_arrivals(rate, requests, load.burstiness, generator)
            found = simulate(server, arrivals, prompts, outputs)
            window = slice(requests // 6, int(0.95 * requests))
            predicted = open_load(replica, load, rate)
            print(f"{name:28} {share:4.0%} {_ratios(predicted.ttft, predicted.tpot, found, window)}")
    print(f"\n{'closed load, users':36} requests   TTFT mean   p50   p95   p99   TPOT mean   p95")
    for name, (server, load) in CLOSED_CASES.items():
        replica = ServedReplica(server)
        for users in (4, 16, 64, 200):
            loop = closed_loop(server, float(users), load.input.mean, load.output.mean)
            for number, burst_share in ((40 * users, 0.0), (10 * users, 0.1), (2 * users, 0.5)):
                found = closed_requests(server, load, users, number, 1)
                closed = closed_latencies(replica, load, float(users), loop, burst_share)
                window = slice(0 if burst_share else 6 * users, number if burst_share else int(0.95 * number))
                shown = f"{number:,}" if burst_share else "steady"
                print(f"{name:28} {users:7} {shown:>8} {_ratios(closed.ttft, closed.tpot, found, window)}")
    print("\nthroughput of a benchmark, predicted over simulated")
    for name, (server, load) in CLOSED_CASES.items():
        for users in (16, 64, 200):
            ratios = [throughput_ratio(server, load, users, rounds) for rounds in (1, 2, 5, 10)]
            print(f"{name:28} {users:7} " + " ".join(f"{ratio:5.2f}" for ratio in ratios))


def throughput_ratio(server: LinearSteps, load: ServedLoad, users: int, rounds: int) -> float:
    simulated = closed_requests(server, load, users, users * rounds, 1).completed_per_second
    waves = float(load.output.variance == 0.0)
    loop = closed_loop(server, float(users), load.input.mean, load.output.mean, waves=waves)
    asked = replace(load, concurrency=users, requests=users * rounds)
    found = closed_latencies(ServedReplica(server), asked, float(users), loop, asked.burst_share)
    return float(requests_per_second(asked, float(users), found)) / simulated


def _ratios(ttft: dict[str, float], tpot: dict[str, float], found: Simulated, window: slice) -> str:
    """Return predicted times over simulated ones."""
    ttft_seconds, tpot_seconds = found.ttft_seconds[window], found.tpot_seconds[window]
    ratios = [float(ttft["mean"]) / ttft_seconds.mean()]
    ratios += [float(ttft[f"p{p}"]) / np.percentile(ttft_seconds, p) for p in (50, 95, 99)]
    ratios += [float(tpot["mean"]) / tpot_seconds.mean(), float(tpot["p95"]) / np.percentile(tpot_seconds, 95)]
    return "{:11.2f} {:5.2f} {:5.2f} {:5.2f} {:11.2f} {:5.2f}".format(*ratios)


if __name__ == "__main__":
    main()
