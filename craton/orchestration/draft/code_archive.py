"""Archive the code of a run: copy a command's working directory into the run before anything starts.

RUN/code holds the files, RUN/code.json their sha256 and one hash of them all, which depends only on names and contents.
Runs under one root share equal files as hard links into a store beside the runs; where that fails, a run has its own
copy. Guarantees: an archive is complete or absent; files that .gitignore or .cratonignore exclude are left out, and so
are runs and files that look like secrets; a copy is readable by no one who could not read the original; a resume runs
the same files or names those that changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from craton.formatting import stored
from craton.job import Job
from craton.job.sections import Workdir
from craton.orchestration.errors import StartError
from craton.telemetry import RunDirectory, runs_root
from craton.telemetry.files import open_regular, read_regular

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

STORE = ".code"  # beside the runs: SHA256[:2]/SHA256, with the suffix x for an executable, -400 for a restricted mode
IGNORE_FILES = (".gitignore", ".cratonignore")  # the last rule that matches a path decides
NEVER = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", ".ipynb_checkpoints", ".DS_Store", STORE),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
)
SECRETS = (
    *(".env", ".env.*", "*.env", ".netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.keystore", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("credentials.json", "kubeconfig", ".aws", ".ssh", ".gnupg", ".kube", ".docker"),
)
NO_SECRETS = ("*.example", "*.sample", "*.template", "*.pub")  # .env.example and the like hold no secrets
MAX_FILES = 50_000
SHOWN = 5  # maximum number of files that an error names
TRIES = 3  # to copy a file that changes while it is read
CHUNK_BYTES = 1 << 20
STORED_NS = 946_684_800 * 10**9  # mtime of every stored file, 2000-01-01: another mtime means that it was modified
SWEEP_SECONDS = 86400.0  # between two sweeps of stored files that no run uses
KEEP_SECONDS = 3600.0  # minimum age of a swept file: a run being created may be about to link it


@dataclass(frozen=True)
class FoundFile:
    """The files that an archive of a folder would hold."""

    folder: Path
    files: dict[str, int]  # path in the folder → bytes
    links: dict[str, str]  # path in the folder → link target
    withheld: list[str] = field(default_factory=list)  # files that look like secrets

    @property
    def size(self) -> int:
        return sum(self.files.values())


def code_folder(run: Path) -> Path:
    return run / "code"


def manifest_path(run: Path) -> Path:
    return run / "code.json"


def find_code(job: Job, root: Path) -> FoundFile | None:
    """List the working directory of a command, or raise StartError if it cannot be copied; None for other jobs. Reads
    only the ignore files. `root` is the folder of runs, which are never part of the code."""
    if job.kind != "command":
        return None
    workdir = job.workdir or Workdir()
    folder = Path(workdir.path) if workdir.path else job.folder.resolve()
    where = job.where("workdir")
    if not folder.is_dir():
        raise StartError(f"{where}workdir: {folder} is not a folder; give the folder that the command runs in")
    found_file = FoundFile(folder, {}, {})
    for path, entry in _walk(folder, {root.resolve(), runs_root().resolve()}, found_file.withheld):
        if entry.is_symlink():
            found_file.links[path] = _target(folder, path)
        elif entry.is_file():
            found_file.files[path] = entry.stat().st_size
        if len(found_file.files) > MAX_FILES:
            raise StartError(
                f"{where}workdir: {folder} holds more than {MAX_FILES:,} files; list those that the command does not "
                "need in a .cratonignore there (same syntax as .gitignore), or give another workdir"
            )
    if found_file.size > workdir.limit:
        largest = sorted(found_file.files.items(), key=lambda item: -item[1])[:SHOWN]
        shown = ", ".join(f"{path} ({stored(size)})" for path, size in largest)
        raise StartError(
            f"{where}workdir: {folder} holds {stored(found_file.size)}; the limit per run is {stored(workdir.limit)}. "
            f"The largest files are {shown}; list what the command does not need in a .cratonignore there (same syntax "
            "as .gitignore), give another workdir, or raise the limit with `workdir: {limit: 1GB}`"
        )
    return found_file


def keep_code(code: FoundFile, run: RunDirectory) -> str:
    """Copy the files into the run and return their overall hash."""
    store, folder = run.path.parent / STORE, str(code.folder)
    fresh = run.path / f".code.{secrets.token_hex(4)}"
    fresh.mkdir()
    group = fresh.stat().st_gid  # group of all copies; a setgid folder determines it
    sums: dict[str, str] = {}
    unreadable: list[str] = []
    readers: dict[str, int] = {}  # subfolder → mode bits of those who may enter it
    unshared = 0
    for path in sorted(code.files):
        try:  # only the source file: errors of the run or the store are not about it
            reading = open(f"{folder}/{path}", "rb")  # noqa: SIM115
        except FileNotFoundError:
            continue  # removed since it was found, as a temporary file may be
        except PermissionError:
            unreadable.append(path)
            continue
        inside = os.path.dirname(path)
        with reading:
            if inside not in readers:
                readers[inside] = _readers(code.folder, inside)
                (fresh / inside).mkdir(parents=True, exist_ok=True)
            sums[path], is_shared = _keep(reading, f"{fresh}/{path}", str(store), readers[inside], group)
        unshared += not is_shared
    if unreadable:
        raise StartError(
            f"workdir: {', '.join(unreadable[:SHOWN])}{' and others' if len(unreadable) > SHOWN else ''} in "
            f"{code.folder} cannot be read; make them readable, or list them in a .cratonignore there"
        )
    for path, leads_to in code.links.items():
        (fresh / path).parent.mkdir(parents=True, exist_ok=True)
        (fresh / path).symlink_to(leads_to)
    total = _total(sums, code.links)
    document = {
        "sha256": total,
        "folder": str(code.folder),
        "bytes": code.size,
        "files": sums,
        "links": code.links,
        "withheld": code.withheld,
        "unshared": unshared,
    }
    manifest_path(run.path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, code_folder(run.path))
    _sweep(store)
    return total


def check_code(run: RunDirectory) -> None:
    """Refuse to resume with changed code; a run without an archive has nothing to check."""
    if not manifest_path(run.path).exists():
        return
    document = json.loads(read_regular(manifest_path(run.path)))
    folder = code_folder(run.path)
    changed = [path for path, checksum in document["files"].items() if _sum_of(folder / path, run.path) != checksum]
    changed += [path for path, leads_to in document["links"].items() if _link_of(folder / path) != leads_to]
    if changed:
        raise StartError(
            f"{run.name} resumes with the code it started with, but {', '.join(sorted(changed)[:SHOWN])} in {folder} "
            f"has changed; restore it, or start another run with `craton run JOB --name {run.name}-2`"
        )


def code_summary(run: RunDirectory) -> str:
    """Return `12 files of FOLDER, sha256 3f2a9c…; left out as secret: .env`; empty if the run has no archive."""
    try:
        document: dict[str, Any] = json.loads(read_regular(manifest_path(run.path)))
    except (OSError, ValueError):
        return ""
    notes = f"; left out as secret: {', '.join(document['withheld'])}" if document["withheld"] else ""
    if document.get("unshared"):
        notes += f"; {document['unshared']} not shared with other runs (no permission for {STORE} or no links)"
    count = len(document["files"])
    files = f"{count} file{'s' if count != 1 else ''}"
    return f"{files} of {document['folder']}, sha256 {document['sha256'][:12]}{notes}"


# -- which files belong to it ------------------------------------------------------------------------------------------


def _walk(folder: Path, roots: set[Path], withheld: list[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (path in the folder, entry) unless ignored; list secrets in `withheld`. `roots` hold runs."""
    pending = [("", _rules_above(folder))]
    while pending:
        inside, rules = pending.pop()
        here = folder / inside
        rules = [*rules, *_rules_of(here)]
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except PermissionError:
            raise StartError(
                f"workdir: the folder {here} cannot be read; make it readable, or list it in a .cratonignore in "
                f"{folder}"
            ) from None
        for entry in entries:
            path = f"{inside}/{entry.name}" if inside else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if _NEVER.match(entry.name) or _is_ignored(here, entry.name, is_folder, rules):
                continue
            if is_folder and (Path(entry.path) in roots or os.path.exists(f"{entry.path}/pyvenv.cfg")):
                continue
            if entry.is_dir() and _is_run(entry.path):  # or a link to one, as in other roots
                continue
            if _SECRETS.match(entry.name) and not _NO_SECRETS.match(entry.name):
                withheld.append(path)
            elif is_folder:
                pending.append((path, rules))
            else:
                yield path, entry


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


