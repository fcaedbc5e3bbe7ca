"""Whole runs that evaluate a suite on two ranks: killed in an evaluation, they end with the numbers of a calm one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout_runs import events, metrics, running, wait_for_end
from waiting import wait_until

from craton.api import Run
from craton.job import Job, parse_job
from craton.ml.data.tokenizer import train_bpe
from craton.ml.evaluation import read_results
from craton.orchestration import living_agents
from craton.orchestration.start import kill_run
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.node import read_status

STEPS, EVERY = 6, 2


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))


def suite_job(folder: Path, name: str, more: str = "") -> Job:
    """Two ranks with a shard each, on a suite that random bytes solve about as often as not."""
    if not (folder / "tokenizer").exists():
        train_bpe([], 259, folder / "tokenizer")
        (folder / "text.txt").write_text("What is 1 + 2? Answer: 3\n" * 400, encoding="utf-8")
        rows = [{"question": f"What is {number}?", "answer": r"[\x00-\x50]$"} for number in range(64)]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "bytes.yaml").write_text(
            'data: {path: problems.jsonl}\ntemplate: "{question}"\nreward: regex\nverify: {workers: 2}\nanswer: text\n'
            "sampling: {max_tokens: 48, samples: 4, temperature: 1.0}\n",
            encoding="utf-8",
        )
    return parse_job(
        f"""
        name: {name}
        kind: pretrain
        model: {{name: tiny, layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, vocab: 260, max_sequence: 96}}
        data: {{path: {folder / "text.txt"}, tokenizer: {folder / "tokenizer"}, sequence: 32}}
        train:
          global_batch_sequences: 8
          steps: {STEPS}
          precision: fp32
          learning_rate: 1e-2
          evaluate: {{every_steps: {EVERY}, suite: {folder / "bytes.yaml"}}}
        cluster: local x 2
        layout: {{fsdp: 2, micro_batch: 4}}
        checkpoint: {{tiers: [{{to: shared, every_steps: 1}}]}}
        {more}
        """
    )


Curve = dict[int, float]


def numbers_of(run: RunDirectory) -> tuple[Curve, Curve]:
    """Losses and accuracies by step."""
    lines = [line for line in metrics(run) if line.get("rank") == 0]
    losses, accuracies = (
        {line["step"]: line[name] for line in lines if name in line} for name in ("run_loss", "run_evaluation_accuracy")
    )
    return losses, accuracies


def answers_of(run: RunDirectory) -> dict[tuple[str, int], list[str]]:
    results = read_results(run.path / "evaluations" / "problems.jsonl")
    return {(result.settings, result.problem): [sample.text for sample in result.samples] for result in results}


def calm_numbers(folder: Path, name: str) -> tuple[tuple[Curve, Curve], list[list[str]]]:
    with running(suite_job(folder, name)) as run:
        wait_for_end(run)
        losses, accuracies = numbers_of(run)
        assert sorted(losses) == list(range(1, STEPS + 1))
        assert sorted(accuracies) == [2, 4, 6]
        assert all(0 < accuracy < 1 for accuracy in accuracies.values())
        return (losses, accuracies), list(answers_of(run).values())


@pytest.mark.slow
def test_a_rank_that_is_killed_in_an_evaluation_costs_no_number(tmp_path: Path) -> None:
    calm, answers = calm_numbers(tmp_path, "calm")
    with running(suite_job(tmp_path, "killed", f'chaos: ["kill rank=1@step={STEPS},during=evaluate"]')) as run:
        wait_for_end(run)
        assert len(events(run, "recovered")) == 1
        assert numbers_of(run) == calm
        assert sorted(answers_of(run).values()) == sorted(answers)
        entries = read_json(run.path / "evaluations" / "evaluation.json")["strategies"]
        assert [entry["checkpoint"] for entry in entries] == [2, 4, 6]


@pytest.mark.slow
def test_a_run_that_is_killed_in_an_evaluation_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    calm, answers = calm_numbers(tmp_path, "calm")
    with running(suite_job(tmp_path, "killed")) as run:

        def is_evaluating() -> bool:
            statuses = [read_status(run, node) for node in ("node-0", "node-1")]
            ranks = [rank for status in statuses if status is not None for rank in status.ranks]
            return any(rank.kind == "evaluate" and rank.step >= EVERY for rank in ranks)

        wait_until(is_evaluating, "an evaluation", 300)
        kill_run(run)
        wait_until(lambda: not living_agents(run), "its agents end")
        assert not run.has("DONE")
        Run(run).resume()
        wait_for_end(run)
        assert numbers_of(run) == calm
        assert sorted(answers_of(run).values()) == sorted(answers)
