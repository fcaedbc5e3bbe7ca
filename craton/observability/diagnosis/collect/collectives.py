"""Collect the state of collectives from NCCL RAS (queried twice) and from PyTorch's flight recorder dumps.

RAS (NCCL 2.24 and newer) listens on localhost:28028 of every node with an NCCL process ($NCCL_RAS_ADDR); since 2.28.7
it responds in JSON. A flight recorder dump is a pickle, which could run any code when loaded: it is read by an
unpickler that accepts no class, only numbers, strings, lists and dictionaries. Its usual folder may be world-writable:
only regular files of the run's owner are opened, and malformed ones are skipped with a note. A missing recording counts
against a rank only if all dumps found were readable and another rank of its node left one.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from craton.agent.processes import RECORDING_VARIABLES
from craton.observability.diagnosis.snapshot import Collectives, Communicator, StuckCollective
from craton.telemetry import RunDirectory
from craton.telemetry.files import open_regular

RAS_ADDRESS, RAS_JSON = "localhost:28028", "2.28.7"
RAS_SECONDS, RAS_PAUSE_SECONDS = 5.0, 2.0
MAX_ANSWER_BYTES = 64 << 20
# PyTorch's default places: below the user's cache (seen in 2.11 and 2.13), or /tmp (before).
CACHED_DUMP_PREFIX, OLD_DUMP_PREFIX = "torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"
MAX_DUMPS, MAX_DUMP_BYTES = 16_384, 256 << 20
DUMP_SECONDS = 30.0  # for all dumps together


class RefusedPickle(pickle.UnpicklingError):
    """A pickle that contains more than plain data."""


class RasFormatError(ValueError):
    """RAS responds, but not in JSON: its NCCL is older."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise RefusedPickle(f"it loads {module}.{name}; only plain data is allowed")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedPickle("it refers to an object outside the file")


def read_collectives(
    run: RunDirectory,
    launch: Mapping[str, Any],
    asks_ras: bool,
    since: float,
    is_local: bool = True,
    ranks_per_node: int = 1,
) -> tuple[Collectives, str]:
    """Return the state of collectives, and a note on what could not be read. Away from the nodes (`is_local` is False)
    only the run directory can hold recordings of this run."""
    communicators: tuple[Communicator, ...] = ()
    note, asked = "", False
    if asks_ras:
        try:
            if (first := ask_ras()) is not None:
                asked = True
                time.sleep(RAS_PAUSE_SECONDS)
                communicators = communicators_of(first, ask_ras() or first, RAS_PAUSE_SECONDS)
        except RasFormatError:
            note = f"NCCL RAS on this node responds in plain text (JSON since {RAS_JSON}); read it with `ncclras`"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            note = f"the response of NCCL RAS is not a status: {error!r}"
    owners = {os.getuid(), run.path.stat().st_uid}
    dumps, failed = read_dumps(_dump_prefixes(run, launch, is_local), since, owners)
    if failed:
        note = f"{len(failed)} flight recorder files could not be read: {failed[0]}" + (f"; {note}" if note else "")
    readable = set(dumps) if failed else _of_their_nodes(dumps, max(1, ranks_per_node))
    return Collectives(communicators, stuck_collectives(dumps, readable), asked, len(dumps)), note


# -- RAS -----------------------------------------------------------------------------------------------------------


