"""Storage: impact on runs, Lustre clients, FSx from CloudWatch, file systems and drives."""

from __future__ import annotations

from craton.observability.dashboards.boards.twins import twin
from craton.observability.dashboards.model import LEAF, NODE, RUN, Board, Panel, PanelQuery, PanelRow

HERE = 'node=~"$node", leaf=~"$leaf"'
RATE = "[$__rate_interval]"
LUSTRE_WAIT = f"rate(craton_lustre_request_seconds_total{{{HERE}}}{RATE})"
LUSTRE_REQUESTS = f"rate(craton_lustre_requests_total{{{HERE}}}{RATE})"

RUNS = PanelRow(
    "Impact on runs",
    (
        Panel(
            "Waiting for data",
            "Time per step. Above its plan while Lustre is fast: too few data loader workers.",
            twin("data_seconds"),
            unit="s",
            alerts=("DataStarved",),
        ),
        Panel(
            "Checkpoint stall",
            "Averaged over the steps.",
            twin("checkpoint_seconds"),
            unit="s",
        ),
        Panel(
            "Age of the newest checkpoint",
            "By tier; dashed is the planned interval. The age is the work that a fault now would lose.",
            (
                PanelQuery('craton:checkpoint_age_seconds{run=~"$run"}', "{{run}} {{tier}}"),
                PanelQuery(
                    'max by (run, tier) (craton_plan_checkpoint_interval_seconds{run=~"$run"})',
                    "{{run}} {{tier}} planned",
                    is_plan=True,
                ),
            ),
            unit="s",
            alerts=("CheckpointStale", "CheckpointNever"),
        ),
    ),
)

LUSTRE = PanelRow(
    "Lustre clients",
    (
        Panel(
            "Throughput",
            "Reads and writes of all nodes, by file system.",
            (
                PanelQuery(f"sum by (target) (rate(lustre_read_bytes_total{{{HERE}}}{RATE}))", "{{target}} read"),
                PanelQuery(f"sum by (target) (rate(lustre_write_bytes_total{{{HERE}}}{RATE}))", "{{target}} written"),
            ),
            unit="Bps",
            alerts=("LustreStalled", "FileSystemSilent"),
        ),
        Panel(
            "Top readers",
            "Ten nodes. One that reads far more than its peers has a cold cache, or loads other data.",
            (PanelQuery(f"topk(10, sum by (node) (rate(lustre_read_bytes_total{{{HERE}}}{RATE})))", "{{node}}"),),
            unit="Bps",
        ),
        Panel(
            "File operations",
            "By kind. Thousands of opens per second are small files: pack them.",
            (PanelQuery(f"sum by (operation) (rate(lustre_stats_total{{{HERE}}}{RATE}))", "{{operation}}"),),
            unit="ops",
        ),
        Panel(
            "Request latency, by server",
            "Ten slowest. One server: it is hot or failing, use more stripes. All servers: the network, or the "
            "provisioned throughput is used up.",
            (
                PanelQuery(
                    "topk(10, sum by (component, target) ("
                    f"{LUSTRE_WAIT}) / sum by (component, target) ({LUSTRE_REQUESTS}))",
                    "{{target}} ({{component}})",
                ),
            ),
            unit="s",
            alerts=("LustreSlow",),
        ),
        Panel(
            "Latency of metadata operations",
            "Mean by kind, where the client reports it.",
            (
                PanelQuery(
                    f"sum by (operation) (rate(craton_lustre_operation_seconds_total{{{HERE}}}{RATE}))"
                    f" / sum by (operation) (rate(lustre_stats_total{{{HERE}}}{RATE}))",
                    "{{operation}}",
                ),
            ),
            unit="s",
            alerts=("LustreSlow",),
        ),
        Panel(
            "Disconnected servers",
            "By node. One node: its network. Many nodes: the server.",
            (PanelQuery(f"sum by (node) (1 - craton_lustre_connected{{{HERE}}})", "{{node}}"),),
            unit="short",
            alerts=("LustreDisconnected",),
        ),
    ),
)

