"""The members of a run: a row of each, what it waits for, and the sum of all.

A row joins three sources: members.json names members that have not started, the member manager says what each waits
for, and the run directory of a member says how far it is. A member that cannot be read does not hide the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from craton import formatting
from craton.orchestration.backend import read_submission
from craton.orchestration.watching.recoveries import Recovery
from craton.orchestration.watching.state import MOVING, settled_summaries, standings_of
from craton.telemetry import RunDirectory, RunSummary
from craton.telemetry.members import (
    MAX_DEPTH,
    MEMBERS_FILE,
    MEMBERS_FOLDER,
    MembersSum,
    MemberStatus,
    member_names,
    member_runs,
    read_members,
    read_members_status,
)

MIN_SHARE = 0.005  # of the members' time, below which a ledger kind is not named
KEPT = "its result is that of an earlier run"


@dataclass(frozen=True)
class SeenRun:
    """A run as its files show it."""

    summary: RunSummary
    recoveries: list[Recovery]
    unread: tuple[str, ...] = ()  # skipped files of the run, and why


@dataclass(frozen=True)
class MemberRow:
    """One member; without a summary: it has no run directory yet, or none that can be read."""

    name: str  # OWNER/NAME
    state: str  # for users
    summary: RunSummary | None = None
    waits_for: str = ""
    restarts: int = 0  # by its owner, after it was lost
    message: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)  # of a sweep: key → value
    recoveries: Sequence[Recovery] = ()
    unread: tuple[str, ...] = ()
    members: Sequence[MemberRow] = ()


def member_rows(
    run: RunDirectory, look: Callable[[RunDirectory], SeenRun], asks_scheduler: bool = True, is_deep: bool = True
) -> list[MemberRow]:
    """Return the members of a run in the order of their start, each with its own members. `look` reads a run. Without
    `asks_scheduler`, the member manager's word counts instead: a list of many owners must not ask for each. Without
    `is_deep`, members of members are only in the sums of their owners."""
    rows = _rows(run, look, is_deep)
    summaries = [row.summary for row in flat(rows) if row.summary is not None]
    ask = standings_of if asks_scheduler else lambda runs: {}
    settled = {summary.path: summary for summary in settled_summaries(summaries, ask)}
    return [_with_states(row, settled, asks_scheduler) for row in rows]


def flat(rows: Sequence[MemberRow]) -> Iterator[MemberRow]:
    """Yield rows, each followed by those of its members."""
    for row in rows:
        yield row
        yield from flat(row.members)


def with_members_sum(run: RunDirectory, own: RunSummary, rows: Sequence[MemberRow]) -> RunSummary:
    """Return the summary of an owner with the sum of its members."""
    if not rows:
        return own
    states: dict[str, int] = {}
    ledger: dict[str, float] = {}
    node_seconds, dollars = 0.0, []
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
        if row.summary is None:
            continue
        summary = with_members_sum(RunDirectory(row.summary.path), row.summary, row.members)
        theirs = summary.members or MembersSum()
        for kind, seconds in summary.ledger.items():
            ledger[kind] = ledger.get(kind, 0.0) + seconds * summary.nodes
        for kind, seconds in theirs.ledger.items():
            ledger[kind] = ledger.get(kind, 0.0) + seconds
        member = RunDirectory(summary.path)
        node_seconds += theirs.node_seconds + (0.0 if _shares_nodes(run, member) else summary.node_seconds)
        is_paid = _is_in_job_of(run, member) and own.cost_dollars is not None
        dollars += [theirs.cost_dollars, None if is_paid else summary.cost_dollars]
    known = [amount for amount in dollars if amount is not None]
    return replace(own, members=MembersSum(states, node_seconds, sum(known) if known else None, ledger))


def account_lines(summary: RunSummary) -> list[str]:
    """Return the node time and the dollars of a run with members: the sum and its parts."""
    members = summary.members
    if members is None:
        return []
    lines = []
    total = sum(members.ledger.values())
    if total:
        parts = [
            f"{kind} {formatting.whole_duration(seconds)} ({formatting.percent(seconds / total)})"
            for kind, seconds in members.ledger.items()
            if seconds / total >= MIN_SHARE
        ]
        lines.append(f"time of its members: {' · '.join(parts)}")
    own = formatting.whole_duration(summary.node_seconds)
    if members.node_seconds:
        both = (own, formatting.whole_duration(members.node_seconds))
        lines.append(
            f"node time {formatting.whole_duration(summary.total_node_seconds)}: {both[0]} of its own, {both[1]} of "
            "its members"
        )
    else:
        lines.append(f"node time {own}; its members use the same nodes")
    if summary.total_cost_dollars is not None:
        amounts = (summary.total_cost_dollars, summary.cost_dollars or 0.0, members.cost_dollars or 0.0)
        whole, mine, theirs = map(formatting.dollars, amounts)
        lines.append(f"cost {whole}: {mine} of its own, {theirs} of its members")
    return lines


def members_sign(run: RunDirectory) -> list[str]:
    """Return lines that change when a member of a run starts, ends or books time; none for a run without members."""
    folder = os.fspath(run.path)
    words = [_age(f"{folder}/{MEMBERS_FILE}"), *_sign_below(folder, 0)]
    return [word for word in words if word]


def _is_in_job_of(owner: RunDirectory, member: RunDirectory) -> bool:
    """Whether a member is on this machine with its owner, or a part of the same scheduler's job."""
    theirs, own = read_submission(member), read_submission(owner)
    return theirs.on == own.on and (own.on == "local" or theirs.job == own.job)


