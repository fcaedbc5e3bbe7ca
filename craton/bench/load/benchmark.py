"""`craton bench serve`: drives a server with a load, or with rising loads until it saturates, and reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import cycle
from typing import Any

from craton.bench.load.driving import Progress, drive
from craton.bench.load.endpoint import Endpoint, LoadTarget, connect
from craton.bench.load.errors import WorkloadError
from craton.bench.load.lengths import Lengths
from craton.bench.load.load import Closed, Limit, Open, Sweep, Timed
from craton.bench.load.requests import FIRST_LEVEL, WARM_UP, Prefixes, RandomRequests, Request, Words
from craton.bench.load.samples import Objectives, RequestSample
from craton.bench.load.saturation import Saturation, next_rate, saturation, too_short, why_not
from craton.bench.load.summary import Summary, summarize
from craton.formatting import duration, percent

Source = Callable[[int], Iterator[Request]]  # of the requests of a stream
Bar = Callable[[str], AbstractContextManager[Progress]]

_BUSY = 0.9  # of a core: above it the client itself may be the bottleneck
_LATE_SECONDS = 0.01
_UNEXPECTED_CACHED = 0.2  # of the prompt tokens; a shared chat template is less than that


@dataclass(frozen=True)
class LoadWorkload:
    """The workload: random prompts of given lengths, or the requests of a trace."""

    input: Lengths
    output: Lengths
    prefixes: Prefixes = field(default_factory=Prefixes)
    vocabulary: int = 32_000
    trace: tuple[Request, ...] = ()


@dataclass(frozen=True)
class LoadSettings:
    """All settings of a load test."""

    target: LoadTarget
    workload: LoadWorkload
    load: Closed | Open | Timed | Sweep
    limit: Limit
    seed: int = 0
    warm_up_requests: int = 0
    objectives: Objectives | None = None


@dataclass(frozen=True)
class Level:
    """One load and its results. `trouble`: why a level of a sweep failed; empty otherwise."""

    load: Closed | Open | Timed
    samples: tuple[RequestSample, ...]
    summary: Summary
    busy: float
    trouble: str = ""


@dataclass(frozen=True)
class Report:
    """The results. A sweep has several levels in order of their rates, any other load has one."""

    settings: LoadSettings
    model: str
    prompts: str  # their content
    levels: tuple[Level, ...]
    saturation: Saturation | None
    notes: tuple[str, ...]  # warnings about the validity of the numbers
    started: datetime

    @property
    def shown(self) -> Level:
        """The level to show in detail: of a sweep the highest that passed, else the lowest."""
        well = [level for level in self.levels if not level.trouble]
        return (well or self.levels[:1])[-1]

    def to_json(self) -> dict[str, Any]:
        settings, workload = self.settings, self.settings.workload
        return {
            "url": settings.target.base,
            "api": settings.target.path,
            "model": self.model,
            "started": self.started.isoformat(timespec="seconds"),
            "load": str(settings.load),
            "limit": str(settings.limit),
            "prompts": self.prompts,
            "input": None if workload.trace else str(workload.input),
            "output": None if workload.trace else str(workload.output),
            "prefix": {
                "tokens": workload.prefixes.tokens,
                "groups": workload.prefixes.groups,
                "share": workload.prefixes.share,
            },
            "ignore_eos": settings.target.ignore_eos,
            "seed": settings.seed,
            "warm_up_requests": settings.warm_up_requests,
            "objectives_seconds": dict(settings.objectives.seconds) if settings.objectives else None,
            "latencies_from": "the moment a request was due",
            "notes": list(self.notes),
            "saturation": None
            if self.saturation is None
            else {
                "sustained_requests_per_second": self.saturation.sustained,
                "too_much_requests_per_second": self.saturation.too_much,
            },
            "summary": self.shown.summary.to_json(),
            "levels": [
                {
                    "load": str(level.load),
                    "requests_per_second": level.load.requests_per_second if isinstance(level.load, Open) else None,
                    "concurrency": level.load.concurrency if isinstance(level.load, Closed) else None,
                    "trouble": level.trouble,
                    "client_busy": level.busy,
                    "summary": level.summary.to_json(),
                }
                for level in self.levels
            ],
        }


def bench_serve(settings: LoadSettings, progress: Bar | None = None) -> Report:
    """Check the server, warm it up and drive it. `progress(title)` opens a progress bar."""
    return asyncio.run(_bench(settings, progress or _no_bar))


async def _bench(settings: LoadSettings, bar: Bar) -> Report:
    started = datetime.now(UTC)
    async with connect(settings.target) as endpoint:
        await endpoint.find_model()
        source, prompts, note = await _source(endpoint, settings)
        if settings.warm_up_requests:
            at_once = settings.load.concurrency if isinstance(settings.load, Closed) else settings.warm_up_requests
            limit = Limit(requests=settings.warm_up_requests)
            with bar("warm-up") as progress:
                await drive(endpoint, source(WARM_UP), Closed(at_once), limit, progress)
        if isinstance(settings.load, Sweep):
            levels = await _sweep(endpoint, settings, settings.load, source, bar)
            saturation_range = saturation(_went_well(levels))
        else:
            levels = [await _level(endpoint, settings, settings.load, source, FIRST_LEVEL, bar)]
            saturation_range = None
    report = Report(
        settings, endpoint.model, prompts, tuple(levels), saturation_range, (note,) if note else (), started
    )
    return replace(report, notes=report.notes + tuple(_notes(report)))


async def _sweep(endpoint: Endpoint, settings: LoadSettings, sweep: Sweep, source: Source, bar: Bar) -> list[Level]:
    levels: list[Level] = []
    while (rate := next_rate(sweep, _went_well(levels))) is not None:
        load = Open(rate, sweep.burstiness)
        level = await _level(endpoint, settings, load, source, FIRST_LEVEL + len(levels), bar)
        levels.append(replace(level, trouble=why_not(level.samples, level.summary)))
    return sorted(levels, key=_rate)


async def _level(
    endpoint: Endpoint,
    settings: LoadSettings,
    load: Closed | Open | Timed,
    source: Source,
    stream: int,
    bar: Bar,
) -> Level:
    title = "requests" if settings.limit.requests is not None else "seconds"
    if isinstance(settings.load, Sweep) and isinstance(load, Open):
        title = f"{load.requests_per_second:g}/s"
    with bar(title) as progress:
        driven = await drive(endpoint, source(stream), load, settings.limit, progress, settings.seed, stream)
    return Level(load, driven.samples, summarize(driven.samples, settings.objectives), driven.busy)


async def _source(endpoint: Endpoint, settings: LoadSettings) -> tuple[Source, str, str]:
    """Return the source of a load's requests, a description of their prompts, and a note for the report."""
    workload = settings.workload
    if not workload.trace:
        form, note = await endpoint.find_form(workload.vocabulary, settings.seed)
        requests = RandomRequests(workload.input, workload.output, settings.seed, form, workload.prefixes)
        prompts = "random words" if isinstance(form, Words) else f"random token ids below {form.vocabulary:,}"
        return requests.stream, prompts, note
    if settings.target.chat and any(not isinstance(request.prompt, str) for request in workload.trace):
        raise WorkloadError("the trace has prompts of token ids, which chats do not accept; omit --chat")
    await endpoint.try_out(replace(_reversed(workload.trace[0]), output_tokens=2))

    def replay(stream: int) -> Iterator[Request]:
        # A reversed prompt has the same length, but leaves nothing useful in a prefix cache.
        return map(_reversed, cycle(workload.trace)) if stream == WARM_UP else iter(workload.trace)

    return replay, "of the trace", ""


