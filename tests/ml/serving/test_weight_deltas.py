"""Weights sent as changes: the same bits with fewer bytes; whatever does not fit is sent whole, and heals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gang import Gang
from served_ranks import load_model, random_model, receive_parts, save_random
from test_serving_weights import BALANCED, DENSE, KEY, Sender, same, state
from torch import Tensor
from waiting import PATIENCE_SECONDS, wait_until

from craton.ml.models import Decoder, WeightsError
from craton.ml.serving.device import MixedWeightsError, SentWeights, WeightsTransfer, send_weights
from craton.ml.serving.device.float8 import quantize_model
from craton.ml.serving.device.weight_deltas import HeldWeights, WeightsDelta
from craton.ml.serving.device.weights import WeightsReceiver, named_targets


class Receiver:
    """A model that takes one update after the other."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.held = model, HeldWeights()

    @contextmanager
    def listening(self) -> Iterator[tuple[str, Future[int]]]:
        with WeightsReceiver("127.0.0.1:0", KEY) as receiver, ThreadPoolExecutor(1) as pool:
            yield receiver.address, pool.submit(receiver.receive, self.model, PATIENCE_SECONDS, self.held)

    def take(self, new: Decoder, version: int, base: SentWeights | None) -> WeightsTransfer:
        with self.listening() as (address, received):
            transfer = send_weights(address, KEY, state(new), version, base)
            assert received.result(PATIENCE_SECONDS) == version
        assert same(self.model, new)
        return transfer


def start(config: Any = DENSE, dtype: torch.dtype = torch.float32) -> tuple[Receiver, Decoder, SentWeights]:
    """A receiver that has the weights of a sender, and the sender's base."""
    receiver, new, base = (
        Receiver(random_model(config).to(dtype)),
        random_model(config, seed=1).to(dtype),
        SentWeights(),
    )
    transfer = receiver.take(new, 1, base)
    assert transfer.num_deltas == 0
    assert transfer.num_bytes == sum(tensor.nbytes for _, tensor in state(new))
    return receiver, new, base


@torch.no_grad()
def change(model: Decoder, share: float, seed: int = 0) -> int:
    """Change a share of all values; return how many."""
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for tensor in named_targets(model).values():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor[chosen] = torch.randn(int(chosen.sum()), generator=generator).to(tensor.dtype)
        count += int(chosen.sum())
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_are_sent_alone(dtype: torch.dtype) -> None:
    receiver, new, base = start(BALANCED, dtype)
    for version in (2, 3, 9):
        count = change(new, 0.02, version)
        transfer = receiver.take(new, version, base)
        assert transfer.num_whole == 0
        assert transfer.num_bytes <= count * (4 + 4)
    assert receiver.take(new, 10, base).num_bytes == 0, "nothing changed"
    assert (receiver.held.version, receiver.held.token) == (base.version, base.token) == (10, base.token)


def test_a_delta_that_is_larger_is_not_sent() -> None:
    receiver, new, base = start()
    change(new, 0.9)
    transfer = receiver.take(new, 2, base)
    assert transfer.num_deltas == 0
    assert transfer.num_bytes == sum(tensor.nbytes for _, tensor in state(new))


def test_bits_count_not_numbers() -> None:
    before = torch.tensor([0.0, 1.0, torch.nan, 3.0] * 4)
    after = before.clone()
    after[0] = -0.0
    delta = WeightsDelta.between(before, after)
    assert delta is not None
    assert delta.positions.tolist() == [0], "NaN is not a change"
    assert delta.apply(before)
    assert torch.equal(before.view(torch.int32), after.view(torch.int32))


@pytest.mark.parametrize("wrong", ["another version", "another sender", "none"])
def test_a_receiver_with_another_base_gets_all(wrong: str) -> None:
    receiver, new, base = start()
    if wrong == "another version":
        Receiver.take(receiver, random_model(DENSE, seed=5), 2, SentWeights())
    elif wrong == "another sender":
        Receiver.take(receiver, random_model(DENSE, seed=5), 1, SentWeights())
    else:
        receiver.held.forget()
    change(new, 0.01)
    assert receiver.take(new, 3, base).num_deltas == 0
    change(new, 0.01, 1)
    assert receiver.take(new, 4, base).num_whole == 0


def test_a_new_receiver_gets_all_and_the_others_their_changes() -> None:
    old, new, base = start()
    fresh = Receiver(random_model(DENSE, seed=7))
    change(new, 0.01)
    with old.listening() as (first, at_first), fresh.listening() as (second, at_second):
        transfer = send_weights([first, second], KEY, state(new), 2, base)
        assert at_first.result(PATIENCE_SECONDS) == at_second.result(PATIENCE_SECONDS) == 2
    assert same(old.model, new)
    assert same(fresh.model, new)
    assert transfer.num_deltas == transfer.num_whole == len(state(new))


def test_a_tensor_that_is_not_what_the_sender_thinks_is_sent_whole() -> None:
    receiver, new, base = start()
    with torch.no_grad():
        receiver.model.norm.weight[3] += 1  # a bit of its memory has flipped
    change(new, 0.01)
    transfer = receiver.take(new, 2, base)
    assert transfer.num_whole == 1


