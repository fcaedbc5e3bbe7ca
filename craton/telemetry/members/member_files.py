"""Files of a run that owns runs.

    members.json             which members it has, in which order they start; written when the run starts
    jobs/NAME.yaml           the job of each member
    members/NAME/            a whole run directory, with its own agent, generations, recovery, logs and metrics
    members/status.json      what its member manager sees: state of each member, and what each waits for
    members/manager.lock     held by the member manager, which touches it every second
    members/addresses.json   where the servers among the members answer, with their API keys; readable by its owner only

`RUN/NAME` names a member on the command line; members may own runs in turn. Both files are untrusted when they are
read: a damaged file reads as no members, a damaged entry is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from craton.schema import SCHEMA, schema_problem
from craton.telemetry.files import replace_text
from craton.telemetry.rundirectory import (
    MAX_DEPTH,
    MAX_MEMBERS,
    MEMBERS_FOLDER,
    RunDirectory,
    is_member_name,
    member_names,
    read_json,
)

MEMBERS_FILE = "members.json"
STATUS_FILE = "status.json"
LOCK_FILE = "manager.lock"
JOBS_FOLDER = "jobs"
ADDRESSES_FILE = "addresses.json"
RESERVED_NAMES = (STATUS_FILE, LOCK_FILE, ADDRESSES_FILE)  # beside the members' directories
MAX_SECONDS = 1e12  # of a plausible time
MAX_COUNT = 1 << 20  # of plausible nodes, GPUs and cores

Need = Literal["done", "ready"]
MemberState = Literal["waiting", "starting", "running", "ready", "restarting", "done", "failed", "stopped"]
ACTIVE_STATES: tuple[MemberState, ...] = ("starting", "running", "ready", "restarting")  # in which it has a share


@dataclass(frozen=True)
class MemberSpec:
    """One member, as its owner wants it."""

    name: str
    needs: dict[str, Need] = field(default_factory=dict)  # other members → what they must be before this one starts
    gate: Need | None = None  # what it must be before the ranks of its owner start; None: they do not wait for it
    values: dict[str, Any] = field(default_factory=dict)  # of a sweep: key → value of this member
    is_kept: bool = False  # its result is that of an earlier run, so it is not started
    folder: str = ""  # of its job file: where the user's functions and the code of a command are
    result: str = ""  # of a kept member: the directory of that run
    nodes: int = 1  # that it takes of its owner's scheduler job
    gpus: int = 0  # per node, likewise
    cpus: int = 1  # per node, likewise


@dataclass(frozen=True)
class MembersSpec:
    """All members of a run, in the order of their start."""

    members: list[MemberSpec] = field(default_factory=list)
    parallel: int = 0  # at most so many run at a time; 0: all
    purpose: Literal["", "sweep", "weights", "rollouts"] = ""

    def member(self, name: str) -> MemberSpec | None:
        return next((member for member in self.members if member.name == name), None)


@dataclass(frozen=True)
class MemberStatus:
    """One member, as its owner's member manager last saw it."""

    state: MemberState = "waiting"
    waits_for: str = ""  # for people: "member base: step 120 of 500", "a free place (2 of 2 in use)"
    restarts: int = 0  # by the manager, after a member was lost
    message: str = ""  # why it failed or restarts
    since: float = 0.0  # epoch seconds of the last change of state
    launch: int = -1  # generation of its owner's launch in which the manager last started it
    tries: int = 0  # restarts in a row without a new step
    step: int = 0  # at the last restart
    slot: int = -1  # its share of this machine; -1: none yet


@dataclass(frozen=True)
class MembersStatus:
    """What the member manager reports."""

    members: dict[str, MemberStatus] = field(default_factory=dict)
    is_open: bool = False  # the ranks of the owner may start
    failure: str = ""  # why they never will
    pid: int = 0  # of the manager
    started: str = ""  # start time of its process, by the kernel's clock
    host: str = ""
    generation: int = -1  # of the owner's launch that this is about
    waits_for: str = ""  # what the ranks of the owner wait for


def write_members(run: RunDirectory, spec: MembersSpec) -> None:
    replace_text(run.path / MEMBERS_FILE, members_text(spec))


