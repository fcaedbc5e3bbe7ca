"""Checkpoint sizes people know, the link that limits a save or a restart, and data streams that starve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craton.infrastructure import Cluster, StorageTier, cluster_of
from craton.infrastructure.catalog import instance
from craton.planning.economics.storage import (
    checkpoint_bytes,
    data_bytes_per_token,
    recovery_facts,
    storage_plan,
    tier_plan,
)
from craton.planning.result import TierPlan

TB, GB = 1e12, 1e9
OVERHEAD = recovery_facts()["storage"]["save_overhead_seconds"]


def cluster(num_nodes: int, name: str = "p5en.48xlarge") -> Cluster:
    machine = instance(name)
    half = machine.network_bytes_per_second / 2
    read, write = machine.nvme_read_bytes_per_second, machine.nvme_write_bytes_per_second
    tiers = {
        "peer": StorageTier("peer", "peer", half * num_nodes, half * num_nodes, half, half),
        "nvme": StorageTier("nvme", "nvme", read * num_nodes, write * num_nodes, read, write),
        "shared": StorageTier("shared", "lustre", 50 * GB, 50 * GB, 12.5 * GB, 12.5 * GB),
        "object": StorageTier("object", "s3", 8 * GB * num_nodes, 4 * GB * num_nodes, 8 * GB, 4 * GB),
    }
    return Cluster(f"{name} x {num_nodes}", machine, num_nodes, tiers=tiers)


def one(where: Cluster, name: str, size: float, **settings: float) -> TierPlan:
    return tier_plan(where, where.tiers[name], where.num_nodes, size, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "optimizer", "bytes_per_parameter"),
    [("bf16", "adamw", 14), ("fp8", "adamw", 14), ("fp32", "adamw", 12), ("bf16", "sgd", 10), ("bf16", "adamw8bit", 8)],
)
def test_bytes_of_a_checkpoint(precision: str, optimizer: str, bytes_per_parameter: float) -> None:
    assert checkpoint_bytes(8e9, precision, optimizer) == 8e9 * bytes_per_parameter


def test_a_checkpoint_of_our_own() -> None:
    assert checkpoint_bytes(8e9, both_widths=False) == 8e9 * 12
    assert checkpoint_bytes(8e9, weights="bf16") == checkpoint_bytes(8e9, "fp8", weights="bf16") == 8e9 * 6
    assert checkpoint_bytes(8e9, "fp32", both_widths=False) == 8e9 * 12


def test_lora_saves_the_adapters_only_and_reads_the_base_too() -> None:
    adapters = checkpoint_bytes(70e9, lora_parameters=200e6)
    assert adapters == 200e6 * 14
    where = cluster(2)
    alone = one(where, "shared", adapters)
    with_base = one(where, "shared", adapters, frozen_bytes=140e9)
    assert with_base.write_seconds == alone.write_seconds
    assert with_base.read_seconds > alone.read_seconds + 140e9 / (2 * 12.5 * GB)


@pytest.mark.parametrize(("precision", "optimizer"), [("int3", "adamw"), ("bf16", "adamx")])
def test_unknown_names_say_what_is_known(precision: str, optimizer: str) -> None:
    with pytest.raises(ValueError, match=r"sized for .*(bf16|adamw)"):
        checkpoint_bytes(1e9, precision, optimizer)


def test_the_file_system_limits_a_large_job() -> None:
    """2 TB from 64 nodes to 50 GB/s take 40 s, however fast the nodes are."""
    saved = one(cluster(64), "shared", 2 * TB)
    assert saved.write_seconds - saved.blocked_seconds == pytest.approx(40.0)


def test_one_nodes_connection_limits_a_small_job() -> None:
    saved = one(cluster(2), "shared", 100 * GB)
    assert saved.write_seconds - saved.blocked_seconds == pytest.approx(100 / 2 / 12.5)


def test_asynchronous_saves_wait_for_the_host_link_only() -> None:
    where = cluster(2)
    saved = one(where, "shared", 160 * GB)
    copied = 10 * GB / (where.instance.host_link_bytes_per_second * 0.87)  # 10 GB on each of 16 GPUs
    assert saved.blocked_seconds == pytest.approx(copied + OVERHEAD)
    waiting = one(where, "shared", 160 * GB, asynchronous=False)
    assert waiting.blocked_seconds == waiting.write_seconds == saved.write_seconds


def test_object_store_requests_limit_many_ranks() -> None:
    """16,384 ranks with one small object each: begin, one part, complete, at 3,500 requests a second."""
    saved = one(cluster(2048), "object", 16_384 * 1e6)
    assert saved.write_seconds - saved.blocked_seconds == pytest.approx(3 * 16_384 / 3500)
    assert saved.read_seconds > 16_384 / 5500


def test_object_store_parts_limit_huge_checkpoints() -> None:
    size = 16_384 * 640 * 2.0**20  # ten parts of 64 MiB a rank
    assert one(cluster(2048), "object", size).write_seconds > 12 * 16_384 / 3500


def test_replicas_read_once_and_pass_it_on() -> None:
    where = cluster(16)
    alone = one(where, "shared", 1 * TB)
    copies = one(where, "shared", 1 * TB, replicate=4)
    network = 1 * TB / 4 / where.instance.network_bytes_per_second
    assert alone.read_seconds < copies.read_seconds < alone.read_seconds + network + 10
    assert copies.read_seconds < 4 * alone.read_seconds, (
        "reading every copy would take the file system four times as long"
    )
    assert copies.write_seconds == alone.write_seconds, "written once"
    few_readers = one(where, "shared", 1 * TB, replicate=8)
    assert few_readers.read_seconds > 1 * TB / (2 * 12.5 * GB), "two of the sixteen nodes read for all"


def test_tiers_come_fastest_first_with_the_jobs_cadences() -> None:
    plan = storage_plan(cluster(4), 4, 112 * GB, {"shared": 1800.0}, tokens_per_second=1e5)
    assert [tier.tier for tier in plan.tiers] == ["peer", "nvme", "shared", "object"]
    assert [tier.every_seconds for tier in plan.tiers] == [None, None, 1800.0, None]
    assert plan.tiers[0].read_seconds < plan.tiers[1].read_seconds < plan.tiers[2].read_seconds
    assert plan.warnings == []


def test_one_node_has_no_peer() -> None:
    plan = storage_plan(cluster(1), 1, 112 * GB, {}, tokens_per_second=1e5)
    assert "peer" not in [tier.tier for tier in plan.tiers]


def test_a_tier_the_cluster_lacks_is_the_users_mistake() -> None:
    where = replace(cluster(2), tiers={"shared": cluster(2).tiers["shared"]})
    with pytest.raises(ValueError, match=r"has no storage tier 'nvme'; it has shared"):
        storage_plan(where, 2, 1 * GB, {"nvme": 300.0}, tokens_per_second=1e5)


def test_data_stream_against_its_tier() -> None:
    plan = storage_plan(cluster(64), 64, 1 * TB, {}, tokens_per_second=1e6, bytes_per_token=4.0)
    assert plan.data_bytes_per_second == pytest.approx(4.4e6)
    assert (plan.data_tier, plan.data_limit_bytes_per_second) == ("shared", 50 * GB)
    starved = storage_plan(cluster(64), 64, 1 * TB, {}, tokens_per_second=2e10, bytes_per_token=4.0)
    assert any("training waits" in warning for warning in starved.warnings)
    small = storage_plan(cluster(2), 2, 1 * GB, {}, tokens_per_second=1e6, data_tier="object")
    assert (small.data_tier, small.data_limit_bytes_per_second) == ("object", 16 * GB)


def test_tokens_take_two_bytes_where_the_vocabulary_allows() -> None:
    assert (data_bytes_per_token(50_304), data_bytes_per_token(128_256)) == (2.0, 4.0)


def test_what_does_not_fit_is_said() -> None:
    two_nodes = cluster_of("p5en.48xlarge", 2)
    crowded = storage_plan(two_nodes, 2, 1 * TB, {}, tokens_per_second=1e5)
    assert "peer" not in [tier.tier for tier in crowded.tiers]
    assert any("planned without peer recovery" in warning for warning in crowded.warnings)
    assert storage_plan(two_nodes, 2, 1 * TB, {}, tokens_per_second=1e5, peer=False).warnings == []
    small_disk = cluster_of("p5en.48xlarge", 2, nvme_bytes=100 * GB)
    (disk,) = storage_plan(small_disk, 2, 200 * GB, {"nvme": 300.0}, tokens_per_second=1).warnings
    assert "two checkpoints need 200 GB on a node's NVMe, 100 GB are available" in disk
    assert storage_plan(small_disk, 2, 200 * GB, {}, tokens_per_second=1).warnings == [], "the job does not use it"
    shared = replace(cluster(2).tiers["shared"], capacity_bytes=1 * TB)
    small_share = replace(cluster(2), tiers={"shared": shared})
    (share,) = storage_plan(small_share, 2, 1 * TB, {"shared": 1800.0}, tokens_per_second=1).warnings
    assert "buy capacity" in share


def test_a_catalog_cluster_has_all_tiers() -> None:
    plan = storage_plan(cluster_of("p5en.48xlarge", 16), 16, 112 * GB, {"shared": 1800.0}, tokens_per_second=1e6)
    assert [tier.tier for tier in plan.tiers] == ["peer", "nvme", "shared", "object"]
    assert plan.warnings == []


@given(
    st.sampled_from(["peer", "nvme", "shared", "object"]),
    st.integers(2, 2000),
    st.floats(8, 13).map(lambda exponent: 10.0**exponent),
    st.floats(1.0, 20.0),
    st.integers(1, 8),
)
def test_more_bytes_are_never_faster_and_faster_links_never_slower(
    name: str, num_nodes: int, size: float, factor: float, replicate: int
) -> None:
    where = cluster(num_nodes)
    base = one(where, name, size, replicate=replicate)
    larger = one(where, name, size * factor, replicate=replicate)
    tier = where.tiers[name]
    quick = replace(
        where,
        tiers={
            name: replace(
                tier,
                read_bytes_per_second=tier.read_bytes_per_second * factor,
                write_bytes_per_second=tier.write_bytes_per_second * factor,
                client_read_bytes_per_second=tier.client_read_bytes_per_second * factor,
                client_write_bytes_per_second=tier.client_write_bytes_per_second * factor,
            )
        },
    )
    faster = one(quick, name, size, replicate=replicate)
    for field in ("write_seconds", "blocked_seconds", "read_seconds"):
        assert getattr(faster, field) <= getattr(base, field) <= getattr(larger, field)
    assert 0 < base.blocked_seconds <= base.write_seconds
