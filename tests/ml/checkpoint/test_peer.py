"""State in the nodes' memory comes back to the bit, to any ranks in any layout, as long as every part is held; what is
not whole or not right is left for the next copy, the older save, the next tier."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from gang import Gang
from keepers import KeeperProcess, Keepers
from nodes import Nodes, nodes_of
from peers import Restored, make_state, restore, save_steps
from states import equal, rank_and_world

from craton.ml.training.checkpoint import Checkpointer


def start(keepers: Keepers, count: int) -> list[KeeperProcess]:
    return [keepers.start(f"node-{index}") for index in range(count)]


def test_ranks_that_are_cut_as_before_take_the_newest_step_as_it_is(gang: Gang, keepers: Keepers) -> None:
    made = start(keepers, 2)
    saved = gang.run(save_steps, nodes_of(made, 2), [7, 8, 9], ranks=4)
    assert saved[0].notes == []
    for found in gang.run(restore, nodes_of(made, 2, generation=2), ranks=4):
        assert found.counters == {"samples": 72, "step": 9}
        assert found.tier == "peer"
        assert found.passed_over == ()
        assert equal(found.state, saved[0].states[9])
    for keeper in made:
        held = {(each.own, each.manifest["rank"], each.manifest["step"]) for each in keeper.client().holdings()}
        assert len(held) == 8, "two steps of two own ranks and of two of the buddy's"


@pytest.mark.parametrize(("lost", "ranks_each"), [(0, 1), (1, 2), (2, 2)])
def test_any_one_node_may_be_lost(gang: Gang, keepers: Keepers, lost: int, ranks_each: int) -> None:
    """Three nodes, of which one dies with its keeper; its copy is at the next one. Other ranks, other places."""
    made = start(keepers, 3)
    nodes = nodes_of(made, 1)
    four = Nodes((*nodes.names, "node-2"), nodes.keepers, nodes.addresses)
    saved = gang.run(save_steps, four, [3, 4], ranks=4)
    made[lost].kill()
    left = [keeper for keeper in made if keeper is not made[lost]]
    for found in gang.run(restore, nodes_of(left, ranks_each, generation=2), ranks=2 * ranks_each):
        assert (found.tier, found.counters) == ("peer", {"samples": 32, "step": 4})
        assert equal(found.state, saved[0].states[4])


def test_a_node_that_has_nothing_gets_its_part_from_the_others(gang: Gang, keepers: Keepers) -> None:
    made = start(keepers, 2)
    saved = gang.run(save_steps, nodes_of(made, 1), [5, 6], ranks=2)
    made[0].kill()
    spare = keepers.start("node-9")
    for found in gang.run(restore, nodes_of([spare, made[1]], 1, generation=2), ranks=2):
        assert (found.tier, found.counters) == ("peer", {"samples": 48, "step": 6})
        assert equal(found.state, saved[0].states[6])


def test_what_nobody_holds_is_taken_from_the_next_tier(gang: Gang, keepers: Keepers, tmp_path: Path) -> None:
    """Two of three nodes die, a node and its buddy: memory is not whole, the disk is older."""
    made = start(keepers, 3)
    saved = gang.run(save_steps, nodes_of(made, 1), [5, 6, 7], "fsdp", tmp_path, (6,), ranks=3)
    made[0].kill()
    made[1].kill()
    (found,) = gang.run(restore, nodes_of(made[2:], 1, generation=2), "plain", tmp_path, ranks=1)
    assert (found.tier, found.counters) == ("shared", {"samples": 48, "step": 6})
    assert equal(found.state, saved[0].states[6])
    assert any("no node has the state of ranks 0" in text for text in found.warnings)


def run_restore(gang: Gang, made: list[KeeperProcess], tmp_path: Path) -> Restored:
    return gang.run(restore, nodes_of(made, 1, generation=2), "fsdp", tmp_path, ranks=2)[0]


def test_a_flipped_byte_falls_to_the_copy_then_to_the_older_save_then_to_the_disk(
    gang: Gang, keepers: Keepers, tmp_path: Path
) -> None:
    made = start(keepers, 2)
    saved = gang.run(save_steps, nodes_of(made, 1), [5, 6, 7], "fsdp", tmp_path, (5,), ranks=2)
    states = saved[0].states
    assert made[0].client().corrupt(rank=0, whose="own")
    found = run_restore(gang, made, tmp_path)
    assert (found.tier, found.counters) == ("peer", {"samples": 56, "step": 7})
    assert equal(found.state, states[7])
    (told,) = found.passed_over
    assert told.startswith("tier peer: step 7: rank-00000 does not match its checksum")

    assert made[1].client().corrupt(rank=0, whose="copies")
    found = run_restore(gang, made, tmp_path)
    assert (found.tier, found.counters) == ("peer", {"samples": 48, "step": 6})
    assert equal(found.state, states[6])
    assert len(found.passed_over) == 2

    for keeper in made:
        keeper.client().corrupt(rank=1)
    found = run_restore(gang, made, tmp_path)
    assert (found.tier, found.counters) == ("shared", {"samples": 40, "step": 5})
    assert equal(found.state, states[5])
    assert all(text.startswith("tier peer: step 6: ") for text in found.passed_over), "step 7 was forgotten before"


LAYOUTS = ["fsdp·tp", "rows twice", "replicate·fsdp", "fsdp over tp"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_as_itself_and_as_one(gang: Gang, keepers: Keepers, layout: str) -> None:
    made = start(keepers, 2)
    saved = gang.run(save_steps, nodes_of(made, 2), [1, 2], layout, ranks=4)
    for found in gang.run(restore, nodes_of(made, 2, generation=2), layout, ranks=4):
        assert (found.tier, found.counters) == ("peer", {"samples": 16, "step": 2})
        assert equal(found.state, saved[0].states[2])
    made[1].kill()
    (found,) = gang.run(restore, nodes_of(made[:1], 1, generation=3), "one", ranks=1)
    assert found.tier == "peer"
    assert equal(found.state, saved[0].states[2])


def test_the_stages_of_a_pipeline_together_are_the_model(gang: Gang, keepers: Keepers) -> None:
    made = start(keepers, 2)
    gang.run(save_steps, nodes_of(made, 2), [1, 2], "pp", ranks=4)
    gang.run(save_steps, nodes_of(made, 2, generation=2), [3], "pp", ranks=4)
    for found in gang.run(restore, nodes_of(made, 2, generation=3), "pp", ranks=4):
        assert (found.tier, found.counters) == ("peer", {"samples": 24, "step": 3})
    first = gang.run(restore, nodes_of(made, 2, generation=4), "fsdp·tp", ranks=4)[0]
    made[0].kill()
    (found,) = gang.run(restore, nodes_of(made[1:], 1, generation=5), "one", ranks=1)
    assert found.tier == "peer"
    assert equal(found.state, first.state)


def test_replicas_on_other_nodes_send_nothing_and_stand_in_for_each_other(gang: Gang, keepers: Keepers) -> None:
    made = start(keepers, 2)
    saved = gang.run(save_steps, nodes_of(made, 2), [1, 2], "replicate·fsdp", ranks=4)
    for keeper in made:
        assert all(holding.own for holding in keeper.client().holdings())
        assert keeper.client().status()["pushes"] == 0
    made[0].kill()
    for found in gang.run(restore, nodes_of(made[1:], 2, generation=2), "fsdp·tp", ranks=2):
        assert found.tier == "peer"
        assert equal(found.state, saved[0].states[2])


def fill_and_be_late(nodes: Nodes) -> None:
    """Step 3 is whole everywhere; of step 4 only the first rank's copy got as far as the keeper."""
    rank, world = rank_and_world()
    tensors = make_state(0, "fsdp")
    checkpointer = Checkpointer([], rank, world, nodes.setup())
    checkpointer.reserve(tensors, 0)
    for step in (2, 3):
        assert checkpointer.due(step)
        checkpointer.save(step, tensors, {"samples": step})
    checkpointer.wait()
    memory = checkpointer._peer
    assert memory is not None
    older = next(slot for slot in memory._slots if slot.step == 2)
    if rank == 1:  # dies between the header and the last byte
        older.header.zero_()
    if rank == 0:
        older.header.zero_()
        (copied,) = [each.manifest for each in memory.client.holdings() if each.own and each.manifest["step"] == 3]
        manifest = {**copied, "step": 4, "save": "1-4"}
        assert memory.client.filled(older.own.slot, memory._token, manifest, "1-3", memory._buddy).replicated
    checkpointer.abandon(10)


