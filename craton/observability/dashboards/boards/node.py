"""One node: the runs on it, its GPUs, network, drives and CPUs."""

from __future__ import annotations

from dataclasses import replace

from craton.observability.dashboards.model import NODE, Board, Panel, PanelQuery, PanelRow

HERE = 'node=~"$node"'
RATE = "[$__rate_interval]"
CARD = "GPU {{gpu}}"


def _cards(name: str, scale: str = "") -> str:
    """Return an expression with each GPU once, even if two exporters export it."""
    return f"max by (node, gpu) ({name}{{{HERE}}}){scale}"


def _card_rate(name: str) -> str:
    return f"max by (node, gpu) (rate({name}{{{HERE}}}{RATE}))"


NOW = PanelRow(
    "Now",
    (
        Panel(
            "GPUs",
            "On the PCI bus, and accessible by the driver. Fewer accessible: a GPU fell off the bus, reboot the node.",
            (
                PanelQuery(f"max(craton_gpus_seen{{{HERE}}})", "accessible"),
                PanelQuery(f"max(craton_gpus_on_bus{{{HERE}}})", "on the bus", is_plan=True),
                PanelQuery(f"max(craton:node_gpus_expected{{{HERE}}})", "expected", is_plan=True),
            ),
            unit="short",
            kind="stat",
            width=6,
            height=5,
            alerts=("GpuMissing",),
        ),
        Panel(
            "Runs on this node",
            "With the number of ranks of each. Two runs on one node share its network, memory and CPUs.",
            (PanelQuery(f"max by (run, run_node) (craton_node_run_ranks{{{HERE}}})", "ranks"),),
            unit="short",
            kind="table",
            width=10,
            height=5,
            nothing="none",
            opens="run",
        ),
        Panel(
            "Up since",
            "Its last boot.",
            (PanelQuery(f"max(node_boot_time_seconds{{{HERE}}}) * 1000", "boot"),),
            unit="dateTimeAsIso",
            kind="stat",
            width=4,
            height=5,
        ),
        Panel(
            "Recovery requested by the driver",
            "A reset or a reboot, by GPU: `craton heal` does it when the node is free.",
            (
                PanelQuery(
                    f"max by (gpu, action) (craton_gpu_recovery_wanted{{{HERE}}}) > 0", "GPU {{gpu}}: {{action}}"
                ),
            ),
            unit="short",
            kind="stat",
            width=4,
            height=5,
            bad=1,
            nothing="none",
            alerts=("GpuRecoveryWanted",),
        ),
    ),
)

