"""Collective times: against published nccl-tests runs, and the orderings a planner's search relies on."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craton.planning.rates import (
    Group,
    Network,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
)
from craton.planning.rates.collectives import broadcast_seconds, network

OPERATIONS = [all_reduce_seconds, all_gather_seconds, reduce_scatter_seconds, all_to_all_seconds, broadcast_seconds]
P5 = network("hopper", 450e9, 8, 8, 50e9, efa_version=2)
P4D = network("ampere", 300e9, 8, 8, 6.25e9, efa_version=1)
ULTRASERVER = network("blackwell", 900e9, 72, 4, 50e9, efa_version=4)
PCIE = network("ada", 0.0, 1, 8, 6.25e9, efa_version=2)
INFINIBAND = network("hopper", 450e9, 8, 8, 50e9, efa_version=0, leaf_gpus=256, oversubscription=3.0)
NETWORKS = st.sampled_from([P5, P4D, ULTRASERVER, PCIE, INFINIBAND])
SIZES = st.floats(1.0, 1e11)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "fit_collectives.py"
    spec = importlib.util.spec_from_file_location("fit_collectives", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_collectives"] = module
    spec.loader.exec_module(module)
    return module


def whole_nodes(network: Network, domains: int) -> Group:
    """All GPUs of so many NVLink domains."""
    domain = network.nvlink_domain
    return Group(domains * domain, domain, min(domain, network.node_gpus))


def test_published_runs_are_met(benchmark: ModuleType) -> None:
    points = [point for point in benchmark.load_points() if point.size_bytes >= 2**20]
    errors = sorted(abs(point.predict() / point.seconds - 1) for point in points)
    assert len(errors) > 350
    assert statistics.median(errors) < 0.07
    assert errors[int(0.9 * len(errors))] < 0.20


def test_no_machine_or_operation_is_far_off(benchmark: ModuleType) -> None:
    errors: dict[tuple[str, str], list[float]] = {}
    for point in benchmark.load_points():
        if point.size_bytes >= 2**20:
            error = abs(point.predict() / point.seconds - 1)
            errors.setdefault((point.operation, point.machine), []).append(error)
    medians = {key: statistics.median(values) for key, values in errors.items()}
    assert max(medians.values()) < 0.20, medians


def test_small_messages_are_within_a_factor_of_two(benchmark: ModuleType) -> None:
    ratios = [point.predict() / point.seconds for point in benchmark.load_points() if point.size_bytes < 2**20]
    assert len(ratios) > 100
    assert min(ratios) > 0.5
    assert max(ratios) < 2.0


@given(SIZES, SIZES, NETWORKS, st.integers(1, 300), st.sampled_from(OPERATIONS))
def test_more_bytes_are_never_faster(one: float, other: float, links: Network, domains: int, operation) -> None:
    group = whole_nodes(links, domains)
    small, large = sorted((one, other))
    assert operation(small, group, links) <= operation(large, group, links)


@given(SIZES, NETWORKS, st.integers(1, 300), st.integers(1, 300), st.sampled_from(OPERATIONS), st.booleans())
def test_more_domains_are_never_faster(
    size: float, links: Network, one: int, other: int, operation, one_rank_each: bool
) -> None:
    fewer, more = sorted((one, other))
    groups = [Group(n, 1, 1, concurrent=8) if one_rank_each else whole_nodes(links, n) for n in (fewer, more)]
    assert operation(size, groups[0], links) <= operation(size, groups[1], links) * (1 + 1e-12)


@given(SIZES, NETWORKS, st.integers(1, 64), st.floats(1.0, 20.0), st.sampled_from(OPERATIONS))
def test_less_bandwidth_is_never_faster(size: float, links: Network, domains: int, factor: float, operation) -> None:
    group = whole_nodes(links, domains)
    now = operation(size, group, links)
    slower_nvlink = replace(links, nvlink_bytes_per_second=links.nvlink_bytes_per_second / factor)
    slower_nic = replace(links, nic_bytes_per_second=links.nic_bytes_per_second / factor)
    assert operation(size, group, slower_nvlink) >= now
    assert operation(size, group, slower_nic) >= now


@given(SIZES, st.integers(2, 64), st.integers(1, 8), st.sampled_from(OPERATIONS))
def test_a_shared_or_oversubscribed_network_is_never_faster(size: float, nodes: int, sharers: int, operation) -> None:
    alone = Group(nodes * 4, 4, 4)
    for worse in (replace(alone, concurrent=sharers), replace(alone, spans_leaves=True)):
        assert operation(size, worse, INFINIBAND) >= operation(size, alone, INFINIBAND)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_to_move_costs_nothing(operation) -> None:
    assert operation(1e9, Group(1, 1, 1), P5) == 0.0
    assert operation(0.0, Group(16, 8, 8), P5) == 0.0
    assert point_to_point_seconds(0.0, False, P5) == 0.0


def test_each_rank_brings_its_own_interface() -> None:
    """One ring over all ranks has the node's eight interfaces; eight rings of one rank a node have one each."""
    size = 64 * 2**30
    everyone = all_gather_seconds(size, Group(128, 8, 8), P5)
    one_a_node = all_gather_seconds(size, Group(16, 1, 1, concurrent=8), P5)
    assert one_a_node / everyone == pytest.approx(356 / (50 * 0.93), rel=0.1)  # NVLink limits the first at 356 GB/s


def test_all_reduce_between_two_domains_crosses_the_network_once() -> None:
    """Published: 78 GB/s of bus bandwidth on two p4de nodes with 50 GB/s of network; a ring could not pass 50."""
    size = 2 * 2**30
    bus_bandwidth = 2 * 15 / 16 * size / all_reduce_seconds(size, Group(16, 8, 8), P4D)
    assert bus_bandwidth == pytest.approx(78.3e9, rel=0.1)


def test_the_switch_reduces_only_for_all_reduce_and_large_enough_groups() -> None:
    size = 8 * 2**30
    bus_bandwidth = {n: 2 * (n - 1) / n * size / all_reduce_seconds(size, Group(n, n, n), P5) for n in (4, 8)}
    gather_bandwidth = 7 / 8 * size / all_gather_seconds(size, Group(8, 8, 8), P5)
    assert bus_bandwidth[8] == pytest.approx(473e9, rel=0.07)  # H200, stas00/ml-engineering, as the two below
    assert bus_bandwidth[4] == pytest.approx(363e9, rel=0.07)
    assert gather_bandwidth == pytest.approx(361e9, rel=0.07)


def test_an_ultraserver_keeps_72_ranks_off_the_network() -> None:
    group = Group(72, 72, 4)
    without_network = replace(ULTRASERVER, nic_bytes_per_second=1.0)
    for operation in OPERATIONS:
        assert operation(1e9, group, ULTRASERVER) == operation(1e9, group, without_network)


def test_point_to_point_uses_one_interface() -> None:
    assert 1e10 / point_to_point_seconds(1e10, False, INFINIBAND) == pytest.approx(47e9, rel=0.05)  # nccl-tests #290
    assert point_to_point_seconds(1e8, True, P5) < point_to_point_seconds(1e8, False, P5) / 5


def test_unknown_hardware_takes_the_nearest_constants() -> None:
    assert network("blackwell-ultra", 900e9, 8, 8, 100e9, 5) == replace(
        network("blackwell", 900e9, 8, 8, 100e9, 4), efa_version=5
    )
    future = network("rubin", 1800e9, 144, 8, 200e9, 0)
    assert future.nvlink_efficiency == P5.nvlink_efficiency
    assert PCIE.nvlink_domain == 8  # the node stands in for the domain
    assert not PCIE.nvls
