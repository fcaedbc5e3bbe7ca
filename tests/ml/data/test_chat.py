"""Chats: only what the assistant says is learnt, whatever the template, and rows hold whole conversations."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from craton.ml.data import DataError, Shards, load_tokenizer, tokenize
from craton.ml.data.chat import ChatEncoder
from craton.ml.data.conversations import ChatSource, best_fit
from craton.ml.data.sample import IGNORED

# The shapes of the templates people use, in our own words.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
HEADERS = (
    "<|begin|>{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
INSTRUCT = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content + '\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}<s>"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ s if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# Old reasoning is dropped once another question follows, so earlier turns change.
REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "hello world"},
]


def with_template(bpe: Path, to: Path, template: str) -> Path:
    shutil.copytree(bpe, to)
    (to / "chat_template.jinja").write_text(template, encoding="utf-8")
    return to


def learnt(folder: Path, messages: list[dict[str, str]]) -> list[str]:
    """For each sample of a conversation: the text that is learnt, pieces joined by |."""
    tokenizer = load_tokenizer(folder)
    found = []
    for ids, marks in ChatEncoder(folder).encode({"messages": messages}):
        parts = np.split(np.array(ids), np.flatnonzero(np.diff(marks)) + 1)
        chosen = parts[0 if marks[0] else 1 :: 2]
        found.append("|".join(tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in chosen))
    return found


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, ["It is 4.<|im_end|>\n|hello world<|im_end|>\n"]),
        (MARKED, ["It is 4.<|im_end|>|hello world<|im_end|>"]),
        (HEADERS, ["It is 4.<|eot|>|hello world<|eot|>"]),
        (INSTRUCT, [" It is 4.</s>| hello world</s>"]),
    ],
    ids=["chatml", "marked", "headers", "instruct"],
)
def test_only_the_assistants_words_are_learnt(bpe: Path, tmp_path: Path, template: str, said: list[str]) -> None:
    assert learnt(with_template(bpe, tmp_path / "tokenizer", template), CONVERSATION) == said


def test_a_template_that_changes_earlier_turns_gives_one_sample_a_turn(bpe: Path, tmp_path: Path) -> None:
    folder = with_template(bpe, tmp_path / "tokenizer", REASONING)
    thinking = [dict(message) for message in CONVERSATION]
    thinking[2]["content"] = "two twos</think>It is 4."
    thinking[4]["content"] = "greet</think>hello world"
    assert learnt(folder, thinking) == [
        "two twos</think>It is 4.<|im_end|>\n",
        "greet</think>hello world<|im_end|>\n",
    ]


def write_chats(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_tokenizer_without_template_gets_one_out_loud(
    bpe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chats = write_chats(tmp_path / "chat.jsonl", [{"prompt": "What is 2 + 2?", "completion": "It is 4."}])
    with caplog.at_level(logging.WARNING):
        tokenize([chats], tmp_path / "out", tokenizer=bpe, kind="chat", workers=1)
    assert "has no chat template" in caplog.text
    shards = Shards(tmp_path / "out")
    ids, marks = shards.read(0, shards.tokens), shards.learnt(0, shards.tokens)
    tokenizer = load_tokenizer(bpe)
    whole = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert whole == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    assert tokenizer.decode(ids[marks].tolist(), skip_special_tokens=False) == "It is 4.<|im_end|>"


def test_malformed_lines_are_told_with_their_numbers(bpe: Path, tmp_path: Path) -> None:
    good = {"messages": CONVERSATION}
    bad: list[Any] = [
        {"text": "x"},
        {"messages": []},
        {"messages": [{"role": "user", "content": "alone"}]},
        {"messages": [{"role": "assistant", "content": 4}]},
        {"messages": [{"content": "x"}]},
    ]
    chats = write_chats(tmp_path / "chat.jsonl", [good, *bad])
    with pytest.raises(DataError) as caught:
        tokenize([chats], tmp_path / "out", tokenizer=bpe, kind="chat", workers=1)
    lines = [problem.split(": ")[0].rpartition(":")[2] for problem in caught.value.problems]
    assert lines == ["2", "3", "4", "5", "6"]
    assert not (tmp_path / "out").exists()


def test_rows_hold_conversations_as_documents(bpe: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = [
        {"messages": [{"role": "user", "content": f"{n} ?"}, {"role": "assistant", "content": "hello " * int(words)}]}
        for n, words in enumerate(rng.integers(1, 30, 50))
    ]
    records.append({"messages": [{"role": "user", "content": "long " * 200}, CONVERSATION[2]]})  # the answer is cut off
    records.append({"messages": [CONVERSATION[1], {"role": "assistant", "content": "world " * 300}]})
    tokenize([write_chats(tmp_path / "chat.jsonl", records)], tmp_path / "out", tokenizer=bpe, kind="chat", workers=1)
    shards = Shards(tmp_path / "out")
    source = ChatSource(shards, 128, seed=0)
    assert (source.rows.truncated, source.rows.dropped) == (1, 1)
    ends = shards.document_ends()
    starts = np.concatenate(([0], ends[:-1]))
    separate = set()
    for start, end in zip(starts, np.minimum(ends, starts + 129), strict=True):
        tokens, marks = shards.read(start, end), shards.learnt(start, end)
        separate.add((tuple(tokens[:-1]), tuple(np.where(marks[1:], tokens[1:], IGNORED))))
    packed, places = set(), 0
    for index in range(source.epoch_samples):
        row = source.sample(index)
        assert row.documents is not None
        for number in range(row.documents.max() + 1):
            here = row.documents == number
            assert row.positions[here].tolist() == list(range(here.sum()))
            if row.weight[here].any():
                packed.add((tuple(row.tokens[here]), tuple(row.labels[here])))
                places += int(here.sum())
    assert len(packed) == 51
    assert packed <= separate
    assert places / (source.epoch_samples * 128) > 0.8, "rows are filled"
    again = ChatSource(Shards(tmp_path / "out"), 128, seed=0)
    assert np.array_equal(again.sample(3).tokens, source.sample(3).tokens)
    assert ChatSource(shards, 128, seed=0, pack=False).epoch_samples == 51


def test_best_fit_loses_nothing_and_overfills_nothing() -> None:
    lengths = np.random.default_rng(1).integers(1, 101, 5000)
    order, starts = best_fit(lengths, 100)
    assert np.array_equal(np.sort(order), np.arange(5000))
    filled = np.add.reduceat(lengths[order], starts[:-1])
    assert filled.max() <= 100
    assert len(filled) <= 1.02 * lengths.sum() / 100 + 1


@pytest.mark.parametrize(
    ("template", "begin", "turn_end"),
    [
        (CHATML, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
        (HEADERS, "<|begin|>[user]\n\nhello<|eot|>[assistant]\n\n", "<"),
    ],
)
def test_a_message_is_asked_as_chats_were_learnt(
    bpe: Path, tmp_path: Path, template: str, begin: str, turn_end: str
) -> None:
    from craton.ml.sample import SampleError, chat_row

    folder = with_template(bpe, tmp_path / "chat", template)
    row, end = chat_row(folder, "hello", None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(row, skip_special_tokens=False) == begin
    assert end is not None
    assert tokenizer.decode([end], skip_special_tokens=False) == turn_end
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(SampleError, match="has no chat template"):
        chat_row(folder, "hello", None)
