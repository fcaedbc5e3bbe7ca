"""A gang of live ranks: four processes with one import of torch that run one layout after another.

`gang.run(function, *arguments, ranks=2)` calls an importable module-level function on the first `ranks` processes under
a fresh process group (gloo, or NCCL between ranks that share one GPU) and returns their results in order of rank. A
rank that raises is shown with its traceback; one that hangs is ended at the deadline, and the gang is started again at
the next call.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from warm_processes import warm_context

from craton.agent.processes import NCCL_POLICY

START_SECONDS = 180.0  # an import of torch on two busy cores
GRACE_SECONDS = 5.0  # for the other ranks, once one has raised: they may wait in a collective forever


class GangError(AssertionError):
    """A rank raised, died or ran past the deadline."""


class Gang:
    """`size` processes that stay alive between calls."""

    def __init__(self, size: int = 4, is_on_gpu: bool = False) -> None:
        self.size = size
        self._is_on_gpu = is_on_gpu
        self._members: list[tuple[BaseProcess, Connection]] = []
        self._stores = Path(tempfile.mkdtemp(prefix="gang-"))
        self._calls = 0

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int = 2, deadline: float = 180.0) -> list[Any]:
        """The results of `function(*arguments)` on every rank, in order of rank."""
        if not 1 <= ranks <= self.size:
            raise GangError(f"ranks is {ranks}; this gang has 1 to {self.size}")
        if not self._members:
            self._start()
        self._calls += 1
        store = self._stores / str(self._calls)
        work = pickle.dumps((sys.path, ranks, str(store), pickle.dumps((function, arguments))))
        for _, connection in self._members[:ranks]:
            connection.send_bytes(work)
        answers = self._answers(ranks, time.monotonic() + deadline)
        missing = [rank for rank in range(ranks) if rank not in answers]
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        if missing:
            self.close()
        if failed or missing:
            lines = [f"rank {rank} of {ranks} raised:\n{text}" for rank, text in failed.items()]
            lines += [f"rank {rank} of {ranks} gave no answer within {deadline:g} s" for rank in missing]
            raise GangError("\n".join(lines))
        return [answers[rank][1] for rank in range(ranks)]

    def close(self) -> None:
        """Ends every member."""
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()
        self._members = []
        shutil.rmtree(self._stores, ignore_errors=True)

    def _start(self) -> None:
        self._stores.mkdir(parents=True, exist_ok=True)
        context = warm_context()
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_member, args=(rank, theirs, self._is_on_gpu), daemon=True, name=f"gang-{rank}"
                )
                process.start()
                theirs.close()
                self._members.append((process, ours))
        finally:
            del os.environ["OMP_NUM_THREADS"]
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = threads
        missing = set(range(self.size)) - set(self._answers(self.size, time.monotonic() + START_SECONDS))
        if missing:
            self.close()
            raise GangError(f"ranks {sorted(missing)} did not start within {START_SECONDS:g} s")

    def _answers(self, ranks: int, deadline: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._members[:ranks])}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), timeout=left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process = self._members[rank][0]
                    process.join()
                    answers[rank] = (False, f"the process ended with exit code {process.exitcode}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if any(process.exitcode is not None for process, _ in self._members):
            self.close()
        return answers


def _member(rank: int, connection: Connection, is_on_gpu: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    if is_on_gpu:
        # NCCL takes ranks with different values for different hosts: they may share a GPU, and talk over loopback.
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", **NCCL_POLICY)
    else:  # they talk over gloo; a machine may have fewer GPUs than there are ranks
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    backend = "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo"
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            path, ranks, store, call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        sys.path[:] = path
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        try:
            function, arguments = pickle.loads(call)
            dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
            dist.barrier()  # a rank that leaves at once would break the connections that others are still making
            answer = pickle.dumps((True, function(*arguments)))
        except BaseException:  # noqa: BLE001 -- whatever a test function raises is the answer
            answer = pickle.dumps((False, traceback.format_exc()))
        with suppress(Exception):  # a broken group may refuse to go; the next call makes its own
            dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it remembers the meshes of groups that are gone, and takes equal ones for them
        connection.send_bytes(answer)
