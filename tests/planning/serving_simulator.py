"""A discrete-event simulator of a server's scheduler, to check the closed forms of craton.planning.serving.load.

Every step decodes one token of each running request; what the budget leaves goes to waiting prompts in order of their
arrival, in chunks. A request is admitted when a slot and KV cache for its whole length are free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np


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

    def decode_seconds(self, batch, context):  # type: ignore[no-untyped-def]
        return self.step_seconds + batch * (self.request_seconds + self.context_seconds * context)

    def mixed_seconds(self, batch, context, tokens, prompt):  # type: ignore[no-untyped-def]
        return self.decode_seconds(batch, context) + self.token_seconds * tokens + 0 * prompt

    def prefill_seconds(self, tokens, context):  # type: ignore[no-untyped-def]
        chunks = np.ceil(np.asarray(tokens, float) / self.step_tokens)
        return chunks * self.step_seconds + self.token_seconds * tokens + 0 * context


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
    """Return the latency of each request. With `concurrency`, `arrivals` is ignored: that many users each send their
    next request when the last one ends."""
    number = len(prompts)
    sent = np.zeros(number) if concurrency else arrivals.copy()
    first, last = np.zeros(number), np.zeros(number)
    waiting: deque[int] = deque(range(min(concurrency, number)))
    upcoming = len(waiting)
    length, left, due = prompts.astype(int), prompts.astype(int), outputs.astype(int)  # of the next prefill; to decode
    started: list[int] = []  # admitted, whose prefill is not done
    running: dict[int, int] = {}  # → step of its last token, in order of admission
    ending: dict[int, list[int]] = defaultdict(list)
    used = context = step = done = 0  # used: KV cache tokens of all admitted requests
    now = 0.0
    while done < number:
        while not concurrency and upcoming < number and sent[upcoming] <= now:
            waiting.append(upcoming)
            upcoming += 1
        if not waiting and not running and not started:
            now = sent[upcoming]
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
            if concurrency and upcoming < number:
                sent[upcoming] = now
                waiting.append(upcoming)
                upcoming += 1
    assert used == 0
    assert context == 0
    return Simulated(first - sent, (last - first) / np.maximum(outputs - 1, 1), number / now)
