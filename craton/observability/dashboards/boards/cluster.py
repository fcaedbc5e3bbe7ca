"""Cluster health: what alerts, which nodes and cards answer, what is wrong with cards, and what the queue does.

A card that two exporters serve counts once: sums go over UUIDs.
"""

from __future__ import annotations

from craton.observability.dashboards.model import LEAF, NODE, Board, Panel, PanelQuery, PanelRow

HERE = 'node=~"$node", leaf=~"$leaf"'
MACHINES = 'job=~"craton-node|dcgm|node", node=~"$node"'

NOW = PanelRow(
    "Now",
    (
        Panel(
            "Alerts that fire",
            "By severity. A page wants somebody now; the list beside says which, and what to do.",
            (PanelQuery('count by (severity) (ALERTS{alertstate="firing"})', "{{severity}}"),),
            unit="short",
            kind="stat",
            width=4,
            warn=1,
            nothing="0",
        ),
        Panel(
            "Nodes",
            "Machines whose exporter answers, of those that are known. One that is silent is down, or its exporter is.",
            (
                PanelQuery(f"count(max by (node) (up{{{MACHINES}}}) == 1)", "answer"),
                PanelQuery(f"count(max by (node) (up{{{MACHINES}}}))", "known", is_plan=True),
            ),
            unit="short",
            kind="stat",
            width=4,
            alerts=("NodeDown", "ExporterDown"),
        ),
        Panel(
            "GPUs",
            "Cards that nodes see, and how many they should: a node with 7 of 8 cards trains nothing. Drain it.",
            (
                PanelQuery('sum(craton:node_gpus{node=~"$node"})', "seen"),
                PanelQuery('sum(craton:node_gpus_expected{node=~"$node"})', "expected", is_plan=True),
            ),
            unit="short",
            kind="stat",
            width=4,
            alerts=("GpuMissing",),
        ),
        Panel(
            "What alerts",
            "Every alert that fires. `action` is what to do; `craton why RUN` gives one verdict for a run.",
            (
                PanelQuery(
                    "max by (alertname, severity, layer, action, run, node, rank, gpu)"
                    ' (ALERTS_FOR_STATE and ignoring (alertstate) ALERTS{alertstate="firing"}) * 1000',
                    "since",
                ),
            ),
            unit="dateTimeAsIso",
            kind="table",
            width=12,
            nothing="nothing fires",
        ),
    ),
)

RUNS = PanelRow(
    "Runs",
    (
        Panel(
            "Runs that go on",
            "A progress age beyond twenty steps is a hang; a step above its plan costs money: `craton why RUN`.",
            (
                PanelQuery('max by (run) (craton_run_step{model_name=""})', "step", unit="short"),
                PanelQuery('max by (run) (craton_run_step_seconds{model_name=""})', "step time"),
                PanelQuery('max by (run) (craton_plan_step_seconds{model_name=""})', "planned"),
                PanelQuery('max by (run) (craton_run_progress_age_seconds{model_name=""})', "since progress"),
                PanelQuery("max by (run) (craton_run_goodput)", "goodput", unit="percentunit"),
                PanelQuery("max by (run) (craton_plan_goodput)", "goodput planned", unit="percentunit"),
                PanelQuery("max by (run) (craton_run_restarts_total)", "restarts", unit="short"),
            ),
            unit="s",
            kind="table",
            width=24,
            alerts=("RunHung", "StepSlowerThanPlan", "RestartLoop"),
            opens="run",
        ),
    ),
)

