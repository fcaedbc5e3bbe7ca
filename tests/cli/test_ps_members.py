"""`craton ps`, `logs` and the other verbs of runs that own runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from owned_runs import make_member, make_owner
from run_verbs import Verbs
from waiting import wait_until

from craton.orchestration import living_agents
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.start import kill_run
from craton.orchestration.watching import glance, summary_cache
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.members import MEMBERS_FOLDER, MemberStatus, member_runs

STATES = {"a": "done", "b": "done", "c": "failed", "d": "running", "e": "waiting"}
STATUS = {
    "c": MemberStatus("failed", message="exit code 3"),
    "d": MemberStatus("running", restarts=2),
    "e": MemberStatus("waiting", "a free place (1 of 1 in use)"),
}


def test_a_list_of_runs_sums_up_members(verbs: Verbs) -> None:
    make_owner(verbs.root, "sweep", STATES, status=STATUS)
    make_member(verbs.root, "alone")
    said = verbs("ps")
    assert said.returncode == 0
    assert "sweep: 2 of 5 members done, 1 failed, 1 running, 1 waiting; `craton ps sweep` shows them" in said.stdout
    assert "alone: " not in said.stdout
    by_name = {entry["name"]: entry for entry in verbs.json("ps")}
    assert set(by_name) == {"sweep", "alone"}
    assert by_name["sweep"]["members"]["states"] == {"done": 2, "failed": 1, "running": 1, "waiting": 1}
    assert by_name["alone"]["members"] is None


def test_one_run_is_shown_as_a_tree(verbs: Verbs) -> None:
    owner = make_owner(verbs.root, "sweep", STATES, status=STATUS)
    make_owner(owner.path / MEMBERS_FOLDER, "inner", {"x": "done"}, "done")
    said = verbs("ps", "sweep").stdout
    lines = {line.split()[1]: line for line in said.splitlines() if line.startswith(("├", "└", "│", " "))}
    assert list(lines) == ["a", "b", "c", "d", "e", "inner", "x"]
    assert lines["a"].split()[2:6] == ["done", "0", "5/10", "50"]
    assert "±0%" in lines["a"], "its plan twin"
    assert lines["c"].endswith("rank 0 ran out of luck")
    assert lines["d"].endswith("restarted 2 times")
    assert lines["e"].split()[2] == "waiting"
    assert lines["e"].endswith("waits for a free place (1 of 1 in use)")
    assert "node time 3 s; its members use the same nodes" in said
    assert verbs("ps", "sweep/c").stdout.splitlines()[2].startswith("sweep/c   failed")
    tree = verbs.json("ps", "sweep")
    assert tree["name"] == "sweep"
    waiting = next(row for row in tree["member_runs"] if row["name"] == "sweep/e")
    assert (waiting["state"], waiting["waits_for"]) == ("waiting", "a free place (1 of 1 in use)")
    (inner,) = next(row for row in tree["member_runs"] if row["name"] == "sweep/inner")["member_runs"]
    assert (inner["name"], inner["step"], inner["restarts"]) == ("sweep/inner/x", 5, 0)


@pytest.mark.parametrize("shares", [True, False])
def test_a_member_on_the_nodes_of_its_owner_is_not_billed_twice(verbs: Verbs, shares: bool) -> None:
    owner = make_owner(verbs.root, "fleet", {"a": "done", "b": "done"}, "done", None, 86400.0, 2 * 86400.0)
    write_submission(owner, Submission("slurm", "7"))
    for number, member in enumerate(member_runs(owner)):
        write_submission(member, Submission("slurm", "7" if shares else str(8 + number)))
    document = verbs.json("ps", "fleet")
    assert (document["cost_dollars"], document["node_seconds"]) == (3.0, 3.0)
    assert document["total_cost_dollars"] == (3.0 if shares else 3.0 + 2 * 10.0)
    assert document["total_node_seconds"] == (3.0 if shares else 3.0 + 2 * 5.0)
    assert document["members"]["ledger"] == {"productive": 10.0}
    said = verbs("ps", "fleet").stdout
    parts = "cost $3.00: $3.00 of its own, $0.00 of its members"
    assert (parts if shares else "cost $23.00: $3.00 of its own, $20.00 of its members") in said


def test_members_of_an_owner_without_a_price_are_billed(verbs: Verbs) -> None:
    make_owner(verbs.root, "sweep", {"a": "done"}, "done", members_dollars_per_day=86400.0)
    assert verbs.json("ps", "sweep")["total_cost_dollars"] == 5.0


def test_the_members_of_a_run_that_has_ended_are_read_once(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = make_owner(verbs.root, "sweep", {"a": "done", "b": "failed"}, "done")
    glance(owner)  # keeps the members, which changes their folders
    first = glance(owner)
    assert first.summary.members is not None
    with monkeypatch.context() as patched:
        patched.setattr(summary_cache, "member_rows", lambda *_: pytest.fail("the members are read again"))
        assert glance(owner) == first
    member = RunDirectory(owner.path / MEMBERS_FOLDER / "b")
    member.unmark("FATAL")
    member.mark("DONE")
    summary = glance(owner).summary
    assert summary.members is not None
    assert summary.members.states == {"done": 2}
    with member.ledger_path("node-0").open("a") as ledger:
        ledger.write('{"time": 4000000000, "rank": 0, "generation": 0, "seconds": {"productive": 7.0}}\n')
    summary = glance(owner).summary
    assert summary.members is not None
    assert summary.members.ledger["productive"] > 10.0


def test_logs_of_an_owner_name_its_members(verbs: Verbs) -> None:
    make_owner(verbs.root, "sweep", {"a": "done", "b": "done"}, "done")
    said = verbs("logs", "sweep")
    assert said.stdout.splitlines() == ["rank-00000  hello from sweep"]
    assert "sweep has 2 members: a, b; `craton logs sweep/a` prints their logs" in said.stderr
    member = verbs("logs", "sweep/a")
    assert (member.stdout.splitlines(), member.stderr) == (["rank-00000  hello from a"], "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("stop", "sweep/b"), "craton resume sweep/b"),
        (("resize", "sweep/b", "2"), "sweep/b"),
        (("chaos", "sweep/b", "--kill", "rank=0", "--yes"), "craton resume sweep/b"),
        (("rm", "sweep/b"), "sweep/b"),
        (("why", "sweep/b"), "sweep/b"),
        (("top", "sweep/b", "--once"), "sweep/b"),
        (("logs", "sweep/B"), "did you mean 'sweep/b'"),
        (("resume", "sweep/zzz"), "members of sweep: a, b"),
        (("logs", "sweep/b", "--rank", "9"), "sweep/b has no such rank"),
    ],
)
def test_every_verb_names_a_member_in_full(verbs: Verbs, arguments: tuple[str, ...], text: str) -> None:
    make_owner(verbs.root, "sweep", {"a": "done", "b": "stopped"}, "done")
    said = verbs(*arguments)
    assert text in f"{said.stdout}{said.stderr}", said


@pytest.mark.parametrize("kind", ["file", "link", "loop", "crowd", "garbage", "deep"])
def test_hostile_members_make_no_verb_fail(verbs: Verbs, kind: str, tmp_path: Path) -> None:
    owner = make_member(verbs.root, "owner", "running")
    folder = owner.path / MEMBERS_FOLDER
    if kind == "file":
        folder.write_text("x")
    elif kind == "link":
        os.symlink(verbs.root, folder)
    else:
        folder.mkdir()
        (folder / "status.json").write_bytes(bytes(range(256)) if kind == "garbage" else b'{"members": {"x": 3}}')
        (owner.path / "members.json").write_bytes(b"[" * 100_000)
    if kind == "loop":
        os.symlink(owner.path, folder / "self")
    if kind == "crowd":
        for number in range(3000):
            (folder / f"file-{number}").touch()
    if kind == "deep":
        inner = owner
        for number in range(8):
            inner = make_member(inner.path / MEMBERS_FOLDER, f"m{number}")
    for arguments in (("ps",), ("ps", "owner", "--json"), ("why", "owner"), ("logs", "owner")):
        said = verbs(*arguments)
        assert said.returncode == 0, said
    if kind in ("file", "link"):
        assert f"owner: skipped: {folder}" in verbs("ps").stdout
    names = [line for line in verbs("ps", "owner").stdout.splitlines() if "m4" in line]
    assert not names, "members of members of members of members"


def test_ps_of_one_run_refuses_options_of_lists(verbs: Verbs) -> None:
    make_member(verbs.root, "alone")
    said = verbs("ps", "alone", "-a")
    assert (said.returncode, "alone is one; omit them" in said.stderr) == (2, True)


def test_a_real_member_is_started_found_and_stopped_by_its_full_name(verbs: Verbs) -> None:
    owner = make_owner(verbs.root, "owner", {}, "done")
    job = verbs.job(nodes=1, STEPS=100_000)
    verbs.monkeypatch.setenv("CRATON_RUNS", str(owner.path / MEMBERS_FOLDER))
    started = verbs("run", job, "--name", "base", "--detach")
    assert "owner/base runs in the background: `craton logs owner/base -f` follows it" in started.stdout
    verbs.monkeypatch.setenv("CRATON_RUNS", str(verbs.root))
    member = RunDirectory(owner.path / MEMBERS_FOLDER / "base")
    try:
        wait_until(lambda: summarize(member).step > 1)
        assert "owner: 1 of 1 member running" in verbs("ps", "owner").stdout
        assert verbs("logs", "owner/base", "-n", "1").stdout.startswith("rank-00000  ")
        assert "next: craton resume owner/base" in verbs("stop", "owner/base").stdout
        assert "1 stopped" in verbs("ps", "owner").stdout
    finally:
        if living_agents(member):
            kill_run(member)
