"""The order of nodes, and the audit of a placement."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.formatting import percent
from craton.infrastructure import resolve_cluster
from craton.job import Job, Placement, load_job
from craton.job.layout import Layout
from craton.orchestration.placement import Audit, audit, order_nodes

GPUS = 8


def allocation(**leaves: int) -> dict[str, str]:
    """Slurm's addresses: so many nodes of each leaf, all below one spine."""
    return {
        f"{leaf}{number}": f"spine.{leaf}.{leaf}{number}" for leaf, nodes in leaves.items() for number in range(nodes)
    }


def leaves_of(order: list[str]) -> str:
    return "".join(node[0] for node in order)


def whole_blocks(leaves: str, size: int) -> int:
    blocks = [leaves[start : start + size] for start in range(0, len(leaves) - size + 1, size)]
    return sum(len(set(block)) == 1 for block in blocks)


@pytest.mark.parametrize(
    ("allocated", "layout", "expected"),
    [
        # stages of four nodes: the leaf that holds a whole one does
        (allocation(a=1, b=4, c=3), Layout(pp=2, fsdp=32), ("bbbbccca",)),
        # pairs stay together, and so do the fours made of them
        (allocation(a=3, b=3, c=2), Layout(pp=2, replicate=2, fsdp=16), ("aabb", "bbaa", "aacc", "bbcc")),
        # nothing to divide: leaf after leaf
        (allocation(b=2, a=2), Layout(fsdp=32), ("aabb",)),
    ],
)
def test_groups_stay_on_a_leaf(allocated: dict[str, str], layout: Layout, expected: tuple[str, ...]) -> None:
    order = order_nodes(allocated, layout, GPUS)
    assert sorted(order) == sorted(allocated)
    assert any(text in leaves_of(order) for text in expected), leaves_of(order)


def test_nodes_beyond_the_layout_come_last() -> None:
    order = order_nodes(allocation(a=2, b=4), Layout(fsdp=32), GPUS)
    assert leaves_of(order) == "bbbbaa"


def test_spares_are_those_that_lie_apart() -> None:
    order = order_nodes(allocation(a=3, b=1, c=4), Layout(fsdp=32), GPUS)
    assert leaves_of(order)[:4] == "cccc"


def test_without_a_layout_nodes_are_grouped_by_leaf() -> None:
    given_order = {"n1": "s.l1.n1", "n2": "s.l2.n2", "n3": "s.l1.n3", "n10": "s.l2.n10"}
    assert order_nodes(given_order) == ["n1", "n3", "n2", "n10"]


def test_nodes_that_do_not_say_where_they_are() -> None:
    assert order_nodes({"n10": "n10", "n2": "n2", "n1": ""}) == ["n1", "n2", "n10"]


def test_tensor_ranks_of_two_nodes_stay_in_their_nvlink_domain() -> None:
    """Domains of two nodes of four GPUs, told in an order that would tear them apart."""
    paths = {f"n{number}": ("spine", "leaf", f"nvl{number % 4}") for number in range(8)}
    order = order_nodes(paths, Layout(fsdp=4, tp=8), 4)
    pairs = [{paths[node][-1] for node in order[start : start + 2]} for start in range(0, 8, 2)]
    assert all(len(pair) == 1 for pair in pairs)


def test_expert_groups_stay_on_a_leaf() -> None:
    """Experts over 16 ranks, two nodes, inside shards over four."""
    order = order_nodes(allocation(a=3, b=1, c=4), Layout(fsdp=32, replicate=2, ep=16), GPUS)
    assert whole_blocks(leaves_of(order), 2) == 3
    assert whole_blocks(leaves_of(order), 4) == 1


