"""A real sweep of six tiny trainings: one is killed and comes back, one fails for good, and the table says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_verbs import Verbs

JOB = """\
name: six
kind: pretrain
model: {layers: 2, hidden: 32, ffn_hidden: 64, heads: 2, vocab: 64}
data: {source: "craton.ml.data.patterns:walks", sequence: 32}
train: {global_batch_sequences: 4, steps: 12, precision: fp32}
cluster: local
layout: {micro_batch: 4}
sweep:
  parallel: 2
  list:
    - {name: slow, train.learning_rate: 1e-4}
    - {name: fast, train.learning_rate: 3e-2}
    - {name: killed, train.learning_rate: 1e-3}
    - {name: wide, train.learning_rate: 1e-2, model.hidden: 64}
    - {name: broken, objective: "own:fails"}
    - {name: seeded, train.learning_rate: 1e-2, train.seed: 7}
"""


@pytest.mark.slow
def test_six_trainings_with_a_kill_and_a_failure(tmp_path: Path, verbs: Verbs) -> None:
    (tmp_path / "own.py").write_text("def fails(*arguments):\n    raise ValueError('no loss today')\n")
    (tmp_path / "six.yaml").write_text(JOB)
    ran = verbs("run", tmp_path / "six.yaml", "--chaos", "kill member=killed@step=5")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads((verbs.root / "six" / "sweep.json").read_text())
    rows = {row["name"]: row for row in result["members"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        **dict.fromkeys(("slow", "fast", "killed", "wide", "seeded"), "done"),
        "broken": "failed",
    }
    assert "no loss today" in rows["broken"]["message"]
    assert all(rows[name]["step"] == 12 for name in rows if name != "broken")
    assert result["best"] in rows
    assert f"best: {result['best']}" in ran.stdout
    assert "no loss today" in ran.stdout
    assert (verbs.root / "six" / "sweep.html").is_file()
    events = (verbs.root / "six" / "events").glob("*.jsonl")
    changes = [json.loads(line) for path in events for line in path.read_text().splitlines()]
    assert any(line.get("member") == "killed" and line.get("state") == "restarting" for line in changes)
