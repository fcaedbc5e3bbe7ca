"""What a job may say under `cluster:`, and the cluster file it may point at."""

from __future__ import annotations

from pathlib import Path

import pytest

from craton.errors import CratonError
from craton.job import ContentError, Job, dump_job, parse_job
from craton.job.cluster import ClusterRef, GpuNumbers, load_cluster

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"

CLUSTER = """\
name: lab
instance: p5.48xlarge
nodes: 64
levels:
  leaf: {nodes: 16, label: topology.k8s.aws/network-node-layer-3}
  spine: {nodes: 64, oversubscription: 2}
storage:
  shared: {path: /fsx, kind: lustre, megabytes_per_second_per_tib: 500, capacity_bytes: 96TiB}
scheduler: {kind: slurm, partition: p5, account: lab}
prices: [{dollars_per_hour: 41.5, kind: capacity-block, date: 2026-09-19}]
spares: 2
health: {failures_per_node_day: 0.004, policy: drain}
"""


def job_with(cluster: str) -> Job:
    return parse_job(f"kind: command\ncommand: ls\ncluster: {cluster}\n")


def cluster_of(text: str, folder: Path | str = ".") -> ClusterRef:
    return parse_job(f"kind: command\ncommand: [hostname]\ncluster: {text}\n", folder=folder).cluster


def write(folder: Path, text: str) -> Path:
    file = folder / "lab.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "instance", "min_nodes", "num_nodes"),
    [
        ("p5en.48xlarge x 16", "p5en.48xlarge", 0, 16),
        ("p5.48xlarge x 2..8", "p5.48xlarge", 2, 8),
        ("p5.48xlarge × 4", "p5.48xlarge", 0, 4),
        ("u-p6e-gb200x72", "u-p6e-gb200x72", 0, 1),
        ("local", "local", 0, 1),
        ("local x 2", "local", 0, 2),
    ],
)
def test_references(text: str, instance: str, min_nodes: int, num_nodes: int) -> None:
    reference = cluster_of(text)
    assert (reference.instance, reference.min_nodes, reference.num_nodes) == (instance, min_nodes, num_nodes)
    assert reference.file is None
    assert reference.is_local == (instance == "local")


def test_a_cluster_file_is_found_beside_the_job(tmp_path: Path) -> None:
    write(tmp_path, CLUSTER)
    reference = cluster_of("lab.yaml", tmp_path)
    assert (reference.instance, reference.num_nodes, str(reference)) == ("p5.48xlarge", 64, "lab (p5.48xlarge) x 64")
    assert reference.file is not None
    assert reference.file.levels.leaf is not None
    assert reference.file.levels.leaf.nodes == 16
    assert reference.file.storage.shared is not None
    assert reference.file.storage.shared.capacity_bytes == 96 * 2**40
    assert cluster_of("./lab.yaml x 8", tmp_path).num_nodes == 8
    with pytest.raises(ContentError, match=r"job.yaml:3: cluster: 65 nodes requested, but lab.yaml has 64"):
        cluster_of("lab.yaml x 65", tmp_path)


def test_the_same_inline() -> None:
    reference = cluster_of("{name: lab, instance: p5.48xlarge, nodes: 2..4}")
    assert (reference.instance, reference.min_nodes, reference.num_nodes) == ("p5.48xlarge", 2, 4)


def test_some_nodes_of_an_inline_cluster() -> None:
    inline = "{name: lab, instance: p5.48xlarge, nodes: 16, spares: 2, take: %s}"
    job = job_with(inline % 2)
    assert (str(job.cluster), job.cluster.file and job.cluster.file.nodes.num_nodes) == ("lab (p5.48xlarge) x 2", 16)
    assert parse_job(dump_job(job)) == job
    assert str(job_with(inline % "4..8").cluster) == "lab (p5.48xlarge) x 4..8"
    with pytest.raises(ContentError, match="17 nodes requested, but the cluster has 16"):
        job_with(inline % 17)


