"""What NCCL and PyTorch themselves know of collectives: NCCL's RAS, asked twice, and the flight recorders' files.

RAS (NCCL 2.24 and newer) listens on localhost:28028 of every node with a NCCL process ($NCCL_RAS_ADDR); its client
sends lines and, since 2.28.7, is answered in JSON. A flight recorder dump is a pickle, which could run any code when
it is loaded: it is read by an unpickler that knows no class at all, only numbers, texts, lists and dictionaries. Its
usual place may be a folder that everybody may write to: only plain files of the run's owner are opened, and what is not
as it should be is left out and noted. A rank that left no recording is held against it only where one would have been
seen: all that were found are read, and others of its node left theirs.
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
# Where PyTorch writes when nothing is said: below the user's cache (seen in 2.11 and 2.13), or here (before).
CACHED_DUMP_PREFIX, OLD_DUMP_PREFIX = "torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"
MAX_DUMPS, MAX_DUMP_BYTES = 16_384, 256 << 20
DUMP_SECONDS = 30.0  # for all of them together


class RefusedPickle(pickle.UnpicklingError):
    """A file that asks for more than plain data."""


class RasFormatError(ValueError):
    """RAS answers, and not in JSON: its NCCL is older."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise RefusedPickle(f"it wants {module}.{name}; only plain data is read")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedPickle("it refers to something outside of itself")


def read_collectives(
    run: RunDirectory,
    launch: Mapping[str, Any],
    asks_ras: bool,
    since: float,
    is_local: bool = True,
    ranks_per_node: int = 1,
) -> tuple[Collectives, str]:
    """What is there, and a note where something was there and could not be read. Away from the nodes (`is_local` is
    False) only the run directory can hold recordings of this run."""
    communicators: tuple[Communicator, ...] = ()
    note, asked = "", False
    if asks_ras:
        try:
            if (first := ask_ras()) is not None:
                asked = True
                time.sleep(RAS_PAUSE_SECONDS)
                communicators = communicators_of(first, ask_ras() or first, RAS_PAUSE_SECONDS)
        except RasFormatError:
            note = f"NCCL's RAS on this node answers in words only (JSON since {RAS_JSON}); `ncclras` prints them"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            note = f"NCCL's RAS answered something else than a status: {error!r}"
    owners = {os.getuid(), run.path.stat().st_uid}
    dumps, failed = read_dumps(_dump_prefixes(run, launch, is_local), since, owners)
    if failed:
        note = f"{len(failed)} flight recorder files could not be read: {failed[0]}" + (f"; {note}" if note else "")
    readable = set(dumps) if failed else _of_their_nodes(dumps, max(1, ranks_per_node))
    return Collectives(communicators, stuck_collectives(dumps, readable), asked, len(dumps)), note


# -- RAS -----------------------------------------------------------------------------------------------------------