_NEVER, _SECRETS, _NO_SECRETS = map(_any_of, (NEVER, SECRETS, NO_SECRETS))


def _is_run(folder: str) -> bool:
    return all(os.path.exists(f"{folder}/{name}") for name in ("job.yaml", "launch.json", "events"))


Rules = list[tuple[Path, "GitIgnoreSpec"]]


def _rules_above(folder: Path) -> Rules:
    """Return the rules of the folders from the repository root down: a .gitignore applies to everything below it."""
    above = []
    for parent in folder.parents:
        if (folder / ".git").exists():
            break
        above.append(parent)
        if (parent / ".git").exists():
            return [rule for item in reversed(above) for rule in _rules_of(item)]
    return []


def _rules_of(folder: Path) -> Rules:
    from pathspec import GitIgnoreSpec

    rules: Rules = []
    for name in IGNORE_FILES:
        with contextlib.suppress(OSError):
            lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
            rules.append((folder, GitIgnoreSpec.from_lines(lines)))
    return rules


def _is_ignored(here: Path, name: str, is_folder: bool, rules: Rules) -> bool:
    """Whether the last matching rule ignores the path."""
    for folder, spec in reversed(rules):
        path = f"{here}/{name}{'/' if is_folder else ''}"[len(str(folder)) :].lstrip("/")
        result = spec.check_file(path).include
        if result is not None:
            return result
    return False


