"""The token that ends an answer of a chat: found in the template, used by servers and written by exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from craton.ml.data import end_of_document, end_of_turn, load_tokenizer
from craton.ml.data.chat import TEMPLATE, ensure_template
from craton.ml.data.tokenizer import train_bpe


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    train_bpe(["the cat sat on the mat"] * 20, 300, folder)
    return folder


def test_without_a_template_there_is_none(tokenizer: Path) -> None:
    assert end_of_turn(tokenizer) is None


def test_it_is_the_special_token_after_an_answer(tokenizer: Path) -> None:
    ensure_template(tokenizer)
    assert end_of_turn(tokenizer) == load_tokenizer(tokenizer).token_to_id("<|im_end|>")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for m in messages %}{{ m['content'] }} and on{% endfor %}", ""]
)
def test_a_template_that_raises_or_writes_text_has_none(tokenizer: Path, template: str) -> None:
    (tokenizer / TEMPLATE).write_text(template, encoding="utf-8")
    assert end_of_turn(tokenizer) is None


def test_a_server_and_an_export_stop_at_both_ends(tokenizer: Path, tmp_path: Path) -> None:
    models = pytest.importorskip("craton.ml.serving.device.models")
    weights = pytest.importorskip("craton.ml.models.weights")
    ensure_template(tokenizer)
    end, turn = end_of_document(tokenizer, load_tokenizer(tokenizer)), end_of_turn(tokenizer)
    assert end != turn
    assert models.stop_tokens_of(None, tokenizer) == (end, turn)
    exported = tmp_path / "exported"
    exported.mkdir()
    weights._copy_tokenizer(tokenizer, exported)
    assert set(json.loads((exported / "generation_config.json").read_text())["eos_token_id"]) >= {turn}
    assert turn in models.stop_tokens_of(exported, exported)


def test_a_list_of_ends_that_a_model_brings_is_taken_as_it_is(tokenizer: Path) -> None:
    models = pytest.importorskip("craton.ml.serving.device.models")
    ensure_template(tokenizer)
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', encoding="utf-8")
    assert models.stop_tokens_of(tokenizer, tokenizer) == (7, 9)
