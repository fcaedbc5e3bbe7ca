"""A training whose state is kept in the nodes' memory: it goes on to the bit after a crash, in any layout, forgets what
was abandoned, and needs none of it to go on when the keepers are gone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang import Gang
from keepers import Keepers
from nodes import Nodes, nodes_of
from tiny import GLOBAL_BATCH, Records, Text, make_trainer, moe_config, tiny_job

from craton.agent.memory import KeeperClient
from craton.job.layout import Layout
from craton.ml.data.sample import Sample
from craton.ml.training import Trainer
from craton.ml.training.checkpoint import CheckpointError
from craton.ml.training.checkpoint.peer.interval import COST_SHARE, SnapshotCost

STEPS = 9
CRASH_AFTER = 6


class CrashError(Exception):
    """A rank that ends in the middle of a step."""


def build(
    nodes: Nodes | None,
    sizes: dict[str, int],
    folder: Path | None = None,
    moe: bool = False,
    every_steps: int | None = 1,
    steps: int = STEPS,
    source: Any = None,
    **train: Any,
) -> tuple[Trainer, Records]:
    return make_trainer(
        tiny_job(steps, **train),
        Layout(**{"precision": "fp32", "micro_batch": 2, **sizes}),
        folder,
        source,
        config=moe_config() if moe else None,
        every_steps=4,
        peer=nodes.setup(every_steps) if nodes else None,
    )


def crash(trainer: Trainer, after: int, spoil: bool = False) -> None:
    """Trains so far, and breaks off as a rank does whose peers are gone."""
    load, due = trainer._load, trainer.parts.checkpointer.due

    def load_or_crash() -> Any:
        if trainer.step == after + 1:
            trainer.parts.checkpointer.wait()
            raise CrashError
        return load()

    def spoil_what_is_due(step: int, **options: Any) -> bool:
        if spoil and step == after:
            with torch.no_grad():
                for parameter in trainer.parts.model.parameters():
                    parameter.fill_(math.nan)
        return due(step, **options)

    trainer._load = load_or_crash  # type: ignore[method-assign]
    trainer.parts.checkpointer.due = spoil_what_is_due  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        trainer.fit()
    assert trainer.parts.checkpointer.abandon(10)


def train_and_crash(nodes: Nodes, sizes: dict[str, int], moe: bool, folder: Path | None, spoil: bool) -> Records:
    trainer, records = build(nodes, sizes, folder, moe)
    crash(trainer, CRASH_AFTER, spoil)
    return records


def train(nodes: Nodes | None, sizes: dict[str, int], moe: bool = False, folder: Path | None = None) -> Records:
    trainer, records = build(nodes, sizes, folder, moe)
    assert trainer.fit() == "done"
    trainer.parts.checkpointer.close()
    return records


def names(records: Records) -> list[str]:
    return [name for name, _, _ in records.events]


CASES = [
    ({"fsdp": 4}, {"fsdp": 4}, False),
    pytest.param({"pp": 2, "tp": 2}, {"fsdp": 2}, False, marks=pytest.mark.slow),
    pytest.param({"replicate": 2, "fsdp": 2, "ep": 2}, {"fsdp": 2}, True, marks=pytest.mark.slow),
    pytest.param({"fsdp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}, False, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "fsdp": 2}, {"pp": 2, "fsdp": 2}, False, marks=pytest.mark.slow),
    pytest.param({"fsdp": 4, "ep": 2}, {"fsdp": 4, "ep": 2}, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("first", "second", "moe"), CASES, ids=lambda case: str(case))
def test_a_crashed_training_goes_on_from_memory(
    gang: Gang, keepers: Keepers, first: dict[str, int], second: dict[str, int], moe: bool
) -> None:
    """With as many ranks to the bit; with half of them, after a node is lost, as near as another sum order gets."""
    made = [keepers.start("node-0"), keepers.start("node-1")]
    whole = gang.run(train, None, first, moe, ranks=4)[0].losses
    gang.run(train_and_crash, nodes_of(made, 2), first, moe, None, False, ranks=4)
    ranks = Layout(**second).world
    if ranks == 2:
        made.pop(0).kill()
    records = gang.run(train, nodes_of(made, 2, generation=2), second, moe, ranks=ranks)[0]
    assert ("restored", CRASH_AFTER) in [(name, step) for name, step, _ in records.events]
    assert list(records.losses) == list(range(CRASH_AFTER + 1, STEPS + 1)), "no step is done twice, none is left out"
    expected = {step: whole[step] for step in records.losses}
    if first == second:
        assert records.losses == expected
    else:
        assert records.losses == pytest.approx(expected, rel=1e-2 if moe else 2e-5)


def test_state_that_turns_out_bad_is_taken_from_the_next_tier(gang: Gang, keepers: Keepers, tmp_path: Path) -> None:
    """Its sums are right, for it was bad before it was copied: only the loss can tell."""
    made = [keepers.start("node-0"), keepers.start("node-1")]
    whole = gang.run(train, None, {"fsdp": 2}, ranks=2)[0].losses
    gang.run(train_and_crash, nodes_of(made, 1), {"fsdp": 2}, False, tmp_path, True, ranks=2)
    records = gang.run(train, nodes_of(made, 1, generation=2), {"fsdp": 2}, False, tmp_path, ranks=2)[0]
    found = [(name, step) for name, step, _ in records.events if name in ("restored", "peer_distrusted")]
    assert found == [("restored", CRASH_AFTER), ("restored", 4), ("peer_distrusted", CRASH_AFTER + 1)]
    assert [fields["tier"] for name, _, fields in records.events if name == "restored"] == ["peer", "shared"]
    assert records.losses == {step: whole[step] for step in range(5, STEPS + 1)}, "step 8 was saved in between"
    courses = {tuple(each.manifest["course"]) for keeper in made for each in keeper.client().holdings()}
    assert courses == {(2, 1)}


def train_and_leave(nodes: Nodes, stay: tuple[str, ...], folder: Path | None) -> None:
    """Only one rank has heard of the next generation when all of them leave for it."""
    trainer, _ = build(nodes, {"fsdp": 4}, folder)
    load = trainer._load

    def load_and_leave() -> Any:
        if trainer.step == CRASH_AFTER and trainer.parts.ranks.rank == 2:
            trainer.leave(stay)
        return load()

    trainer._load = load_and_leave  # type: ignore[method-assign]
    assert trainer.fit() == "left"
    assert trainer.parts.checkpointer.abandon(10)


def train_or_tell(nodes: Nodes, folder: Path | None) -> list[tuple[str, int, dict[str, Any]]] | str:
    trainer, records = build(nodes, {"fsdp": len(nodes.names)}, folder)
    try:
        assert trainer.fit() == "done"
    except CheckpointError as error:
        return str(error)
    return records.events


@pytest.mark.parametrize(
    ("has_disk", "stay"),
    [(True, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 4), (False, 2)))],
)
def test_a_planned_shrink_loses_nothing(
    gang: Gang, keepers: Keepers, tmp_path: Path, has_disk: bool, stay: int
) -> None:
    """Two of four nodes go, a node and the one that has its copy: the state is on disk before they do. When all stay,
    their memory is enough."""
    made = [keepers.start(f"node-{number}") for number in range(4)]
    folder = tmp_path if has_disk else None
    gang.run(train_and_leave, nodes_of(made, 1), tuple(keeper.node for keeper in made[:stay]), folder, ranks=4)
    if stay == 2:
        for keeper in made[2:]:
            keeper.kill()
    found = gang.run(train_or_tell, nodes_of(made[:stay], 1, generation=2), folder, ranks=stay)[0]
    if not has_disk:
        assert "no node has the state of ranks 2" in found, "and nothing begins anew"
        return
    ((step, fields),) = [(step, fields) for name, step, fields in found if name == "restored"]
    assert (step, fields["tier"]) == (CRASH_AFTER, "shared" if stay == 2 else "peer")


class Poisoned(Text):
    """One step has a loss that is no number."""

    def sample(self, index: int) -> Sample:
        sample = super().sample(index)
        if index // GLOBAL_BATCH + 1 != CRASH_AFTER:
            return sample
        return Sample(sample.tokens, sample.labels, sample.positions, sample.weight * np.nan, sample.documents)


def roll_back_and_crash(nodes: Nodes, folder: Path) -> tuple[Records, list[str]]:
    """The bad step is noticed one step later, the training returns to step 4, and dies before it has taken another
    snapshot."""
    trainer, records = build(nodes, {"fsdp": 2}, folder, source=Poisoned(), on_nan="rollback")
    begin = trainer._begin

    def begin_or_crash(counters: dict[str, Any] | None) -> None:
        begin(counters)
        if counters is not None:
            raise CrashError

    trainer._begin = begin_or_crash  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        trainer.fit()
    assert trainer.parts.checkpointer.abandon(10)
    client = KeeperClient(nodes.keepers[nodes.names[0]])
    return records, sorted(holding.manifest["save"] for holding in client.holdings())


def test_what_a_rollback_abandoned_is_never_restored(gang: Gang, keepers: Keepers, tmp_path: Path) -> None:
    made = [keepers.start("node-0"), keepers.start("node-1")]
    records, held = gang.run(roll_back_and_crash, nodes_of(made, 1), tmp_path, ranks=2)[0]
    assert [(name, step) for name, step, _ in records.events if name == "restored"] == [("restored", 4)]
    assert held == [], "steps 6 and 7 were in memory"
    records = gang.run(train, nodes_of(made, 1, generation=2), {"fsdp": 2}, False, tmp_path, ranks=2)[0]
    ((tier, step),) = [(fields["tier"], step) for name, step, fields in records.events if name == "restored"]
    assert (tier, step) == ("shared", 4)


def roll_back(nodes: Nodes, folder: Path) -> tuple[Records, list[tuple[str, int]]]:
    trainer, records = build(nodes, {"fsdp": 2}, folder, source=Poisoned(), on_nan="rollback")
    assert trainer.fit() == "done"
    trainer.parts.checkpointer.close()
    client = KeeperClient(nodes.keepers[nodes.names[0]])
    return records, sorted((each.manifest["save"], each.manifest["base"]) for each in client.holdings() if each.own)


@pytest.mark.slow
def test_saves_after_a_rollback_have_names_of_their_own(gang: Gang, keepers: Keepers, tmp_path: Path) -> None:
    """Else a step of the new course could be put together with the same step of the old one."""
    made = [keepers.start("node-0"), keepers.start("node-1")]
    for records, held in gang.run(roll_back, nodes_of(made, 1), tmp_path, ranks=2):
        assert held == [("1.1-7", 4), ("1.1-8", 4)], "the last step goes to the lasting tiers only"
        assert all(math.isfinite(loss) for loss in records.losses.values())


def train_without_keeper(nodes: Nodes, keeper_pid: int) -> Records:
    import os
    import signal

    trainer, records = build(nodes, {"fsdp": 2})
    load = trainer._load

    def load_and_kill() -> Any:
        if trainer.step == 4 and trainer.parts.ranks.rank == 0:
            os.kill(keeper_pid, signal.SIGKILL)
        return load()

    trainer._load = load_and_kill  # type: ignore[method-assign]
    assert trainer.fit() == "done"
    trainer.parts.checkpointer.close()
    return records


def test_a_keeper_that_dies_costs_the_tier_and_not_the_training(gang: Gang, keepers: Keepers) -> None:
    made = [keepers.start("node-0"), keepers.start("node-1")]
    whole = gang.run(train, None, {"fsdp": 2}, ranks=2)[0].losses
    records = gang.run(train_without_keeper, nodes_of(made, 1), made[1].process.pid, ranks=2)[0]
    assert records.losses == whole
    told = [fields["reason"] for name, _, fields in records.events if name == "peer_off"]
    assert len(told) == 1
    assert "the keeper of this node" in told[0]


def train_without_buddy(nodes: Nodes) -> Records:
    trainer, records = build(nodes, {"fsdp": 2})
    assert trainer.fit() == "done"
    trainer.parts.checkpointer.close()
    return records


def test_a_buddy_that_cannot_be_reached_is_told_once(gang: Gang, keepers: Keepers) -> None:
    made = [keepers.start("node-0"), keepers.start("node-1")]
    nodes = nodes_of(made, 1)
    unreachable = Nodes(nodes.names, nodes.keepers, {**nodes.addresses, "node-1": "127.0.0.1:1"})
    records = gang.run(train_without_buddy, unreachable, ranks=2)[0]
    assert names(records).count("peer_not_copied") == 1
    assert "peer_off" not in names(records)
    assert {each.manifest["step"] for each in made[0].client().holdings() if each.own} == {STEPS - 2, STEPS - 1}


def train_auto(nodes: Nodes, steps: int) -> tuple[Records, int | None, list[int], list[str]]:
    trainer, records = build(nodes, {"fsdp": 2}, every_steps=None, steps=steps)
    memory = trainer.parts.checkpointer._peer
    assert memory is not None
    taken: list[int] = []
    snapshot = memory.snapshot

    def counted(step: int, *arguments: Any) -> None:
        taken.append(step)
        snapshot(step, *arguments)

    memory.snapshot = counted  # type: ignore[method-assign]
    said: list[str] = []
    trainer.saves.say = said.append  # type: ignore[method-assign]
    assert trainer.fit() == "done"
    trainer.parts.checkpointer.close()
    return records, memory._interval, taken, said


@pytest.mark.slow
def test_auto_measures_three_snapshots_and_all_ranks_choose_the_same(gang: Gang, keepers: Keepers) -> None:
    made = [keepers.start("node-0"), keepers.start("node-1")]
    steps = 14
    first, second = gang.run(train_auto, nodes_of(made, 1), steps, ranks=2)
    records, interval, taken, said = first
    assert second[1:3] == (interval, taken)
    assert interval is not None
    assert taken == [1, 2, *range(3, steps, interval)]
    (fields,) = [fields for name, _, fields in records.events if name == "peer_interval"]
    assert fields["steps"] == interval
    assert fields["share"] <= COST_SHARE
    assert any("state is kept in memory every" in text for text in said)


@pytest.mark.parametrize(
    ("copy", "commit", "step", "expected"),
    [
        (0.009, 0.4, 0.5, 1),  # hidden behind the step
        (0.011, 0.4, 0.5, 2),  # the copy alone costs 2.2%
        (0.001, 1.2, 0.5, 3),  # the commit takes more than two steps
        (0.001, 0.5, 0.5, 1),  # 0.2% over
        (1.0, 0.0, 0.1, 500),
    ],
)
def test_the_interval_is_the_smallest_under_two_percent(copy: float, commit: float, step: float, expected: int) -> None:
    cost = SnapshotCost(copy, commit, step)
    assert cost.smallest_interval == expected
    assert cost.share(expected) <= COST_SHARE
    assert expected == 1 or cost.share(expected - 1) > COST_SHARE
    assert cost.steps_in(step * 30) == 30
    assert cost.steps_in(step / 30) == 1
