"""Folders in 4 bits: every format gives the numbers that its description says, and what does not fit it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_folders import exact_model, pack_folder, quantization_config
from safetensors.torch import load_file, save_file

from craton.job import ModelError
from craton.job.model import Int4Format, ModelShape, int4_format
from craton.ml.models import Decoder, DecoderConfig, WeightsError, load_weights, save_folder
from craton.ml.models.packed import PackedWeightError

TINY = DecoderConfig(ModelShape("tiny", 1, 64, 96, 2, 1, 32, 64), initializer_range=0.2)
FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"method": "awq"},
    "awq whole rows": {"method": "awq", "group": -1},
    "gptq": {"method": "gptq"},
    "gptq symmetric": {"method": "gptq", "symmetric": True},
    "gptq v2": {"method": "gptq", "version": "gptq_v2"},
    "gptq by activation": {"method": "gptq", "act_order": 1},
    "compressed-tensors": {"method": "compressed-tensors"},
    "compressed-tensors whole rows": {"method": "compressed-tensors", "symmetric": True, "group": -1},
    "compressed-tensors by activation": {"method": "compressed-tensors", "act_order": 1},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp32; one row is positive, so that zero points of 0 are stored."""
    model = Decoder(TINY)
    model.initialize(0)
    model.blocks[0].mlp.up.weight.data[3].abs_()
    return save_folder(model.state_dict(), TINY, tmp_path_factory.mktemp("models") / "plain", dtype=torch.float32)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_in_16_bits(kind: str, plain: Path, tmp_path: Path) -> None:
    exact = pack_folder(plain, tmp_path / "packed", **FORMATS[kind])
    wanted = exact_model(plain, exact, tmp_path / "exact")
    assert any(not torch.equal(exact[name], tensor) for name, tensor in load_file(plain / "model.safetensors").items())
    model = Decoder(TINY)
    load_weights(model, tmp_path / "packed", take=lambda _entry, _theirs: False)
    for name, tensor in wanted.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), tensor, rtol=1e-6, atol=0, msg=f"{kind}: {name}")


def test_training_refuses_them(plain: Path, tmp_path: Path) -> None:
    pack_folder(plain, tmp_path / "packed", "awq")
    with pytest.raises(WeightsError, match=r"training cannot start from quantized weights: .*q_proj\.weight"):
        load_weights(Decoder(TINY), tmp_path / "packed")


