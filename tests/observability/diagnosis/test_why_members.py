"""`craton why` of a run that owns runs: a member is blamed where it is the cause, and not otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_snapshots import healthy
from owned_runs import MOMENT, beat_here, make_member, make_owner

from craton.observability.diagnosis import Verdict, diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.observability.diagnosis.member_facts import SnapshotMember
from craton.observability.diagnosis.snapshot import Snapshot
from craton.telemetry import RunDirectory
from craton.telemetry.members import (
    MEMBERS_FOLDER,
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberStatus,
    write_members,
    write_members_status,
)


def why(run: RunDirectory) -> Verdict:
    snapshot = take_snapshot(run, now=MOMENT + 1.0, look_here=False)
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    return diagnose(snapshot)


def gated(root: Path, member_state: str, owner_state: str, gate: str = "done", message: str = "") -> RunDirectory:
    owner = make_owner(root, "tune", {"base": member_state}, owner_state)
    write_members(owner, MembersSpec([MemberSpec("base", gate=gate)], purpose="weights"))  # type: ignore[arg-type]
    status = MemberStatus("waiting" if member_state == "waiting" else "running", "a free place")
    write_members_status(owner, MembersStatus({"base": status}, failure=message))
    if owner_state == "running":  # not yet: its first generation waits
        owner.metrics_path("node-0").unlink()
        beat_here(owner)
    if member_state == "running":
        beat_here(RunDirectory(owner.path / MEMBERS_FOLDER / "base"))
    return owner


def report_error(run: RunDirectory, text: str) -> None:
    labels = {"time": 1e9 + 6, "step": 5, "generation": 0, "node": "node-0", "rank": 0}
    error = {"type": "OSError", "message": text, "errno": 28, "frames": []}
    run.events_path("node-0").write_text(
        json.dumps({**labels, "event": "failed", "error": error, "reason": text}) + "\n"
    )
    run.unmark("DONE")
    run.mark("FATAL", text)


def test_an_owner_that_a_member_ended_blames_it_with_its_own_root_cause(tmp_path: Path) -> None:
    owner = gated(tmp_path, "failed", "failed", message="member base failed")
    member = RunDirectory(owner.path / MEMBERS_FOLDER / "base")
    report_error(member, "[Errno 28] No space left on device")
    own = why(member)
    assert own.layer, own.sentence
    verdict = why(owner)
    assert (verdict.condition, verdict.layer) == ("dead", own.layer), verdict.sentence
    assert verdict.because.startswith("member base failed: ")
    assert own.because in verdict.because
    assert verdict.action == own.action
    assert "tune/base" in own.sentence


def test_a_sweep_whose_members_all_failed_blames_the_one_it_names(tmp_path: Path) -> None:
    owner = make_owner(tmp_path, "tune", {"base": "failed"}, "failed")
    write_members(owner, MembersSpec([MemberSpec("base")], purpose="sweep"))
    member = RunDirectory(owner.path / MEMBERS_FOLDER / "base")
    report_error(member, "[Errno 28] No space left on device")
    report_error(owner, "no member is done: member base failed: no space left")
    assert why(owner).because.startswith("member base failed: "), "not the rank that reports it"


@pytest.mark.parametrize("state", ["running", "waiting"])
def test_an_owner_at_its_gate_says_what_it_waits_for(tmp_path: Path, state: str) -> None:
    verdict = why(gated(tmp_path, state, "running"))
    assert verdict.condition == "starting", verdict.sentence
    progress = ", step 5 of 10" if state == "running" else ""
    assert f"tune is starting: it waits for member base ({state}{progress}" in verdict.sentence
    assert verdict.cause == "", verdict.sentence


def test_an_owner_at_its_gate_blames_a_member_that_is_broken(tmp_path: Path) -> None:
    verdict = why(gated(tmp_path, "lost", "running"))
    assert verdict.condition == "starting"
    assert verdict.because.startswith("member base is lost"), verdict.sentence


def test_a_failed_member_of_a_sweep_explains_nothing(tmp_path: Path) -> None:
    owner = make_owner(tmp_path, "sweep", {"a": "failed", "b": "running", "c": "lost"})
    beat_here(owner)
    assert take_snapshot(owner, look_here=False).members == ()
    assert "member" not in why(owner).sentence
    broken = make_owner(tmp_path, "broken", {"a": "failed"}, "failed")
    assert "member" not in why(broken).sentence, "its own message does not name it"


def test_an_owner_whose_message_names_a_member_blames_it(tmp_path: Path) -> None:
    owner = make_owner(tmp_path, "sweep", {"a": "failed", "a-2": "failed"}, "done")
    owner.unmark("DONE")
    owner.mark("FATAL", "member a-2 failed: rank 0 ran out of luck")
    assert [member.name for member in take_snapshot(owner, look_here=False).members] == ["sweep/a-2"]
    assert why(owner).because.startswith("member a-2 failed: ")


@pytest.mark.parametrize("state", ["ready", "running", "done"])
def test_healthy_members_are_no_finding(state: str) -> None:
    members = (SnapshotMember("run/a", state, "ready", condition="healthy"), SnapshotMember("run/b", "failed"))
    verdict = diagnose(replace(healthy(4), members=members))
    assert (verdict.condition, verdict.cause, verdict.others) == ("healthy", "", ())


def test_a_member_is_diagnosed_as_any_run(tmp_path: Path) -> None:
    owner = make_owner(tmp_path, "sweep", {"a": "failed"})
    alone = make_member(tmp_path, "alone", "failed", 5)
    assert why(RunDirectory(owner.path / MEMBERS_FOLDER / "a")).cause == why(alone).cause
