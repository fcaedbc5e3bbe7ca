"""One small load for an engine, in every way in which an engine can compute it.

What an answer is does not depend on any of these ways; `run_case` also says whether they were really taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from model_pairs import VOCABULARY, Answer, drafting, pair

from craton.ml.models import Decoder
from craton.ml.serving.engine import build_runner, join_engine
from craton.ml.serving.engine.build import bytes_of_block
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import OutputDelta, Sampling, Stats, Submit
from craton.ml.serving.settings import EngineSettings

MAX_LENGTH = 64
MAX_STEPS = 5000
WRITTEN = 20  # tokens of an answer


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    chunk_tokens: int = 64
    page: int = 4
    prefix_hit: bool = False
    preemption: bool = False
    fork: bool = False
    draft_tokens: int = 0
    draft_model: bool = False  # else n-grams
    host: bool = False
    ranks: int = 1
    ep: int = 1
    overlap: bool = True
    graphs: str = "auto"
    seed: int = 0


WAYS: dict[str, tuple[object, ...]] = {
    "family": ("llama", "qwen3", "mixtral", "deepseek_v3"),
    "chunk_tokens": (5, 16, 256),
    "page": (1, 4, 16),
    "prefix_hit": (False, True),
    "preemption": (False, True),
    "fork": (False, True),
    "draft_tokens": (0, 3),
    "draft_model": (False, True),
    "host": (False, True),
    "ranks": (1, 2),
    "overlap": (True, False),
    "graphs": ("never", "always"),
}


def pairwise_cases() -> list[Case]:
    """Few cases in which every two values of two ways come together."""
    generator = random.Random(6)
    names = list(WAYS)
    left = {
        (first, one, second, two)
        for first, second in combinations(names, 2)
        for one in WAYS[first]
        for two in WAYS[second]
    }

    def covered(case: dict[str, object]) -> set[tuple[str, object, str, object]]:
        return {(first, case[first], second, case[second]) for first, second in combinations(names, 2)} & left

    cases = []
    while left:
        tried = [random_ways(generator) for _ in range(60)]
        best = max(tried, key=lambda case: len(covered(case)))
        left -= covered(best)
        cases.append(Case(**best, seed=len(cases)))  # type: ignore[arg-type]
    return cases


def random_ways(generator: random.Random) -> dict[str, object]:
    return {name: generator.choice(values) for name, values in WAYS.items()}


def settings_of(case: Case, model: Decoder) -> EngineSettings:
    """With little room where blocks shall be given up."""
    blocks = 1200 // case.page
    if case.preemption or case.host:
        blocks = -(-MAX_LENGTH // case.page) + 3 + 24 // case.page
    settings = EngineSettings(
        max_length=MAX_LENGTH,
        max_running=5,
        chunk_tokens=case.chunk_tokens,
        page=case.page,
        blocks=blocks,
        draft_tokens=case.draft_tokens,
        overlap=case.overlap,
        graphs=case.graphs,  # type: ignore[arg-type]
    )
    host_bytes = 400 // case.page * bytes_of_block(model, settings, case.ranks) if case.host else 0
    return EngineSettings(**{**settings.__dict__, "host_bytes": host_bytes})


def local_engine(case: Case) -> Engine:
    model = pair(case.family)[1]
    settings = settings_of(case, model)
    runner, settings, _ = build_runner(model, settings, draft=draft_of(case))
    return join_engine(runner, runner, settings, MAX_LENGTH)


def draft_of(case: Case) -> Decoder | None:
    return drafting(case.family) if case.draft_model and case.draft_tokens else None


def run_case(
    case: Case, build: Callable[[Case], Engine] = local_engine
) -> tuple[list[tuple[list[int], Answer]], Stats]:
    """Prompts and answers, and how the engine got there."""
    engine = build(case)
    generator = random.Random(case.seed)
    greedy = Sampling(max_tokens=WRITTEN, temperature=0.0)

    def text(length: int) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(length)]

    prompts: dict[int, list[int]] = {}
    pieces: dict[tuple[int, int], list[OutputDelta]] = {}

    def ask(prompt: list[int], copies: int = 1) -> None:
        number = len(prompts)
        prompts[number] = prompt
        engine.submit(Submit(number, tuple(prompt), greedy, copies))

    def work(most: int = MAX_STEPS) -> None:
        for _ in range(most):
            if engine.is_idle:
                return
            for piece in engine.step():
                pieces.setdefault((piece.id, piece.index), []).append(piece)
            engine.check()
        assert most < MAX_STEPS, "requests do not end"

    if case.preemption:  # who has seen only short answers lets too many in
        engine.submit(Submit(5000, (1, 2), Sampling(max_tokens=1, temperature=0.0)))
        while not engine.is_idle:
            engine.step()
    shared = text(33)
    if case.prefix_hit or case.host:
        ask(shared)
        work()
    if case.host:  # others push its blocks off the device
        for _ in range(3):
            ask(text(30))
        work()
    for length in (3, 17, 26, 9):
        ask(text(length), copies=2 if case.fork and length == 17 else 1)
    if case.prefix_hit or case.host:
        ask([*shared[:32], *text(2)])
        ask(shared[:18])
        first = [token for piece in pieces[0, 0] for token in piece.tokens]
        ask([*shared, *first[:7]])
    if case.preemption:
        ask(text(21))
    if case.fork:
        work(6)
        running = [number for number, prompt in prompts.items() if (number, 0) in pieces and not _ended(pieces, number)]
        for number in running[:1]:
            prompts[1000] = prompts[number]
            known = [token for piece in pieces[number, 0] for token in piece.tokens]
            engine.fork(number, 0, 1000)
            pieces[1000, 0] = [
                OutputDelta(1000, tokens=known, logprobs=[x for p in pieces[number, 0] for x in p.logprobs])
            ]
            pieces[1000, 0][0].versions = [0] * len(known)
    work()
    engine.check()
    answers = [(prompts[number], Answer.of(each)) for (number, _), each in sorted(pieces.items())]
    return answers, engine.stats()


def _ended(pieces: dict[tuple[int, int], list[OutputDelta]], number: int) -> bool:
    return any(piece.finish for piece in pieces[number, 0])
