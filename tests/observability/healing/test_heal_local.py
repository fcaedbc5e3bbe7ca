"""A run on this machine leaves a node for its spare, by real agents: no step is lost, and it can be undone."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import chain
import pytest
from slurm_runs import losses_of, no_code, submit, wait_for_step
from waiting import wait_until

from craton.agent import newest_generation
from craton.agent.coordination import avoid_node, read_avoided
from craton.job import parse_job
from craton.observability.healing import heal, look, place_of, undo
from craton.observability.healing.issues import Issue
from craton.orchestration.changes import working_nodes
from craton.orchestration.changes.evacuation import spare_nodes
from craton.orchestration.start import kill_run
from craton.orchestration.start.runs import draft_resume, resume_run, resumed_job
from craton.telemetry import RunDirectory
from craton.telemetry.node import read_heartbeat


def start(root: Path, name: str, spares: int) -> RunDirectory:
    """One that ends with its test."""
    job = parse_job(
        f"name: {name}\nkind: command\ncommand: [{sys.executable}, {chain.__file__}]\ncluster: local x 2\n"
        f"recover: {{spares: {spares}}}\nrun: {{env: {{STEPS: '2000', STEP_SECONDS: '0.05'}}}}\n",
        folder=no_code(),
    )
    run = submit(root, job)
    wait_for_step(run, 5)
    return run


def working_and_spare(run: RunDirectory) -> tuple[list[str], str]:
    """Who is ready last when a run begins is its spare."""
    wait_until(lambda: spare_nodes(run), "the spare is ready")
    return working_nodes(run), spare_nodes(run)[0]


def issue(run: RunDirectory, node: str) -> Issue:
    return Issue(node, "replace", "gpu_throttled", f"GPU 0 of {node} is too hot", "why", run=run.name)


def test_it_moves_to_its_spare_and_computes_the_same(root: Path) -> None:
    run = start(root, "mover", spares=1)
    (good, bad), spare = working_and_spare(run)
    place = place_of("mover")
    held = heal(place, [issue(run, bad)], "act", place.share)
    assert held.actions == ()
    assert "one of 3 nodes" in held.decisions[0].why_not
    found = heal(place, [issue(run, bad)], "act", 0.4)
    assert [entry.kind for entry in found.actions] == ["take_out", "move"], found
    wait_until(lambda: (newest := newest_generation(run)) and newest.nodes == [good, spare], "it has moved")
    newest = newest_generation(run)
    assert newest is not None
    assert newest.is_planned
    assert (beat := read_heartbeat(run, bad)) is not None
    assert beat.state in ("running", "spare"), "its agent is there, for the way back"
    undo(place, found.actions[0].id)
    assert read_avoided(run) == {}
    since = max(losses_of(run))
    wait_until(lambda: max(losses_of(run)) > since + 5, "it goes on")
    losses, expected = losses_of(run), chain.losses(2000)
    assert {step: loss for step, loss in losses.items() if loss != expected[step]} == {}
    assert sorted(losses) == list(range(1, max(losses) + 1)), "no step is missing"


def test_without_a_spare_it_stays_and_says_so(root: Path) -> None:
    run = start(root, "alone", spares=0)
    found = heal(place_of("alone"), [issue(run, "node-1")], "act", 0.5)
    assert found.actions == ()
    assert "alone has no spare to take the place of node-1" in found.decisions[0].why_not
    assert read_avoided(run) == {}


@pytest.mark.slow
def test_two_bad_nodes_are_not_promised_the_same_spare(root: Path) -> None:
    run = start(root, "pair", spares=1)
    (first, second), _ = working_and_spare(run)
    found = heal(place_of("pair"), [issue(run, first), issue(run, second)], "act", 1.0)
    assert len([entry for entry in found.actions if entry.kind == "move"]) == 1, found
    assert any("no spare to take the place of" in each for each in found.failures), found.failures


def test_a_spare_that_is_in_trouble_itself_is_not_taken(root: Path) -> None:
    run = start(root, "wary", spares=2)
    wait_until(lambda: len(spare_nodes(run)) == 2, "both spares are ready")
    (good, bad), (sick, spare) = working_nodes(run), spare_nodes(run)
    issues = [issue(run, bad), issue(run, sick)]
    alone = heal(place_of("wary"), [*issues, issue(run, spare)], "advise", 1.0)
    assert "wary has no spare" in next(each.why_not for each in alone.decisions if each.node == bad)
    found = heal(place_of("wary"), issues, "act", 1.0)
    wait_until(lambda: working_nodes(run) == [good, spare], "it has moved")
    assert spare_nodes(run) == []
    for action in (entry for entry in found.actions if entry.kind == "take_out"):
        undo(place_of("wary"), action.id)
    assert read_avoided(run) == {}


@pytest.mark.slow
def test_a_new_start_may_use_every_node(root: Path) -> None:
    run = start(root, "again", spares=1)
    avoid_node(run, working_nodes(run)[1], "ab12")
    kill_run(run)
    resume_run(run, draft_resume(run, resumed_job(run)))
    assert read_avoided(run) == {}


def test_a_run_that_was_lost_is_looked_at(root: Path) -> None:
    run = start(root, "gone", spares=0)
    kill_run(run)
    place = place_of("gone")
    assert (place.runs, [each.name for each, _ in place.ended]) == ((), ["gone"])
    notes: list[str] = []
    look(place, notes=notes)
    assert notes == []


def test_runs_that_failed_of_late_are_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hours in {"late": 1, "old": 5, "fine": 1}.items():
        run = RunDirectory.create(root, name)
        run.mark("DONE" if name == "fine" else "FATAL", "rank 3 lost its card")
        os.utime(run.path, (time.time() - hours * 3600,) * 2)
    monkeypatch.setattr("craton.observability.healing.places.service_of", lambda scheduler: None)
    file = root.parent / "lab.yaml"
    file.write_text(json.dumps({"name": "lab", "instance": "local", "nodes": 8, "runs": str(root)}))
    place = place_of(str(file))
    assert (place.runs, [run.name for run, _ in place.ended]) == ((), ["late"])


def test_the_newest_run_is_meant_and_a_run_that_does_well_needs_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from craton.cli import main

    start(root, "fine", spares=0)
    monkeypatch.setattr("sys.argv", ["craton", "heal", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = json.loads(capsys.readouterr().out)
    assert (ended.value.code or 0, told["cluster"], told["mode"], told["decisions"]) == (0, "fine", "advise", [])
