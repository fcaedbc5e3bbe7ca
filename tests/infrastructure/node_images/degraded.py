"""Every way we know for a node to be degraded without saying so: from a healthy one by one change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infrastructure.node_images.healthy import HEALTHY
from infrastructure.node_images.node import Node

XID = "[ 4242.000000] NVRM: Xid (PCI:0000:63:00): "
REASON = "clocks_event_reasons/clocks_event_reason_"
LINK = "pci/pci_gpu_link_info"


@dataclass(frozen=True)
class Degraded:
    """A node with one thing wrong, and the finding that must name it."""

    name: str
    base: str
    what: str
    severity: str
    evidence: str  # a part of it
    change: Callable[[Node], Any]

    def node(self) -> Node:
        node = HEALTHY[self.base]()
        self.change(node)
        return node


def lose_card(node: Node) -> None:
    """The bus still shows it, the driver does not."""
    node.hidden_cards.append(node.cards.pop(1).bus)


def fall_off(node: Node) -> None:
    lose_card(node)
    node.log.append(f"{XID}79, GPU has fallen off the bus.")


def fail_remapping(node: Node) -> None:
    node.cards[1].xml["remapped_rows/remapped_row_failure"] = "Yes"
    node.log.append(f"{XID}64, pid='<unknown>', Row Remapper: failed")


def foreign_plugin(node: Node) -> None:
    """A container of HPC-X, whose plugin has the name of aws-ofi-nccl and comes first on the loader's way."""
    node.files["opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so"] = ""
    node.environment["LD_LIBRARY_PATH"] = "/opt/hpcx/nccl_rdma_sharp_plugin/lib"


def foreign_plugin_alone(node: Node) -> None:
    """The same on a node where aws-ofi-nccl was never installed."""
    node.plugin = ""
    foreign_plugin(node)


def foreign_plugin_of_the_system(node: Node) -> None:
    node.plugin = ""
    node.files["commands/ldconfig.txt"] = "\tlibnccl-net.so (libc6,x86-64) => /opt/hpcx/lib/libnccl-net.so"


def card(path: str, value: str, **more: str) -> Callable[[Node], None]:
    """One field of the second card."""
    return lambda node: node.cards[1].xml.update({path: value, **more})


def every_card(path: str, value: str) -> Callable[[Node], None]:
    return lambda node: [each.xml.update({path: value}) for each in node.cards] and None


def log(*lines: str) -> Callable[[Node], None]:
    return lambda node: node.log.extend(lines)


def variable(name: str, value: str) -> Callable[[Node], None]:
    return lambda node: node.environment.update({name: value})


def change(**fields: Any) -> Callable[[Node], None]:
    return lambda node: [setattr(node, name, value) for name, value in fields.items()] and None


def counter(name: str, value: int) -> Callable[[Node], None]:
    return lambda node: node.ports[3].counters.update({name: value})


def break_link(node: Node) -> None:
    node.cards[1].links[7] = 0.0


def mix_cards(node: Node) -> None:
    node.cards[3].name = "NVIDIA H100 80GB HBM3"


def hide_verbs(node: Node) -> None:
    for port in node.ports:
        port.visible = False


def in_container_without_verbs(node: Node) -> None:
    node.ports.clear()
    node.files[".dockerenv"] = ""


def mount_all_verbs(node: Node) -> None:
    """A pod with /dev/infiniband of its host: libfabric cannot open the switches' ports, and finds no EFA at all."""
    node.environment["KUBERNETES_SERVICE_HOST"] = "172.20.0.1"
    node.files["commands/fi_info.txt"] = "exit 61\nfi_getinfo: -61 (No data available)"


def no_hugepages(node: Node) -> None:
    node.hugepages = 0
    del node.environment["FI_EFA_USE_HUGE_PAGE"]


def slow_port(node: Node) -> None:
    node.ports[2].rate = "200 Gb/sec (4X HDR)"


