"""The code of a run: the working directory of a command, copied into the run before anything starts.

RUN/code holds the files, RUN/code.json says which they are: the sha256 of each, and one of them all, which is the same
wherever the same files are. Equal files of all runs under a root are one file on the disk, linked from a store beside
the runs; where that cannot be, a run has a copy of its own. Guarantees: a snapshot is whole or there is none; what
.gitignore and .cratonignore leave out is left out, and so are runs and what looks like a secret, whatever they say; who
may not read a file, or look into its folder in the workdir, may not read its copy; a resume runs the same files or says
which have changed.
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

STORE = ".code"  # beside the runs: SHA256[:2]/SHA256, with an x behind it for a program, and -400 where few may read it
IGNORE_FILES = (".gitignore", ".cratonignore")  # the last one that says something of a path decides
NEVER = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", ".ipynb_checkpoints", ".DS_Store", STORE),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
)
SECRETS = (
    *(".env", ".env.*", "*.env", ".netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.keystore", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("credentials.json", "kubeconfig", ".aws", ".ssh", ".gnupg", ".kube", ".docker"),
)
NO_SECRETS = ("*.example", "*.sample", "*.template", "*.pub")  # .env.example shows what is needed
MAX_FILES = 50_000
SHOWN = 5  # files that an error names
TRIES = 3  # to copy a file that changes meanwhile
CHUNK_BYTES = 1 << 20
STORED_NS = 946_684_800 * 10**9  # date of every stored file, 2000-01-01: with another one it was written to since
SWEEP_SECONDS = 86400.0  # between two looks for stored files that no run has any more
KEEP_SECONDS = 3600.0  # how long such a file stays: a run that is just being made may be about to link it


@dataclass(frozen=True)
class FoundFile:
    """What a snapshot of a folder would hold."""

    folder: Path
    files: dict[str, int]  # path in the folder → bytes
    links: dict[str, str]  # path in the folder → where it leads
    withheld: list[str] = field(default_factory=list)  # what looks like a secret

    @property
    def size(self) -> int:
        return sum(self.files.values())


def code_folder(run: Path) -> Path:
    return run / "code"


def manifest_path(run: Path) -> Path:
    return run / "code.json"


def find_code(job: Job, root: Path) -> FoundFile | None:
    """What the working directory of a command holds, or why it cannot be copied; None for other jobs. Reads no file
    but those that say what to ignore. `root` is where runs are, which are nobody's code."""
    if job.kind != "command":
        return None
    workdir = job.workdir or Workdir()
    folder = Path(workdir.path) if workdir.path else job.folder.resolve()
    where = job.where("workdir")
    if not folder.is_dir():
        raise StartError(f"{where}workdir: {folder} is not a folder; give the one that the command runs in")
    found_file = FoundFile(folder, {}, {})
    for path, entry in _walk(folder, {root.resolve(), runs_root().resolve()}, found_file.withheld):
        if entry.is_symlink():
            found_file.links[path] = _target(folder, path)
        elif entry.is_file():
            found_file.files[path] = entry.stat().st_size
        if len(found_file.files) > MAX_FILES:
            raise StartError(
                f"{where}workdir: {folder} holds more than {MAX_FILES:,} files; name those that the command does not "
                "need in a .cratonignore there (written as a .gitignore), or give another workdir"
            )
    if found_file.size > workdir.limit:
        largest = sorted(found_file.files.items(), key=lambda item: -item[1])[:SHOWN]
        shown = ", ".join(f"{path} ({stored(size)})" for path, size in largest)
        raise StartError(
            f"{where}workdir: {folder} holds {stored(found_file.size)}, and at most {stored(workdir.limit)} "
            f"are copied into a run; the largest are {shown}; name what the command does not need in a .cratonignore "
            "there (written as a .gitignore), give another workdir, or `workdir: {limit: 1GB}`"
        )
    return found_file


