"""A run is a directory; this module knows the name of everything in it.

    job.yaml  plan.json  launch.json                 the resolved job, the prediction, how it was started
    events/NODE.jsonl  metrics/NODE.jsonl  ledger/NODE.jsonl   records; one writer per node
    logs/rank-00007.log                              output of a rank
    traces/rank_7                                    dump of PyTorch's flight recorder of a rank that was stuck
    stacks/rank-00007.txt                            where a rank without progress waited, taken by its agent
    heartbeat/NODE                                   touched every second by the node's agent
    status/NODE.json                                 what each rank of the node does now, written by its agent
    generations/000003.json                          members of each generation, and why it began
    chaos/ID.json  resize.json  avoid.json           requests of `craton chaos`, `resize` and `heal`
    plans/N.json                                     plans for other numbers of nodes
    code/  code.json                                 working folder of a command, and checksums of its files
    secret                                           authenticates the run's agents; readable by its owner only
    admin.key                                        authenticates admin requests to its server; owner only
    checkpoints/TIER/step-N/
    members.json  members/NAME/                      runs that this run owns: `craton.telemetry.members`
    summary.json                                     cached summary of an ended run, for `ps`
    STOP  DONE  FATAL                                markers

Creating a run is atomic: of two processes that want the same name, one gets it. Runs are in $CRATON_RUNS, else ./runs.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from craton.telemetry.errors import RunError, RunExistsError, RunNotFoundError
from craton.telemetry.files import UnsafeFileError, append_regular, names_in, note_unread, read_regular

Marker = Literal["STOP", "DONE", "FATAL"]
MARKERS: tuple[Marker, ...] = get_args(Marker)
FOLDERS = ("events", "metrics", "ledger", "logs", "traces", "heartbeat", "status", "checkpoints", "generations")
MEMBERS_FOLDER = "members"
MAX_NAME = 100  # characters; a job file allows 63, copies and restarts add some
MAX_SHOWN_NAME = 60
MAX_SHOWN_RUNS = 10
MAX_MARKER_BYTES = 1 << 20  # each node adds a few lines
MAX_DEPTH = 4  # runs above a member: deeper folders are not members
MAX_MEMBERS = 2000  # of one run; twice the largest sweep
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RunDirectory:
    """The paths and markers of one run. Stateless: any process may create one for the same path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def create(cls, root: str | os.PathLike[str], name: str) -> RunDirectory:
        """Create an empty run under `root`; RunExistsError if the name is taken."""
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            shown = name if len(name) <= MAX_SHOWN_NAME else f"{name[:MAX_SHOWN_NAME]}…"
            raise RunError(
                f"invalid run name {shown!r}: allowed are up to {MAX_NAME} letters, digits, '.', '_' and '-', starting "
                "with a letter or a digit; change `name` in the job file"
            )
        run = cls(Path(root) / name)
        try:
            run.path.parent.mkdir(parents=True, exist_ok=True)
            run.path.mkdir()
        except FileExistsError as error:
            if not run.path.parent.is_dir():
                raise RunError(f"cannot store runs in {run.path.parent}: it is not a folder") from error
            raise RunExistsError(
                f"run {name!r} already exists in {run.path.parent}; continue it with `craton resume {name}`, or start "
                "a new one with --name"
            ) from error
        except OSError as error:
            raise RunError(
                f"cannot create the run directory {run.path} ({error.strerror}); set CRATON_RUNS to a writable folder"
            ) from error
        for folder in FOLDERS:
            (run.path / folder).mkdir()
        return run

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDirectory) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @cached_property
    def name(self) -> str:
        """The name by which every command finds the run: NAME, or OWNER/NAME of a member; `path.name` is its folder."""
        return "/".join([*reversed([owner.path.name for owner in self.owners()]), self.path.name])

    @property
    def root(self) -> Path:
        """The folder of runs that holds it, or the outermost of its owners."""
        return [self, *self.owners()][-1].path.parent

    def owners(self) -> Iterator[RunDirectory]:
        """Yield the run that owns this one, the owner of that one, and so on."""
        run = self
        for _ in range(MAX_DEPTH):
            folder = run.path.parent
            if folder.name != MEMBERS_FOLDER:
                return
            run = RunDirectory(folder.parent)
            if not run.looks_like_a_run():
                return
            yield run

    @property
    def job_path(self) -> Path:
        return self.path / "job.yaml"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def launch_path(self) -> Path:
        return self.path / "launch.json"

    def events_path(self, node: str) -> Path:
        return self.path / "events" / f"{_plain(node)}.jsonl"

    def metrics_path(self, node: str) -> Path:
        return self.path / "metrics" / f"{_plain(node)}.jsonl"

    def ledger_path(self, node: str) -> Path:
        return self.path / "ledger" / f"{_plain(node)}.jsonl"

    def samples_path(self, node: str) -> Path:
        return self.path / "samples" / f"{_plain(node)}.jsonl"

    @property
    def journal_folder(self) -> Path:
        """The journal of a run with asynchronous rollouts: a file step-N for each step."""
        return self.path / "journal"

    def heartbeat_path(self, node: str) -> Path:
        return self.path / "heartbeat" / _plain(node)

    def status_path(self, node: str) -> Path:
        return self.path / "status" / f"{_plain(node)}.json"

    def generation_path(self, number: int) -> Path:
        return self.path / "generations" / f"{number:06d}.json"

    @property
    def admin_key_path(self) -> Path:
        return self.path / "admin.key"

    @property
    def secret_path(self) -> Path:
        return self.path / "secret"

    @property
    def resize_path(self) -> Path:
        return self.path / "resize.json"

    @property
    def chaos_folder(self) -> Path:
        return self.path / "chaos"

    def log_path(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def stack_path(self, rank: int) -> Path:
        return self.path / "stacks" / f"rank-{rank:05d}.txt"

    @property
    def recording_prefix(self) -> Path:
        """Path prefix; PyTorch's flight recorder adds the rank."""
        return self.path / "traces" / "rank_"

    def checkpoints(self, tier: str) -> Path:
        return self.path / "checkpoints" / tier

    def mark(self, marker: Marker, text: str = "") -> None:
        """Set a marker. Marking again appends to its text, so that every node can report why it failed.

        OSError if the disk refuses it; on a full disk the marker may be set without its text, never with half of it."""
        descriptor = append_regular(self._marker_path(marker))
        try:
            if text:
                before = os.fstat(descriptor).st_size
                data = (text.rstrip("\n") + "\n").encode(errors="replace")
                if os.write(descriptor, data) < len(data):
                    os.ftruncate(descriptor, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def unmark(self, marker: Marker) -> None:
        self._marker_path(marker).unlink(missing_ok=True)

    def has(self, marker: Marker) -> bool:
        return os.path.exists(self._marker_path(marker))  # False, not an error, on a storage failure

    def marker_text(self, marker: Marker) -> str:
        """Return the text of a marker; "" if it is not set."""
        try:
            return read_regular(self._marker_path(marker), MAX_MARKER_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except UnsafeFileError as error:
            note_unread(self._marker_path(marker), error)
            return str(error)

    def looks_like_a_run(self) -> bool:
        try:
            return (self.path / "events").is_dir() and (self.path / "ledger").is_dir()
        except (OSError, ValueError):  # a name that is too long or invalid
            return False

    def _marker_path(self, marker: Marker) -> Path:
        assert marker in MARKERS, marker
        return self.path / marker


def runs_root() -> Path:
    """Return $CRATON_RUNS, else ./runs."""
    return Path(os.environ.get("CRATON_RUNS") or "runs").absolute()


def list_runs(root: str | os.PathLike[str] | None = None) -> list[RunDirectory]:
    """Return the runs under a root, newest first; none if the root does not exist."""
    folder = Path(root) if root is not None else runs_root()
    try:
        entries = [RunDirectory(item) for item in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((run for run in entries if run.looks_like_a_run()), key=_made_at, reverse=True)


def find_run(name_or_path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> RunDirectory:
    """Return the run with this name under the root (`RUN/NAME`: a member of a run), else the run directory at this
    path."""
    wanted = os.fspath(name_or_path)
    folder = Path(root) if root is not None else runs_root()
    for candidate in (_member_path(folder, wanted), Path(wanted)):
        run = RunDirectory(candidate)
        if wanted and run.looks_like_a_run():
            return run
    owner, _, member = wanted.rpartition("/")
    if len(wanted) > MAX_SHOWN_NAME:
        wanted = f"{wanted[:MAX_SHOWN_NAME]}…"
    above = RunDirectory(_member_path(folder, owner))
    if all(map(is_member_name, (*owner.split("/"), member))) and above.looks_like_a_run():
        raise RunNotFoundError(f"no run named {wanted!r}: {_nearest_member(above, member)}")
    names = [run.name for run in list_runs(folder)]
    advice = _nearest(wanted, names, "existing runs")
    raise RunNotFoundError(
        f"no run named {wanted!r}: {advice or f'there are no runs in {folder}; set CRATON_RUNS to use another folder'}"
    )


def name_by_path(path: Path) -> str:
    """Return the name of the run at a path by the path alone, for readers that a hung file system must not block."""
    words = [path.name]
    while path.parent.name == MEMBERS_FOLDER and len(words) <= MAX_DEPTH:
        path = path.parent.parent
        words.append(path.name)
    return "/".join(reversed(words))


def member_names(run: RunDirectory) -> list[str]:
    """Return the names of the folders in `members`, without links, at most MAX_MEMBERS. If it cannot be read, there are
    none, and it is noted, so that `ps` names it."""
    folder = run.path / MEMBERS_FOLDER
    try:
        names = [name for name in names_in(folder) if is_member_name(name) and _is_folder(f"{folder}/{name}")]
    except OSError as error:
        note_unread(folder, error)
        return []
    if len(names) > MAX_MEMBERS:
        note_unread(folder, UnsafeFileError(folder, f"has more than {MAX_MEMBERS:,} folders; the others are left out"))
    return names[:MAX_MEMBERS]


def is_member_name(name: object) -> bool:
    """Whether a name in a file that others may have written can be that of a member."""
    return isinstance(name, str) and is_plain_name(name) and not name.startswith(".")


def _member_path(root: Path, name: str) -> Path:
    return root / name.replace(os.sep, f"{os.sep}{MEMBERS_FOLDER}{os.sep}")


def _nearest_member(owner: RunDirectory, wanted: str) -> str:
    folder = owner.path / MEMBERS_FOLDER
    entries = read_json(owner.path / "members.json").get("members")
    if any(isinstance(entry, dict) and entry.get("name") == wanted for entry in entries or ()):
        return f"this member has no run of its own yet; `craton ps {owner.name}` shows what it waits for, or why"
    names = [name for name in member_names(owner) if RunDirectory(folder / name).looks_like_a_run()]
    advice = _nearest(wanted, names, f"members of {owner.name}", f"{owner.name}/")
    return advice or f"{owner.name} has no members"


def _nearest(wanted: str, names: list[str], title: str, prefix: str = "") -> str:
    """Return the nearest names, or all of them if none is near; "" if there is none."""
    from craton.nearest import nearest_names

    near = nearest_names(wanted, names)
    if near:
        return f"did you mean {' or '.join(repr(prefix + name) for name in near)}?"
    shown = ", ".join(names[:MAX_SHOWN_RUNS]) + (" ..." if len(names) > MAX_SHOWN_RUNS else "")
    return f"{title}: {shown}" if names else ""


def _is_folder(path: str) -> bool:
    """Whether a path is a folder and not a link to one: a link could lead back to the owner."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _made_at(run: RunDirectory) -> float:
    for path in (run.job_path, run.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a run; {} if it does not exist or cannot be read. Files that are not regular
    are noted, so that `ps` names them."""
    try:
        document = json.loads(read_regular(path))
    except UnsafeFileError as error:
        note_unread(path, error)
        return {}
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def reporting_rank(launch: Mapping[str, Any]) -> int:
    """Return the rank whose metrics are those of the run: 0, or the one that `progress.rank` of a command names."""
    settings = launch.get("progress")
    rank = settings.get("rank") if isinstance(settings, Mapping) else None
    return rank if isinstance(rank, int) and rank > 0 else 0


def reporting_node(members: Mapping[str, Any], launch: Mapping[str, Any]) -> str | None:
    """Return the node of that rank among these members, a generation or the launch; None if unknown."""
    nodes = members.get("nodes")
    per_node = members.get("ranks_per_node") or launch.get("ranks_per_node")
    if not isinstance(nodes, list) or not nodes:
        return None
    place = reporting_rank(launch) // per_node if isinstance(per_node, int) and per_node > 0 else 0
    return str(nodes[place]) if place < len(nodes) else None


def is_plain_name(node: str) -> bool:
    """Whether a node's name is safe in a file name: it comes from files that others may have written."""
    return os.sep not in node and node not in ("", ".", "..")


def _plain(node: str) -> str:
    if not is_plain_name(node):
        raise UnsafeFileError(node, "is a node name that leads out of the run directory")
    return node
