"""The scored bench of the diagnosis: drawn from the date, it must keep its bars; and the score must be able to fail."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_snapshots import healthy

from craton.bench.why import benchmark, live_outcomes, score, seed_of_today, simulated_outcomes
from craton.bench.why import live as bench_live
from craton.bench.why.benchmark import ScenarioOutcome
from craton.bench.why.live import LIVE
from craton.bench.why.live_rank import BATCH_BYTES, Batches
from craton.bench.why.scenarios import Truth, Victim, draw_scenarios
from craton.bench.why.scenarios.world import World
from craton.cli.app import app
from craton.observability.diagnosis import LAYERS, Verdict
from craton.telemetry import RunDirectory

FIXED_SEED = 1
ONE_IN = 6  # scenarios in `make test`; all of them, drawn from the date, in `make test-all`


@pytest.fixture(scope="module")
def today() -> list[ScenarioOutcome]:
    return simulated_outcomes(seed_of_today())


def test_the_bars_hold_for_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "draw_scenarios", lambda *drawn: draw_scenarios(*drawn)[::ONE_IN])
    found = score(simulated_outcomes(FIXED_SEED))
    assert found.num_scenarios >= 10
    assert {"single", "quiet"} <= set(found.groups)
    assert found.is_good, "\n".join(found.misses)


@pytest.mark.slow
def test_the_bars_hold_today(today: list[ScenarioOutcome]) -> None:
    found = score(today)
    assert found.is_good, "\n".join(found.misses)
    assert found.brier is not None
    assert found.brier < 0.1


@pytest.mark.slow
def test_there_are_enough_of_every_kind(today: list[ScenarioOutcome]) -> None:
    found = score(today)
    live = [case for case in LIVE if case.layers]
    assert found.num_scenarios + len(LIVE) >= 80
    assert len(live) >= 15
    assert found.groups["quiet"][1] >= 25
    assert found.groups["double"][1] >= 10
    assert found.groups["blind"][1] >= 10
    assert all(of >= 2 for _, of in found.layers.values()), found.layers
    assert set(found.layers) == set(LAYERS)


@pytest.mark.slow
def test_other_seeds_draw_other_victims() -> None:
    def victims(seed: int) -> list[Victim]:
        return [truth.victim for each in draw_scenarios(seed, 1.8e9) for truth in each.truths]

    assert victims(1) == victims(1)
    assert victims(1) != victims(2)


def test_ranks_keep_step_and_the_slow_one_waits_least() -> None:
    world = World(random.Random(7), steps=40, age_seconds=3600.0, outliers=0.0)
    world.slow((5,), "compute", 1.5)
    last = world.simulate()[-1]
    assert len({round(part["step"], 9) for part in last.values()}) == 1
    assert min(last, key=lambda rank: last[rank]["communication"]) == 5
    for part in last.values():
        assert part["step"] == pytest.approx(sum(part[phase] for phase in part if phase != "step"))


def test_wrong_answers_count_against_it() -> None:
    truth = Truth("overheats", ("device",), ("slow",), Victim("a", frozenset((3,))))
    right = ScenarioOutcome("one", "single", (truth,), Verdict("slow", "device", "a", 3, confidence=0.9))
    assert score([right]).is_good
    assert score([right]).brier == pytest.approx(0.01)
    wrong_layer = replace(right, verdict=Verdict("slow", "fabric", "a", 3, confidence=0.9))
    assert score([wrong_layer]).layer_share == 0.0
    assert score([wrong_layer]).brier == pytest.approx(0.81)
    assert score([wrong_layer]).confusion["device"]["fabric"] == 1
    wrong_rank = replace(right, verdict=Verdict("slow", "device", "a", 2, confidence=0.9))
    assert (score([wrong_rank]).layer_share, score([wrong_rank]).victim_share) == (1.0, 0.0)
    wrong_condition = replace(right, verdict=Verdict("dead", "device", "a", 3, confidence=0.9))
    assert not wrong_condition.is_right
    alarm = ScenarioOutcome("plain", "quiet", (), Verdict("slow", "host", confidence=0.5))
    assert score([right, alarm]).false_alarms == 1
    guess = ScenarioOutcome("unseen", "blind", (truth,), Verdict("slow", "device", "a", 3, confidence=0.5))
    assert not score([right, guess]).is_good
    both = (truth, Truth("disk_full", ("storage",), ("healthy",), Victim()))
    assert not replace(right, group="double", truths=both).is_right
    assert "expected device a rank 3; got slow fabric" in score([wrong_layer]).misses[0]


def test_an_alarm_before_the_fault_is_a_false_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([Verdict("starting"), Verdict("slow", "host"), Verdict("healthy"), Verdict("dead", "framework")])
    monkeypatch.setattr(bench_live, "take_snapshot", lambda run: healthy(1, 2))
    monkeypatch.setattr(bench_live, "diagnose", lambda snapshot: next(said))
    monkeypatch.setattr(bench_live, "LOOK_SECONDS", 0.0)
    watch = bench_live.Watch(RunDirectory(tmp_path), tmp_path / "onset")
    watch.wait(lambda _, verdict: verdict.condition == "healthy")
    watch.onset.touch()
    watch.wait(lambda _, verdict: verdict.condition == "dead")
    assert watch.early == Verdict("slow", "host")
    truth = Truth("raises", ("framework",), ("dead",), Victim())
    outcome = ScenarioOutcome("raises", "single", (truth,), Verdict("dead", "framework", confidence=0.9), is_live=True)
    assert (score([outcome]).false_alarms, score([outcome]).num_quiet) == (0, 1)
    found = score([replace(outcome, early=watch.early)])
    assert (found.false_alarms, found.layer_share, found.is_good) == (1, 1.0, False)
    assert "before the fault: slow host" in found.misses[0]


def test_reads_are_throttled_once_the_fault_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_live, "THROTTLED_BYTES_PER_SECOND", 20 * BATCH_BYTES)
    monkeypatch.setattr(bench_live, "LOOK_SECONDS", 0.01)
    with bench_live.file_server(tmp_path / "onset") as address:
        readers = [Batches(address), Batches(address)]
        for reader in readers:
            assert [reader.next() for _ in range(50)] == [BATCH_BYTES] * 50
        (tmp_path / "onset").touch()
        began = time.monotonic()
        for _ in range(4):  # two batches of each may have been read ahead
            for reader in readers:
                reader.next()
        assert time.monotonic() - began >= 0.2


def test_faults_of_one_rank_have_a_victim() -> None:
    """All but those that meet every rank alike."""
    assert [case.name for case in LIVE if case.layers and not case.has_victim] == ["throttled input", "not a number"]


@pytest.mark.slow
def test_live_processes(tmp_path: Path) -> None:
    chosen = [case for case in LIVE if case.name in ("raises", "stopped (SIGSTOP)")]
    found = score(live_outcomes(seed_of_today(), tmp_path, chosen))
    assert found.is_good, "\n".join(found.misses)
    assert found.num_live == 2


@pytest.mark.slow
def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    app(["bench", "why", "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["is_good"]
    assert told["num_live"] == len(LIVE)
    assert len(told["outcomes"]) == told["num_scenarios"]