def ask_ras(address: str | None = None) -> dict[str, Any] | None:
    """Query the RAS status of the job; None if RAS does not listen or respond. RasFormatError if it does not support
    JSON."""
    host, _, port = (address or os.environ.get("NCCL_RAS_ADDR") or RAS_ADDRESS).rpartition(":")
    if not port.isdecimal():
        return None
    deadline = time.monotonic() + RAS_SECONDS
    try:
        with socket.create_connection((host, int(port)), timeout=RAS_SECONDS) as connection:
            connection.sendall(b"CLIENT PROTOCOL 2\n")
            if not _received(connection, deadline, b"\n").startswith(b"SERVER PROTOCOL"):
                return None
            connection.sendall(b"SET FORMAT json\n")
            answer = _received(connection, deadline, b"\n").strip()
            if not answer:
                return None
            if answer != b"OK":
                raise RasFormatError("it does not support SET FORMAT")
            connection.sendall(b"VERBOSE STATUS\n")
            received = _received(connection, deadline)
    except OSError:
        return None
    if not received.strip():
        return None
    if not received.lstrip().startswith((b"{", b"[")):
        raise RasFormatError("it accepted SET FORMAT and responded in plain text")
    try:
        document = json.loads(received)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _received(connection: socket.socket, deadline: float, end: bytes | None = None) -> bytes:
    """Receive until `end`, or until the peer closes; TimeoutError at the deadline, even if single bytes arrive."""
    received = bytearray()
    while not (end and received.endswith(end)) and len(received) < MAX_ANSWER_BYTES:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(1 if end else 1 << 16)
        if not part:
            break
        if time.monotonic() > deadline:
            raise TimeoutError("no complete response in time")
        received += part
    return bytes(received)


def communicators_of(first: Mapping[str, Any], second: Mapping[str, Any], seconds: float) -> tuple[Communicator, ...]:
    """Return communicators of more than one rank, largest first."""
    before = {_name(item): _counts(item) for item in first.get("communicators") or ()}
    communicators = [
        Communicator(
            name=_name(communicator),
            size=int(communicator.get("size") or 0),
            counts=_counts(communicator),
            counts_before=before.get(_name(communicator), {}),
            seconds_between=seconds,
            missing=tuple(int(rank["rank"]) for rank in communicator.get("missing_ranks") or ()),
        )
        for communicator in second.get("communicators") or ()
        if int(communicator.get("size") or 0) > 1
    ]
    return tuple(sorted(communicators, key=lambda entry: -entry.size))


def _name(communicator: Mapping[str, Any]) -> str:
    return f"{communicator.get('hash', '')}:{communicator.get('secondary_hash', '')}"


def _counts(communicator: Mapping[str, Any]) -> dict[int, int]:
    """Return rank → number of operations of all kinds."""
    return {
        int(rank["rank"]): sum(int(count) for count in (rank.get("collective_counts") or {}).values())
        for rank in communicator.get("ranks") or ()
    }


# -- flight recorder -----------------------------------------------------------------------------------------------


def _dump_prefixes(run: RunDirectory, launch: Mapping[str, Any], is_local: bool) -> list[Path]:
    """Return path prefixes, to which each rank appends its number: those set by environment variables first, then the
    agents' default, then PyTorch's defaults."""
    own = run.recording_prefix
    if not is_local:
        return [own]
    environment = {**os.environ, **{str(key): str(value) for key, value in (launch.get("env") or {}).items()}}
    named = [environment[name] for name in RECORDING_VARIABLES if environment.get(name)]
    caches = [environment.get("XDG_CACHE_HOME"), f"{environment.get('HOME', '/tmp')}/.cache"]
    by_itself = [*(f"{cache}/{CACHED_DUMP_PREFIX}" for cache in caches if cache), OLD_DUMP_PREFIX]
    return list(dict.fromkeys([*map(Path, named), own, *map(Path, by_itself)]))