def test_a_step_that_not_all_ranks_have_is_not_restored(gang: Gang, keepers: Keepers) -> None:
    made = start(keepers, 2)
    gang.run(fill_and_be_late, nodes_of(made, 1), ranks=2)
    for found in gang.run(restore, nodes_of(made, 1, generation=2), ranks=2):
        assert (found.tier, found.counters) == ("peer", {"samples": 3, "step": 3})
    left = {each.manifest["save"] for keeper in made for each in keeper.client().holdings()}
    assert "1-4" not in left, "it belongs to no course any more"


def two_generations(first: Nodes, second: Nodes) -> list[set[str]]:
    """What a keeper holds before and after the second generation's snapshots, which lie in slots of another size."""
    rank, world = rank_and_world()
    held = []
    for nodes, layout, steps in ((first, "fsdp", (1, 2)), (second, "plain", (3, 4, 5))):
        tensors = make_state(0, layout)
        checkpointer = Checkpointer([], rank, world, nodes.setup())
        counters = checkpointer.restore(tensors)
        assert counters == (None if nodes is first else {"samples": 2, "step": 2})
        checkpointer.reserve(tensors, steps[0] - 1)
        for step in steps:
            assert checkpointer.due(step)
            checkpointer.save(step, tensors, {"samples": step})
            checkpointer.wait()
            held.append({holding.manifest["save"] for holding in checkpointer._peer.client.holdings()})
        checkpointer.close()
    return held


