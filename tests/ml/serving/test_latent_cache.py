"""Latent attention over a KV cache of latents: a tenth of the bytes, and the logits of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models.published import logits_of_published, published_model, save_published, tokens
from served_ranks import load_model, random_model
from test_adapters import LATENT, MLP, merged_logits, save_adapter
from test_serving_float8 import LATENT as LATENT_SIZES
from test_serving_float8 import PROCESSOR
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from craton.job.model import MlaShape, ModelShape
from craton.job.sections import Lora
from craton.ml.kernels import add_norm
from craton.ml.models import Decoder, config_from_shape, rope_tables
from craton.ml.serving.device import Adapters, block_shape
from craton.ml.serving.device.attention_backends import AttentionBatch, PagedPast, make_backend
from craton.ml.serving.device.float8 import quantize_model
from craton.ml.serving.engine.build import bytes_of_block
from craton.ml.serving.settings import EngineSettings
from craton.ml.training.lora import LoraLinear, add_adapters

V2_LITE = ModelShape(
    *("DeepSeek-V2-Lite", 27, 2048, 10_944, 16, 16, 192, 102_400),
    experts=64,
    top_k=6,
    moe_ffn_hidden=1408,
    shared_experts=2,
    dense_layers=1,
    mla=MlaShape(q_lora=0, kv_lora=512, qk_nope=128, qk_rope=64, v_head=128),
)
PAGE = 4
CHUNKS = (13, 5, 1, 3, 1, 1)  # of a text of 24 tokens: prefill twice, then decode, once with draft tokens


@torch.no_grad()
def served_logits(
    model: Decoder, texts: Tensor, chunks: Sequence[int] = CHUNKS, kv: torch.dtype = torch.float32
) -> Tensor:
    """Logits [texts, tokens, vocabulary], in steps of some tokens of every text, over a KV cache of this dtype."""
    shape, requests = model.config.shape, len(texts)
    pages = -(-texts.shape[1] // PAGE)
    table = 1 + torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0)).int().view(requests, pages)
    cache = torch.zeros(1 + requests * pages, *block_shape(model, PAGE), dtype=kv)
    past = PagedPast(cache, table, make_backend("auto"))
    rows, done, logits = torch.arange(requests).int(), 0, []
    assert shape.mla is not None
    for count in chunks:
        place = torch.arange(done, done + count).repeat(requests, 1)
        slots = table.gather(1, place // PAGE).long() * PAGE + place % PAGE
        done += count
        batch = AttentionBatch(rows, torch.full_like(rows, done), slots.flatten(), decode=0, longest=texts.shape[1])
        if count <= 3:
            batch.decode, batch.queries = requests, count
        else:
            batch.offsets = count * torch.arange(requests + 1).int()
        past.begin(batch)
        rope = tuple(
            part.view(1, requests * count, -1) for part in rope_tables(place, shape.mla.qk_rope, model.config.rope)
        )
        residual, delta = model.embedding(texts[:, done - count : done].reshape(1, -1)), None
        for block in model.blocks:
            residual, delta = block(residual, delta, rope, past)
        hidden = add_norm(residual, delta, model.norm.weight, model.config.norm_epsilon)[1]
        logits.append((hidden @ model.head_weight.T).view(requests, count, -1))
    return torch.cat(logits, 1)


@torch.no_grad()
def whole_logits(model: Decoder, texts: Tensor) -> Tensor:
    """With expanded keys and values, as in training."""
    out: Tensor = model(texts) @ model.head_weight.T
    return out


def expect(got: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())
    assert wanted.std() > 0.1


def test_the_kv_cache_has_one_latent_and_one_rotated_key_of_a_token() -> None:
    with torch.device("meta"):
        model = Decoder(config_from_shape(V2_LITE)).to(torch.bfloat16)
    assert block_shape(model, 16) == block_shape(model, 16, ranks=8) == (27, 1, 1, 16, 576), "whole on every rank"
    settings = EngineSettings(page=16)
    token_bytes = bytes_of_block(model, settings) / 16
    assert token_bytes == 27 * 576 * 2
    expanded_bytes = 27 * 2 * 16 * (128 + 64) * 2  # keys, and values as wide as keys, of every head
    assert expanded_bytes / token_bytes > 8.5
    assert bytes_of_block(model, EngineSettings(page=16, kv_precision="fp8")) == 16 * token_bytes / 2


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v3-direct"])
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = load_model(save_published(family, tmp_path))
    wanted = logits_of_published(published_model(family))
    for chunks in (CHUNKS, (24,), (4, 20)):
        expect(served_logits(model, tokens(), chunks), wanted, 2e-5)


def test_attention_of_deepseek_v2_equals_that_of_transformers(tmp_path: Path) -> None:
    """In the sizes of V2-Lite."""
    sizes: dict[str, Any] = {
        **{"vocab_size": 131, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 64, "q_lora_rank": None},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"first_k_dense_replace": 2, "num_experts_per_tok": 2, "initializer_range": 0.1},
    }
    torch.manual_seed(7)
    theirs = DeepseekV2ForCausalLM(DeepseekV2Config(**sizes)).float().eval()
    theirs.save_pretrained(tmp_path)
    expect(served_logits(load_model(tmp_path), tokens()), logits_of_published(theirs), 2e-5)


def test_every_token_uses_its_own_adapter_of_the_expansion(tmp_path: Path) -> None:
    family = "deepseek_v3"
    names = (*LATENT, *MLP)
    folders = [save_adapter(tmp_path / str(seed), family, names, seed, rank=2 * seed) for seed in (1, 2)]
    model = load_model(save_published(family, tmp_path / "model"))
    plain = served_logits(model, tokens())
    adapters = Adapters(model, slots=3, rank=4)
    for folder in folders:
        adapters.load(folder.name, folder)
    steps = []
    for slots in ((0, 1), (-1, 0)):
        # of_tokens is of one step, here of the whole texts
        adapters.of_tokens = torch.tensor(slots, dtype=torch.int32).repeat_interleave(tokens().shape[1])
        steps.append(served_logits(model, tokens(), (24,)))
    merged = [merged_logits(family, folder, tokens(), 6.0 / rank) for folder, rank in zip(folders, (2, 4), strict=True)]
    expect(steps[0][0], merged[0][0])
    expect(steps[0][1], merged[1][1])
    expect(steps[1][0], plain[0])
    expect(steps[1][1], merged[0][1])


def test_adapters_that_are_trained_count_in_rollouts(tmp_path: Path) -> None:
    model = load_model(save_published("deepseek_v3", tmp_path))
    frozen = whole_logits(model, tokens())
    add_adapters(model, Lora(rank=4, alpha=6, targets="all"))
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            for factor in (module.lora_a, module.lora_b):
                factor.data.normal_(generator=generator).div_(4)
    wanted = whole_logits(model, tokens())
    assert (wanted - frozen).abs().max() > 0.1, "adapters that do nothing would be found too"
    expect(served_logits(model, tokens()), wanted)


def test_an_update_in_place_reaches_the_absorbed_weights(tmp_path: Path) -> None:
    model = load_model(save_published("deepseek_v3", tmp_path))
    before = served_logits(model, tokens())
    for name, weight in model.named_parameters():
        if name.endswith("kv_b.weight"):
            weight.data.mul_(1.5)
    after = whole_logits(model, tokens())
    assert (after - before).abs().max() > 0.1
    expect(served_logits(model, tokens()), after)


def test_latents_in_fp8_give_nearly_the_same(tmp_path: Path) -> None:
    model = load_model(save_published("deepseek_v3", tmp_path))
    wanted = whole_logits(model, tokens())
    got = served_logits(model, tokens(), kv=torch.float8_e4m3fn)
    assert 0 < (got - wanted).square().mean().sqrt() < 0.1 * wanted.std()


@PROCESSOR
def test_weights_in_fp8_leave_the_expansion_as_it_is() -> None:
    model = random_model(LATENT_SIZES)
    quantize_model(model)
    weights = dict(model.named_parameters())
    assert weights["blocks.0.attention.kv_b.weight"].dtype is torch.float32
    assert weights["blocks.0.attention.kv_a.weight"].dtype is torch.float8_e4m3fn
    texts = tokens() % LATENT_SIZES.shape.vocab
    wanted = whole_logits(model, texts)
    # Activations are rounded to fp8, so the smallest difference before may become one of their steps.
    assert (served_logits(model, texts) - wanted).square().mean().sqrt() < 0.02 * wanted.std()