def members_text(spec: MembersSpec) -> str:
    """Return the text of a members.json."""
    return json.dumps({"schema": SCHEMA, **asdict(spec)}, indent=1) + "\n"


def read_members(run: RunDirectory) -> MembersSpec:
    """Return the members that a run wants; none if it has no such file or a damaged one."""
    document = read_json(run.path / MEMBERS_FILE)
    if schema_problem(document.get("schema")):
        return MembersSpec()
    wanted = document.get("members")
    entries = wanted if isinstance(wanted, list) else []
    named = [entry for entry in entries if isinstance(entry, dict) and is_member_name(entry.get("name"))]
    members = list({entry["name"]: _spec(entry) for entry in named[:MAX_MEMBERS]}.values())
    if any(need not in {member.name for member in members} for member in members for need in member.needs):
        members = []  # which of them may start is not known
    parallel, purpose = document.get("parallel"), document.get("purpose")
    return MembersSpec(
        members,
        parallel if type(parallel) is int and parallel > 0 else 0,
        purpose if purpose in ("sweep", "weights", "rollouts") else "",
    )


def write_members_status(run: RunDirectory, status: MembersStatus) -> None:
    replace_text(run.path / MEMBERS_FOLDER / STATUS_FILE, json.dumps(asdict(status), indent=1) + "\n")


def read_members_status(run: RunDirectory) -> MembersStatus:
    """Return the last status of the member manager; an empty one if there is none."""
    document = read_json(run.path / MEMBERS_FOLDER / STATUS_FILE)
    entries = document.get("members")
    members = {
        name: MemberStatus(**_known(MemberStatus, entry))
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
        if is_member_name(name) and isinstance(entry, dict) and entry.get("state") in get_args(MemberState)
    }
    return MembersStatus(**{**_known(MembersStatus, document), "members": members})


def member_runs(run: RunDirectory) -> list[RunDirectory]:
    """Return the members of a run that have a run directory: in the order of members.json, others after them."""
    names = member_names(run)
    if not names:
        return []
    order = {member.name: place for place, member in enumerate(read_members(run).members)}
    names.sort(key=lambda name: (order.get(name, len(order)), name))
    found = [RunDirectory(run.path / MEMBERS_FOLDER / name) for name in names]
    return [member for member in found if member.looks_like_a_run()]


def with_members(runs: Iterable[RunDirectory]) -> Iterator[RunDirectory]:
    """Yield runs, each followed by its members, their members, and so on."""
    for run in runs:
        yield run
        if len(list(run.owners())) < MAX_DEPTH:
            yield from with_members(member_runs(run))


def owner_of(run: RunDirectory) -> RunDirectory | None:
    """Return the run that owns this one; None if it stands alone."""
    return next(run.owners(), None)


def _spec(entry: Mapping[str, Any]) -> MemberSpec:
    needs, gate, values = entry.get("needs"), entry.get("gate"), entry.get("values")
    return MemberSpec(
        str(entry["name"]),
        {str(name): need for name, need in needs.items() if need in get_args(Need)} if isinstance(needs, dict) else {},
        gate if gate in get_args(Need) else None,
        dict(values) if isinstance(values, dict) else {},
        entry.get("is_kept") is True,
        folder if isinstance(folder := entry.get("folder"), str) else "",
        str(entry.get("result") or ""),
        _count(entry.get("nodes"), 1),
        _count(entry.get("gpus"), 0),
        _count(entry.get("cpus"), 1),
    )


def _count(value: Any, default: int) -> int:
    return value if type(value) is int and default <= value < MAX_COUNT else default


def _known(kind: type[MemberStatus] | type[MembersStatus], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that a status has, as long as each has the type of its default."""
    defaults = kind()
    types = {item.name: type(getattr(defaults, item.name)) for item in fields(kind)}
    known = {name: value for name, value in document.items() if name in types}
    times = {
        name: float(value)
        for name, value in known.items()
        if types[name] is float and isinstance(value, int | float) and 0 <= value < MAX_SECONDS
    }
    others = {name: value for name, value in known.items() if types[name] is not float}
    return times | {name: value for name, value in others.items() if isinstance(value, types[name])}
