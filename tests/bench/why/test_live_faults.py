"""The live bench of the diagnosis: its two sets of faults, its scores, and one real fault."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from craton.bench.why.faults import (
    FAMILIES,
    ExpectedVerdict,
    JobRecipe,
    LiveFault,
    chosen_faults,
    family_faults,
)
from craton.bench.why.faults.environment import Workshop, merged, missing
from craton.bench.why.faults.healthy import run_healthy
from craton.bench.why.faults.injections import program_path
from craton.bench.why.faults.rubric import judge, right_seconds, score
from craton.bench.why.faults.running import environments
from craton.bench.why.faults.watch import FaultRecord, Look, run_fault
from craton.errors import CratonError
from craton.observability.diagnosis import LAYERS, Verdict

URL = re.compile(r"https://[\w.-]+/\S+")
CONDITIONS = {"waiting", "starting", "healthy", "slow", "hung", "dead", "wrong", "done", "stopped", "unknown"}
FAULT = LiveFault(
    name="rank-raises",
    family="user_code",
    summary="Rank 1 raises.",
    source="https://example.com/1",
    job=JobRecipe(),
    expected=ExpectedVerdict(
        layers=("framework",),
        conditions=("dead",),
        ranks=frozenset({1}),
        remedy=(r"KeyError",),
        misleading=(r"drain",),
    ),
)
RIGHT = Verdict(
    "dead",
    layer="framework",
    node="node-1",
    rank=1,
    cause="exception",
    because="rank 1 raised KeyError",
    action="Fix the data source.",
    confidence=0.95,
)
COMMAND_FAULT = LiveFault(
    name="command-exits",
    family="user_code",
    summary="Rank 1 of a command exits with code 3.",
    source="https://example.com/2",
    job=JobRecipe(
        kind="command",
        keys={"command": ["sh", "-c", "touch $ONSET; sleep 1; [ $RANK = 0 ] && sleep 600; exit 3"]},
    ),
    expected=ExpectedVerdict(layers=("framework",), conditions=("dead",), ranks=frozenset({1})),
)


def test_there_are_60_faults_in_each_set_of_12_families_each_with_a_source() -> None:
    faults = chosen_faults()
    assert len(FAMILIES) == 12
    assert len(chosen_faults("first")) >= 60
    assert len(chosen_faults("second")) >= 60
    assert len({fault.name for fault in faults}) == len(faults)
    for family in FAMILIES:
        for found in (family_faults(family, "first"), family_faults(family, "second")):
            assert len(found) >= 5, family
            assert {fault.family for fault in found} == {family}
    for fault in faults:
        assert URL.fullmatch(fault.source), fault.name
        assert fault.summary.endswith("."), fault.name


def test_every_fault_names_answers_that_the_diagnosis_can_give() -> None:
    for fault in chosen_faults():
        expected = fault.expected
        assert 1 <= len(expected.layers) <= 2, fault.name
        assert set(expected.layers) <= set(LAYERS), fault.name
        assert expected.conditions, fault.name
        assert set(expected.conditions) <= CONDITIONS, fault.name
        assert expected.remedy, fault.name
        for pattern in (*expected.remedy, *expected.misleading):
            re.compile(pattern)
        if fault.job.program:
            assert program_path(fault.job.program).exists(), fault.name


def test_at_most_six_faults_need_rights_that_this_machine_lacks() -> None:
    if missing("root") or missing("slurm"):
        pytest.skip("needs root and Slurm, as the bench does")
    assert len([fault for fault in chosen_faults() if any(map(missing, fault.needs))]) <= 6


def test_faults_are_chosen_by_set_family_and_name() -> None:
    sets = ("first", "second", "third", "fourth", "fifth")
    assert all({fault.family for fault in chosen_faults(name)} == set(FAMILIES) for name in sets)
    assert sum(len(chosen_faults(name)) for name in sets) == len(chosen_faults("all"))
    assert {fault.family for fault in chosen_faults("clocks")} == {"clocks"}
    assert all(fault in chosen_faults("clocks") for fault in family_faults("clocks", "third"))
    assert {fault.family for fault in chosen_faults("clocks,memory")} == {"clocks", "memory"}
    assert [fault.name for fault in chosen_faults("all", ["source-raises"])] == ["source-raises"]
    with pytest.raises(CratonError, match="tides is not known; allowed: first, second, third, fourth, fifth, all"):
        chosen_faults("tides")
    with pytest.raises(CratonError, match="no fault source-raises in clocks"):
        chosen_faults("clocks", ["source-raises"])


def test_a_recipe_changes_single_keys_of_the_tiny_job() -> None:
    base = {"data": {"path": "corpus.txt", "sequence": 64}, "name": "tiny"}
    assert merged(base, {"data": {"path": None, "source": "mine:samples"}}) == {
        "data": {"sequence": 64, "source": "mine:samples"},
        "name": "tiny",
    }


@pytest.mark.parametrize(
    ("change", "layer", "victim", "remedy", "false_health"),
    [
        ({}, True, True, True, False),
        ({"layer": "host"}, False, True, True, False),
        ({"condition": "hung"}, False, True, True, False),
        ({"rank": 0, "node": "node-0"}, True, False, True, False),
        ({"rank": None}, True, False, True, False),
        ({"because": "rank 1 ended"}, True, True, False, False),
        ({"action": "Drain node-1."}, True, True, False, False),
        ({"cause": "cannot_tell", "layer": ""}, False, False, True, False),
        ({"condition": "healthy", "cause": "", "layer": "", "rank": None, "because": ""}, False, False, False, True),
    ],
)
def test_a_verdict_is_judged_by_layer_victim_remedy_and_health(
    change: dict[str, object], layer: bool, victim: bool, remedy: bool, false_health: bool
) -> None:
    found = judge(FaultRecord(FAULT, looks=[Look(3.0, replace(RIGHT, **change))]))  # type: ignore[arg-type]
    assert (found.is_layer_right, found.is_victim_right) == (layer, victim)
    assert (found.is_remedy_useful, found.is_false_health) == (remedy, false_health)


def test_a_victim_may_be_nobody_a_node_or_unjudged() -> None:
    def judged(expected: ExpectedVerdict, verdict: Verdict, nodes: int = 2) -> bool | None:
        fault = replace(FAULT, expected=expected, job=JobRecipe(nodes=nodes))
        return judge(FaultRecord(fault, looks=[Look(1.0, verdict)])).is_victim_right

    nobody = ExpectedVerdict(("framework",), ("dead",), ranks=frozenset())
    assert judged(nobody, RIGHT) is False
    assert judged(nobody, replace(RIGHT, rank=None, node="node-1")) is False
    assert judged(nobody, replace(RIGHT, rank=None, node="node-0"), nodes=1) is True
    assert judged(nobody, replace(RIGHT, rank=None, node="")) is True
    node = ExpectedVerdict(("framework",), ("dead",), ranks=frozenset({1}), node="node-1")
    assert judged(node, replace(RIGHT, rank=None, node="node-1")) is True
    assert judged(node, replace(RIGHT, rank=None, node="node-0")) is False
    assert judged(node, RIGHT) is True
    assert judged(ExpectedVerdict(("framework",), ("dead",)), replace(RIGHT, rank=None)) is None


def test_the_time_to_a_right_verdict_is_when_it_stayed_right() -> None:
    wrong = replace(RIGHT, layer="host")
    looks = [Look(1.0, RIGHT), Look(2.0, wrong), Look(3.0, RIGHT), Look(4.0, RIGHT)]
    assert right_seconds(looks, FAULT) == 3.0
    assert right_seconds([*looks, Look(5.0, wrong)], FAULT) is None


def test_the_score_fails_below_each_bar() -> None:
    right = FaultRecord(FAULT, looks=[Look(3.0, RIGHT)])
    assert score([right]).failures == []
    late = FaultRecord(FAULT, looks=[Look(30.0, RIGHT)])
    assert score([late]).failures == ["time"]
    healthy = FaultRecord(FAULT, looks=[Look(3.0, Verdict("healthy"))])
    assert {"layer", "victim", "remedy", 'false "runs well"', "time"} == set(score([healthy]).failures)
    sure = FaultRecord(FAULT, looks=[Look(3.0, replace(RIGHT, layer="host"))])
    assert "confident verdicts" in score([right, right, right, right, right, right, right, sure]).failures
    assert score([right, FaultRecord(FAULT, error="it did not start")]).failures == [
        "faults that the bench could not run"
    ]
    lacking = [FaultRecord(replace(FAULT, name=f"fault-{number}"), not_run="needs tc") for number in range(7)]
    assert score([right, *lacking]).failures == ["faults not run"]


def test_a_real_run_is_started_broken_judged_and_ended(tmp_path: Path) -> None:
    record = run_fault(COMMAND_FAULT, Workshop(tmp_path / "work"), tmp_path / "kept")
    assert record.error == ""
    assert record.final is not None
    assert record.final.condition == "dead"
    assert record.has_ended
    assert {"snapshot.json", "verdicts.json"} <= {path.name for path in (tmp_path / "kept" / "command-exits").iterdir()}
    assert not [pid for pid, variables in environments() if any(b"=command-exits-" in word for word in variables)]
    assert list((tmp_path / "work" / "faults").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [fault.name for fault in chosen_faults("first")[::2]])
def test_a_fault_really_happens(name: str, tmp_path: Path) -> None:
    (fault,) = chosen_faults("first", [name])
    if reason := next((reason for reason in map(missing, fault.needs) if reason), ""):
        pytest.skip(reason)
    record = run_fault(fault, Workshop(tmp_path / "work"), tmp_path / "kept")
    assert record.error == ""
    assert record.final is not None


@pytest.mark.slow
def test_healthy_runs_of_every_kind_settle(tmp_path: Path) -> None:
    records = run_healthy(12, tmp_path)
    assert [record.error for record in records if record.error] == []
    assert all(record.looks > 3 for record in records)
