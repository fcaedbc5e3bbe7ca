"""The example of all stages: its data hold what they say, its jobs are valid, and its page shows its numbers."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from craton.job import load_job
from craton.ml.data import load_tokenizer
from craton.telemetry import RunDirectory

FOLDER = Path(__file__).parents[1] / "examples" / "lifecycle"
STAGES = ("pretrain", "sft", "dpo", "grpo")


@pytest.fixture(scope="module")
def lifecycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make lifecycle` trains in, with its data."""
    folder: Path = tmp_path_factory.mktemp("lifecycle")
    for path in (FOLDER / "config.json", *(FOLDER / f"{stage}.yaml" for stage in STAGES)):
        shutil.copy(path, folder)
    example("sums").write(folder / "data")
    return folder


def example(name: str) -> Any:
    """A module of the example, which is no package."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def rows_of(lifecycle: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (lifecycle / "data" / f"{name}.jsonl").read_text().splitlines()]


def is_right(prompt: str, answer: str) -> bool:
    return sum(map(int, prompt.rstrip("=").split("+"))) == int(answer[::-1])


def test_no_sum_is_in_two_files(lifecycle: Path) -> None:
    sums = {name: [row["prompt"] for row in rows_of(lifecycle, name)] for name in ("test", "sft", "dpo", "rl")}
    sums["pretrain"] = [row["text"].partition("=")[0] + "=" for row in rows_of(lifecycle, "pretrain")]
    every = [prompt for prompts in sums.values() for prompt in prompts]
    assert len(set(every)) == len(every)
    assert len(sums["test"]) == 1000
    lengths = {tuple(len(str(int(number))) for number in prompt.rstrip("=").split("+")) for prompt in sums["rl"]}
    assert lengths == {(2, 2), (2, 3), (3, 2), (3, 3)}


def test_answers_are_right_where_they_should_be(lifecycle: Path) -> None:
    for name in ("test", "rl"):
        assert all(is_right(row["prompt"], row["answer"]) for row in rows_of(lifecycle, name))
    pairs = rows_of(lifecycle, "dpo")
    assert all(is_right(row["prompt"], row["chosen"]) for row in pairs)
    assert not any(is_right(row["prompt"], row["rejected"]) for row in pairs)
    hasty = [is_right(row["prompt"], row["completion"]) for row in rows_of(lifecycle, "sft")]
    assert 0.5 < sum(hasty) / len(hasty) < 0.65  # half of the answers forget carries, and some sums have none


def test_samples_have_few_tokens_and_the_model_few_parameters(lifecycle: Path) -> None:
    tokenizer = load_tokenizer(lifecycle / "data" / "tokenizer")
    assert tokenizer.get_vocab_size() == 259
    row = rows_of(lifecycle, "rl")[0]
    assert len(tokenizer.encode(row["prompt"] + row["answer"]).ids) + 1 <= 24
    shape = load_job(lifecycle / "pretrain.yaml").model_shape
    assert shape is not None
    assert shape.parameters <= 500_000


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_valid(stage: str, lifecycle: Path) -> None:
    job = load_job(lifecycle / f"{stage}.yaml")
    assert job.name == stage


def test_the_page_shows_the_numbers_of_every_stage(tmp_path: Path) -> None:
    """From metrics written here: the stages themselves take minutes (`make lifecycle`)."""
    page, accuracy = example("page"), example("accuracy")
    stages = []
    for number, name in enumerate(STAGES):
        path = RunDirectory(tmp_path / name).metrics_path("node-0")
        path.parent.mkdir(parents=True)
        metric = page.CURVES[name][0]
        path.write_text("".join(json.dumps({"step": step, metric: step / 4}) + "\n" for step in (1, 2)))
        found = accuracy.Accuracy([number / 4, number / 4], [1.0, 0.0])
        stages.append(page.Stage(name, 10.0 * number, found, RunDirectory(tmp_path / name)))
    page.write_page(tmp_path / "page.html", stages, 0.97)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;section" not in text
    assert "loss: 0.25 → 0.50" in text
    assert "right answers at temperature 1: 0% → 75%" in text
    assert all(f'id="{name}"' in text for name in ("accuracy", *STAGES))
