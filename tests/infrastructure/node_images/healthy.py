"""One healthy node of each kind that Craton knows best."""

from __future__ import annotations

from collections.abc import Callable

from infrastructure.node_images.node import GIB, Card, Node, Port

GPU_MODULES = {"gdrdrv": "2.5.1", "nvidia_fs": "2.26.6"}
PACKAGES = {
    "torch": "2.11.0+cu130",
    "triton": "3.7.0",
    "nvidia-nccl-cu13": "2.30.3",
    "flash_attn": "2.8.3",
    "transformer_engine": "2.9.0",
    "nixl": "0.7.1",
    "ucx-py": "0.46.0",
}
ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_HUGE_PAGE": "0",
    "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
    "NCCL_DEBUG": "WARN",
}
COUNTERS = {"tx_bytes": 9 * 10**14, "rx_bytes": 9 * 10**14, "retrans_bytes": 10**9, "rdma_read_wrs": 10**9}


def p5() -> Node:
    cards = _cards("NVIDIA H100 80GB HBM3", 81559, 700, pcie=4)
    return _ec2("p5.48xlarge", cards, ports=32, gigabits=100, bound=8)


def p5en() -> Node:
    return _ec2("p5en.48xlarge", _cards("NVIDIA H200", 143771, 700), ports=16, gigabits=200, bound=8)


def p6_b200() -> Node:
    """With the two ports of its NVLink switches, which are not EFA."""
    cards = _cards("NVIDIA B200", 183359, 1000, rate=53.125)
    node = _ec2("p6-b200.48xlarge", cards, ports=8, gigabits=400, bound=8)
    node.ports += [
        Port(f"ibp{number}s0f0", driver="mlx5_core", rate="400 Gb/sec (4X NDR)", layer="InfiniBand")
        for number in (115, 116)
    ]
    return node


def p6_b300() -> Node:
    cards = _cards("NVIDIA B300 SXM6 AC", 275040, 1400, rate=53.125)
    node = _ec2("p6-b300.48xlarge", cards, ports=16, gigabits=400, bound=16)
    node.memory_gib = 4096
    return node


def p5_pod() -> Node:
    """A container on Kubernetes, given everything of its node."""
    node = p5()
    node.name, node.environment = "train-0", {**ENVIRONMENT, "KUBERNETES_SERVICE_HOST": "172.20.0.1"}
    node.files["proc/self/cgroup"] = "0::/kubepods.slice/pod1"
    return node


def lab() -> Node:
    """Eight H100 with eight InfiniBand ports, and one more for storage, in a rack of one's own."""
    node = Node(
        product="SYS-821GE-TNHR",
        vendor="Supermicro",
        name="lab1",
        cards=_cards("NVIDIA H100 80GB HBM3", 81559, 700),
        ports=[
            Port(f"mlx5_{number}", driver="mlx5_core", rate="400 Gb/sec (4X NDR)", layer="InfiniBand")
            for number in range(8)
        ],
        modules={"nvidia_peermem": "580.95.05", "gdrdrv": "2.5.1"},
        devices=["gdrdrv"],
        packages=dict(PACKAGES),
        environment={"NCCL_DEBUG": "WARN"},
        kernel="5.15.0-130-generic",
        installer="",
        open_modules=False,
        drives=2,
        drive_model="SAMSUNG MZWLO3T8HCLS",
        hugepages=0,
    )
    node.ports.append(Port("mlx5_8", driver="mlx5_core", rate="200 Gb/sec (4X HDR)", layer="InfiniBand"))
    return node


def cpu_machine() -> Node:
    """Two processors in a container, no GPU, nobody who keeps the clock."""
    return Node(
        name="vm",
        processors=2,
        numa_nodes=1,
        memory_gib=24,
        drives=0,
        installer="",
        hugepages=0,
        shared_memory_kib=24 * GIB // 1024 // 2,
        limits={"locked memory": "8388608", "open files": "20000"},
        packages={"torch": "2.13.0+cpu", "triton": "3.9.0"},
        removed=["commands/chronyc.txt"],
        files={".dockerenv": ""},
    )


HEALTHY: dict[str, Callable[[], Node]] = {
    "p5": p5,
    "p5en": p5en,
    "p6-b200": p6_b200,
    "p6-b300": p6_b300,
    "p5-pod": p5_pod,
    "lab-h100": lab,
    "cpu": cpu_machine,
}


def lab_cluster_file() -> str:
    """What the lab says of its nodes."""
    return """
name: lab
hardware: {name: lab-h100, gpu: H100-SXM, num_gpus: 8, network_bytes_per_second: 400 GB/s, network_interfaces: 8}
nodes: 4
"""


def _cards(name: str, memory_mib: int, power_watts: int, pcie: int = 5, rate: float = 26.562) -> list[Card]:
    return [
        Card(name, f"0000:{bus:02x}:00.0", memory_mib, power_watts, [rate] * 18, pcie)
        for bus in range(0x53, 0x53 + 8 * 0x10, 0x10)
    ]


def _ec2(product: str, cards: list[Card], ports: int, gigabits: int, bound: int) -> Node:
    return Node(
        product=product,
        cards=cards,
        ports=[
            Port(f"rdmap{79 + number}s0", rate=f"{gigabits} Gb/sec (4X)", counters=dict(COUNTERS))
            for number in range(ports)
        ],
        modules={**GPU_MODULES, "efa": "3.0.0"},
        devices=["gdrdrv"],
        packages=dict(PACKAGES),
        environment=dict(ENVIRONMENT),
        lustre=True,
        lustre_efa=bound,
        lustre_service=True,
    )
