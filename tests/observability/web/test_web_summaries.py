"""The list of runs: what is remembered of each, read again when it changed, and said when it cannot be read."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import write_run
from waiting import PATIENCE_SECONDS, wait_until

from craton.observability.web.sources import CachedVerdict, Summaries, Verdicts
from craton.observability.web.sources import summaries as summaries_module
from craton.telemetry import RunDirectory, Summarizer


def look_at_all(root: Path) -> dict[str, Any]:
    summaries = Summaries(root, Verdicts(lambda run: CachedVerdict("healthy", "")))
    summaries.rows()
    wait_until(lambda: summaries._is_read and all(row.state != "reading" for row in summaries.rows()))
    summaries.close()
    assert summaries._thread is not None
    summaries._thread.join(timeout=PATIENCE_SECONDS)  # it may still be remembering
    return {row.run.name: row for row in summaries.rows()}


def test_runs_that_have_ended_are_remembered_until_they_change(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "ended", nodes=1, steps=5, state="done")
    write_run(tmp_path / "runs", "moves", nodes=1, steps=5)
    before = look_at_all(tmp_path / "runs")
    for name in ("ended", "moves"):
        (tmp_path / "runs" / name / "ledger" / "node-0.jsonl").write_text("")
    after = look_at_all(tmp_path / "runs")
    assert after["ended"].summary == before["ended"].summary
    assert after["ended"].summary.goodput > 0.5
    assert after["moves"].summary.goodput is None
    ended = RunDirectory(tmp_path / "runs" / "ended")
    ended.unmark("DONE")  # it was resumed, and failed
    ended.mark("FATAL", "the disk is full")
    assert look_at_all(tmp_path / "runs")["ended"].summary.state == "failed"


def test_nobody_waits_while_the_folders_of_all_runs_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summaries = Summaries(tmp_path, Verdicts(lambda run: CachedVerdict("healthy", "")))
    summaries.close()  # no thread of its own reads
    answers: list[Any] = []

    def ask_meanwhile(root: Path) -> list[RunDirectory]:
        asks = threading.Thread(target=lambda: answers.append(summaries.rows()), daemon=True)
        asks.start()
        asks.join(timeout=PATIENCE_SECONDS)
        return []

    monkeypatch.setattr(summaries_module, "list_runs", ask_meanwhile)
    summaries.refresh()
    assert answers == [[]]


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "whole", nodes=1, steps=5, state="done")
    broken = write_run(tmp_path / "runs", "broken", nodes=1, steps=5, state="done")
    broken.launch_path.write_text('{"generation": "none"}')
    rows = look_at_all(tmp_path / "runs")
    assert rows["whole"].state == "done"
    assert rows["broken"].state == "unreadable"
    assert "cannot read" in rows["broken"].trouble


def test_what_cannot_be_read_now_is_said_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "runs"
    write_run(root, "good", nodes=1, steps=5)
    odd = write_run(root, "odd", nodes=1, steps=5, state="done")
    plan = json.loads(odd.plan_path.read_text())
    odd.plan_path.write_text(json.dumps({**plan, "cost": [1], "cost_dollars": None}))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(summaries_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(summaries_module, "MAX_SHARE", 1.0)
    listed, broken, looks = summaries_module.list_runs, {"list": False, "settle": False}, [0]
    settled = summaries_module.settled_summaries

    def list_or_fail(folder: Path) -> list[RunDirectory]:
        looks[0] += 1
        if broken["list"]:
            raise OSError(116, "Stale file handle")
        return listed(folder)

    def settle_or_fail(found: Any, ask: Any) -> Any:
        if broken["settle"]:
            raise RuntimeError("squeue does not answer")
        return settled(found, ask)

    monkeypatch.setattr(summaries_module, "list_runs", list_or_fail)
    monkeypatch.setattr(summaries_module, "settled_summaries", settle_or_fail)
    summaries = Summaries(root, Verdicts(lambda run: CachedVerdict("healthy", "")))

    def wait_for(states: dict[str, str], trouble: str) -> None:
        before = looks[0]

        def seen() -> tuple[dict[str, str], str]:
            return {row.run.name: row.state for row in summaries.rows()}, summaries.trouble

        def is_seen() -> bool:
            found, said = seen()
            return found == states and trouble in said and bool(trouble) == bool(said) and looks[0] > before + 2

        wait_until(is_seen, seen)

    there = {"good": "running", "odd": "unreadable"}
    wait_for(there, "")
    broken["list"] = True
    wait_for(there, "Stale file handle")
    broken.update(list=False, settle=True)
    wait_for(there, "squeue does not answer")
    broken["settle"] = False
    wait_for(there, "")
    summaries.close()


def test_a_wide_run_is_summed_up_from_some_of_its_nodes_and_rank_0(tmp_path: Path) -> None:
    run = write_run(tmp_path, "wide", nodes=40, ranks_per_node=1, steps=5)
    member = json.loads(run.generation_path(0).read_text())
    member["nodes"] = member["nodes"][7:] + member["nodes"][:7]  # rank 0 has moved to node-7
    run.generation_path(0).write_text(json.dumps(member))
    first, moved = run.metrics_path("node-0"), run.metrics_path("node-7")
    first.rename(tmp_path / "kept")
    moved.write_text((tmp_path / "kept").read_text().replace("node-0", "node-7"))
    whole, part = Summarizer(run).summary(), Summarizer(run, most_nodes=4).summary()
    assert (part.step, part.loss, part.state) == (whole.step, whole.loss, whole.state) == (5, whole.loss, "running")
    assert part.goodput == pytest.approx(whole.goodput)
    assert part.wall_seconds == pytest.approx(whole.wall_seconds)