def keep_code(code: FoundFile, run: RunDirectory) -> str:
    """Copies what was found into the run, and returns the hash of it all."""
    store, folder = run.path.parent / STORE, str(code.folder)
    fresh = run.path / f".code.{secrets.token_hex(4)}"
    fresh.mkdir()
    group = fresh.stat().st_gid  # of all copies: a folder that sets its own has given it that
    sums: dict[str, str] = {}
    unreadable: list[str] = []
    readers: dict[str, int] = {}  # folder in the folder → who may look into it
    unshared = 0
    for path in sorted(code.files):
        try:  # nothing but the source: what goes wrong in the run or in the store is no fault of this file
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
            f"{code.folder} cannot be read; make them readable, or name them in a .cratonignore there"
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
    """Refuse to go on with other files than the run began with; a run without a snapshot has none to check."""
    if not manifest_path(run.path).exists():
        return
    document = json.loads(read_regular(manifest_path(run.path)))
    folder = code_folder(run.path)
    changed = [path for path, checksum in document["files"].items() if _sum_of(folder / path, run.path) != checksum]
    changed += [path for path, leads_to in document["links"].items() if _link_of(folder / path) != leads_to]
    if changed:
        raise StartError(
            f"{run.name} goes on with the code it began with, and {', '.join(sorted(changed)[:SHOWN])} in {folder} is "
            f"no longer that; put it back, or start another run with `craton run JOB --name {run.name}-2`"
        )


def code_summary(run: RunDirectory) -> str:
    """`12 files of FOLDER, sha256 3f2a9c…; left out as secret: .env`; nothing where a run has no snapshot."""
    try:
        document: dict[str, Any] = json.loads(read_regular(manifest_path(run.path)))
    except (OSError, ValueError):
        return ""
    notes = f"; left out as secret: {', '.join(document['withheld'])}" if document["withheld"] else ""
    if document.get("unshared"):
        notes += f"; {document['unshared']} not shared with other runs, for want of rights to {STORE} or of links"
    count = len(document["files"])
    files = f"{count} file{'s' if count != 1 else ''}"
    return f"{files} of {document['folder']}, sha256 {document['sha256'][:12]}{notes}"


# -- what belongs to it ---------------------------------------------------------------------------------------------


