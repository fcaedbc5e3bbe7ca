"""Two processes that share the weights of an engine, for all tests that need them: started once, given cases."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from warm_processes import warm_context

CASE_SECONDS = 120.0


@contextmanager
def two_ranks() -> Iterator[Connection]:
    """A line to the first of them: send a case, receive what `run_case` returns, or a text with what went wrong."""
    from craton.agent.processes import free_port

    context = warm_context()
    port = free_port()
    to_first, of_first = context.Pipe()
    first_side, second_side = context.Pipe()
    processes = [
        context.Process(target=first_rank, args=(of_first, first_side, port), daemon=True),
        context.Process(target=second_rank, args=(second_side, port), daemon=True),
    ]
    for process in processes:
        process.start()
    for line in (of_first, first_side, second_side):
        line.close()
    try:
        yield to_first
    finally:
        to_first.close()
        for process in processes:
            process.join(10)
            process.kill()


def ask(line: Connection, case: Any) -> Any:
    line.send(case)
    assert line.poll(CASE_SECONDS), "the ranks do not answer"
    answer = line.recv()
    assert not isinstance(answer, str), answer
    return answer


def first_rank(tests: Connection, second: Connection, port: int) -> None:
    from serving_cases import MAX_LENGTH, Case, run_case

    from craton.ml.serving.device import TensorParallelGroup
    from craton.ml.serving.engine import join_engine
    from craton.ml.serving.engine.engine import Engine

    connect(0, port)

    def build(case: Case) -> Engine:
        second.send(case)
        rank, settings = make_rank(case)
        gangs.append(TensorParallelGroup(rank, [second]))
        return join_engine(gangs[-1], rank.runner, settings, MAX_LENGTH)

    gangs: list[TensorParallelGroup] = []
    while True:
        try:
            case = tests.recv()
        except EOFError:
            return
        try:
            answer: Any = run_case(case, build)
        except Exception:  # noqa: BLE001 -- the test shows it
            answer = traceback.format_exc()
        gangs[-1].close()
        tests.send(answer)


def second_rank(first: Connection, port: int) -> None:
    from craton.ml.serving.device import follow
    from craton.ml.serving.heartbeat import EngineHeartbeat

    connect(1, port)
    while True:
        try:
            case = first.recv()
        except EOFError:
            return
        rank, _ = make_rank(case)
        follow(rank, first, EngineHeartbeat(None))


def connect(rank: int, port: int) -> None:
    import torch
    import torch.distributed as dist
    from model_pairs import FAMILIES, pair

    torch.set_num_threads(1)
    for family in FAMILIES:  # transformers saves on the first rank only, once there are ranks
        pair(family)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def make_rank(case: Any) -> tuple[Any, Any]:
    import copy

    import torch
    from model_pairs import pair
    from serving_cases import draft_of, settings_of

    from craton.ml.serving.device import EngineRank
    from craton.ml.serving.device.tensor_parallel_group import cut_model
    from craton.ml.serving.engine import build_runner

    model = copy.deepcopy(pair(case.family)[1])
    peers = cut_model(model, torch.device("cpu"), case.ep)
    runner, settings, _ = build_runner(model, settings_of(case, model), peers, draft=draft_of(case))
    return EngineRank(runner), settings
