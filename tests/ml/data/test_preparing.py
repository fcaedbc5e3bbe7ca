"""From a job file to samples: tokenized once, checked against the model, or taken from a user's function."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from craton.cli.data import app
from craton.errors import CratonError
from craton.job import Job, parse_job
from craton.job.sections.train import Evaluate
from craton.ml.data import DataError, Shards, open_source, prepare, tokenize
from craton.ml.data.tokenizer import train_bpe

SOURCES = """
import numpy as np

def ids(job):
    return lambda index: [index % 7, 2, 3]

def arrays(job, split):
    start = 0 if split == "train" else 100
    row = np.arange(job.sequence)
    return lambda index: {"tokens": row + start, "labels": row, "reward": np.float32(index)}

def raises(job):
    def sample(index):
        raise KeyError("no such row")
    return sample

def refuses(job):
    raise RuntimeError("no data today")

def nothing(job):
    return 4

def wrong(job):
    rows = {0: "text", 1: [1] * 99, 2: [1, 5000], 3: {"labels": [1]}, 4: {"tokens": [1], "labels": [2]}, 5: [0.5, 1.5]}
    return rows.__getitem__
"""


def make_job(data: str, model: str = "{layers: 1, hidden: 8, heads: 1, ffn_hidden: 8, vocab: 512}", **more: str) -> Job:
    text = f"kind: {more.get('kind', 'pretrain')}\nmodel: {model}\ndata: {{sequence: 16, {data}}}\n"
    return parse_job(text + "train: {global_batch_sequences: 4, steps: 2, seed: 3}\ncluster: local x 1\n")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(150):
        (folder / f"{number}.txt").write_text(f"document number {number}, " + "hello world. " * (number % 9 + 1))
    return folder


def test_raw_text_is_tokenized_once_and_again_when_it_changes(texts: Path, cache: Path) -> None:
    job = make_job(f"path: {texts}, validation: {texts}, tokenizer: 'bpe:300'")
    with pytest.raises(DataError, match="not tokenized yet"):
        open_source(job)
    folders = prepare(job)
    made = sorted(path.name for path in (cache / "data").iterdir())
    written = (folders[str(texts)] / "index.json").stat().st_mtime_ns
    assert prepare(job) == folders
    assert sorted(path.name for path in (cache / "data").iterdir()) == made
    assert (folders[str(texts)] / "index.json").stat().st_mtime_ns == written
    train, held_out = open_source(job), open_source(job, "validation", folders)
    assert train.epoch_samples is not None
    assert held_out.epoch_samples is not None
    assert 0 < held_out.epoch_samples < train.epoch_samples
    (texts / "new.txt").write_text("more")
    assert prepare(job) != folders


def test_a_mixture_of_raw_text_and_shards(texts: Path, bpe: Path, tmp_path: Path) -> None:
    tokenize([texts], tmp_path / "shards", tokenizer=bpe)
    one_file = tmp_path / "other.md"
    one_file.write_text("".join(f"[{number}]" for number in range(200)))
    parts = f"path: [{{path: {tmp_path / 'shards'}, weight: 3}}, {{path: {one_file}}}]"
    job = make_job(f"{parts}, tokenizer: {bpe}")
    folders = prepare(job)
    assert folders[str(tmp_path / "shards")] == tmp_path / "shards"
    source = open_source(job, paths=folders)
    shards = Shards(folders[str(one_file)])
    of_file = shards.read(0, shards.tokens).tolist()
    rows = {tuple(of_file[start : start + 16]) for start in range(0, len(of_file) - 16, 16)}
    assert sum(tuple(source.sample(index).tokens.tolist()) in rows for index in range(40)) == 10


def test_a_tokenizer_that_does_not_fit_is_refused(texts: Path, bpe: Path, tmp_path: Path) -> None:
    tokenize([texts], tmp_path / "shards", tokenizer=bpe)
    other = tmp_path / "model"
    train_bpe(["entirely different words here " * 50], 280, other)
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 512,
    }
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False, "hidden_act": "silu"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="not the one beside the model"):
        prepare(make_job(f"path: {tmp_path / 'shards'}", model=str(other)))
    prepare(make_job(f"path: {tmp_path / 'shards'}, tokenizer: {bpe}", model=str(other)))  # random weights: as told
    small = "{layers: 1, hidden: 8, heads: 1, ffn_hidden: 8, vocab: 256}"
    with pytest.raises(DataError, match=r"300 ids.*vocabulary of 256"):
        prepare(make_job(f"path: {tmp_path / 'shards'}", model=small))
    with pytest.raises(DataError, match=r"300 ids.*vocabulary of 256"):
        prepare(make_job(f"path: {texts}, tokenizer: {bpe}", model=small))
    with pytest.raises(DataError, match="no tokenizer is set"):
        prepare(make_job(f"path: {texts}"))
    with pytest.raises(DataError, match="shards include their tokenizer"):
        prepare(make_job(f"path: {tmp_path / 'shards'}, tokenizer: 'bpe:300'"))


def test_what_the_ranks_could_not_open_is_told_before_they_start(texts: Path, bpe: Path, tmp_path: Path) -> None:
    tokenize([texts], tmp_path / "shards", tokenizer=bpe)
    job = make_job(f"path: {tmp_path / 'shards'}, validation: {tmp_path / 'shards'}")
    prepare(job)  # it names validation data but does not evaluate
    assert job.train is not None
    evaluated = job.model_copy(update={"train": job.train.model_copy(update={"evaluate": Evaluate(every_steps=1)})})
    with pytest.raises(DataError, match="none of its documents were held out"):
        prepare(evaluated)
    (tmp_path / "short.txt").write_text("only this")
    with pytest.raises(DataError, match=r"too few for one sample of data\.sequence 16"):
        prepare(make_job(f"path: {tmp_path / 'short.txt'}, tokenizer: {bpe}"))


def test_sft_reads_chats(bpe: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"{n} + {n}?", "completion": "hello"} for n in range(20)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = make_job(f"path: {tmp_path / 'chat.jsonl'}, tokenizer: {bpe}", kind="sft")
    job = job.model_copy(update={"data": job.data.model_copy(update={"sequence": 64})})
    prepare(job)
    row = open_source(job).sample(0)
    assert 0 < row.weight.sum() < 32
    text = tmp_path / "a.txt"
    text.write_text("plain")
    with pytest.raises(DataError, match="not a chat file"):
        prepare(make_job(f"path: {text}, tokenizer: {bpe}", kind="sft"))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_sources.py").write_text(SOURCES)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_sources", None)


@pytest.mark.usefixtures("sources")
def test_a_users_function_gives_samples() -> None:
    row = open_source(make_job("source: 'own_sources:ids'")).sample(9)
    assert row.tokens.tolist() == [2, 2] + [0] * 14
    assert row.labels.tolist() == [2, 3] + [-100] * 14
    assert row.weight.tolist() == [1, 1] + [0] * 14
    job = make_job("source: 'own_sources:arrays'")
    assert open_source(job).sample(5).extra["reward"] == 5
    assert open_source(job, "validation").sample(0).tokens[0] == 100
    with pytest.raises(DataError, match="provides training data only"):
        open_source(make_job("source: 'own_sources:ids'"), "validation")


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("function", "index", "said"),
    [
        ("raises", 0, r"sample 0 raised KeyError: 'no such row' \(.*own_sources.py:14\)"),
        ("refuses", 0, "own_sources:refuses raised RuntimeError: no data today"),
        ("nothing", 0, "returned int; it must return a callable"),
        ("absent", 0, "has no function 'absent'"),
        ("wrong", 0, "sample 0 is a text; set data.tokenizer"),
        ("wrong", 1, "sample 1 has 99 token ids; allowed: 2 to 17"),
        ("wrong", 2, "sample 2 has token id 5000 among its labels, outside the vocabulary of 512"),
        ("wrong", 3, "sample 3 has no 'tokens'"),
        ("wrong", 4, r"sample 4 has tokens of shape \(1,\)"),
        ("wrong", 5, "sample 5 is list of float64"),
    ],
)
def test_what_a_users_function_does_wrong_is_told(function: str, index: int, said: str) -> None:
    with pytest.raises(CratonError, match=said):
        open_source(make_job(f"source: 'own_sources:{function}'")).sample(index)


def test_the_command_tokenizes_the_interpreters_own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few packages of it, which takes a second instead of half a minute."""
    library = tmp_path / "lib"
    for package in ("json", "email"):
        shutil.copytree(Path(sysconfig.get_paths()["stdlib"]) / package, library / package)
    (library / "site-packages").mkdir()
    (library / "site-packages" / "foreign.py").write_text("foreign = True")
    (library / "bad.py").write_bytes(b"# \xff\xfe")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    arguments = ["tokenize", "stdlib", "--to", str(tmp_path / "out"), "--train-bpe", "512", "--validation", "0.1"]
    result = CliRunner().invoke(app, [*arguments, "--workers", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    sources = [path for path in library.rglob("*.py") if path.name not in ("foreign.py", "bad.py")]
    assert found["documents"] + found["validation_documents"] == len([path for path in sources if path.stat().st_size])
    assert found["text_bytes"] == sum(path.stat().st_size for path in sources)
    assert [Path(name).name for name in found["left_out"]] == ["bad.py"]
    assert 1 < found["bytes_per_token"] < 6
    assert Shards(tmp_path / "out").tokens == found["tokens"]
    again = CliRunner().invoke(app, [*arguments, "--workers", "1"])
    assert isinstance(again.exception, DataError), "the folder is there already"


def test_reading_data_needs_neither_torch_nor_tokenizers() -> None:
    program = "import sys, craton.ml.data, craton.cli.data; print([m for m in ('torch', 'transformers', 'tokenizers', "
    program += "'pyarrow', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
