"""Rules for reports at first hand: what a rank or server said about its own end.

The layer follows from the kind of the error (`errors.toml`): a full disk is storage, memory is the host; user code,
data and configuration are the framework. A report outranks what is inferred from symptoms. An error that all ranks have
in common names no rank.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import PurePath

from craton.observability.diagnosis.first_hand import first_error, repeated_error
from craton.observability.diagnosis.member_facts import BROKEN
from craton.observability.diagnosis.rules.findings import CRASHES, finding, named
from craton.observability.diagnosis.snapshot import RankError, Snapshot
from craton.observability.diagnosis.symptoms import reported_losses
from craton.observability.diagnosis.tables import FIRST_HAND, ErrorKind, error_kinds, threshold
from craton.observability.diagnosis.verdict import RESTARTS, Finding, Symptoms

IN_LIBRARY = 0.8  # confidence in an error of a type that is not in the table, raised outside of user code
LAST_OUTPUT = 0.85  # the same for the last output of a program that exits by itself
LIMITS = (signal.SIGXCPU, signal.SIGXFSZ)
OTHER_PROGRAMS = ("command", "serve")
DATA_KEYS = "keys data.path and data.source of the job"
USER_PARTS = "the data source, model or objective"
WRITTEN = ("run", "checkpoints")
KEYS = {"data": "data.path", "checkpoints": "checkpoint.tiers", "run": "the run directory"}
_CRASH_WORDS = re.compile(
    r"Segmentation fault|Bus error|^Aborted|Illegal instruction|Floating point exception|Bad system call"
)
_PACKAGE = re.compile(r"No module named '?([\w.]+)|pip install ([\w.\[\]-]+)|libraries?: ([\w.+-]+\.so[\w.]*)")
_CONNECT = re.compile(
    r"connectFullMesh|[Cc]onnect(?:ing|ion)? (?:refused|timed out|failed)|timed out connecting|[Ff]ailed to connect"
)
_OPEN = re.compile(r"[Rr]ead error|[Ww]rite error|\bwritev?\b|\brecv|\bsend\b")  # the connection was there before
_REMOTE = re.compile(r"remote=\[([\w.:]+)\]|connect(?:ing)? to \[?([\w.]+)\]?:\d+")
_HOST = re.compile(r"host='([\w.-]+)'|https?://([\w.:-]+)|to host ([\w.-]+)|\('?([\w.-]+)'?, (\d+)\)")


def examine_errors(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    times = 1
    error: RankError | None = None
    if any(symptom.sign not in ("hung", "stopped", "not_a_number") for symptom in symptoms.of("dead")):
        error = first_error(snapshot)
        repeated = repeated_error(snapshot)
        if repeated is not None and repeated[0] is error:
            times = repeated[1]
    elif symptoms.signed(RESTARTS) and (found := repeated_error(snapshot)) is not None:
        error, times = found
    if error is None or error.is_echo:
        return _broken_connections(snapshot, symptoms)
    if any(f"member {member.short_name} " in error.message for member in snapshot.members if member.state in BROKEN):
        return []  # it reports the end of a member, which has its own rule
    explained = _explained(error, snapshot)
    if explained is None:
        return []
    cause, confidence, detail = explained
    node, rank = _victim(error, snapshot)
    sentence = f"{_who(error, snapshot)} {_what(error)}"
    return finding(
        symptoms,
        cause,
        sentence if times == 1 else f"{sentence}, in each of the last {times} generations",
        ("dead",),
        evidence=_evidence(error, snapshot, sentence),
        node=node,
        rank=rank,
        moment=error.moment,
        first_hand=confidence,
        detail=detail,
    )


def _broken_connections(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Blame the network if ranks lost their connections, or could not open them, and no process or node failed."""
    newest = [error for error in snapshot.errors if error.generation == snapshot.run.generation]
    echoes = [error for error in newest if error.is_echo]
    is_death = symptoms.condition == "dead" and not symptoms.first.sign
    if not echoes or len(echoes) < len(newest) or not is_death or _has_failed_otherwise(snapshot, echoes):
        return []
    if any((node.heartbeat_age_seconds or 0.0) > threshold("heartbeat_lost_seconds") for node in snapshot.nodes):
        return []
    connects = [error for error in echoes if _CONNECT.search(error.message) and not _OPEN.search(error.message)]
    if connects:
        node, rank = _unreachable_end(connects, snapshot)
        text = f"{_who(connects[0], snapshot)} could not connect to another rank, and no process or node failed"
        evidence = [text, connects[0].message[:300]]
        return finding(
            symptoms,
            "connect_failed",
            text,
            ("dead",),
            evidence=evidence,
            node=node,
            rank=rank,
            first_hand=IN_LIBRARY,
            detail=next(iter(_remote_addresses(connects[0])), "the others"),
        )
    text = "ranks lost their connections to each other, and no process or node failed"
    evidence = [text, echoes[0].message[:200]]
    return finding(symptoms, "connections_lost", text, ("dead",), evidence=evidence, base=0.95)