def _target(folder: Path, path: str) -> str:
    """Return a link's target in the copy: relative inside the folder, absolute outside of it."""
    link = folder / path
    leads_to = os.readlink(link)
    place = Path(os.path.normpath(link.parent / leads_to))
    if os.path.isabs(leads_to) and place.is_relative_to(folder):
        return os.path.relpath(place, link.parent)
    return leads_to if place.is_relative_to(folder) else str(place)


# -- files ----------------------------------------------------------------------------------------------------------


def _keep(reading: BinaryIO, target: str, store: str, readers: int, group: int) -> tuple[str, bool]:
    """Store one file and return (sha256, whether other runs share it). A file in the store is linked, not copied."""
    digest, status, data = _read(reading)
    place, mode = _place(store, digest, status, readers, group)
    if _is_stored(place, digest, status.st_size, mode):
        with contextlib.suppress(OSError):  # swept meanwhile, another user's, or at the maximum number of links
            os.link(place, target)
            return digest, True
    with open(target, "wb") as writing:
        if data is not None:
            writing.write(data)
        else:  # its content may have changed since
            digest, status, _ = _read(reading, writing)
            place, mode = _place(store, digest, status, readers, group)
        writing.flush()
        os.fchmod(writing.fileno(), mode)
        os.utime(writing.fileno(), ns=(STORED_NS, STORED_NS))
    return digest, _share(target, place, store)


def _read(reading: BinaryIO, writing: BinaryIO | None = None) -> tuple[str, os.stat_result, bytes | None]:
    """Return (sha256, status, contents of a small file), and copy it to `writing` if given; retry when the file
    changed while it was read."""
    for _ in range(TRIES):
        digest = hashlib.sha256()
        before = os.fstat(reading.fileno())
        reading.seek(0)
        if writing:
            writing.seek(0)
            writing.truncate()
        left, data = before.st_size, b""  # stop at this size: a log may grow faster than it is read
        while left and (data := reading.read(min(left, CHUNK_BYTES))):
            digest.update(data)
            left -= len(data)
            if writing:
                writing.write(data)
        after = os.fstat(reading.fileno())
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return digest.hexdigest(), after, data if len(data) == after.st_size else None
    raise StartError(
        f"workdir: {reading.name} changes while it is copied; list it in a .cratonignore, or stop its writer"
    )


def _readers(folder: Path, inside: str) -> int:
    """Return mode bits for owner, group and others who may enter a folder and its parents up to the workdir."""
    bits = 0o777
    for item in (folder, *(folder / part for part in Path(inside).parents), folder / inside):
        mode = item.stat().st_mode
        bits &= 0o700 | (0o070 if mode & 0o010 else 0) | (0o007 if mode & 0o001 else 0)
    return bits


def _place(store: str, digest: str, status: os.stat_result, readers: int, group: int) -> tuple[str, int]:
    """Return (path in the store, mode): read-only, and readable by no one who could not read the original."""
    mode = status.st_mode & 0o555 & readers | 0o400
    if status.st_gid != group:  # the copy belongs to another group
        mode &= 0o707 | (mode & 0o007) << 3
    ends = {0o444: "", 0o555: "x"}
    return f"{store}/{digest[:2]}/{digest}{ends.get(mode, f'-{mode:o}')}", mode


def _is_stored(place: str, digest: str, size: int, mode: int) -> bool:
    """Whether the store holds this file. Our own files are known by their mtime; others must be hashed."""
    try:
        status = os.stat(place)
    except OSError:
        return False
    ours = (size, STORED_NS, mode, os.geteuid())
    if (status.st_size, status.st_mtime_ns, status.st_mode & 0o777, status.st_uid) == ours:
        return True
    return _sum_of(place) == digest and status.st_mode & 0o777 == mode


def _share(copy: str, place: str, store: str) -> bool:
    """Link a copy into the store, replacing the file there. On False the copy stays the run's own: the store may belong
    to another user, or the file system has no hard links."""
    for _ in range(TRIES):
        fresh = f"{store}/.{secrets.token_hex(8)}"
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.link(copy, fresh)
            os.replace(fresh, place)
            return True
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            if not isinstance(error, FileNotFoundError):  # FileNotFoundError: another run swept the store meanwhile
                return False
    return False


def _sum_of(path: str | Path, below: Path | None = None) -> str:
    """Return the sha256 of a file; empty if it cannot be read."""
    try:
        with open_regular(path, below) as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return ""


def _link_of(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _total(sums: dict[str, str], links: dict[str, str]) -> str:
    """Return one hash of all names and contents."""
    lines = [f"{checksum} {path}\n" for path, checksum in sums.items()] + [
        f"-> {to} {path}\n" for path, to in links.items()
    ]
    return hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()


def _sweep(store: Path) -> None:
    """Remove, once a day, stored files that no run uses."""
    note, now = store / "swept", time.time()
    with contextlib.suppress(OSError):
        if note.exists() and now - note.stat().st_mtime < SWEEP_SECONDS:
            return
        note.touch()
        for path in store.glob("??/*"):
            status = path.stat()
            if status.st_nlink == 1 and now - status.st_ctime > KEEP_SECONDS:
                path.unlink()