CARDS = PanelRow(
    "GPUs",
    (
        Panel(
            "SM activity",
            "A GPU below the others waits for them, or is slow.",
            (PanelQuery(_cards("DCGM_FI_PROF_SM_ACTIVE"), CARD),),
            unit="percentunit",
        ),
        Panel(
            "Tensor core activity",
            "Related to MFU, measured by the hardware.",
            (PanelQuery(_cards("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"), CARD),),
            unit="percentunit",
        ),
        Panel(
            "Memory bandwidth utilization",
            "High while tensor cores are idle: decode, or kernels that are not fused.",
            (PanelQuery(_cards("DCGM_FI_PROF_DRAM_ACTIVE"), CARD),),
            unit="percentunit",
        ),
        Panel(
            "GPU memory",
            "Used; dashed is the capacity of a GPU.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_FB_USED", " * 1048576"), CARD),
                PanelQuery(f"max(DCGM_FI_DEV_FB_TOTAL{{{HERE}}}) * 1048576", "capacity", is_plan=True),
            ),
            unit="bytes",
        ),
        Panel(
            "GPU memory by rank",
            "Two runs on one GPU are two lines.",
            (
                PanelQuery(
                    f"max by (run, rank, gpu) (craton_gpu_rank_memory_bytes{{{HERE}}})",
                    "GPU {{gpu}}: {{run}} rank {{rank}}",
                ),
            ),
            unit="bytes",
        ),
        Panel(
            "SM clock",
            "Dashed is the maximum. Below it under load: see the throttle reasons.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_SM_CLOCK", " * 1e6"), CARD),
                PanelQuery(f"max(DCGM_FI_DEV_MAX_SM_CLOCK{{{HERE}}}) * 1e6", "maximum", is_plan=True),
            ),
            unit="hertz",
            alerts=("GpuClockBelowPeers",),
        ),
        Panel(
            "Temperature",
            "Of GPUs and their memory; dashed is the slowdown temperature.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_GPU_TEMP"), CARD),
                PanelQuery(_cards("DCGM_FI_DEV_MEMORY_TEMP"), f"{CARD} memory"),
                PanelQuery(f"min(DCGM_FI_DEV_SLOWDOWN_TEMP{{{HERE}}})", "slowdown", is_plan=True),
            ),
            unit="celsius",
            alerts=("GpuThrottled",),
        ),
        Panel(
            "Power",
            "Dashed are the current and the default limit. A current limit below the default was set by hand.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_POWER_USAGE"), CARD),
                PanelQuery(f"min(DCGM_FI_DEV_POWER_MGMT_LIMIT{{{HERE}}})", "limit", is_plan=True),
                PanelQuery(f"max(DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF{{{HERE}}})", "default limit", is_plan=True),
            ),
            unit="watt",
            alerts=("GpuThrottled",),
        ),
        Panel(
            "Throttle reasons",
            "Share of time by reason. Thermal: check cooling. Power brake: check the rack. Idle GPUs are not counted.",
            (
                PanelQuery(
                    f"max by (gpu, reason) (rate(craton_gpu_clocks_held_seconds_total{{{HERE}}}{RATE}))",
                    f"{CARD}: {{{{reason}}}}",
                ),
            ),
            unit="percentunit",
            alerts=("GpuThrottled",),
        ),
        Panel(
            "XIDs in the last 15 minutes",
            "By GPU and code; the runbook has the action for each.",
            (PanelQuery(f"max by (gpu, xid) (craton:gpu_xid_events:15m{{{HERE}}})", f"{CARD}: XID {{{{xid}}}}"),),
            unit="short",
            nothing="none",
            alerts=("GpuXidReplace", "GpuXidReboot", "GpuXidReset", "GpuXidRestart"),
        ),
        Panel(
            "ECC errors since the driver was loaded",
            "Rising correctable errors precede uncorrectable ones.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"), f"{CARD} correctable"),
                PanelQuery(_cards("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"), f"{CARD} uncorrectable"),
            ),
            unit="short",
            alerts=("GpuEccUncorrectable", "GpuEccCorrectableRising"),
        ),
        Panel(
            "Remapped memory rows",
            "Over the GPU's lifetime. Pending rows are remapped at the next reset.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"), f"{CARD} after correctable"),
                PanelQuery(_cards("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"), f"{CARD} after uncorrectable"),
                PanelQuery(_cards("DCGM_FI_DEV_ROW_REMAP_PENDING"), f"{CARD} pending"),
            ),
            unit="short",
            alerts=("GpuRowRemapPending", "GpuRowRemapFailure"),
        ),
        Panel(
            "NVLink",
            "Sent by each GPU.",
            (PanelQuery(_card_rate("craton_gpu_nvlink_transmitted_bytes_total"), CARD),),
            unit="Bps",
            alerts=("NvlinkLinksDown",),
        ),
        Panel(
            "NVLink errors",
            "In the last 15 minutes, by counter. Replays cost little; recoveries pause a link.",
            (
                PanelQuery(
                    f"max by (node, gpu, field) (craton:gpu_nvlink_errors:15m{{{HERE}}})", f"{CARD} {{{{field}}}}"
                ),
            ),
            unit="short",
            alerts=("NvlinkErrors",),
        ),
        Panel(
            "PCIe",
            "Missing lanes, and replays. Lanes do not come back by themselves: reboot, then replace.",
            (
                PanelQuery(
                    f"max by (gpu) (DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH{{{HERE}}} - DCGM_FI_DEV_PCIE_LINK_WIDTH)",
                    f"{CARD} lanes missing",
                ),
                PanelQuery(_card_rate("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"), f"{CARD} replays/s"),
            ),
            unit="short",
            alerts=("PcieReplays",),
        ),
    ),
)

NETWORK = PanelRow(
    "Network",
    (
        Panel(
            "EFA, sent",
            "By device. Rails with much less traffic than the others are unused: check rank binding.",
            (PanelQuery(f"max by (device) (rate(node_amazonefa_tx_bytes{{{HERE}}}{RATE}))", "{{device}}"),),
            unit="Bps",
            alerts=("EfaRailImbalance", "TcpFallback"),
        ),
        Panel(
            "EFA errors",
            "Retransmitted and dropped packets, and unresponsive peers.",
            (
                PanelQuery(f"sum(rate(node_amazonefa_retrans_pkts{{{HERE}}}{RATE}))", "retransmitted"),
                PanelQuery(f"sum(rate(node_amazonefa_rx_drops{{{HERE}}}{RATE}))", "dropped"),
                PanelQuery(
                    f"sum(rate(node_amazonefa_unresponsive_remote_events{{{HERE}}}{RATE}))", "unresponsive peers"
                ),
            ),
            unit="ops",
            alerts=("EfaRetransmits", "EfaDrops", "EfaPeerUnresponsive"),
        ),
        Panel(
            "Ethernet, sent",
            "High traffic during training: NCCL fell back to TCP.",
            (
                PanelQuery(
                    f'max by (device) (rate(node_network_transmit_bytes_total{{{HERE}, device!="lo"}}{RATE}))',
                    "{{device}}",
                ),
            ),
            unit="Bps",
            alerts=("TcpFallback",),
        ),
    ),
)

