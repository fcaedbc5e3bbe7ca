"""Read the events, generations, checkpoints, logs and queue of a run, of large files only the ends."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from craton.observability.diagnosis.collect.metrics import MAX_GENERATIONS, number
from craton.observability.diagnosis.restart_history import LOST
from craton.observability.diagnosis.snapshot import Event, LogMatch, Restart, Serving, SnapshotStuckRank, SnapshotTier
from craton.observability.diagnosis.tables import log_patterns, threshold
from craton.orchestration.watching import read_recoveries
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import open_regular, paths_in, tail_lines
from craton.telemetry.node import PeerTraffic, read_peer

MIN_BYTES = 32 << 10  # of one event file
ALL_EVENT_BYTES, EVENT_BYTES, LOG_BYTES = 64 << 20, 256 << 10, 48 << 10
RESTART_SECONDS = 3600.0  # how long a restart counts
ENDED_SECONDS = 30.0  # over which the ends of a server's requests are counted
SPEED_SECONDS, FEW_SAMPLES = 8.0, 6  # of a server's recent speed; fewer samples say nothing
MAX_LOGS, LAST_BYTES = 64, 4096
Samples = Sequence[tuple[float, Mapping[str, Any]]]  # lines of a server's records, with their moments
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


def read_events(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the events in the tails of the event files, by time."""
    paths = paths_in(run.path / "events", "*.jsonl")
    size = max(MIN_BYTES, min(EVENT_BYTES, ALL_EVENT_BYTES // max(1, len(paths))))
    lines = [line for path in paths for line in tail_lines(path, size) if isinstance(line.get("event"), str)]
    return sorted(lines, key=lambda line: float(line.get("time") or 0.0))


def signalled_ranks(lines: Iterable[Mapping[str, Any]], generation: int) -> tuple[int, ...]:
    """Return the ranks that received SIGTERM in this generation before any agent asked its ranks to end."""
    ranks: set[int] = set()
    is_ending = False
    for line in lines:
        if line["event"] in ("agent_started", "generation_started"):
            is_ending = False
            ranks.clear()
        is_ending |= line["event"] == "ranks_told_to_end"
        is_signal = line["event"] == "stop_signal" and line.get("generation") == generation
        if is_signal and not is_ending and isinstance(rank := line.get("rank"), int):
            ranks.add(rank)
    return tuple(sorted(ranks))


def stuck_ranks(lines: Sequence[Mapping[str, Any]], generation: int, num_ranks: int) -> tuple[SnapshotStuckRank, ...]:
    """Return the ranks that did not wait for others when their stacks were taken and made no step since; none unless
    others waited, or one of them alone was in user code. All ranks, if all waited for each other."""
    own = [line for line in lines if line.get("generation") == generation and isinstance(line.get("rank"), int)]
    steps = {int(line["rank"]): _number(line, "step") for line in own if line["event"] == "rank_ended"}
    newest = {int(line["rank"]): line for line in own if line["event"] == "rank_stuck"}
    still = {rank: line for rank, line in newest.items() if _number(line, "stuck_step") >= steps.get(rank, 0)}
    waiting = [rank for rank, line in still.items() if line.get("waits")]
    inside = [rank for rank, line in still.items() if line.get("is_user_frame")]
    if not waiting and len(still) > 1 and len(inside) == 1:
        still = {rank: line for rank, line in still.items() if rank in inside}
    elif not waiting and len(still) > 1:
        return ()
    return tuple(
        SnapshotStuckRank(
            rank,
            str(line.get("message") or "")[:300],
            bool(line.get("is_user_frame")),
            tuple(str(channel)[:40] for channel in line.get("channels") or ()),
        )
        for rank, line in still.items()
        if not line.get("waits") or len(waiting) == num_ranks
    )


def unacknowledged_peers(lines: Sequence[Mapping[str, Any]], generation: int) -> dict[int, tuple[PeerTraffic, ...]]:
    """Return rank → peers that did not acknowledge what it sent when it was last stuck."""
    peers = {}
    for line in lines:
        is_stuck = line["event"] == "rank_stuck" and line.get("generation") == generation
        if is_stuck and isinstance(rank := line.get("rank"), int):
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                peers[rank] = tuple(read_peer(peer) for peer in line.get("unacknowledged") or ())
    return {rank: silent for rank, silent in peers.items() if silent}


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


def last_lines(run: RunDirectory, world: int) -> dict[int, str]:
    """Return rank → the last line of its output, of the first MAX_LOGS ranks."""
    lines = {}
    for rank in range(min(world, MAX_LOGS)):
        with contextlib.suppress(OSError), open_regular(run.log_path(rank)) as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - LAST_BYTES))
            text = handle.read(LAST_BYTES).decode(errors="replace")
            lines[rank] = next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "")
    return lines


