"""A rank that shares a GPU bounds its tensors to its part of the memory."""

from __future__ import annotations

import pytest
import torch

from craton.ml.training.build import use_gpu


@pytest.mark.parametrize(("fraction", "bounds"), [("0.2429", [(0.2429, 0)]), (None, [])])
def test_the_fraction_of_the_launch_is_set(
    fraction: str | None, bounds: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    set_bounds: list[tuple[float, int | None]] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: set_bounds.append((share, device.index)),
    )
    monkeypatch.delenv("CRATON_GPU_MEMORY_FRACTION", raising=False)
    if fraction is not None:
        monkeypatch.setenv("CRATON_GPU_MEMORY_FRACTION", fraction)
    use_gpu(torch.device("cuda", 0))
    assert (chosen, set_bounds) == ([torch.device("cuda", 0)], bounds)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_the_part_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    monkeypatch.setenv("CRATON_GPU_MEMORY_FRACTION", "0.1")
    torch.cuda.empty_cache()
    try:
        use_gpu(device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 5, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
