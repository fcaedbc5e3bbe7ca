"""What a rank makes of an error when it is told of another generation: it tells of what nobody else can see."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import Generation
from craton.agent.processes import DUMP, EXIT_FINAL, RECORD
from craton.agent.store import StoreServer
from craton.errors import CratonError
from craton.ml.training import session as session_module
from craton.ml.training.orders import Order, Orders, abort_groups, connect
from craton.ml.training.session import EXIT_FAILED, RankSession
from craton.observability.diagnosis.collect.collectives import read_dumps
from craton.telemetry.rank import LedgerClock, make_stack_file, read_stacks

ECHO = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
RAISED = RuntimeError("the data loader is broken")
OURS = CratonError("the state is not what it was")
LOST_DEVICE = RuntimeError("CUDA error: an illegal memory access was encountered")


class Told:
    """A recorder that keeps the events it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields.get("reason")))


class Rank:
    """A rank that has entered generation 1, and the agent's end of its orders."""

    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        self.orders = Orders(reading)
        self.session = object.__new__(RankSession)  # without a run directory, and without its handler of SIGTERM
        self.session.orders, self.session.trainer, self.session.clock = self.orders, None, LedgerClock(0.0)
        self.told = Told()
        vars(self.session)["recorder"] = self.told
        self.order(Generation(1, ["a"], 1, ""))
        assert self.orders.next(PATIENCE_SECONDS) is not None

    def order(self, generation: Generation) -> None:
        line = {"generation": generation.to_message(), "rank": 0, "node": "a", "keeper": ""}
        os.write(self.writing, json.dumps(line).encode() + b"\n")
        with self.orders._arrived:
            assert self.orders._arrived.wait_for(lambda: self.orders.is_over, PATIENCE_SECONDS)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(session_module, "BLAME_SECONDS", 0.0)
    monkeypatch.setattr("craton.ml.training.orders.cut_connections", lambda: None)
    made = Rank()
    yield made
    os.close(made.writing)


@pytest.mark.parametrize(
    ("error", "code", "events"),
    [
        (ECHO, None, []),  # the agent of the rank at the other end reports it
        (RAISED, None, [("broken", "RuntimeError: the data loader is broken")]),
        (OURS, None, [("broken", "CratonError: the state is not what it was")]),
        (LOST_DEVICE, EXIT_FAILED, [("failed", f"RuntimeError: {LOST_DEVICE}")]),  # its process cannot go on
    ],
)
def test_an_error_on_the_way_into_a_planned_generation_is_told(
    rank: Rank, error: Exception, code: int | None, events: list[tuple[str, str]]
) -> None:
    rank.order(Generation(2, ["a"], 1, "", is_planned=True))
    rank.orders.check()  # the step may be finished
    assert rank.session._broken(error) == code
    assert rank.told.events == events


@pytest.mark.parametrize("error", [ECHO, RAISED, OURS, LOST_DEVICE])
def test_an_error_in_a_generation_that_broke_is_not_told(rank: Rank, error: Exception) -> None:
    rank.order(Generation(2, ["a"], 1, "", reason="rank 1 was killed"))
    assert rank.session._broken(error) is None
    assert rank.told.events == []


def test_a_mistake_of_the_job_ends_the_rank_for_good(rank: Rank) -> None:
    assert rank.session._broken(OURS) == EXIT_FINAL


@pytest.mark.parametrize(("is_over", "code"), [(True, 0), (False, EXIT_FAILED)])
def test_a_rank_that_starts_anew_between_two_generations_has_not_failed(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, is_over: bool, code: int
) -> None:
    class StillWriting:
        def abandon(self, seconds: float) -> bool:
            return False

    def leave(code: int) -> None:
        raise SystemExit(code)

    if is_over:
        rank.order(Generation(2, ["a"], 1, "", is_planned=True))
    vars(rank.session)["trainer"] = StillWriting()
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        rank.session._leave()
    assert ended.value.code == code


def test_what_arrived_is_noted_before_connections_are_cut(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr("craton.ml.training.orders.cut_connections", lambda: noted.append("cut"))
    rank.orders.when_broken(lambda: noted.append("sealed"))
    rank.order(Generation(2, ["a"], 1, "", is_planned=True))
    assert noted == [], "in a planned generation the step is finished"
    rank.order(Generation(3, ["a"], 1, "", reason="rank 1 was killed"))
    wait_until(lambda: noted == ["sealed", "cut"], lambda: f"what happened: {noted}")
    rank.orders.next(PATIENCE_SECONDS)
    rank.order(Generation(4, ["a"], 1, "", reason="rank 1 was killed"))
    wait_until(lambda: noted == ["sealed", "cut", "cut"], lambda: f"nothing to seal yet, and what happened: {noted}")


def test_a_generation_that_broke_before_it_was_built_is_sealed_at_once(rank: Rank) -> None:
    rank.order(Generation(2, ["a"], 1, "", reason="rank 1 was killed"))
    noted: list[str] = []
    rank.orders.when_broken(lambda: noted.append("sealed"))
    assert noted == ["sealed"]


def test_a_request_for_a_recording_is_no_order(rank: Rank, tmp_path: Path) -> None:
    store = StoreServer("127.0.0.1", b"secret").start()
    connect(Order(Generation(1, ["a"], 1, store.address), 0, "a", ""), "gloo", b"secret")
    try:
        dist.all_reduce(torch.ones(2))
        path = tmp_path / "traces" / "rank_0"
        os.write(rank.writing, json.dumps({RECORD: str(path)}).encode() + b"\n")
        wait_until(path.is_file, "the recording is written")
        assert not rank.orders.is_over
        dumps, failed = read_dumps([path.with_name("rank_")])
        assert not failed
        assert [entry["profiling_name"] for entry in dumps[0]["entries"]][-1] == "gloo:all_reduce"
    finally:
        dist.destroy_process_group()


def test_a_request_for_stacks_is_no_order(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = make_stack_file()
    monkeypatch.setenv("CRATON_STACKS", str(descriptor))
    try:
        os.write(rank.writing, json.dumps({DUMP: True}).encode() + b"\n")
        wait_until(lambda: read_stacks(os.pread(descriptor, 1 << 16, 0).decode()).main, "the stacks are dumped")
        assert not rank.orders.is_over
    finally:
        os.close(descriptor)


def test_aborted_groups_are_forgotten_and_one_that_blocks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreServer("127.0.0.1", b"secret").start()
    connect(Order(Generation(1, ["a"], 1, store.address), 0, "a", ""), "gloo", b"secret")
    dist.new_group([0])
    abort_groups()
    assert not dist.is_initialized()
    connect(Order(Generation(2, ["a"], 1, store.address), 0, "a", ""), "gloo", b"secret")
    released = threading.Event()
    monkeypatch.setattr("craton.ml.training.orders.ABORT_SECONDS", 0.0)
    monkeypatch.setattr("craton.ml.training.orders._abort", lambda group: released.wait(PATIENCE_SECONDS))
    try:
        abort_groups()
        assert dist.is_initialized(), "its connections are closed next"
    finally:
        released.set()
        dist.destroy_process_group()


def test_a_rank_that_was_cut_off_in_a_rendezvous_meets_the_others_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_group_count", 1)  # of the group that was never made
    store = StoreServer("127.0.0.1", b"secret").start()
    connect(Order(Generation(2, ["a"], 1, store.address), 0, "a", ""), "gloo", b"secret")
    try:
        assert dist.distributed_c10d._get_default_group().group_name == "0", "as it is called in a rank that is new"
    finally:
        dist.destroy_process_group()