def test_what_no_leaf_holds_is_kept_below_one_spine() -> None:
    paths = {
        f"{spine}{leaf}{number}": (spine, f"{spine}{leaf}") for spine in "xy" for leaf in "ab" for number in (1, 2)
    }
    order = order_nodes(paths, Layout(pp=2, fsdp=32), GPUS)
    assert {name[0] for name in order[:4]} != {name[0] for name in order[4:]}
    assert len({name[0] for name in order[:4]}) == 1


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) <= 7), st.sampled_from([2, 3])
)
def test_no_order_keeps_more_blocks_whole(sizes: list[int], block: int) -> None:
    allocated = allocation(**dict(zip("abcd", sizes, strict=False)))
    order = leaves_of(order_nodes(allocated, Layout(replicate=max(1, sum(sizes) // block), fsdp=block), 1))
    best = max(whole_blocks("".join(one), block) for one in set(permutations("".join(node[0] for node in allocated))))
    assert whole_blocks(order, block) == best


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_level_of_blocks_is_as_whole_as_can_be(sizes: list[int]) -> None:
    allocated = {
        f"l{leaf:02d}-{number}": ("s", f"l{leaf:02d}") for leaf, size in enumerate(sizes) for number in range(size)
    }
    total = sum(sizes)
    order = order_nodes(allocated, Layout(pp=max(1, total // 8), replicate=2, fsdp=4), 1)
    assert sorted(order) == sorted(allocated)
    for block in (4, 8):
        starts = range(0, total - block + 1, block)
        whole = sum(len({node[:3] for node in order[start : start + block]}) == 1 for start in starts)
        assert whole == sum(size // block for size in sizes)


CLUSTER = """\
name: lab
instance: p5.48xlarge
nodes: 8
levels:
  leaf: {{nodes: 4, oversubscription: {oversubscription}}}
prices: [{{dollars_per_hour: 40.0, kind: own, date: 2026-11-01}}]
"""
JOB = """\
name: llm
kind: pretrain
model: llama-3.1-8b
data: {path: /tokens, sequence: 8192}
train: {global_batch_sequences: 64, steps: 1000, precision: bf16}
layout: {fsdp: 32}
cluster: cluster.yaml x 4
placement: {within: leaf}
"""


def job_in(folder: Path, oversubscription: float) -> Job:
    (folder / "cluster.yaml").write_text(CLUSTER.format(oversubscription=oversubscription))
    (folder / "job.yaml").write_text(JOB)
    return load_job(folder / "job.yaml")


def audit_of(folder: Path, allocated: dict[str, str], oversubscription: float = 4.0) -> Audit:
    job = job_in(folder, oversubscription)
    return audit(
        allocated, job.placement, Layout(fsdp=32), GPUS, job=job, cluster=resolve_cluster(job.cluster, job.price)
    )


def test_a_placement_that_held_costs_nothing(tmp_path: Path) -> None:
    found = audit_of(tmp_path, allocation(a=4))
    assert found.held is True
    assert found.slower == 0
    assert found.sentences() == ["requested one leaf, got 4 nodes on a x 4: satisfied", "predicted cost: none"]


def test_a_placement_that_did_not_hold_is_priced(tmp_path: Path) -> None:
    found = audit_of(tmp_path, allocation(a=3, b=1))
    assert found.held is False
    assert found.spread["leaf"] == {"a": 3, "b": 1}
    (crossing,) = [one for one in found.crossings if one.dimension == "fsdp"]
    assert (crossing.crossing, crossing.groups) == (1, 1)
    assert found.asked_step_seconds
    assert found.got_step_seconds
    assert found.got_step_seconds > found.asked_step_seconds
    assert found.dollars_per_day == pytest.approx(found.slower * 40.0 * 4 * 24)
    first, second, third = found.sentences()
    assert first == "requested one leaf, got 4 nodes on a x 3, b x 1: not satisfied"
    assert second == "1 of 1 fsdp groups cross a leaf"
    assert third.startswith(f"predicted cost: {percent(found.slower)} of every step")
    assert "a day)" in third
    assert json.loads(json.dumps(found.to_json()))["slower"] == found.slower


def test_more_oversubscription_costs_more(tmp_path: Path) -> None:
    costs = [audit_of(tmp_path, allocation(a=3, b=1), share).slower for share in (2.0, 4.0, 8.0)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_an_unstated_oversubscription_is_said(tmp_path: Path) -> None:
    found = audit_of(tmp_path, allocation(a=3, b=1), 1.0)
    assert found.slower == 0
    assert "has no oversubscription" in found.sentences()[-1]


def test_groups_inside_a_leaf_are_not_charged_for_those_across(tmp_path: Path) -> None:
    """HSDP over two leaves: shards stay inside, copies cross; cheaper than shards across."""
    job = job_in(tmp_path, 4.0)
    cluster = resolve_cluster(job.cluster, job.price)
    allocated = allocation(a=2, b=2)

    def cost(layout: Layout) -> float:
        return audit(allocated, job.placement, layout, GPUS, job=job, cluster=cluster).slower

    assert 0 < cost(Layout(replicate=2, fsdp=16)) < cost(Layout(fsdp=32))


def test_levels_by_name() -> None:
    paths = {f"n{number}": ("us-east-2a", f"s{number // 2}", f"l{number}") for number in range(4)}
    names = ("zone", "spine", "leaf")
    assert audit(paths, Placement(within="zone"), levels=names).held is True
    assert audit(paths, Placement(within="spine"), levels=names).held is False
    assert audit(dict(list(paths.items())[:2]), Placement(within="spine"), levels=names).held is True
    assert audit({"n0": paths["n0"]}, Placement(within="node"), levels=names).held is True


def test_an_nvlink_domain_that_is_left_is_said() -> None:
    paths = {f"n{number}": ("leaf", f"nvl{number % 2}") for number in range(4)}
    found = audit(paths, None, Layout(fsdp=2, tp=8), 4, levels=("leaf", "domain"))
    assert "2 of 2 tp groups cross a NVLink domain" in found.sentences()
    ordered = {node: paths[node] for node in order_nodes(paths, Layout(fsdp=2, tp=8), 4)}
    after = audit(ordered, None, Layout(fsdp=2, tp=8), 4, levels=("leaf", "domain"))
    assert [one.crossing for one in after.crossings if one.dimension == "tp"] == [0, 0]


def test_pipeline_sends_are_counted_by_pairs() -> None:
    found = audit(allocation(a=2, b=2), None, Layout(pp=4, tp=8), GPUS)
    (sends,) = [one for one in found.crossings if one.dimension == "pp"]
    assert (sends.crossing, sends.groups) == (8, 24)
    assert "8 of 24 sends between stages cross a leaf" in found.sentences()


def test_unknown_places_are_not_judged() -> None:
    found = audit({"n1": "n1", "n2": "n2"}, Placement(within="leaf"), Layout(fsdp=16), GPUS)
    assert found.held is None
    assert found.sentences() == ["got 2 nodes, their leaves unknown; requested one leaf, which cannot be checked"]


def test_a_job_that_cannot_be_planned_is_audited_without_a_price(tmp_path: Path) -> None:
    job_in(tmp_path, 4.0)
    (tmp_path / "command.yaml").write_text(
        "kind: command\ncommand: [train]\ncluster: cluster.yaml x 4\nplacement: {within: leaf}\n"
    )
    job = load_job(tmp_path / "command.yaml")
    cluster = resolve_cluster(job.cluster, job.price)
    found = audit(allocation(a=3, b=1), job.placement, Layout(fsdp=32), GPUS, job=job, cluster=cluster)
    assert found.held is False
    assert found.note.startswith("no price: ")
