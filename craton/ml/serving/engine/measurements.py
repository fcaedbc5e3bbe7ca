"""Engine throughput and latencies, and the roofline that steps are compared with.

Latencies are time to first token, inter-token latency and queue time, measured from when the engine receives a request.
The front end measures the same from the HTTP request, for /metrics; these go to the run's metric files, which outlive
the server.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch

from craton.ml.serving.messages import STEP_BOUNDS, OutputDelta
from craton.planning.serving import DevicePeaks

if TYPE_CHECKING:
    from craton.ml.serving.schedule import DraftInput, ScheduledStep

STEPS = 64  # the last steps, over which means are taken
IDLE_SECONDS = 1.0  # after a longer gap between two steps the engine was idle
WINDOW_SECONDS = 60.0
MAX_SAMPLES = 1024  # of each latency, the newest
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
SIDE = {"cuda": 8192, "cpu": 512}
TRIES = 5  # the fastest counts

Sample = tuple[float, float]  # when, and how many seconds


class Floor(Protocol):
    """The minimum duration of a step."""

    def step_seconds(
        self, tokens: int, context_tokens: int, sampled: int, pairs: float, shared_tokens: int = 0
    ) -> float: ...


class Rates:
    """Means over the last steps. Steps overlap, so a step lasts from the previous step's read-back to its own."""

    def __init__(self, floor: Floor | None = None, draft_floor: Floor | None = None) -> None:
        self.steps = self.step_tokens = 0
        self.context_tokens = self.shared_tokens = 0  # KV cache tokens of all steps; of these, not read again
        self.steps_by_tokens = [0] * (len(STEP_BOUNDS) + 1)
        self._floor, self._draft_floor = floor, draft_floor
        self._last = 0.0
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=STEPS)  # seconds, minimum seconds, tokens

    def record(
        self, step: ScheduledStep, sampled: int, generated: int | None = None, drafts: DraftInput | None = None
    ) -> None:
        """Count a step that sampled so many tokens, of which `generated` were kept: all, without draft tokens."""
        now = time.monotonic()
        seconds = now - self._last
        self._last = now
        tokens = step.tokens
        self.steps += 1
        self.step_tokens += tokens
        self.steps_by_tokens[bisect_left(STEP_BOUNDS, tokens)] += 1
        context, shared = sum(part.begin + part.count for part in step.parts), step.saved_tokens
        self.context_tokens += context
        self.shared_tokens += shared
        if seconds < IDLE_SECONDS:
            minimum = 0.0
            if self._floor is not None:
                pairs = sum(part.count * (part.begin + (part.count + 1) / 2) for part in step.parts)
                minimum = self._floor.step_seconds(tokens, context, sampled, pairs, shared)
                if drafts is not None and self._draft_floor is not None:
                    minimum += _draft_seconds(self._draft_floor, drafts)
            self._recent.append((seconds, minimum, sampled if generated is None else generated))

    @property
    def step_seconds(self) -> float:
        return self._mean(0)

    @property
    def plan_step_seconds(self) -> float:
        return self._mean(1)

    @property
    def roofline(self) -> float:
        return self.plan_step_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        is_fresh = time.monotonic() - self._last < IDLE_SECONDS
        return self._mean(2) / self.step_seconds if is_fresh and self.step_seconds else 0.0

    def _mean(self, index: int) -> float:
        return sum(item[index] for item in self._recent) / len(self._recent) if self._recent else 0.0


class Latencies:
    """Latency samples of the last minute. Times are of the monotonic clock, as `OutputDelta.admitted` is."""

    def __init__(self) -> None:
        self._submitted: dict[int, float] = {}  # requests without a token
        self._newest: dict[tuple[int, int], float] = {}  # request and copy → time of its newest token
        self._samples: dict[str, deque[Sample]] = {
            name: deque(maxlen=MAX_SAMPLES) for name in ("first_token", "inter_token", "queue")
        }

    def begin(self, request: int, now: float) -> None:
        self._submitted[request] = now

    def note(self, pieces: Iterable[OutputDelta], now: float) -> None:
        for piece in pieces:
            if piece.tokens:
                self._note_tokens(piece, now)
            if piece.finish is not None:
                self._submitted.pop(piece.id, None)
                self._newest.pop((piece.id, piece.index), None)

    def quantiles(self, now: float) -> dict[str, tuple[float, float]]:
        """Return median and 95th percentile of each latency that has samples in the last minute."""
        result = {}
        for name, samples in self._samples.items():
            while samples and now - samples[0][0] > WINDOW_SECONDS:
                samples.popleft()
            ordered = sorted(seconds for _, seconds in samples)
            if ordered:
                result[name] = (ordered[len(ordered) // 2], ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)])
        return result

    def _note_tokens(self, piece: OutputDelta, now: float) -> None:
        key = (piece.id, piece.index)
        before = self._newest.get(key)
        self._newest[key] = now
        if before is not None:
            self._samples["inter_token"].append((now, (now - before) / len(piece.tokens)))
        submitted = self._submitted.pop(piece.id, None)
        if submitted is not None:
            self._samples["first_token"].append((now, now - submitted))
            if piece.admitted:
                self._samples["queue"].append((now, max(0.0, piece.admitted - submitted)))


def _draft_seconds(floor: Floor, drafts: DraftInput) -> float:
    """Return the minimum time of a draft model's passes over a step's requests."""
    first, context = int(drafts.counts.sum()), int(drafts.ends.sum())
    pairs = float((drafts.counts * (drafts.ends - (drafts.counts - 1) / 2)).sum())
    seconds = floor.step_seconds(first, context, drafts.requests, pairs)
    requests, drafted = drafts.requests, int(drafts.ends[: drafts.requests].sum())
    for added in range(1, drafts.length):
        seconds += floor.step_seconds(requests, drafted + added * requests, requests, 0.0)
    return seconds


def measure_peaks(device: torch.device, dtype: torch.dtype) -> DevicePeaks:
    """Measure memory bandwidth (bytes/s of a large copy, read plus write) and FLOP/s of a large matmul, in less than a
    second."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = _best(lambda: target.copy_(source), device)
    side = SIDE[device.type]
    # random numbers: a GPU that multiplies zeros draws less power and is faster
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    product_seconds = _best(lambda: torch.mm(left, right, out=product), device)
    return DevicePeaks(2 * source.numel() / copy_seconds, 2 * side**3 / product_seconds)


def _best(work: Callable[[], object], device: torch.device) -> float:
    work()
    times = []
    for _ in range(TRIES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
