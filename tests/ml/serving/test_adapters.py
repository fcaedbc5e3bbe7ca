"""Adapters: a token gets what a model merged with its request's adapter would give it, whoever else is in the batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from models.published import published_model, save_published, tokens
from safetensors.torch import load_file, save_file
from served_ranks import hidden, hidden_with_adapters, load_model, save_random
from torch import Tensor

from craton.ml.export_adapters import CONFIG, WEIGHTS
from craton.ml.kernels import serving as kernels
from craton.ml.models import Decoder, config_from_huggingface
from craton.ml.serving.device import Adapters
from craton.ml.serving.device.adapters import AdapterError
from craton.ml.serving.device.float8 import quantize_model

RANK = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
FAMILIES = {
    "llama": ATTENTION + MLP,
    "qwen2": ATTENTION + MLP,  # biases
    "qwen3": ATTENTION + MLP,  # norms of queries and keys
    "qwen3_moe": ATTENTION + MLP,  # only its first layer has an MLP without experts
    "deepseek_v3": LATENT + MLP,  # latent attention, rotary dimensions in pairs, shared experts
    "deepseek_v3-direct": ("q_proj", *LATENT[2:]),
}


def layers_named(family: str, names: Iterable[str]) -> list[str]:
    modules = published_model(family).named_modules()
    return [
        name
        for name, module in modules
        if isinstance(module, torch.nn.Linear) and name.endswith(tuple(names)) and ".experts." not in name
    ]


def save_adapter(
    folder: Path, family: str, names: Iterable[str], seed: int = 0, rank: int = RANK, alpha: float = 6.0, **config: Any
) -> Path:
    """A folder as PEFT writes it, with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in layers_named(family, names):
        rows, columns = published_model(family).get_submodule(name).weight.shape
        for factor, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = torch.randn(shape, generator=generator) / 4
    assert tensors
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": list(names)}
    (folder / CONFIG).write_text(json.dumps(fields | config))
    return folder


@torch.no_grad()
def merged_logits(family: str, folder: Path, rows: Tensor, scale: float) -> Tensor:
    """What transformers computes with W + scale · B · A."""
    model, tensors = copy.deepcopy(published_model(family)), load_file(folder / WEIGHTS)
    for name, a in tensors.items():
        if ".lora_A." in name:
            layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            layer.weight += scale * tensors[name.replace("lora_A", "lora_B")] @ a
    out: Tensor = model(rows).logits
    return out


def logits(model: Decoder, rows: Tensor) -> Tensor:
    return hidden(model, rows) @ model.head_weight.T


