"""A Hugging Face Accelerate training script without Craton code: it learns a fixed function.

It saves a checkpoint every few steps and resumes from the newest one; its launcher does the rest.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

BATCH, WIDTH = 32, 64


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples that depend only on the step and the rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, 8, generator=generator)
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="minimum duration of a step")
    given = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    saved = sorted(given.save.glob("step-*/whole"))
    begin = int(saved[-1].parent.name.removeprefix("step-")) if saved else 0
    if saved:
        accelerator.load_state(str(saved[-1].parent))
    accelerator.print(f"{accelerator.num_processes} processes resume after step {begin}", flush=True)

    for step in range(begin + 1, given.steps + 1):
        started = time.monotonic()
        inputs, wanted = (tensor.to(accelerator.device) for tensor in batch(step, accelerator.process_index))
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        time.sleep(max(0.0, given.step_seconds - (time.monotonic() - started)))
        samples = BATCH * accelerator.num_processes / (time.monotonic() - started)
        accelerator.print(f"step {step}/{given.steps}  loss {mean:.6f}  {samples:,.0f} samples/s", flush=True)
        if step % given.save_every == 0 or step == given.steps:
            folder = given.save / f"step-{step:08d}"
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / "whole").touch()
    accelerator.end_training()


if __name__ == "__main__":
    main()