def read_dumps(
    prefixes: Sequence[Path], since: float = 0.0, owners: Set[int] | None = None
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return rank → its recording, and what could not be read. Older files belong to another run. The first prefix with
    recordings counts."""
    dumps: dict[int, dict[str, Any]] = {}
    failed: list[str] = []
    deadline = time.monotonic() + DUMP_SECONDS
    for prefix in prefixes:
        for place, (rank, path) in enumerate(_numbered(prefix)):
            if place == MAX_DUMPS or time.monotonic() > deadline:
                failed.append(f"{path.name} and later ones: too many to read")
                break
            try:
                recording = read_dump(path, since, owners)
            except (OSError, ValueError, RefusedPickle) as error:
                failed.append(f"{path.name}: {error}")
                continue
            if recording is not None:
                dumps[rank] = recording
        if dumps:
            break
    return dumps, failed


def _numbered(prefix: Path) -> list[tuple[int, Path]]:
    """Return (rank, file) of a prefix, by rank; empty if its folder cannot be listed."""
    try:
        names = os.listdir(prefix.parent)
    except OSError:
        return []
    numbers = {name: name.removeprefix(prefix.name) for name in names if name.startswith(prefix.name)}
    return sorted((int(item), prefix.parent / name) for name, item in numbers.items() if re.fullmatch("[0-9]+", item))


def _of_their_nodes(ranks: Iterable[int], ranks_per_node: int) -> set[int]:
    """Return these ranks and all others of their nodes."""
    nodes = {rank // ranks_per_node for rank in ranks}
    return {node * ranks_per_node + place for node in nodes for place in range(ranks_per_node)}


def read_dump(path: Path, since: float = 0.0, owners: Set[int] | None = None) -> dict[str, Any] | None:
    """Read one recording; None if it is older. OSError or ValueError if the file is not owned by one of `owners`
    (default: this user), is not a regular file, is too large, or contains more than plain data."""
    # A link could lead to any file, and a pipe would block.
    with open_regular(path) as file:
        about = os.fstat(file.fileno())
        if about.st_uid not in (owners or {os.getuid()}):
            raise ValueError(f"owned by user {about.st_uid}, who does not own the run")
        if about.st_mtime < since:
            return None
        if about.st_size > MAX_DUMP_BYTES:
            raise ValueError(f"larger than {MAX_DUMP_BYTES >> 20} MiB")
        content = file.read(MAX_DUMP_BYTES)
    try:
        document = _PlainUnpickler(io.BytesIO(content)).load()
    except RefusedPickle:
        raise
    except Exception as error:  # on a malformed pickle the unpickler raises nearly anything
        raise ValueError(f"not a recording: {error!r}") from error
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise ValueError("not a recording: it has no entries")
    entries, groups = [entry for entry in document["entries"] if _is_entry(entry)], document.get("pg_config")
    if document["entries"] and not entries:
        raise ValueError("not a recording: none of its entries can be read")
    return {"entries": entries, "pg_config": groups if isinstance(groups, dict) else {}}


def _is_entry(entry: Any) -> bool:
    """Return whether all fields that are read have the expected types."""
    if not isinstance(entry, dict) or not isinstance(entry.get("collective_seq_id"), int):
        return False
    sizes, frames = entry.get("input_sizes") or [], entry.get("frames") or []
    return (
        all(isinstance(element, list | tuple) for element in (sizes, frames))
        and all(isinstance(size, list | tuple) and all(isinstance(item, int) for item in size) for size in sizes)
        and all(isinstance(frame, dict) for frame in frames)
    )


def stuck_collectives(dumps: Mapping[int, Mapping[str, Any]], readable: Set[int]) -> tuple[StuckCollective, ...]:
    """Return, for every process group, the first collective that some rank entered and that did not finish everywhere.
    `readable`: ranks whose recording would have been found."""
    stuck_ones = []
    for group, description, members in _groups(dumps):
        entries = {
            rank: {
                int(entry["collective_seq_id"]): entry
                for entry in dumps[rank]["entries"]
                if isinstance(entry, Mapping) and _group_of(entry)[0] == group and not entry.get("is_p2p")
            }
            for rank in members
            if rank in dumps
        }
        if len(entries) < 2:
            continue
        # Recordings are ring buffers: compare only what the shortest one still holds.
        first = max((min(element) for element in entries.values() if element), default=0)
        numbers = sorted({number for item in entries.values() for number in item if number >= first})
        # Collectives of a group run in order. On a GPU ranks launch later ones while they wait in the first.
        candidates = (_stuck(group, description, members, entries, number, readable) for number in numbers)
        stuck = next((candidate for candidate in candidates if candidate is not None), None)
        if stuck is not None:
            stuck_ones.append(stuck)
    return tuple(stuck_ones)


def _stuck(
    group: str,
    description: str,
    members: Sequence[int],
    entries: Mapping[int, Mapping[int, Mapping[str, Any]]],
    sequence: int,
    readable: Set[int],
) -> StuckCollective | None:
    inside = {rank: element[sequence] for rank, element in entries.items() if sequence in element}
    missing = tuple(rank for rank in entries if rank not in inside)
    shapes = {rank: (str(entry.get("profiling_name")), _sizes(entry)) for rank, entry in inside.items()}
    usual, _ = Counter(shapes.values()).most_common(1)[0]
    # Sizes of an uneven gather may differ; names of one collective may not.
    odd = tuple(
        rank for rank, shape in shapes.items() if shape[0] != usual[0] or (shape != usual and _is_even(usual[0]))
    )
    # With gloo a finished entry keeps its state and is only retired.
    pending = [rank for rank, item in inside.items() if item.get("state") != "completed" and not item.get("retired")]
    if len(pending) < len(inside) and _needs_all(usual[0]):
        missing = ()  # it is over for a rank, so all ranks entered it: the recording without it is older
    if not missing and not odd and not pending:
        return None
    sample = inside[next(iter((*odd, *pending)), next(iter(inside)))]
    mismatch = ""
    if odd:
        mismatch = f"rank {odd[0]} calls {_words(shapes[odd[0]])}, the others {_words(usual)}"
    return StuckCollective(
        group=group,
        sequence=sequence,
        operation=usual[0],
        description=description,
        expected=tuple(members),
        missing=missing,
        silent=tuple(rank for rank in members if rank in readable and rank not in entries),
        mismatch=mismatch,
        mismatched=odd,
        stack=_stack(sample),
    )


def _stack(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the innermost frames from which the collective was called, without PyTorch's own if there are others."""
    frames = entry.get("frames") or ()
    callers = [frame for frame in frames if "-packages/torch/" not in str(frame.get("filename"))] or frames
    return tuple(f"{frame.get('name')} ({frame.get('filename')}:{frame.get('line')})" for frame in callers[:6])


def _groups(dumps: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, str, list[int]]]:
    """Return (name, description, members) of every process group in the recordings."""
    groups: dict[str, tuple[str, list[int]]] = {}
    for dump in dumps.values():
        for name, item in (dump.get("pg_config") or {}).items():
            members = _members(item.get("ranks")) if isinstance(item, Mapping) else []
            if members:
                groups.setdefault(str(name), (str(item.get("desc") or ""), members))
    for dump in dumps.values():  # PyTorch does not know the members of every group
        for entry in dump["entries"]:
            name, description = _group_of(entry) if isinstance(entry, Mapping) else ("", "")
            if name and name not in groups:
                groups[name] = (description, sorted(dumps))
    return [(name, description, members) for name, (description, members) in groups.items()]


def _members(ranks: Any) -> list[int]:
    """Parse a list of ranks, or its JSON text; empty if it is neither."""
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks)
        except (ValueError, RecursionError):
            return []
    is_fine = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    return list(ranks) if is_fine else []


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    group = entry.get("process_group")
    return (str(group[0]), str(group[1])) if isinstance(group, list | tuple) and len(group) > 1 else ("", "")


def _sizes(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry.get("input_sizes"))


def _needs_all(operation: str) -> bool:
    """Return whether it ends on no rank before all ranks have entered it, unlike a broadcast or a reduction to one."""
    name = operation.lower()
    return any(word in name for word in ("all_", "allreduce", "allgather", "alltoall", "reduce_scatter", "barrier"))


def _is_even(operation: str) -> bool:
    return any(
        word in operation.lower() for word in ("all_reduce", "allreduce", "broadcast", "reduce_scatter", "_base")
    )


def _words(shape: tuple[str, str]) -> str:
    return f"{shape[0]} of {shape[1]}"