def of_rows(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32).repeat_interleave(tokens().shape[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_gets_its_own_adapter(family: str, tmp_path: Path) -> None:
    rows = tokens(4)
    first = save_adapter(tmp_path / "first", family, FAMILIES[family], seed=1)
    few = FAMILIES[family][1::3]  # another rank, and not on all layers
    second = save_adapter(tmp_path / "second", family, few, seed=2, rank=2, alpha=3.0)
    model = load_model(save_published(family, tmp_path / "model"))
    plain = logits(model, rows)
    adapters = Adapters(model, slots=3, rank=RANK)
    assert [adapters.load(each.name, each) for each in (first, second)] == [0, 1]
    assert adapters.names == ("first", "second")

    adapters.of_tokens = of_rows(0, -1, 1, 0)
    got = logits(model, rows)
    wanted = merged_logits(family, first, rows, 1.5), plain, merged_logits(family, second, rows, 1.5)
    for row, merged in zip(range(4), (wanted[0], wanted[1], wanted[2], wanted[0]), strict=True):
        torch.testing.assert_close(got[row], merged[row], rtol=1e-4, atol=1e-4)
    for merged in (wanted[0], wanted[2]):
        assert (merged - plain).abs().max() > 0.1, "an adapter that does nothing would be found too"


def test_without_adapters_nothing_changes(tmp_path: Path) -> None:
    rows = tokens(2)
    model = load_model(save_published("llama", tmp_path / "model"))
    plain = logits(model, rows)
    adapters = Adapters(model, slots=2, rank=RANK)
    adapters.load("some", save_adapter(tmp_path / "some", "llama", ATTENTION))
    adapters.of_tokens = of_rows(-1, -1)
    torch.testing.assert_close(logits(model, rows), plain)
    adapters.of_tokens = of_rows(1, 1)  # empty
    torch.testing.assert_close(logits(model, rows), plain)


def test_adapters_come_and_go_in_place(tmp_path: Path) -> None:
    rows = tokens(2)
    model = load_model(save_published("llama", tmp_path / "model"))
    plain = logits(model, rows)
    adapters = Adapters(model, slots=1, rank=RANK)
    places = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    assert any("adapter_a" in name for name in places)
    memory = [buffer.untyped_storage().data_ptr() for buffer in model.buffers() if buffer.numel()]
    assert len(memory) == len(set(memory)), "sleep frees and restores each buffer by itself"
    for seed, names in enumerate((ATTENTION + MLP, ("up_proj",))):
        folder = save_adapter(tmp_path / str(seed), "llama", names, seed=seed)
        assert adapters.load(str(seed), folder) == adapters.slot(str(seed)) == 0
        adapters.of_tokens = of_rows(0, -1)
        got = logits(model, rows)
        torch.testing.assert_close(got[0], merged_logits("llama", folder, rows, 1.5)[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[1], plain[1])
        adapters.unload(str(seed))
        assert adapters.names == ()
        torch.testing.assert_close(logits(model, rows), plain)
    assert places == {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    assert not [name for name in model.state_dict() if "adapter" in name]


def test_one_adapter_cannot_spoil_the_others(tmp_path: Path) -> None:
    rows = tokens(2)
    model = load_model(save_published("llama", tmp_path / "model"))
    plain = logits(model, rows)
    folder = save_adapter(tmp_path / "huge", "llama", ATTENTION)
    tensors = {name: tensor * (1e38 if "lora_A" in name else 1) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    adapters = Adapters(model, slots=2, rank=RANK)
    adapters.load("huge", folder)
    adapters.of_tokens = of_rows(0, -1)
    got = logits(model, rows)
    assert not got[0].isfinite().all()
    torch.testing.assert_close(got[1], plain[1])


def test_scales_may_differ_between_layers_and_be_rank_stabilized(tmp_path: Path) -> None:
    rows = tokens(1)
    model = load_model(save_published("llama", tmp_path / "model"))
    adapters = Adapters(model, slots=2, rank=RANK)
    folder = save_adapter(tmp_path / "stabilized", "llama", ATTENTION, alpha=3.0, use_rslora=True)
    adapters.load("stabilized", folder)
    adapters.of_tokens = of_rows(0)
    wanted = merged_logits("llama", folder, rows, 3.0 / RANK**0.5)
    torch.testing.assert_close(logits(model, rows), wanted, rtol=1e-4, atol=1e-4)

    patterns = {"layers.1.self_attn.q_proj": 12.0, "v_proj": 12.0}
    folder = save_adapter(tmp_path / "patterned", "llama", ATTENTION, alpha=4.0, alpha_pattern=patterns)
    adapters.load("patterned", folder)
    tensors = load_file(folder / WEIGHTS)
    for name in tensors:
        if "lora_B" in name and ("layers.1.self_attn.q_proj" in name or "v_proj" in name):
            tensors[name] *= 3
    save_file(tensors, folder / WEIGHTS)
    adapters.of_tokens = of_rows(1)
    wanted = merged_logits("llama", folder, rows, 4.0 / RANK)
    torch.testing.assert_close(logits(model, rows), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "ep"), [("llama", 1), ("deepseek_v3", 1), ("deepseek_v3", 2)])
def test_ranks_that_share_the_model_share_its_adapters(gang: Gang, family: str, ep: int, tmp_path: Path) -> None:
    rows = tokens(4)
    config = config_from_huggingface(save_published(family, tmp_path / "published"))
    folder = str(save_random(tmp_path / "model", config, vocab=132))
    adapters = [str(save_adapter(tmp_path / str(seed), family, FAMILIES[family], seed=seed)) for seed in (1, 2)]
    arguments = folder, adapters, [0, -1, 1, 1], rows
    alone = hidden_with_adapters(*arguments)
    for shared in gang.run(hidden_with_adapters, *arguments, ep, ranks=2):
        torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-4)
    assert (hidden_with_adapters(folder, adapters, [-1] * 4, rows) - alone).abs().max() > 0.1


def test_adapters_are_added_to_fp8_weights(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "one", "llama", ATTENTION + MLP)
    model = load_model(save_published("llama", tmp_path / "model"))
    quantize_model(model)
    plain = copy.deepcopy(model)
    adapters = Adapters(model, slots=1, rank=RANK)
    adapters.load("one", folder)
    adapters.of_tokens = torch.tensor([0] * 8 + [-1] * 8, dtype=torch.int32)
    tensors = load_file(folder / WEIGHTS)
    x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))
    added = model.blocks[1].attention.output(x) - plain.blocks[1].attention.output(x)
    a, b = (tensors[Q_A.replace("0.self_attn.q", "1.self_attn.o").replace("_A", factor)] for factor in ("_A", "_B"))
    torch.testing.assert_close(added[0, :8], 1.5 * x[0, :8] @ a.T @ b.T, rtol=1e-4, atol=1e-4)
    assert not added[0, 8:].any()
    changed = model.blocks[1].mlp(x) - plain.blocks[1].mlp(x)
    assert changed[0, :8].abs().amin(0).min() > 0
    assert not changed[0, 8:].any()


@pytest.mark.parametrize("in_fp8", [False, True])
def test_few_tokens_get_the_adapters_that_many_get(
    in_fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, layers of few tokens add adapters themselves; here the same layers run without Triton's kernels."""
    model = load_model(save_published("qwen2", tmp_path / "model"))
    if in_fp8:
        quantize_model(model)
    adapters = Adapters(model, slots=2, rank=RANK)
    for seed in (1, 2):
        adapters.load(str(seed), save_adapter(tmp_path / str(seed), "qwen2", ATTENTION + MLP, seed=seed))
    adapters.of_tokens = torch.tensor([1, -1, 0, 1], dtype=torch.int32)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    block = model.blocks[1]
    layers = {"qkv": block.attention.qkv, "mlp": block.mlp}
    many = {name: layer(x) for name, layer in layers.items()}
    monkeypatch.setattr("craton.ml.serving.device.adapters.is_fused", lambda _: True)
    used = []
    for name in ("adapted_skinny_linear", "adapted_skinny_gated"):
        operation = getattr(kernels, name)
        monkeypatch.setattr(
            f"craton.ml.serving.device.adapters.{name}",
            lambda *given, operation=operation, name=name: (used.append(name), operation(*given))[1],
        )
    for name, layer in layers.items():
        tolerance = 0.05 if in_fp8 else 1e-5  # many tokens are rounded to fp8 as well
        torch.testing.assert_close(layer(x), many[name], rtol=tolerance, atol=tolerance * float(many[name].abs().max()))
    assert used == ["adapted_skinny_linear", "adapted_skinny_gated", "adapted_skinny_linear"]


class Folder:
    """An adapter for Llama that a test spoils."""

    def __init__(self, path: Path) -> None:
        self.path = save_adapter(path, "llama", ATTENTION)

    def configure(self, **fields: Any) -> None:
        known = json.loads((self.path / CONFIG).read_text())
        (self.path / CONFIG).write_text(json.dumps(known | fields))

    def change(self, name: str, tensor: Tensor | None) -> None:
        tensors = load_file(self.path / WEIGHTS)
        tensors |= {name: tensor} if tensor is not None else {}
        save_file(
            {key: value for key, value in tensors.items() if tensor is not None or key != name}, self.path / WEIGHTS
        )


EXPERT = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"
WRONG = {
    "no config": (lambda folder: (folder.path / CONFIG).unlink(), "has no adapter_config.json"),
    "a torn config": (lambda folder: (folder.path / CONFIG).write_text("{"), "cannot be read"),
    "no weights": (lambda folder: (folder.path / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "torn weights": (lambda folder: (folder.path / WEIGHTS).write_bytes(b"x" * 99), "truncated"),
    "another method": (lambda folder: folder.configure(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "dora": (lambda folder: folder.configure(use_dora=True), "DoRA"),
    "bias": (lambda folder: folder.configure(bias="all"), "bias is 'all'; it must be none"),
    "saved modules": (lambda folder: folder.configure(modules_to_save=["lm_head"]), "whole modules"),
    "pissa": (lambda folder: folder.configure(init_lora_weights="pissa"), "changes the base weights"),
    "no alpha": (lambda folder: folder.configure(lora_alpha=None), "r and lora_alpha as numbers"),
    "alpha pattern": (lambda folder: folder.configure(alpha_pattern={"(": 1}), "alpha_pattern .* cannot be used"),
    "experts": (lambda folder: folder.change(EXPERT, torch.zeros(4, 32)), "not routed experts"),
    "no A": (lambda folder: folder.change(Q_A, None), "q_proj has only lora_B"),
    "rank": (lambda folder: _widen(folder), f"rank {RANK + 1}; the maximum here is {RANK}"),
    "shape": (lambda folder: folder.change(Q_A, torch.zeros(RANK, 31)), r"A \[4, 31\].*needs \[rank, 32\]"),
    "infinite": (lambda folder: folder.change(Q_A, torch.full((RANK, 32), torch.inf)), "not finite"),
}


def _widen(folder: Folder) -> None:
    folder.change(Q_A, torch.zeros(RANK + 1, 32))
    folder.change(Q_A.replace("lora_A", "lora_B"), torch.zeros(32, RANK + 1))


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_served_is_refused_and_changes_nothing(wrong: str, tmp_path: Path) -> None:
    spoil, words = WRONG[wrong]
    folder = Folder(tmp_path / "adapter")
    model = load_model(save_published("llama", tmp_path / "model"))
    adapters = Adapters(model, slots=1, rank=RANK)
    spoil(folder)
    with pytest.raises(AdapterError, match=words):
        adapters.load("spoilt", folder.path)
    assert adapters.names == ()
    assert not any(buffer.any() for name, buffer in model.named_buffers() if "adapter" in name)


def test_names_and_slots_are_told(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", "llama", ATTENTION)
    adapters = Adapters(load_model(save_published("llama", tmp_path / "model")), slots=2, rank=RANK)
    adapters.load("one", folder)
    with pytest.raises(AdapterError, match="'one' is already loaded"):
        adapters.load("one", folder)
    adapters.load("two", folder)
    with pytest.raises(AdapterError, match=r"all 2 slots are in use \(one, two\)"):
        adapters.load("three", folder)
    adapters.unload("one")
    assert adapters.load("three", folder) == 0
    for ask in (adapters.slot, adapters.unload):
        with pytest.raises(AdapterError, match="'one' is not loaded; loaded: two, three"):
            ask("one")
