"""Cluster health: firing alerts, nodes and GPUs that answer, GPU faults, and the scheduler queue.

A GPU that two exporters export counts once: sums go over UUIDs.
"""

from __future__ import annotations

from craton.observability.dashboards.model import LEAF, NODE, Board, Panel, PanelQuery, PanelRow

HERE = 'node=~"$node", leaf=~"$leaf"'
MACHINES = 'job=~"craton-node|dcgm|node", node=~"$node"'

NOW = PanelRow(
    "Now",
    (
        Panel(
            "Firing alerts",
            "By severity. A page needs attention now; the table shows which alerts fire, and the action for each.",
            (PanelQuery('count by (severity) (ALERTS{alertstate="firing"})', "{{severity}}"),),
            unit="short",
            kind="stat",
            width=4,
            warn=1,
            nothing="0",
        ),
        Panel(
            "Nodes",
            "Nodes whose exporter answers, of all known nodes. For a silent one, the node or its exporter is down.",
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
            "GPUs that nodes see, and the expected number. A node with 7 of 8 GPUs cannot train: drain it.",
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
            "Active alerts",
            "Every firing alert. `action` is what to do; `craton why RUN` gives the root cause for a run.",
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
            "Active runs",
            "No progress for more than 20 steps is a hang; a step slower than planned costs money: `craton why RUN`.",
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
    "GPUs",
    (
        Panel(
            "GPU activity, by leaf",
            "Share of SMs and of tensor cores that were active. A single leaf that drops has a fault; if all drop, the "
            "queue is empty or a run waits.",
            (
                PanelQuery(f"avg by (leaf) (DCGM_FI_PROF_SM_ACTIVE{{{HERE}}})", "SMs {{leaf}}"),
                PanelQuery(f"avg by (leaf) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{HERE}}})", "tensor cores {{leaf}}"),
            ),
            unit="percentunit",
        ),
        Panel(
            "Hottest GPU, by leaf",
            "GPUs throttle at the slowdown temperature. A leaf hotter than the others has a cooling problem.",
            (
                PanelQuery(f"max by (leaf) (DCGM_FI_DEV_GPU_TEMP{{{HERE}}})", "{{leaf}}"),
                PanelQuery(f"max by (leaf) (DCGM_FI_DEV_MEMORY_TEMP{{{HERE}}})", "memory {{leaf}}"),
                PanelQuery(f"min(DCGM_FI_DEV_SLOWDOWN_TEMP{{{HERE}}})", "slowdown", is_plan=True),
            ),
            unit="celsius",
            alerts=("GpuThrottled",),
        ),
        Panel(
            "Power, by leaf",
            "A leaf that draws less power than its peers works less: compare with the GPU activity.",
            (PanelQuery(f"sum by (leaf) (max by (leaf, UUID) (DCGM_FI_DEV_POWER_USAGE{{{HERE}}}))", "{{leaf}}"),),
            unit="watt",
        ),
        Panel(
            "XIDs in the last 15 minutes",
            "By GPU and code. The XID table has the action for each, from observe to replace: `craton heal`.",
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
            "Throttled GPUs",
            "By reason. Heat and power brakes slow the GPU and all its peers; idle clocks are normal.",
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
            "ECC errors in the last hour",
            "Ten worst nodes. Rising correctable errors precede uncorrectable ones; those need a reset.",
            (
                PanelQuery(
                    f"topk(10, sum by (node) (increase(DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{{{HERE}}}[1h])))",
                    "{{node}} correctable",
                ),
                PanelQuery(
                    f"topk(10, sum by (node) (increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{HERE}}}[1h])))",
                    "{{node}} uncorrectable",
                ),
            ),
            unit="short",
            alerts=("GpuEccUncorrectable", "GpuEccCorrectableRising"),
        ),
        Panel(
            "GPUs with row remapping",
            "Pending: reset the GPU when its job is done. Failed: no spare rows are left, replace the node.",
            (
                PanelQuery(f"sum(max by (UUID) (DCGM_FI_DEV_ROW_REMAP_PENDING{{{HERE}}}))", "pending"),
                PanelQuery(f"sum(max by (UUID) (DCGM_FI_DEV_ROW_REMAP_FAILURE{{{HERE}}}))", "failed"),
            ),
            unit="short",
            alerts=("GpuRowRemapPending", "GpuRowRemapFailure"),
        ),
        Panel(
            "NVLinks down",
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
            "Ten worst nodes, in the last 15 minutes, by counter. Replays cost little; recoveries pause the link, a "
            "failed recovery takes it down.",
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
            "Click a name for its dashboard. Look first at nodes that differ from their peers.",
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
            "Slurm nodes",
            "Drained nodes cost their full price and do no work: see `sinfo -R`. Needs Slurm 25.11 or later.",
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
            "Slurm jobs",
            "Jobs that are pending while nodes are idle wait for something else: `craton why RUN`.",
            (
                PanelQuery("max(slurm_jobs_running)", "running"),
                PanelQuery("max(slurm_jobs_pending)", "pending"),
            ),
            unit="short",
            alerts=("SlurmNothingStarts",),
        ),
        Panel(
            "Kueue pending workloads",
            "Active ones are tried in order; inadmissible ones only when the cluster changes: check quota and flavors.",
            (PanelQuery("sum by (cluster_queue, status) (kueue_pending_workloads)", "{{cluster_queue}} {{status}}"),),
            unit="short",
            alerts=("KueueWorkloadStuck",),
        ),
        Panel(
            "Kueue: admitted until ready",
            "90th percentile. Long times point at image pulls, volumes, or missing node capacity.",
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
            "Kueue: evictions in the last hour",
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
    "Firing alerts, nodes and GPUs that answer, GPU faults, and the scheduler queue.",
    (LEAF, NODE),
    (NOW, RUNS, CARDS, NODES, QUEUE),
)
