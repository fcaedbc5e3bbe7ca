"""What a job needs of this machine is asked before it starts, where it runs here; a user's code is never imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from craton.job import ContentError, check_here, here, load_job

JOB = """\
kind: pretrain
model: {layers: 2, hidden: 64, heads: 2, ffn_hidden: 128, vocab: 512}
data: {path: stdlib, tokenizer: "bpe:512", sequence: 128}
train: {global_batch_sequences: 4, steps: 10}
cluster: local x 2
"""


def problems(folder: Path, text: str) -> list[str]:
    (folder / "job.yaml").write_text(text)
    try:
        check_here(load_job(folder / "job.yaml"))
    except ContentError as error:
        return [problem.removeprefix(f"{folder / 'job.yaml'}:") for problem in error.problems]
    return []


def test_a_job_that_has_what_it_needs(tmp_path: Path) -> None:
    assert problems(tmp_path, JOB) == []
    assert problems(tmp_path, JOB.replace("stdlib", "s3://bucket/tokens")) == []


@pytest.mark.parametrize("url", ["http://example.org/tokens", "https://example.org/text.jsonl", "gs://bucket/tokens"])
def test_data_at_a_url_that_is_not_read(tmp_path: Path, url: str) -> None:
    [problem] = problems(tmp_path, JOB.replace("stdlib", url))
    assert f"'{url}' is a URL, and data is read from files, folders and s3:// prefixes only; download it" in problem


def test_data_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    [problem] = problems(tmp_path, JOB.replace("stdlib", "./tokns"))
    assert problem == f"3: data.path: {tmp_path / 'tokns'} does not exist; did you mean 'tokens'?"
    [problem] = problems(tmp_path, JOB.replace("stdlib", "/absent/folder/tokens"))
    assert (
        "does not exist; the folder /absent/folder does not exist either; give a file or a folder of text or token"
        in problem
    )
    mixed = JOB.replace("stdlib", "[{path: ./tokens}, {path: ./absent}], validation: ./other")
    assert [problem.partition(":")[2].split()[0] for problem in problems(tmp_path, mixed)] == [
        "data.path:",
        "data.validation:",
    ]
    [problem] = problems(tmp_path, JOB.replace("bpe:512", "./tokenizer"))
    assert problem.startswith(f"3: data.tokenizer: {tmp_path / 'tokenizer'} does not exist")


def test_functions_are_found_without_being_imported(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "mine" / "losses.py").write_text("raise SystemExit('imported')\ndef weighted(batch): ...\n")
    assert problems(tmp_path, f"{JOB}objective: mine.losses:weighted\n") == []
    [problem] = problems(tmp_path, f"{JOB}objective: mine.losses:wieghted\n")
    assert problem == (
        f"6: objective: {tmp_path / 'mine/losses.py'} defines no 'wieghted' at the top level; did you mean 'weighted'?"
    )
    [problem] = problems(tmp_path, f"{JOB}objective: mine.loss:weighted\n")
    assert problem == (
        f"6: objective: module 'mine.loss' is neither in {tmp_path} nor installed; write mine/loss.py next to the job "
        "file, or install the package"
    )
    assert problems(tmp_path, f"{JOB}objective: json:dumps\n") == []
    (tmp_path / "mine" / "losses.py").write_text("from other import *\n")
    assert problems(tmp_path, f"{JOB}objective: mine.losses:anything\n") == [], "only an import could tell"


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "tensorboard"])
def test_a_tracker_that_is_not_installed(tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = here.find_spec
    monkeypatch.setattr(here, "find_spec", lambda name: None if name == tracker else known(name))
    [problem] = problems(tmp_path, f"{JOB}track: [{tracker}]\n")
    assert re.match(rf"6: track: {tracker} is not installed here; `.*pip install .*{tracker}", problem)


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("bpe:512", "bpe:9000"))
    with pytest.raises(ContentError, match=r"a tokenizer of 9,000 tokens \(bpe:9000\) does not fit a model with vocab"):
        load_job(tmp_path / "job.yaml")


def test_suites_of_a_training(tmp_path: Path) -> None:
    suite = JOB.replace("steps: 10", "steps: 10, evaluate: {every_steps: 5, samples: 4, suite: SUITE}")
    assert problems(tmp_path, suite.replace("SUITE", "arithmetic")) == []
    [problem] = problems(tmp_path, suite.replace("SUITE", "arithmetics"))
    assert problem.startswith("4: train.evaluate.suite: 'arithmetics' is not a suite: there is no such file")
    assert problem.endswith("did you mean 'arithmetic'?")
    (tmp_path / "own.yaml").write_text("data: {path: rows.jsonl}\nrewrd: exact\n")
    [problem] = problems(tmp_path, suite.replace("SUITE", "own.yaml"))
    assert "own.yaml:2: key 'rewrd' is not known" in problem
    (tmp_path / "own.yaml").write_text("data: {path: rows.jsonl}\nreward: exact\nsampling: {temperature: 0}\n")
    [problem] = problems(tmp_path, suite.replace("SUITE", "own.yaml"))
    assert "sampling: 4 samples at temperature 0 are all the same" in problem
    (tmp_path / "own.yaml").write_text('data: {path: rows.jsonl}\nreward: "mine:score"\n')
    [problem] = problems(tmp_path, suite.replace("SUITE", "own.yaml"))
    assert problem.startswith("4: train.evaluate.suite: module 'mine' is neither in")
    (tmp_path / "mine.py").write_text("def score(*arguments):\n    return 1.0\n")
    assert problems(tmp_path, suite.replace("SUITE", "own.yaml")) == []
