"""Whatever breaks in reinforcement learning, the run completes, every sample is trained exactly once, and a synchronous
run ends with the weights of a calm one. `make chaos` runs forty drawn faults; the tests of every day one of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_chaos import KINDS, STEPS, RolloutFaults, check_kind, check_samples, drawn_cases, ended, same, weights_of
from torch import Tensor

CASES = drawn_cases()
# One fault of each kind, in two runs.
EVERY_DAY = (
    RolloutFaults(
        "daily-sync",
        "rank",
        "sync",
        ("kill verifier=0@during=reward,step=2", "kill rank=1@during=rollout,step=3", "kill agent=node-1@step=5"),
        nodes=2,
        reward_seconds=0.02,
    ),
    RolloutFaults(
        "daily-separate",
        "journal",
        "separate",
        (
            "kill rank=0@during=transfer,step=2",
            "kill rank=0,member=rollout-0@step=10",
            f"corrupt journal@step={STEPS - 2}",
        ),
        following="kill rank=0@step=5",
        checkpoint="{peer: off, tiers: [{to: shared, every_steps: 100}]}",
        reward_seconds=0.02,
    ),
)


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def calm_weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Tensor]]:
    """The weights of a synchronous run on this many nodes that nothing happens to; each is made once."""
    found: dict[int, dict[str, Tensor]] = {}

    def weights(nodes: int) -> dict[str, Tensor]:
        if nodes not in found:
            case = RolloutFaults(f"calm-{nodes}", "none", "sync", (), nodes, reward_seconds=0.0)
            with ended(case, tmp_path_factory.mktemp("calm")) as run:
                check_samples(run, "sync")
                found[nodes] = weights_of(run)
        return found[nodes]

    return weights


def check(case: RolloutFaults, folder: Path, calm_weights: Callable[[int], dict[str, Tensor]]) -> None:
    with ended(case, folder) as run:
        check_samples(run, case.mode)
        check_kind(case, run)
        if case.mode == "sync":
            assert same(weights_of(run), calm_weights(case.nodes)), "to the bit"


def test_the_drawn_faults_cover_all_kinds_modes_and_phases() -> None:
    assert len(CASES) == sum(KINDS.values()) == 40
    assert {case.mode for case in CASES} == {"sync", "overlap", "separate"}
    text = " ".join(fault for case in CASES for fault in case.faults)
    for word in ("rollout", "reward", "sync", "productive", "checkpoint", "transfer"):
        assert f"during={word}" in text, word
    assert f"step={STEPS}" in text
    assert sum(bool(case.following) for case in CASES if case.kind != "journal") >= 8


@pytest.mark.parametrize("case", EVERY_DAY, ids=lambda case: case.name)
def test_a_fault_of_each_kind(
    case: RolloutFaults, tmp_path: Path, calm_weights: Callable[[int], dict[str, Tensor]]
) -> None:
    check(case, tmp_path, calm_weights)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forty_faults(case: RolloutFaults, tmp_path: Path, calm_weights: Callable[[int], dict[str, Tensor]]) -> None:
    check(case, tmp_path, calm_weights)
