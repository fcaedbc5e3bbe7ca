"""From a GPU the copy into a slot runs beside the computation, and is whole before the state may change."""

from __future__ import annotations

import time

import pytest
import torch
from keepers import Keepers
from torch import Tensor

from craton.ml.training.checkpoint import Checkpointer
from craton.ml.training.checkpoint.peer import PeerSetup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUMBERS = 64 * 2**20  # 256 MiB of fp32


def state(value: float) -> dict[str, Tensor]:
    device = torch.device("cuda")
    return {
        "model.a": torch.full((NUMBERS,), value, device=device),
        "model.b": torch.full((1000, 3), value, dtype=torch.bfloat16, device=device),
        "optimizer.count": torch.tensor(value, device=device),
    }


def checkpointer_of(name: str, generation: int) -> Checkpointer:
    return Checkpointer([], 0, 1, PeerSetup(name, "node-0", ["node-0"], {}, generation, every_steps=1))


def test_a_snapshot_is_of_the_state_before_the_update(keepers: Keepers) -> None:
    keeper = keepers.start("node-0")
    checkpointer = checkpointer_of(keeper.name, 1)
    tensors = state(0.0)
    checkpointer.reserve(tensors, 0)
    assert checkpointer._peer is not None
    checkpointer._peer._end_reserve()  # which the first steps do not wait for
    blocked = []
    for step in range(1, 6):
        checkpointer.finish_copy()
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(float(step))
        assert checkpointer.due(step)
        checkpointer.wait()
        began = time.perf_counter()
        checkpointer.save(step, tensors, {"samples": step})
        blocked.append(time.perf_counter() - began)
    assert checkpointer.finish_copy()
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    checkpointer.close()
    assert checkpointer.notes() == []
    assert min(blocked) < 0.005, "256 MiB take 5 ms on the fastest bus: the host does not wait for them"
    again = checkpointer_of(keeper.name, 2)
    found = state(-2.0)
    assert again.restore(found) == {"samples": 5, "step": 5}
    again.close()
    for name, tensor in state(5.0).items():
        assert torch.equal(found[name], tensor), name


def test_slots_are_page_locked_and_let_go(keepers: Keepers) -> None:
    """A page that is still locked cannot be locked again."""
    keeper = keepers.start("node-0")
    for generation in (1, 2):
        checkpointer = checkpointer_of(keeper.name, generation)
        checkpointer.reserve(state(0.0), 0)
        assert checkpointer._peer is not None
        checkpointer._peer._end_reserve()
        assert checkpointer._peer.is_on
        assert all(slot.chunks[0].is_pinned() for slot in checkpointer._peer._slots)
        assert checkpointer.abandon(10)