def port_down(node: Node) -> None:
    node.ports[2].state = "1: DOWN"


def limit_memory(node: Node) -> None:
    node.limits["locked memory"] = "65536"


DEGRADED = [
    Degraded("seven of eight GPUs", "p5", "gpu_count", "fail", "7 of 8 GPUs", lose_card),
    Degraded(
        "wrong GPUs", "p5en", "gpu_model", "fail", "NVIDIA A100", every_card("product_name", "NVIDIA A100-SXM4-80GB")
    ),
    Degraded("mixed GPUs", "p5en", "gpu_model", "fail", "different GPUs", mix_cards),
    Degraded(
        "nvidia-smi fails",
        "p5",
        "gpu_driver",
        "fail",
        "Driver/library version mismatch",
        lambda node: node.files.update(
            {"commands/nvidia-smi.txt": "exit 18\nFailed to initialize NVML: Driver/library version mismatch"}
        ),
    ),
    Degraded(
        "nvidia-smi hangs",
        "p5",
        "gpu_driver",
        "fail",
        "timed out",
        lambda node: node.files.update({"commands/nvidia-smi.txt": "exit 124\n-"}),
    ),
    Degraded("a link is down", "p5", "nvlink", "fail", "17 of 18 NVLinks up: link 7", break_link),
    Degraded(
        "fabric manager not running",
        "p5en",
        "nvlink_fabric",
        "fail",
        "In Progress",
        card("fabric/state", "In Progress"),
    ),
    Degraded(
        "uncorrectable ECC errors",
        "p5",
        "gpu_memory",
        "fail",
        "3 uncorrectable",
        card("ecc_errors/volatile/dram_uncorrectable", "3"),
    ),
    Degraded(
        "SRAM threshold exceeded",
        "p5en",
        "gpu_memory",
        "fail",
        "threshold",
        card("ecc_errors/aggregate/sram_threshold_exceeded", "Yes"),
    ),
    Degraded("ECC off", "p5", "gpu_memory", "warn", "ECC is disabled", card("ecc_mode/current_ecc", "Disabled")),
    Degraded(
        "row remap pending",
        "p5",
        "gpu_row_remap",
        "warn",
        "a row remapping is pending",
        card("remapped_rows/remapped_row_pending", "Yes"),
    ),
    Degraded(
        "row remap failed",
        "p6-b200",
        "gpu_row_remap",
        "fail",
        "could not be remapped",
        card("remapped_rows/remapped_row_failure", "Yes"),
    ),
    Degraded(
        "memory channel to repair",
        "p6-b300",
        "gpu_memory",
        "warn",
        "repair is pending",
        card("ecc_errors/channel_repair_pending", "Yes"),
    ),
    Degraded(
        "the driver asks for a reset", "p5en", "gpu_recovery", "fail", "`Reset`", card("gpu_recovery_action", "Reset")
    ),
    Degraded(
        "a hot card",
        "p5",
        "gpu_throttle",
        "fail",
        "hw_thermal_slowdown at 855 of 1980 MHz, 92 °C",
        card(
            f"{REASON}hw_thermal_slowdown", "Active", **{"clocks/sm_clock": "855 MHz", "temperature/gpu_temp": "92 C"}
        ),
    ),
    Degraded(
        "a lowered power limit",
        "p5en",
        "gpu_throttle",
        "warn",
        "500 W",
        card("gpu_power_readings/current_power_limit", "500.00 W"),
    ),
    Degraded(
        "persistence off", "p5", "gpu_persistence", "warn", "GPU 0, 1", every_card("persistence_mode", "Disabled")
    ),
    Degraded("MIG on", "p5en", "gpu_mig", "warn", "GPU 1", card("mig_mode/current_mig", "Enabled")),
    Degraded(
        "half the lanes",
        "lab-h100",
        "gpu_pcie",
        "fail",
        "x8 of x16",
        card(f"{LINK}/link_widths/current_link_width", "8x"),
    ),
    Degraded(
        "an old PCIe generation under load",
        "lab-h100",
        "gpu_pcie",
        "warn",
        "PCIe 3 of 5 under load",
        card(f"{LINK}/pcie_gen/current_link_gen", "3", **{f"{REASON}gpu_idle": "Not Active"}),
    ),
    Degraded(
        "XID 79",
        "p5",
        "xid",
        "fail",
        "GPU 0000:63:00: XID 79, GPU has fallen off the bus",
        fall_off,
    ),
    Degraded(
        "XID 64",
        "p5en",
        "xid",
        "fail",
        "XID 64, row remapping failed",
        fail_remapping,
    ),
    Degraded(
        "XID 154 after XID 31",
        "p6-b200",
        "xid",
        "fail",
        "XID 154 requests `Node Reboot Required`",
        log(
            f"{XID}31, pid=4711, name=python, MMU Fault",
            f"{XID}154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        ),
    ),
    Degraded(
        "a fatal SXID",
        "p5",
        "xid",
        "fail",
        "SXID 20034",
        log("[ 9.0] nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"),
    ),
    Degraded("EFA missing", "p5", "efa_count", "fail", "31 of 32 EFA devices", lambda node: node.ports.pop()),
    Degraded("no EFA at all", "p5en", "efa_count", "fail", "0 of 16 EFA devices", lambda node: node.ports.clear()),
    Degraded("EFA not given to the pod", "p5-pod", "efa_count", "fail", "0 of 32 EFA devices are in /dev", hide_verbs),
    Degraded("EFA not given: libfabric", "p5-pod", "libfabric", "fail", "-61", hide_verbs),
    Degraded(
        "ten instead of eight",
        "p6-b200",
        "efa_foreign_devices",
        "fail",
        "has 10 devices, of which 8 are EFA",
        mount_all_verbs,
    ),
    Degraded("plugin missing", "p5", "nccl_plugin", "fail", "aws-ofi-nccl is missing", change(plugin="")),
    Degraded("plugin not found", "p5en", "nccl_plugin", "fail", "neither ldconfig", change(plugin_on_path=False)),
    Degraded(
        "another plugin in front",
        "p5",
        "nccl_plugin",
        "fail",
        "/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so, which lacks EFA, and /opt/amazon/ofi-nccl",
        foreign_plugin,
    ),
    Degraded(
        "another plugin alone",
        "p5en",
        "nccl_plugin",
        "fail",
        "/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so, which lacks EFA, and aws-ofi-nccl is missing",
        foreign_plugin_alone,
    ),
    Degraded(
        "another plugin by ldconfig",
        "p5",
        "nccl_plugin",
        "fail",
        "NCCL loads /opt/hpcx/lib/libnccl-net.so",
        foreign_plugin_of_the_system,
    ),
    Degraded("gdrdrv not loaded", "p5", "gdrcopy", "warn", "not loaded", lambda node: node.modules.pop("gdrdrv")),
    Degraded("no GPUDirect RDMA", "p5", "gpudirect_rdma", "fail", "neither nvidia_peermem", change(open_modules=False)),
    Degraded(
        "EFA retransmits", "p5", "efa_counters", "warn", "retrans_bytes: 2.2%", counter("retrans_bytes", 2 * 10**13)
    ),
    Degraded("one EFA idles", "p5en", "efa_counters", "warn", "less than half", counter("tx_bytes", 10**14)),
    Degraded("ports not given to the pod", "lab-h100", "infiniband", "fail", "0 of 8 InfiniBand ports are", hide_verbs),
    Degraded(
        "no port is seen in the pod",
        "lab-h100",
        "infiniband",
        "fail",
        "0 of 8 InfiniBand ports were given",
        in_container_without_verbs,
    ),
    Degraded("a port is down", "lab-h100", "infiniband", "fail", "mlx5_2 DOWN", port_down),
    Degraded("a port trained slower", "lab-h100", "infiniband", "warn", "mlx5_2 200", slow_port),
    Degraded("locked memory limited", "lab-h100", "locked_memory", "fail", "64.0 KiB", limit_memory),
    Degraded("NCCL_PROTO set", "p5", "environment", "warn", "NCCL_PROTO=simple", variable("NCCL_PROTO", "simple")),
    Degraded("sockets asked for", "p5en", "environment", "fail", "NCCL_NET=Socket", variable("NCCL_NET", "Socket")),
    Degraded("tcp provider", "p5", "environment", "fail", "FI_PROVIDER=tcp", variable("FI_PROVIDER", "tcp")),
    Degraded("RDMAV set", "p6-b300", "environment", "warn", "RDMAV_FORK_SAFE", variable("RDMAV_FORK_SAFE", "1")),
    Degraded(
        "InfiniBand switched off",
        "lab-h100",
        "environment",
        "fail",
        "NCCL_IB_DISABLE",
        variable("NCCL_IB_DISABLE", "1"),
    ),
    Degraded("Lustre with 2 of 8", "p5", "lustre_network", "warn", "2 of 8 EFA interfaces", change(lustre_efa=2)),
    Degraded("Lustre over TCP", "p5en", "lustre_network", "warn", "over tcp, not EFA", change(lustre_efa=0)),
    Degraded("a drive is gone", "p5", "nvme", "fail", "7 NVMe drives", change(drives=7)),
    Degraded("drives not mounted", "p6-b200", "nvme", "warn", "all 8 NVMe drives", change(drives_mounted=False)),
    Degraded("a container's 64 MiB", "p5-pod", "shared_memory", "fail", "64.0 MiB", change(shared_memory_kib=65536)),
    Degraded(
        "few open files", "p5", "open_files", "warn", "1,024", lambda node: node.limits.update({"open files": "1024"})
    ),
    Degraded("no huge pages", "p5", "hugepages", "warn", "0 huge pages", no_hugepages),
    Degraded(
        "clock not synchronised",
        "p5",
        "clock_sync",
        "warn",
        "not synchronised",
        lambda node: node.files.update({"commands/chronyc.txt": "Leap status     : Not synchronised"}),
    ),
    Degraded(
        "a slow clock",
        "lab-h100",
        "clock_source",
        "warn",
        "hpet",
        lambda node: node.files.update({"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}),
    ),
    Degraded(
        "powersave",
        "lab-h100",
        "governor",
        "warn",
        "powersave",
        lambda node: node.files.update(
            {
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq",
            }
        ),
    ),
    Degraded(
        "two processors for eight GPUs",
        "p5-pod",
        "control_group",
        "warn",
        "2 CPUs for 8 GPUs",
        lambda node: node.files.update({"sys/fs/cgroup/kubepods.slice/pod1/cpu.max": "200000 100000"}),
    ),
    Degraded("NCCL on an old installer", "p5", "known_bad", "fail", "efa_installer 1.28.0", change(installer="1.28.0")),
    Degraded(
        "CUDA 13 on an old driver",
        "p5en",
        "known_bad",
        "fail",
        "driver 570.86.15",
        change(driver="570.86.15", driver_cuda="12.8"),
    ),
    Degraded(
        "a plugin that does not know B200", "p6-b200", "known_bad", "warn", "aws_ofi_nccl 1.13", change(plugin="1.13.2")
    ),
    Degraded(
        "torch without Blackwell",
        "p6-b200",
        "known_bad",
        "fail",
        "cuda 12.4",
        lambda node: node.packages.update({"torch": "2.6.0+cu124"}),
    ),
    Degraded(
        "torch for processors",
        "p5",
        "torch",
        "fail",
        "+cpu",
        lambda node: node.packages.update({"torch": "2.11.0+cpu"}),
    ),
    Degraded("no triton", "lab-h100", "triton", "warn", "triton is missing", lambda node: node.packages.pop("triton")),
]