def _reversed(request: Request) -> Request:
    return replace(request, prompt=request.prompt[::-1])


def _notes(report: Report) -> Iterator[str]:
    summaries = [level.summary for level in report.levels]
    shown = report.shown
    if any(summary.answered and not summary.has_usage for summary in summaries):
        yield "the server reports no usage: every chunk of an answer counts as one token"
    if (busy := max(level.busy for level in report.levels)) > _BUSY:
        yield (
            f"this client was busy {percent(busy)} of the time and may be the bottleneck; run it on a free core, or "
            "split the load over several clients"
        )
    late = max((summary.late_seconds.p99 for summary in summaries if summary.late_seconds), default=0.0)
    if late > _LATE_SECONDS:
        yield f"1% of the requests were sent {duration(late)} late or more; the latencies include that"
    cached = (shown.summary.cached_tokens or 0) / max(1, shown.summary.prompt_tokens)
    workload = report.settings.workload
    if cached > _UNEXPECTED_CACHED and not workload.prefixes.tokens and not workload.trace:
        yield (
            f"{percent(cached)} of the prompt tokens came from the server's prefix cache, though these prompts share "
            "no prefix: the seed was used before; choose another with --seed"
        )
    if report.saturation is not None and too_short(shown.samples, shown.summary):
        yield "requests take longer than half a level: there is no steady state; increase --duration"


def _went_well(levels: list[Level]) -> dict[float, bool]:
    return {_rate(level): not level.trouble for level in levels}


def _rate(level: Level) -> float:
    assert isinstance(level.load, Open), "the levels of a sweep are open loads"
    return level.load.requests_per_second


def _no_bar(title: str) -> AbstractContextManager[Progress]:
    return nullcontext(lambda done, total, label: None)