def test_own_hardware_with_measured_numbers() -> None:
    hardware = load_cluster(EXAMPLES / "lab-h100.yaml").hardware
    assert hardware is not None
    assert isinstance(hardware.gpu, GpuNumbers)
    assert hardware.gpu.achievable_flops["bf16"] == 760e12
    assert hardware.network_bytes_per_second == 400e9
    assert load_cluster(EXAMPLES / "lab-h100.yaml").machine == "dgx-h100"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_load(file: Path) -> None:
    assert load_cluster(file).name == file.stem


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("instance:", "instnce:", "lab.yaml:2: key 'instnce' is not known at the top; .*did you mean 'instance'"),
        ("instance: p5.48xlarge\n", "", "give `instance:` .* or `hardware:`"),
        ("nodes: 64\n", "nodes: few\n", "lab.yaml:3: nodes: 'few' is not a number of nodes"),
        ("spine: {nodes: 64", "spine: {nodes: 8", "spine has 8 nodes, fewer than the 16 of leaf .*lines 5 and 6"),
        (
            "leaf: {nodes: 16, label",
            "leaf: {nodes: 16, lable",
            "lab.yaml:5: key 'lable' .* under levels.leaf; .*'label'",
        ),
        ("kind: lustre", "kind: lustra", "lab.yaml:8: storage.shared.kind: 'lustra' is not allowed; .*'lustre'"),
        (", capacity_bytes: 96TiB", "", "lab.yaml:8: storage: megabytes_per_second_per_tib requires capacity_bytes"),
        ("96TiB", "96 shelves", "storage.shared.capacity_bytes: '96 shelves' is not a size in bytes"),
        ("account: lab", "queue: lab", "lab.yaml:9: scheduler: queue does not apply to slurm"),
        (
            "kind: slurm, partition: p5, account: lab",
            "kind: kubernetes, resources: {nvidia.com/gpu: 8}",
            "lab.yaml:9: scheduler.resources: nvidia.com/gpu is derived from the instance type; remove it",
        ),
        (
            "kind: slurm, partition: p5, account: lab",
            "kind: kubernetes, resources: {hca: 1}",
            "scheduler.resources: 'hca' is not a device plugin resource; write its full name",
        ),
        (
            "kind: slurm, partition: p5, account: lab",
            "kind: kubernetes, resources: {rdma/hca: some}",
            "lab.yaml:9: scheduler.resources.*'some'",
        ),
        ("account: lab", "resources: {rdma/hca: 1}", "lab.yaml:9: scheduler: resources does not apply to slurm"),
        ("dollars_per_hour: 41.5", "dollars_per_hour: -1", r"lab.yaml:10: prices\[0\].dollars_per_hour: -1"),
        ("spares: 2", "spares: 64", "lab.yaml:11: cluster: 64 spares of 64 nodes leave no working node"),
        ("policy: drain", "policy: pray", "health.policy: 'pray' is not allowed; allowed: observe, drain, replace"),
    ],
)
def test_a_mistake_names_the_cluster_files_own_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in CLUSTER
    write(tmp_path, CLUSTER.replace(old, new))
    with pytest.raises(ContentError, match=says):
        cluster_of("lab.yaml", tmp_path)


def test_problems_of_gpu_numbers_are_found_where_they_stand(tmp_path: Path) -> None:
    text = (EXAMPLES / "lab-h100.yaml").read_text().replace("    memory_bytes:", "    memory_byts:")
    line = next(number for number, line in enumerate(text.splitlines(), start=1) if "memory_byts" in line)
    file = write(tmp_path, text)
    with pytest.raises(ContentError) as caught:
        load_cluster(file)
    assert any(
        f":{line}: key 'memory_byts' is not known under hardware.gpu" in line_ for line_ in caught.value.problems
    )


def test_a_missing_cluster_file_is_told_with_the_jobs_line(tmp_path: Path) -> None:
    with pytest.raises(CratonError, match=r"job.yaml:3: cluster: .*gone.yaml: no such file"):
        cluster_of("gone.yaml", tmp_path)
