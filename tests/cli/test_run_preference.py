"""Preference tuning as a user runs it: bad data is refused in one line, and a killed rank changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_verbs import Verbs

from craton.api import run
from craton.job import load_job
from craton.ml.data.tokenizer import train_bpe
from craton.orchestration.watching import wait_for_agents
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.files import read_lines

NUMBERS = "{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 259, tied_embeddings: true}"
JOB = """\
kind: dpo
model: {model}
data: {{path: pairs.jsonl, tokenizer: ./bytes, sequence: 32{data}}}
preference: {preference}
train: {{global_batch_sequences: 4, steps: 30, precision: fp32, learning_rate: 1e-3, initialize: random}}
cluster: {cluster}
"""


@pytest.fixture
def write(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "cache"))
    train_bpe([""], 259, verbs.folder / "bytes")

    def write(rows: list[Any], cluster: str = "local", preference: str = "{}", data: str = "") -> Path:
        (verbs.folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = JOB.format(model=NUMBERS, cluster=cluster, preference=preference, data=data)
        (verbs.folder / "prefer.yaml").write_text(text)
        return verbs.folder / "prefer.yaml"

    return write


def row(number: int) -> dict[str, str]:
    return {"prompt": f"{number}:", "chosen": "yes" * (number % 3 + 1), "rejected": "no"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [row(1), {**row(2), "rejected": row(2)["chosen"]}],
            {},
            "pairs.jsonl:2: `chosen` equals `rejected`, so there is nothing to prefer (1 of 2 rows cannot be used; up",
        ),
        ([{"question": "a", "chosen": "b"}], {}, "pairs.jsonl:1: has no field 'rejected'; its fields are"),
        (
            [row(1)],
            {"data": ", columns: {question: prompt}"},
            "data.columns: 'question' is no field of a pair; allowed",
        ),
        ([row(1)], {"data": ", columns: {prompt: asked}"}, "pairs.jsonl:1: has no field 'asked', which data.columns"),
        ([{**row(1), "prompt": "p" * 60}], {}, "no pair has both completions within data.sequence 32"),
        ([row(1)], {"preference": "{reference: gone}"}, "gone has no weights; give a folder with a config.json"),
    ],
)
def test_bad_pairs_are_refused_in_one_line(
    verbs: Verbs, write: Any, rows: list[Any], options: dict[str, str], message: str
) -> None:
    write(rows, **options)
    refused = verbs("run", "prefer.yaml", "--yes")
    assert refused.returncode == 2, refused.stderr
    assert message in " ".join(refused.stderr.split())
    assert len([line for line in refused.stderr.splitlines() if "error" in line]) == 1
    assert not list((verbs.root / "prefer").glob("events/*.jsonl"))


def test_pairs_of_a_function_are_found_beside_the_job_file(verbs: Verbs, write: Any) -> None:
    """From another folder, and refused like those of files."""
    beside = verbs.folder / "beside"
    beside.mkdir()
    text = write([]).read_text().replace("path: pairs.jsonl", "source: 'equal_pairs:pairs'").replace("./", "../")
    (beside / "prefer.yaml").write_text(text)
    (beside / "equal_pairs.py").write_text(
        "def pairs(job):\n    return lambda index: {'prompt': 'a', 'chosen': 'b', 'rejected': 'b'}\n"
    )
    refused = verbs("run", "beside/prefer.yaml", "--yes")
    assert refused.returncode == 2
    assert "data.source equal_pairs:pairs: pair 0: `chosen` equals `rejected`" in " ".join(refused.stderr.split())


def losses(started: RunDirectory) -> dict[int, float]:
    lines = [line for path in (started.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0]]
    return {line["step"]: line["run_loss"] for line in lines if "run_loss" in line}


def events(started: RunDirectory, name: str) -> list[dict[str, Any]]:
    lines = [line for path in (started.path / "events").glob("*.jsonl") for line in read_lines(path)[0]]
    return [line for line in lines if line["event"] == name]


@pytest.mark.slow
def test_a_killed_rank_changes_no_bit_and_computes_no_reference_again(verbs: Verbs, write: Any) -> None:
    rows = [row(number) for number in range(200)]
    calm = run(load_job(write(rows, cluster="local x 2")), "calm").directory
    wait_for_agents(calm, 240)
    text = write(rows, cluster="local x 2").read_text() + "chaos: ['kill rank=1@step=12', 'kill rank=0@step=20']\n"
    (verbs.folder / "prefer.yaml").write_text(text)
    for path in (verbs.folder / "cache").rglob("reference-*"):
        path.unlink()
    broken = run(load_job("prefer.yaml"), "broken").directory
    wait_for_agents(broken, 240)
    assert summarize(broken).state == "done"
    assert len(events(broken, "recovered")) >= 1
    assert len(events(broken, "reference")) == 1
    assert losses(broken) == losses(calm)
    assert len(losses(calm)) == 30


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_nodes_and_with_more_steps(verbs: Verbs, write: Any) -> None:
    write([row(number) for number in range(2000)], cluster="local x 2")
    assert verbs("run", "prefer.yaml", "--yes", "--stop-at", "10").returncode == 0
    resumed = verbs("resume", "prefer", "--cluster", "local x 1", "--steps", "40", "--yes")
    assert resumed.returncode == 0, resumed.stderr
    done = verbs.run("prefer")
    assert summarize(done).state == "done"
    assert sorted(losses(done)) == list(range(1, 41))
    first, more = events(done, "reference")
    assert more["pairs"] < first["pairs"], "only pairs of the further steps"
    assert losses(done)[40] < losses(done)[1]
