"""Read the files of a run: steps of every rank, checkpoints, events and log lines.

Only the ends of files are read, and less of each the more nodes there are: about a hundred megabytes for a thousand
nodes. If the end of a file does not reach back far enough for a comparison, part of the data before it is read too.
Metrics of rank 0 are read from the nodes that held it.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from craton.observability.diagnosis.restart_history import LOST
from craton.observability.diagnosis.snapshot import (
    PHASES,
    Event,
    LogMatch,
    Restart,
    Series,
    Serving,
    SnapshotTier,
    StepWindow,
)
from craton.observability.diagnosis.tables import log_patterns, threshold
from craton.orchestration.watching import read_recoveries
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import open_regular, paths_in, read_lines, tail_lines

RECENT_STEPS, EARLIER_STEPS, WARM_STEPS = 20, 100, 5  # numbers of steps; the recent ones also take RECENT_SECONDS
RECENT_SECONDS = 4.0
MAX_WINDOWS = 10  # the recent steps, and as many ones half a window earlier, and so on
PART_STEPS = 8  # of the past, judged together
SUDDEN = 2.0  # times the steps before: the newest part alone is the recent one
CHANGED = 1.2  # times the best level: slower steps are not the past that others are compared with
NEWEST_STEPS = 5  # a majority of them must be abnormal
ALL_BYTES, MAX_BYTES, MIN_BYTES = 128 << 20, 1 << 20, 32 << 10  # of metrics: of all nodes, and limits for one
ALL_EVENT_BYTES, EVENT_BYTES, LOG_BYTES = 64 << 20, 256 << 10, 48 << 10
MAX_GENERATIONS = 32  # newest generations read: nodes of rank 0, reasons
RESTART_SECONDS = 3600.0  # how long a restart counts
MAX_LOGS = 64
MAX_POINTS, WHOLE_POINTS = 300, 60  # of a series: downsampled except for the newest
HISTORY_PARTS, HISTORY_BYTES = 24, 48 << 10  # read from a long file before its end, evenly: the run's past
SERIES = (
    "loss",
    "gradient_norm",
    "step_seconds",
    "evaluation_loss",
    "learning_rate",
    "label_share",
    "distinct_row_share",
    "distinct_tokens",
    "idle_expert_share",
    "expert_load_ratio",
)
MAX_EVENTS = 40
ROUTINE = (
    "agent_started",
    "metrics_served",
    "coordinates",
    "rank_started",
    "predicted",
    "summary",
    "keeper_ready",
    "peer_interval",
    "checkpoint_saved",
    "checkpoint_moved",
)


@dataclass
class Steps:
    """The steps of one rank in the newest generation, oldest first."""

    node: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    begins_here: bool = False  # whether the first line is the first step of the generation

    def median(self, recent: bool) -> tuple[dict[str, float], int]:
        """Return phase (and "step") → median seconds, and the number of steps."""
        chosen = self.warm[-self.num_recent :] if recent else self.usual_lines
        return _medians(chosen), len(chosen)

    @cached_property
    def warm(self) -> list[dict[str, Any]]:
        return self.lines[WARM_STEPS:] if self.begins_here else self.lines

    @cached_property
    def num_recent(self) -> int:
        """The number of recent steps; fewer if the newest ones are far slower than those before."""
        newest, before = self.warm[-PART_STEPS:], self.warm[-RECENT_STEPS:-PART_STEPS]
        is_long = sum(map(_step_seconds, newest)) >= RECENT_SECONDS
        if before and is_long and _level(newest) > SUDDEN * _level(before):
            return len(newest)
        seconds = 0.0
        for number, line in enumerate(reversed(self.warm), start=1):
            seconds += _step_seconds(line)
            if number >= RECENT_STEPS and seconds >= RECENT_SECONDS:
                return number
        return min(len(self.warm), RECENT_STEPS)

    @cached_property
    def usual_lines(self) -> list[dict[str, Any]]:
        """The steps before the recent ones while the run was about as fast as it has ever been for two parts in a row:
        a run that stays slow would otherwise soon be compared with itself."""
        before = self.warm[: -self.num_recent]
        parts = [before[begin : begin + PART_STEPS] for begin in range(0, len(before), PART_STEPS)]
        levels = [_level(part) for part in parts]
        best = min(map(max, pairwise(levels)), default=max(levels, default=0.0))  # for two parts in a row
        usual = [part for part, level in zip(parts, levels, strict=True) if level <= CHANGED * best]
        return [line for part in usual for line in part][-EARLIER_STEPS:]

    def windows(self) -> tuple[StepWindow, ...]:
        """Return the medians of the recent steps, of as many half a window earlier, and so on, newest first."""
        lines, size = self.warm, self.num_recent
        result = []
        for number in range(MAX_WINDOWS):
            chosen = lines[: len(lines) - number * (size // 2)][-size:]
            if len(chosen) < max(size, PART_STEPS):
                break
            result.append(StepWindow(float(chosen[0].get("time") or 0.0), _medians(chosen)))
        return tuple(result)

    def work_deviation(self) -> float | None:
        """Return the median absolute deviation of the work of a step."""
        lines = self.lines[-self.num_recent :]
        parts = [
            (number(line.get("run_step_seconds")), number(line.get("run_communication_seconds"))) for line in lines
        ]
        works = [step - waiting for step, waiting in parts if step is not None and waiting is not None]
        if not works:
            return None
        middle = statistics.median(works)
        return statistics.median(abs(work - middle) for work in works)

    def newest(self, name: str) -> float | None:
        return next((value for line in reversed(self.lines) if (value := _recorded(line, name)) is not None), None)

    def lasting(self, name: str) -> float | None:
        """Return the median of the newest steps, so that one outlier does not count; NaN if most are not finite."""
        values = [value for line in self.lines if (value := _recorded(line, name)) is not None][-NEWEST_STEPS:]
        if len(values) < NEWEST_STEPS:
            return None
        finite = [value for value in values if math.isfinite(value)]
        return statistics.median(finite) if 2 * len(finite) > len(values) else math.nan

    def usual(self, name: str) -> float | None:
        """Return the median of the steps before those."""
        reported = [value for line in self.lines if (value := _recorded(line, name)) is not None][:-NEWEST_STEPS]
        values = [value for value in reported if math.isfinite(value)]
        return statistics.median(values) if len(values) >= WARM_STEPS else None


def _level(lines: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(map(_step_seconds, lines))


def _step_seconds(line: Mapping[str, Any]) -> float:
    return number(line.get("run_step_seconds")) or 0.0


def _medians(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return phase (and "step") → median seconds."""
    medians = {}
    for phase in (*PHASES, "step"):
        values = [value for line in lines if (value := number(line.get(f"run_{phase}_seconds"))) is not None]
        if values:
            medians[phase] = statistics.median(values)
    return medians