FSX = PanelRow(
    "FSx (CloudWatch)",
    (
        Panel(
            "FSx throughput",
            "Reads and writes of all clients.",
            (
                PanelQuery("max by (file_system_id) (aws_fsx_data_read_bytes_sum) / 60", "{{file_system_id}} read"),
                PanelQuery("max by (file_system_id) (aws_fsx_data_write_bytes_sum) / 60", "{{file_system_id}} written"),
            ),
            unit="Bps",
        ),
        Panel(
            "Busiest target over the mean",
            "Near 1 is even. Several times the mean: one target is hot because a file has too few stripes.",
            (
                PanelQuery(
                    "max by (file_system_id) (aws_fsx_data_read_bytes_maximum / aws_fsx_data_read_bytes_average)",
                    "{{file_system_id}} reads",
                ),
            ),
            unit="short",
        ),
        Panel(
            "FSx free space",
            "Of all targets, and of the fullest one: writes fail when that one is full.",
            (
                PanelQuery("min by (file_system_id) (aws_fsx_free_data_storage_capacity_sum)", "{{file_system_id}}"),
                PanelQuery(
                    "min by (file_system_id) (aws_fsx_free_data_storage_capacity_minimum)",
                    "{{file_system_id}} fullest target",
                ),
            ),
            unit="bytes",
            alerts=("FsxTargetNearlyFull",),
        ),
    ),
)

DISKS = PanelRow(
    "File systems and drives",
    (
        Panel(
            "Fullest file systems",
            "Ten, by node. A shared file system appears once per node.",
            (
                PanelQuery(
                    "topk(10, max by (node, mountpoint) ("
                    f"1 - node_filesystem_avail_bytes{{{HERE}}} / node_filesystem_size_bytes))",
                    "{{node}} {{mountpoint}}",
                ),
            ),
            unit="percentunit",
            kind="bars",
            warn=0.8,
            bad=0.95,
            alerts=("DiskNearlyFull", "DiskFillsSoon", "SharedNearlyFull", "SharedFillsSoon"),
        ),
        Panel(
            "Busiest drives",
            "Ten, by share of time in which they were busy.",
            (
                PanelQuery(
                    f"topk(10, max by (node, device) (rate(node_disk_io_time_seconds_total{{{HERE}}}{RATE})))",
                    "{{node}} {{device}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Write latency",
            "Ten slowest drives. Above 50 ms an NVMe drive is failing or throttled.",
            (
                PanelQuery(
                    f"topk(10, max by (node, device) (rate(node_disk_write_time_seconds_total{{{HERE}}}{RATE})"
                    f" / rate(node_disk_writes_completed_total{{{HERE}}}{RATE})))",
                    "{{node}} {{device}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            "I/O stalls",
            "Share of time in which all processes of the node waited for I/O, ten worst nodes.",
            (
                PanelQuery(
                    f"topk(10, max by (node) (rate(node_pressure_io_stalled_seconds_total{{{HERE}}}{RATE})))",
                    "{{node}}",
                ),
            ),
            unit="percentunit",
            alerts=("StorageStalls",),
        ),
        Panel(
            "NVMe life used",
            "The ten worst. Above 1 the drive is beyond its rated life.",
            (
                PanelQuery(
                    f"topk(10, max by (node, device) (nvme_percentage_used_ratio{{{HERE}}}))", "{{node}} {{device}}"
                ),
            ),
            unit="percentunit",
            alerts=("DriveFailing",),
        ),
        Panel(
            "NVMe media errors",
            "Over the drive's lifetime, the ten worst. Have them replaced.",
            (
                PanelQuery(
                    f"topk(10, max by (node, device) (nvme_media_errors_total{{{HERE}}}))", "{{node}} {{device}}"
                ),
            ),
            unit="short",
            alerts=("DriveFailing",),
        ),
    ),
)

STORAGE = Board(
    "storage",
    "Storage",
    "Impact of storage on runs, Lustre and FSx, file systems and drives.",
    (RUN, LEAF, NODE),
    (RUNS, LUSTRE, FSX, DISKS),
)
