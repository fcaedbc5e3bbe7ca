"""What is known of a reward model before it is loaded: one line for every folder that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from craton.job import ModelError
from craton.job.model import chat_folder, check_reward_model

CONFIG: dict[str, Any] = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
TEMPLATE = "chat_template.jinja"


def folder_of(folder: Path, tokens: str = "abc", template: bool = True, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "model.safetensors").touch()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    if template:
        (folder / TEMPLATE).write_text("{{ messages }}")
    return folder


def test_the_chat_template_is_its_own_or_that_of_the_same_vocabulary(tmp_path: Path) -> None:
    policy, plain = folder_of(tmp_path / "policy"), folder_of(tmp_path / "plain", template=False)
    own, other = folder_of(tmp_path / "own", "xyz"), folder_of(tmp_path / "other", "xyz", template=False)
    for folder in (own, plain):
        check_reward_model(folder, policy)
    assert (chat_folder(own, policy), chat_folder(plain, policy)) == (own, policy)
    assert chat_folder(plain, None) is None
    with pytest.raises(ModelError, match=r"another vocabulary than .*policy and no chat template; put the chat_templ"):
        check_reward_model(other, policy)
    check_reward_model(other, plain)  # no request to it has messages
    (other / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    check_reward_model(other, policy)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is a language model without a scalar head; give an export of"),
        ({"num_labels": 3}, "a classifier with 3 labels is not a reward model; allowed: one label"),
        ({"num_labels": None, "id2label": {"0": "a"}}, ""),
        ({"num_labels": None}, "a classifier with 2 labels"),
        ("config.json", "has no config.json; give a folder"),
        ("model.safetensors", "has no weights; give a folder with a config.json and"),
        ("tokenizer.json", "has no tokenizer.json, which makes its token ids"),
    ],
)
def test_mistakes(tmp_path: Path, change: Any, line: str) -> None:
    folder = folder_of(tmp_path / "reward", **(change if isinstance(change, dict) else {}))
    if isinstance(change, str):
        (folder / change).unlink()
    if not line:
        check_reward_model(folder, None)
        return
    with pytest.raises(ModelError) as raised:
        check_reward_model(folder, None)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