def ask_ras(address: str | None = None) -> dict[str, Any] | None:
    """What RAS says of the job now; None where none listens, or it gives no answer. RasFormatError where it speaks no
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
                raise RasFormatError("it knows no SET FORMAT")
            connection.sendall(b"VERBOSE STATUS\n")
            received = _received(connection, deadline)
    except OSError:
        return None
    if not received.strip():
        return None
    if not received.lstrip().startswith((b"{", b"[")):
        raise RasFormatError("it took SET FORMAT and answered in words")
    try:
        document = json.loads(received)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _received(connection: socket.socket, deadline: float, end: bytes | None = None) -> bytes:
    """What comes until `end`, or until the other side has no more; TimeoutError when it takes its time, byte by byte
    or not at all."""
    received = bytearray()
    while not (end and received.endswith(end)) and len(received) < MAX_ANSWER_BYTES:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(1 if end else 1 << 16)
        if not part:
            break
        if time.monotonic() > deadline:
            raise TimeoutError("no whole answer in time")
        received += part
    return bytes(received)


def communicators_of(first: Mapping[str, Any], second: Mapping[str, Any], seconds: float) -> tuple[Communicator, ...]:
    """Communicators of more than one rank, the largest first."""
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
    """rank → operations of all kinds together."""
    return {
        int(rank["rank"]): sum(int(count) for count in (rank.get("collective_counts") or {}).values())
        for rank in communicator.get("ranks") or ()
    }


# -- flight recorder -----------------------------------------------------------------------------------------------


def _dump_prefixes(run: RunDirectory, launch: Mapping[str, Any], is_local: bool) -> list[Path]:
    """Where ranks of this run may have left their recordings: a path to which each adds its rank. What was said first,
    then what the agents say where nothing was, then what PyTorch does by itself."""
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
    """rank → its recording, and what could not be read; older files are of another run. A run has one place for its
    recordings: the first that holds any."""
    dumps: dict[int, dict[str, Any]] = {}
    failed: list[str] = []
    deadline = time.monotonic() + DUMP_SECONDS
    for prefix in prefixes:
        for place, (rank, path) in enumerate(_numbered(prefix)):
            if place == MAX_DUMPS or time.monotonic() > deadline:
                failed.append(f"{path.name} and those after it: too many to read")
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
    """(rank, file) of a place, by rank; none where it cannot be listed."""
    try:
        names = os.listdir(prefix.parent)
    except OSError:
        return []
    numbers = {name: name.removeprefix(prefix.name) for name in names if name.startswith(prefix.name)}
    return sorted((int(item), prefix.parent / name) for name, item in numbers.items() if re.fullmatch("[0-9]+", item))


def _of_their_nodes(ranks: Iterable[int], ranks_per_node: int) -> set[int]:
    """These ranks and all others of their nodes."""
    nodes = {rank // ranks_per_node for rank in ranks}
    return {node * ranks_per_node + place for node in nodes for place in range(ranks_per_node)}


def read_dump(path: Path, since: float = 0.0, owners: Set[int] | None = None) -> dict[str, Any] | None:
    """One recording; None for one that is older. OSError or ValueError for a file that is not somebody's of `owners`
    (else this user's), is no plain file, is too large, or asks for anything but plain data."""
    # A link could lead to anybody's file, and a pipe would be waited for.
    with open_regular(path) as file:
        about = os.fstat(file.fileno())
        if about.st_uid not in (owners or {os.getuid()}):
            raise ValueError(f"it belongs to user {about.st_uid}, who does not own the run")
        if about.st_mtime < since:
            return None
        if about.st_size > MAX_DUMP_BYTES:
            raise ValueError(f"larger than {MAX_DUMP_BYTES >> 20} MiB")
        content = file.read(MAX_DUMP_BYTES)
    try:
        document = _PlainUnpickler(io.BytesIO(content)).load()
    except RefusedPickle:
        raise
    except Exception as error:  # a file that is no pickle makes the unpickler raise nearly anything
        raise ValueError(f"not a recording: {error!r}") from error
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise ValueError("not a recording: it has no entries")
    entries, groups = [entry for entry in document["entries"] if _is_entry(entry)], document.get("pg_config")
    if document["entries"] and not entries:
        raise ValueError("not a recording: none of its entries can be read")
    return {"entries": entries, "pg_config": groups if isinstance(groups, dict) else {}}


def _is_entry(entry: Any) -> bool:
    """Whether everything that is looked at has the kind it should have."""
    if not isinstance(entry, dict) or not isinstance(entry.get("collective_seq_id"), int):
        return False
    sizes, frames = entry.get("input_sizes") or [], entry.get("frames") or []
    return (
        all(isinstance(element, list | tuple) for element in (sizes, frames))
        and all(isinstance(size, list | tuple) and all(isinstance(item, int) for item in size) for size in sizes)
        and all(isinstance(frame, dict) for frame in frames)
    )


def stuck_collectives(dumps: Mapping[int, Mapping[str, Any]], readable: Set[int]) -> tuple[StuckCollective, ...]:
    """Of every process group, the first collective that somebody has entered and that did not end everywhere.
    `readable` are the ranks of which a recording would have been found."""
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
        # A ring buffer forgets: what the shortest memory no longer has cannot be compared.
        first = max((min(element) for element in entries.values() if element), default=0)
        numbers = sorted({number for item in entries.values() for number in item if number >= first})
        if not numbers:
            continue
        # Collectives of a group come in order: one that everybody has entered is over when there is a later one.
        candidates = (_stuck(group, description, members, entries, number, readable) for number in numbers)
        apart = next(
            (
                candidate
                for candidate in candidates
                if candidate is not None and (candidate.missing or candidate.mismatch)
            ),
            None,
        )
        stuck = apart or _stuck(group, description, members, entries, numbers[-1], readable)
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
    if not inside:
        return None
    missing = tuple(rank for rank in entries if rank not in inside)
    shapes = {rank: (str(entry.get("profiling_name")), _sizes(entry)) for rank, entry in inside.items()}
    usual, _ = Counter(shapes.values()).most_common(1)[0]
    # Sizes of a gather to uneven parts may differ; names of one collective may not.
    odd = tuple(
        rank for rank, shape in shapes.items() if shape[0] != usual[0] or (shape != usual and _is_even(usual[0]))
    )
    # On gloo an entry that is over keeps its state and is only retired.
    pending = [rank for rank, item in inside.items() if item.get("state") != "completed" and not item.get("retired")]
    if not missing and not odd and not pending:
        return None
    sample = inside[next(iter(pending), next(iter(inside)))]
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
        stack=tuple(
            f"{frame.get('name')} ({frame.get('filename')}:{frame.get('line')})"
            for frame in (sample.get("frames") or ())[:6]
        ),
    )


def _groups(dumps: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, str, list[int]]]:
    """(name, description, members) of every process group that a recording knows."""
    groups: dict[str, tuple[str, list[int]]] = {}
    for dump in dumps.values():
        for name, item in (dump.get("pg_config") or {}).items():
            members = _members(item.get("ranks")) if isinstance(item, Mapping) else []
            if members:
                groups.setdefault(str(name), (str(item.get("desc") or ""), members))
        for entry in dump["entries"]:
            name, description = _group_of(entry) if isinstance(entry, Mapping) else ("", "")
            if name and name not in groups:
                groups[name] = (description, sorted(dumps))
    return [(name, description, members) for name, (description, members) in groups.items()]


def _members(ranks: Any) -> list[int]:
    """A list of ranks, or its text; none where it is neither."""
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


def _is_even(operation: str) -> bool:
    return any(
        word in operation.lower() for word in ("all_reduce", "allreduce", "broadcast", "reduce_scatter", "_base")
    )


def _words(shape: tuple[str, str]) -> str:
    return f"{shape[0]} of {shape[1]}"
