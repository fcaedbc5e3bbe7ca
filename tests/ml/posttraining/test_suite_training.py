"""`train.evaluate.suite` in the ranks of a training: every kind and layout, and nothing of it left in the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from rollout_jobs import FOLDER, byte_tokenizer, job_text, rollout_run

from craton.ml.data import tokenize
from craton.ml.evaluation import EvaluationError, read_results
from craton.ml.posttraining import build as posttraining
from craton.ml.training import RankIdentity, SetupError, Trainer
from craton.ml.training import build as training
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import read_lines
from craton.telemetry.rank import LedgerClock, Recorder

torch.set_num_threads(1)

ACCURACY = "run_evaluation_accuracy"
TINY = "{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 260, max_sequence: 96}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a tokenizer of bytes, and a suite that random bytes solve about as often as not."""
    folder = tmp_path_factory.mktemp("suites")
    byte_tokenizer(folder / "tokenizer")
    (folder / "text.txt").write_text("What is 1 + 2? Answer: 3\n" * 400, encoding="utf-8")
    tokenize([folder / "text.txt"], folder / "shards", tokenizer=folder / "tokenizer", workers=1)
    rows = [{"question": f"What is {number}?", "answer": r"[\x00-\x50]$"} for number in range(15)]
    rows.append({"question": "too long " * 20, "answer": "x"})
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "bytes.yaml").write_text(
        'data: {path: problems.jsonl}\ntemplate: "{question}"\nreward: regex\nverify: {workers: 1}\nanswer: text\n'
        "sampling: {max_tokens: 5, samples: 3, temperature: 1.0}\n",
        encoding="utf-8",
    )
    return folder


def text_of(folder: Path, layout: str = "{}", evaluate: str | None = "", kind: str = "pretrain", more: str = "") -> str:
    suite = "" if evaluate is None else f", evaluate: {{every_steps: 2, suite: {folder / 'bytes.yaml'}{evaluate}}}"
    return (
        f"name: trained\nkind: {kind}\nmodel: {TINY}\ncluster: local\nlayout: {layout}\n"
        f"data: {{path: {folder / 'shards'}, sequence: 32{more}}}\n"
        f"train: {{global_batch_sequences: 4, steps: 4, precision: fp32, learning_rate: 1e-2{suite}}}\n"
    )


def train(path: Path, rank: int, world: int, stop_at: int | None = None) -> str:
    """Train a run on this rank."""
    run = RunDirectory(path)
    recorder = Recorder("node-0", rank, 0, run)
    place = RankIdentity(rank, world, rank, FOLDER, stop_at)
    return Trainer(posttraining.build(run, place, recorder, LedgerClock()), stop_at).fit()


def train_in_gang(path: Path, world: int) -> str:
    return train(path, torch.distributed.get_rank() if world > 1 else 0, world)


def metrics_of(run: RunDirectory, name: str) -> dict[int, float]:
    found = {}
    for line in read_lines(run.metrics_path("node-0"))[0]:
        if line.get("rank") == 0 and name in line:
            found[line["step"]] = line[name]
    return found


def answers_of(run: RunDirectory) -> dict[tuple[str, int], list[str]]:
    results = read_results(run.path / "evaluations" / "problems.jsonl")
    return {(result.settings, result.problem): [sample.text for sample in result.samples] for result in results}


def test_training_does_not_notice_its_evaluations_and_equal_seeds_give_equal_answers(
    tmp_path: Path, folder: Path
) -> None:
    plain, first, second = (
        rollout_run(tmp_path, name, text_of(folder, evaluate=suite))
        for name, suite in (("plain", None), ("first", ""), ("second", ""))
    )
    for run in (plain, first, second):
        torch.manual_seed(7)
        assert train(run.path, 0, 1) == "done"
    assert metrics_of(first, "run_loss") == metrics_of(plain, "run_loss")
    accuracies = metrics_of(first, ACCURACY)
    assert list(accuracies) == [2, 4], "every two steps"
    assert accuracies == metrics_of(second, ACCURACY)
    assert answers_of(first) == answers_of(second)
    assert not metrics_of(plain, ACCURACY)
    for step, accuracy in accuracies.items():
        low, high = (metrics_of(first, f"{ACCURACY}_{end}")[step] for end in ("low", "high"))
        assert 0 < low < accuracy < high < 1
    assert metrics_of(first, "run_evaluation_problems") == {2: 16, 4: 16}
    assert metrics_of(first, "run_evaluation_tokens")[2] == pytest.approx(15 * 3 * 5, abs=30)
    document = read_json(first.path / "evaluations" / "evaluation.json")
    assert [entry["checkpoint"] for entry in document["strategies"]] == [2, 4]
    (error,) = document["strategies"][0]["errors"]
    assert "the prompt has" in error["error"], "a prompt that does not fit has no verdict, and is not scored 0"


