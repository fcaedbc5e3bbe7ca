"""Every second is booked once, and the books of a run add up over ranks and generations."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craton.telemetry import RunDirectory
from craton.telemetry.rank import LEDGER_KINDS, LedgerClock, LedgerReader, ledger


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(LEDGER_KINDS), st.floats(0, 1e4), st.booleans()), max_size=40))
def test_the_kinds_sum_to_wall_time(steps: list[tuple[str, float, bool]]) -> None:
    watch = Watch()
    clock = LedgerClock(started=time.time(), now=watch)
    begin, taken = clock.page.since, 0.0
    for kind, seconds, takes in steps:
        clock.switch(kind)
        watch.now += seconds
        if takes:
            taken += sum(clock.take().values())
    taken += sum(clock.take().values())
    assert taken == pytest.approx(watch.now - begin, abs=1e-6)


def test_a_block_is_booked_and_the_kind_before_comes_back() -> None:
    watch = Watch()
    clock = LedgerClock(started=time.time() + 10, now=watch)  # a clock that runs behind must not book negative time
    clock.switch("productive")
    watch.now += 1
    with contextlib.suppress(RuntimeError), clock.kind("data"):
        watch.now += 2
        with clock.kind("checkpoint"):
            watch.now += 4
        raise RuntimeError
    watch.now += 8
    assert clock.current == "productive"
    assert clock.take() == {"productive": 9.0, "data": 2.0, "checkpoint": 4.0}
    assert clock.take() == {}


def test_the_clock_begins_with_the_process_that_has_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRATON_PAGE", raising=False)
    assert LedgerClock(started=time.time() - 50).take()["start"] == pytest.approx(50, abs=5)
    clock = LedgerClock()
    assert not clock.is_shared
    assert clock.take()["start"] == pytest.approx(0, abs=5)


def test_a_step_that_is_broken_off_is_taken_back() -> None:
    watch = Watch()
    clock = LedgerClock(started=time.time() + 10, now=watch)
    clock.switch("productive")
    watch.now += 1
    clock.begin_step(2)
    watch.now += 4
    assert clock.take() == {"productive": 5.0}
    clock.break_off("regroup", since=watch.now)
    watch.now += 8
    assert clock.take() == {"productive": -4.0, "redo": 4.0, "regroup": 8.0}


def book(
    run: RunDirectory, rank: int, generation: int, moment: float, ended: str = "", node: str = "n", **seconds: float
) -> None:
    line = {"time": moment, "step": 1, "generation": generation, "rank": rank, "seconds": seconds}
    with run.ledger_path(node).open("a") as handle:
        handle.write(json.dumps({**line, "ended": ended} if ended else line) + "\n")


def test_a_run_is_the_mean_over_ranks(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    reader = LedgerReader(run)
    assert reader.totals() == {}
    book(run, 0, 1, 110, start=4, productive=6)
    book(run, 1, 1, 110, start=2, productive=8)
    assert reader.totals() == pytest.approx({"start": 3, "productive": 7})
    book(run, 0, 1, 120, productive=10)
    book(run, 1, 1, 120, data=10)
    assert reader.totals() == LedgerReader(run).totals() == pytest.approx({"start": 3, "productive": 12, "data": 5})


@pytest.mark.parametrize(("ended", "idle"), [("", 1000), ("failed", 1000), ("stopped", 0), ("done", 0)])
def test_a_gap_counts_unless_it_was_asked_for(tmp_path: Path, ended: str, idle: float) -> None:
    run = RunDirectory.create(tmp_path, "a")
    book(run, 0, 1, 110, productive=10)
    book(run, 0, 1, 115, ended, detect=5)
    book(run, 0, 2, 1120, start=5)  # its rank was spawned at 1115
    totals = LedgerReader(run).totals()
    assert totals.get("idle", 0) == idle
    assert sum(totals.values()) == 20 + idle


def test_foreign_lines_in_the_books_are_ignored(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    run.ledger_path("n").write_text(
        '{"generation":1}\n{"generation":1,"rank":0,"time":1,"seconds":{"lunch":5,"productive":2}}\nrubbish\n'
    )
    assert LedgerReader(run).totals() == {"productive": 2}


def test_at_every_moment_the_ranks_count_whose_books_cover_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    reader = LedgerReader(run)
    book(run, 0, 1, 110, productive=10)
    book(run, 1, 1, 110, productive=10)
    book(run, 0, 1, 130, detect=20)  # the node of rank 1 was lost
    assert reader.totals() == pytest.approx({"productive": 10, "detect": 20})
    book(run, 0, 2, 140, productive=10)
    book(run, 1, 2, 145, waiting=30, productive=5)  # its books were taken up again where they had ended
    assert sum(reader.totals().values()) == pytest.approx(45)
    assert reader.totals() == pytest.approx(LedgerReader(run).totals())
    assert reader.by_generation()[1] == {"productive": 10, "detect": 10}


@given(
    st.lists(
        st.lists(st.tuples(st.floats(0.1, 5), st.sampled_from(LEDGER_KINDS)), min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    )
)
def test_ranks_that_book_at_different_paces_sum_to_the_longest(ranks: list[list[tuple[float, str]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(folder, "a")
        reader = LedgerReader(run)
        longest = 0.0
        for rank, lines in enumerate(ranks):
            moment = 1000.0
            for number, (seconds, kind) in enumerate(lines):
                moment += seconds
                book(run, rank, 1 + number // 5, moment, **{kind: seconds})
            longest = max(longest, moment - 1000.0)
        assert sum(reader.totals().values()) == pytest.approx(longest, rel=1e-6)


BOOKED = st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 9), st.sampled_from(LEDGER_KINDS)), max_size=30)


@given(BOOKED, st.data())
def test_a_reader_goes_on_from_what_another_has_kept(booked: list[tuple[int, float, str]], data: st.DataObject) -> None:
    at = dict.fromkeys(range(4), 100.0)
    lines = []
    for number, (rank, seconds, kind) in enumerate(booked):
        at[rank] += seconds
        lines.append((at[rank], rank, number // 10, kind, seconds))
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(folder, "run")
        for moment, rank, generation, kind, seconds in sorted(lines):
            book(run, rank, generation, moment, **{kind: seconds})
            if data.draw(st.booleans()):
                reader = LedgerReader(run)
                reader.totals()
                reader.keep()
        going_on = LedgerReader(run)
        found = going_on.totals(), going_on.by_generation()
        (run.path / "ledger" / ".books.json").unlink(missing_ok=True)
        from_the_start = LedgerReader(run)
        assert found[0] == pytest.approx(from_the_start.totals())
        assert found[1] == from_the_start.by_generation()


def test_what_was_kept_of_other_files_is_not_taken_up(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    book(run, 0, 0, 110.0, productive=10.0)
    reader = LedgerReader(run)
    reader.totals()
    reader.keep()
    (path,) = (run.path / "ledger").glob("*.jsonl")
    path.write_text("")  # a run of the same name, begun anew
    assert LedgerReader(run).totals() == {}
    book(run, 0, 0, 205.0, data=5.0)
    (run.path / "ledger" / ".books.json").write_text('{"offsets": {"node-0.js')
    assert LedgerReader(run).totals() == {"data": 5.0}


def test_a_reader_of_some_nodes_goes_on_from_what_was_kept_of_all(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "wide")
    for rank in range(6):
        for moment in (110, 120, 130):
            book(run, rank, 0, moment, node=f"node-{rank}", productive=10)
    reader = LedgerReader(run)
    assert reader.totals() == {"productive": 30}
    reader.keep()
    for path in (run.path / "ledger").glob("*.jsonl"):
        path.write_text("-" * (path.stat().st_size - 1) + "\n")  # whoever reads that again loses it
    for rank in range(6):
        book(run, rank, 0, 140, node=f"node-{rank}", data=10)
    assert LedgerReader(run, most_nodes=2).totals() == pytest.approx({"productive": 30, "data": 10})


def test_a_reader_adds_up_on_its_way_and_holds_a_stretch_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path, "long")
    for rank, (first, last) in enumerate([(100, 400), (100, 400), (300, 400)]):  # the third took the place of another
        for moment in range(first, last):
            book(run, rank, 0, moment, node=f"node-{rank}", **{LEDGER_KINDS[moment % 3 + rank]: 1.0})
    at_once = LedgerReader(run).totals()
    assert sum(at_once.values()) == pytest.approx(300)
    held = 0

    class Watched(LedgerReader):
        def _take(self, line: dict[str, Any]) -> None:
            nonlocal held
            super()._take(line)
            held = max(held, len(self._pending))

    for name, value in {"CHUNK_BYTES": 1, "MIN_CHUNK_BYTES": 500, "MIN_ENTRIES": 10}.items():
        monkeypatch.setattr(ledger, name, value)
    assert Watched(run).totals() == pytest.approx(at_once)
    assert held < 150  # of 700