def _walk(folder: Path, roots: set[Path], withheld: list[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(path in the folder, entry) of everything that is not ignored; secrets are noted instead. `roots` hold runs."""
    pending = [("", _rules_above(folder))]
    while pending:
        inside, rules = pending.pop()
        here = folder / inside
        rules = [*rules, *_rules_of(here)]
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except PermissionError:
            raise StartError(
                f"workdir: the folder {here} cannot be read; make it readable, or name it in a .cratonignore of "
                f"{folder}"
            ) from None
        for entry in entries:
            path = f"{inside}/{entry.name}" if inside else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if _NEVER.match(entry.name) or _is_ignored(here, entry.name, is_folder, rules):
                continue
            if is_folder and (Path(entry.path) in roots or os.path.exists(f"{entry.path}/pyvenv.cfg")):
                continue
            if entry.is_dir() and _is_run(entry.path):  # or a link to one, as other roots have it
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
    """Those of the folders between the repository's and this one: a .gitignore holds for all below it."""
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
    """What the last rule says that says anything."""
    for folder, spec in reversed(rules):
        path = f"{here}/{name}{'/' if is_folder else ''}"[len(str(folder)) :].lstrip("/")
        result = spec.check_file(path).include
        if result is not None:
            return result
    return False


def _target(folder: Path, path: str) -> str:
    """Where a link leads from the copy: inside the folder as it is, otherwise to the very place."""
    link = folder / path
    leads_to = os.readlink(link)
    place = Path(os.path.normpath(link.parent / leads_to))
    if os.path.isabs(leads_to) and place.is_relative_to(folder):
        return os.path.relpath(place, link.parent)
    return leads_to if place.is_relative_to(folder) else str(place)


# -- files ----------------------------------------------------------------------------------------------------------


def _keep(reading: BinaryIO, target: str, store: str, readers: int, group: int) -> tuple[str, bool]:
    """(sha256, whether it is one file with the equal ones of other runs): what is stored is linked, and not copied."""
    digest, status, data = _read(reading)
    place, mode = _place(store, digest, status, readers, group)
    if _is_stored(place, digest, status.st_size, mode):
        with contextlib.suppress(OSError):  # swept meanwhile, another user's, or linked as often as can be
            os.link(place, target)
            return digest, True
    with open(target, "wb") as writing:
        if data is not None:
            writing.write(data)
        else:  # it may be another one by now
            digest, status, _ = _read(reading, writing)
            place, mode = _place(store, digest, status, readers, group)
        writing.flush()
        os.fchmod(writing.fileno(), mode)
        os.utime(writing.fileno(), ns=(STORED_NS, STORED_NS))
    return digest, _share(target, place, store)


def _read(reading: BinaryIO, writing: BinaryIO | None = None) -> tuple[str, os.stat_result, bytes | None]:
    """(sha256, status, contents of a small one) of a file, which is copied where there is something to write to; tried
    again when it changed meanwhile."""
    for _ in range(TRIES):
        digest = hashlib.sha256()
        before = os.fstat(reading.fileno())
        reading.seek(0)
        if writing:
            writing.seek(0)
            writing.truncate()
        left, data = before.st_size, b""  # no further: a log may grow faster than it is read
        while left and (data := reading.read(min(left, CHUNK_BYTES))):
            digest.update(data)
            left -= len(data)
            if writing:
                writing.write(data)
        after = os.fstat(reading.fileno())
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return digest.hexdigest(), after, data if len(data) == after.st_size else None
    raise StartError(
        f"workdir: {reading.name} changes while it is copied; name it in a .cratonignore, or stop what writes it"
    )


def _readers(folder: Path, inside: str) -> int:
    """Whom of its group and the others a folder and those above it, up to the workdir, let in, as bits of a mode."""
    bits = 0o777
    for item in (folder, *(folder / part for part in Path(inside).parents), folder / inside):
        mode = item.stat().st_mode
        bits &= 0o700 | (0o070 if mode & 0o010 else 0) | (0o007 if mode & 0o001 else 0)
    return bits


def _place(store: str, digest: str, status: os.stat_result, readers: int, group: int) -> tuple[str, int]:
    """(where it is stored, its mode): nobody writes to it, and nobody reads it who could not read the file."""
    mode = status.st_mode & 0o555 & readers | 0o400
    if status.st_gid != group:  # the copy is for another one
        mode &= 0o707 | (mode & 0o007) << 3
    ends = {0o444: "", 0o555: "x"}
    return f"{store}/{digest[:2]}/{digest}{ends.get(mode, f'-{mode:o}')}", mode


def _is_stored(place: str, digest: str, size: int, mode: int) -> bool:
    """Whether this is the very file. Its date tells that of our own; what else is there has to be read."""
    try:
        status = os.stat(place)
    except OSError:
        return False
    ours = (size, STORED_NS, mode, os.geteuid())
    if (status.st_size, status.st_mtime_ns, status.st_mode & 0o777, status.st_uid) == ours:
        return True
    return _sum_of(place) == digest and status.st_mode & 0o777 == mode


def _share(copy: str, place: str, store: str) -> bool:
    """Puts a copy into the store, in the place of what is there. Where it returns False the copy stays the run's own:
    the store may be another user's, or the file system without links."""
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
            if not isinstance(error, FileNotFoundError):  # which means that another run has swept the store meanwhile
                return False
    return False


def _sum_of(path: str | Path, below: Path | None = None) -> str:
    """The sha256 of a file; nothing where there is none."""
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
    """One hash of all names and contents."""
    lines = [f"{checksum} {path}\n" for path, checksum in sums.items()] + [
        f"-> {to} {path}\n" for path, to in links.items()
    ]
    return hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()


def _sweep(store: Path) -> None:
    """Removes, once a day, stored files that no run holds any more."""
    note, now = store / "swept", time.time()
    with contextlib.suppress(OSError):
        if note.exists() and now - note.stat().st_mtime < SWEEP_SECONDS:
            return
        note.touch()
        for path in store.glob("??/*"):
            status = path.stat()
            if status.st_nlink == 1 and now - status.st_ctime > KEEP_SECONDS:
                path.unlink()
