"""The live view and the table at the end, from the files of a run alone."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from craton import terminal_marks
from craton.agent import Generation
from craton.api import Run
from craton.cli.views.live import describe, line, make_console, panel, watch
from craton.cli.views.outcome import outcome_json, print_outcome
from craton.cli.views.run_table import notes_on
from craton.orchestration.start import SavedStep
from craton.orchestration.watching import Follower
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, write_heartbeat
from craton.telemetry.rank import Recorder

PLAN: dict[str, Any] = {
    "steps": 100,
    "step_seconds": 0.5,
    "step_seconds_low": 0.4,
    "step_seconds_high": 0.625,
    "phases": {"data": 0.0, "compute": 0.4, "communication": 0.05, "optimizer": 0.05, "checkpoint": 0.0},
    "tokens_per_second": 6000.0,
    "mfu": 0.5,
    "memory_bytes": 2.0**30,
    "goodput": 0.99,
    "goodput_detail": {"goodput_low": 0.9, "goodput_high": 0.999},
    "cost_dollars": 12.0,
    "cost": {"cost_dollars_low": 10.0, "cost_dollars_high": 15.0, "dollars_per_day": 100.0},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two ranks at step 40 of 100, a tenth slower than planned."""
    made = RunDirectory.create(tmp_path, "demo")
    made.plan_path.write_text(json.dumps(PLAN))
    made.launch_path.write_text(json.dumps({"generation": 0, "nodes": ["node-0", "node-1"], "ranks_per_node": 1}))
    made.job_path.write_text("kind: command\ncommand: train\ncluster: local x 2\n")
    for rank in (0, 1):
        write_heartbeat(made, f"node-{rank}", Heartbeat(0, "running", pid=1, metrics_port=0))
        recorder = Recorder(f"node-{rank}", rank, generation=0, run=made)
        for step in range(1, 41):
            phases = {"data": 0.01, "compute": 0.42, "communication": 0.07, "optimizer": 0.05, "checkpoint": 0.0}
            seconds = {f"run_{phase}_seconds": value for phase, value in phases.items()}
            shared = {"run_loss": 8.0 - step / 10, "run_tokens_per_second": 5454.5, "run_mfu": 0.4545}
            recorder.metrics(step, run_step_seconds=0.55, **seconds, **(shared if rank == 0 else {}))
        recorder.event("checkpoint_saved", step=40, tier="shared", blocked_seconds=0.021, size_bytes=28_000_000)
        recorder.ledger(40, {"start": 3.0, "productive": 22.0})
        recorder.close()
    return made


