"""New weights in the place of the old, from memory, folders and the network; what fails half-way is known as mixed."""

from __future__ import annotations

import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from served_ranks import (
    failure_together,
    hidden,
    load_model,
    random_model,
    receive_part,
    save_random,
    take_parts_from_memory,
)
from torch import Tensor
from waiting import PATIENCE_SECONDS

from craton.job.model import ModelShape
from craton.ml.models import Decoder, DecoderConfig, WeightsError, save_folder
from craton.ml.models.config import RoutingConfig
from craton.ml.serving.device import Adapters, MixedWeightsError, newcomers, weights
from craton.ml.serving.device.float8 import quantize_model
from craton.ml.serving.device.weights import (
    WeightsReceiver,
    named_targets,
    send_weights,
    update_from_folder,
    update_from_state,
)

DENSE = DecoderConfig(ModelShape("dense", 2, 64, 96, 4, 2, 16, 128))
TIED = DecoderConfig(ModelShape("tied", 3, 64, 96, 4, 2, 16, 128, tied_embeddings=True))
MIXTURE = DecoderConfig(ModelShape("mixture", 2, 64, 32, 4, 4, 16, 128, experts=4, top_k=2, moe_ffn_hidden=32))
BALANCED = replace(MIXTURE, routing=RoutingConfig(bias_update=0.1))  # a buffer that belongs to the weights
KINDS = {"dense": DENSE, "tied": TIED, "mixture": MIXTURE, "balanced": BALANCED}
KEY = b"a key that both sides know"
DEADLINE = PATIENCE_SECONDS
TOKENS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def state(model: Decoder) -> list[tuple[str, Tensor]]:
    return list(named_targets(model).items())


def same(model: Decoder, other: Decoder) -> bool:
    return all(
        torch.equal(tensor.view(torch.uint8), named_targets(other)[name].view(torch.uint8))
        for name, tensor in named_targets(model).items()
    )


def places(model: Decoder) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


@contextmanager
def receiving(model: Decoder, **options: Any) -> Iterator[tuple[str, Future[int]]]:
    """An address where weights for the model are waited for, and what comes of it."""
    with WeightsReceiver("127.0.0.1:0", KEY) as receiver, ThreadPoolExecutor(1) as pool:
        yield receiver.address, pool.submit(receiver.receive, model, **{"wait_seconds": DEADLINE} | options)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_from_memory(kind: str) -> None:
    model, other = random_model(KINDS[kind], seed=0), random_model(KINDS[kind], seed=1)
    for _, buffer in other.named_buffers():
        buffer.fill_(0.25)
    assert not same(model, other)
    kept = places(model)
    update_from_state(model, state(other))
    assert same(model, other)
    assert places(model) == kept
    assert torch.equal(hidden(model, TOKENS), hidden(other, TOKENS))


def test_weights_are_kept_in_the_models_own_precision() -> None:
    model, other = random_model(DENSE, seed=0).to(torch.bfloat16), random_model(DENSE, seed=1)
    update_from_state(model, state(other))
    assert same(model, other.to(torch.bfloat16))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("kind", ["tied", "mixture"])
