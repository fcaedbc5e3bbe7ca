"""Writes the broken weights of the third family server: `third_server.py damage MODEL` puts NaN into a matrix of a
model, `third_server.py adapter FOLDER` writes a LoRA adapter of another width."""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH = 128  # twice that of the model


def damage(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith("down_proj.weight"))
    tensors[name][0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def adapter(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": torch.randn(4, WIDTH), f"{layer}.lora_B.weight": torch.zeros(WIDTH, 4)}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    {"damage": damage, "adapter": adapter}[sys.argv[1]](Path(sys.argv[2]))