def _has_failed_otherwise(snapshot: Snapshot, echoes: Sequence[RankError]) -> bool:
    """Return whether a rank ended in another way than by losing a connection, or a node was lost."""
    if reported_losses(snapshot):
        return True
    if sum(error.num_ranks for error in echoes) >= snapshot.run.world:
        return False
    lost = {rank for error in echoes for rank in error.ranks}
    ended = [rank for rank in snapshot.ranks if rank.exit_code not in (0, None) and not rank.was_ended]
    return any(rank.rank not in lost for rank in ended)


def _remote_addresses(error: RankError) -> list[str]:
    return [address for groups in _REMOTE.findall(error.message) for address in groups if address]


def _unreachable_end(connects: Sequence[RankError], snapshot: Snapshot) -> tuple[str, int | None]:
    """Return the node that all failed connections have in common, with its rank if it has one; else neither."""
    if len(connects) == 1:
        return "", None
    names = {node.address: node.name for node in snapshot.nodes if node.address}
    ends = []
    for error in connects:
        remote = {names[address] for address in _remote_addresses(error) if address in names}
        ends.append({error.node, *remote})
    common = set.intersection(*ends) & set(snapshot.run.nodes)
    if len(common) != 1 or len(snapshot.run.nodes) < 3:
        return "", None
    (node,) = common
    ranks = [rank.rank for rank in snapshot.ranks if rank.node == node]
    return node, ranks[0] if len(ranks) == 1 else None


def _explained(error: RankError, snapshot: Snapshot) -> tuple[str, float, str] | None:
    """Return cause, confidence and the object of the remedy; None for an end that says nothing, such as SIGKILL."""
    place = error.user_frame.partition(" in ")[0]
    number = -error.code if error.code is not None and error.code < 0 else (error.code or 0) - 128
    if error.is_early:
        return "exited_early", FIRST_HAND, "" if snapshot.run.kind in OTHER_PROGRAMS else USER_PARTS
    if error.out_of_memory:
        return "out_of_memory", FIRST_HAND, error.out_of_memory
    if error.type == "SystemExit":
        return "exited_early", FIRST_HAND, place or "the program"
    if number == signal.SIGBUS and (full := _full_shared_memory(error.node, snapshot)):
        return "shared_memory_full", FIRST_HAND, full
    if number == signal.SIGBUS:
        return "bus_error", 0.88, place or "the files that the program maps"
    if kind := _kind_of(error):
        return _with_detail(kind, error, snapshot)
    if number in LIMITS:
        return "process_limit", FIRST_HAND, ""
    if number in CRASHES or error.type == "Fatal Python error" or _CRASH_WORDS.search(error.message):
        return "program_crashed", FIRST_HAND if place else 0.9, place
    by_path = _by_path(error, snapshot)
    if by_path is not None:
        return by_path
    if error.type.startswith("craton.") or error.type.rpartition(".")[2] in ("KeyboardInterrupt",):
        is_outside = error.type.endswith("KeyboardInterrupt")
        return ("rank_killed", 0.85, "") if is_outside else ("wrong_configuration", FIRST_HAND, "")
    if error.type and place:
        return "user_code_failed", FIRST_HAND, place
    if error.type:
        return "rank_failed", IN_LIBRARY, ""
    if error.message and (error.code or 0) > 0 and number not in (signal.SIGKILL, signal.SIGTERM):
        return "rank_failed", LAST_OUTPUT, ""
    return None


def _kind_of(error: RankError) -> ErrorKind | None:
    """Return the first row of the table that matches the root of the chain, else the message that it became."""
    name = error.type.rpartition(".")[2]
    for kind in error_kinds():
        is_type = kind.type is None or kind.type.fullmatch(name)
        is_number = not kind.errno or error.errno in kind.errno
        is_place = kind.frame is None or kind.frame.search(error.last_frame)
        if is_type and is_number and is_place and (kind.message is None or kind.message.search(error.message)):
            return kind
    outer = error.outer.partition(": ")[2]
    by_text = (kind for kind in error_kinds() if kind.message is not None and kind.type is None and not kind.errno)
    return next((kind for kind in by_text if kind.message and outer and kind.message.search(outer)), None)


def _with_detail(kind: ErrorKind, error: RankError, snapshot: Snapshot) -> tuple[str, float, str] | None:
    text = f"{error.message}\n{error.outer}"
    place = error.user_frame.partition(" in ")[0]
    if kind.cause == "missing_package":
        match = _PACKAGE.search(text)
        package = next((word for word in match.groups() if word), "") if match else ""
        return kind.cause, kind.confidence, f"`{package}`" if package else "the missing package"
    if kind.cause in ("service_unreachable", "store_refuses"):
        match = _HOST.search(text)
        host = next((word for word in match.groups() if word), "") if match else ""
        return kind.cause, kind.confidence, host or "the address in the message"
    if kind.cause in ("storage_error", "storage_full", "storage_read_only", "storage_stalled", "file_damaged"):
        return kind.cause, kind.confidence, error.path or "the files that the message names"
    own = DATA_KEYS if kind.cause == "bad_data" and snapshot.run.kind not in OTHER_PROGRAMS else ""
    return kind.cause, kind.confidence, place or (f"the file {error.path}" if error.path else own)