@pytest.mark.parametrize("place", ["position", "value", "outside"])
def test_a_delta_that_is_corrupted_in_transit_is_sent_whole(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, new, base = start()
    change(new, 0.02)
    honest = WeightsDelta.to_bytes

    def corrupted(delta: WeightsDelta) -> Tensor:
        data = honest(delta)
        if len(delta.positions):
            data[{"position": 0, "value": -1, "outside": 3}[place]] ^= 0x40
        return data

    monkeypatch.setattr(WeightsDelta, "to_bytes", corrupted)
    assert receiver.take(new, 2, base).num_whole > 0


def test_a_quantized_receiver_gets_all() -> None:
    model, other = random_model(DENSE), random_model(DENSE, seed=1)
    quantize_model(model)
    receiver, base = Receiver(model), SentWeights()
    for version in (1, 2):
        change(other, 0.01, version)
        with receiver.listening() as (address, received):
            transfer = send_weights(address, KEY, state(other), version, base)
            received.result(PATIENCE_SECONDS)
    assert transfer.num_whole == 2 * 5, "its linear layers; norms and embeddings are not quantized"
    quantize_model(other)
    assert same(model, other)


@pytest.mark.parametrize("sent", [0, 3])
def test_a_sender_that_dies_halfway_is_healed_by_all_weights(sent: int) -> None:
    receiver, new, base = start()
    change(new, 0.02)
    before = random_model(DENSE, seed=1)

    def dying() -> Iterator[tuple[str, Tensor]]:
        yield from state(new)[:sent]
        raise RuntimeError("the trainer dies")

    with receiver.listening() as (address, received):
        with pytest.raises(RuntimeError, match="the trainer dies"):
            send_weights(address, KEY, dying(), 2, base)
        with pytest.raises(WeightsError, match="the connection was closed") as raised:
            received.result(PATIENCE_SECONDS)
    assert isinstance(raised.value, MixedWeightsError) == (sent > 0)
    assert same(receiver.model, before) == (sent == 0)
    assert base.version is None
    assert (receiver.held.version is None) == (sent > 0)
    assert receiver.take(new, 2, base).num_deltas == 0
    change(new, 0.02, 1)
    assert receiver.take(new, 3, base).num_whole == 0


def test_a_receiver_that_dies_halfway_is_healed_by_all_weights() -> None:
    other, new, base = start()
    change(new, 0.02)
    with WeightsReceiver("127.0.0.1:0", KEY) as receiver:

        def die() -> None:
            line = receiver._accept(PATIENCE_SECONDS)
            line.receive()
            line.send({"held": [base.version, base.token]})
            line.receive()
            line.close()

        with ThreadPoolExecutor(1) as pool, other.listening() as (address, received):
            died = pool.submit(die)
            with pytest.raises(WeightsError, match="lost the connection"):
                send_weights([address, receiver.address], KEY, state(new), 2, base)
            died.result(PATIENCE_SECONDS)
            with pytest.raises(WeightsError):
                received.result(PATIENCE_SECONDS)
    assert other.take(new, 2, base).num_deltas == 0


def test_checksums_of_all_tensors_are_compared_at_the_end() -> None:
    receiver = Receiver(random_model(DENSE))
    new = state(random_model(DENSE, seed=1))
    with receiver.listening() as (address, received):
        sender = Sender(address)
        sender.ask(version=1)
        for name, tensor in new:
            sender.head(name, tensor)
            sender.send_tensor(tensor)
        assert "checksums of all tensors differ" in sender.ask(end=True, checksum=1)["error"]
        sender.connection.close()
        with pytest.raises(MixedWeightsError, match="checksums"):
            received.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("changed", [-1, "3", 1.5, 10**9, True])
def test_deltas_that_mean_nothing_are_refused(changed: Any) -> None:
    receiver = Receiver(random_model(DENSE))
    before = random_model(DENSE)
    name, tensor = state(random_model(DENSE, seed=1))[0]
    with receiver.listening() as (address, received):
        sender = Sender(address)
        assert sender.ask(version=1) == {"held": [None, None]}
        sender.head(name, tensor)
        sender.connection.send_bytes(json.dumps({"crc32": 0, "changed": changed}).encode())
        assert "it must be smaller" in json.loads(sender.connection.recv_bytes())["error"]
        sender.connection.close()
        with pytest.raises(WeightsError, match="unchanged"):
            received.result(PATIENCE_SECONDS)
    assert same(receiver.model, before)


def test_every_rank_gets_the_changes_of_its_part(gang: Gang, tmp_path: Any) -> None:
    folder = save_random(tmp_path / "old", DENSE, seed=0)
    new, base = load_model(folder), SentWeights()
    transfers: list[WeightsTransfer] = []
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend(gang.run(receive_parts, str(folder), KEY, str(tmp_path), 2, ranks=2))
    )
    thread.start()
    for version in (1, 2):
        files = [tmp_path / f"{rank}-{version}" for rank in range(2)]
        wait_until(lambda files=files: all(file.exists() for file in files), "both ranks listen")
        change(new, 0.02, version)
        transfers.append(send_weights([file.read_text() for file in files], KEY, state(new), version, base))
    thread.join(PATIENCE_SECONDS)
    first, second = transfers
    assert first.num_deltas == second.num_whole == 0
    assert 0 < second.num_bytes < first.num_bytes / 10
    assert results == [[1, 2]] * 2
