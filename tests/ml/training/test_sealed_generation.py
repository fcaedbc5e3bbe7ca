"""What a device computes after its communicators were aborted is garbage: it is neither recorded nor kept.

Without a GPU here, events of a device are stood in for by objects that are complete when the test says so.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from keepers import Keepers
from tiny import make_trainer, tiny_job
from waiting import PATIENCE_SECONDS

from craton.ml.training.checkpoint import Checkpointer
from craton.ml.training.checkpoint.peer import PeerSetup
from craton.ml.training.loop import Trainer
from craton.ml.training.measure import HostCopy


class DeviceEvent:
    """Stands in for a CUDA event."""

    def __init__(self, is_complete: bool) -> None:
        self._is_complete = threading.Event()
        if is_complete:
            self._is_complete.set()

    def complete(self) -> None:
        self._is_complete.set()

    def query(self) -> bool:
        return self._is_complete.is_set()

    def synchronize(self) -> None:
        assert self._is_complete.wait(PATIENCE_SECONDS)


def trained(event: DeviceEvent | None) -> tuple[Trainer, Any]:
    """A trainer after two steps, whose numbers of the last one are on their way from a device."""
    trainer, records = make_trainer(tiny_job(steps=6))
    trainer._begin(None)
    trainer.timer.begin()
    for _ in range(2):
        trainer._train_step()
    assert trainer._unread is not None
    if event is not None:
        numbers = HostCopy(torch.tensor(trainer._unread.numbers.read()))
        vars(numbers)["_arrived"] = event
        trainer._unread = replace(trainer._unread, numbers=numbers)
    return trainer, records


@pytest.mark.parametrize(
    ("before", "is_sealed", "is_recorded"),
    [
        pytest.param(None, True, True, id="on CPUs nothing is garbage"),
        pytest.param(True, True, True, id="arrived before the abort"),
        pytest.param(False, True, False, id="completed by the abort"),
        pytest.param(False, False, False, id="an error of its own, and still on their way"),
    ],
)
def test_only_numbers_that_had_arrived_are_recorded(before: bool | None, is_sealed: bool, is_recorded: bool) -> None:
    event = None if before is None else DeviceEvent(before)
    trainer, records = trained(event)
    if is_sealed:
        trainer.seal()
        if event is not None:
            event.complete()
    assert trainer.abandon(10.0)
    assert (2 in records.losses) == is_recorded
    assert 1 in records.losses


def test_a_step_that_the_abort_completed_is_not_judged() -> None:
    trainer, records = trained(DeviceEvent(False))

    def broken() -> None:
        raise InterruptedError

    trainer.seal()
    late = trainer._unread
    assert late is not None
    vars(late.numbers)["_arrived"].complete()
    trainer.check = broken
    with pytest.raises(InterruptedError):
        trainer._record_previous_step(None)
    assert 2 not in records.losses


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_copy_that_the_abort_completed_is_not_announced(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    keeper = keepers.start("node-0")
    checkpointer = Checkpointer([], 0, 1, PeerSetup(keeper.name, "node-0", ["node-0"], {}, 1, every_steps=1))
    tensors = {"model.a": torch.full((100,), 3.0)}
    checkpointer.reserve(tensors, 0)
    peer = checkpointer._peer
    assert peer is not None
    copy, event = peer._copy, DeviceEvent(is_complete)

    def copy_beside(*given: Any) -> Any:
        copy(*given)
        vars(peer)["_last_copied"] = event
        return event

    monkeypatch.setattr(peer, "_copy", copy_beside)
    assert checkpointer.due(1)
    checkpointer.save(1, tensors, {"samples": 8})
    checkpointer.seal()
    event.complete()
    peer._thread.shutdown(wait=True)
    held = [each for each in keeper.client().holdings() if each.manifest.get("step") == 1]
    assert bool(held) == is_complete
    peer.settle()
    assert peer.is_on == is_complete
