"""Runs that own runs, with real agents, managers and ranks: order, gate, parallel members, stop, resume, removal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from secrets import token_hex

import pytest
from member_runs import check_nothing_is_left, counting, member, owned, processes_of, states, wait_for_members_in
from waiting import wait_until

from craton.agent import newest_generation, read_launch
from craton.agent.processes import free_port
from craton.api import preview
from craton.bench.recovery.rehearsal import Rehearsal
from craton.job import parse_job
from craton.orchestration import RunStateError, StartError
from craton.orchestration.draft.members import Members
from craton.orchestration.start.checks import failed_at_start
from craton.telemetry import summarize
from craton.telemetry.members import MemberSpec, MembersSpec

TINY = "{name: tiny, layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 512, max_sequence: 2048}"


def test_the_gate_waits_and_a_stop_and_a_resume_cover_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = token_hex(16)
    monkeypatch.setenv("PROBE_TOKEN", secret)
    run = owned(
        MemberSpec("base", gate="done"),
        MemberSpec("side", {"base": "done"}),
        base=counting("base", STEPS=40),
    )
    wait_until(lambda: run.summary().message.startswith("waits for member base"), lambda: run.summary())
    assert newest_generation(run.directory) is None
    wait_for_members_in(run, base="done", side="running")
    wait_until(lambda: run.summary().step > 0, lambda: run.summary())
    began = [path.stat().st_mtime for path in (member(run, "base").path / "DONE", run.directory.generation_path(0))]
    assert began == sorted(began)
    assert read_launch(member(run, "side").directory).owner == str(run.path)
    with pytest.raises(RunStateError, match="its owner owner runs and would start it again"):
        member(run, "side").remove()

    assert member(run, "side").stop().state == "stopped"
    wait_for_members_in(run, side="stopped")
    assert run.state == "running"
    member(run, "side").resume()
    wait_for_members_in(run, side="running")
    check_secrecy(run.path, secret.encode())

    assert run.stop().state == "stopped"
    assert states(run) == {"base": "done", "side": "stopped"}
    check_nothing_is_left(run.path)
    with pytest.raises(RunStateError, match="a member of owner, which is not running"):
        member(run, "side").resume()
    saved = member(run, "side").checkpoint()
    assert saved is not None

    run.resume()
    wait_for_members_in(run, base="done", side="running")
    wait_until(lambda: summarize(member(run, "side").directory).step > saved.step)
    assert len(list((member(run, "base").path / "generations").iterdir())) == 1, "what is done is not started again"
    with pytest.raises(RunStateError, match="owner is not removed"):
        run.remove()
    run.stop(now=True)
    check_nothing_is_left(run.path)
    run.remove()
    assert not run.path.exists()


def check_secrecy(folder: Path, secret: bytes) -> None:
    """No file of the run and no command line holds the secret; the processes of members inherit it."""
    for path in folder.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes(), path
    pids = [line.split()[0] for line in processes_of(folder)]
    assert len(pids) >= 5, "two agents, two ranks, one manager"
    for pid in pids:
        assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"PROBE_TOKEN=" + secret in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_member_that_fails_before_the_gate_fails_its_owner(root: Path) -> None:
    run = owned(
        MemberSpec("bad", gate="done"),
        MemberSpec("side"),
        bad=counting("bad", FAIL_RANK=0, STEP_SECONDS=0),
        owner=counting("owner", STEPS=1),
    )
    summary = run.wait()
    assert summary.state == "failed"
    assert summary.message.startswith("member bad failed: rank 0 on node-0 exited with code 1")
    assert states(run) == {"bad": "failed", "side": "stopped"}
    assert newest_generation(run.directory) is None, "none of its ranks has started"
    check_nothing_is_left(run.path)
    assert not failed_at_start(run.directory), "the work of a member is kept"


def test_a_stop_while_members_start_leaves_nothing(root: Path) -> None:
    run = owned(MemberSpec("a", gate="done"), MemberSpec("b"))
    wait_until(lambda: states(run).get("a") == "starting", lambda: states(run))
    assert run.stop().state == "stopped"
    check_nothing_is_left(run.path)
    assert set(states(run).values()) == {"stopped"}


ASKING = """
import os, urllib.request
from craton.telemetry import RunDirectory
from craton.telemetry.members import member_addresses
server = member_addresses(RunDirectory(os.environ["CRATON_RUN"]))["judge"]
request = urllib.request.Request(server.url + "/v1/models", headers={"Authorization": "Bearer " + server.api_key})
print("answer:", urllib.request.urlopen(request).status)
"""


@pytest.mark.slow
def test_a_training_and_a_server_are_members(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_KEYS", token_hex(16))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "ask.py").write_text(ASKING)
    server = f"serve: {{port: {free_port()}, initialize: random, api_keys: SERVE_KEYS}}\n"
    run = owned(
        MemberSpec("base", gate="done"),
        MemberSpec("judge", {"base": "done"}, gate="ready"),
        base=parse_job(Rehearsal("base", nodes=1, steps=4).job_text()),
        judge=parse_job(f"name: judge\nkind: serve\nmodel: {TINY}\ncluster: local\n{server}"),
        owner=parse_job(
            f"name: owner\nkind: command\ncommand: [{sys.executable}, ask.py]\ncluster: local\n",
            folder=tmp_path / "code",
        ),
    )
    summary = run.wait()
    assert summary.state == "done", summary.message
    assert "answer: 200" in run.directory.log_path(0).read_text()
    assert member(run, "base").summary().step == 4
    assert states(run) == {"base": "done", "judge": "stopped"}
    check_nothing_is_left(run.path)
    for path in run.path.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077:
            assert os.environ["SERVE_KEYS"].encode() not in path.read_bytes(), path


def test_what_cannot_be_is_refused_in_one_line_before_anything_starts(root: Path) -> None:
    def refused(*members: MemberSpec, chaos: list[str] | None = None) -> str:
        given = {item.name: counting("any") for item in members}
        with pytest.raises(StartError) as caught:
            preview(counting("owner"), members=Members(MembersSpec(list(members)), given), chaos=chaos or ())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "two members are called 'a' and 'A'" in refused(MemberSpec("a"), MemberSpec("A"))
    assert "two members are called 'a' and 'a'" in refused(MemberSpec("a"), MemberSpec("a"))
    assert "'../x' is not a name of a member" in refused(MemberSpec("../x"))
    assert "cannot be the name of a member" in refused(MemberSpec("status.json"))
    assert "is not a name of a member; use up to 40 letters" in refused(MemberSpec("x" * 41))
    assert "a → b → a" in refused(MemberSpec("a", {"b": "done"}), MemberSpec("b", {"a": "done"}))
    assert "member a needs itself" in refused(MemberSpec("a", {"a": "done"}))
    assert "needs 'bsae', which is not a member; did you mean 'base'?" in refused(
        MemberSpec("base"), MemberSpec("b", {"bsae": "done"})
    )
    assert "1,001 members are more" in refused(*(MemberSpec(f"m{number}") for number in range(1001)))
    assert "there is no member bas; the members are base; did you mean 'base'?" in refused(
        MemberSpec("base"), chaos=["kill member=bas@step=3"]
    )
    with pytest.raises(StartError, match="'kill member=base': this run has no members; omit member="):
        preview(counting("alone"), chaos=["kill member=base"])
    assert not root.exists()


def test_a_preview_has_the_files_of_members_and_their_faults(root: Path) -> None:
    members = Members(MembersSpec([MemberSpec("base", gate="done")]), {"base": counting("x", STEPS=7)})
    start = preview(counting("owner"), members=members, chaos=["kill rank=0,member=base", "kill rank=0"])
    files = start.draft.files()
    assert json.loads(files["members.json"])["members"][0]["gate"] == "done"
    assert "name: base" in files["jobs/base.yaml"]
    assert "kill rank=0,member=base" in files["jobs/base.yaml"]
    assert start.draft.launch.chaos == ["kill rank=0"]
    assert start.draft.launch.members[1:] == ["-m", "craton.orchestration.members", str(start.run.path)]
    assert not root.exists()
