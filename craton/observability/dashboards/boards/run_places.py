"""Ranks, GPUs and nodes of a run: two rows of its dashboard."""

from __future__ import annotations

from craton.observability.dashboards.boards.twins import RUN_HERE, twin
from craton.observability.dashboards.model import Panel, PanelQuery, PanelRow

OF_RUN = 'run=~"$run"'
# Nodes of a run by host name; the run's own node names may differ.
ON_ITS_NODES = f"max by (run, node) (craton_node_run_ranks{{{OF_RUN}}} > bool 0) * on (node) group_left ()"

RANKS = PanelRow(
    "Ranks",
    (
        Panel(
            "Longest compute",
            "Ten ranks. One that stands out and waits little in collectives is the straggler: check its GPU.",
            (
                PanelQuery(
                    f"topk(10, max by (run, rank, node) (craton_run_compute_seconds{{{RUN_HERE}}}))",
                    "{{rank}} on {{node}}",
                ),
                twin("compute_seconds")[-1],
            ),
            unit="s",
            kind="bars",
            alerts=("StragglerRank",),
        ),
        Panel(
            "Shortest wait in collectives",
            "Ten ranks. In synchronous training the slow rank waits the shortest.",
            (
                PanelQuery(
                    f"bottomk(10, max by (run, rank, node) (craton_run_communication_seconds{{{RUN_HERE}}}))",
                    "{{rank}} on {{node}}",
                ),
                twin("communication_seconds")[-1],
            ),
            unit="s",
            kind="bars",
            alerts=("StragglerRank",),
        ),
        Panel(
            "Longest without progress",
            "Ten ranks. When a run hangs, look first at the rank that stopped first.",
            (
                PanelQuery(
                    f"topk(10, max by (run, rank, node) (craton_run_progress_age_seconds{{{RUN_HERE}}}))",
                    "{{rank}} on {{node}}",
                ),
            ),
            unit="s",
            kind="bars",
            warn=60,
            bad=300,
            alerts=("RunHung",),
        ),
        Panel(
            "Steps, first and last rank",
            "Diverging lines: ranks are no longer in step.",
            (
                PanelQuery(f"max by (run) (craton_run_step{{{RUN_HERE}}})", "{{run}} first"),
                PanelQuery(f"min by (run) (craton_run_step{{{RUN_HERE}}})", "{{run}} last"),
            ),
            unit="short",
            alerts=("RunHung",),
        ),
        Panel(
            "Compute of the slowest rank over the median",
            "1 is even. Above 1.15 for 10 minutes, one rank slows all others by that share of the step.",
            (
                PanelQuery(
                    f"max by (run) (craton_run_compute_seconds{{{RUN_HERE}}})"
                    f" / quantile by (run) (0.5, craton_run_compute_seconds{{{RUN_HERE}}})",
                    "{{run}}",
                ),
            ),
            unit="short",
            alerts=("StragglerRank",),
        ),
        Panel(
            "Gradient norm of a rank over the median rank",
            "Highest and lowest. Ranks hold different shards, so the level means nothing; a jump means that a GPU may "
            "produce wrong results.",
            (
                PanelQuery(f"max by (run) (craton:rank_gradient_norm:ratio{{{OF_RUN}}})", "{{run}} highest"),
                PanelQuery(f"min by (run) (craton:rank_gradient_norm:ratio{{{OF_RUN}}})", "{{run}} lowest"),
            ),
            unit="short",
            alerts=("RankGradientOff",),
        ),
    ),
)

MACHINES = PanelRow(
    "GPUs and nodes",
    (
        Panel(
            "GPU activity",
            "Lowest and median GPU. A GPU far below the others waits, or is slow.",
            (
                PanelQuery(f"quantile by (run) (0.5, DCGM_FI_PROF_SM_ACTIVE{{{OF_RUN}}})", "{{run}} median"),
                PanelQuery(f"min by (run) (DCGM_FI_PROF_SM_ACTIVE{{{OF_RUN}}})", "{{run}} lowest"),
                PanelQuery(
                    f"quantile by (run) (0.5, DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{OF_RUN}}})", "{{run}} tensor cores"
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "SM clock",
            "Lowest and median. A GPU below its peers is throttled: the node dashboard has the reason.",
            (
                PanelQuery(f"quantile by (run) (0.5, DCGM_FI_DEV_SM_CLOCK{{{OF_RUN}}}) * 1e6", "{{run}} median"),
                PanelQuery(f"min by (run) (DCGM_FI_DEV_SM_CLOCK{{{OF_RUN}}}) * 1e6", "{{run}} lowest"),
                PanelQuery(
                    f"max by (run) (DCGM_FI_DEV_MAX_SM_CLOCK{{{OF_RUN}}}) * 1e6",
                    "{{run}} maximum",
                    is_plan=True,
                ),
            ),
            unit="hertz",
            alerts=("GpuThrottled", "GpuClockBelowPeers"),
        ),
        Panel(
            "GPU memory of ranks",
            "As the driver counts it, including the allocator's cache; dashed is the planned peak.",
            (
                PanelQuery(f"max by (run) (craton_gpu_rank_memory_bytes{{{OF_RUN}}})", "{{run}} highest rank"),
                twin("memory_bytes")[-1],
            ),
            unit="bytes",
        ),
        Panel(
            "Host memory used",
            "Near 1 the kernel kills processes: use fewer data loader workers, or smaller buffers.",
            (
                PanelQuery(
                    f"{ON_ITS_NODES} max by (node) (1 - node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes)",
                    "{{run}} {{node}}",
                ),
            ),
            unit="percentunit",
            alerts=("MemoryNearlyGone", "ProcessKilledForMemory"),
        ),
        Panel(
            "CPU pressure",
            "Share of time in which a process waited for a CPU. Ranks and loaders that share cores slow each other.",
            (
                PanelQuery(
                    f"{ON_ITS_NODES} max by (node) (rate(node_pressure_cpu_waiting_seconds_total[$__rate_interval]))",
                    "{{run}} {{node}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "I/O stalls",
            "Share of time in which all processes waited for I/O. Loading and checkpoints take minutes, not hours.",
            (
                PanelQuery(
                    f"{ON_ITS_NODES} max by (node) (rate(node_pressure_io_stalled_seconds_total[$__rate_interval]))",
                    "{{run}} {{node}}",
                ),
            ),
            unit="percentunit",
            alerts=("StorageStalls",),
        ),
    ),
)