def _shares_nodes(owner: RunDirectory, member: RunDirectory) -> bool:
    """Whether a member runs on nodes of its owner, as far as is known. In a scheduler's job it may have its own."""
    if not _is_in_job_of(owner, member):
        return False
    on = read_submission(owner).on
    if on != "slurm":
        return on == "local"
    from craton.orchestration.slurm import read_allocation  # imports the topology of clusters, which `ps` avoids

    ours, theirs = read_allocation(owner), read_allocation(member)
    return ours is None or theirs is None or bool(set(ours.hosts) & set(theirs.hosts))


def _sign_below(folder: str, depth: int) -> Iterator[str]:
    """Yield the lines of the members of a folder. `ps` calls this for every run, so it opens no file of a member: its
    folder changes with its markers and its launch, and its ledger with every second that it runs."""
    members = f"{folder}/{MEMBERS_FOLDER}"
    if not (age := _age(members)):
        return
    yield age
    yield _age(f"{members}/status.json")
    for name in member_names(RunDirectory(folder)):
        yield f"{name} {_age(f'{members}/{name}')}"
        with contextlib.suppress(OSError), os.scandir(f"{members}/{name}/ledger") as entries:
            yield from sorted(f"{entry.name} {entry.stat(follow_symlinks=False).st_size}" for entry in entries)
        if depth < MAX_DEPTH:
            yield from _sign_below(f"{members}/{name}", depth + 1)


def _rows(run: RunDirectory, look: Callable[[RunDirectory], SeenRun], is_deep: bool) -> list[MemberRow]:
    spec, status = read_members(run), read_members_status(run)
    there = {member.path.name: member for member in member_runs(run)}
    wanted = {member.name: member for member in spec.members}
    rows = []
    for name in dict.fromkeys([*wanted, *there]):
        seen = _seen(there[name], look) if name in there else None
        manager = status.members.get(name, MemberStatus())
        is_kept = name in wanted and wanted[name].is_kept
        unread_message = seen if isinstance(seen, str) else ""
        row = MemberRow(
            f"{run.name}/{name}",
            "unreadable" if unread_message else "done" if is_kept and seen is None else manager.state,
            waits_for=manager.waits_for,
            restarts=manager.restarts,
            message=unread_message or manager.message or (KEPT if is_kept else ""),
            values=wanted[name].values if name in wanted else {},
        )
        if isinstance(seen, SeenRun):
            is_owner = is_deep and len(list(there[name].owners())) < MAX_DEPTH
            below = _rows(there[name], look, is_deep) if is_owner else []
            row = replace(row, summary=seen.summary, recoveries=seen.recoveries, unread=seen.unread, members=below)
        rows.append(row)
    return rows


def _seen(run: RunDirectory, look: Callable[[RunDirectory], SeenRun]) -> SeenRun | str:
    try:
        return look(run)
    except Exception as error:  # noqa: BLE001 - a broken run directory must not hide the other members
        return f"{run.path} cannot be read: {str(error) or type(error).__name__}"


def _with_states(row: MemberRow, settled: Mapping[Path, RunSummary], is_asked: bool) -> MemberRow:
    """Take the state from the run directory, as its scheduler sees it."""
    below = [_with_states(member, settled, is_asked) for member in row.members]
    if row.summary is None:
        return replace(row, members=below)
    summary = settled[row.summary.path]
    waits = summary.message if summary.state == "waiting" else ""
    state = summary.shown_state
    if state == "lost" and not is_asked and read_submission(RunDirectory(summary.path)).on != "local":
        state = row.state
    elif row.state == "restarting" and state not in ("done", "running"):
        state = "restarting"
    elif row.state == "ready" and state == "running":
        state = "ready"
    ended = summary.state not in MOVING and state != "restarting"
    return replace(
        row,
        summary=summary,
        state=state,
        waits_for=""
        if ended
        else waits or (row.waits_for if row.state in ("waiting", "starting", "restarting") else ""),
        message=summary.message.partition("\n")[0] or row.message,
        members=below,
    )


def _age(path: str) -> str:
    """Return size and time of a file or folder; "" if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"
