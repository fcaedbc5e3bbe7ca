"""The working directory of a command, copied into its run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from craton.job import Job, parse_job
from craton.orchestration import StartError
from craton.orchestration.draft import check_code, code_folder, code_summary, find_code, keep_code, manifest_path
from craton.orchestration.draft.code_archive import STORE, _is_stored
from craton.telemetry import RunDirectory

NOBODY = 65534  # the user that has no rights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    write(made, {"train.py": "print('hello')\n", "lib/model.py": "layers = 4\n"})
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def job_in(folder: Path, more: str = "") -> Job:
    return parse_job(f"kind: command\ncommand: ./train.py\ncluster: local\n{more}", folder=folder)


def snapshot(folder: Path, root: Path, name: str = "run", more: str = "") -> RunDirectory:
    found = find_code(job_in(folder, more), root)
    assert found is not None
    run = RunDirectory.create(root, name)
    keep_code(found, run)
    return run


def copied(run: RunDirectory) -> set[str]:
    code = code_folder(run.path)
    return {str(path.relative_to(code)) for path in code.rglob("*") if not path.is_dir() or path.is_symlink()}


def test_files_are_copied_with_their_sums_and_modes(folder: Path, root: Path) -> None:
    (folder / "train.py").chmod(0o755)
    run = snapshot(folder, root)
    assert copied(run) == {"train.py", "lib/model.py"}
    manifest = json.loads(manifest_path(run.path).read_text())
    assert manifest["files"]["lib/model.py"] == hashlib.sha256(b"layers = 4\n").hexdigest()
    code = code_folder(run.path)
    assert os.access(code / "train.py", os.X_OK)
    assert not stat.S_IMODE((code / "lib/model.py").stat().st_mode) & 0o333
    assert code_summary(run).startswith(f"2 files of {folder}, sha256 {manifest['sha256'][:12]}")


def test_equal_files_of_several_runs_are_one_and_have_one_hash(folder: Path, root: Path, tmp_path: Path) -> None:
    first, second = snapshot(folder, root, "first"), snapshot(folder, root, "second")
    one, other = (code_folder(run.path) / "train.py" for run in (first, second))
    assert one.samefile(other)
    hashes = [json.loads(manifest_path(run.path).read_text())["sha256"] for run in (first, second)]
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, {"train.py": "print('hello')\n", "lib/model.py": "layers = 4\n"})
    third = snapshot(elsewhere, root, "third")
    assert {*hashes, json.loads(manifest_path(third.path).read_text())["sha256"]} == {hashes[0]}
    write(elsewhere, {"lib/model.py": "layers = 5\n"})
    fourth = snapshot(elsewhere, root, "fourth")
    assert json.loads(manifest_path(fourth.path).read_text())["sha256"] != hashes[0]
    assert (code_folder(first.path) / "lib/model.py").read_text() == "layers = 4\n"


def test_a_file_of_a_run_that_was_changed_in_place_is_not_given_to_the_next(folder: Path, root: Path) -> None:
    first = snapshot(folder, root, "first")
    spoilt = code_folder(first.path) / "train.py"
    spoilt.chmod(0o644)
    spoilt.write_text("print('spoilt')\n")
    second = snapshot(folder, root, "second")
    assert (code_folder(second.path) / "train.py").read_text() == "print('hello')\n"
    with pytest.raises(
        StartError, match=r"first resumes with the code it started with, but train.py in .* has changed"
    ):
        check_code(first)
    check_code(second)


def test_what_is_ignored_stays_out_and_the_last_word_counts(folder: Path, root: Path) -> None:
    (folder.parent / ".git").mkdir()
    write(folder.parent, {".gitignore": "*.ckpt\n"})
    write(
        folder,
        {
            ".gitignore": "/data/\n*.log\n!keep.log\n",
            ".cratonignore": "notes.md\n!important.ckpt\n",
            "lib/.gitignore": "local.py\n",
            **dict.fromkeys(
                ["a.log", "keep.log", "data/big.bin", "lib/data/small.bin", "lib/local.py", "local.py"], "x"
            ),
            **dict.fromkeys(["notes.md", "old.ckpt", "important.ckpt", ".hg/config", "lib/__pycache__/m.pyc"], "x"),
            **dict.fromkeys(["env/pyvenv.cfg", "env/bin/python", ".venv/x"], "x"),
        },
    )
    expected = {"train.py", "lib/model.py", "keep.log", "lib/data/small.bin", "local.py", "important.ckpt"}
    assert copied(snapshot(folder, root)) == expected | {".gitignore", ".cratonignore", "lib/.gitignore"}


def test_secrets_stay_out_whatever_is_ignored_and_it_is_told(folder: Path, root: Path) -> None:
    write(
        folder, {".cratonignore": "!.env\n!*.pem\n", ".env": "TOKEN=1", "lib/server.pem": "k", ".env.example": "TOKEN="}
    )
    write(folder, {".ssh/id_rsa": "k", ".env.production": "TOKEN=2"})
    run = snapshot(folder, root)
    assert copied(run) == {"train.py", "lib/model.py", ".cratonignore", ".env.example"}
    assert "left out as secret: .env, .env.production, .ssh, lib/server.pem" in code_summary(run)


def test_runs_beside_the_code_are_no_code(folder: Path) -> None:
    root = folder / "results"
    snapshot(folder, root, "first")
    assert copied(snapshot(folder, root, "second")) == {"train.py", "lib/model.py"}


def test_runs_of_another_root_are_no_code_either(folder: Path, root: Path, tmp_path: Path) -> None:
    """They hold logs, and the secret of their agents."""
    old = RunDirectory.create(folder / "runs", "old")
    write(old.path, {"job.yaml": "kind: command\n", "launch.json": "{}", "secret": "0123", "logs/rank-00000.log": "x"})
    elsewhere = RunDirectory.create(tmp_path / "shared", "linked")
    write(elsewhere.path, {"job.yaml": "kind: command\n", "launch.json": "{}"})
    (folder / "runs" / "linked").symlink_to(elsewhere.path)
    write(tmp_path / "environment", {"pyvenv.cfg": ""})
    (folder / "environment").symlink_to(tmp_path / "environment")
    write(folder, {"lib/launch.json": "{}", "lib/job.yaml": "kind: command\n"})
    expected = {"train.py", "lib/model.py", "lib/launch.json", "lib/job.yaml", "environment"}
    assert copied(snapshot(folder, root)) == expected


def test_who_may_not_read_a_file_may_not_read_its_copy(folder: Path, root: Path) -> None:
    write(folder, {"notes": "x\n", "public": "x\n", "group": "x\n", "private/tool": "x\n", "private/deep/y": "y\n"})
    modes = {"notes": 0o600, "public": 0o644, "group": 0o640, "private/tool": 0o755, "private/deep/y": 0o644}
    for name, mode in modes.items():
        (folder / name).chmod(mode)
    (folder / "private").chmod(0o750)
    run = snapshot(folder, root)
    kept = {name: stat.S_IMODE((code_folder(run.path) / name).stat().st_mode) for name in modes}
    assert kept == {"notes": 0o400, "public": 0o444, "group": 0o440, "private/tool": 0o550, "private/deep/y": 0o440}
    again = snapshot(folder, root, "again")
    for name in modes:
        first, second = (code_folder(each.path) / name for each in (run, again))
        assert first.samefile(second)
    check_code(again)


def test_a_file_of_another_group_is_not_given_to_ours(folder: Path, root: Path) -> None:
    """The runs folder gives its own group to what is made in it, as teams have it."""
    (folder / "train.py").chmod(0o640)
    (folder / "lib" / "model.py").chmod(0o644)
    root.mkdir(exist_ok=True)
    try:
        os.chown(root, -1, (folder / "train.py").stat().st_gid + 1)
    except PermissionError:
        pytest.skip("only root may give a folder to a group that it is not in")
    root.chmod(0o2775)
    code = code_folder(snapshot(folder, root).path)
    assert [stat.S_IMODE((code / name).stat().st_mode) for name in ("train.py", "lib/model.py")] == [0o400, 0o444]


def test_what_is_stored_is_read_once_and_written_never(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(folder, root, "first")
    opened: list[str] = []

    def counted(path: Any, mode: str = "r", *about: Any, **more: Any) -> Any:
        opened.append(f"{mode} {Path(path).name}")
        return open(path, mode, *about, **more)

    monkeypatch.setattr("craton.orchestration.draft.code_archive.open", counted, raising=False)
    snapshot(folder, root, "second")
    assert sorted(opened) == ["rb model.py", "rb train.py"]


def test_links_lead_to_the_same_places(folder: Path, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "data"
    write(outside, {"big.bin": "x"})
    (folder / "inside").symlink_to("lib/model.py")
    (folder / "lib" / "absolute").symlink_to(folder / "train.py")
    (folder / "data").symlink_to("../data")
    (folder / "dangling").symlink_to("nowhere")
    run = snapshot(folder, root)
    code = code_folder(run.path)
    assert os.readlink(code / "inside") == "lib/model.py"
    assert (code / "lib" / "absolute").resolve() == code / "train.py"
    assert (code / "data" / "big.bin").read_text() == "x"
    assert os.readlink(code / "dangling") == "nowhere"
    (code / "inside").unlink()
    with pytest.raises(StartError, match="inside in"):
        check_code(run)


def test_too_much_is_refused_with_what_takes_the_room(folder: Path, root: Path) -> None:
    write(folder, {"model.bin": "x" * 3_000_000, "lib/other.bin": "x" * 1_500_000})
    text = (
        r"holds 4\.50 MB; the limit per run is 2\.00 MB\. The largest files are model.bin \(3\.00 MB\), "
        r"lib/other.bin \(1\.50 MB\), .*\.cratonignore"
    )
    with pytest.raises(StartError, match=text):
        find_code(job_in(folder, "workdir: {limit: 2MB}\n"), root)
    write(folder, {".cratonignore": "*.bin\n"})
    assert find_code(job_in(folder, "workdir: {limit: 2MB}\n"), root) is not None


def test_a_folder_that_is_not_there_is_told_with_its_line(folder: Path, root: Path) -> None:
    with pytest.raises(StartError, match=r"job.yaml:4: workdir: .*/nowhere is not a folder"):
        find_code(job_in(folder, "workdir: nowhere\n"), root)
    assert (
        find_code(parse_job("kind: serve\nmodel: llama-3.1-8b\ncluster: local\nserve: {initialize: random}\n"), root)
        is None
    )


@contextlib.contextmanager
def another_user(*closed: Path) -> Iterator[None]:
    """Whoever may write everywhere becomes a user who may not; others lose their right to write to these folders."""
    is_root = os.geteuid() == 0
    modes = {} if is_root else {path: stat.S_IMODE(path.stat().st_mode) for path in closed}
    for path in modes:
        path.chmod(0o555)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may go through, which those of tmp_path are not, with `work` and `runs` for all."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        for each in ("work", "runs"):
            (Path(name) / each).mkdir()
            (Path(name) / each).chmod(0o777)
        write(Path(name) / "work", {"train.py": "print('hello')\n", "lib/model.py": "layers = 4\n"})
        yield Path(name)


def test_what_cannot_be_read_is_named(shared: Path) -> None:
    (shared / "work" / "train.py").chmod(0)
    with another_user(), pytest.raises(StartError, match=r"train.py in .* cannot be read; make them readable, or list"):
        snapshot(shared / "work", shared / "runs")


def test_a_second_user_of_the_runs_has_copies_where_the_first_one_s_cannot_be_shared(shared: Path) -> None:
    work, root = shared / "work", shared / "runs"
    first = snapshot(work, root, "first")
    write(work, {"new.py": "x = 1\n", "lib/other.py": "y = 2\n"})
    with another_user(root / STORE, *(path for path in (root / STORE).iterdir() if path.is_dir())):
        second = snapshot(work, root, "second")
    assert copied(second) == {"train.py", "lib/model.py", "new.py", "lib/other.py"}
    check_code(second)
    assert not stat.S_IMODE((code_folder(second.path) / "new.py").stat().st_mode) & 0o222
    assert "not shared with other runs (no permission for .code" in code_summary(second)
    assert "not shared" not in code_summary(first)


def test_a_file_that_leaves_the_store_before_it_is_linked_is_stored_again(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = snapshot(folder, root, "first")
    shutil.rmtree(first.path)
    swept: list[Path] = []

    def look_then_sweep(place: str, *about: Any) -> bool:
        is_stored = _is_stored(place, *about)
        swept.append(Path(place))
        swept[-1].unlink()
        return is_stored

    monkeypatch.setattr("craton.orchestration.draft.code_archive._is_stored", look_then_sweep)
    second = snapshot(folder, root, "second")
    monkeypatch.undo()
    assert len(swept) == 2
    assert copied(second) == {"train.py", "lib/model.py"}
    assert all(path.exists() and path.stat().st_nlink == 2 for path in swept)
    assert "not shared" not in code_summary(second)


def test_nothing_but_files_is_left_of_the_copying(folder: Path, root: Path) -> None:
    runs = [snapshot(folder, root, name) for name in ("first", "second")]
    assert [path.name for path in (root / STORE).glob(".*")] == []
    assert [path for run in runs for path in run.path.rglob(".*")] == []


def test_a_file_that_vanishes_is_left_out_and_one_that_keeps_changing_is_refused(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("craton.orchestration.draft.code_archive.CHUNK_BYTES", 1 << 10)  # many pauses in which it grows
    write(folder, {"passing.tmp": "x", "growing.log": "x" * 8_000_000})
    found = find_code(job_in(folder), root)
    assert found is not None
    (folder / "passing.tmp").unlink()
    stop = threading.Event()

    def grow() -> None:
        with open(folder / "growing.log", "ab", buffering=0) as log:
            while not stop.is_set():
                log.write(b"more\n")

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        with pytest.raises(StartError, match=r"growing.log changes while it is copied; list it in a .cratonignore"):
            keep_code(found, RunDirectory.create(root, "changing"))
    finally:
        stop.set()
        writer.join()
    run = RunDirectory.create(root, "quiet")
    keep_code(found, run)
    assert copied(run) == {"train.py", "lib/model.py", "growing.log"}


def test_special_files_are_no_files(folder: Path, root: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert copied(snapshot(folder, root)) == {"train.py", "lib/model.py"}


def test_what_no_run_holds_leaves_the_store_but_not_at_once(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = snapshot(folder, root, "first")
    (code_folder(run.path) / "train.py").unlink()
    stored = {path.stat().st_ino: path for path in (root / STORE).glob("??/*")}
    lonely = next(path for path in stored.values() if path.stat().st_nlink == 1)
    note = root / STORE / "swept"
    os.utime(note, (time.time() - 2 * 86400,) * 2)
    write(folder, {"train.py": "print('another')\n"})
    snapshot(folder, root, "second")
    assert lonely.exists(), "it may be about to be linked by a run that is just being made"
    os.utime(note, (time.time() - 2 * 86400,) * 2)
    monkeypatch.setattr("craton.orchestration.draft.code_archive.KEEP_SECONDS", 0.0)
    snapshot(folder, root, "third")
    assert not lonely.exists()
    check_code(RunDirectory(root / "second"))