def without_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def with_quantization(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        new = change(tensors.pop(name))
        save_file(tensors | ({} if new is None else {name: new.contiguous()}), folder / "model.safetensors")

    return apply


Q = "model.layers.0.self_attn.q_proj"
BROKEN_FORMS: dict[str, dict[str, Any]] = {
    "gptq act order": {"method": "gptq", "act_order": 1},
    "compressed-tensors asymmetric": {"method": "compressed-tensors"},
}
BROKEN: dict[str, tuple[str, Callable[[Path], None], type[Exception], str]] = {
    "no config": ("awq", without_config, ModelError, "no quantization_config, so the format .* is unknown; copy it"),
    "no scales": ("awq", changed(f"{Q}.scales", lambda _: None), PackedWeightError, "q_proj has no tensor scales"),
    "no zero points": ("gptq", changed(f"{Q}.qzeros", lambda _: None), PackedWeightError, "no tensor qzeros"),
    "scales of another size": (
        "gptq",
        changed(f"{Q}.scales", lambda scales: torch.cat((scales, scales[:1]))),
        PackedWeightError,
        "do not divide its 64 × 64 weights into equal groups",
    ),
    "group of no scale": (
        "gptq",
        changed(f"{Q}.g_idx", lambda order: order + 1),
        PackedWeightError,
        r"group indices of shape \[64\] up to 2 for 64 inputs in 2 groups",
    ),
    "no order of inputs": (
        "gptq act order",
        changed(f"{Q}.g_idx", lambda _: None),
        PackedWeightError,
        "q_proj has no tensor g_idx, which gptq weights need",
    ),
    "no zero points that the config states": (
        "compressed-tensors asymmetric",
        changed(f"{Q}.weight_zero_point", lambda _: None),
        PackedWeightError,
        "q_proj has no tensor weight_zero_point",
    ),
    "scales that are no numbers": (
        "awq",
        changed(f"{Q}.scales", lambda scales: scales * torch.nan),
        PackedWeightError,
        "q_proj has scales that are no finite numbers",
    ),
    "codes that are no integers": (
        "awq",
        changed(f"{Q}.qweight", lambda codes: codes.float()),
        PackedWeightError,
        r"q_proj\.qweight is float32; expected integers",
    ),
    "groups of another size": (
        "awq",
        lambda folder: with_quantization(folder, group_size=64),
        PackedWeightError,
        "has 3 groups of its 96 inputs, but config.json states groups of 64",
    ),
    "another shape": (
        "compressed-tensors",
        changed(f"{Q}.weight_shape", lambda shape: shape + 1),
        PackedWeightError,
        r"weight_shape \[65, 65\], but its codes are 64 × 64",
    ),
    "a bias": (
        "gptq",
        changed(f"{Q}.bias", lambda bias: bias + 1),
        WeightsError,
        "not part of the model: .*q_proj.bias",
    ),
    "zero points of another size": (
        "awq",
        changed(f"{Q}.qzeros", lambda zeros: zeros[:1]),
        PackedWeightError,
        r"zero points of shape \[64, 1\] for scales of shape \[64, 2\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_folders_that_do_not_fit_their_format(case: str, plain: Path, tmp_path: Path) -> None:
    method, spoil, kind, message = BROKEN[case]
    pack_folder(plain, tmp_path / "packed", **BROKEN_FORMS.get(method, {"method": method}))
    spoil(tmp_path / "packed")
    with pytest.raises(kind, match=message):
        load_weights(Decoder(TINY), tmp_path / "packed", take=lambda _entry, _theirs: False)


def test_what_a_config_says() -> None:
    def stated(config: dict[str, Any]) -> Int4Format | None:
        return int4_format({"quantization_config": config}, "config.json")

    assert int4_format({}, "config.json") is None
    assert stated(quantization_config("awq", 128)) == Int4Format("awq", 128, True)
    own = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}
    assert stated(own) == Int4Format("awq", 64, True), "the keys of AutoAWQ's own file"
    assert stated(quantization_config("gptq", -1, symmetric=True)) == Int4Format("gptq", None, False, zero_offset=1)
    assert stated(quantization_config("gptq", 128, version="gptq_v2")) == Int4Format("gptq", 128, True)
    ordered = Int4Format("gptq", 128, True, zero_offset=1, by_activation=True)
    assert stated(quantization_config("gptq", 128, act_order=True)) == ordered
    skipped = quantization_config("gptq", 128) | {"dynamic": {"-:.*lm_head": {}}}
    assert stated(skipped) == Int4Format("gptq", 128, True, zero_offset=1)
    channel = quantization_config("compressed-tensors", -1, symmetric=True)
    assert stated(channel) == Int4Format("compressed-tensors", None, False)
    ordered = Int4Format("compressed-tensors", 64, True, by_activation=True)
    assert stated(quantization_config("compressed-tensors", 64, act_order=True)) == ordered
    assert stated(quantization_config("compressed-tensors", 64)) == Int4Format("compressed-tensors", 64, True)


def compressed(**changes: Any) -> dict[str, Any]:
    config = quantization_config("compressed-tensors", 32)
    scheme = config["config_groups"]["group_0"]
    for key, value in changes.items():
        (scheme["weights"] if key in scheme["weights"] else scheme if key == "input_activations" else config)[key] = (
            value
        )
    return config


GPTQ, AWQ = quantization_config("gptq"), quantization_config("awq")
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "fp8"}, "quant_method 'fp8' is not supported; allowed: awq, gptq, compressed-tensors. Serve"),
    ({}, "quant_method None is not supported"),
    (GPTQ | {"bits": 8}, "quantization_config.bits 8 is not supported; allowed: 4"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; allowed: gptq, gptq_v2"),
    (GPTQ | {"group_size": 0}, "group_size 0 is not supported; allowed: a number of inputs, or -1 for all"),
    (GPTQ | {"dynamic": {".*down.*": {"bits": 8}}}, r"dynamic\..*down.*\.bits 8 is not supported; allowed: 4"),
    (AWQ | {"bits": 3}, "bits 3 is not supported"),
    (AWQ | {"version": "gemv"}, "version 'gemv' is not supported; allowed: gemm"),
    (AWQ | {"zero_point": False}, "zero_point False is not supported; allowed: True"),
    (compressed(num_bits=8), r"config_groups\.group_0\.weights\.num_bits 8 is not supported; allowed: 4"),
    (compressed(type="float"), "weights.type 'float' is not supported; allowed: int"),
    (compressed(strategy="tensor"), "strategy 'tensor' is not supported; allowed: group, channel"),
    (compressed(input_activations={"num_bits": 8}), "input_activations .* allowed: none; weight-only"),
    (compressed(format="marlin-24"), "format 'marlin-24' is not supported; allowed: pack-quantized"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format 'sparse-24-bitmask'"),
    (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme .* serve.kv_precision: fp8"),
    (compressed(config_groups={}), "config_groups {} is not supported; allowed: one or more groups of layers"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        int4_format({"quantization_config": config or {"bits": 4}}, "config.json")
    assert str(error.value).startswith("config.json: quantization_config.")
    assert "\n" not in str(error.value)