def test_weights_from_a_folder(kind: str, is_fp8: bool, tmp_path: Path) -> None:
    model, other = random_model(KINDS[kind], seed=0), random_model(KINDS[kind], seed=1)
    folder = save_folder(other.state_dict(), other.config, tmp_path / "new", dtype=torch.float32)
    if is_fp8:
        quantize_model(model)
        quantize_model(other)
    Adapters(model, slots=1, rank=2)
    kept = places(model)
    update_from_folder(model, folder)
    assert same(model, other)
    assert places(model) == kept
    assert torch.equal(hidden(model, TOKENS), hidden(other, TOKENS))


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_model_may_be_quantized_before_it_has_any_memory(kind: str, tmp_path: Path) -> None:
    other = random_model(KINDS[kind], seed=1)
    folder = save_folder(other.state_dict(), other.config, tmp_path / "new", dtype=torch.float32)
    with torch.device("meta"):
        model = Decoder(other.config).eval().requires_grad_(False)
    quantize_model(model)
    update_from_folder(model.to_empty(device="cpu"), folder)
    quantize_model(other)
    assert same(model, other)
    assert torch.equal(hidden(model, TOKENS), hidden(other, TOKENS))


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_folder_that_does_not_fit_changes_nothing(is_fp8: bool, tmp_path: Path) -> None:
    model, before = random_model(DENSE), random_model(DENSE)
    folder = save_random(tmp_path / "other", DENSE, ffn_hidden=112)
    if is_fp8:
        quantize_model(model)
        quantize_model(before)
    with pytest.raises(WeightsError, match=r"of another shape.*unchanged") as raised:
        update_from_folder(model, folder)
    assert not isinstance(raised.value, MixedWeightsError)
    assert same(model, before)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_folder_that_fails_half_way_leaves_mixed_weights(
    is_fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails while it is read; there is no real one to be had."""
    model = random_model(DENSE)
    folder = save_random(tmp_path / "other", DENSE, seed=1)
    if is_fp8:
        quantize_model(model)
    calls = 0
    real = weights.load_weights

    def failing(target: Decoder, source: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 1 + is_fp8:
            raise OSError("Input/output error")
        real(target, source)

    monkeypatch.setattr(weights, "load_weights", failing)
    with pytest.raises(MixedWeightsError, match=r"Input/output error.*must not serve"):
        update_from_folder(model, folder)


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "unknown": (lambda new: new.update({"blocks.9.mlp.up.weight": torch.zeros(2, 2)}), r"no tensor 'blocks\.9"),
    "shape": (lambda new: new.update({"norm.weight": torch.zeros(65)}), r"norm\.weight is \[65\].*needs \[64\]"),
    "dtype": (lambda new: new.update({"norm.weight": torch.zeros(64, dtype=torch.int64)}), "int64; allowed: float32"),
    "missing": (lambda new: new.pop("norm.weight"), r"no weights for norm\.weight"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_weights_are_refused(wrong: str) -> None:
    spoil, words = WRONG[wrong]
    model, before, other = random_model(DENSE), random_model(DENSE), random_model(DENSE, seed=1)
    new = dict(state(other))
    spoil(new)
    with pytest.raises(MixedWeightsError, match=words):
        update_from_state(model, new.items())
    update_from_state(model, state(before))
    assert same(model, before), "a complete update repairs it"

    if wrong != "missing":  # found before anything was changed when it is the first
        first = "blocks.9.mlp.up.weight" if wrong == "unknown" else "norm.weight"
        with pytest.raises(WeightsError, match=f"{words}.*unchanged") as raised:
            update_from_state(model, [(first, new.pop(first)), *new.items()])
        assert not isinstance(raised.value, MixedWeightsError)
        assert same(model, before)


def test_a_tensor_that_comes_twice_is_refused() -> None:
    model = random_model(DENSE)
    with pytest.raises(MixedWeightsError, match=r"embedding\.weight was sent twice"):
        update_from_state(model, [*state(model)[:3], state(model)[0]])


@pytest.mark.parametrize("chunk", [weights.CHUNK, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_over_the_network(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK", chunk)
    model, other = random_model(KINDS[kind], seed=0), random_model(KINDS[kind], seed=1)
    kept = places(model)
    with receiving(model) as (address, received):
        send_weights(address, KEY, state(other), version=7)
        assert received.result(DEADLINE) == 7
    assert same(model, other)
    assert places(model) == kept


def test_trainers_may_send_another_precision() -> None:
    model, other = random_model(DENSE).to(torch.bfloat16), random_model(DENSE, seed=1)
    quantize_model(model)
    with receiving(model) as (address, received):
        send_weights(address, KEY, state(other), version=1)
        received.result(DEADLINE)
    quantize_model(other)
    in_fp8 = [name for name, tensor in state(model) if tensor.dtype is torch.float8_e4m3fn]
    assert len(in_fp8) == 2 * 5
    for name in in_fp8:
        assert torch.equal(*(named_targets(each)[name].view(torch.uint8) for each in (model, other)))
    assert torch.equal(model.norm.weight, other.norm.weight.to(torch.bfloat16))


@pytest.mark.parametrize("wrong", WRONG)
def test_both_sides_are_told_what_was_wrong(wrong: str) -> None:
    spoil, words = WRONG[wrong]
    model, other = random_model(DENSE), random_model(DENSE, seed=1)
    new = dict(state(other))
    spoil(new)
    with receiving(model) as (address, received):
        with pytest.raises(WeightsError, match=f"refused the weights: .*{words}"):
            send_weights(address, KEY, new.items(), version=2)
        with pytest.raises(MixedWeightsError, match=words):
            received.result(DEADLINE)


class Sender:
    """Speaks the protocol by hand, as far as a test wants to."""

    def __init__(self, address: str, key: bytes = KEY) -> None:
        host, port = address.split(":")
        self.connection = Connection(socket.create_connection((host, int(port))).detach())
        answer_challenge(self.connection, key)
        deliver_challenge(self.connection, key)

    def ask(self, **message: Any) -> Any:
        self.connection.send_bytes(json.dumps(message).encode())
        return json.loads(self.connection.recv_bytes())

    def head(self, name: str, tensor: Tensor) -> Any:
        return self.ask(name=name, dtype="float32", shape=list(tensor.shape))

    def send_tensor(self, tensor: Tensor) -> None:
        data = tensor.numpy().tobytes()
        self.send(data, zlib.crc32(data))

    def send(self, data: bytes, crc32: int) -> None:
        self.connection.send_bytes(json.dumps({"crc32": crc32}).encode())
        self.connection.send_bytes(data)


def test_damaged_bytes_are_refused_and_not_copied() -> None:
    model, before = random_model(DENSE), random_model(DENSE)
    name, tensor = state(random_model(DENSE, seed=1))[0]
    data = tensor.numpy().tobytes()
    with receiving(model) as (address, received):
        sender = Sender(address)
        sender.ask(version=1)
        sender.head(name, tensor)
        sender.send(data[:-1] + bytes([data[-1] ^ 1]), zlib.crc32(data))
        assert "corrupted in transit" in sender.ask(end=True)["error"]
        sender.connection.close()
        with pytest.raises(WeightsError, match=f"{name}.*corrupted in transit.*unchanged"):
            received.result(DEADLINE)
    assert same(model, before)


def test_a_sender_that_is_refused_in_mid_sentence_hears_why() -> None:
    model = random_model(DENSE)
    name, tensor = state(model)[0]
    with receiving(model) as (address, received):
        sender = Sender(address)
        sender.ask(version=1)
        sender.head(name, tensor)
        sender.send(bytes(tensor.nbytes + 1), 0)
        for _ in range(64):  # more than sockets hold
            sender.connection.send_bytes(bytes(1 << 20))
        assert name in json.loads(sender.connection.recv_bytes())["error"]
        sender.connection.close()
        with pytest.raises(WeightsError, match=f"{name}: received more bytes than the tensor has.*unchanged"):
            received.result(DEADLINE)


@pytest.mark.parametrize("whole", [0, 1])
def test_a_sender_that_goes_away_is_noticed(whole: int) -> None:
    model = random_model(DENSE)
    new = state(random_model(DENSE, seed=1))
    with receiving(model) as (address, received):
        sender = Sender(address)
        sender.ask(version=1)
        for name, tensor in new[:whole]:
            sender.head(name, tensor)
            sender.send(tensor.numpy().tobytes(), zlib.crc32(tensor.numpy().tobytes()))
        sender.head(*new[whole])
        sender.send(new[whole][1].numpy().tobytes()[:100], 0)
        sender.connection.close()
        kind = MixedWeightsError if whole else WeightsError
        with pytest.raises(kind, match=rf"{new[whole][0]}: the connection was closed") as raised:
            received.result(DEADLINE)
    assert isinstance(raised.value, MixedWeightsError) == bool(whole)


def test_all_but_the_last_word_is_not_an_update() -> None:
    model = random_model(DENSE)
    with receiving(model) as (address, received):
        sender = Sender(address)
        sender.ask(version=1)
        for name, tensor in state(random_model(DENSE, seed=1)):
            sender.head(name, tensor)
            sender.send(tensor.numpy().tobytes(), zlib.crc32(tensor.numpy().tobytes()))
        assert sender.ask(end=True) == {}
        sender.connection.close()
        with pytest.raises(MixedWeightsError, match="the connection was closed"):
            received.result(DEADLINE)


@pytest.mark.parametrize(
    "message",
    [b"no JSON", b"[]", b'{"name": 5, "dtype": "float32", "shape": []}', b'{"name": "norm.weight"}', b"x" * 99_999],
)
def test_messages_that_mean_nothing_are_refused(message: bytes) -> None:
    model, before = random_model(DENSE), random_model(DENSE)
    with receiving(model) as (address, received):
        sender = Sender(address)
        sender.ask(version=1)
        sender.connection.send_bytes(message)
        sender.connection.close()
        with pytest.raises(WeightsError, match="unchanged"):
            received.result(DEADLINE)
    assert same(model, before)


def test_only_who_knows_the_key_is_heard() -> None:
    model, other = random_model(DENSE), random_model(DENSE, seed=1)
    with receiving(model) as (address, received):
        with pytest.raises(WeightsError, match="a different key"):
            send_weights(address, b"a guess", state(other), version=1)
        host, port = address.split(":")
        socket.create_connection((host, int(port))).close()
        assert not received.done()
        send_weights(address, KEY, state(other), version=3)
        assert received.result(DEADLINE) == 3
    with receiving(model, wait_seconds=0.5) as (address, received):
        with pytest.raises(WeightsError, match="a different key"):
            send_weights(address, b"a guess", state(other), version=1)
        with pytest.raises(WeightsError, match=r"no sender connected .* within 500 ms; .* with a wrong key"):
            received.result(DEADLINE)


def test_strangers_that_say_nothing_keep_no_sender_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "NEWCOMERS", 4)
    model, other = random_model(DENSE), random_model(DENSE, seed=1)
    with receiving(model) as (address, received), ExitStack() as silent:
        host, port = address.split(":")
        for _ in range(8):
            silent.enter_context(socket.create_connection((host, int(port))))
        send_weights(address, KEY, state(other), version=3)
        assert received.result(DEADLINE) == 3


def test_addresses_and_keys_are_checked() -> None:
    for address in ("nowhere", "127.0.0.1:", ":80", "127.0.0.1:99999"):
        with pytest.raises(WeightsError, match="host:port"):
            WeightsReceiver(address, KEY)
    with pytest.raises(WeightsError, match=r"key .* is empty"):
        WeightsReceiver("127.0.0.1:0", b"")
    with WeightsReceiver("127.0.0.1:0", KEY) as receiver:
        with pytest.raises(WeightsError, match="cannot listen"):
            WeightsReceiver(receiver.address, KEY)
        taken = receiver.address
    with pytest.raises(WeightsError, match="cannot connect"):
        send_weights(taken, KEY, [], version=1)


def test_a_receiver_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SILENCE_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(WeightsError, match="received nothing for 1 s"):
            send_weights(address, KEY, [], version=1)


@pytest.mark.parametrize(("kind", "ep", "is_fp8"), [("dense", 1, False), ("dense", 1, True), ("mixture", 2, False)])
def test_every_rank_of_an_engine_gets_its_part(gang: Gang, kind: str, ep: int, is_fp8: bool, tmp_path: Path) -> None:
    old, new = (save_random(tmp_path / name, KINDS[kind], seed) for seed, name in enumerate(("old", "new")))
    other = load_model(new)
    wanted = hidden(other, TOKENS)
    results: list[Any] = []

    def ranks() -> None:
        results.extend(gang.run(receive_part, str(old), KEY, str(tmp_path), TOKENS, is_fp8, ep, ranks=2))

    thread = threading.Thread(target=ranks)
    thread.start()
    files = [tmp_path / str(rank) for rank in range(2)]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(file.exists() for file in files) and thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.05)
    send_weights([file.read_text() for file in files], KEY, state(other), version=11)
    thread.join(DEADLINE)
    for version, got, stayed in results:
        assert version == 11
        assert stayed
        if is_fp8:
            assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.2
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert len(results) == 2


@pytest.mark.parametrize(("kind", "ep"), [("dense", 1), ("mixture", 2)])
def test_ranks_take_their_parts_from_memory_and_folders(gang: Gang, kind: str, ep: int, tmp_path: Path) -> None:
    old, new = (save_random(tmp_path / name, KINDS[kind], seed) for seed, name in enumerate(("old", "new")))
    wanted = hidden(load_model(new), TOKENS)
    for pair in gang.run(take_parts_from_memory, str(old), str(new), TOKENS, ep, ranks=2):
        for got in pair:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "error"), [("update_from_folder", "MixedWeightsError"), ("wake", "RanksDifferError")]
)
def test_what_one_rank_has_no_memory_for_is_known_to_all(gang: Gang, method: str, error: str) -> None:
    for kind, said in gang.run(failure_together, method, ranks=2):
        assert kind == error
        assert f"{method} succeeded on some ranks only (rank 0: ServingError: out of device memory" in said
