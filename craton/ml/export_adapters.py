"""Export the adapters of a run as a folder that PEFT and `craton serve --adapter` load with the base model.

A fused projection has one adapter here but one per layer in PEFT: these share A, and B is split.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from craton.errors import CratonError
from craton.job.sections import Lora
from craton.ml.models import SCORE, DecoderConfig, save_tensors, weight_entries

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterExportError(CratonError):
    """The adapters of a run cannot be written."""


def save_adapters(
    state: dict[str, Tensor], config: DecoderConfig, lora: Lora, base: str, folder: str | Path, dtype: torch.dtype
) -> Path:
    """Write the folder; it appears only when complete. `state` has lora_a and lora_b of every adapted layer under the
    decoder's names, and the whole scalar head of a reward model."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AdapterExportError(f"{folder} exists and is not an empty folder; choose another name, or remove it")
    tensors: dict[str, Tensor] = {}
    for entry in weight_entries(config):
        path = entry.ours.removesuffix(".weight")
        if (b := state.get(f"{path}.lora_b")) is None:
            continue
        a = state[f"{path}.lora_a"].to(dtype)
        for name, part in replace(entry, shape=(entry.shape[0], lora.rank)).split(b, dtype):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = a.clone()  # in one file no two tensors may share memory
            tensors[f"{module}.lora_B.weight"] = part
    targets = sorted({name.split(".")[-3] for name in tensors})
    if SCORE in state:
        tensors[f"base_model.model.{SCORE}"] = state[SCORE].to(dtype)
    fields = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if SCORE in state else "CAUSAL_LM",
        "modules_to_save": ["score"] if SCORE in state else None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha or lora.rank,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        save_tensors(tensors, partial / WEIGHTS)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise AdapterExportError(f"{folder} cannot be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
