"""Probes read what is there, say nothing of what is not, and never wait for a tool that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from infrastructure.node_images import HEALTHY, Node

from craton.infrastructure.probes import NodeRoot, is_in, probe_gpus, probe_node, read_xids, report_json
from craton.infrastructure.probes.disks import probe_disks
from craton.infrastructure.probes.host import probe_host
from craton.infrastructure.probes.software import cuda_of_torch


def image(node: Node, folder: Path) -> NodeRoot:
    return NodeRoot(node.write(folder))


def test_a_whole_node_is_read(tmp_path: Path) -> None:
    report = probe_node(image(HEALTHY["p5"](), tmp_path))
    assert (report.host.product, report.host.processors, report.host.numa_nodes) == ("p5.48xlarge", 192, 2)
    assert report.host.memory_bytes == 2048 * 2**30
    assert [card.index for card in report.gpus.cards] == list(range(8))
    assert report.gpus.cards[1].bus_id == "0000:63:00.0"
    assert report.gpus.cards[1].memory_bytes == 81559 * 2**20
    assert report.gpus.cards[1].is_idle
    assert len(report.gpus.cards[1].nvlinks) == 18
    assert report.gpus.open_modules
    assert len(report.fabric.efa) == len(report.fabric.libfabric.domains) == 32
    assert report.fabric.efa[0].counters["tx_bytes"] == 9 * 10**14
    assert len(report.disks.drives) == 8
    assert {place for drive in report.disks.drives for place in drive.mounted_at} == {"/local_scratch"}
    assert [each.network for each in report.disks.lustre.interfaces] == ["tcp", *["efa"] * 8]
    assert report.software.versions["efa_installer"] == "1.44.0"
    assert report.software.versions["libfabric"] == "2.3.1"
    assert report.software.versions["aws_ofi_nccl"] == "1.17.2"
    assert (report.software.versions["cuda"], report.software.versions["nccl"]) == ("13.0", "2.30.3")
    assert report.software.libraries["flash_attn"] == "2.8.3"


def test_an_empty_folder_is_a_node_of_which_nothing_is_known(tmp_path: Path) -> None:
    report = probe_node(NodeRoot(tmp_path))
    assert (report.gpus.cards, report.fabric.devices, report.disks.drives) == ((), (), ())
    assert report.gpus.error == "nvidia-smi is not installed"
    assert report.host.limits.open_files is None
    assert report.disks.shared_memory_bytes is None
    assert not report.kernel_log.is_readable


def test_this_machine_is_read_and_told_without_its_mounts() -> None:
    document = report_json(probe_node(NodeRoot()))
    assert document["host"]["processors"] >= 1
    assert document["host"]["memory_bytes"] > 2**28
    assert document["software"]["libraries"]["torch"]
    assert "mounts" not in document["disks"]


@pytest.mark.parametrize(
    "torn", ["<nvidia_smi_log><gpu>", "not XML at all", "exit 9\nUnable to determine the device handle"]
)
def test_what_nvidia_smi_says_may_be_torn(torn: str, tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.files["commands/nvidia-smi.txt"] = torn
    gpus = probe_gpus(image(node, tmp_path))
    assert (gpus.cards, len(gpus.on_bus)) == ((), 8)
    assert gpus.error
    assert gpus.driver_version == "580.95.05"  # from the kernel's side


def test_older_drivers_use_other_words(tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    text = image(node, tmp_path / "new").at("commands/nvidia-smi.txt").read_text(encoding="utf-8")
    text = text.replace("clocks_event_reason", "clocks_throttle_reason")
    text = text.replace("hw_slowdown>Not Active", "hw_slowdown>Active")
    text = text.replace("<gpu_recovery_action>None</gpu_recovery_action>", "")
    text = text.replace(
        "<ecc_mode>", "<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status><ecc_mode>"
    )
    text = text.replace("gpu_power_readings", "power_readings").replace("current_power_limit", "power_limit")
    node.files["commands/nvidia-smi.txt"] = text
    card = probe_gpus(image(node, tmp_path / "old")).cards[0]
    assert card.throttle == ("hw_slowdown",)
    assert card.recovery_action == "Reset"
    assert card.power_limit_watts == 700.0


def test_not_told_is_not_zero(tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    for name in ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"):
        node.cards[0].xml[f"ecc_errors/volatile/{name}"] = "N/A"
    node.cards[0].xml["ecc_mode/current_ecc"] = "N/A"
    first, second = probe_gpus(image(node, tmp_path)).cards[:2]
    assert (first.volatile_uncorrectable, first.ecc) == (None, None)
    assert (second.volatile_uncorrectable, second.ecc) == (0, True)


def test_ports_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    node = HEALTHY["lab-h100"]()
    for number, port in enumerate(node.ports):
        port.name = f"mlx5_{number + 4}"
    names = [device.name for device in probe_node(image(node, tmp_path)).fabric.devices]
    assert names == [f"mlx5_{number}" for number in range(4, 13)]


@pytest.mark.parametrize(
    ("option", "size"),
    [("size=65536k", 2**26), ("size=2g", 2**31), ("size=50%", 2**40), ("rw", 2**40), ("size=4096", 4096)],
)
def test_shared_memory_is_sized_as_tmpfs_sizes_it(option: str, size: int, tmp_path: Path) -> None:
    node = HEALTHY["p5"]()
    node.files["proc/self/mounts"] = f"tmpfs /dev/shm tmpfs {option} 0 0"
    assert probe_disks(image(node, tmp_path)).shared_memory_bytes == size


def test_drives_are_found_under_partitions_raids_and_volumes(tmp_path: Path) -> None:
    node = Node(drives=0)
    node.files = {
        "proc/self/mounts": "/dev/nvme0n1p1 / ext4 rw 0 0\n/dev/mapper/vg-data /with\\040space xfs rw 0 0",
        **{f"sys/block/nvme{number}n1/size": "7421875000" for number in range(4)},
        "sys/block/nvme0n1/nvme0n1p1/size": "1",
        "sys/block/nvme1n1/nvme1n1p1/holders/md127": "",
        "sys/block/md127/holders/dm-0": "",
        "sys/block/dm-0/dm/name": "vg-data",
        "sys/block/nvme3n1/device/model": "Amazon Elastic Block Store",
    }
    drives = {drive.name: drive for drive in probe_disks(image(node, tmp_path)).drives}
    assert sorted(drives) == ["nvme1n1", "nvme2n1"]  # not the system's, and no network disk
    assert drives["nvme1n1"].mounted_at == ("/with space",)
    assert drives["nvme2n1"].mounted_at == ()
    assert drives["nvme2n1"].size_bytes == 3_800_000_000_000


@pytest.mark.parametrize(
    ("files", "memory", "cpus"),
    [
        (
            {
                "proc/self/cgroup": "0::/slurm/job_7/step_0",
                "sys/fs/cgroup/slurm/job_7/memory.max": "8589934592",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max",
                "sys/fs/cgroup/slurm/job_7/step_0/cpu.max": "150000 100000",
            },
            2**33,
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4294967296",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            2**32,
            4.0,
        ),
        ({"sys/fs/cgroup/memory.max": "max"}, None, None),
    ],
)
def test_limits_of_control_groups_of_both_versions(
    files: dict[str, str], memory: int | None, cpus: float | None, tmp_path: Path
) -> None:
    group = probe_host(image(Node(drives=0, files=files), tmp_path)).group
    assert (group.memory_bytes, group.cpus) == (memory, cpus)


def test_xids_are_read_as_the_driver_writes_them() -> None:
    log = """