def read_steps(run: RunDirectory, nodes: Sequence[str], generation: int) -> dict[int, Steps]:
    """Return rank → its steps of this generation, for ranks that have any."""
    size = max(MIN_BYTES, min(MAX_BYTES, ALL_BYTES // max(1, len(nodes))))
    steps_by_rank: dict[int, Steps] = {}
    for node in nodes:
        lines, is_whole = _newest_and_earlier(run.metrics_path(node), size)
        for line in lines:
            rank = line.get("rank")
            if not isinstance(rank, int) or ("run_step_seconds" not in line and "run_loss" not in line):
                continue
            steps = steps_by_rank.setdefault(rank, Steps(node, begins_here=is_whole))
            if line.get("generation") == generation:
                steps.lines.append(line)
            else:
                steps.begins_here = True
    for steps in steps_by_rank.values():
        steps.lines.sort(key=lambda line: float(line.get("time") or 0.0))
    return {rank: steps for rank, steps in steps_by_rank.items() if steps.lines}


def _newest_and_earlier(path: Path, size: int) -> tuple[list[dict[str, Any]], bool]:
    """Return lines of the newest steps and, if the file is too large, some from as far back as comparisons reach; and
    whether the first line of the file is included. Nodes are in lock-step, so this covers about the same steps on all
    of them."""
    length = _bytes(path)
    if length <= size:
        return tail_lines(path, size), True
    newest_bytes = 2 * size // 3
    newest = tail_lines(path, newest_bytes)
    step_bytes = newest_bytes / max(1, len({line.get("step") for line in newest}))
    back = min(length, round(step_bytes * (RECENT_STEPS + EARLIER_STEPS)))
    room = min(size - newest_bytes, back - newest_bytes)
    earlier = read_lines(path, length - back, room)[0] if room > 0 else []
    return [*earlier, *newest], back == length


def collective_seconds(steps: Mapping[int, Steps]) -> tuple[float | None, float | None]:
    """Return the time of the collectives themselves, in recent and in earlier steps: the minimum wait of any rank,
    since the last rank to arrive does not wait. The last rank may change, so this is computed step by step."""
    recent = _least_waits([item.warm[-item.num_recent :] for item in steps.values()])
    earlier = _least_waits([item.usual_lines for item in steps.values()])
    return (statistics.median(recent) if recent else None, statistics.median(earlier) if earlier else None)


def _least_waits(lines_by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """Return the minimum wait of any rank in every step that all ranks recorded."""
    waits: dict[int, list[float]] = {}
    for lines in lines_by_rank:
        for line in lines:
            if (waited := number(line.get("run_communication_seconds"))) is not None:
                waits.setdefault(int(line.get("step") or 0), []).append(waited)
    return [min(values) for values in waits.values() if len(values) == len(lines_by_rank)]


def series_of(run: RunDirectory, nodes: Sequence[str]) -> Series:
    """Return the metrics of rank 0 over all generations; of a repeated step, the last value counts."""
    paths = [run.metrics_path(node) for node in _first_nodes(run, nodes)]
    lines = [line for path in paths for line in _past_and_newest(path) if line.get("rank") == 0]
    lines.sort(key=lambda line: float(line.get("time") or 0.0))

    def points(name: str) -> tuple[tuple[int, float], ...]:
        values = {int(line.get("step") or 0): value for line in lines if (value := _recorded(line, name)) is not None}
        return thinned(sorted(values.items()))

    return Series(**{name: points(f"run_{name}") for name in SERIES})


def _past_and_newest(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the end of a file and, of a long one, samples of everything before: a loss is judged by the
    best level that the run ever had."""
    before = _bytes(path) - MAX_BYTES
    past: list[dict[str, Any]] = []
    if before > 0:
        for number in range(HISTORY_PARTS):
            offset = number * before // HISTORY_PARTS
            past += read_lines(path, offset, min(HISTORY_BYTES, before // HISTORY_PARTS))[0]
    return [*past, *tail_lines(path, MAX_BYTES)]


def _first_nodes(run: RunDirectory, nodes: Sequence[str]) -> list[str]:
    """Return the nodes that hold rank 0, now and in the last generations."""
    paths = paths_in(run.path / "generations", "[0-9]*.json")[-MAX_GENERATIONS:]
    members = [nodes, *(read_json(path).get("nodes") or () for path in paths)]
    return list(dict.fromkeys(str(member[0]) for member in members if member))


def thinned(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    if len(points) <= MAX_POINTS:
        return tuple(points)
    old, new = points[:-WHOLE_POINTS], points[-WHOLE_POINTS:]
    every = -(-len(old) // (MAX_POINTS - WHOLE_POINTS))
    return (*old[::every], *new)


def read_events(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the events in the tails of the event files, by time."""
    paths = paths_in(run.path / "events", "*.jsonl")
    size = max(MIN_BYTES, min(EVENT_BYTES, ALL_EVENT_BYTES // max(1, len(paths))))
    lines = [line for path in paths for line in tail_lines(path, size) if isinstance(line.get("event"), str)]
    return sorted(lines, key=lambda line: float(line.get("time") or 0.0))


def signalled_ranks(lines: Iterable[Mapping[str, Any]], generation: int) -> tuple[int, ...]:
    """Return the ranks that received SIGTERM in this generation before any agent asked its ranks to end."""
    ranks: set[int] = set()
    told = False
    for line in lines:
        if line["event"] in ("agent_started", "generation_started"):
            told = False
            ranks.clear()
        told |= line["event"] == "ranks_told_to_end"
        is_signal = line["event"] == "stop_signal" and line.get("generation") == generation
        if is_signal and not told and isinstance(rank := line.get("rank"), int):
            ranks.add(rank)
    return tuple(sorted(ranks))


def stuck_ranks(lines: Sequence[Mapping[str, Any]], generation: int, num_ranks: int) -> dict[int, str]:
    """Return rank → where it was, of the ranks that did not wait for others when their stacks were taken and made no
    step since; empty unless others waited. All ranks, if all waited for each other."""
    own = [line for line in lines if line.get("generation") == generation and isinstance(line.get("rank"), int)]
    steps = {int(line["rank"]): _number(line, "step") for line in own if line["event"] == "rank_ended"}
    newest = {int(line["rank"]): line for line in own if line["event"] == "rank_stuck"}
    still = {rank: line for rank, line in newest.items() if _number(line, "stuck_step") >= steps.get(rank, 0)}
    waiting = [rank for rank, line in still.items() if line.get("waits")]
    if not waiting and len(still) > 1:
        return {}
    return {rank: _where(line) for rank, line in still.items() if not line.get("waits") or len(waiting) == num_ranks}


def _where(line: Mapping[str, Any]) -> str:
    channels = ", ".join(str(channel) for channel in line.get("channels") or ())
    return str(line.get("message") or "")[:300] + (f"; in the kernel: {channels[:100]}" if channels else "")


def _number(line: Mapping[str, Any], name: str) -> int:
    value = line.get(name)
    return value if isinstance(value, int) else 0


def notable(lines: Iterable[Mapping[str, Any]]) -> tuple[Event, ...]:
    events = []
    for line in lines:
        name = str(line["event"])
        if name in ROUTINE or (name == "rank_ended" and line.get("code") == 0):
            continue
        if name == "generation_started" and line.get("reason") == "start":
            continue
        messages = [
            line.get(element)
            for element in ("reason", "message", "code", "during")
            if line.get(element) not in (None, "")
        ]
        rank, step, generation = (line.get(entry) for entry in ("rank", "step", "generation"))
        events.append(
            Event(
                name=name,
                moment=float(line.get("time") or 0.0),
                node=str(line.get("node") or ""),
                rank=rank if isinstance(rank, int) else None,
                step=step if isinstance(step, int) else None,
                generation=generation if isinstance(generation, int) else None,
                text="; ".join(str(item) for item in messages)[:300],
            )
        )
    return tuple(events[-MAX_EVENTS:])


def read_restarts(run: RunDirectory, first: int, now: float) -> tuple[tuple[Restart, ...], float | None]:
    """Return the restarts of the last hour among generations from `first` on, oldest first, and when the previous
    generation began. Their cost is read from the ledger only if there are many."""
    stems = [path.stem for path in paths_in(run.path / "generations", "[0-9]*.json")]
    numbers = sorted(int(stem) for stem in stems if stem.isdecimal() and int(stem) >= first)
    documents = {generation: read_json(run.generation_path(generation)) for generation in numbers[-MAX_GENERATIONS:]}
    began = {generation: number(document.get("time")) or 0.0 for generation, document in documents.items()}
    broke = {element: at for element, document in documents.items() if (at := number(document.get("broke_at")))}
    recent = [entry for entry in broke if began[entry] >= now - RESTART_SECONDS]
    nodes = read_json(run.launch_path).get("nodes") or ()
    books: dict[int, float] = {}
    if len(recent) >= threshold("restarts_per_hour"):
        books = {recovery.generation: sum(recovery.parts.values()) for recovery in read_recoveries(run)}
    restarts = tuple(
        Restart(began[item], broke[item], _cause(str(documents[item].get("reason") or ""), nodes), books.get(item))
        for item in recent
    )
    return restarts, began[numbers[-2]] if len(numbers) > 1 else None


def _cause(reason: str, nodes: Collection[str]) -> str:
    """Return the report of a lost node if there is one, since ranks fail when connections to it break; else the first
    line."""
    lost = next((item[0] for item in LOST.finditer(reason) if item[1] in nodes), None)
    return (lost.removeprefix("; ") if lost else reason.partition("\n")[0])[:300]


def tiers_of(lines: Iterable[Mapping[str, Any]], intervals: Mapping[str, float]) -> tuple[SnapshotTier, ...]:
    """Return the checkpoints of each tier by the events, including planned tiers without any."""
    saves: dict[str, list[Mapping[str, Any]]] = {tier: [] for tier in intervals}
    for line in lines:
        if line["event"] in ("checkpoint_saved", "checkpoint_failed", "checkpoint_skipped") and line.get("tier"):
            saves.setdefault(str(line["tier"]), []).append(line)
    return tuple(_tier(name, tier_lines, intervals.get(name)) for name, tier_lines in saves.items())


def _tier(name: str, lines: Sequence[Mapping[str, Any]], interval: float | None) -> SnapshotTier:
    good = [line for line in lines if line["event"] == "checkpoint_saved"]
    after = list(lines[lines.index(good[-1]) + 1 :]) if good else list(lines)
    failed = [line for line in after if line["event"] == "checkpoint_failed"]
    seconds = [value for line in good if (value := number(line.get("seconds"))) is not None]
    rates = [
        count / took
        for line in good
        if (count := number(line.get("bytes"))) and (took := number(line.get("seconds"))) and took > 0
    ]
    last = good[-1] if good else None
    return SnapshotTier(
        tier=name,
        last_step=int(last["step"]) if last and isinstance(last.get("step"), int) else None,
        last_moment=float(last.get("time") or 0.0) if last else None,
        last_seconds=seconds[-1] if seconds else None,
        usual_seconds=statistics.median(seconds[:-1]) if len(seconds) > 3 else None,
        bytes_per_second=rates[-1] if rates else None,
        usual_bytes_per_second=statistics.median(rates[:-1]) if len(rates) > 3 else None,
        interval_seconds=interval,
        failures=len(failed),
        skipped=sum(line["event"] == "checkpoint_skipped" for line in after),
        reason=str(failed[-1].get("reason") or "")[:300] if failed else "",
    )


def read_logs(run: RunDirectory, ranks: Sequence[int], since: float, nodes: Sequence[str]) -> tuple[LogMatch, ...]:
    """Return the lines that match a pattern at the ends of the logs of these ranks (most relevant first) and of the
    agents, if the log was written since."""
    log_matches: list[LogMatch] = []
    for rank in ranks[:MAX_LOGS]:
        log_matches += _matches(run.log_path(rank), since, rank=rank)
    for node in nodes[:MAX_LOGS]:
        log_matches += _matches(run.path / "logs" / f"agent-{node}.log", since, node=node)
    return tuple(log_matches)


def _matches(path: Path, since: float, rank: int | None = None, node: str = "") -> list[LogMatch]:
    try:
        with open_regular(path) as handle:
            written = os.fstat(handle.fileno()).st_mtime
            if written < since:
                return []
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - LOG_BYTES))
            text = handle.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    newest: dict[str, LogMatch] = {}
    for line in text.splitlines():
        pattern = next((log_pattern for log_pattern in log_patterns() if log_pattern.expression.search(line)), None)
        if pattern is None:
            continue
        before = newest.get(pattern.name)
        newest[pattern.name] = LogMatch(
            pattern.name, line.strip()[:300], rank, node, written, before.count + 1 if before else 1
        )
    return list(newest.values())


def read_serving(run: RunDirectory, nodes: Sequence[str], now: float) -> Serving | None:
    """Return the recorded queue of a server; None without records."""
    lines = [line for node in nodes for line in tail_lines(run.metrics_path(node), EVENT_BYTES)]
    samples = sorted(
        (at, int(running), int(waiting))
        for line in lines
        if (at := number(line.get("time"))) is not None
        and (running := number(line.get("serve_running"))) is not None
        and (waiting := number(line.get("serve_waiting"))) is not None
    )
    if not samples:
        return None
    # The newest sample older than a minute gives the state when that minute began.
    since = max((at for at, _, _ in samples if at <= now - threshold("least_queue_seconds")), default=None)
    least = None if since is None else min(waiting for at, _, waiting in samples if at >= since)
    return Serving(running=samples[-1][1], waiting=samples[-1][2], least_waiting=least)


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _recorded(line: Mapping[str, Any], name: str) -> float | None:
    """Return a recorded number; NaN for null, which the file holds for a value that is not finite."""
    if name not in line:
        return None
    value = line[name]
    return math.nan if value is None else number(value)


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
