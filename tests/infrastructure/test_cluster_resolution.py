"""What a job says under `cluster:` becomes nodes, storage and a price; the user's word wins."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from craton.infrastructure import CatalogError, Cluster, Price, cluster, cluster_of, resolve_cluster
from craton.infrastructure.local import LocalMachine, instance_of_machine
from craton.infrastructure.microbenchmark import Measurement
from craton.job.cluster import ClusterRef, PriceNumbers, load_cluster

TIB = 2.0**40


def from_file(tmp_path: Path, text: str, num_nodes: int | None = None) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    file = load_cluster(path)
    return resolve_cluster(ClusterRef(instance=file.machine, num_nodes=num_nodes or file.nodes.num_nodes, file=file))


def test_a_catalog_name_and_a_count() -> None:
    found = resolve_cluster(ClusterRef(instance="p5en", num_nodes=16, min_nodes=4))
    assert found.name == "p5en.48xlarge x 16"
    assert (found.num_gpus, found.min_nodes) == (128, 4)
    assert (found.leaf_nodes, found.spine_nodes) == (0, 0)
    assert found.price is not None
    assert (found.price.kind, found.price.dollars_per_hour) == ("on-demand", 63.296)
    assert list(found.tiers) == ["peer", "nvme", "shared", "object"]


def test_default_storage_says_that_it_is_assumed() -> None:
    tiers = cluster_of("p5.48xlarge", 4).tiers
    assert tiers["nvme"].read_bytes_per_second == 4 * 24e9
    assert tiers["nvme"].client_read_bytes_per_second == 24e9
    assert tiers["nvme"].capacity_bytes == pytest.approx(4 * 30.4e12)
    assert tiers["peer"].client_write_bytes_per_second == 200e9  # half of 400 GB/s
    assert tiers["shared"].read_bytes_per_second == 48e9
    assert tiers["shared"].capacity_bytes == 48 * TIB
    assert "48 TiB (assumed)" in tiers["shared"].source
    assert tiers["object"].read_bytes_per_second == 4 * tiers["object"].client_read_bytes_per_second


def test_one_node_never_reads_faster_than_its_network() -> None:
    assert (
        cluster_of("g5.48xlarge", 1, network_bytes_per_second=1e9).tiers["shared"].client_read_bytes_per_second == 1e9
    )


@pytest.mark.parametrize(
    ("name", "kind"), [("p5.48xlarge", "on-demand"), ("p5e", "capacity-block"), ("u-p6e-gb200x72", "capacity-block")]
)
def test_purchase_kind_by_default(name: str, kind: str) -> None:
    price = cluster_of(name, 2).price
    assert price is not None
    assert price.kind == kind


def test_purchase_kind_on_request() -> None:
    price = cluster_of("p5.48xlarge", 2, purchase="spot").price
    assert price is not None
    assert price.dollars_per_hour == 20.6424
    with pytest.raises(
        CatalogError, match=r"no on-demand price is known for p5e\.48xlarge; listed: capacity-block, spot"
    ):
        cluster_of("p5e", 2, purchase="on-demand")


def test_a_system_without_a_price_has_none() -> None:
    assert cluster_of("DGX-H100", 2).price is None


def test_the_user_s_price_wins() -> None:
    ref = ClusterRef(instance="p5.48xlarge", num_nodes=2)
    own = PriceNumbers(dollars_per_hour=30.0, date=date(2026, 11, 1))
    assert resolve_cluster(ref, price=own).price == Price(30.0, "own", date(2026, 11, 1), source="your own")


def test_price_of_the_cluster_file_wins_over_the_catalog(tmp_path: Path) -> None:
    text = (
        "name: lab\ninstance: p5.48xlarge\nnodes: 2\nprices: [{dollars_per_hour: 33, kind: spot, date: 2026-10-01}]\n"
    )
    price = from_file(tmp_path, text).price
    assert price is not None
    assert (price.dollars_per_hour, price.kind, price.date) == (33, "spot", date(2026, 10, 1))


def test_cluster_file(tmp_path: Path) -> None:
    found = from_file(
        tmp_path,
        """
name: lab
instance: p5en.48xlarge
nodes: 16
spares: 2
levels: {leaf: {nodes: 8, oversubscription: 2.0}, spine: {nodes: 64}}
storage:
  nvme: {path: /scratch, read_bytes_per_second: 40GB/s, write_bytes_per_second: 20GB/s}
  shared: {path: /fsx, megabytes_per_second_per_tib: 250, capacity_bytes: 96TiB}
  object: {path: "s3://bucket/runs"}