@pytest.mark.parametrize(
    "layout",
    [
        "{fsdp: 2}",
        pytest.param("{tp: 2}", marks=pytest.mark.slow),
        pytest.param("{cp: 2}", marks=pytest.mark.slow),
        pytest.param("{pp: 2}", marks=pytest.mark.slow),
    ],
)
def test_every_layout_answers_as_one_rank(tmp_path: Path, folder: Path, gang: Gang, layout: str) -> None:
    alone, shared = (
        rollout_run(tmp_path, name, text_of(folder, text).replace("cluster: local", f"cluster: {cluster}"))
        for name, text, cluster in (("alone", "{}", "local"), ("shared", layout, "local x 2"))
    )
    gang.run(train_in_gang, alone.path, 1, ranks=1)
    gang.run(train_in_gang, shared.path, 2, ranks=2)
    assert len(answers_of(shared)) == 32
    assert metrics_of(shared, ACCURACY) == pytest.approx(metrics_of(alone, ACCURACY), abs=0.1)
    same = [key for key, texts in answers_of(alone).items() if answers_of(shared).get(key) == texts]
    assert len(same) > 24, "but for rounding, the same weights give the same answers"


def test_grpo_and_its_validation_data_beside_a_suite(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_JOB_FOLDER", str(FOLDER))
    suite = f"evaluate: {{every_steps: 2, suite: {folder / 'bytes.yaml'}, problems: 5, samples: 1}}"
    with_suite, plain = (
        rollout_run(tmp_path, name, job_text(folder / "tokenizer", steps=2, train=train_keys))
        for name, train_keys in (("with-suite", suite), ("plain", ""))
    )
    for run in (with_suite, plain):
        train(run.path, 0, 1)
    assert metrics_of(with_suite, "run_loss") == metrics_of(plain, "run_loss")
    assert metrics_of(with_suite, "run_evaluation_problems") == {2: 5}
    assert not metrics_of(with_suite, "run_validation_reward"), "a source of one's own is not validated beside a suite"


def test_validation_data_and_a_suite_are_evaluated_together(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "other.txt").write_text("What is 2 + 2? Answer: 4\n" * 100, encoding="utf-8")
    tokenize([tmp_path / "other.txt"], tmp_path / "shards", tokenizer=folder / "tokenizer", workers=1)
    run = rollout_run(tmp_path, "both", text_of(folder, more=f", validation: {tmp_path / 'shards'}"))
    train(run.path, 0, 1)
    assert list(metrics_of(run, "run_evaluation_loss")) == list(metrics_of(run, ACCURACY)) == [2, 4]


@pytest.mark.parametrize("stopped_at", [2, 4])
def test_a_stop_in_an_evaluation_is_made_up_for_at_the_resume(tmp_path: Path, folder: Path, stopped_at: int) -> None:
    calm, stopped = (rollout_run(tmp_path, name, text_of(folder)) for name in ("calm", "stopped"))
    train(calm.path, 0, 1)
    place, recorder = RankIdentity(0, 1, 0, FOLDER), Recorder("node-0", 0, 0, stopped)
    trainer = Trainer(posttraining.build(stopped, place, recorder, LedgerClock()))
    suite = trainer.parts.suite
    assert suite is not None

    class Interrupted:
        find = suite.find

        def evaluate(self, step: int, check: Any, is_leaving: Any) -> dict[str, float]:
            def stop() -> None:
                if step == stopped_at:
                    trainer.stop()

            return suite.evaluate(step, stop, is_leaving)

    trainer.parts.suite = Interrupted()
    assert trainer.fit() == "stopped", "also if its last step is done"
    assert trainer.step == stopped_at, "so that these weights are evaluated"
    assert list(metrics_of(stopped, ACCURACY)) == [step for step in (2, 4) if step < stopped_at]
    (stopped.path / "STOP").unlink(missing_ok=True)
    assert train(stopped.path, 0, 1) == "done"
    assert metrics_of(stopped, ACCURACY) == metrics_of(calm, ACCURACY)
    assert metrics_of(stopped, "run_loss") == metrics_of(calm, "run_loss")
    assert answers_of(stopped) == answers_of(calm)
    lines = len(list(read_results(stopped.path / "evaluations" / "problems.jsonl")))
    assert train(stopped.path, 0, 1) == "done"
    assert len(list(read_results(stopped.path / "evaluations" / "problems.jsonl"))) == lines, "nothing is asked again"


def test_a_suite_that_the_model_cannot_read_ends_the_run_before_its_first_step(tmp_path: Path, folder: Path) -> None:
    text = text_of(folder).replace("bytes.yaml", "chats.yaml")
    chats = folder / "chats.yaml"
    chats.write_text((folder / "bytes.yaml").read_text().replace('"{question}"', '{chat: "{question}"}'))
    run = rollout_run(tmp_path, "chats", text)
    with pytest.raises(EvaluationError, match=r"train.evaluate.suite: problem 0: .*there is no tokenizer for it"):
        train(run.path, 0, 1)
    place = RankIdentity(0, 1, 0, FOLDER)
    with pytest.raises(SetupError, match=r"needs `python -m craton.ml.posttraining RUN`"):
        training.build(run, place, Recorder("node-0", 0, 0, run), LedgerClock())
