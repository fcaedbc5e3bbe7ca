"""Network, Lustre, drives, processors and file systems, from recorded trees; and every image of a node there is."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from infrastructure.node_images import DEGRADED, HEALTHY, Degraded
from observability.exporter.exporting import Scrape, collected, exporting, scrape
from observability.exporter.trees import INSTANCE, full_node, smart_page, write_root
from waiting import PATIENCE_SECONDS

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter import FAMILIES
from craton.observability.exporter.drives import KELVIN, smart_samples
from craton.observability.exporter.fabric import FabricCollector
from craton.observability.exporter.filesystem import FilesystemCollector
from craton.observability.exporter.host import HostCollector, clock_samples
from craton.observability.exporter.lustre import LustreCollector, read_rows

DEBUGFS = "sys/kernel/debug/lustre"


def looked_at(root: Path, **options: str) -> Scrape:
    with exporting(root, **options) as exporter:
        return scrape(exporter)


@pytest.fixture(scope="module")
def p5en(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    root = write_root(tmp_path_factory.mktemp("p5en"))
    (root / "commands/smart-nvme1.bin").write_bytes(
        smart_page(celsius=51, spare=90, threshold=5, used=12, media_errors=3)
    )
    return looked_at(root)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    return looked_at(write_root(tmp_path_factory.mktemp("lab"), "lab-h100"))


def test_efa_counters(p5en: Scrape) -> None:
    assert len(p5en.rows("node_amazonefa_tx_bytes")) == 16
    assert p5en.value("node_amazonefa_rx_drops", device="rdmap80s0", port="1") == 1004
    assert p5en.value("node_infiniband_state_id", device="rdmap80s0") == 4
    assert p5en.value("node_infiniband_rate_bytes_per_second", device="rdmap80s0") == 25e9
    assert not p5en.rows("node_infiniband_port_data_received_bytes_total")


def test_infiniband_counters_are_bytes(lab: Scrape) -> None:
    port = {"device": "mlx5_3", "port": "1"}
    assert lab.value("node_infiniband_port_data_transmitted_bytes_total", **port) == 8_000_000
    assert lab.value("node_infiniband_link_downed_total", **port) == 1
    assert lab.value("node_infiniband_physical_state_id", **port) == 5
    assert not lab.rows("node_infiniband_port_errors_received_total"), "N/A (no PMA) is not zero"
    assert not lab.rows("node_amazonefa_tx_bytes")


@pytest.mark.parametrize("place", [DEBUGFS, "proc/fs/lustre"])
def test_lustre_s_client(tmp_path: Path, place: str) -> None:
    root = full_node("p5en", lustre_root=place).write(tmp_path)
    found = collected(LustreCollector(NodeRoot(root)).collect(0.0))
    assert found["lustre_read_bytes_total", "llite", "abcdefgh"] == 145121869
    assert found["lustre_write_samples_total", "llite", "abcdefgh"] == 13641
    assert found["lustre_stats_total", "llite", "abcdefgh", "open"] == 1200
    assert found["craton_lustre_operation_seconds_total", "llite", "abcdefgh", "open"] == pytest.approx(0.6)
    mdc, osc = ("mdc", "abcdefgh-MDT0000-mdc"), ("osc", "abcdefgh-OST0003-osc")
    assert found["craton_lustre_requests_total", *mdc] == 1885503
    assert found["craton_lustre_request_seconds_total", *mdc] == pytest.approx(908.745020)
    assert found["lustre_stats_total", *mdc, "mds_close"] == 312481
    assert found["craton_lustre_request_seconds_total", *osc] == pytest.approx(80.0)
    assert found["craton_lustre_connected", *mdc] == 1
    assert found["craton_lustre_connected", *osc] == 0
    assert not any(INSTANCE in label for labels in found for label in labels), "a mount's address is no label"


def test_lustre_s_client_between_two_versions(tmp_path: Path) -> None:
    """Statistics in debugfs, connections in procfs."""
    node = full_node("p5en")
    debugfs = [path for path in node.files if path.startswith(DEBUGFS) and path.endswith("/import")]
    node.files |= {path.replace(DEBUGFS, "proc/fs/lustre"): node.files.pop(path) for path in debugfs}
    found = collected(LustreCollector(NodeRoot(node.write(tmp_path))).collect(0.0))
    mdc, osc = ("mdc", "abcdefgh-MDT0000-mdc"), ("osc", "abcdefgh-OST0003-osc")
    assert (found["craton_lustre_connected", *mdc], found["craton_lustre_connected", *osc]) == (1, 0)
    assert found["craton_lustre_requests_total", *mdc] == 1885503


def test_rows_of_lustre_with_less_than_all_columns() -> None:
    rows = read_rows("open 12 samples [regs]\nread_bytes 3 samples [bytes] 1 5 9\nsnapshot_time 1 secs.nsecs\n")
    assert [(row.name, row.count, row.total, row.seconds) for row in rows] == [
        ("open", 12, None, None),
        ("read_bytes", 3, 9, None),
    ]


def test_disks_and_their_smart_log(p5en: Scrape) -> None:
    assert p5en.value("node_disk_written_bytes_total", device="nvme1n1") == 4096 * 512
    assert p5en.value("node_disk_io_time_seconds_total", device="nvme1n1") == pytest.approx(0.07)
    assert {labels["device"] for labels, _ in p5en.rows("node_disk_io_now")} == {"nvme1n1"}
    drive = {"device": "nvme1"}
    assert p5en.value("nvme_temperature_celsius", **drive) == 51
    assert p5en.value("nvme_available_spare_ratio", **drive) == pytest.approx(0.9)
    assert p5en.value("nvme_available_spare_threshold_ratio", **drive) == pytest.approx(0.05)
    assert p5en.value("nvme_percentage_used_ratio", **drive) == pytest.approx(0.12)
    assert p5en.value("nvme_media_errors_total", **drive) == 3
    assert list(smart_samples("nvme1", b"too short")) == []


def test_a_volume_without_a_smart_log_is_not_a_drive_without_spare_blocks() -> None:
    """Controllers of EBS answer, with zeros for all that they do not measure."""
    assert list(smart_samples("nvme0", bytes(512))) == []
    assert list(smart_samples("nvme0", smart_page(celsius=-KELVIN, spare=0, used=0))) == []
    worn = collected(smart_samples("nvme0", smart_page(spare=0)))
    assert worn["nvme_available_spare_ratio", "nvme0"] == 0


def test_the_machine(p5en: Scrape) -> None:
    assert len(p5en.rows("node_cpu_seconds_total")) == 192 * 8
    assert p5en.value("node_cpu_seconds_total", cpu="7", mode="user") == pytest.approx(1007 / os.sysconf("SC_CLK_TCK"))
    assert p5en.value("node_memory_MemTotal_bytes") == 2048 * 2**30
    assert p5en.value("node_load5") == 2.25
    assert p5en.value("node_procs_blocked") == 2
    assert p5en.value("node_vmstat_oom_kill") == 2
    assert p5en.value("node_pressure_io_stalled_seconds_total") == 1.5
    assert p5en.value("node_netstat_Tcp_RetransSegs") == 9
    assert p5en.value("node_network_transmit_drop_total", device="eth0") == 4
    assert p5en.value("node_network_speed_bytes", device="eth0") == 12.5e9
    assert not p5en.rows("node_network_receive_bytes_total", device="lo")
    assert p5en.value("node_edac_correctable_errors_total", controller="0") == 6
    assert p5en.value("node_timex_sync_status") == 1


def test_everything_has_the_node_and_its_leaf(tmp_path: Path) -> None:
    found = looked_at(write_root(tmp_path), node="n1", leaf="leaf-2")
    assert all(labels["node"] == "n1" and labels["leaf"] == "leaf-2" for _, labels, _ in found.samples)


def test_this_machine_has_a_clock_and_disks() -> None:
    assert {name for name, _, _ in clock_samples()} >= {"node_timex_sync_status", "node_timex_maxerror_seconds"}
    found = collected(FilesystemCollector(NodeRoot()).collect(0.0))
    sizes = {key[3]: value for key, value in found.items() if key[0] == "node_filesystem_size_bytes"}
    here = os.statvfs("/")
    assert sizes["/"] == here.f_blocks * here.f_frsize


def test_a_file_system_whose_server_is_gone_is_told_and_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/mounts").write_text("10.0.1.5@tcp:/abc /fsx lustre rw 0 0\n/dev/root / ext4 rw 0 0\n")
    back, asked = threading.Event(), []

    def statvfs(place: str) -> os.statvfs_result | None:
        asked.append(place)
        if place.endswith("/fsx"):
            back.wait(PATIENCE_SECONDS)
        return os.statvfs("/")

    monkeypatch.setattr("craton.observability.exporter.filesystem._statvfs", statvfs)
    collector = FilesystemCollector(NodeRoot(tmp_path), answer_seconds=0.1)
    gone = ("node_filesystem_device_error", "10.0.1.5@tcp:/abc", "lustre", "/fsx")
    for _ in range(3):
        found = collected(collector.collect(0.0))
        assert found[gone] == 1
        assert found["node_filesystem_device_error", "/dev/root", "ext4", "/"] == 0
    assert sum(place.endswith("/fsx") for place in asked) == 1, "one that is stuck is not asked again"
    back.set()
    collector._asked["/fsx"].thread.join(PATIENCE_SECONDS)
    assert collected(collector.collect(0.0))[gone] == 0


def test_what_cannot_be_read_is_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("a lot")
    for name in ("port_xmit_data", "port_rcv_data"):
        (counters / name).write_text("7")
    fabric, host = FabricCollector(NodeRoot(tmp_path)), HostCollector(NodeRoot(tmp_path))
    list(fabric.collect(0.0))
    for file in counters.iterdir():
        file.unlink()
    for now in (5.0, 10.0):
        list(fabric.collect(now))
        list(host.collect(now))
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("fabric cannot be read: sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data")
    assert told[1].startswith("host cannot be read: ValueError: ")


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_images_raise_no_alarm(tmp_path: Path, name: str) -> None:
    found = looked_at(HEALTHY[name]().write(tmp_path))
    assert not [row for row in found.rows("craton_exporter_collector_errors_total") if row[1]]
    assert not [row for row in found.rows("craton_exporter_collector_stuck") if row[1]]
    assert all(value == 1 for _, value in found.rows("craton_gpu_up"))
    for gpus in found.rows("craton_gpus_on_bus"):
        assert found.value("craton_gpus_seen") == gpus[1]
    assert not [row for row in found.rows("craton_gpu_recovery_wanted") if row[1]]


@pytest.mark.parametrize("degraded", DEGRADED, ids=lambda each: each.name)
def test_degraded_images_are_served(tmp_path: Path, degraded: Degraded) -> None:
    found = looked_at(degraded.node().write(tmp_path))
    assert found.names() <= set(FAMILIES)
    assert found.value("craton_exporter_info") == 1
    assert not [row for row in found.rows("craton_exporter_collector_stuck") if row[1]]


def image(tmp_path: Path, name: str) -> Scrape:
    found = next(each for each in DEGRADED if each.name == name)
    return looked_at(found.node().write(tmp_path / name))


def test_what_degraded_images_show(tmp_path: Path) -> None:
    missing = image(tmp_path, "seven of eight GPUs")
    assert (missing.value("craton_gpus_on_bus"), missing.value("craton_gpus_seen")) == (8, 7)
    assert image(tmp_path, "a link is down").value("craton_gpu_nvlink_active_links", gpu="1") == 17
    assert image(tmp_path, "row remap pending").value("DCGM_FI_DEV_ROW_REMAP_PENDING", gpu="1") == 1
    assert image(tmp_path, "row remap failed").value("DCGM_FI_DEV_ROW_REMAP_FAILURE", gpu="1") == 1
    wants = image(tmp_path, "the driver asks for a reset")
    assert wants.value("craton_gpu_recovery_wanted", gpu="1", action="reset") == 1
    assert image(tmp_path, "XID 79").rows("craton_gpu_xid_moment_seconds", xid="79")
    assert image(tmp_path, "a port is down").value("node_infiniband_state_id", device="mlx5_2") == 1
    hot = image(tmp_path, "a hot card").rows("craton_gpu_clocks_held", gpu="1")
    assert any(value and "thermal" in labels["reason"] for labels, value in hot)
    smi = image(tmp_path, "nvidia-smi fails")
    assert (smi.value("craton_gpus_on_bus"), smi.value("craton_gpus_seen")) == (8, 0)
