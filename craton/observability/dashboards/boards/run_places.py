"""Where a run is: its ranks, and the cards and nodes it has. Two rows of its board."""

from __future__ import annotations

from craton.observability.dashboards.boards.twins import RUN_HERE, twin
from craton.observability.dashboards.model import Panel, PanelQuery, PanelRow

OF_RUN = 'run=~"$run"'
# Nodes a run has by what machines call themselves; what an agent calls its node may be another name.
ON_ITS_NODES = f"max by (run, node) (craton_node_run_ranks{{{OF_RUN}}} > bool 0) * on (node) group_left ()"

RANKS = PanelRow(
    "Ranks",
    (
        Panel(
            "Longest compute",
            "Ten ranks. One that stands out here and waits little in collectives holds everybody up: look at its card.",
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
            "Ten ranks. In lock-step training the slow rank is the one that waits least.",
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
            "Ten ranks. When a run hangs, the rank that stopped first is asked first.",
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
            "Lines that part: ranks do not go in step any more.",
            (
                PanelQuery(f"max by (run) (craton_run_step{{{RUN_HERE}}})", "{{run}} first"),
                PanelQuery(f"min by (run) (craton_run_step{{{RUN_HERE}}})", "{{run}} last"),
            ),
            unit="short",
            alerts=("RunHung",),
        ),
        Panel(
            "Compute of the slowest rank over the median",
            "1 is even. Above 1.15 for ten minutes one rank costs everybody that share of the step.",
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
            "Gradient of a rank over the median rank",
            "Highest and lowest. Ranks hold different parts, so the level says nothing; a jump says that a card may "
            "compute wrong.",
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
    "Its cards and nodes",
    (
        Panel(
            "Work of its cards",
            "Lowest and median card. A card far below the others waits, or is slow.",
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
            "Clock of its cards",
            "Lowest and median. A card below its peers is throttled: the board of its node says why.",
            (
                PanelQuery(f"quantile by (run) (0.5, DCGM_FI_DEV_SM_CLOCK{{{OF_RUN}}}) * 1e6", "{{run}} median"),
                PanelQuery(f"min by (run) (DCGM_FI_DEV_SM_CLOCK{{{OF_RUN}}}) * 1e6", "{{run}} lowest"),
                PanelQuery(
                    f"max by (run) (DCGM_FI_DEV_MAX_SM_CLOCK{{{OF_RUN}}}) * 1e6",
                    "{{run}} highest there is",
                    is_plan=True,
                ),
            ),
            unit="hertz",
            alerts=("GpuThrottled", "GpuClockBelowPeers"),
        ),
        Panel(
            "Memory that ranks hold on cards",
            "As the driver counts it, with what the allocator keeps; dashed is the plan's peak.",
            (
                PanelQuery(f"max by (run) (craton_gpu_rank_memory_bytes{{{OF_RUN}}})", "{{run}} highest rank"),
                twin("memory_bytes")[-1],
            ),
            unit="bytes",
        ),
        Panel(
            "Memory of its nodes, used",
            "Where it nears 1 the kernel kills processes: fewer workers that load, or smaller buffers.",
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
            "Its nodes wait for a processor",
            "Share of time in which somebody did. Ranks and loaders that share cores slow each other down.",
            (
                PanelQuery(
                    f"{ON_ITS_NODES} max by (node) (rate(node_pressure_cpu_waiting_seconds_total[$__rate_interval]))",
                    "{{run}} {{node}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Its nodes wait for storage",
            "Share of time in which everybody did: loading and checkpoints do that for minutes, not for hours.",
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