[   12.1] NVRM: loading NVIDIA UNIX Open Kernel Module
[ 4242.1] NVRM: Xid (PCI:0000:63:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
node kernel: NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
[ 4243.0] NVRM: Xid (PCI:0000:0D:00): 149, NETIR_LINK_EVT Fatal   XC0 i0 Link 05 (0x004a6e86 0x00000000)
[ 4243.5] NVRM: Xid (PCI:0000:0d:00): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 05 (0x004a6e86 0x00000000)
[ 4244.0] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error
"""
    xids = read_xids(log)
    assert [(xid.bus_id, xid.code, xid.is_switch) for xid in xids] == [
        ("0000:63:00", 79, False),
        ("0008:01:00", 154, False),
        ("0000:0d:00", 149, False),
        ("0000:0d:00", 149, False),
        ("0000:c1:00", 12028, True),
    ]
    assert [xid.is_fatal for xid in xids] == [False, False, True, False, False]
    assert xids[1].recovery == "GPU Reset Required"


def test_xids_know_their_age_and_whether_the_driver_came_back() -> None:
    log = """
[   12.100000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15
[ 4242.100000] NVRM: Xid (PCI:0000:63:00): 95, pid=1
node kernel: NVRM: Xid (PCI:0000:63:00): 31, pid=1
[ 5000.000000] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05
[ 5100.000000] NVRM: Xid (PCI:0000:63:00): 31, pid=1
"""
    xids = read_xids(log, uptime_seconds=5242.1)
    assert [(xid.age_seconds, xid.before_reload) for xid in xids] == [
        (pytest.approx(1000.0), True),
        (None, True),
        (pytest.approx(142.1), False),
    ]


PLUGIN = "libnccl-net.so"


@pytest.mark.parametrize(
    ("files", "variables", "loaded", "is_found"),
    [
        ({f"opt/aws-ofi-nccl/lib/{PLUGIN}": ""}, {"LD_LIBRARY_PATH": "/opt/aws-ofi-nccl/lib"}, "aws-ofi-nccl", True),
        ({f"opt/aws-ofi-nccl/lib/{PLUGIN}": ""}, {}, "", False),
        (
            {f"data/lib/{PLUGIN}": "", "data/lib/libnccl-net-ofi.so": ""},
            {"LD_LIBRARY_PATH": "/data/lib"},
            "/data",
            True,
        ),
        ({f"data/lib/{PLUGIN}": ""}, {"LD_LIBRARY_PATH": "/data/lib"}, "/data", False),
        ({f"data/lib/{PLUGIN}": ""}, {"NCCL_NET_PLUGIN": f"/data/lib/{PLUGIN}"}, "/data", False),
        ({f"usr/local/lib/{PLUGIN}": ""}, {"LD_LIBRARY_PATH": "/usr/local/lib"}, "/usr/local", False),
        (
            {f"usr/local/lib/{PLUGIN}": "", "opt/amazon/efa_installed_packages": "libnccl-ofi_1.17.2-1_amd64"},
            {"LD_LIBRARY_PATH": "/usr/local/lib"},
            "/usr/local",
            True,
        ),
        (
            {f"data/lib/{PLUGIN}": "", "data/own/libnccl-net-ofi.so": ""},
            {"LD_LIBRARY_PATH": "/data/lib:/data/own", "NCCL_NET_PLUGIN": "ofi"},
            "/data/own/libnccl-net-ofi.so",
            True,
        ),
        (
            {f"opt/aws-ofi-nccl/lib/{PLUGIN}": ""},
            {"LD_LIBRARY_PATH": "/opt/aws-ofi-nccl/lib", "NCCL_NET_PLUGIN": "none"},
            "",
            False,
        ),
    ],
)
def test_nccls_plugin_is_the_one_that_the_loader_takes(
    files: dict[str, str], variables: dict[str, str], loaded: str, is_found: bool, tmp_path: Path
) -> None:
    fabric = probe_node(image(Node(installer="", files=files, environment=variables), tmp_path)).fabric
    assert fabric.plugin_is_found is is_found
    assert loaded in fabric.loaded_plugin
    assert bool(fabric.loaded_plugin) is bool(loaded)


def test_a_link_to_the_plugin_is_the_plugin(tmp_path: Path) -> None:
    node = Node(installer="", environment={"LD_LIBRARY_PATH": "/usr/local/lib"})
    root = image(node, tmp_path)
    root.at("usr/local/lib").mkdir(parents=True)
    root.at(f"usr/local/lib/{PLUGIN}").symlink_to(f"/opt/amazon/ofi-nccl/lib/{PLUGIN}")
    assert probe_node(root).fabric.plugin_is_found


def test_files_alone_are_read_without_a_tool(tmp_path: Path) -> None:
    root = NodeRoot(HEALTHY["p5"]().write(tmp_path), files_only=True)
    report = probe_node(root)
    assert (report.host.processors, len(report.gpus.on_bus)) == (192, 8)
    assert (report.gpus.cards, root.packages) == ((), {})


@pytest.mark.parametrize(
    ("version", "wanted", "is_it"),
    [
        ("2.19", ">=2.19", True),
        ("2.19.3+cuda12.3", ">=2.19,<2.20", True),
        ("2.9.1", ">=2.19", False),
        ("1.9.0", "==1.9", True),
        ("580.95.05", "<580", False),
        ("6.8.0-1040-aws", ">=5.12", True),
        ("", ">=0", False),
        ("unknown", "<9", False),
    ],
)
def test_versions_compare_by_numbers(version: str, wanted: str, is_it: bool) -> None:
    assert is_in(version, wanted) is is_it


@pytest.mark.parametrize(
    ("packages", "cuda"),
    [
        ({"torch": "2.11.0+cu130"}, "13.0"),
        ({"torch": "2.6.0+cu124", "nvidia-cuda-runtime-cu12": "12.6.77"}, "12.4"),
        ({"torch": "2.11.0", "nvidia-cuda-runtime": "13.0.96"}, "13.0"),
        ({"torch": "2.13.0+cpu", "nvidia-cuda-runtime-cu12": "12.6.77"}, ""),
        ({}, ""),
    ],
)
def test_torch_tells_its_cuda(packages: dict[str, str], cuda: str) -> None:
    assert cuda_of_torch(packages) == cuda


def test_a_tool_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 86400\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    root = NodeRoot("/", answer_seconds=0.5)
    assert probe_gpus(root).error == "nvidia-smi timed out"
    assert root.ask("nvlink").timed_out


def test_a_tool_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "fi_info"
    tool.write_text("#!/bin/sh\necho 'fi_getinfo: -61 (No data available)' >&2\nexit 61\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = probe_node(NodeRoot()).fabric.libfabric
    assert (found.is_there, found.domains, found.error) == (True, (), "fi_getinfo: -61 (No data available)")
