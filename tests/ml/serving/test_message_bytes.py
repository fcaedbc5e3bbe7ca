"""Messages and orders come back as they were sent, and no bytes give anything but one of them or a WireError."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE_SECONDS

from craton.ml.serving.device import EngineRank, TensorParallelGroup
from craton.ml.serving.device.order_bytes import METHODS, Order, decode_order, encode_order
from craton.ml.serving.messages import (
    Abort,
    Alternatives,
    Control,
    EngineReply,
    Failed,
    Fork,
    ForkBranch,
    Grammar,
    OutputDelta,
    Ready,
    Sampling,
    Stats,
    Submit,
)
from craton.ml.serving.schedule import Move, PrefixGroups, PromptPart, RowStart, StepInput
from craton.ml.serving.wire import Message, WireError, decode, encode, pack

TUNED = Sampling(
    max_tokens=7,
    temperature=0,
    top_k=3,
    top_p=0.5,
    min_p=0.1,
    presence_penalty=-1,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    seed=2**70,
    logit_bias={3: -100.0, 4: 1},
    min_tokens=2,
    stop_tokens=(5, 6),
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=0,
    grammar=Grammar("regex", "a\ud800+"),
    logprobs_mode="sampled",
)
MESSAGES: list[Message] = [
    Abort(1),
    Abort(1, 0),
    Control(2, "wake", {"tags": ["weights"], "level": 1, "folder": None}),
    EngineReply(3, {"version": 2}),
    EngineReply(3, error="no such thing"),
    Failed("it burnt"),
    Ready("m", 10, 20, ("a", "b"), 3, 16, "fp8", 0.8),
    Stats(1, 2, steps=3, steps_by_tokens=(1, 2), step_seconds=0.5, state="asleep"),
    Submit(4, (1, 2, 3)),
    Submit(5, (), TUNED, 3, -1, "adapter"),
    Submit(6, (1, 2), TUNED, generated=(3, 4, 5)),
    Fork(6, (ForkBranch(7, TUNED), ForkBranch(8, Sampling(seed=3))), 1),
    [],
    [
        OutputDelta(1, 0, [3], [-0.5], versions=[1]),
        OutputDelta(2, 1, finish="stop", stop_token=0, stop_logprob=-0.5, stop_version=3, admitted=12.5),
        OutputDelta(4, 0, [3], [-0.5], versions=[1], generated=[7, 8]),
        OutputDelta(
            3,
            0,
            [1, 2],
            [-1.5, -math.inf],
            [Alternatives((1, 9), (-1.5, -2.0)), Alternatives((), ())],
            [4, 5],
            [None, Alternatives((7,), (-0.25,))],
            finish="error",
            error="lost",
            is_ours=True,
        ),
    ],
]


def integers(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def work(**more: Any) -> StepInput:
    rows = integers(2, 0, 1)
    return StepInput(
        rows, integers(1, 1, 4), integers(9, 8, 4), 2, integers(5, 6, 7, 8), integers(0, 1, 5), rows, **more
    )


ORDERS: list[Order | None] = [
    None,
    ("execute", (work(),)),
    (
        "execute",
        (
            work(
                moves=[Move("out", 1, 2), Move("copy", 3, 4)],
                table=[(0, 1, 2), (3, 4, 5)],
                starts=[RowStart(1, 2**60, -1, TUNED, (1, 2), (3,)), RowStart(0, 5, 0, Sampling())],
                next_tokens=[(1, 17)],
                is_tuned=True,
                added=[(0, 3, -1e30), (1, 4, 2.5)],
                allowed=np.arange(6, dtype=np.int32).reshape(3, 2),
                alternatives=2,
                prompts=[PromptPart(2, 3, (4, 5), 1)],
                groups=PrefixGroups(integers(1, 0), integers(2), integers(2), integers(64)),
            ),
        ),
    ),
    ("load_adapter", ("name", "/folder")),
    ("receive_weights", ("host:1", 2.5)),
    ("wake", (["weights", "kv_cache"],)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    back = decode(encode(message))
    assert back == message
    assert type(back) is type(message)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "end" if order is None else order[0])
def test_an_order_comes_back_as_it_was(order: Order | None) -> None:
    back = decode_order(encode_order(order))
    if order is None or order[0] != "execute":
        assert back == order
        return
    assert back is not None
    (sent,), (found,) = order[1], back[1]
    for name in StepInput.__slots__:
        one, other = getattr(sent, name), getattr(found, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert (one == other).all()
            assert other.flags.writeable
        elif isinstance(one, PrefixGroups):
            assert isinstance(other, PrefixGroups)
            pairs = zip(vars(one).values(), vars(other).values(), strict=True)
            assert all((sent_numbers == numbers).all() for sent_numbers, numbers in pairs)
        else:
            assert list(one) == list(other) if isinstance(one, tuple | list) else one == other, name


def test_every_method_that_is_told_is_one_of_a_rank() -> None:
    assert all(callable(getattr(EngineRank, name)) for name in METHODS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["__class__", []], "not a method"),
        (["execute", []], "not a method"),
        (["runner.sleep", []], "not a method"),
        (["sleep", ["1"]], "is invalid"),
        (["sleep", [1, 2]], "expected 1"),
        (["load_adapter", ["a", {"b": 1}]], "is invalid"),
        ([3, []], "is invalid"),
        ({}, "expected 2"),
    ],
)
def test_only_known_methods_with_their_arguments_are_heard(values: Any, said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode_order(pack(1, values))


@pytest.mark.parametrize(
    ("kind", "values", "columns"),
    [
        (99, [], []),
        (2, ["1", None], []),
        (2, [True, None], []),
        (3, [1, "wake", []], []),
        (5, [None], []),
        (1, [1, [], 1, 0, None], [b""]),
        (1, [1, None, 1, 0, None], [b"1234567"]),
        (0, None, [b"", b""]),
        (0, None, [b"\xff" * 8, b""]),
        (0, None, [b"\x01" + bytes(7), bytes(8)]),
    ],
)
def test_what_is_not_a_message_is_refused(kind: int, values: Any, columns: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(pack(kind, values, [memoryview(column) for column in columns]))


@pytest.mark.parametrize(
    ("read", "whole"), [(decode, list(map(encode, MESSAGES))), (decode_order, list(map(encode_order, ORDERS)))]
)
def test_no_change_of_bytes_gives_anything_else(read: Callable[[bytes], Any], whole: list[bytes]) -> None:
    chance = random.Random(0)
    refused = 0
    for number in range(4000):
        content = bytearray(whole[number % len(whole)])
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(content))
            if chance.random() < 0.7:
                content[at] = chance.randrange(256)
            else:
                del content[at : at + chance.randint(1, 9)]
            if not content:
                break
        try:
            read(bytes(content))
        except WireError:
            refused += 1
    assert refused > 1000


def test_an_order_reaches_the_others_without_a_pickle() -> None:
    """Over a connection that asks for the key, as ranks of several machines have it."""
    heard: list[Order | None] = []
    with Listener(("127.0.0.1", 0), authkey=b"right") as listener:

        def other() -> None:
            for key in (b"wrong", b"right"):
                try:
                    line = Client(listener.address, authkey=key)
                except AuthenticationError:
                    continue
                heard.extend(decode_order(line.recv_bytes()) for _ in range(2))
                line.close()

        thread = threading.Thread(target=other)
        thread.start()
        with pytest.raises(AuthenticationError):
            listener.accept()
        line = listener.accept()
        gang = TensorParallelGroup(None, [line])  # type: ignore[arg-type]  # nothing is computed here
        gang._tell("sleep", (2,))
        gang.close()
        thread.join(PATIENCE_SECONDS)
        line.close()
    assert heard == [("sleep", (2,)), None]
