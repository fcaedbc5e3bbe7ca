"""A generation is made once, by one agent, and is read whole or not at all."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from craton.agent import Generation, newest_generation, next_number
from craton.agent.generation import create_generation
from craton.telemetry import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")


def test_the_newest_generation_is_read_back_equal(run: RunDirectory) -> None:
    assert newest_generation(run) is None
    assert next_number(run) == 0
    generation = Generation(
        7,
        ["b", "c", "a"],
        2,
        "b:1",
        keepers={"b": "b:2"},
        layout={"fsdp": 6},
        reason="a is lost",
        reached=12,
        broke_at=5.0,
        by="b",
        time=6.0,
    )
    assert create_generation(run, Generation(3, ["a"], 1, ""))
    assert create_generation(run, generation)
    assert newest_generation(run) == generation
    assert next_number(run) == 8


def test_ranks_follow_the_order_of_nodes() -> None:
    generation = Generation(1, ["b", "a"], 3, "")
    assert generation.world == 6
    assert generation.ranks_of("b") == range(0, 3)
    assert generation.ranks_of("a") == range(3, 6)
    assert generation.ranks_of("c") == range(0)


def test_a_generation_is_never_changed(run: RunDirectory) -> None:
    assert create_generation(run, Generation(1, ["a"], 1, ""))
    assert not create_generation(run, Generation(1, ["b"], 1, ""))
    newest = newest_generation(run)
    assert newest is not None
    assert newest.nodes == ["a"]
    assert [path.name for path in (run.path / "generations").iterdir()] == ["000001.json"]


def test_of_many_that_coordinate_one_makes_each_generation(run: RunDirectory) -> None:
    context = multiprocessing.get_context("fork")
    ready, made = context.Barrier(4), context.SimpleQueue()

    def make(node: str) -> None:
        ready.wait()
        made.put(
            [number for number in range(100) if create_generation(run, Generation(number, [node], 1, "", by=node))]
        )

    agents = [context.Process(target=make, args=(node,)) for node in "abcd"]
    for agent in agents:
        agent.start()
    numbers = [number for _ in agents for number in made.get()]
    for agent in agents:
        agent.join()
    assert sorted(numbers) == list(range(100))
    assert next_number(run) == 100
    assert len(list((run.path / "generations").iterdir())) == 100, "nothing else is left there"


@pytest.mark.parametrize("text", ["", '{"number": 2, "nodes": ["a"', "[]", "{}", "null", "\x00" * 100])
def test_a_file_that_cannot_be_read_counts_but_is_not_used(run: RunDirectory, text: str) -> None:
    create_generation(run, Generation(1, ["a"], 1, ""))
    run.generation_path(2).write_text(text)
    newest = newest_generation(run)
    assert newest is not None
    assert newest.number == 1
    assert next_number(run) == 3, "its number may have been used"


def test_fields_of_a_later_version_are_left_out() -> None:
    document = {**Generation(1, ["a"], 1, "").to_message(), "colour": "blue"}
    assert Generation.from_message(document) == Generation(1, ["a"], 1, "")


def test_other_files_are_no_generations(run: RunDirectory) -> None:
    for name in (".000009.json.77", "notes.json", "12.json"):
        (run.path / "generations" / name).write_text("{}")
    assert next_number(run) == 0
