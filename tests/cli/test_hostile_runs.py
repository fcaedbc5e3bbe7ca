"""Runs on a root that others write to: what they plant makes no verb wait, die, leave the run or obey."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_verbs import ForkedVerbs
from planting import KINDS, SECRET, plant, tree
from run_verbs import Verbs
from waiting import PATIENCE_SECONDS

from craton.observability.web import TopView, frame_json
from craton.observability.web.sources import CachedVerdict
from craton.printable import printable, printable_line
from craton.telemetry import RunDirectory

PLANTED = [
    *("job.yaml", "plan.json", "launch.json", "agents.json", "backend.json", "summary.json", "STOP", "FATAL"),
    *("events/node-0.jsonl", "metrics/node-0.jsonl", "ledger/node-0.jsonl", "heartbeat/node-0", "status/node-0.json"),
    *("generations/000000.json", "logs/rank-00000.log", "logs/times-node-0.jsonl", "logs/agent-node-0.log"),
]
CLEAR_SCREEN = "\x1b[2J\x1b]0;title\x07"


def make_run(root: Path, name: str) -> RunDirectory:
    run = RunDirectory.create(root, name)
    launch = {"generation": 0, "nodes": ["node-0"], "ranks_per_node": 1, "command": ["true"]}
    run.launch_path.write_text(json.dumps(launch))
    run.plan_path.write_text(json.dumps({"steps": 3, "kind": "pretrain"}))
    run.job_path.write_text("name: x\nkind: command\ncommand: ['true']\ncluster: local x 1\n")
    run.log_path(0).write_text("hello\n")
    run.metrics_path("node-0").write_text('{"time": 1, "rank": 0, "step": 1, "generation": 0, "run_loss": 2.5}\n')
    return run


def craton(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own, so that one that waits can be ended."""
    environment = {**os.environ, "CRATON_RUNS": str(root)}
    command = [sys.executable, "-m", "craton", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE_SECONDS, check=False
    )


@pytest.mark.parametrize("plant", ["FIFO", "link", "folder", "nested", "terabyte"])
def test_ps_goes_past_whatever_is_planted(tmp_path: Path, plant: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"steps": 987654321}\n')
    make_run(tmp_path / "runs", "good")
    for number, name in enumerate(PLANTED):
        path = make_run(tmp_path / "runs", f"bad-{number}").path / name
        path.unlink(missing_ok=True)
        match plant:
            case "FIFO":
                os.mkfifo(path)
            case "link":
                path.symlink_to(secret)
            case "folder":
                path.mkdir()
            case "nested":
                path.write_text('{"a":' * 50_000)
            case "terabyte":
                with open(path, "wb") as file:
                    file.truncate(1 << 40)
    listed = craton(tmp_path / "runs", "ps")
    assert listed.returncode == 0, listed.stderr
    rows = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith(("good ", "bad-"))]
    assert {"good", *(f"bad-{number}" for number in range(len(PLANTED)))} <= {row.rstrip(":") for row in rows}
    assert "987,654,321" not in listed.stdout
    if plant == "FIFO":
        assert f"{PLANTED.index('events/node-0.jsonl')}/events/node-0.jsonl is a FIFO, not a regular" in listed.stdout
    if plant == "link":
        assert f"bad-{PLANTED.index('plan.json')}/plan.json is a symbolic link, not a regular file" in listed.stdout


def test_what_was_passed_over_is_told_in_json_too(verbs: Verbs) -> None:
    run = make_run(verbs.root, "bad")
    os.mkfifo(run.events_path("node-0"))
    [told] = verbs.json("ps")
    assert told["unread"] == [f"{run.events_path('node-0')} is a FIFO, not a regular file"]


