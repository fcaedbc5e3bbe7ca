"""A snapshot can be saved, sent to somebody and read again as it was."""

from __future__ import annotations

import json
import math

import pytest
from counted_calls import counted_calls
from fake_snapshots import asked_ras, healthy, hung, slowed, with_gpu
from sick_runs import with_losses

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotError, SnapshotXid
from craton.observability.diagnosis.snapshot.model import SCHEMA
from craton.telemetry import PHASES


def test_what_is_saved_is_read_again() -> None:
    run = asked_ras(with_gpu(hung(healthy(2, 4), {3: "data"}), "node-1", 2, xids=(SnapshotXid(79, 5.0),)), {3: 2})
    again = Snapshot.from_json(run.to_json())
    assert again == run
    assert again.collectives.communicators[0].counts[3] == 99_998
    assert again.nodes[1].gpus[2].xids[0].code == 79


def test_numbers_that_are_none_survive() -> None:
    run = with_losses(lambda place, value: {1: math.nan, 2: math.inf}.get(place, value))
    text = run.to_json()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = Snapshot.from_json(text)
    assert math.isnan(again.series.loss[181][1])
    assert math.isinf(again.series.loss[182][1])
    assert again.to_json() == text


def test_fields_of_a_newer_craton_are_skipped() -> None:
    document = json.loads(healthy(1, 2).to_json())
    document["weather"] = "fine"
    document["run"]["mood"] = 7
    assert Snapshot.from_json(json.dumps(document)) == healthy(1, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a saved snapshot"),
        ("[]", f"not a snapshot of schema {SCHEMA}"),
        ('{"schema": 99}', "got 99"),
        (f'{{"schema": {SCHEMA}, "moment": 1.0, "run": 3}}', "RunFacts must be an object"),
        (f'{{"schema": {SCHEMA}, "moment": 1.0, "run": {{"name": 5}}}}', "5 is not str"),
        (f'{{"schema": {SCHEMA}}}', "missing"),
        (f'{{"schema": {SCHEMA}, "moment": 1.0, "run": {{"name": "a", "plan": [1]}}}}', r"\[1\] is not an object"),
        (f'{{"schema": {SCHEMA}, "moment": 1.0, "run": {{"name": "a", "nodes": "ab"}}}}', "'ab' is not a list"),
    ],
)
def test_what_is_no_snapshot_is_refused(text: str, words: str) -> None:
    with pytest.raises(SnapshotError, match=words):
        Snapshot.from_json(text)


def test_a_made_run_is_in_lock_step() -> None:
    ranks = slowed(healthy(2, 4), {5: 1.5}).ranks
    steps = [rank.recent["step"] for rank in ranks]
    assert max(steps) == pytest.approx(min(steps))
    assert min(ranks, key=lambda rank: rank.recent["communication"]).rank == 5
    for rank in ranks:
        assert sum(rank.recent[phase] for phase in PHASES) == pytest.approx(rank.recent["step"])


def test_what_a_verdict_costs_grows_no_faster_than_the_ranks() -> None:
    def cost(nodes: int, rank: int) -> int:
        run = slowed(healthy(nodes, 8), {rank: 1.4})
        with counted_calls() as calls:
            verdict = diagnose(run)
        assert (verdict.rank, verdict.node) == (rank, f"node-{rank // 8}")
        return calls.number

    assert cost(1250, 7777) < 6 * cost(250, 777)
