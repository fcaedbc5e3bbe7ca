"""One node: who runs on it, its cards, network, drives and processors."""

from __future__ import annotations

from dataclasses import replace

from craton.observability.dashboards.model import NODE, Board, Panel, PanelQuery, PanelRow

HERE = 'node=~"$node"'
RATE = "[$__rate_interval]"
CARD = "GPU {{gpu}}"


def _cards(name: str, scale: str = "") -> str:
    """Of each card once, also where two exporters serve it."""
    return f"max by (node, gpu) ({name}{{{HERE}}}){scale}"


def _card_rate(name: str) -> str:
    return f"max by (node, gpu) (rate({name}{{{HERE}}}{RATE}))"


NOW = PanelRow(
    "Now",
    (
        Panel(
            "Cards",
            "That the PCI bus shows, and that the driver answers for. Fewer: the card fell off, reboot the node.",
            (
                PanelQuery(f"max(craton_gpus_seen{{{HERE}}})", "answer"),
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
            "With how many ranks each. Two runs on one node share its network, memory and processors.",
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
            "The driver wants",
            "A reset or a reboot, by card: `craton heal` does it when the node is free.",
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
            nothing="nothing",
            alerts=("GpuRecoveryWanted",),
        ),
    ),
)

CARDS = PanelRow(
    "Cards",
    (
        Panel(
            "Multiprocessors with work",
            "A card below the others waits for them, or is slow.",
            (PanelQuery(_cards("DCGM_FI_PROF_SM_ACTIVE"), CARD),),
            unit="percentunit",
        ),
        Panel(
            "Tensor cores at work",
            "A cousin of MFU that the hardware measures.",
            (PanelQuery(_cards("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"), CARD),),
            unit="percentunit",
        ),
        Panel(
            "Bandwidth of memory in use",
            "High while tensor cores idle: decoding, or kernels that are not fused.",
            (PanelQuery(_cards("DCGM_FI_PROF_DRAM_ACTIVE"), CARD),),
            unit="percentunit",
        ),
        Panel(
            "Memory of the cards",
            "In use; dashed is what a card has.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_FB_USED", " * 1048576"), CARD),
                PanelQuery(f"max(DCGM_FI_DEV_FB_TOTAL{{{HERE}}}) * 1048576", "a card has", is_plan=True),
            ),
            unit="bytes",
        ),
        Panel(
            "Memory by rank",
            "Two runs on one card show as two lines.",
            (
                PanelQuery(
                    f"max by (run, rank, gpu) (craton_gpu_rank_memory_bytes{{{HERE}}})",
                    "GPU {{gpu}}: {{run}} rank {{rank}}",
                ),
            ),
            unit="bytes",
        ),
        Panel(
            "Clock",
            "Dashed is the highest there is. Below it under load: look at what holds the clocks.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_SM_CLOCK", " * 1e6"), CARD),
                PanelQuery(f"max(DCGM_FI_DEV_MAX_SM_CLOCK{{{HERE}}}) * 1e6", "highest", is_plan=True),
            ),
            unit="hertz",
            alerts=("GpuClockBelowPeers",),
        ),
        Panel(
            "Temperature",
            "Of cards and their memory; dashed is where the clocks fall.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_GPU_TEMP"), CARD),
                PanelQuery(_cards("DCGM_FI_DEV_MEMORY_TEMP"), f"{CARD} memory"),
                PanelQuery(f"min(DCGM_FI_DEV_SLOWDOWN_TEMP{{{HERE}}})", "clocks fall", is_plan=True),
            ),
            unit="celsius",
            alerts=("GpuThrottled",),
        ),
        Panel(
            "Power",
            "Dashed is the limit in force. A limit below what the card was made for was set by somebody.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_POWER_USAGE"), CARD),
                PanelQuery(f"min(DCGM_FI_DEV_POWER_MGMT_LIMIT{{{HERE}}})", "limit", is_plan=True),
                PanelQuery(f"max(DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF{{{HERE}}})", "made for", is_plan=True),
            ),
            unit="watt",
            alerts=("GpuThrottled",),
        ),
        Panel(
            "What holds the clocks",
            "Share of time for which a reason did. Heat: cooling. Power brake: the rack. Idleness is none of these.",
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
            "XIDs of the last quarter of an hour",
            "By card and code; the runbook says what each asks for.",
            (PanelQuery(f"max by (gpu, xid) (craton:gpu_xid_events:15m{{{HERE}}})", f"{CARD}: XID {{{{xid}}}}"),),
            unit="short",
            nothing="none",
            alerts=("GpuXidReplace", "GpuXidReboot", "GpuXidReset", "GpuXidRestart"),
        ),
        Panel(
            "Memory errors since the driver was loaded",
            "Corrected ones that rise foretell the others.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"), f"{CARD} corrected"),
                PanelQuery(_cards("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"), f"{CARD} uncorrected"),
            ),
            unit="short",
            alerts=("GpuEccUncorrectable", "GpuEccCorrectableRising"),
        ),
        Panel(
            "Rows of memory replaced",
            "In the card's life. Pending ones are replaced at the next reset.",
            (
                PanelQuery(_cards("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"), f"{CARD} after corrected"),
                PanelQuery(_cards("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"), f"{CARD} after uncorrected"),
                PanelQuery(_cards("DCGM_FI_DEV_ROW_REMAP_PENDING"), f"{CARD} pending"),
            ),
            unit="short",
            alerts=("GpuRowRemapPending", "GpuRowRemapFailure"),
        ),
        Panel(
            "NVLink",
            "Sent by each card.",
            (PanelQuery(_card_rate("craton_gpu_nvlink_transmitted_bytes_total"), CARD),),
            unit="Bps",
            alerts=("NvlinkLinksDown",),
        ),
        Panel(
            "NVLink errors",
            "Within a quarter of an hour, by what counts them. Replays cost a little; recoveries stop a link for a "
            "moment.",
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
            "Lanes missing, and packets sent again. Lanes do not come back by themselves: reboot, then replace.",
            (
                PanelQuery(
                    f"max by (gpu) (DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH{{{HERE}}} - DCGM_FI_DEV_PCIE_LINK_WIDTH)",
                    f"{CARD} lanes missing",
                ),
                PanelQuery(_card_rate("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"), f"{CARD} replays a second"),
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
            "By device. Rails that carry much less than the others are not used: look at the placement of ranks.",
            (PanelQuery(f"max by (device) (rate(node_amazonefa_tx_bytes{{{HERE}}}{RATE}))", "{{device}}"),),
            unit="Bps",
            alerts=("EfaRailImbalance", "TcpFallback"),
        ),
        Panel(
            "EFA, trouble",
            "Packets sent again, dropped, and peers that did not answer.",
            (
                PanelQuery(f"sum(rate(node_amazonefa_retrans_pkts{{{HERE}}}{RATE}))", "sent again"),
                PanelQuery(f"sum(rate(node_amazonefa_rx_drops{{{HERE}}}{RATE}))", "dropped"),
                PanelQuery(f"sum(rate(node_amazonefa_unresponsive_remote_events{{{HERE}}}{RATE}))", "peers silent"),
            ),
            unit="ops",
            alerts=("EfaRetransmits", "EfaDrops", "EfaPeerUnresponsive"),
        ),
        Panel(
            "Ethernet, sent",
            "Much of it during training: NCCL fell back to TCP.",
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
            "Space that is free",
            "Share, by file system. Checkpoints, logs and caches fail when it is gone.",
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
            "Disks",
            "Read and written.",
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
            "Life used up, and spare blocks left. Copy what you need and have the drive replaced when spares go.",
            (
                PanelQuery(f"max by (device) (nvme_percentage_used_ratio{{{HERE}}})", "{{device}} used up"),
                PanelQuery(f"min by (device) (nvme_available_spare_ratio{{{HERE}}})", "{{device}} spare"),
            ),
            unit="percentunit",
            alerts=("DriveFailing",),
        ),
    ),
)

