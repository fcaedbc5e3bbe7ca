"""Every family computes what transformers computes, and its weights go there and back unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from published import FAMILIES, SEQUENCE, logits_of_published, published_model, save_published, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from craton.ml.models import Decoder, DecoderConfig, config_from_huggingface, load_weights, save_folder
from craton.ml.models.huggingface import config_to_huggingface


def _load(folder: Path) -> Decoder:
    model = Decoder(config_from_huggingface(folder)).eval()
    assert load_weights(model, folder) == ()
    return model


@torch.no_grad()
def _logits(model: Decoder, ids: Tensor, **more: Tensor) -> Tensor:
    return model(ids, **more) @ model.head_weight.T


def _uncounted_parameters(config: DecoderConfig) -> int:
    """What ModelShape.parameters leaves out: norms inside attention, and the biases of queries, keys and values."""
    shape = config.shape
    a_layer = 2 * shape.head_dim * shape.qk_norm + (shape.mla.q_lora + shape.mla.kv_lora if shape.mla else 0)
    a_layer += config.qkv_bias * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return shape.layers * a_layer


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_and_weights_return_unchanged(family: str, tmp_path: Path) -> None:
    folder = save_published(family, tmp_path / "published")
    ours = _load(folder)
    wanted = logits_of_published(published_model(family))
    torch.testing.assert_close(_logits(ours, tokens()), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    assert wanted.std() > 0.1

    shape = ours.config.shape
    assert sum(p.numel() for p in ours.parameters()) == shape.parameters + _uncounted_parameters(ours.config)

    saved = save_folder(ours.state_dict(), ours.config, tmp_path / "saved", dtype=torch.float32)
    before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    again = transformers.AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").eval()
    assert torch.equal(logits_of_published(again), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_returns_unchanged(family: str, tmp_path: Path) -> None:
    config = config_from_huggingface(save_published(family, tmp_path))
    fields = config_to_huggingface(config)
    again = config_from_huggingface(json.loads(json.dumps(fields)))
    # layers that predict further tokens are not built, so they are not promised either
    same = {"name": "", "source": "", "mtp_layers": 0}
    assert replace(again, shape=replace(again.shape, **same)) == replace(config, shape=replace(config.shape, **same))
    # the fields of transformers 4 alone say the same
    old = {key: value for key, value in fields.items() if key != "rope_parameters"}
    assert config_from_huggingface(old).rope == config.rope


@pytest.mark.parametrize("family", ["llama3", "mistral", "deepseek_v3"])
def test_packed_documents_compute_what_separate_rows_do(family: str, tmp_path: Path) -> None:
    model = _load(save_published(family, tmp_path))
    ids = tokens(1)
    cut = 10
    positions = torch.cat([torch.arange(cut), torch.arange(SEQUENCE - cut)])[None]
    documents = torch.tensor([[0] * cut + [1] * (SEQUENCE - cut)], dtype=torch.int32)
    packed = _logits(model, ids, positions=positions, documents=documents)
    apart = torch.cat([_logits(model, ids[:, :cut]), _logits(model, ids[:, cut:])], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(packed, _logits(model, ids), atol=1e-2)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_stacked_as_transformers_holds_them_load_too(family: str, tmp_path: Path) -> None:
    published = published_model(family)
    config = config_from_huggingface(save_published(family, tmp_path / "each"))
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in published.state_dict().items()}, stacked / "a.safetensors")
    model = Decoder(config).eval()
    load_weights(model, stacked)
    wanted = logits_of_published(published)
    torch.testing.assert_close(_logits(model, tokens()), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_a_saved_bf16_folder_keeps_the_balancing_bias_in_fp32(tmp_path: Path) -> None:
    model = _load(save_published("deepseek_v3", tmp_path / "published")).bfloat16()
    bias = model.blocks[1].mlp.router_bias
    assert bias.dtype is torch.float32
    saved = load_file(save_folder(model.state_dict(), model.config, tmp_path / "saved") / "model.safetensors")
    assert torch.equal(saved["model.layers.1.mlp.gate.e_score_correction_bias"], bias)
    assert saved["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16
