"""The page of runs that own runs: the tree in the list, the pages of members, and what each waits for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Tab
from owned_runs import make_member, make_owner
from page_server import PageServer

from craton.telemetry import RunDirectory
from craton.telemetry.members import MEMBERS_FOLDER, MemberSpec, MembersSpec, MemberStatus, write_members

Serve = Callable[..., PageServer]
HOSTILE = "<img src=x onerror=alert(1)>"
STATES = {"a": "done", "b": "failed", "c": "running", "d": "waiting"}
STATUS = {"d": MemberStatus("waiting", f"member a {HOSTILE}"), "c": MemberStatus("running", restarts=1)}
ROWS = "[...document.querySelectorAll('#runs tbody tr:not([hidden])')].map((row) => row.dataset.name)"


def test_the_tree_opens_in_the_list_and_leads_to_a_member(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    make_owner(tmp_path / "runs", "sweep", STATES, "done", STATUS)
    make_member(tmp_path / "runs", "alone")
    tab.go(serve().address)
    tab.wait_for("document.querySelector('[data-name=sweep] [data-members]') !== null")
    owner = tab.evaluate("document.querySelector('[data-name=sweep]').textContent")
    assert "1 of 4 members done, 1 failed, 1 running, 1 waiting" in owner
    assert len(tab.evaluate(ROWS)) == 2
    tab.click("[data-name=sweep] [data-members]")
    tab.wait_for("document.querySelectorAll('tr.member').length === 4")
    names = tab.evaluate(ROWS)
    at = names.index("sweep")
    assert names[at + 1 : at + 5] == [f"sweep/{name}" for name in "abcd"]
    waits = tab.evaluate("document.querySelector('tr[data-name=\"sweep/d\"] .why').textContent")
    assert waits == f"waits for member a {HOSTILE}"
    tab.click("th[data-sort=name] button")
    names = tab.evaluate(ROWS)
    assert names[names.index("sweep") + 1] == "sweep/a", "members stay with their owner"
    tab.click("[data-name=sweep] [data-members]")
    assert sorted(tab.evaluate(ROWS)) == ["alone", "sweep"]
    tab.click("[data-name=sweep] [data-members]")
    tab.wait_for("document.querySelectorAll('tr.member').length === 4")
    tab.click("tr[data-name='sweep/b'] a")
    tab.wait_for("location.pathname === '/runs/sweep:b' && document.querySelector('h1')?.textContent === 'sweep/b'")
    tab.wait_for("document.getElementById('log').textContent.includes('hello from b')")
    tab.click(".crumbs a[href='/runs/sweep']")
    tab.wait_for("document.querySelector('[data-fragment=members] tbody tr') !== null")
    assert "sweep/" not in tab.evaluate("document.querySelector('[data-fragment=members] tbody').textContent")
    assert "Node time 3 s; its members use the same nodes" in tab.evaluate("document.body.textContent")


@pytest.mark.parametrize("number", [0, 1, 500])
def test_a_run_shows_any_number_of_members(serve: Serve, tmp_path: Path, number: int) -> None:
    owner = make_owner(tmp_path / "runs", "sweep", {}, "done")
    long = "learning_rate-0.0001-hidden-64-and-more-"
    write_members(owner, MembersSpec([MemberSpec(f"{long}{index}") for index in range(number)]))
    served = serve()
    status, _, text = served.ask("GET", "/runs/sweep")
    assert status == 200
    assert text.count(long) == number
    assert ('hidden aria-labelledby="h-members"' in re.sub(r"\s+", " ", text)) == (number == 0)
    status, _, rows = served.ask("GET", "/runs/sweep/members")
    assert (status, rows.count("<tr")) == (200, number)


@pytest.mark.parametrize("name", ["sweep:..", "sweep:", ":a", "sweep:a:b:c:d:e", "sweep:no", "sweep:members", "no:a"])
def test_a_name_that_is_no_member_is_not_found(serve: Serve, tmp_path: Path, name: str) -> None:
    make_owner(tmp_path / "runs", "sweep", {"a": "done"})
    served = serve()
    for path in (f"/runs/{name}", f"/runs/{name}/members", f"/runs/{name}/log?source=rank-00000"):
        assert served.ask("GET", path)[0] == 404, path


def test_hostile_members_leave_the_page_alone(serve: Serve, tmp_path: Path) -> None:
    owner = make_member(tmp_path / "runs", "owner", "running")
    (owner.path / MEMBERS_FOLDER).write_text("x")
    loop = make_member(tmp_path / "runs", "loop")
    (loop.path / MEMBERS_FOLDER).mkdir()
    (loop.path / MEMBERS_FOLDER / "self").symlink_to(loop.path)
    (loop.path / MEMBERS_FOLDER / "status.json").write_bytes(bytes(range(256)))
    served = serve()
    for run in (owner, loop):
        assert isinstance(run, RunDirectory)
        assert served.ask("GET", f"/runs/{run.name}")[0] == 200
        assert served.ask("GET", f"/runs/{run.name}/members")[::2] == (200, "")
