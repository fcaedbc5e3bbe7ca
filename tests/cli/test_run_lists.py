"""`craton ps` and `craton logs` show what was asked for: which runs, how many lines, and when they were printed."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
from run_verbs import Verbs, in_a_terminal

from craton.telemetry import RunDirectory
from craton.telemetry.node import LogClock, LogTimes


def ended_run(root: Path, name: str, age: int, loss: float | None = 2.5, marker: str = "DONE") -> RunDirectory:
    run = RunDirectory.create(root, name)
    run.launch_path.write_text(json.dumps({"generation": 0, "nodes": ["node-0"], "ranks_per_node": 1}))
    run.metrics_path("node-0").write_text(
        json.dumps({"time": 1, "rank": 0, "step": 1, "generation": 0, "run_loss": loss}) + "\n"
    )
    run.job_path.touch()
    moment = time.time() - 60 * age
    os.utime(run.job_path, (moment, moment))
    run.mark("FATAL" if marker == "FATAL" else "DONE", "out of memory" if marker == "FATAL" else "")
    return run


def names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("run-") and ":" not in line.split()[0]]


def test_ps_lists_the_newest_and_says_how_many_there_are_beyond(verbs: Verbs) -> None:
    for number in range(25):
        ended_run(verbs.root, f"run-{number:02d}", age=number)
    listed = verbs("ps")
    assert names(listed.stdout) == [f"run-{number:02d}" for number in range(20)]
    assert "5 older runs not listed; `craton ps -a` lists all" in listed.stdout
    assert len(names(verbs("ps", "-a").stdout)) == len(names(verbs("ps", "--all").stdout)) == 25
    assert names(verbs("ps", "-n", 3).stdout) == ["run-00", "run-01", "run-02"]
    assert len(verbs.json("ps")) == 25, "a script gets them all"
    assert [run["name"] for run in verbs.json("ps", "-n", 1)] == ["run-00"]


def test_ps_lists_an_old_run_that_still_moves(verbs: Verbs) -> None:
    moving = ended_run(verbs.root, "run-99", age=1000)
    moving.unmark("DONE")
    moving.launch_path.touch()
    for number in range(21):
        ended_run(verbs.root, f"run-{number:02d}", age=number)
    listed = names(verbs("ps").stdout)
    assert len(listed) == 21
    assert listed[-1] == "run-99"


def test_ps_by_state(verbs: Verbs) -> None:
    ended_run(verbs.root, "run-1", age=1)
    ended_run(verbs.root, "run-2", age=2, marker="FATAL")
    assert names(verbs("ps", "--state", "failed").stdout) == ["run-2"]
    assert names(verbs("ps", "--state", "Failed,done").stdout) == ["run-1", "run-2"]
    assert "there are no matching runs" in verbs("ps", "--state", "running").stdout
    wrong = verbs("ps", "--state", "faild")
    assert wrong.returncode == 2
    assert "did you mean 'failed'?" in wrong.stderr


def test_ps_shows_the_loss_and_one_that_is_not_a_number(verbs: Verbs) -> None:
    for name, loss in {"run-1": 2.4567, "run-2": math.nan, "run-3": None}.items():
        ended_run(verbs.root, name, age=1, loss=loss)
    run = RunDirectory.create(verbs.root, "run-4")
    run.launch_path.write_text("{}")
    titles, _, *rows = verbs("ps").stdout.splitlines()
    column = titles.split().index("LOSS")
    losses = {row.split()[0]: row.split()[column] for row in rows if row.startswith("run-")}
    assert losses == {"run-1": "2.46", "run-2": "NaN", "run-3": "NaN", "run-4": "–"}


def test_ps_watches_until_it_is_left(verbs: Verbs) -> None:
    ended_run(verbs.root, "run-1", age=1)
    code, screen = in_a_terminal(verbs, ["ps", "--watch"], when="run-1", send=b"\x03")
    assert code == 130
    assert "Traceback" not in screen
    assert "TOK/S" in screen
    refused = verbs("ps", "-w")
    assert refused.returncode == 2
    assert "--watch requires a terminal" in refused.stderr


def test_the_last_lines_of_each_log(verbs: Verbs) -> None:
    run = ended_run(verbs.root, "run-1", age=1)
    for rank in range(2):
        run.log_path(rank).write_text("".join(f"line {number}\n" for number in range(100)) + "torn")
    assert verbs("logs", "run-1", "-n", 2).stdout.splitlines() == [
        f"rank-0000{rank}  line {number}" for rank in range(2) for number in (98, 99)
    ]
    assert len(verbs("logs", "run-1", "--rank", "0").stdout.splitlines()) == 100
    assert verbs("logs", "run-1", "--number", 0).stdout == ""
    assert len(verbs("logs", "run-1", "-n", 1000, "--rank", 0).stdout.splitlines()) == 100


def test_lines_longer_than_what_is_read_at_once_are_whole(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craton.orchestration.watching.logs.READ_BYTES", 7)
    run = ended_run(verbs.root, "run-1", age=1)
    run.log_path(0).write_text("a line that is long\n\nshort\n")
    for options in ([], ["-n", 3]):
        assert verbs("logs", "run-1", "--rank", 0, *options).stdout == "a line that is long\n\nshort\n"


def test_lines_have_the_time_at_which_the_agent_saw_them(verbs: Verbs) -> None:
    verbs("run", verbs.job(nodes=1, STEPS=3))
    run = verbs.run()
    printed = verbs("logs", "count", "--timestamps", "--json").stdout.splitlines()
    stamps = [json.loads(line)["time"] for line in printed]
    assert stamps, "it prints its steps"
    began = json.loads(run.events_path("node-0").read_text().splitlines()[0])["time"]
    assert all(began - 1 <= stamp <= time.time() for stamp in stamps)
    assert stamps == sorted(stamps)
    first = verbs("logs", "count", "-t", "--rank", 0, "-n", 1).stdout
    assert time.strptime(first[:19], "%Y-%m-%d %H:%M:%S")


def test_a_line_was_printed_before_the_first_note_that_covers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path, "noted")
    times = LogTimes(run, "node-0")
    for moment, text in ((10.0, "one\n"), (20.0, ""), (30.0, "two\nthree\n")):
        monkeypatch.setattr("craton.telemetry.node.log_times.time.time", lambda moment=moment: moment)
        with open(run.log_path(0), "a") as log:
            log.write(text)
        times.note([0])
    times.close()
    clock = LogClock(run)
    assert [clock.printed_at("rank-00000", end) for end in (4, 8, 14, 15)] == [10.0, 30.0, 30.0, None]
    assert len((run.path / "logs" / "times-node-0.jsonl").read_text().splitlines()) == 2, (
        "what did not grow is not noted"
    )
