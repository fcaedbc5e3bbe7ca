"""Folders of models in 4 bits, written from the descriptions of the formats with numpy alone, and their exact weights.

`pack_folder` rounds the linear layers of a Hugging Face folder as a quantizer would and writes packed tensors. It
returns what the codes mean, by the names of the weights in 16 bits: the reference of every test.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from craton.ml.models import Decoder, config_from_huggingface, load_weights

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column AWQ_NIBBLES[i]


def pack_folder(
    source: Path,
    target: Path,
    method: str,
    group: int = 32,
    symmetric: bool = False,
    act_order: int | None = None,  # seed of the order of inputs; layers with the same inputs share it
    own_orders: bool = False,  # each layer has its own order
    version: str = "gptq",
    skip: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Write `source` in 4 bits to `target`; return its weights by name."""
    shutil.copytree(source, target)
    plain = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    tensors: dict[str, np.ndarray] = {}
    exact: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(plain.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in LAYERS or any(part in name for part in skip):
            tensors[name], exact[name] = tensor.numpy(), tensor
            continue
        weight = tensor.numpy().astype(np.float64)
        size = weight.shape[1] if group == -1 else group
        of_inputs = np.arange(weight.shape[1]) // size
        if act_order is not None:
            seed = act_order + (number if own_orders else weight.shape[1])
            of_inputs = np.random.default_rng(seed).permutation(of_inputs)
        codes, scale, zero = rounded(weight, of_inputs, symmetric)
        exact[name] = torch.from_numpy(
            ((codes.astype(np.float64) - zero[:, of_inputs]) * scale.astype(np.float64)[:, of_inputs]).astype(
                np.float32
            )
        )
        if method == "compressed-tensors":
            parts = compressed(codes, scale, zero, None if symmetric else zero)
            if act_order is not None:
                parts["weight_g_idx"] = of_inputs.astype(np.int32)
        elif method == "awq":
            parts = {"qweight": awq_words(codes.T), "qzeros": awq_words(zero.T), "scales": scale.T.copy()}
        else:
            stored = zero.astype(np.int64) - (version == "gptq")
            parts = {
                "qweight": words(codes).T.copy(),
                "qzeros": words(stored.T),
                "scales": scale.T.copy(),
                "g_idx": of_inputs.astype(np.int32),
                "bias": np.zeros(len(codes), np.float16),  # as AutoGPTQ writes for layers without one
            }
            if f"{module}.bias" in plain:
                del parts["bias"]
        tensors |= {f"{module}.{kind}": part for kind, part in parts.items()}
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = quantization_config(method, group, symmetric, act_order is not None, version)
    (target / "config.json").write_text(json.dumps(config))
    return exact


def quantization_config(
    method: str, group: int = 32, symmetric: bool = False, act_order: bool = False, version: str = "gptq"
) -> dict[str, Any]:
    """What the libraries write in config.json."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    if method == "gptq":
        common = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": act_order}
        return common | ({"checkpoint_format": version} if version == "gptq_v2" else {})
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "actorder": "group" if act_order else None}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def rounded(weight: np.ndarray, of_inputs: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in] from 0 to 15, scales in fp16 and zero points [out, groups] for any assignment to groups."""
    groups = of_inputs.max() + 1
    low = np.stack([weight[:, of_inputs == index].min(1) for index in range(groups)], 1)
    high = np.stack([weight[:, of_inputs == index].max(1) for index in range(groups)], 1)
    scale = (np.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15).astype(np.float16)
    zero = np.full(low.shape, 8) if symmetric else np.clip(np.round(-low / scale.astype(np.float64)), 0, 15)
    codes = np.round(weight / scale.astype(np.float64)[:, of_inputs]) + zero[:, of_inputs]
    return np.clip(codes, 0, 15).astype(np.uint8), scale, zero.astype(np.uint8)


def words(codes: np.ndarray) -> np.ndarray:
    """[rows, columns] → int32 [rows, columns / 8]: nibble i of a word is column i. A negative number borrows from the
    next nibble, as where packed words are subtracted."""
    eight = codes.astype(np.int64).reshape(len(codes), -1, 8)
    return np.ascontiguousarray((eight << np.arange(0, 32, 4)).sum(-1).astype(np.uint32).view(np.int32))


def awq_words(codes: np.ndarray) -> np.ndarray:
    eight = codes.astype(np.int64).reshape(len(codes), -1, 8)[..., AWQ_NIBBLES]
    return words(eight.reshape(len(codes), -1))


def compressed(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, stated_zero: np.ndarray | None
) -> dict[str, Any]:
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
    parts = {
        "weight_packed": words(padded),
        "weight_scale": scale,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if stated_zero is not None:
        tall = np.pad(stated_zero, ((0, -len(zero) % 8), (0, 0)))
        parts["weight_zero_point"] = words(tall.T).T.copy()
    return parts


def exact_model(source: Path, exact: dict[str, torch.Tensor], folder: Path) -> Decoder:
    """The model in fp32 with these published weights."""
    shutil.copytree(source, folder)
    from safetensors.torch import save_file as save

    save({name: tensor.clone() for name, tensor in exact.items()}, folder / "model.safetensors")
    model = Decoder(config_from_huggingface(folder)).eval().requires_grad_(False)
    load_weights(model, folder)
    return model
