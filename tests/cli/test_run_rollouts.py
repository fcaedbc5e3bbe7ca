"""Reinforcement learning as a user runs it: what cannot work is refused in one line, before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rollout_jobs import FOLDER, byte_tokenizer
from run_verbs import Verbs

JOB = """\
kind: grpo
model: {{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 259, tied_embeddings: true}}
data: {{path: prompts.jsonl, tokenizer: ./bytes, sequence: 24}}
policy: {policy}
rollout: {{prompts: 4, group: 4, max_tokens: 6{rollout}}}
{reward}
train: {{steps: 2, precision: fp32, initialize: random}}
verify: {{workers: 1}}
cluster: local
"""


@pytest.fixture
def write(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "cache"))
    byte_tokenizer(verbs.folder / "bytes")
    (verbs.folder / "rollout_jobs.py").write_bytes((FOLDER / "rollout_jobs.py").read_bytes())

    def write(
        prompt: str = "1+1=", policy: str = "{}", rollout: str = "", reward: str = "reward: {verifier: exact}"
    ) -> Path:
        rows = [{"prompt": prompt, "answer": "2"}, {"prompt": prompt + "?", "answer": "3"}]
        (verbs.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = JOB.format(policy=policy, rollout=rollout, reward=reward)
        (verbs.folder / "sums.yaml").write_text(text)
        return verbs.folder / "sums.yaml"

    return write


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "1" * 30}, "prompts.jsonl: all 2 prompts are longer than 18 tokens, which is what"),
        ({"reward": 'reward: "rollout_jobs:nan_reward"'}, "nan_reward returned nan; return a finite number"),
        pytest.param(
            {"reward": 'reward: "rollout_jobs:text_reward"'},
            "text_reward returned 'good' (str); return a finite number",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"reward": "reward: {verifier: exact, field: solution}"},
            "the row has no field 'solution' to compare with",
            marks=pytest.mark.slow,
        ),
        ({"reward": "reward: {verifier: exakt}"}, "'exakt' is not a verifier; allowed: exact, regex"),
        pytest.param(
            {"reward": "reward: {model: gone}"},
            "gone has no config.json; give the folder of a model",
            marks=pytest.mark.slow,
        ),
        ({"policy": "{loss: distill, teacher: gone}", "reward": ""}, "gone has no weights; give a folder"),
        ({"rollout": ", group: 1"}, "group is 1; use 2"),
        ({"rollout": ", staleness: 2"}, "mode sync always has the newest weights; remove staleness"),
        ({"rollout": ", top_p: 0.9"}, "top_p would sample from another distribution than the one that is trained"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_one_line(
    verbs: Verbs, write: Any, options: dict[str, str], message: str
) -> None:
    path = write(**options)
    if ", group: 1" in options.get("rollout", ""):
        path.write_text(path.read_text().replace("group: 4, ", ""))
    refused = verbs("run", "sums.yaml", "--yes")
    assert refused.returncode == 2, refused.stderr
    assert message in " ".join(refused.stderr.split())
    assert len([line for line in refused.stderr.splitlines() if "error" in line]) == 1
    assert not list((verbs.root / "sums").glob("events/*.jsonl"))


def test_a_job_without_rows_is_refused(verbs: Verbs, write: Any) -> None:
    path = write()
    path.write_text(path.read_text().replace("path: prompts.jsonl, ", ""))
    refused = verbs("run", "sums.yaml", "--yes")
    assert refused.returncode == 2, refused.stderr
    assert "sums.yaml:3: data: kind grpo needs path or source" in refused.stderr
    assert not (verbs.root / "sums").exists()