scheduler: {kind: slurm, partition: p5}
health: {failures_per_node_day: 0.005}
""",
    )
    assert found.name == "lab (p5en.48xlarge) x 14 + 2 spares"
    assert (found.num_nodes, found.spare_nodes) == (14, 2)
    assert (found.leaf_nodes, found.spine_nodes, found.spine_oversubscription) == (8, 64, 2.0)
    assert (found.scheduler, found.failures_per_node_day) == ("slurm", 0.005)
    assert found.tiers["nvme"].client_read_bytes_per_second == 40e9
    assert found.tiers["nvme"].path == "/scratch"
    assert found.tiers["shared"].read_bytes_per_second == pytest.approx(24e9)
    assert found.tiers["shared"].path == "/fsx"
    assert found.tiers["object"].path == "s3://bucket/runs"


def test_part_of_a_cluster_leaves_the_spares_alone(tmp_path: Path) -> None:
    text = "name: lab\ninstance: p5.48xlarge\nnodes: 16\nspares: 2\n"
    assert from_file(tmp_path, text, num_nodes=8).num_nodes == 8


def test_own_hardware(tmp_path: Path) -> None:
    found = from_file(
        tmp_path,
        """
name: basement
nodes: 3
hardware:
  name: rtx-box
  num_gpus: 4
  host_link: pcie4
  network_bytes_per_second: 25Gbps
  host_memory_bytes: 512GiB
  gpu: {name: RTX-6000, generation: ada, flops: {bf16: 364T}, memory_bytes: 48GiB, memory_bytes_per_second: 960GB/s}
storage:
  nvme: {path: /data}
  shared: {path: /nfs, kind: nfs, read_bytes_per_second: 2GB/s}
prices: [{dollars_per_hour: 4}]
""",
    )
    node = found.instance
    assert (found.num_gpus, node.gpu.flops["bf16"]) == (12, 364e12)
    assert node.nvlink_domain_gpus == 1  # no NVLink was stated
    assert node.host_link_bytes_per_second == 31e9
    assert node.network_bytes_per_second == 25e9 / 8
    assert found.tiers["shared"].write_bytes_per_second == 2e9
    assert found.tiers["shared"].kind == "nfs"
    assert found.tiers["nvme"].client_read_bytes_per_second == 3e9  # one ordinary drive
    assert found.price is not None
    assert found.price.kind == "own"


def test_nfs_without_a_rate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"storage\.shared is nfs.*give read_bytes_per_second"):
        from_file(tmp_path, "name: lab\ninstance: p5\nnodes: 2\nstorage: {shared: {path: /nfs, kind: nfs}}\n")


def test_unknown_instance() -> None:
    with pytest.raises(CatalogError, match=r"did you mean 'p5\.48xlarge'"):
        resolve_cluster(ClusterRef(instance="p5.48xlarg", num_nodes=1))


def test_overrides_for_published_machines() -> None:
    found = cluster_of("DGX-H100", 6, gpu="H200-SXM", num_gpus=4, network_bytes_per_second=200e9, leaf_nodes=3)
    assert (found.num_gpus, found.instance.gpu.name) == (24, "H200-SXM")
    assert found.instance.nvlink_domain_gpus == 4
    assert found.leaf_nodes == 3
    assert found.tiers["peer"].client_read_bytes_per_second == 100e9
    assert cluster_of("GB200-NVL72", 18, num_gpus=2).instance.nvlink_domain_gpus == 72
    with pytest.raises(TypeError, match="cannot override 'num_gpu'; did you mean 'num_gpus'"):
        cluster_of("DGX-H100", 1, num_gpu=4)


def test_local_nodes_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime

    measured = Measurement(100e9, 50e9, "torch", 20e9, 5e9, 0.1)
    machine = LocalMachine("cpu", 8, 64e9, measured, datetime(2026, 11, 15, tzinfo=UTC))
    monkeypatch.setattr(cluster, "local_instance", lambda shares, _: instance_of_machine(machine, shares))
    found = resolve_cluster(ClusterRef(instance="local", num_nodes=2))
    assert (found.name, found.num_gpus, found.scheduler) == ("local x 2", 2, "local")
    assert found.instance.gpu.generation == "cpu"
    assert found.num_gpus * found.instance.gpu.flops["fp32"] == 100e9
    assert found.num_gpus * found.instance.gpu.memory_bytes == 64e9
    assert found.instance.network_bytes_per_second == 5e9
    assert found.price is None
    assert found.tiers["shared"].read_bytes_per_second == found.tiers["nvme"].read_bytes_per_second == 2e9
