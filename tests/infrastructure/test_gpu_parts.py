"""Nodes that share the GPUs of this machine get equal parts of them, as many as their memory allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpus import H200_MIB, machine_with_h200s

from craton.infrastructure import (
    CatalogError,
    memory_fraction,
    nodes_per_gpu,
    resolve_cluster,
    visible_accelerators,
    with_measured_host,
)
from craton.infrastructure.catalog import gpu
from craton.infrastructure.local import SHARED_LOOPBACK_BYTES_PER_SECOND, local_instance
from craton.infrastructure.sharing import RUNTIME_BYTES
from craton.job.cluster import ClusterRef


def test_a_node_has_its_part_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_h200s(tmp_path, monkeypatch)
    cluster = resolve_cluster(ClusterRef(instance="local", num_nodes=4), share_gpus=True)
    node, whole = cluster.instance, gpu("H200-SXM")
    assert (cluster.name, cluster.num_gpus, node.num_gpus, node.nodes_per_gpu) == ("local x 4", 4, 1, 4)
    assert node.gpu.name == whole.name, "the profile of the whole GPU applies"
    assert node.gpu.peak_flops("bf16") == whole.peak_flops("bf16") / 4
    assert node.gpu.memory_bytes == whole.memory_bytes / 4
    assert node.gpu.memory_bytes_per_second == whole.memory_bytes_per_second / 4
    assert (node.nvlink_domain_gpus, node.network_bytes_per_second) == (1, SHARED_LOOPBACK_BYTES_PER_SECOND)


@pytest.mark.parametrize(("num_nodes", "sharers", "num_gpus"), [(1, 1, 2), (2, 1, 1), (4, 2, 1), (6, 3, 1)])
def test_only_more_nodes_than_gpus_share(
    num_nodes: int, sharers: int, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with_h200s(tmp_path, monkeypatch, count=2)
    node = local_instance(num_nodes, share_gpus=True)
    assert (node.nodes_per_gpu, node.num_gpus) == (sharers, num_gpus)


def test_the_host_is_that_of_the_gpus_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_h200s(tmp_path, monkeypatch)
    monkeypatch.setattr("craton.infrastructure.cluster.host_operation_seconds", lambda: 5e-6)
    here = resolve_cluster(ClusterRef(instance="local", num_nodes=4), share_gpus=True)
    assert with_measured_host(here).instance.gpu.operation_seconds == 5e-6
    elsewhere = resolve_cluster(ClusterRef(instance="p5.48xlarge", num_nodes=1))
    assert with_measured_host(elsewhere) is elsewhere


def test_tensors_leave_room_for_cuda_and_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_h200s(tmp_path, monkeypatch)
    total = H200_MIB * 2**20
    for ranks in (2, 4, 8):
        assert ranks * (memory_fraction(visible_accelerators(), ranks) * total + RUNTIME_BYTES) == pytest.approx(total)


@pytest.mark.parametrize(
    ("gpus", "num_nodes", "message"),
    [
        (
            0,
            4,
            r"local x 4 with share_gpus needs a GPU, and this machine shows none .*remove share_gpus to use the CPU",
        ),
        (2, 5, r"local x 5 with share_gpus cannot divide its ranks among 2 GPUs equally; use local x 4 or local x 6"),
        (
            1,
            200,
            r"200 ranks cannot share a GPU of 140 GiB: 719 MiB each, where CUDA and NCCL alone take 1.00 GiB; use at "
            r"most 70 per GPU, here local x 70",
        ),
    ],
)
def test_parts_that_cannot_be_made_say_what_can(
    gpus: int, num_nodes: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with_h200s(tmp_path, monkeypatch, gpus)
    with pytest.raises(CatalogError, match=message):
        nodes_per_gpu(visible_accelerators(), num_nodes)


def test_a_small_gpu_is_not_shared_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_h200s(tmp_path, monkeypatch, count=1)
    small = [replace(card, memory_bytes=3 * 2**30) for card in visible_accelerators()]
    with pytest.raises(CatalogError, match=r"2 ranks cannot share a GPU of 3\.00 GiB: .*; remove share_gpus"):
        memory_fraction(small, 2)


def test_without_the_flag_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_h200s(tmp_path, monkeypatch, count=2)
    with pytest.raises(CatalogError, match=r"cannot split 2 GPUs equally; .*`run: {share_gpus: true}` or --share-gpus"):
        local_instance(4)
    machine_with_h200s(tmp_path, monkeypatch, count=4)
    with pytest.raises(CatalogError, match="cannot split 4 GPUs equally") as caught:
        local_instance(3)
    assert "share" not in str(caught.value), "three nodes need not share four GPUs"