CARDS = PanelRow(
    "Cards",
    (
        Panel(
            "Work of the cards, by leaf",
            "Share of multiprocessors and of tensor cores that had work. A leaf that falls while others do not has a "
            "fault of its own; all of them falling is a queue that is empty or a run that waits.",
            (
                PanelQuery(f"avg by (leaf) (DCGM_FI_PROF_SM_ACTIVE{{{HERE}}})", "multiprocessors {{leaf}}"),
                PanelQuery(f"avg by (leaf) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{HERE}}})", "tensor cores {{leaf}}"),
            ),
            unit="percentunit",
        ),
        Panel(
            "Hottest card, by leaf",
            "Clocks fall at the slowdown temperature. One leaf hotter than the others is cooling, not load.",
            (
                PanelQuery(f"max by (leaf) (DCGM_FI_DEV_GPU_TEMP{{{HERE}}})", "{{leaf}}"),
                PanelQuery(f"max by (leaf) (DCGM_FI_DEV_MEMORY_TEMP{{{HERE}}})", "memory {{leaf}}"),
                PanelQuery(f"min(DCGM_FI_DEV_SLOWDOWN_TEMP{{{HERE}}})", "clocks fall", is_plan=True),
            ),
            unit="celsius",
            alerts=("GpuThrottled",),
        ),
        Panel(
            "Power, by leaf",
            "A leaf that draws less than its like works less: compare with the work beside it.",
            (PanelQuery(f"sum by (leaf) (max by (leaf, UUID) (DCGM_FI_DEV_POWER_USAGE{{{HERE}}}))", "{{leaf}}"),),
            unit="watt",
        ),
        Panel(
            "XIDs of the last quarter of an hour",
            "By card and code. What each asks for, from watching to a new node, is in the XID table: `craton heal`.",
            (
                PanelQuery(
                    f"max by (node, gpu, xid) (craton:gpu_xid_events:15m{{{HERE}}})",
                    "{{node}} GPU {{gpu}}: XID {{xid}}",
                ),
            ),
            unit="short",
            nothing="none",
            alerts=("GpuXidReplace", "GpuXidReboot", "GpuXidReset", "GpuXidRestart"),
        ),
        Panel(
            "Clocks held down, cards",
            "By reason. Heat and power brakes cost speed and hold up every peer; being idle is no fault.",
            (
                PanelQuery(
                    f"sum by (reason) (max by (UUID, reason) (craton_gpu_clocks_held{{{HERE}}}))",
                    "{{reason}}",
                ),
            ),
            unit="short",
            alerts=("GpuThrottled", "GpuClockBelowPeers"),
        ),
        Panel(
            "Memory errors within an hour",
            "Ten worst nodes. Corrected errors that rise foretell the others; an uncorrected one needs a reset.",
            (
                PanelQuery(
                    f"topk(10, sum by (node) (increase(DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{{{HERE}}}[1h])))",
                    "{{node}} corrected",
                ),
                PanelQuery(
                    f"topk(10, sum by (node) (increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{HERE}}}[1h])))",
                    "{{node}} uncorrected",
                ),
            ),
            unit="short",
            alerts=("GpuEccUncorrectable", "GpuEccCorrectableRising"),
        ),
        Panel(
            "Rows of memory to replace, cards",
            "Pending: reset the card when its job is done. Failed: no spare rows are left, have the node replaced.",
            (
                PanelQuery(f"sum(max by (UUID) (DCGM_FI_DEV_ROW_REMAP_PENDING{{{HERE}}}))", "pending"),
                PanelQuery(f"sum(max by (UUID) (DCGM_FI_DEV_ROW_REMAP_FAILURE{{{HERE}}}))", "failed"),
            ),
            unit="short",
            alerts=("GpuRowRemapPending", "GpuRowRemapFailure"),
        ),
        Panel(
            "NVLinks that are down",
            "Ten worst nodes. One missing link slows every collective inside its node: drain and reset.",
            (
                PanelQuery(
                    f"topk(10, sum by (node) (craton_gpu_nvlink_links{{{HERE}}} - craton_gpu_nvlink_active_links))",
                    "{{node}}",
                ),
            ),
            unit="short",
            alerts=("NvlinkLinksDown",),
        ),
        Panel(
            "NVLink errors",
            "Ten worst nodes, within a quarter of an hour, by what counts them. Replays cost a little; recoveries stop "
            "the link for a moment, and one that failed for good.",
            (
                PanelQuery(
                    f"topk(10, sum by (node, field) (craton:gpu_nvlink_errors:15m{{{HERE}}}))", "{{node}} {{field}}"
                ),
            ),
            unit="short",
            alerts=("NvlinkErrors",),
        ),
    ),
)