def _by_path(error: RankError, snapshot: Snapshot) -> tuple[str, float, str] | None:
    """Explain a file that is missing or not accessible: of the run itself by storage, else by the job or its data."""
    is_missing = error.type.endswith(("FileNotFoundError", "NotADirectoryError")) or error.errno in (2, 20)
    is_refused = error.type.endswith("PermissionError") or error.errno in (1, 13)
    is_missing |= bool(re.search(r"No such file or directory", error.message))
    is_refused |= bool(re.search(r"Permission denied|Operation not permitted", error.message))
    if not is_missing and not is_refused:
        return None
    place = error.user_frame.partition(" in ")[0]
    holder = next((name for name, folders in snapshot.run.paths.items() if _is_below(error.path, folders)), "")
    name = error.path or "the file that the message names"
    key = f" ({KEYS[holder]})" if holder in KEYS else f", which {place} opens" if place else ""
    if is_refused:
        return "permission_denied", FIRST_HAND, f"{name}{key}"
    if holder in WRITTEN:
        return "storage_error", 0.85, name
    return "missing_file", FIRST_HAND, f"{name}{key}"


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return bool(path) and any(PurePath(path).is_relative_to(folder) for folder in folders)


def _full_shared_memory(node_name: str, snapshot: Snapshot) -> str:
    node = snapshot.node(node_name)
    share = node.host.shared_memory_full_share if node is not None and node.host is not None else None
    return "/dev/shm" if share is not None and share >= threshold("full_share") else ""


def _victim(error: RankError, snapshot: Snapshot) -> tuple[str, int | None]:
    """Return node and rank; neither if ranks of several nodes, or all of them, reported the same."""
    if error.num_ranks == 1:
        return error.node, error.rank
    nodes = {rank.node for number in error.ranks if (rank := snapshot.rank(number)) is not None}
    is_one_node = len(nodes) == 1 and len(snapshot.run.nodes) > 1 and error.num_ranks <= len(error.ranks)
    return (error.node if is_one_node else ""), None


def _who(error: RankError, snapshot: Snapshot) -> str:
    if error.num_ranks == 1:
        where = f" on {error.node}" if error.node else ""
        return f"{'the server' if snapshot.run.kind == 'serve' else f'rank {error.rank}'}{where}"
    if error.num_ranks >= max(2, snapshot.run.world):
        return f"all {error.num_ranks} ranks"
    return f"{error.num_ranks} ranks ({named(error.ranks)})"


def _what(error: RankError) -> str:
    """Return what happened, in one line: the exception with its frame, or the signal or exit code with the words."""
    step = f" at step {error.step}" if error.step else ""
    phase = error.phase.partition("+")[0]
    during = f"{step} in phase {phase}" if phase and phase != "idle" else step
    frame = error.user_frame or ("" if error.type.startswith("craton.") else error.last_frame)
    name, first = error.type.rpartition(".")[2], error.message.partition("\n")[0]
    place = f" ({frame})" if frame and frame not in first else ""
    if error.is_early:
        return f"exited with code 0{during} before the run was done"
    if error.code is not None and error.code < 0 and not error.type.endswith(("Error", "Exception")):
        return f"was ended by {_signal(-error.code)}{during}{place}" + (f": {first}" if first else "")
    if name == "Fatal Python error":
        return f"crashed{during}: {first}{place}"
    if error.type:
        return f"raised {name}{f': {first}' if first else ''}{place}" + (f",{during}" if during else "")
    code = f" with code {error.code}" if error.code is not None else ""
    return f"exited{code}{during}: {first}" if first else f"exited{code}{during}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _evidence(error: RankError, snapshot: Snapshot, sentence: str) -> list[str]:
    lines = [sentence]
    if error.outer and error.message.partition("\n")[0] not in error.outer:
        lines.append(f"it became {error.outer}")
    if error.out_of_memory:
        lines.append(f"the kernel's OOM killer acted at that moment: {error.out_of_memory}")
    if error.errno is not None and error.path:
        lines.append(f"the file: {error.path} (errno {error.errno})")
    others = [
        other
        for other in snapshot.errors
        if other.generation == error.generation and other.is_echo and other.rank != error.rank
    ]
    if others:
        ranks = [rank for other in others for rank in other.ranks]
        lines.append(f"{named(ranks, 'rank ')} only lost the connection to another rank")
    return lines
