"""Storage: what runs notice of it, Lustre's clients, FSx as CloudWatch sees it, file systems and drives."""

from __future__ import annotations

from craton.observability.dashboards.boards.twins import twin
from craton.observability.dashboards.model import LEAF, NODE, RUN, Board, Panel, PanelQuery, PanelRow

HERE = 'node=~"$node", leaf=~"$leaf"'
RATE = "[$__rate_interval]"
LUSTRE_WAIT = f"rate(craton_lustre_request_seconds_total{{{HERE}}}{RATE})"
LUSTRE_REQUESTS = f"rate(craton_lustre_requests_total{{{HERE}}}{RATE})"

RUNS = PanelRow(
    "What runs notice",
    (
        Panel(
            "Waiting for data",
            "Time of a step. Above its plan while Lustre is quick: too few workers that load.",
            twin("data_seconds"),
            unit="s",
            alerts=("DataStarved",),
        ),
        Panel(
            "Standing still for checkpoints",
            "Spread over the steps.",
            twin("checkpoint_seconds"),
            unit="s",
        ),
        Panel(
            "Age of the newest checkpoint",
            "By tier; dashed is how often one is planned. What a fault now would cost.",
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
    "Lustre, as its clients see it",
    (
        Panel(
            "Read and written by programs",
            "On all nodes, by file system.",
            (
                PanelQuery(f"sum by (target) (rate(lustre_read_bytes_total{{{HERE}}}{RATE}))", "{{target}} read"),
                PanelQuery(f"sum by (target) (rate(lustre_write_bytes_total{{{HERE}}}{RATE}))", "{{target}} written"),
            ),
            unit="Bps",
            alerts=("LustreStalled", "FileSystemSilent"),
        ),
        Panel(
            "Nodes that read most",
            "Ten. One that reads far more than its peers has a cold cache, or loads what others have.",
            (PanelQuery(f"topk(10, sum by (node) (rate(lustre_read_bytes_total{{{HERE}}}{RATE})))", "{{node}}"),),
            unit="Bps",
        ),
        Panel(
            "Operations on files",
            "By kind. Thousands of opens a second are small files: pack them.",
            (PanelQuery(f"sum by (operation) (rate(lustre_stats_total{{{HERE}}}{RATE}))", "{{operation}}"),),
            unit="ops",
        ),
        Panel(
            "Time of a request, by server",
            "Ten slowest. One server alone is hot or ill: spread stripes. All of them: the network, or throughput is "
            "used up.",
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
            "Time of metadata operations",
            "Mean by kind, where the client tells it.",
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
            "Servers that are not connected",
            "By node. One node alone has a bad network; many nodes have a server that is gone.",
            (PanelQuery(f"sum by (node) (1 - craton_lustre_connected{{{HERE}}})", "{{node}}"),),
            unit="short",
            alerts=("LustreDisconnected",),
        ),
    ),
)

FSX = PanelRow(
    "FSx, as CloudWatch sees it",
    (
        Panel(
            "Read and written",
            "By all clients.",
            (
                PanelQuery("max by (file_system_id) (aws_fsx_data_read_bytes_sum) / 60", "{{file_system_id}} read"),
                PanelQuery("max by (file_system_id) (aws_fsx_data_write_bytes_sum) / 60", "{{file_system_id}} written"),
            ),
            unit="Bps",
        ),
        Panel(
            "Busiest target over the mean",
            "Near 1 is even. Several times the mean: one target is hot, a file has too few stripes.",
            (
                PanelQuery(
                    "max by (file_system_id) (aws_fsx_data_read_bytes_maximum / aws_fsx_data_read_bytes_average)",
                    "{{file_system_id}} reads",
                ),
            ),
            unit="short",
        ),
        Panel(
            "Free",
            "Of all targets, and of the fullest: writes fail when that one is full.",
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
            "Ten, by node. A shared one shows once for each node.",
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
            "Share of time in which they had something to do, ten of them.",
            (
                PanelQuery(
                    f"topk(10, max by (node, device) (rate(node_disk_io_time_seconds_total{{{HERE}}}{RATE})))",
                    "{{node}} {{device}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Time of a write",
            "Ten slowest drives. Above 50 ms an NVMe drive is ill or throttled.",
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
            "Nodes that wait for storage",
            "Share of time in which everybody on the node did, ten worst.",
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
            "Life of NVMe drives",
            "Used up, the ten worst. Beyond 1 the maker promises nothing.",
            (
                PanelQuery(
                    f"topk(10, max by (node, device) (nvme_percentage_used_ratio{{{HERE}}}))", "{{node}} {{device}}"
                ),
            ),
            unit="percentunit",
            alerts=("DriveFailing",),
        ),
        Panel(
            "Errors of NVMe drives",
            "Data that could not be read or written whole, in a drive's life, the ten worst. Have them replaced.",
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
    "What runs notice of storage, Lustre and FSx, file systems and drives.",
    (RUN, LEAF, NODE),
    (RUNS, LUSTRE, FSX, DISKS),
)