DRIVES = PanelRow(
    "Drives and file systems",
    (
        Panel(
            "Free space",
            "Share by file system. Checkpoints, logs and caches fail when it is full.",
            (
                PanelQuery(
                    f"min by (mountpoint) (node_filesystem_avail_bytes{{{HERE}}} / node_filesystem_size_bytes)",
                    "{{mountpoint}}",
                ),
            ),
            unit="percentunit",
            kind="bars",
            warn=0.2,
            bad=0.05,
            alerts=("DiskNearlyFull", "DiskFillsSoon"),
        ),
        Panel(
            "Disk throughput",
            "Reads and writes.",
            (
                PanelQuery(f"max by (device) (rate(node_disk_read_bytes_total{{{HERE}}}{RATE}))", "{{device}} read"),
                PanelQuery(
                    f"max by (device) (rate(node_disk_written_bytes_total{{{HERE}}}{RATE}))", "{{device}} written"
                ),
            ),
            unit="Bps",
        ),
        Panel(
            "Health of NVMe drives",
            "Rated life used, and spare blocks left. When spares run out, copy your data and replace the drive.",
            (
                PanelQuery(f"max by (device) (nvme_percentage_used_ratio{{{HERE}}})", "{{device}} life used"),
                PanelQuery(f"min by (device) (nvme_available_spare_ratio{{{HERE}}})", "{{device}} spare"),
            ),
            unit="percentunit",
            alerts=("DriveFailing",),
        ),
    ),
)

HOST = PanelRow(
    "CPUs and memory",
    (
        Panel(
            "CPU utilization",
            "Share of all cores by mode. iowait is storage, steal is another guest of the host.",
            (
                PanelQuery(
                    f'sum by (mode) (rate(node_cpu_seconds_total{{{HERE}, mode!="idle"}}{RATE}))'
                    f" / scalar(sum(rate(node_cpu_seconds_total{{{HERE}}}{RATE})))",
                    "{{mode}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
        ),
        Panel(
            "Memory",
            "Used and shared; dashed is the total. Shared memory holds checkpoint snapshots and batches.",
            (
                PanelQuery(f"max(node_memory_MemTotal_bytes{{{HERE}}} - node_memory_MemAvailable_bytes)", "used"),
                PanelQuery(f"max(node_memory_Shmem_bytes{{{HERE}}})", "shared"),
                PanelQuery(f"max(node_memory_Dirty_bytes{{{HERE}}})", "dirty"),
                PanelQuery(f"max(node_memory_MemTotal_bytes{{{HERE}}})", "total", is_plan=True),
            ),
            unit="bytes",
            alerts=("MemoryNearlyGone", "ProcessKilledForMemory"),
        ),
        Panel(
            "Pressure (PSI)",
            "Share of time in which at least one process waited for a CPU, memory or I/O.",
            (
                PanelQuery(f"max(rate(node_pressure_cpu_waiting_seconds_total{{{HERE}}}{RATE}))", "CPU"),
                PanelQuery(f"max(rate(node_pressure_memory_waiting_seconds_total{{{HERE}}}{RATE}))", "memory"),
                PanelQuery(f"max(rate(node_pressure_io_waiting_seconds_total{{{HERE}}}{RATE}))", "I/O"),
            ),
            unit="percentunit",
            alerts=("StorageStalls",),
        ),
        Panel(
            "Processes",
            "Blocked processes wait for a disk or file system and cannot be killed: check Lustre.",
            (
                PanelQuery(f"max(node_procs_running{{{HERE}}})", "runnable"),
                PanelQuery(f"max(node_procs_blocked{{{HERE}}})", "blocked"),
                PanelQuery(f"max(node_load5{{{HERE}}})", "load"),
            ),
            unit="short",
            alerts=("LustreStalled",),
        ),
        Panel(
            "OOM kills in the last hour",
            "The kernel log names the processes.",
            (PanelQuery(f"max(increase(node_vmstat_oom_kill{{{HERE}}}[1h]))", "processes"),),
            unit="short",
            alerts=("ProcessKilledForMemory",),
        ),
        Panel(
            "Exporter",
            "Duration of each collector. A stuck one waits for a driver or file system that does not answer.",
            (
                PanelQuery(f"max by (collector) (craton_exporter_collector_seconds{{{HERE}}})", "{{collector}}"),
                PanelQuery(f"sum(craton_exporter_collector_stuck{{{HERE}}})", "stuck collectors"),
            ),
            unit="s",
            alerts=("ExporterCollectorFails", "ExporterCollectorStuck", "KernelLogUnreadable"),
        ),
    ),
)

NODE_BOARD = Board(
    "node",
    "Node",
    "One node: the runs on it, its GPUs, network, drives and CPUs.",
    (replace(NODE, has_all=False, multi=False),),
    (NOW, CARDS, NETWORK, DRIVES, HOST),
)