def printed_times(run: RunDirectory, world: int) -> dict[int, float]:
    """Return rank → when it last printed, in epoch seconds, of the first MAX_LOGS ranks that have printed at all."""
    times = {}
    for rank in range(min(world, MAX_LOGS)):
        with contextlib.suppress(OSError):
            status = os.lstat(run.log_path(rank))
            if status.st_size:
                times[rank] = status.st_mtime
    return times


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
    """Return the recorded queue, ends and speed of a server; None without records."""
    lines = [line for node in nodes for line in tail_lines(run.metrics_path(node), EVENT_BYTES)]
    served = [(at, line) for line in lines if (at := _served_at(line)) is not None]
    samples = _of_last_start(sorted(served, key=lambda sample: sample[0]))
    if not samples:
        return None
    # The newest sample older than a minute gives the state when that minute began.
    since = max((at for at, _ in samples if at <= now - threshold("least_queue_seconds")), default=None)
    least = None if since is None else min(int(line["serve_waiting"]) for at, line in samples if at >= since)
    newest = samples[-1][1]
    before = [line for at, line in samples if at <= now - ENDED_SECONDS]
    first = before[-1] if before else samples[0][1]
    ended, aborted, failed = (
        int(max(0.0, (number(newest.get(name)) or 0.0) - (number(first.get(name)) or 0.0)))
        for name in ("serve_ended", "serve_aborted", "serve_failed")
    )
    roofline, usual = _rooflines(samples, now)
    return Serving(
        running=int(newest["serve_running"]),
        waiting=int(newest["serve_waiting"]),
        least_waiting=least,
        num_ended=ended,
        num_aborted=aborted,
        num_failed=failed,
        tokens_per_second=number(newest.get("run_tokens_per_second")),
        roofline=roofline,
        usual_roofline=usual,
    )


def _of_last_start(samples: Samples) -> Samples:
    """Return the samples since the engine was last started: its counts begin at 0 again."""
    ended = [number(line.get("serve_ended")) or 0.0 for _, line in samples]
    first = next((index for index in range(len(ended) - 1, 0, -1) if ended[index] < ended[index - 1]), 0)
    return samples[first:]


def _served_at(line: Mapping[str, Any]) -> float | None:
    """Return the moment of a line of a server's records; None for another line."""
    is_whole = number(line.get("serve_running")) is not None and number(line.get("serve_waiting")) is not None
    return number(line.get("time")) if is_whole else None


def _rooflines(samples: Samples, now: float) -> tuple[float | None, float | None]:
    """Return planned over measured time of a server's steps, recently and before. With less load than before it says
    nothing: pauses between requests count as part of a step."""
    known = [
        (at, share, line["serve_running"]) for at, line in samples if (share := number(line.get("serve_roofline")))
    ]
    recent = [(share, running) for at, share, running in known if at > now - SPEED_SECONDS]
    before = [(share, running) for at, share, running in known if at <= now - SPEED_SECONDS]
    if len(recent) < FEW_SAMPLES or len(before) < FEW_SAMPLES:
        return None, None
    if min(running for _, running in recent) < max(1, statistics.median(running for _, running in before)):
        return None, None
    return max(share for share, _ in recent), statistics.median(share for share, _ in before)
