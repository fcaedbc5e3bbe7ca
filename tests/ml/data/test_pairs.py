"""Pairs: only completions are learnt, in every form of row that people publish, and rows hold whole pairs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from craton.ml.data import DataError, Shards, load_tokenizer, tokenize
from craton.ml.data.pair_rows import PairEncoder
from craton.ml.data.pairs import PairSource, fitted_lengths
from craton.ml.data.sample import IGNORED

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS = {"role": "user", "content": "What color is the sky?"}
BLUE, GREEN = ({"role": "assistant", "content": f"It is {color}."} for color in ("blue", "green"))
HUMAN = "\n\nHuman: What color is the sky?\n\nAssistant:"

# form → (row, columns, prompt as the model sees it, what is learnt of each side), with a chat template
CHATS: dict[str, tuple[dict[str, Any], dict[str, str], str, str, str]] = {
    "TRL, explicit prompt": (
        {"prompt": [ASKS], "chosen": [BLUE], "rejected": [GREEN]},
        {},
        "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n",
        "It is blue.<|im_end|>\n",
        "It is green.<|im_end|>\n",
    ),
    "orca_dpo_pairs": (
        {"system": "Be brief.", "question": ASKS["content"], "chosen": "blue", "rejected": "green"},
        {"prompt": "question"},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat color is the sky?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "blue<|im_end|>\n",
        "green<|im_end|>\n",
    ),
    "ultrafeedback_binarized, whose prompt is repeated": (
        {"prompt": ASKS["content"], "chosen": [ASKS, BLUE], "rejected": [ASKS, GREEN], "score_chosen": 8.0},
        {},
        "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n",
        "It is blue.<|im_end|>\n",
        "It is green.<|im_end|>\n",
    ),
    "several turns, of which only the last differs": (
        {"chosen": [ASKS, GREEN, ASKS, BLUE], "rejected": [ASKS, GREEN, ASKS, GREEN]},
        {},
        "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\nIt is green.<|im_end|>\n"
        "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n",
        "It is blue.<|im_end|>\n",
        "It is green.<|im_end|>\n",
    ),
    "from and value, with parts and fields that are null": (
        {
            "asked": [{"from": "human", "value": "Which?", "role": None}],
            "chosen": {"from": "gpt", "value": "blue"},
            "rejected": {"role": "assistant", "content": [{"type": "text", "text": "green"}], "tool_calls": None},
        },
        {"prompt": "asked"},
        "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n",
        "blue<|im_end|>\n",
        "green<|im_end|>\n",
    ),
    "hh-rlhf, whose text is rendered already": (
        {"chosen": f"{HUMAN} blue", "rejected": f"{HUMAN} green"},
        {},
        HUMAN + " ",  # the bytes of this tokenizer are tokens, and a space is common to both
        "blue<|endoftext|>",
        "green<|endoftext|>",
    ),
}
TEXTS = {
    "TRL, explicit prompt": (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        "The sky is",
        (" blue.<|endoftext|>", " green.<|endoftext|>"),
    ),
    "TRL, implicit prompt": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        "The sky is ",
        ("blue.<|endoftext|>", "green.<|endoftext|>"),
    ),
    "one completion begins with the other": (
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 42"},
        "2 + 2 =",
        (" 4<|endoftext|>", " 42<|endoftext|>"),
    ),
}
BAD = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "`chosen` equals `rejected`"),
    "missing": ({"prompt": "a", "chosen": "b"}, "has no field 'rejected'; its fields are 'prompt', 'chosen'"),
    "null": ({"prompt": "a", "chosen": "b", "rejected": None}, "field 'rejected' is null"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": " "}, "`rejected` is empty"),
    "nothing in common": ({"chosen": "x", "rejected": "y"}, "no beginning in common"),
    "a number": ({"prompt": "a", "chosen": 3, "rejected": "b"}, "`chosen` is int"),
    "two kinds": ({"prompt": "a", "chosen": [BLUE], "rejected": "b"}, "must be of one kind"),
}


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from craton.ml.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("bytes")
    train_bpe([""], 259, folder)
    return folder


@pytest.fixture(scope="module")
def chat_bytes(bytes_only: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "tokenizer"
    shutil.copytree(bytes_only, folder)
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return folder


def halves(folder: Path, side: tuple[list[int], list[int]]) -> tuple[str, str]:
    """The prompt and the learnt part of a sequence, decoded."""
    tokenizer = load_tokenizer(folder)
    ids, learnt = side
    first = learnt.index(1)
    assert all(learnt[first:]), "completions have one turn here"
    return tuple(tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:first], ids[first:]))  # type: ignore[return-value]


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_rendered_with_the_template(chat_bytes: Path, name: str) -> None:
    row, columns, prompt, *completions = CHATS[name]
    sides = PairEncoder(chat_bytes, columns).encode(row)
    assert [halves(chat_bytes, side) for side in sides] == [(prompt, text) for text in completions]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_stay_as_they_are_without_a_template(bytes_only: Path, name: str) -> None:
    row, prompt, completions = TEXTS[name]
    sides = PairEncoder(bytes_only).encode(row)
    assert [halves(bytes_only, side) for side in sides] == [(prompt, text) for text in completions]


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_cannot_be_used_says_why(bytes_only: Path, name: str) -> None:
    row, message = BAD[name]
    with pytest.raises(DataError, match=message):
        PairEncoder(bytes_only).encode(row)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def good(number: int) -> dict[str, Any]:
    return {"prompt": f"{number} +", "chosen": f" {number}" * (number % 5 + 1), "rejected": " no"}


def test_few_bad_rows_are_left_out_and_many_are_an_error(bytes_only: Path, tmp_path: Path) -> None:
    bad = {"prompt": "a", "chosen": "b", "rejected": "b"}
    few = write(tmp_path / "few.jsonl", [*(good(number) for number in range(30)), bad])
    done = tokenize([few], tmp_path / "few", bytes_only, kind="pair")
    assert (done.documents, done.dropped) == (60, 1)
    assert done.first_dropped == f"{few}:31: `chosen` equals `rejected`, so there is nothing to prefer"
    many = write(tmp_path / "many.jsonl", [good(1), bad, bad])
    with pytest.raises(DataError) as caught:
        tokenize([many], tmp_path / "many", bytes_only, kind="pair")
    assert "\n" not in str(caught.value)
    assert f"{many}:2: `chosen` equals" in str(caught.value)
    assert "2 of 3 rows cannot be used" in str(caught.value)


def test_parquet_gives_the_same_pairs_and_names_its_rows(bytes_only: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [good(number) for number in range(30)]
    table = pyarrow.Table.from_pylist([*rows, {"prompt": "a", "chosen": "b", "rejected": None}])
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    done = tokenize([tmp_path / "rows.parquet"], tmp_path / "a", bytes_only, kind="pair")
    tokenize([write(tmp_path / "rows.jsonl", rows)], tmp_path / "b", bytes_only, kind="pair")
    first, second = Shards(tmp_path / "a"), Shards(tmp_path / "b")
    assert np.array_equal(first.read(0, first.tokens), second.read(0, second.tokens))
    assert done.first_dropped.startswith(f"{tmp_path / 'rows.parquet'}:31: field 'rejected' is null")


def test_held_out_pairs_stay_whole_and_have_other_prompts(bytes_only: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number // 2} +", "chosen": f" {number}", "rejected": " no"} for number in range(200)]
    tokenize([write(tmp_path / "rows.jsonl", rows)], tmp_path / "shards", bytes_only, kind="pair", validation=0.2)
    prompts = []
    for folder in (tmp_path / "shards", tmp_path / "shards" / "validation"):
        source = PairSource(Shards(folder), 64, 0)
        found = set()
        for number in range(source.num_pairs()):
            chosen, rejected = source._read(number)
            shared = int(np.argmax(chosen[1]))
            assert np.array_equal(chosen[0][:shared], rejected[0][:shared])
            found.add(tuple(chosen[0][:shared].tolist()))
        prompts.append(found)
    assert len(prompts[1]) > 5
    assert not prompts[0] & prompts[1]


def test_a_row_holds_whole_pairs_with_what_objectives_read(bytes_only: Path, tmp_path: Path) -> None:
    rows = [good(number) for number in range(40)]
    tokenize([write(tmp_path / "rows.jsonl", rows)], tmp_path / "shards", bytes_only, kind="pair")
    source = PairSource(Shards(tmp_path / "shards"), 64, seed=3)
    source.reference = np.arange(80, dtype=np.float32).reshape(40, 2)
    seen: list[int] = []
    for index in range(source.epoch_samples):
        numbers, sample = source.pair_numbers(index), source.sample(index)
        extra, documents = sample.extra, sample.documents
        assert documents is not None
        seen += numbers.tolist()
        assert extra["reference"].shape == (source.slots, 2)
        assert extra["reference"][: len(numbers)].tolist() == source.reference[numbers].tolist()
        assert extra["pair_start"].sum() == len(numbers)
        assert extra["last"].sum() == 2 * len(numbers)
        for slot in range(len(numbers)):
            for number, side in ((2 * slot, 1.0), (2 * slot + 1, -1.0)):
                here = documents == number
                assert (extra["side"][here] == side).all()
                assert (extra["pair"][here] == slot).all()
                assert sample.positions[here].tolist() == list(range(here.sum()))
                assert sample.labels[here][-1] == IGNORED, "the last token of a sequence predicts nothing"
                assert (sample.labels[here] != IGNORED).any()
        padding = documents == 2 * len(numbers)
        assert (extra["pair"][padding] == -1).all()
        assert not extra["side"][padding].any()
        assert not sample.weight[padding].any()
        assert (sample.weight == (sample.labels != IGNORED)).all()
    assert sorted(seen) == list(range(40)), "every pair once in an epoch"
    assert source.slots > 1


def test_long_pairs_keep_their_prompt_and_lose_the_ends_of_completions(bytes_only: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "short", "chosen": "c" * 100, "rejected": "r"},
        {"prompt": "short", "chosen": "c" * 100, "rejected": "r" * 100},
        {"prompt": "p" * 60, "chosen": "c", "rejected": "r"},  # no room for a completion
        {"prompt": "short", "chosen": "x" * 100 + "y", "rejected": "x" * 100 + "z"},  # equal without their ends
    ]
    tokenize([write(tmp_path / "rows.jsonl", rows)], tmp_path / "shards", bytes_only, kind="pair")
    source = PairSource(Shards(tmp_path / "shards"), 64, seed=0)
    assert (source.rows.truncated, source.rows.dropped) == (2, 2)
    lengths = {number: [len(ids) for ids, _ in source._read(number)] for number in (0, 1)}
    assert lengths == {0: [64 - 7, 7], 1: [32, 32]}
    with pytest.raises(DataError, match=r"no pair has both completions within data\.sequence 8"):
        PairSource(Shards(tmp_path / "shards"), 8, seed=0)


def test_a_pair_never_gets_more_than_a_row() -> None:
    random = np.random.default_rng(0)
    chosen, rejected = random.integers(1, 100, (2, 5000))
    for sequence in (63, 64):
        first, second = fitted_lengths(chosen, rejected, sequence)
        assert (first + second <= sequence).all()
        fits = chosen + rejected <= sequence
        assert (first[fits] == chosen[fits]).all()
        assert (second[fits] == rejected[fits]).all()
        assert (
            np.minimum(first, second)[~fits] >= np.minimum(np.minimum(chosen, rejected), sequence // 2)[~fits]
        ).all()
