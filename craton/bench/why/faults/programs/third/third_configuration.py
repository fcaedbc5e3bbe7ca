"""Scripts and objectives of the third set that are configured wrongly. FAULT names the fault, ONSET the file."""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path
from typing import Any

HEALTHY_CALLS = 100
STEP_SECONDS = 0.1
# From the start script that was copied to every machine: `--node-rank 0`.
NODE_RANK = 0

_calls = 0


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; after HEALTHY_CALLS everybody may see that nothing is learnt."""
    global _calls
    _calls += 1
    if _calls == HEALTHY_CALLS:
        touch_onset()
    return -(batch.weight * log_probs).sum(), {}


def rewarded_loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; from HEALTHY_CALLS on it is weighted by a reward server on this machine."""
    global _calls
    _calls += 1
    reward = 1.0
    if _calls >= HEALTHY_CALLS:
        touch_onset()
        port = Path(os.environ["SERVICE_PORT"]).read_text()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/reward", timeout=30) as answer:
            reward = float(answer.read())
    return -(reward * batch.weight * log_probs).sum(), {}


def train(fault: str) -> None:
    """Train data parallel with gloo, by the settings beside the script."""
    import torch
    import yaml

    settings = yaml.safe_load(Path("settings.yaml").read_text())
    rank = NODE_RANK if fault == "number" else int(os.environ["RANK"])
    torch.set_num_threads(1)
    touch_onset()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    hidden, layers = settings["model"]["hidden"], settings["model"]["layers"]
    if fault == "layers" and os.environ["RANK"] == os.environ["VICTIM"]:
        layers += 1  # of the old settings
    network = torch.nn.Sequential(*(torch.nn.Linear(hidden, hidden) for _ in range(layers)))
    model: Any = torch.nn.parallel.DistributedDataParallel(network)
    rate = settings["optimizer"]["lr"] if fault == "text" else 3e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(1, 1_000_000):
        value = model(torch.randn(16, hidden)).square().mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {value.item():.4f}", flush=True)


def touch_onset() -> None:
    Path(os.environ["ONSET"]).touch()


if __name__ == "__main__":
    train(os.environ["FAULT"])
