"""Runs that own runs: their names, their order, and files that others have damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from craton.telemetry import RunDirectory, RunNotFoundError, find_run, list_runs
from craton.telemetry.members import (
    MEMBERS_FILE,
    MEMBERS_FOLDER,
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberStatus,
    full_name,
    member_runs,
    owner_of,
    read_members,
    read_members_status,
    write_members,
    write_members_status,
)


@pytest.fixture
def owner(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "sweep")
    for name in ("b", "a", "c"):
        RunDirectory.create(run.path / MEMBERS_FOLDER, name)
    write_members(run, MembersSpec([MemberSpec("c"), MemberSpec("a", {"c": "done"}, "ready", {"x": 1})], 2, "sweep"))
    return run


def test_members_are_found_by_the_name_of_their_owner(owner: RunDirectory, tmp_path: Path) -> None:
    inner = RunDirectory.create(owner.path / MEMBERS_FOLDER / "a" / MEMBERS_FOLDER, "deep")
    assert [run.name for run in list_runs(tmp_path)] == ["sweep"]
    assert [run.name for run in member_runs(owner)] == ["c", "a", "b"]
    for name in ("sweep", "sweep/a", "sweep/a/deep"):
        assert full_name(find_run(name, tmp_path)) == name
    assert owner_of(inner) == find_run("sweep/a", tmp_path)
    assert owner_of(owner) is None
    with pytest.raises(RunNotFoundError, match="no run named 'sweep/z'"):
        find_run("sweep/z", tmp_path)


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


def test_a_linked_folder_has_no_members(owner: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory.create(tmp_path, "other")
    os.symlink(owner.path / MEMBERS_FOLDER, other.path / MEMBERS_FOLDER)
    with pytest.raises(OSError, match="link"):
        member_runs(other)
