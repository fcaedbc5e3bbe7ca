"""Folders: in several files, onto sharded parameters, and everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gang import Gang
from on_ranks import load_cut_by_columns, load_sharded
from published import logits_of_published, published_model, save_published
from safetensors.torch import load_file, save_file
from torch import Tensor

from craton.ml.models import Decoder, WeightsError, config_from_huggingface, load_weights, save_folder
from craton.ml.models.huggingface import has_weights


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_published("llama", tmp_path / "llama")


def _change(folder: Path, **changes: Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors; __ stands for a dot."""
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def _load(folder: Path) -> tuple[Decoder, tuple[str, ...]]:
    model = Decoder(config_from_huggingface(folder))
    return model, load_weights(model, folder)


def test_several_files_are_written_and_read(tmp_path: Path) -> None:
    model, _ = _load(save_published("deepseek_v3", tmp_path / "one"))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 5, "content": "<end>"}]}))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    saved = save_folder(
        model.state_dict(), model.config, tmp_path / "many", tokenizer, torch.float32, max_shard_bytes=20_000
    )
    files = sorted(file.name for file in saved.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert max(file.stat().st_size for file in saved.glob("*.safetensors")) < 24_000
    assert json.loads((saved / "config.json").read_text())["eos_token_id"] == 5
    assert (saved / "tokenizer.json").exists()
    assert has_weights(saved)

    again, _ = _load(saved)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").eval()
    assert torch.equal(logits_of_published(theirs), logits_of_published(published_model("deepseek_v3")))

    (saved / files[1]).unlink()
    assert not has_weights(saved)
    with pytest.raises(WeightsError, match=f"lists missing files: {files[1]}"):
        load_weights(again, saved)


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_sharded_parameters_are_filled_with_their_rows(gang: Gang, tmp_path: Path, ranks: int, replicas: int) -> None:
    folder = save_published("deepseek_v3", tmp_path)
    wanted = _load(folder)[0].state_dict()
    for state in gang.run(load_sharded, str(folder), replicas, ranks=ranks):
        assert state.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in state.items())


def test_other_cuts_are_filled_too(gang: Gang, llama: Path) -> None:
    assert gang.run(load_cut_by_columns, str(llama)) == [True, True]


def test_left_overs_that_belong_there_are_named_not_refused(tmp_path: Path) -> None:
    folder = save_published("llama3", tmp_path)
    head, table = "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
    _change(folder, **{head: torch.zeros(131, 32), table: torch.zeros(4)})
    assert sorted(_load(folder)[1]) == [head, table]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None, "lm_head__weight": None}, "missing: model.norm.weight, lm_head.weight$"),
        (
            {"model__layers__1__self_attn__q_proj__weight": torch.zeros(32, 31)},
            r"q_proj.weight is \[32, 31\], expected \[32, 32\]",
        ),
        ({"model__vision__weight": torch.zeros(2)}, "not part of the model: model.vision.weight"),
        (
            {"model__norm__weight": torch.zeros(32, dtype=torch.float8_e4m3fn)},
            "training cannot start from quantized weights: model.norm.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_changed(
    llama: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    model = Decoder(config_from_huggingface(llama))
    model.initialize(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _change(llama, **changes)
    with pytest.raises(WeightsError, match=message):
        load_weights(model, llama)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_truncated_file_is_named(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated or not a safetensors file"):
        _load(llama)
    file.unlink()
    (llama / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors \(only pytorch_model.bin"):
        _load(llama)
    assert not has_weights(llama)


def test_saving_refuses_what_it_cannot_write_whole(llama: Path, tmp_path: Path) -> None:
    model, _ = _load(llama)
    state = model.state_dict()
    with pytest.raises(WeightsError, match="exists and is not an empty folder"):
        save_folder(state, model.config, llama)
    with pytest.raises(WeightsError, match=r"missing: norm.weight; unknown: blocks.0.attention.qkv.lora"):
        save_folder(
            {name: value for name, value in state.items() if name != "norm.weight"}
            | {"blocks.0.attention.qkv.lora": torch.zeros(1)},
            model.config,
            tmp_path / "a",
        )
    with pytest.raises(WeightsError, match=r"norm.weight is \[3\]; the model's config needs \[32\]"):
        save_folder(state | {"norm.weight": torch.zeros(3)}, model.config, tmp_path / "a")
    with pytest.raises(WeightsError, match=r"cannot be saved as torch.int8; allowed: bfloat16"):
        save_folder(state, model.config, tmp_path / "a", dtype=torch.int8)
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot be written .*it needs [\d.]+ [kM]B"):
        save_folder(state, model.config, tmp_path / "file" / "a")
    assert not list(tmp_path.glob("a*"))