def test_an_old_save_is_kept_until_a_new_one_is_whole_and_then_given_back(gang: Gang, keepers: Keepers) -> None:
    made = start(keepers, 2)
    for held in gang.run(two_generations, nodes_of(made, 1), nodes_of(made, 1, generation=2), ranks=2):
        assert held == [{"1-1"}, {"1-1", "1-2"}, {"1-1", "1-2", "2-3"}, {"2-3", "2-4"}, {"2-4", "2-5"}]


def keep_without_room(nodes: Nodes) -> list[tuple[str, str]]:
    tensors = make_state(0, "fsdp") | {"model.large": torch.zeros(2**20)}
    checkpointer = Checkpointer([], *rank_and_world(), nodes.setup())
    checkpointer.reserve(tensors)
    assert not checkpointer.due(1)
    assert not checkpointer.keep(1, tensors, {}, nodes.names)
    checkpointer.close()
    return [(note.event, note.text) for note in checkpointer.notes()]


def test_one_node_without_room_switches_the_tier_off_on_all(gang: Gang, small_disk: Path, keepers: Keepers) -> None:
    made = [keepers.start("node-0"), keepers.start("node-1", folder=str(small_disk))]
    for notes in gang.run(keep_without_room, nodes_of(made, 1), ranks=2):
        ((event, text),) = notes
        assert event == "peer_off"
        assert "enlarge the mount with `mount -o remount,size=" in text
    assert [keeper.client().status()["bytes"] for keeper in made] == [0, 0]


def keep_one_step(nodes: Nodes) -> list[set[str]]:
    """As ranks do that are about to be exchanged: once after a snapshot of the same step, once without one."""
    tensors = make_state(0, "fsdp")
    checkpointer = Checkpointer([], *rank_and_world(), nodes.setup(every_steps=5))
    checkpointer.reserve(tensors, 0)
    held = []
    for step in (5, 7):
        if checkpointer.due(step):
            checkpointer.save(step, tensors, {"samples": step})
        assert checkpointer.keep(step, tensors, {"samples": step}, nodes.names)
        assert checkpointer._peer is not None
        own = [holding for holding in checkpointer._peer.client.holdings() if holding.own]
        held.append({holding.manifest["save"] for holding in own})
        assert len(own) == len(held[-1]), "no save is there twice"
    checkpointer.close()
    return held


def test_a_step_can_be_kept_when_none_is_due(gang: Gang, keepers: Keepers) -> None:
    made = start(keepers, 2)
    for held in gang.run(keep_one_step, nodes_of(made, 1), ranks=2):
        assert held == [{"1-5"}, {"1-5", "1-7"}]
    for found in gang.run(restore, nodes_of(made, 1, generation=2), ranks=2):
        assert (found.tier, found.counters) == ("peer", {"samples": 7, "step": 7})


def make_with_one_keeper(nodes: Nodes) -> list[str]:
    rank, world = rank_and_world()
    tensors = make_state(0, "fsdp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer = Checkpointer([], rank, world, nodes.setup() if rank == 0 else None)
    checkpointer.reserve(tensors)
    assert not checkpointer.due(1)
    checkpointer.close()
    return [str(warning.message) for warning in caught]


def test_ranks_without_a_keeper_switch_the_tier_off_on_all(gang: Gang, keepers: Keepers) -> None:
    made = start(keepers, 2)
    told, _ = gang.run(make_with_one_keeper, nodes_of(made, 1), ranks=2)
    assert "state is not kept in memory: ranks [1] have no keeper" in told
