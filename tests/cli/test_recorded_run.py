"""A run directory that an earlier Craton recorded, before modules moved into packages: every verb still opens it.

recorded_run/before-moves was stopped at step 24 of 40, after rank 1 was killed once; names of its machine are made up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
from run_verbs import Verbs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import read_launch
from craton.orchestration.watching import wait_for_agents
from craton.telemetry import RunDirectory, summarize

RECORDED = Path(__file__).parent / "recorded_run" / "before-moves"


@pytest.fixture
def recorded(verbs: Verbs) -> RunDirectory:
    run = verbs.run(RECORDED.name)
    copytree(RECORDED, run.path)
    run.secret_path.chmod(0o600)  # git keeps no such mode
    return run


def test_it_is_listed_explained_and_its_logs_are_printed(verbs: Verbs, recorded: RunDirectory) -> None:
    (row,) = verbs.json("ps")
    assert (row["name"], row["state"], row["step"], row["steps"]) == ("before-moves", "stopped", 24, 40)
    why = verbs.json("why", "before-moves")
    assert why["sentence"] == "before-moves is stopped: stopped after step 24, as asked"
    logs = verbs("logs", "before-moves")
    assert "step 12: going on 0.4 s after the failure, from step 11 of peer" in logs.stdout
    assert "training stopped at step 24" in logs.stdout


def test_it_is_resumed_to_its_end(verbs: Verbs, recorded: RunDirectory) -> None:
    assert "schema" not in recorded.job_path.read_text()
    outcome = verbs("resume", "before-moves")
    assert outcome.returncode == 0, outcome.stderr
    summary = summarize(recorded)
    assert (summary.state, summary.step) == ("done", 40)
    assert recorded.job_path.read_text().startswith("schema: 1\nname: before-moves\n")
    assert json.loads(recorded.launch_path.read_text())["schema"] == 1
    log = verbs("logs", "before-moves").stdout
    assert "step 25/40" in log or "step 26/40" in log, "it went on from the checkpoint"


@pytest.mark.slow
def test_its_checkpoint_is_exported(verbs: Verbs, recorded: RunDirectory) -> None:
    folder, tokenizer = verbs.folder / "model", verbs.folder / "tokenizer"
    tokenizer.mkdir()
    words = WordLevel({f"word{number}": number for number in range(64)}, unk_token="word0")
    Tokenizer(words).save(str(tokenizer / "tokenizer.json"))  # the job's data had none
    exported = verbs("export", "before-moves", folder, "--tokenizer", tokenizer)
    assert exported.returncode == 0, exported.stderr
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 16
    assert (folder / "model.safetensors").stat().st_size > 2 * 3632, "3,632 parameters in bf16"


@pytest.mark.slow
def test_what_was_submitted_before_an_upgrade_starts_after_it(verbs: Verbs, recorded: RunDirectory) -> None:
    """As a scheduler does: agents, started in a run directory that holds what the earlier Craton wrote, and no more."""
    run = RunDirectory.create(verbs.root, "queued")
    for path in (run.job_path, run.plan_path, run.launch_path):
        text = (recorded.path / path.name).read_text()
        text = text.replace("/usr/bin/python3", sys.executable).replace("/home/user/runs/before-moves", str(run.path))
        path.write_text(text.replace("/home/user", str(verbs.folder)))
    assert '"craton.ml.nursery"' in run.launch_path.read_text()
    launch = read_launch(run)
    agents = [subprocess.Popen([*launch.agent_command, str(number)]) for number in range(2)]
    for agent in agents:
        assert agent.wait(PATIENCE_SECONDS) == 0
    wait_for_agents(run)
    wait_until(lambda: summarize(run).state == "stopped")
    assert summarize(run).step == 24, "CRATON_STOP_AT of its launch.json"