def test_logs_stay_inside_the_run(verbs: Verbs, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the key is 4711\n")
    run = make_run(verbs.root, "linked")
    run.log_path(1).symlink_to(tmp_path / "secret")
    os.mkfifo(run.log_path(2))
    said = verbs("logs", "linked")
    assert said.returncode == 0
    assert said.stdout.splitlines() == [
        "rank-00000  hello",
        f"rank-00001  (this log cannot be read: {run.log_path(1)} is a symbolic link, not a regular file)",
        f"rank-00002  (this log cannot be read: {run.log_path(2)} is a FIFO, not a regular file)",
    ]
    for path in (run.path / "logs").iterdir():
        path.unlink()
    (run.path / "logs").rmdir()
    (run.path / "logs").symlink_to(tmp_path)
    (tmp_path / "rank-00000.log").write_text("the key is 4711\n")
    refused = verbs("logs", "linked")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "logs is a symbolic link, not a folder" in refused.stderr


@pytest.mark.parametrize("verb", ["resume", "stop", "why"])
def test_verbs_of_one_run_do_not_wait_for_a_pipe(tmp_path: Path, verb: str) -> None:
    run = make_run(tmp_path / "runs", "piped")
    for name in ("job.yaml", "launch.json", "plan.json", "agents.json", "backend.json", "STOP", "launch.lock"):
        (run.path / name).unlink(missing_ok=True)
        os.mkfifo(run.path / name)
    said = craton(tmp_path / "runs", verb, "piped")
    assert "Traceback" not in said.stderr
    assert said.returncode in (0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_shown_and_removed_past_whatever_is_planted(verbs: Verbs, tmp_path: Path, kind: str) -> None:
    """For top, rm and export, with the files that `ps` is not tested with; in one run each."""
    for name in ("metrics", "metrics/node-0.jsonl", "ledger/node-0.jsonl", "generations", "heartbeat", "checkpoints"):
        run = make_run(verbs.root, "planted")
        run.generation_path(0).write_text("{}")
        (run.path / "checkpoints" / "shared").mkdir(parents=True, exist_ok=True)
        outside = tmp_path / "outside" / name.replace("/", "-")
        outside.mkdir(parents=True)
        plant(run.path / name, kind, outside)
        before = tree(outside)
        view = TopView(run, examine=lambda run, prometheus: CachedVerdict("unknown", "not examined"))
        shown = json.dumps(frame_json(view.look()))
        view.close()
        assert SECRET not in shown
        if kind in ("FIFO", "link") and name.startswith("metrics"):
            assert f"{name} is a" in shown
        assert verbs("rm", "planted", "--yes").returncode == 0
        assert not run.path.exists()
        assert tree(outside) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_verb_waits_dies_or_leaves_the_run_whatever_is_planted(verbs: Verbs, tmp_path: Path, kind: str) -> None:
    """Every file and folder of a run in turn, in a process of its own: two verbs each, others for each kind."""
    template = make_run(tmp_path / "template", "planted")
    template.generation_path(0).write_text("{}")
    template.ledger_path("node-0").write_text("{}\n")
    template.events_path("node-0").write_text('{"time": 1, "event": "started"}\n')
    (template.path / "checkpoints" / "shared" / "step-00000002").mkdir(parents=True)
    (template.path / "checkpoints" / "shared" / "step-00000002" / "COMPLETE").write_text("{}")
    (template.path / "DONE").touch()
    names = sorted(str(path.relative_to(template.path)) for path in template.path.rglob("*"))
    commands = [("ps",), ("why", "planted"), ("top", "planted", "--once"), ("logs", "planted"), ("stop", "planted")]
    commands += [("resize", "planted", "1"), ("export", "planted", "out"), ("sample", "planted", "--prompt", "a")]
    commands += [("rm", "planted", "--yes")]
    with ForkedVerbs() as forked:
        for number, name in enumerate([*names, "STOP", "FATAL", "backend.json", "agents.json", "launch.lock"]):
            root, outside = tmp_path / f"runs-{number}", tmp_path / f"outside-{number}"
            shutil.copytree(template.path, root / "planted")
            plant(root / "planted" / name, kind, outside)
            before = tree(outside)
            turn = number + KINDS.index(kind)
            for command in (commands[turn % len(commands)], commands[(turn + 4) % len(commands)]):
                if not (root / "planted").exists():  # removed
                    break
                said = forked(root, *command)
                case = f"{command[0]} with {name}: {said}"
                assert said.code in (0, 1, 2), case
                assert "Traceback" not in said.output, case
                assert SECRET not in said.output, case
                assert said.max_bytes < 2 << 30, case
                assert tree(outside) == before, case


def test_a_run_starts_past_pipes_in_the_place_of_its_logs(verbs: Verbs) -> None:
    """What would go there is lost, and the run is not."""
    run = make_run(verbs.root, "piped")
    (run.path / "code").mkdir()  # what its command runs in
    for name in ("rank-00000.log", "agent-node-0.log"):
        (run.path / "logs" / name).unlink(missing_ok=True)
        os.mkfifo(run.path / "logs" / name)
    said = craton(verbs.root, "resume", "piped")
    assert "Traceback" not in said.stderr
    assert run.has("DONE"), said.stdout + said.stderr


def test_escape_sequences_are_written_out(verbs: Verbs) -> None:
    run = make_run(verbs.root, "plain")
    run.log_path(0).write_text(f"{CLEAR_SCREEN}\x1b[32mgreen\x1b[0m\rover\n")
    run.mark("FATAL", f"it {CLEAR_SCREEN} failed")
    run.path.rename(verbs.root / f"odd{CLEAR_SCREEN}\udcff")
    listed, logs = verbs("ps"), verbs("logs", f"odd{CLEAR_SCREEN}\udcff", "--rank", "0")
    why = verbs("why", f"odd{CLEAR_SCREEN}\udcff")
    missing = verbs("logs", f"missing{CLEAR_SCREEN}")
    for said in (listed.stdout, why.stdout, missing.stderr):
        assert "\x1b" not in said
        assert "\\x1b[2J\\x1b]0;title" in said
    assert logs.stdout.splitlines() == ["\\x1b[2J\\x1b]0;title\\x07\x1b[32mgreen\x1b[0m\x1b[0m", "over"]


def test_text_without_control_characters_stays_as_it_is() -> None:
    for text in ("plain", "naïve – 測試 ✓", "tab\tand\nline"):
        assert printable(text) == printable_line(text) == text
    assert printable("a\u202eb\ud800\x9b") == "a\\u202eb\\ud800\\x9b"
