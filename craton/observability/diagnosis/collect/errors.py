"""Collect what ranks reported about their own ends, from the events of a run since it was last started."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from craton.observability.diagnosis.similar_text import without_numbers
from craton.observability.diagnosis.snapshot import RankError
from craton.telemetry.error_reports import ErrorReport

MAX_GENERATIONS, MAX_PER_GENERATION, MAX_RANKS = 12, 8, 16
ENDED_BY_AGENT = ("SIGTERM", "SIGKILL")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")


@dataclass
class _Generation:
    """The reports of one generation, by rank, in the order of their ends."""

    errors: dict[int, RankError] = field(default_factory=dict)
    exited: dict[int, RankError] = field(default_factory=dict)  # with code 0


def read_errors(events: Iterable[Mapping[str, Any]], first: int, has_failed: bool) -> tuple[RankError, ...]:
    """Return the errors of the generations from `first` on, newest last. `events` are in the order of time."""
    generations: dict[int, _Generation] = {}
    broken: set[int] = set()  # generations that ended for a failure
    newest = first
    for line in events:
        number = line.get("generation")
        if not isinstance(number, int) or number < first:
            continue
        newest = max(newest, number)
        if line["event"] == "generation_started" and not line.get("planned") and line.get("reason") != "start":
            broken.add(number - 1)
        if isinstance(line.get("rank"), int):
            _take(generations.setdefault(number, _Generation()), line)
    if has_failed:
        broken.add(newest)
    found: list[RankError] = []
    for number in sorted(generations)[-MAX_GENERATIONS:]:
        generation = generations[number]
        reports = list(generation.errors.values())
        if number in broken:
            reports += [error for rank, error in generation.exited.items() if rank not in generation.errors]
        found += _merged(reports)
    return tuple(found)


def _take(generation: _Generation, line: Mapping[str, Any]) -> None:
    name, rank = line["event"], line["rank"]
    if name not in ("broken", "failed", "rank_ended"):
        return
    report = ErrorReport.from_fields(line.get("error"))
    code = line.get("code") if isinstance(line.get("code"), int) else None
    before = generation.errors.get(rank)
    if name == "rank_ended" and code == 0:
        if was_sent(line) or line.get("during") == "idle":  # its work was done
            return
        generation.exited[rank] = replace(_error(line, None), code=0, is_early=True, source="exit")
    elif before is not None and (before.is_echo or report is None or name == "rank_ended"):
        is_better = before.is_echo and report is not None and not report.is_echo
        error = _error(line, report) if is_better else before
        generation.errors[rank] = replace(error, code=code, out_of_memory=str(line.get("out_of_memory") or ""))
    elif report is not None or (name == "rank_ended" and not was_sent(line)):
        generation.errors.setdefault(rank, replace(_error(line, report), code=code))
    elif name == "broken":  # of a version that recorded the reason alone
        kind, _, message = str(line.get("reason") or "").partition(": ")
        old = ErrorReport(type=kind if message else "", message=message or kind, is_echo=bool(line.get("echo")))
        generation.errors.setdefault(rank, _error(line, old))


def was_sent(line: Mapping[str, Any]) -> bool:
    """Return whether the agent itself ended this rank."""
    sent = line.get("sent")
    return isinstance(sent, list) and any(name in ENDED_BY_AGENT for name in sent)


def _error(line: Mapping[str, Any], report: ErrorReport | None) -> RankError:
    found = report or ErrorReport(source="exit")
    step = found.step if found.step is not None else line.get("step")
    return RankError(
        moment=float(line.get("time") or 0.0),
        generation=int(line["generation"]),
        node=str(line.get("node") or ""),
        rank=line["rank"],
        ranks=(line["rank"],),
        step=step if isinstance(step, int) else None,
        phase=found.phase or str(line.get("during") or ""),
        type=found.type,
        message=found.message,
        errno=found.errno,
        path=found.path,
        user_frame=found.user_frame,
        last_frame=found.last_frame,
        outer=found.outer,
        is_echo=found.is_echo,
        out_of_memory=str(line.get("out_of_memory") or ""),
        source=found.source,
    )


def _merged(errors: Sequence[RankError]) -> list[RankError]:
    """Merge the ranks with the same error, and keep the first errors by time, those that are no echo before others."""
    groups: dict[tuple[Any, ...], RankError] = {}
    for error in sorted(errors, key=lambda item: item.moment):
        key = _key(error)
        first = groups.get(key)
        if first is None:
            groups[key] = error
        else:
            ranks = (*first.ranks, *error.ranks)[:MAX_RANKS]
            groups[key] = replace(first, ranks=ranks, num_ranks=first.num_ranks + 1)
    kept = sorted(groups.values(), key=lambda item: (item.is_echo, item.moment))[:MAX_PER_GENERATION]
    return sorted(kept, key=lambda item: item.moment)


def _key(error: RankError) -> tuple[Any, ...]:
    """Return what makes two errors the same: ranks differ in indices, addresses and times."""
    code = None if error.type or error.message else error.code
    peers = tuple(_ADDRESS.findall(error.message)) if error.is_echo else ()  # the addresses tell which node is bad
    message = without_numbers(error.message)
    return (error.type, message, peers, error.user_frame, code, error.is_echo, error.is_early)
