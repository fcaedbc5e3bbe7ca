"""Grammars that cost too much are refused by size, time and memory, at no cost to other grammars or to the cache."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE_SECONDS, wait_until

from craton.ml.data import load_tokenizer
from craton.ml.data.tokenizer import train_bpe
from craton.ml.serving.grammar import GrammarError, Grammars
from craton.ml.serving.grammar import grammars as grammars_module
from craton.ml.serving.grammar.grammars import mask_words
from craton.ml.serving.grammar.limits import MAX_GRAMMAR_BYTES
from craton.ml.serving.messages import Grammar


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["The quick brown fox says hello to the world.\n"] * 4, 300, folder)
    return folder


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    made = Grammars(folder, load_tokenizer(folder).get_vocab_size(), [0])
    yield made
    made.close()


def slow(number: int) -> Grammar:
    """A schema whose compilation takes more CPU time than is allowed: it grows with the square of the properties."""
    properties = ",".join(f'"p{number}_{place}":{{"type":"string"}}' for place in range(7500))
    return Grammar("json_schema", f'{{"type":"object","properties":{{{properties}}}}}')


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_large_text_is_refused_before_anything_is_done_with_it(grammars: Grammars) -> None:
    for _ in range(10):
        with pytest.raises(GrammarError, match="the maximum is 262,144"):
            grammars.start(Grammar("regex", "a" * 10_000_000)).result(PATIENCE_SECONDS)
    assert grammars.kept_bytes == 0
    assert MAX_GRAMMAR_BYTES == 262_144


def test_quick_grammars_do_not_wait_for_slow_ones_and_clients_that_leave_end_theirs(grammars: Grammars) -> None:
    grammars.start(Grammar("regex", "a+")).result(PATIENCE_SECONDS)
    worker = grammars._checker._process
    assert worker is not None
    slow_ones = [grammars.start(slow(number)) for number in range(4)]
    wait_until(lambda: children(worker.pid))
    grammars.start(Grammar("regex", "b+")).result(PATIENCE_SECONDS)
    # Each of them gives way after a tenth of a second of CPU time or two; one after the other they need 12 s of it.
    waiting = [future for future in slow_ones if not future.done()]
    assert len(waiting) >= 2
    for future in waiting:
        grammars.cancel(future)
    wait_until(lambda: not children(worker.pid))
    assert not grammars._compilations
    grammars.start(Grammar("regex", "c+")).result(PATIENCE_SECONDS)
    assert all(future.cancelled() or not future.done() for future in waiting)


def test_a_grammar_that_several_wait_for_ends_with_the_last_of_them(grammars: Grammars) -> None:
    first, second = grammars.start(slow(9)), grammars.start(slow(9))
    assert len(grammars._compilations) == 1
    grammars.cancel(first)
    assert len(grammars._compilations) == 1
    wait_until(lambda: next(iter(grammars._compilations.values())).check is not None)
    grammars.cancel(second)
    assert not grammars._compilations


def test_too_much_time_or_memory_is_said_and_not_kept(grammars: Grammars) -> None:
    before = grammars.kept_bytes
    with pytest.raises(GrammarError, match=r"compiling it takes more than .*; simplify it"):
        grammars.start(slow(1)).result(PATIENCE_SECONDS)
    with pytest.raises(GrammarError, match="simplify it"):
        grammars.start(Grammar("regex", "a" * 250_000)).result(PATIENCE_SECONDS)
    assert grammars.kept_bytes == before


def test_what_is_kept_is_bounded_by_its_bytes(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.start(Grammar("regex", "x1")).result(PATIENCE_SECONDS)
    grammars.start(Grammar("regex", "x2")).result(PATIENCE_SECONDS)
    sizes = [size for _, size in grammars._kept.values()]
    assert grammars.kept_bytes == sum(sizes)
    monkeypatch.setattr(grammars_module, "CACHE_BYTES", sizes[-1])
    grammars.start(Grammar("regex", "x3")).result(PATIENCE_SECONDS)
    assert grammars.kept_bytes == sum(size for _, size in grammars._kept.values()) <= sizes[-1]
    assert Grammar("regex", "x1") not in grammars._kept


def test_a_checker_that_is_lost_is_started_again(grammars: Grammars) -> None:
    grammars.start(Grammar("regex", "d+")).result(PATIENCE_SECONDS)
    lost = grammars._checker._process
    assert lost is not None
    waiting = grammars.start(slow(2))
    wait_until(lambda: children(lost.pid))
    os.kill(lost.pid, signal.SIGKILL)
    with pytest.raises(GrammarError, match="send the request again"):
        waiting.result(PATIENCE_SECONDS)
    grammars.start(Grammar("regex", "e+")).result(PATIENCE_SECONDS)


def test_a_grammar_that_becomes_slow_is_given_up_and_others_go_on(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {row: grammars.start(Grammar("regex", f"f{row}+")).result(PATIENCE_SECONDS) for row in range(2)}
    masks = np.zeros((2, mask_words(grammars.vocabulary)), np.int32)
    assert grammars.fill(states, masks) == {}
    expected = masks.copy()
    monkeypatch.setattr(grammars_module, "MAX_MASK_SECONDS", 0.0)
    grammars.fill(states, masks)  # all of them together took too long: from now on each is timed
    assert "took" in grammars.fill(states, masks)[0]
    monkeypatch.undo()
    assert grammars.fill(states, masks) == {}
    assert np.array_equal(masks, expected)
