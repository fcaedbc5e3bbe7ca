"""A sweep in the terminal: which members it will start, what changes while it runs, and what it prints at its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from craton.cli.views.console import SafeConsole
from craton.cli.views.sweep import MemberLines, is_sweep, members_text, print_sweep
from craton.orchestration.draft.members import Members
from craton.orchestration.watching import Follower
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.members import (
    MEMBERS_FOLDER,
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberStatus,
    write_members,
    write_members_status,
)

SPEC = MembersSpec([MemberSpec(f"seed-{number}", values={"train.seed": number}) for number in (1, 2)], 1, "sweep")


@pytest.fixture
def owner(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "seeds")
    (run.path / MEMBERS_FOLDER).mkdir()
    write_members(run, SPEC)
    return run


@pytest.fixture
def console() -> Console:
    return SafeConsole(file=io.StringIO(), width=100, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_members_that_will_start() -> None:
    assert members_text(Members(SPEC)) == "2, one at a time: seed-1, seed-2"
    kept = MembersSpec([MemberSpec("base", gate="done", is_kept=True, result="/runs/base")], purpose="weights")
    assert members_text(Members(kept)) == "1: base (kept: /runs/base)"
    many = MembersSpec([MemberSpec(f"m{number}") for number in range(9)], 3, "sweep")
    assert members_text(Members(many)) == "9, 3 at a time: m0, m1, m2, m3, m4, m5, …"


def test_each_change_of_a_member_is_a_line(owner: RunDirectory, console: Console) -> None:
    lines, follower = MemberLines(owner, console), Follower(owner)
    for first, second in (("starting", "waiting"), ("running", "waiting"), ("done", "failed")):
        reason = "no\x1b[31m loss" if second == "failed" else ""
        members = {"seed-1": MemberStatus(first), "seed-2": MemberStatus(second, message=reason)}
        write_members_status(owner, MembersStatus(members))
        lines.look(follower.look())
        lines.look(follower.look())
    text = printed(console)
    assert [text.count(f"seeds/seed-1: {state}\n") for state in ("starting", "running", "done")] == [1, 1, 1]
    assert text.count("seeds/seed-2: failed (no") == 1
    assert "\x1b" not in text


def test_the_end_of_a_sweep_names_no_best_where_none_is_done(owner: RunDirectory, console: Console) -> None:
    assert is_sweep(owner)
    write_members_status(owner, MembersStatus({"seed-1": MemberStatus("failed", message="no loss today")}))
    print_sweep(owner, summarize(owner), console)
    text = printed(console)
    assert "no loss today" in text
    assert "no best member: none is done" in text
