"""Prompts become tokens once, in a fixed order, with their rows; what cannot be used is one clear line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from craton.job import Job, parse_job
from craton.ml.data import DataError, open_prompts, prepare, tokenizer_folder
from craton.ml.data.prompts import HELD_OUT, PromptRows, write_prompts
from craton.ml.data.tokenizer import load_tokenizer, train_bpe


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))


def rows_of(count: int) -> list[dict[str, object]]:
    return [{"question": f"{number}+{number}=", "answer": str(2 * number)} for number in range(count)]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_job(tmp_path: Path, data: Path | str, columns: str = "{prompt: question}", max_tokens: int = 8) -> Job:
    train_bpe([], 259, tmp_path / "tokenizer")
    return parse_job(
        f"""
        name: sums
        kind: grpo
        model: {{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 259}}
        data: {{path: {data}, tokenizer: {tmp_path / "tokenizer"}, sequence: 16, columns: {columns}}}
        train: {{steps: 2, precision: fp32, initialize: random}}
        rollout: {{prompts: 4, group: 2, max_tokens: {max_tokens}}}
        reward: {{verifier: exact}}
        cluster: local
        """
    )


def test_every_row_comes_once_in_an_epoch_with_its_tokens(tmp_path: Path) -> None:
    job = prompt_job(tmp_path, write_rows(tmp_path / "sums.jsonl", rows_of(20)))
    prepare(job)
    source = open_prompts(job)
    prompts = [source.prompt(index) for index in range(20)]
    assert sorted(int(prompt.row["answer"]) for prompt in prompts) == [2 * number for number in range(20)]
    assert [prompt.row["answer"] for prompt in prompts] != [str(2 * number) for number in range(20)], "shuffled"
    folder = tokenizer_folder(job)
    assert folder is not None
    for prompt in prompts:
        assert load_tokenizer(folder).decode(list(prompt.tokens)) == prompt.content == prompt.row["prompt"]
    assert open_prompts(job).prompt(7) == prompts[7]


def test_parquet_rows_are_read_like_lines(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(rows_of(5)), tmp_path / "sums.parquet")
    job = prompt_job(tmp_path, tmp_path / "sums.parquet")
    prepare(job)
    assert {open_prompts(job).prompt(index).content for index in range(5)} == {f"{n}+{n}=" for n in range(5)}


def test_messages_are_rendered_with_the_chat_template(tmp_path: Path) -> None:
    row: dict[str, object] = {"prompt": [{"role": "user", "content": "7+8"}], "answer": "15"}
    job = prompt_job(tmp_path, write_rows(tmp_path / "chats.jsonl", [row]), "{}", max_tokens=1)
    job = job.model_copy(update={"data": job.data.model_copy(update={"sequence": 128})})
    prepare(job)
    prompt, folder = open_prompts(job).prompt(0), tokenizer_folder(job)
    assert folder is not None
    text = load_tokenizer(folder).decode(list(prompt.tokens), skip_special_tokens=False)
    assert text == "<|im_start|>user\n7+8<|im_end|>\n<|im_start|>assistant\n"


def test_prompts_without_room_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*rows_of(4), {"question": "1111111111+1=", "answer": "?"}]
    job = prompt_job(tmp_path, write_rows(tmp_path / "sums.jsonl", rows))
    prepare(job)
    assert "1 prompts are longer than 8 tokens and left out" in caplog.text
    assert all(open_prompts(job).prompt(index).row["answer"] != "?" for index in range(12))


def test_a_text_source_is_tokenized_as_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text_source_here.py").write_text("def texts(job):\n    return lambda index: f'{index}+1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = parse_job(
        """
        name: texts
        kind: pretrain
        model: {layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 259}
        data: {source: "text_source_here:texts", tokenizer: "bpe:259", sequence: 8}
        train: {steps: 2, precision: fp32, global_batch_sequences: 4}
        cluster: local
        """
    )
    from craton.ml.data import open_source

    prepare(job)
    folder, sample = tokenizer_folder(job), open_source(job).sample(5)
    assert folder is not None
    assert load_tokenizer(folder).decode(sample.tokens[:3].tolist()) == "5+1"
    assert sample.labels[2] == load_tokenizer(folder).token_to_id("<|endoftext|>")
    assert sample.weight.sum() == 3
    (tmp_path / "text_source_here.py").write_text(
        "def texts(job):\n    return lambda index: {'prompt': f'{index}+1=', 'completion': '7'}\n"
    )
    monkeypatch.delitem(sys.modules, "text_source_here")
    sample = open_source(job).sample(5)
    assert load_tokenizer(folder).decode(sample.tokens[:5].tolist()) == "5+1=7"
    assert sample.weight.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]


def test_held_out_prompts_are_not_trained(tmp_path: Path) -> None:
    train_bpe([], 259, tmp_path / "tokenizer")
    data = write_rows(tmp_path / "sums.jsonl", rows_of(200))
    columns = {"prompt": "question"}
    write_prompts(data, tmp_path / "prompts", tmp_path / "tokenizer", columns, held_out_share=0.1)
    folders = [tmp_path / "prompts", tmp_path / "prompts" / HELD_OUT]
    parts = [PromptRows(folder, seed=1, max_tokens=16) for folder in folders]
    answers = [{part.prompt(index).row["answer"] for index in range(len(part))} for part in parts]
    assert len(answers[0]) + len(answers[1]) == 200
    assert 5 <= len(answers[1]) <= 40
    assert not answers[0] & answers[1]
    assert [load_tokenizer(folder).get_vocab_size() for folder in folders] == [259, 259]


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([{"question": "1234567890"}], "{prompt: question}", "all 1 prompts are longer than 8 tokens"),
        ([{"question": "1"}], "{}", "`prompt` is missing; the fields are 'question'"),
        ([{"question": "1"}], "{prompt: quest}", "has no field 'quest' that data.columns names"),
        ([{"question": 7}], "{prompt: question}", "`prompt` is neither a text nor a list of messages"),
        ([{"question": ""}], "{prompt: question}", "`prompt` is empty"),
        (
            rows_of(200),
            "{prompt: quest}",
            "bad.jsonl:1: has no field 'quest' that data.columns names; it has 'question'",
        ),
        (rows_of(200), "{}", ": data.columns: {prompt: NAME} renames one (and so 199 other rows)"),
        ([*rows_of(2), {"question": "1\ud83d"}], "{prompt: question}", "bad.jsonl:3: `prompt` has half of a surrogate"),
        ([{"question": "1", "x": ["\ud83d"]}], "{prompt: question}", "bad.jsonl:1: field 'x' has half of a surrogate"),
        (
            [{"question": "1", "\ud83d": 1}],
            "{prompt: question}",
            "bad.jsonl:1: field '\\ud83d' has half of a surrogate",
        ),
    ],
)
def test_bad_rows_are_one_line(tmp_path: Path, rows: list[dict[str, object]], columns: str, message: str) -> None:
    job = prompt_job(tmp_path, write_rows(tmp_path / "bad.jsonl", rows), columns)
    with pytest.raises(DataError) as raised:
        prepare(job)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_messages_without_characters_and_deep_rows_are_one_line_each(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "bad.jsonl", [{"prompt": [{"role": "user", "content": "\ud83d"}]}])
    with pytest.raises(DataError, match=r"^\S+bad.jsonl:1: `prompt` has half of a surrogate pair[^\n]+$"):
        prepare(prompt_job(tmp_path, data, "{}"))
    data.write_text('{"prompt": "1", "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match=r"^\S+bad.jsonl:1: is nested too deeply[^\n]*$"):
        prepare(prompt_job(tmp_path, data, "{}"))
