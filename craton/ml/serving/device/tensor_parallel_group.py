"""A tensor-parallel group: ranks that share the weights of one model and act as one device.

Rank 0 runs the engine. It sends each step to the others, then executes it. All sample the same tokens, so nothing is
sent back. Losing one rank ends all of them, because its shard of the weights is gone.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from craton.errors import CratonError
from craton.ml.collectives import Connections, Peers
from craton.ml.models import Decoder, cut_experts
from craton.ml.serving.device.experts import split_mlps
from craton.ml.serving.device.order_bytes import EXECUTE, decode_order, encode_order
from craton.ml.serving.device.rank import EngineRank
from craton.ml.serving.device.runner import StepResult
from craton.ml.serving.device.weights import MixedWeightsError
from craton.ml.serving.heartbeat import EngineHeartbeat
from craton.ml.serving.schedule import StepInput
from craton.ml.serving.settings import ServingError
from craton.ml.serving.wire import receive_bytes
from craton.ml.training.parallel import cut_parameters

TEXT_BYTES = 4096  # of an error message that ranks exchange
IDLE_SECONDS = 1.0  # between two heartbeats of a rank without orders
WEIGHT_METHODS = ("update_from_folder", "receive_weights")  # methods of a rank that can be repeated


class RanksDifferError(RuntimeError):
    """An operation succeeded on some ranks only and cannot be undone: all ranks must restart."""


class TensorParallelGroup:
    """Rank 0 and its connections to the others."""

    def __init__(self, rank: EngineRank, others: Sequence[Connection] = ()) -> None:
        self.rank = rank
        self._others = others
        self._is_closing = False

    def execute(self, work: StepInput) -> StepResult:
        self._tell(EXECUTE, (work,))
        return self.rank.execute(work)

    def every(self, method: str, *arguments: Any) -> Any:
        """Call a method on every rank; return the result of rank 0."""
        self._tell(method, arguments)
        return together(self.rank, method, arguments)

    def start(self, method: str, *arguments: Any) -> Future[Any]:
        """The same on a thread, so that the loop keeps running; send no other order to the ranks meanwhile."""
        future: Future[Any] = Future()

        def call() -> None:
            device = self.rank.runner.device
            try:
                with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                    future.set_result(self.every(method, *arguments))
            except BaseException as error:  # noqa: BLE001 -- any error goes to the caller of result()
                future.set_exception(error)

        # A daemon thread: the process can exit without waiting for it.
        threading.Thread(target=call, daemon=True, name=method).start()
        return future

    def close(self) -> None:
        """Tell the other ranks to exit."""
        self._is_closing = True
        for line in self._others:
            with contextlib.suppress(OSError):
                line.send_bytes(encode_order(None))

    def watch(self, lost: Callable[[int], None]) -> None:
        """Call `lost` with the number of a rank whose connection closes, from a thread."""

        def look(number: int, line: Connection) -> None:
            try:
                line.recv_bytes()
            except (EOFError, OSError):
                if not self._is_closing:
                    lost(number)

        for number, line in enumerate(self._others, 1):
            threading.Thread(target=look, args=(number, line), daemon=True, name=f"rank {number}").start()

    def _tell(self, method: str, arguments: tuple[Any, ...]) -> None:
        if not self._others:
            return
        order = encode_order((method, arguments))
        for number, line in enumerate(self._others, 1):
            try:
                line.send_bytes(order)
            except OSError as error:
                raise ConnectionError(f"rank {number} of the tensor-parallel group is lost: {error}") from error


def follow(rank: EngineRank, first: Connection, heartbeat: EngineHeartbeat) -> bool:
    """Execute the orders of rank 0 until the last one. Return False if its connection closes before that."""
    with heartbeat:
        while True:
            try:
                order = decode_order(_next_order(first, heartbeat))
            except (EOFError, OSError):
                return False
            if order is None:
                return True
            method, arguments = order
            if method == EXECUTE:
                rank.execute(*arguments)
                continue
            try:
                with heartbeat.patient():
                    together(rank, method, arguments)
            except CratonError as error:  # rank 0 has it too, and returns it to the client
                print(f"{method}: {error}", file=sys.stderr, flush=True)


def _next_order(first: Connection, heartbeat: EngineHeartbeat) -> bytes:
    """Wait for the next order."""
    heartbeat.beat()
    while not first.poll(IDLE_SECONDS):
        heartbeat.beat()
    return receive_bytes(first)


def together(rank: EngineRank, method: str, arguments: tuple[Any, ...]) -> Any:
    """Run a method on this rank, as all ranks do, and compare outcomes. Raise on every rank if some ranks failed."""
    result: Any = None
    failure: CratonError | None = None
    try:
        result = getattr(rank, method)(*arguments)
    except CratonError as error:
        failure = error
    except torch.OutOfMemoryError as error:  # the other ranks wait for this outcome
        failure = ServingError(f"out of device memory: {str(error).splitlines()[0]}")
    if dist.is_initialized() and dist.get_world_size() > 1:
        texts = gather_texts(None if failure is None else f"{type(failure).__name__}: {failure}")
        failed = {number: text for number, text in enumerate(texts) if text is not None}
        if failed and len(failed) < len(texts):
            message = "; ".join(f"rank {number}: {text}" for number, text in failed.items())
            problem = f"{method} succeeded on some ranks only ({message})"
            if method in WEIGHT_METHODS:
                raise MixedWeightsError(f"{problem}; update the weights")
            raise RanksDifferError(problem)
    if failure is not None:
        raise failure
    return result


def gather_texts(text: str | None) -> list[str | None]:
    """Return the texts of all ranks, truncated to TEXT_BYTES, or None; sent as plain numbers, not as pickles."""
    data = b"" if text is None else text.encode(errors="replace")[: TEXT_BYTES - 1]
    mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    if text is not None:
        mine[: len(data) + 1] = torch.tensor([1, *data], dtype=torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return [bytes(their[1:].tolist()).rstrip(b"\0").decode(errors="replace") if their[0] else None for their in theirs]


def cut_model(model: Decoder, device: torch.device, ep: int = 1) -> Peers:
    """Shard the model over all ranks, on the meta device or with memory; keep this rank's shard. Of every `ep` ranks
    next to each other, each keeps its share of the routed experts."""
    world = dist.get_world_size()
    mesh = DeviceMesh(device.type, torch.arange(world), mesh_dim_names=("tp",))
    cut_parameters(model, mesh)
    peers = Peers(mesh.get_group("tp"))
    holders: Peers | None = None
    if ep > 1:
        expert_mesh = mesh if ep == world else _groups_of(ep, device)
        cut_experts(model, expert_mesh)
        holders = peers if ep == world else Peers(expert_mesh.get_group())
    talking: list[Any] = [module for module in model.modules() if hasattr(module, "connections")]
    for module in talking:
        module.connections = Connections(tensor=peers, experts=holders)
    if holders is not None:
        split_mlps(model)
    return peers


def _groups_of(size: int, device: torch.device) -> DeviceMesh:
    """Return this rank's mesh of `size` ranks next to each other."""
    ranks = torch.arange(dist.get_world_size()).view(-1, size)
    return DeviceMesh(device.type, ranks, mesh_dim_names=("copies", "ep"))["ep"]
