"""Greedy answers and their log-probabilities are those of transformers, token for token, however they are computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
from model_pairs import DEVICE, Answer, expect_greedy, pair
from serving_cases import WRITTEN, Case, pairwise_cases, random_ways, run_case
from two_ranks import ask, two_ranks

from craton.ml.serving.messages import Stats

CASES = pairwise_cases()
ON_TWO_RANKS = [case for case in CASES if case.ranks == 2]
DRAFTED = next(number for number, case in enumerate(ON_TWO_RANKS) if case.draft_model and case.draft_tokens)


def check(case: Case) -> Stats:
    return compare(case, *run_case(case))


def compare(case: Case, answers: list[tuple[list[int], Answer]], stats: Stats) -> Stats:
    for prompt, answer in answers:
        assert answer.last is not None
        assert answer.last.finish == "length", answer.last.error
        assert len(answer.tokens) == WRITTEN
        expect_greedy(pair(case.family)[0], prompt, answer)
    return stats


@pytest.mark.parametrize("case", [case for case in CASES if case.ranks == 1], ids=str)
def test_every_two_ways_together(case: Case) -> None:
    stats = check(case)
    assert stats.prefix_hits or not case.prefix_hit or case.host
    assert stats.host_hits or not case.host
    assert stats.preemptions or not case.preemption or case.page == 16 or case.chunk_tokens == 5
    assert stats.drafted or not case.draft_tokens


@pytest.fixture(scope="module")
def ranks() -> Iterator[Connection]:
    with two_ranks() as line:
        yield line


@pytest.mark.skipif(DEVICE.type == "cuda", reason="two ranks would share one GPU")
@pytest.mark.xdist_group("two ranks")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if number in (0, DRAFTED) else pytest.mark.slow, id=str(case))
        for number, case in enumerate(ON_TWO_RANKS)
    ],
)
def test_every_two_ways_together_on_two_ranks(case: Case, ranks: Connection) -> None:
    compare(case, *ask(ranks, case))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="two ranks would share one GPU")
@pytest.mark.xdist_group("two ranks")
def test_experts_that_two_ranks_split(ranks: Connection) -> None:
    case = Case("mixtral", fork=True, ranks=2, ep=2, graphs="always")
    compare(case, *ask(ranks, case))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_two_hundred_ways_at_random(first: int) -> None:
    found = [
        check(replace(Case(**random_ways(random.Random(seed)), seed=seed), ranks=1))  # type: ignore[arg-type]
        for seed in range(first, first + 10)
    ]
    for what in ("prefix_hits", "host_hits", "preemptions", "drafted", "accepted"):
        assert any(getattr(stats, what) for stats in found), f"no {what} in any of them"
