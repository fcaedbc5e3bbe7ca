"""Text to shards: every kind of input, the same for any number of workers, whole or not there."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_until

from craton.ml.data import DataError, Shards, end_of_document, load_tokenizer, tokenize
from craton.ml.data.documents import PIECE_BYTES
from craton.ml.data.errors import DiskFullError

TEXTS = ["The first document, naïve: 数.", "def f(x):\n\treturn x\n", "A third one.\n\n"]


def documents(folder: Path) -> list[str]:
    """The documents of a folder of shards as text, without the id that ends each."""
    shards, tokenizer = Shards(folder), load_tokenizer(folder)
    ids = np.split(shards.read(0, shards.tokens), shards.document_ends()[:-1])
    end = end_of_document(folder, tokenizer)
    assert all(document[-1] == end for document in ids)
    return [tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False) for document in ids]


def write_inputs(folder: Path) -> dict[str, Path]:
    import pyarrow
    from pyarrow import parquet

    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS)
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.py").write_text(text, encoding="utf-8")
    (folder / "lines.jsonl").write_text(lines + "\n", encoding="utf-8")
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with pyarrow.output_stream(str(folder / "lines.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines.encode())
    parquet.write_table(pyarrow.table({"text": TEXTS, "n": [1, 2, 3]}), folder / "rows.parquet", row_group_size=2)
    return {path.name: path for path in folder.iterdir()}


def test_every_kind_of_input_gives_its_documents(bpe: Path, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    assert len(inputs) == 5
    for name, path in inputs.items():
        done = tokenize([path], tmp_path / "out" / name, tokenizer=bpe, workers=1)
        assert documents(done.folder) == TEXTS, name
        assert done.documents == 3
        assert done.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "input"
    source.mkdir()
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "\n", "zeta", "eta", "数", "naïve"]
    for number in range(20):
        text = " ".join(words[n] for n in rng.integers(0, len(words), 3_000))
        (source / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    (source / "long.md").write_text(
        ("äß数" * 9 + " ") * (PIECE_BYTES // 40), encoding="utf-8"
    )  # one document, no line end to cut at
    folders = [tmp_path / f"workers-{workers}" for workers in (1, 2)]
    for workers, folder in enumerate(folders, 1):
        done = tokenize([source], folder, bpe_vocabulary=300, workers=workers, validation=0.2)
        assert done.documents + done.validation_documents == 21
        assert done.validation_documents > 0
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) for folder in folders]
    assert files[0] == files[1]
    for name in files[0]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    texts = documents(folders[0]) + documents(folders[0] / "validation")
    assert sorted(texts) == sorted(path.read_text(encoding="utf-8") for path in source.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n{"text": \n', r"bad\.jsonl:2: is not JSON"),
        ('{"text": "a"}\n\n[1]\n', r"bad\.jsonl:3: is a list"),
        ('{"body": "a"}\n', r"bad\.jsonl:1: has no field 'text'; its fields are 'body'"),
        ('{"text": 4}\n', r"bad\.jsonl:1: field 'text' is a number, not a text"),
        ("", "contains no text"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_leaves_nothing(
    bpe: Path, tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        tokenize([tmp_path / "bad.jsonl"], tmp_path / "out", tokenizer=bpe, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_bad_requests(bpe: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("hello")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "b.parquet")
    for inputs, options, said in (
        ([tmp_path / "none"], {"tokenizer": bpe}, "does not exist"),
        ([text], {}, "give either a tokenizer"),
        ([text], {"tokenizer": tmp_path / "none"}, "no such folder with a tokenizer.json"),
        ([text], {"tokenizer": tmp_path}, "has no tokenizer.json"),
        ([text], {"bpe_vocabulary": 100}, "too small"),
        ([text], {"tokenizer": bpe, "validation": 2}, "0 to 0.5"),
        ([tmp_path / "b.parquet"], {"tokenizer": bpe}, r"columns are \['body'\]"),
    ):
        with pytest.raises(DataError, match=said):
            tokenize(inputs, tmp_path / "out", workers=1, **options)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(DataError, match="already exists"):
        tokenize([text], tmp_path / "taken", tokenizer=bpe)
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    done = tokenize([tmp_path / "latin.txt", text], tmp_path / "out", tokenizer=bpe)
    assert [Path(name).name for name in done.left_out] == ["latin.txt"]


def test_a_hub_id_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="hf download"):
        tokenize([tmp_path / "a.txt"], tmp_path / "out", tokenizer="nobody/nothing")


def test_a_full_disk_is_clear_and_leaves_nothing(bpe: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write fails in the middle, as it does on a full one."""
    source = tmp_path / "a.txt"
    source.write_text("hello world, " * 20_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(DiskFullError, match=r"no space left .*removed") as caught:
            tokenize([source], tmp_path / "out", tokenizer=bpe, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.slow
def test_a_killed_run_leaves_no_folder_and_no_workers(bpe: Path, tmp_path: Path) -> None:
    program = (
        "import os, sys; from craton.ml.data import tokenize\n"
        "if __name__ == '__main__':\n"
        f"    tokenize(['stdlib'], {str(tmp_path / 'out')!r}, tokenizer={str(bpe)!r}, workers=2,\n"
        "             progress=lambda *a: print('going', flush=True))\n"
    )
    script = tmp_path / "go.py"
    script.write_text(program)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert "going" in process.stdout.readline()
    process.kill()
    process.wait()
    wait_until(lambda: not _members(process.pid), "workers outlive their parent")
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="unfinished"):
        Shards(tmp_path / "out.partial")
    (tmp_path / "a.txt").write_text("hello")
    tokenize([tmp_path / "a.txt"], tmp_path / "out", tokenizer=bpe)  # takes over what the dead one left
    assert documents(tmp_path / "out") == ["hello"]
    assert not (tmp_path / "out.partial").exists()


def _members(session: int) -> list[str]:
    """Living processes of a session; multiprocessing's resource tracker ends by itself a moment later."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat.parent.name)
    return found
