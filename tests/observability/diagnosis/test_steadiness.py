"""A run close to a threshold does not flip between slow and well, and says since when it is slow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from fake_snapshots import MOMENT, healthy

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotHost, SnapshotRank, StepWindow


def at(snapshot: Snapshot, now: float, *before: float) -> Snapshot:
    """All ranks take `now` times as long as usual, and in the windows before that, newest first, as given."""

    def slowed(rank: SnapshotRank, ratio: float) -> dict[str, float]:
        extra = (ratio - 1.0) * rank.earlier["step"]
        return {**rank.earlier, "step": rank.earlier["step"] + extra, "compute": rank.earlier["compute"] + extra}

    ranks = []
    for rank in snapshot.ranks:
        ratios = enumerate((now, *before))
        windows = tuple(StepWindow(MOMENT - 30.0 - 10.0 * number, slowed(rank, ratio)) for number, ratio in ratios)
        ranks.append(replace(rank, recent=slowed(rank, now), windows=windows))
    run = replace(snapshot.run, step_seconds_high=None, collective_seconds=None, collective_seconds_before=None)
    return replace(snapshot, ranks=tuple(ranks), run=run)


@pytest.mark.parametrize(
    ("now", "before", "condition", "seconds"),
    [
        (1.0, (1.0, 1.0), "healthy", None),
        (1.1, (), "healthy", None),  # below the threshold of 1.12
        (1.1, (1.1, 1.1), "healthy", None),
        (1.1, (1.1, 1.2), "slow", 50.0),  # it was slow, and is not clearly faster
        (1.05, (1.1, 1.2), "healthy", None),  # clearly faster
        (1.2, (1.2, 1.0), "slow", 40.0),
        (1.2, (1.0, 1.2), "slow", 30.0),  # slow again
        (1.2, (), "slow", 30.0),
    ],
)
def test_slow_has_hysteresis(now: float, before: tuple[float, ...], condition: str, seconds: float | None) -> None:
    verdict = diagnose(at(healthy(4), now, *before))
    assert verdict.condition == condition, verdict.sentence
    if seconds is not None:
        assert verdict.since == MOMENT - seconds
        assert f"for the last {seconds:.0f} s." in verdict.sentence


def test_a_slow_wobble_flips_at_most_once() -> None:
    """Steps that drift around the threshold: without hysteresis, this run would flip at every look."""
    ratios = [1.0, 1.0, 1.0, 1.0, 1.0, *[1.13, 1.11, 1.125, 1.1, 1.13, 1.09] * 3]
    conditions = [
        diagnose(at(healthy(2), ratios[end], *reversed(ratios[end - 5 : end]))).condition
        for end in range(5, len(ratios))
    ]
    assert sum(one != other for one, other in pairwise(conditions)) <= 1, conditions


def test_slower_than_planned_on_a_busy_machine_is_said_without_an_alarm() -> None:
    snapshot = healthy(2)
    host = SnapshotHost(processors=2, load=11.0)
    run = replace(snapshot.run, is_accelerated=False, on="local", plan={"step_seconds": 0.34}, step_seconds_high=0.5)
    nodes = tuple(replace(node, host=host, gpus=(), gpus_known=False, expected_gpus=None) for node in snapshot.nodes)
    verdict = diagnose(replace(snapshot, run=run, nodes=nodes))
    assert verdict.condition == "healthy"
    assert not verdict.is_alarm, verdict.sentence
    assert "runs, 66% slower than planned" in verdict.sentence
    assert "the plan assumes an idle machine, and this one is busy (load 11.0 on 2 CPUs)" in verdict.sentence
