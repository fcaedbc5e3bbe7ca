"""Runs that own runs: their names, their order, and files that others have damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from craton.telemetry import RunDirectory, RunNotFoundError, find_run, list_runs, name_by_path
from craton.telemetry.files import noting_unread
from craton.telemetry.members import (
    MAX_MEMBERS,
    MEMBERS_FILE,
    MEMBERS_FOLDER,
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberStatus,
    member_runs,
    owner_of,
    read_members,
    read_members_status,
    with_members,
    write_members,
    write_members_status,
)


@pytest.fixture
def owner(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "sweep")
    for name in ("b", "a", "c"):
        RunDirectory.create(run.path / MEMBERS_FOLDER, name)
    first, last = MemberSpec("c"), MemberSpec("later", {"a": "done"})
    write_members(run, MembersSpec([first, MemberSpec("a", {"c": "done"}, "ready", {"x": 1}), last], 2, "sweep"))
    return run


def test_members_are_found_by_the_name_of_their_owner(owner: RunDirectory, tmp_path: Path) -> None:
    inner = RunDirectory.create(owner.path / MEMBERS_FOLDER / "a" / MEMBERS_FOLDER, "deep")
    assert [run.name for run in list_runs(tmp_path)] == ["sweep"]
    assert [run.name for run in member_runs(owner)] == ["sweep/c", "sweep/a", "sweep/b"]
    for name in ("sweep", "sweep/a", "sweep/a/deep"):
        run = find_run(name, tmp_path)
        assert run.name == name_by_path(run.path) == name
    names = ["sweep", "sweep/c", "sweep/a", "sweep/a/deep", "sweep/b"]
    assert [run.name for run in with_members(list_runs(tmp_path))] == names
    assert owner_of(inner) == find_run("sweep/a", tmp_path)
    assert owner_of(owner) is None


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("sweep/z", "members of sweep: a, b, c"),
        ("sweep/later", "has no run of its own yet; `craton ps sweep` shows what it waits for"),
        ("sweep/B", "did you mean 'sweep/b'"),
        ("sweep/a/x", "sweep/a has no members"),
        ("sweap/a", "did you mean 'sweep'"),
        ("sweep/../x", "did you mean 'sweep'"),
    ],
)
def test_an_unknown_member_is_answered_with_its_neighbours(
    owner: RunDirectory, tmp_path: Path, name: str, advice: str
) -> None:
    with pytest.raises(RunNotFoundError, match=f"no run named.*{advice}"):
        find_run(name, tmp_path)


def test_a_root_called_members_owns_nothing(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / MEMBERS_FOLDER, "alone")
    assert run.name == "alone"
    assert owner_of(run) is None


def test_members_and_their_status_are_read_as_they_were_written(owner: RunDirectory) -> None:
    assert read_members(owner).member("a") == MemberSpec("a", {"c": "done"}, "ready", {"x": 1})
    assert read_members(owner).parallel == 2
    status = MembersStatus({"a": MemberStatus("waiting", "member c", 1, "lost", 12.0)}, True, "", 7, "12", "host")
    write_members_status(owner, status)
    assert read_members_status(owner) == status


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 99}', '{"members": {"a": 1}}', "\x00" * 9])
def test_damaged_files_are_no_members(owner: RunDirectory, text: str) -> None:
    (owner.path / MEMBERS_FILE).write_text(text)
    (owner.path / MEMBERS_FOLDER / "status.json").write_text(text)
    assert read_members(owner).members == []
    assert read_members_status(owner).members == {}
    assert len(member_runs(owner)) == 3


def test_hostile_entries_are_left_out(owner: RunDirectory) -> None:
    entries = [{"name": "../x"}, {"name": 3}, 5, {"name": "ok", "needs": [], "gate": "never", "values": 1}]
    (owner.path / MEMBERS_FILE).write_text(json.dumps({"members": entries, "parallel": True, "purpose": "x"}))
    assert read_members(owner) == MembersSpec([MemberSpec("ok")])
    status = {"members": {"../x": {"state": "done"}, "a": {"state": "odd"}, "b": {"state": "done", "since": "x"}}}
    (owner.path / MEMBERS_FOLDER / "status.json").write_text(json.dumps({**status, "pid": "7", "is_open": 1}))
    assert read_members_status(owner) == MembersStatus({"b": MemberStatus("done")})


@pytest.mark.parametrize("kind", ["file", "link", "loop", "crowd"])
def test_a_hostile_folder_has_no_members(owner: RunDirectory, tmp_path: Path, kind: str) -> None:
    other = RunDirectory.create(tmp_path, "other")
    folder = other.path / MEMBERS_FOLDER
    if kind == "file":
        folder.write_text("x")
    elif kind == "link":
        os.symlink(owner.path / MEMBERS_FOLDER, folder)
    elif kind == "loop":  # a member that is its owner
        folder.mkdir()
        os.symlink(other.path, folder / "self")
    else:
        folder.mkdir()
        for number in range(MAX_MEMBERS + 5):
            (folder / f"x{number}").mkdir()
    with noting_unread() as unread:
        assert list(with_members([other])) == [other]
    assert bool(unread) == (kind != "loop")


def test_members_beyond_the_maximum_are_left_out(owner: RunDirectory) -> None:
    entries = [{"name": f"m{number}"} for number in range(MAX_MEMBERS + 5)]
    (owner.path / MEMBERS_FILE).write_text(json.dumps({"members": entries}))
    assert len(read_members(owner).members) == MAX_MEMBERS


def test_times_that_no_clock_shows_are_left_out(owner: RunDirectory) -> None:
    text = '{"members": {"a": {"state": "done", "since": %s}}}'
    for since in ("1" + "0" * 400, "-1", "1e400", "NaN", "true"):
        (owner.path / MEMBERS_FOLDER / "status.json").write_text(text % since)
        assert read_members_status(owner).members["a"].since in (0.0, 1.0)