NODES = PanelRow(
    "Nodes",
    (
        Panel(
            "Nodes side by side",
            "Click a name for its own page. Whoever differs from its neighbours is where to look first.",
            (
                PanelQuery('max by (node) (craton:node_gpus{node=~"$node"})', "GPUs", unit="short"),
                PanelQuery(f"max by (node) (DCGM_FI_DEV_GPU_TEMP{{{HERE}}})", "hottest", unit="celsius"),
                PanelQuery(f"min by (node) (DCGM_FI_DEV_SM_CLOCK{{{HERE}}}) * 1e6", "slowest clock", unit="hertz"),
                PanelQuery(
                    f"max by (node) (1 - node_memory_MemAvailable_bytes{{{HERE}}} / node_memory_MemTotal_bytes)",
                    "memory used",
                ),
                PanelQuery(
                    f"max by (node) (1 - node_filesystem_avail_bytes{{{HERE}}} / node_filesystem_size_bytes)",
                    "fullest disk",
                ),
                PanelQuery(f"max by (node) (node_load5{{{HERE}}})", "load", unit="short"),
                PanelQuery(f"max by (node) (node_boot_time_seconds{{{HERE}}}) * 1000", "booted", unit="dateTimeAsIso"),
            ),
            unit="percentunit",
            kind="table",
            width=24,
            height=9,
            opens="node",
        ),
    ),
)

QUEUE = PanelRow(
    "Queue",
    (
        Panel(
            "Slurm's nodes",
            "Drained nodes cost their full price and do nothing: `sinfo -R` says why. Needs Slurm 25.11 or later.",
            (
                PanelQuery("max(slurm_nodes)", "all", is_plan=True),
                PanelQuery("max(slurm_nodes_idle)", "idle"),
                PanelQuery("max(slurm_nodes_drain)", "drained"),
                PanelQuery("max(slurm_nodes_down)", "down"),
            ),
            unit="short",
            alerts=("SlurmNodesDrained", "SlurmNodesDown"),
        ),
        Panel(
            "Slurm's jobs",
            "Jobs that wait while nodes are idle wait for something else: `craton why RUN`.",
            (
                PanelQuery("max(slurm_jobs_running)", "run"),
                PanelQuery("max(slurm_jobs_pending)", "wait"),
            ),
            unit="short",
            alerts=("SlurmNothingStarts",),
        ),
        Panel(
            "Kueue's workloads that wait",
            "Active ones are tried in order; inadmissible ones when the cluster changes: look at quota and flavors.",
            (PanelQuery("sum by (cluster_queue, status) (kueue_pending_workloads)", "{{cluster_queue}} {{status}}"),),
            unit="short",
            alerts=("KueueWorkloadStuck",),
        ),
        Panel(
            "Kueue: admitted until ready",
            "The time that nine of ten kept. Long ones point at images, volumes, or nodes that cannot be had.",
            (
                PanelQuery(
                    "histogram_quantile(0.9, sum by (le, cluster_queue) ("
                    "rate(kueue_admitted_until_ready_wait_time_seconds_bucket[30m])))",
                    "{{cluster_queue}}",
                ),
            ),
            unit="s",
            width=12,
            alerts=("KueueAdmittedNotReady",),
        ),
        Panel(
            "Kueue: evictions within an hour",
            "PodsReadyTimeout points at nodes, Preempted at priorities.",
            (
                PanelQuery(
                    "sum by (cluster_queue, reason) (increase(kueue_evicted_workloads_total[1h]))",
                    "{{cluster_queue}}: {{reason}}",
                ),
            ),
            unit="short",
            width=12,
            alerts=("KueueEvictions",),
        ),
    ),
)

CLUSTER = Board(
    "cluster",
    "Cluster health",
    "Which nodes and cards answer, what is wrong with them, and what the queue does.",
    (LEAF, NODE),
    (NOW, RUNS, CARDS, NODES, QUEUE),
)
