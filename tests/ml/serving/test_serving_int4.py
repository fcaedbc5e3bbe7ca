"""Weights in 4 bits: served as their folder says or rounded at load, with adapters, in parts, and in place of
others."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from packed_folders import exact_model, pack_folder
from safetensors.torch import save_file
from served_ranks import empty_part, hidden, hidden_in_int4, load_model, random_model, save_random
from test_serving_float8 import DENSE, LATENT, MIXTURE, close, tokens
from torch import Tensor

from craton.job import parse_job
from craton.job.model import ROUNDED_AT_LOAD
from craton.ml.collectives import local
from craton.ml.kernels.serving.int4 import dequantize_int4
from craton.ml.models import Decoder, DecoderConfig, WeightsError
from craton.ml.serving import EngineSettings
from craton.ml.serving.device import Adapters, EngineRank, load_named, load_served, named_targets
from craton.ml.serving.device.int4 import Int4Error, ServedInt4Linear, ServedInt4Mlp, load_packed, round_model
from craton.ml.serving.device.weights import update_from_folder, update_from_state
from craton.ml.serving.engine.build import build_runner
from craton.orchestration import StartError
from craton.orchestration.draft.check import check_weights
from craton.planning.serving import ServedModel

PUBLISHED = replace(MIXTURE, shape=replace(MIXTURE.shape, shared_experts=0, dense_layers=0, qk_norm=True))
KINDS = {"dense": DENSE, "mixture": PUBLISHED, "latent": LATENT}
PLAIN = {"dense": [], "mixture": [], "latent": ["0.attention.kv_b", "1.attention.kv_b"]}
FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"method": "awq"},
    "gptq": {"method": "gptq", "act_order": 1},
    "compressed-tensors": {"method": "compressed-tensors", "symmetric": True},
}
TOKENS = tokens()


def packed(folder: Path, config: DecoderConfig = DENSE, seed: int = 0, **form: Any) -> tuple[Path, Decoder]:
    """A folder in 4 bits of a random model, and the model in fp32 that its codes mean."""
    source = save_random(folder / f"plain-{seed}", config, seed)
    exact = pack_folder(source, folder / f"packed-{seed}", **{"method": "awq", **form})
    return folder / f"packed-{seed}", exact_model(source, exact, folder / f"exact-{seed}")


def load(folder: Path) -> Decoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_packed(empty_part(folder), folder, torch.device("cpu"))


def is_same(got: Tensor, wanted: Tensor) -> bool:
    return float((got - wanted).norm() / wanted.norm()) < 1e-5


def int4_layers(model: Decoder) -> list[ServedInt4Linear]:
    return [module for module in model.modules() if isinstance(module, ServedInt4Linear)]


@pytest.mark.filterwarnings("ignore:.*stored in 4 bits but served in bf16")
@pytest.mark.parametrize("kind", FORMATS)
def test_hidden_states_are_those_of_the_format(kind: str, tmp_path: Path) -> None:
    folder, wanted = packed(tmp_path, **FORMATS[kind])
    found, plain = hidden_in_int4(str(folder), TOKENS)
    assert is_same(found, hidden(wanted, TOKENS))
    assert not plain


@pytest.mark.parametrize("kind", ["mixture", "latent"])
def test_what_no_kernel_supports_is_served_in_16_bits_and_said(kind: str, tmp_path: Path) -> None:
    folder, wanted = packed(tmp_path, KINDS[kind], method="gptq", group=16)
    message = r"stored in 4 bits but served in bf16, .* KiB instead of .* KiB"
    with pytest.warns(UserWarning, match=message):
        found, plain = hidden_in_int4(str(folder), TOKENS)
    assert is_same(found, hidden(wanted, TOKENS))
    assert plain == PLAIN[kind]


def test_layers_that_a_folder_leaves_out_stay_as_they_are(tmp_path: Path) -> None:
    folder, wanted = packed(tmp_path, skip=("layers.0", "up_proj"))
    found, plain = hidden_in_int4(str(folder), TOKENS)
    assert is_same(found, hidden(wanted, TOKENS))
    assert plain == ["0.attention.qkv", "0.attention.output", "0.mlp.gate", "0.mlp.up", "0.mlp.down", "1.mlp.up"]


def test_inputs_in_different_orders_are_served_in_16_bits_where_layers_are_fused(tmp_path: Path) -> None:
    folder, wanted = packed(tmp_path, method="gptq", act_order=1, own_orders=True)
    with pytest.warns(UserWarning, match="order differently"):
        found, plain = hidden_in_int4(str(folder), TOKENS)
    assert is_same(found, hidden(wanted, TOKENS))
    assert plain == ["0.attention.qkv", "1.attention.qkv"], "gate and up have an order each"


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_ranks_take_their_parts(kind: str, gang: Gang, tmp_path: Path) -> None:
    """Of 96 inputs each of two ranks has 48: half a group of 32. Inputs that are ordered by activation cannot be
    split."""
    folder, wanted = packed(tmp_path, **FORMATS[kind])
    (first, plain), (second, _) = gang.run(hidden_in_int4, str(folder), TOKENS, ranks=2)
    assert torch.equal(first, second)
    assert is_same(first, hidden(wanted, TOKENS))
    cut = [f"{layer}.{name}" for layer in (0, 1) for name in ("attention.output", "mlp.down")]
    assert plain == (cut if kind == "gptq" else [])


def save_adapter(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(5)
    sizes = {
        "self_attn.q_proj": (64, 64),
        "self_attn.v_proj": (32, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
    }
    tensors = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{factor}.weight": torch.randn(shape, generator=generator)
        / 4
        for layer in (0, 1)
        for name, (rows, columns) in sizes.items()
        for factor, shape in (("A", (4, columns)), ("B", (rows, 4)))
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return folder


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_adapters_on_top(ranks: int, gang: Gang, tmp_path: Path) -> None:
    folder, wanted = packed(tmp_path)
    adapter = save_adapter(tmp_path / "adapter")
    added = Adapters(wanted, slots=2, rank=4)
    added.of_tokens = torch.full((TOKENS.numel(),), -1, dtype=torch.int32)
    without = hidden(wanted, TOKENS)
    added.of_tokens = torch.full((TOKENS.numel(),), added.load("adapter", adapter), dtype=torch.int32)
    arguments = (str(folder), TOKENS, str(adapter))
    found = (gang.run(hidden_in_int4, *arguments, ranks=2) if ranks > 1 else [hidden_in_int4(*arguments)])[0][0]
    assert is_same(found, hidden(wanted, TOKENS))
    assert not is_same(found, without)


@pytest.mark.parametrize(
    "form",
    [pytest.param({}, id="awq", marks=pytest.mark.slow), pytest.param(FORMATS["gptq"], id="by activation")],
)
def test_new_weights_in_16_bits_are_rounded_into_place(form: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = packed(tmp_path, **form)
    model, new = load(folder), save_random(tmp_path / "new", DENSE, seed=7)
    places = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    update_from_folder(model, new)
    first = hidden(model, TOKENS)
    wanted = load_model(new)
    for name, layer in model.named_modules():
        if isinstance(layer, ServedInt4Linear):
            error = (dequantize_int4(layer.packed, torch.float32) - wanted.get_submodule(name).weight).abs()
            assert (error <= 0.52 * layer.weight_scale.float().repeat_interleave(layer.packed.group, 1)).all()
    update_from_folder(model, folder)
    update_from_state(model, load_model(new).named_parameters())
    assert torch.equal(hidden(model, TOKENS), first)
    assert [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())] == places


def test_new_weights_in_4_bits_need_the_same_groups(tmp_path: Path) -> None:
    folder, _ = packed(tmp_path)
    other, wanted = packed(tmp_path, seed=1)
    narrow, _ = packed(tmp_path, seed=2, group=16)
    model = load(folder)
    update_from_folder(model, other)
    assert is_same(hidden(model, TOKENS), hidden(wanted, TOKENS))
    with pytest.raises(WeightsError, match=r"not stored in the groups that are served .*; the weights are unchanged"):
        update_from_folder(model, narrow)
    assert is_same(hidden(model, TOKENS), hidden(wanted, TOKENS))
    with pytest.raises(
        WeightsError, match=r"blocks\.0\.attention\.qkv\.weight is \[128, 63\]; the model needs \[128, 64\]"
    ):
        update_from_state(model, [("blocks.0.attention.qkv.weight", torch.zeros(128, 63))])


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(level: int, tmp_path: Path) -> None:
    folder, _ = packed(tmp_path)
    model, new = load(folder), save_random(tmp_path / "new", DENSE, seed=7)
    update_from_folder(model, new)
    wanted = hidden(model, TOKENS)
    runner, _, _ = build_runner(model, EngineSettings(blocks=8, max_length=64))
    rank = EngineRank(runner)
    rank.sleep(level)
    assert all(local(tensor).untyped_storage().nbytes() == 0 for tensor in named_targets(model).values())
    rank.wake(("weights", "kv_cache"))
    if level == 2:
        rank.update_from_folder(str(new))
    assert torch.equal(hidden(model, TOKENS), wanted)


@pytest.mark.filterwarnings("ignore:precision int4. routed experts")
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_at_load(kind: str) -> None:
    model = random_model(KINDS[kind])
    wanted = hidden(model, TOKENS)
    others = dict(model.named_parameters())
    round_model(model)
    assert close(hidden(model, TOKENS), wanted, 0.5), "of wide random weights in two layers"
    left = {name for name, tensor in model.named_parameters() if others[name] is tensor}
    rounded = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, ServedInt4Linear)}
    assert left | rounded == set(others)
    assert all(
        "experts" in name or "kv_b" in name
        for name in left
        if name.startswith("blocks.") and others[name].ndim > 1 and "router" not in name
    )
    assert all(isinstance(module, ServedInt4Mlp) for name, module in model.named_modules() if name.endswith("shared"))


def test_experts_that_stay_in_16_bits_are_said() -> None:
    with pytest.warns(UserWarning, match=r"routed experts are not quantized at load and stay in bf16, 96\.0 KiB"):
        round_model(random_model(PUBLISHED))


def test_sizes_without_groups_are_refused_before_anything_changes() -> None:
    model = random_model(DENSE, ffn_hidden=100)
    wanted = hidden(model, TOKENS)
    with pytest.raises(
        Int4Error, match=r"blocks\.0\.mlp\.down\.weight is 64 × 100; groups of 16 inputs .*precision bf16"
    ):
        round_model(model)
    assert torch.equal(hidden(model, TOKENS), wanted)


@pytest.mark.filterwarnings("ignore:.*in bf16")
@pytest.mark.parametrize("kind", KINDS)
def test_plans_have_the_bytes_that_the_engine_holds(kind: str, tmp_path: Path) -> None:
    """In sizes of whole units: 128 inputs. Norms are not part of a plan."""
    is_moe = KINDS[kind].shape.is_moe
    shape = replace(KINDS[kind].shape, hidden=128, ffn_hidden=128, head_dim=32, moe_ffn_hidden=128 * is_moe)
    if shape.mla is not None:
        shape = replace(shape, mla=replace(shape.mla, q_lora=128, kv_lora=128, v_head=32))
    config = replace(KINDS[kind], shape=shape, qkv_bias=False)
    rounded = random_model(config).bfloat16()
    round_model(rounded)
    folder, _ = packed(tmp_path, config, group=64)
    stored = load_packed(empty_part(folder).bfloat16(), folder, torch.device("cpu"))
    for model, form in ((rounded, ROUNDED_AT_LOAD), (stored, stored.config.shape.int4)):
        held = sum(
            local(tensor).nbytes
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if "norm" not in name and "expert_load" not in name
        )
        plan = ServedModel(replace(shape, int4=form), "int4")
        assert held == pytest.approx(plan.weight_bytes, rel=1e-3)


def test_other_formats_are_refused_before_a_start(tmp_path: Path) -> None:
    folder, _ = packed(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bits"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    text = f"kind: serve\nmodel: {folder}\ncluster: local\n"
    message = r"job\.yaml:2: .*config\.json: quantization_config\.bits 8 is not supported; allowed: 4\. Serve"
    with pytest.raises(StartError, match=message):
        check_weights(parse_job(text))
    draft = text.replace(str(folder), str(tmp_path / "plain-0")) + f"serve: {{speculate: {{model: {folder}}}}}\n"
    with pytest.raises(StartError, match=r"job\.yaml:4: serve\.speculate\.model: .*bits 8 is not supported"):
        check_weights(parse_job(draft))


def test_a_job_serves_a_folder_in_4_bits_and_rounds_another(tmp_path: Path) -> None:
    folder, wanted = packed(tmp_path)
    plain = tmp_path / "plain-0"
    text = "kind: serve\nmodel: {}\ncluster: local\nserve: {{{}}}\n"
    stored = parse_job(text.format(folder, f"speculate: {{model: {folder}}}"), folder=tmp_path)
    assert stored.serve is not None
    assert (stored.serve.precision, stored.draft_precision) == ("int4", "int4")
    served = load_served(stored, torch.device("cpu"))
    assert served.draft is not None
    for model in (served.model, served.draft):
        assert len(int4_layers(model)) == 10
        assert model.head_weight.dtype is torch.bfloat16
        assert close(hidden(model, TOKENS).float(), hidden(wanted, TOKENS), 0.05)
    rounded = load_served(parse_job(text.format(plain, "precision: int4"), folder=tmp_path), torch.device("cpu")).model
    assert len(int4_layers(rounded)) == 10
    expected = random_model(DENSE).bfloat16()
    round_model(expected)
    assert torch.equal(hidden(rounded, TOKENS), hidden(expected, TOKENS))
    assert len(int4_layers(load_named(str(folder), None, torch.device("cpu"), torch.bfloat16).model)) == 10
    random = parse_job(text.format(plain, "precision: int4, initialize: random"), folder=tmp_path)
    assert len(int4_layers(load_served(random, torch.device("cpu")).model)) == 10