HOST = PanelRow(
    "Processors and memory",
    (
        Panel(
            "Processors",
            "Share of all cores by what they do. iowait is storage, steal another guest of the machine.",
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
            "In use and shared; dashed is all there is. Shared memory holds snapshots and batches.",
            (
                PanelQuery(f"max(node_memory_MemTotal_bytes{{{HERE}}} - node_memory_MemAvailable_bytes)", "used"),
                PanelQuery(f"max(node_memory_Shmem_bytes{{{HERE}}})", "shared"),
                PanelQuery(f"max(node_memory_Dirty_bytes{{{HERE}}})", "to be written"),
                PanelQuery(f"max(node_memory_MemTotal_bytes{{{HERE}}})", "all", is_plan=True),
            ),
            unit="bytes",
            alerts=("MemoryNearlyGone", "ProcessKilledForMemory"),
        ),
        Panel(
            "Waiting",
            "Share of time in which somebody waited for a processor, memory or a disk.",
            (
                PanelQuery(f"max(rate(node_pressure_cpu_waiting_seconds_total{{{HERE}}}{RATE}))", "processor"),
                PanelQuery(f"max(rate(node_pressure_memory_waiting_seconds_total{{{HERE}}}{RATE}))", "memory"),
                PanelQuery(f"max(rate(node_pressure_io_waiting_seconds_total{{{HERE}}}{RATE}))", "disk"),
            ),
            unit="percentunit",
            alerts=("StorageStalls",),
        ),
        Panel(
            "Processes",
            "Blocked ones wait for a disk or a file system and cannot be killed: look at Lustre.",
            (
                PanelQuery(f"max(node_procs_running{{{HERE}}})", "can run"),
                PanelQuery(f"max(node_procs_blocked{{{HERE}}})", "blocked"),
                PanelQuery(f"max(node_load5{{{HERE}}})", "load"),
            ),
            unit="short",
            alerts=("LustreStalled",),
        ),
        Panel(
            "Killed for want of memory within an hour",
            "Who was killed stands in the kernel's log.",
            (PanelQuery(f"max(increase(node_vmstat_oom_kill{{{HERE}}}[1h]))", "processes"),),
            unit="short",
            alerts=("ProcessKilledForMemory",),
        ),
        Panel(
            "The exporter itself",
            "How long a collector takes. One that is stuck reads a driver or a file system that does not answer.",
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
    "One node: who runs on it, its cards, network, drives and processors.",
    (replace(NODE, has_all=False, multi=False),),
    (NOW, CARDS, NETWORK, DRIVES, HOST),
)
