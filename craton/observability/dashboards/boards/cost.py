"""Cost and goodput: cost of runs against plan, where time is lost, and idle GPUs."""

from __future__ import annotations

from craton.observability.dashboards.boards.twins import RUN_HERE, twin
from craton.observability.dashboards.model import RUN, Board, Panel, PanelQuery, PanelRow

OF_RUN = 'run=~"$run"'
COST = f"max by (run) (craton_run_cost_dollars{{{OF_RUN}}})"
PER_DAY = f"max by (run) (deriv(craton_run_cost_dollars{{{OF_RUN}}}[$__rate_interval])) * 86400"
MEASURED_STEP = f"max by (run) (craton_run_step_seconds{{{RUN_HERE}}})"
PLANNED_STEP = f"max by (run) (craton_plan_step_seconds{{{RUN_HERE}}})"

MONEY = PanelRow(
    "Money",
    (
        Panel(
            "Spent",
            "Cost of the wall time so far; dashed is the plan for the whole run.",
            twin("cost_dollars", where=OF_RUN),
            unit="currencyUSD",
        ),
        Panel(
            "Cost per day",
            "At the current rate. Runs on clusters without prices show nothing.",
            (PanelQuery(PER_DAY, "{{run}}"),),
            unit="currencyUSD",
        ),
        Panel(
            "Cost per day of slow steps",
            "Cost of the time by which the slowest rank's step exceeds its plan. `craton why RUN` names the layer.",
            (
                PanelQuery(
                    f"{PER_DAY} * clamp_min(1 - {PLANNED_STEP} / {MEASURED_STEP}, 0)",
                    "{{run}}",
                ),
            ),
            unit="currencyUSD",
            alerts=("StepSlowerThanPlan",),
        ),
        Panel(
            "Spent on unproductive time",
            "Since launch: restarts, waiting, checkpoints, repeated work.",
            (PanelQuery(f"{COST} * (1 - max by (run) (craton_run_goodput{{{OF_RUN}}}))", "{{run}}"),),
            unit="currencyUSD",
            alerts=("GoodputLow",),
        ),
        Panel(
            "Cost per million tokens",
            "So far.",
            (PanelQuery(f"{COST} / (max by (run) (craton_run_tokens_total{{{OF_RUN}}}) / 1e6)", "{{run}}"),),
            unit="currencyUSD",
        ),
        Panel(
            "Energy in the last hour",
            "Of the GPUs of a run.",
            (
                PanelQuery(
                    "sum by (run) (max by (run, UUID) ("
                    f"increase(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{OF_RUN}}}[1h]))) / 3.6e9",
                    "{{run}}",
                ),
            ),
            unit="kwatth",
        ),
    ),
)

GOODPUT = PanelRow(
    "Goodput",
    (
        Panel(
            "Goodput",
            "Productive share of time since launch and in the last 6 hours; dashed is the plan. If below: next panel.",
            twin("goodput", PanelQuery(f"craton:run_goodput:6h{{{OF_RUN}}}", "{{run}} last 6 h"), where=OF_RUN),
            unit="percentunit",
            width=12,
            alerts=("GoodputLow",),
        ),
        Panel(
            "Lost time in the last hour",
            "Time of all ranks by ledger kind, without productive time. Restore and redo: checkpoint more often. "
            "Detect and regroup: reduce faults. Data: check storage.",
            (
                PanelQuery(
                    "sum by (run, kind) (increase(craton_run_ledger_seconds_total"
                    f'{{{OF_RUN}, kind!~"productive|rollout|reward|sync"}}[1h]))',
                    "{{run}} {{kind}}",
                ),
            ),
            unit="s",
            width=12,
            stacked=True,
            alerts=("GoodputLow",),
        ),
        Panel(
            "Time by kind since launch",
            "Of all ranks; the kinds add up to wall time.",
            (PanelQuery(f"sum by (run, kind) (craton_run_ledger_seconds_total{{{OF_RUN}}})", "{{run}} {{kind}}"),),
            unit="s",
            kind="bars",
            height=9,
        ),
        Panel(
            "Model FLOPs utilization (MFU)",
            "The model's FLOPs over the hardware peak.",
            twin("mfu"),
            unit="percentunit",
            height=9,
        ),
        Panel(
            "Restarts after faults",
            "Since launch.",
            (PanelQuery(f"max by (run) (craton_run_restarts_total{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            height=9,
            alerts=("RestartLoop",),
        ),
    ),
)

# Two exporters may export the same GPU (ours and dcgm-exporter), and only one of them may know its occupant.
CARD = "DCGM_FI_DEV_GPU_TEMP"
HELD = " ".join(f'unless on (UUID) {CARD}{{{holder}!=""}}' for holder in ("run", "hpc_job", "pod"))

IDLE = PanelRow(
    "Idle GPUs",
    (
        Panel(
            "Unallocated GPUs",
            "No run, no other Slurm job, no pod. They cost as much as the others: check the queue, and drained nodes.",
            (
                PanelQuery(f"count(max by (UUID) ({CARD}) {HELD}) or vector(0)", "unallocated"),
                PanelQuery("sum(craton:node_gpus)", "all", is_plan=True),
            ),
            unit="short",
            width=12,
        ),
        Panel(
            "Idle GPUs of runs",
            "GPUs with less than 10% SM activity. Such a run waits for data, a checkpoint or a peer.",
            (
                PanelQuery(
                    f"sum by (run) (max by (run, UUID) (DCGM_FI_PROF_SM_ACTIVE{{{OF_RUN}}}) < bool 0.1)",
                    "{{run}}",
                ),
            ),
            unit="short",
            width=12,
        ),
    ),
)

COST_BOARD = Board(
    "cost",
    "Cost and goodput",
    "Cost of runs against plan, where time is lost, and idle GPUs.",
    (RUN,),
    (MONEY, GOODPUT, IDLE),
    since="now-24h",
)