def shown(renderable: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_panel_says_what_one_asks_and_fits_the_terminal(run: RunDirectory, width: int) -> None:
    text = shown(panel(Follower(run).look(), width), width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("demo · running · 2 ranks", "step 40/100", "40%", "ETA 33 s", "550 ms", "+10%", "5.45k", "45%"):
        assert words in text
    for words in ("88%", "communication", "70.0 ms", "50.0 ms", "Ctrl-C leaves the view", "checkpoint saved"):
        assert words in text
    assert text.count("checkpoint saved") == 1  # one rank says it for all


def test_a_look_reads_on_where_the_last_one_ended(run: RunDirectory) -> None:
    follower = Follower(run)
    assert len(follower.look().losses) == 40
    recorder = Recorder("node-0", 0, generation=0, run=run)
    recorder.metrics(41, run_loss=3.5, run_step_seconds=0.5)
    recorder.metrics(41, run_evaluation_loss=3.9)
    view = follower.look()
    assert (len(view.losses), view.losses[-1], view.evaluation_loss) == (41, 3.5, 3.9)


def test_without_a_terminal_it_is_one_line(run: RunDirectory) -> None:
    assert line(Follower(run).look()) == (
        "demo: step 40/100  loss 4.00  5.45k tokens/s  MFU 45%  step 550 ms (+10% against plan)  ETA 33 s"
    )


def test_without_a_terminal_what_happens_is_told_once(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder("node-0", 0, generation=0, run=run)
    recorder.event("checkpoint_passed_over", step=30, reason="step 40 cannot be used")
    recorder.event("checkpoint_saved", step=40, tier="shared")
    Recorder("node-0", 0, generation=7, run=run).event("bad_step", step=3, reason="of another generation")
    looks = iter([lambda: None, lambda: run.mark("DONE")])
    monkeypatch.setattr(time, "sleep", lambda _: next(looks)())
    watch(Run(run), make_console())
    told = capsys.readouterr().out
    assert told.count("demo: step 30 · checkpoint passed over · step 40 cannot be used\n") == 1
    assert "checkpoint saved" not in told
    assert "another generation" not in told


def test_a_recovery_is_loud_until_it_is_over(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.launch_path.write_text(json.dumps({**json.loads(run.launch_path.read_text()), "nursery": ["python"]}))
    moment = time.time() - 2
    made = Generation(1, ["node-0", "node-1"], 1, "", reason="rank 1 was killed", reached=39, broke_at=moment)
    run.generation_path(1).write_text(json.dumps(made.to_message()))
    view = Follower(run).look()
    assert line(view) == "demo: RECOVERING  rank 1 was killed at step 40, not back yet"
    assert "RECOVERING for 2 s: rank 1 was killed at step 40" in shown(panel(view, 100), 100)

    recorder = Recorder("node-0", 0, generation=1, run=run)
    recorder.event("recovered", step=40, seconds=1.4, lost_steps=0, restored_from="peer")
    recorder.ledger(40, {"detect": 0.1, "regroup": 0.4, "restore": 0.3, "redo": 0.6, "productive": 2.0})
    recorder.close()
    view = Follower(run).look()
    text = shown(panel(view, 100), 100)
    assert "RECOVERING" not in line(view) + text
    assert "1 recovery" in text
    assert "last recovery: rank 1 was killed at step 40, back after 1.40 s: detect 100 ms" in text
    run.mark("DONE")
    print_outcome(run, Follower(run).look().summary, make_console())
    told = capsys.readouterr().out
    assert "detect 100 ms · regroup 400 ms · restore 300 ms · redo 600 ms" in told
    assert "(planned 99%)" in told
    document = outcome_json(run, Follower(run).look().summary)
    assert document["recoveries"][0]["restored_from"] == "peer"


def test_the_table_at_the_end_holds_every_twin_with_its_interval(run: RunDirectory) -> None:
    run.mark("DONE")
    view = Follower(run).look()
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_outcome(run, view.summary, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    rows = {row.split()[0]: row for row in text.splitlines() if row.strip()}
    assert "500 ms     400–625 ms     550 ms    1.10   inside" in rows["step"]
    assert "0.91   inside" in rows["tokens/s"]
    assert "0.89" in rows["goodput"]  # of a short run: starting weighs more than what was planned, so no verdict
    assert "side" not in rows["goodput"]
    assert "$10.00–15.00" in rows["cost"]
    for name in ("data", "compute", "communication", "optimizer", "checkpoint", "memory", "MFU"):
        assert name in rows
    assert "demo is done" in text

    document = outcome_json(run, view.summary)
    compared = {row["name"]: row for row in document["comparison"]}
    assert compared["step_seconds"]["ratio"] == pytest.approx(1.1)
    assert compared["step_seconds"]["is_inside"] is True
    assert json.loads(json.dumps(document))["state"] == "done"


def test_what_is_next_fits_what_was_trained(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.mark("DONE")
    saved = SavedStep(40, "shared", run.path / "step-40")
    monkeypatch.setattr("craton.orchestration.start.newest_checkpoint", lambda run: saved)
    for text, words in (
        ("kind: pretrain\n", "craton export demo FOLDER · craton sample demo --prompt '...'"),
        ("kind: dpo\npreference: {loss: reward}\n", "demo FOLDER · kind: grpo with reward: [{model: FOLDER}]"),
    ):
        run.job_path.write_text(text)
        console = Console(file=io.StringIO(), width=200, highlight=False)
        print_outcome(run, Follower(run).look().summary, console)
        assert words in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_without_a_plan_has_no_empty_columns(run: RunDirectory) -> None:
    run.plan_path.unlink()
    view = Follower(run, steps=100).look()
    text = shown(panel(view, 100), 100)
    assert "step 40/100" in text
    assert "plan" not in text


def test_events_are_told_in_words() -> None:
    event = {"time": time.time(), "generation": 0, "node": "node-0", "rank": 0, "step": 1200}
    told = describe({**event, "event": "checkpoint_saved", "tier": "nvme", "blocked_seconds": 0.02})
    assert told == "step 1,200 · checkpoint saved · tier nvme · blocked 20.0 ms"
    assert (
        describe({**event, "step": 0, "event": "sink_failed", "message": "no wandb\nat all"})
        == "sink failed · no wandb"
    )


def test_curves_and_bars() -> None:
    assert terminal_marks.sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert len(terminal_marks.sparkline([float(value) for value in range(1000)], 30)) == 30
    assert terminal_marks.sparkline([1.0], 10) == ""
    assert terminal_marks.bar(0.5, 4) == "██"
    assert terminal_marks.bar(1e-9, 4) == "▏"


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ({"reward": 0.123, "completion_tokens": 143.2, "kl": 0.0123, "staleness": 1.0}, ["reward 0.12"]),
        ({"reward_accuracy": 0.712, "reward_margin": 0.3}, ["accuracy 0.71", "margin 0.30"]),
    ],
)
def test_what_post_training_improves_shows_everywhere(
    run: RunDirectory, results: dict[str, float], words: list[str]
) -> None:
    recorder = Recorder("node-0", 0, generation=0, run=run)
    for step in (41, 42):
        values = {f"run_{name}": value for name, value in results.items()}
        recorder.metrics(step, run_loss=1.0, run_step_seconds=0.55, run_rollout_seconds=0.2, **values)
    recorder.close()
    view = Follower(run).look()
    assert "  ".join(words) in line(view)
    assert ("loss" in line(view)) == ("reward" not in results)
    text = shown(panel(view, 100), 100)
    assert all(word.split()[-1] in text for word in words)
    assert "rollout" in text
    for width in (80, 100):
        assert max(map(len, shown(panel(view, width), width).splitlines())) <= width
    run.mark("DONE")
    for node in ("node-0", "node-1"):
        write_heartbeat(run, node, Heartbeat(0, "done", pid=1, metrics_port=0))
    console = Console(file=io.StringIO(), width=200, highlight=False)
    summary = Follower(run).look().summary
    print_outcome(run, summary, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert " · ".join(words) in printed
    assert outcome_json(run, summary)["results"] == pytest.approx(results)
    notes = "\n".join(note.plain for note in notes_on(summary, [], ()))
    assert f"demo: {' · '.join(words)}" in notes


def test_other_runs_show_no_results(run: RunDirectory) -> None:
    view = Follower(run).look()
    assert "rollout" not in shown(panel(view, 100), 100)
    assert view.summary.results == {}
