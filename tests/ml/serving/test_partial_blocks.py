"""Requests that continue a text copy its last, partly filled block: they compute no token again, and have the tokens
that they would have without the copy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_pairs import VOCABULARY, pair

from craton.ml.serving.device.runner import Runner
from craton.ml.serving.engine import build_runner
from craton.ml.serving.engine.build import build_engine, bytes_of_block
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Sampling, Submit
from craton.ml.serving.schedule import BlockPool, Move, PrefixTree, Scheduler, Sequence
from craton.ml.serving.settings import EngineSettings

PAGE, MAX_LENGTH, STEP, WIDTH = 16, 64, 8, 3
SETTINGS = EngineSettings(max_length=MAX_LENGTH, page=PAGE, blocks=200, chunk_tokens=64, max_running=8)
PROMPT = tuple((5 * place + 3) % VOCABULARY for place in range(19))
DEPTH = 4
GREEDY = Sampling(max_tokens=STEP, temperature=0.0)
EXACT = ("plain", "chunked", "small blocks", "fp8", "graphs")
WAYS = {
    "plain": SETTINGS,
    "chunked": replace(SETTINGS, chunk_tokens=5, overlap=False),
    "small blocks": replace(SETTINGS, page=4),
    "tight": replace(SETTINGS, page=4, blocks=22),  # too few for all: blocks are evicted, requests preempted
    "host memory": replace(SETTINGS, page=4, blocks=25, host_bytes=50 * bytes_of_block(pair("llama")[1], SETTINGS)),
    "fp8": replace(SETTINGS, kv_precision="fp8"),
    "drafting": replace(SETTINGS, draft_tokens=3),
    "graphs": replace(SETTINGS, graphs="always"),
}


@pytest.fixture
def without_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr("craton.ml.serving.schedule.prefix.MIN_COPIED_TOKENS", MAX_LENGTH)


def engine_of(settings: EngineSettings) -> Engine:
    return build_engine(pair("llama")[1], settings)


def answers(engine: Engine, *requests: Submit) -> list[tuple[int, ...]]:
    """The tokens of all copies of some requests, which run at once."""
    tokens: dict[tuple[int, int], list[int]] = {}
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        for delta in engine.step():
            assert delta.finish in (None, "length"), delta.error
            tokens.setdefault((delta.id, delta.index), []).extend(delta.tokens)
        engine.check()
    return [tuple(tokens[key]) for key in sorted(tokens)]


def grow(engine: Engine, others: int = 0) -> tuple[list[tuple[int, ...]], int]:
    """The texts of a tree in which the first branch of each level is expanded, by two requests at once for the same
    text; and the number of its tokens. With each level come so many other requests."""
    text, texts, unique = PROMPT, [], len(PROMPT)
    generator = random.Random(1)
    for level in range(DEPTH):
        branches = [
            Submit(number, text, Sampling(max_tokens=STEP, seed=100 * level + 7 * number), copies)
            for number, copies in enumerate((WIDTH, 1) if level else (WIDTH,))
        ]
        count = sum(branch.copies for branch in branches)
        prompts = [tuple(generator.choices(range(VOCABULARY), k=30)) for _ in range(others)]
        found = answers(engine, *branches, *(Submit(9 + number, p, GREEDY) for number, p in enumerate(prompts)))
        unique += sum(map(len, found[:count]))
        texts += [text + branch for branch in found[:count]]
        text += found[0]
    return texts, unique


@pytest.mark.parametrize("way", WAYS)
def test_a_tree_has_the_same_tokens_with_and_without_copies(way: str, without_copies: Callable[[], None]) -> None:
    engine, others = engine_of(WAYS[way]), 0 if way in EXACT else 3
    answers(engine, Submit(1, (1, 2), replace(GREEDY, max_tokens=1)))  # after a short answer it admits too many
    texts, unique = grow(engine, others)
    stats = engine.stats()
    assert bool(stats.preemptions) == (way in ("tight", "host memory"))
    assert bool(stats.host_hits) == (way == "host memory")
    without_copies()
    engine = engine_of(WAYS[way])
    assert grow(engine, others)[0] == texts
    if way in EXACT:  # every branch but one computes the last token before it, and none its own last token
        assert stats.step_tokens == 2 + unique - 1
        assert stats.prefix_hits == sum(2 * (len(PROMPT) + STEP * level - 1) for level in range(1, DEPTH))
        assert engine.stats().step_tokens > stats.step_tokens


def test_a_request_copies_what_a_running_one_has_of_its_text() -> None:
    """The running one has filled its block, and continues behind it."""
    engine = engine_of(SETTINGS)
    engine.submit(Submit(1, PROMPT, replace(GREEDY, max_tokens=40)))
    running = engine._sequences[1][0]
    while len(running.nodes) < 2:
        engine.step()
    assert len(running.tokens) >= 2 * PAGE
    other = Submit(2, tuple(running.tokens[:25]), replace(GREEDY, max_tokens=20))
    engine.submit(other)
    twin, tokens = [], []
    while not engine.is_idle:
        for delta in engine.step():
            twin += delta.tokens if delta.id == 2 else ()
            tokens += delta.tokens if delta.id == 1 else ()
    assert engine.stats().prefix_hits == 24
    assert twin == running.tokens[25:45]
    assert answers(engine_of(SETTINGS), other) == [tuple(twin)]


# -- the scheduler ----------------------------------------------------------------------------------------------------


class Requests:
    """A scheduler, and requests that run in it until they are computed."""

    def __init__(self, blocks: int = 20, host_blocks: int = 0) -> None:
        self.pool = BlockPool(blocks)
        self.host = BlockPool(host_blocks) if host_blocks else None
        self.tree = PrefixTree(self.pool, 4, self.host)
        self.scheduler = Scheduler(self.pool, self.tree, 4, 64)

    def cached(self, tokens: range, **changes: Any) -> int:
        """Run a request of these tokens; return how many of them it need not compute."""
        sequence = Sequence(1, 0, list(tokens), Sampling(max_tokens=2), 0, len(tokens), **changes)
        self.scheduler.add(sequence)
        step = self.scheduler.schedule()
        assert step is not None
        self.moves = step.moves
        sequence.in_flight = 0
        self.scheduler.commit(sequence)
        self.scheduler.finish(sequence)
        self.scheduler.check()
        return sequence.cached_tokens


def test_the_longest_common_beginning_is_copied() -> None:
    requests = Requests()
    assert requests.cached(range(7)) == 0
    assert requests.moves == []
    assert requests.cached(range(10)) == 7
    assert [move.kind for move in requests.moves] == ["copy"]
    assert requests.cached(range(7)) == 6, "its last token is computed, because the next one is sampled from it"
    assert requests.cached(range(4)) == 3, "of a full block"
    assert requests.cached(range(5)) == 4
    assert requests.moves == [], "a whole block is shared"
    assert requests.cached(range(2, 5)) == 0


def test_one_common_token_is_not_worth_a_copy() -> None:
    requests = Requests()
    requests.cached(range(3))
    request = [0, 9, 9, 9]
    assert requests.tree.most_similar(requests.tree.root((0, None)), request) is None
    assert requests.tree.most_similar(requests.tree.root((0, None)), [0, 1, 9]) is not None


def test_blocks_of_other_weights_or_adapters_are_not_copied() -> None:
    requests = Requests()
    assert [requests.cached(range(7), adapter=name) for name in (None, "a", "b", "a")] == [0, 0, 0, 6]
    requests.scheduler.forget(lambda root: root[1] == "a")
    assert requests.cached(range(7), adapter="a") == 0
    assert requests.cached(range(7)) == 6
    requests.scheduler.change_version(1)
    assert requests.cached(range(7)) == 0
    assert requests.pool.free == requests.pool.count - 2, "of the old weights nothing is left"


def test_a_copy_does_not_evict_its_own_source() -> None:
    requests = Requests(blocks=3)
    assert requests.cached(range(6)) == 0  # 2 blocks, which are all
    assert requests.cached(range(7)) == 4, "no block is left for a copy but the source"
    assert requests.moves == []


def test_a_partly_filled_block_is_dropped_when_it_is_evicted() -> None:
    requests = Requests(blocks=4, host_blocks=10)
    requests.cached(range(6))
    requests.cached(range(50, 60))
    assert requests.host is not None
    assert requests.host.count - requests.host.free == 1, "the full block"
    assert requests.cached(range(6)) == 4


# -- copies on the device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_precision", ["auto", "fp8"])
def test_moves_are_those_of_one_after_another(kv_precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, blocks=12, page=8, kv_precision=kv_precision)
    settings = replace(settings, host_bytes=6 * bytes_of_block(pair("llama")[1], settings))
    runner, _, _ = build_runner(pair("llama")[1], settings)
    assert isinstance(runner, Runner)
    host = runner.host_cache
    assert host is not None
    generator = random.Random(5)
    at_once: list[int] = []
    copy_blocks = Runner._copy_blocks

    def counted(self: Runner, moves: list[Move]) -> None:
        at_once.append(len(moves))
        copy_blocks(self, moves)

    monkeypatch.setattr(Runner, "_copy_blocks", counted)
    for _ in range(20):
        for number, block in enumerate(runner.past.cache):
            block.fill_(number)
        host.fill_(32)
        expected = {("device", block): block for block in range(12)} | {
            ("host", block): 32 for block in range(len(host))
        }
        tiers = {"copy": ("device", "device"), "out": ("device", "host"), "in": ("host", "device")}
        moves = []
        for _ in range(12):
            kind = generator.choice(["copy", "copy", "copy", "copy", "out", "in"])
            source, target = tiers[kind]
            move = Move(
                kind,  # type: ignore[arg-type]
                generator.randrange(12 if source == "device" else len(host)),
                generator.randrange(12 if target == "device" else len(host)),
            )
            expected[target, move.target] = expected[source, move.source]
            moves.append(move)
        runner.move(moves)
        found = {("device", number): block for number, block in enumerate(runner.past.cache)}
        found |= {("host", number): block for number, block in enumerate(host)}
        for place, value in expected.items():
            assert torch.all(found[place].float() == value), place
    assert max(at_once) > 3
    at_once.clear()
    runner.move([Move("copy", 1, target) for target in range(2, 12)])
    runner.move([])
    assert at_once == [10]
