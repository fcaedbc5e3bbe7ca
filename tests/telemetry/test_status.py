"""What the ranks of a node do: written as a whole, read back, and nothing where it cannot be read."""

from __future__ import annotations

from pathlib import Path

from craton.telemetry import RunDirectory
from craton.telemetry.node import MetricsEndpoint, NodeStatus, RankStatus, read_status, write_status
from craton.telemetry.rank import LEDGER_KINDS


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    rank = RankStatus(3, 4711, "checkpoint", ("saving",), 12, 1.5, 0.25, is_stopped=True, progress_limit_seconds=900.0)
    status = NodeStatus(1000.0, 2, "node-1", (rank,))
    write_status(run, status)
    assert read_status(run, "node-1") == status
    assert read_status(run, "node-0") is None
    assert [path.name for path in run.status_path("node-1").parent.iterdir()] == ["node-1.json"]


def test_a_torn_status_is_none(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    run.status_path("a").write_text('{"time": 1, "generation": 0, "node": "a", "ranks": [{"rank": 0}]}')
    run.status_path("b").write_text('{"time": 1, "gen')
    assert read_status(run, "a") is None
    assert read_status(run, "b") is None


def test_a_rank_that_left_the_node_has_no_values_there_but_what_was_booked() -> None:
    endpoint = MetricsEndpoint("run", "a")
    for rank in (0, 1):
        endpoint.update({"run_step": 7}, rank)
        endpoint.book({"productive": 2.0}, rank)
    endpoint.update({"plan_mfu": 0.5}, None)
    endpoint.keep_only(range(1, 2))
    shown = {(family.name, each.labels["rank"]) for family in endpoint.collect() for each in family.samples}
    booked = "craton_run_ledger_seconds"
    assert shown == {("craton_run_step", "1"), (booked, "0"), (booked, "1"), ("craton_plan_mfu", "")}


def test_what_is_taken_back_is_paid_by_what_comes_next() -> None:
    endpoint = MetricsEndpoint("run", "a")

    def productive() -> float:
        (ledger,) = endpoint.collect()
        return next(each.value for each in ledger.samples if each.labels["kind"] == "productive")

    seen = []
    for seconds in ({"productive": 10.0}, {"productive": -4.0, "redo": 5.0}, {"productive": 3.0}, {"productive": 6.0}):
        endpoint.book(seconds, 0)
        seen.append(productive())
    assert seen == [10.0, 10.0, 10.0, 15.0]  # never falls, and is right again in the end
    (ledger,) = endpoint.collect()
    assert {each.labels["kind"] for each in ledger.samples} == set(LEDGER_KINDS)


def test_a_node_without_rank_0_tells_nothing_of_the_run() -> None:
    endpoint = MetricsEndpoint("run", "a")
    endpoint.update({"run_restarts": 3}, None)
    endpoint.forget("run_restarts")
    endpoint.forget("run_mfu")
    assert list(endpoint.collect()) == []


def test_a_labelled_metric_has_a_sample_for_each_label() -> None:
    endpoint = MetricsEndpoint("run", "a")
    endpoint.update({"run_term_reward/math": 0.5, "run_term_reward/my:reward": None, "run_reward/math": 1.0}, 0)
    (family,) = endpoint.collect()
    assert family.name == "craton_run_term_reward"
    assert [each.labels["term"] for each in family.samples] == ["math", "my:reward"]
    assert family.samples[0].value == 0.5
    endpoint.update({f"run_term_reward/{number}": 1.0 for number in range(1000)}, 0)
    (family,) = endpoint.collect()
    assert len(family.samples) == 100, "a job that generates labels is bounded"
