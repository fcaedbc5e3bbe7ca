"""Cost and goodput: what runs cost against their plan, what is lost and to what, and cards that do nothing."""

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
            "Price of the wall time until now; dashed is the plan for the whole run.",
            twin("cost_dollars", where=OF_RUN),
            unit="currencyUSD",
        ),
        Panel(
            "A day costs",
            "At the pace of now. Runs on clusters without a price show nothing.",
            (PanelQuery(PER_DAY, "{{run}}"),),
            unit="currencyUSD",
        ),
        Panel(
            "Steps beyond their plan cost a day",
            "Share by which the slowest rank's step exceeds its plan, in money. `craton why RUN` names the layer.",
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
            "Spent on what was not productive",
            "Since launch: restarts, waiting, checkpoints, work done twice.",
            (PanelQuery(f"{COST} * (1 - max by (run) (craton_run_goodput{{{OF_RUN}}}))", "{{run}}"),),
            unit="currencyUSD",
            alerts=("GoodputLow",),
        ),
        Panel(
            "A million tokens cost",
            "Until now.",
            (PanelQuery(f"{COST} / (max by (run) (craton_run_tokens_total{{{OF_RUN}}}) / 1e6)", "{{run}}"),),
            unit="currencyUSD",
        ),
        Panel(
            "Energy within an hour",
            "Of the cards a run has.",
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
            "Productive share of the time",
            "Since launch, and over the last six hours; dashed is the plan. Below it: the panel beside says why.",
            twin("goodput", PanelQuery(f"craton:run_goodput:6h{{{OF_RUN}}}", "{{run}} last 6 h"), where=OF_RUN),
            unit="percentunit",
            width=12,
            alerts=("GoodputLow",),
        ),
        Panel(
            "What time went to within an hour",
            "Hours of ranks by the ledger's kind, without the productive ones. Restore and redo ask for more frequent "
            "checkpoints, detect and regroup for fewer faults, data for storage.",
            (
                PanelQuery(
                    "sum by (run, kind) ("
                    f'increase(craton_run_ledger_seconds_total{{{OF_RUN}, kind!="productive"}}[1h]))',
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
            "Seconds of all ranks; they sum to wall time.",
            (PanelQuery(f"sum by (run, kind) (craton_run_ledger_seconds_total{{{OF_RUN}}})", "{{run}} {{kind}}"),),
            unit="s",
            kind="bars",
            height=9,
        ),
        Panel(
            "Model FLOP utilisation",
            "What the cards are paid for.",
            twin("mfu"),
            unit="percentunit",
            height=9,
        ),
        Panel(
            "Faults a run came back from",
            "Since launch.",
            (PanelQuery(f"max by (run) (craton_run_restarts_total{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            height=9,
            alerts=("RestartLoop",),
        ),
    ),
)

# A card may be served twice, by our exporter and by dcgm-exporter, and only one of them may know who has it.
CARD = "DCGM_FI_DEV_GPU_TEMP"
HELD = " ".join(f'unless on (UUID) {CARD}{{{holder}!=""}}' for holder in ("run", "hpc_job", "pod"))

IDLE = PanelRow(
    "Cards that do nothing",
    (
        Panel(
            "Cards that nobody has",
            "No run, no other job of Slurm, no pod. They cost as much as the others: look at the queue, and at nodes "
            "that are drained.",
            (
                PanelQuery(f"count(max by (UUID) ({CARD}) {HELD}) or vector(0)", "nobody's"),
                PanelQuery("sum(craton:node_gpus)", "all", is_plan=True),
            ),
            unit="short",
            width=12,
        ),
        Panel(
            "Cards of a run with nothing to do",
            "Cards whose multiprocessors had work less than a tenth of the time. A run that holds cards idle for long "
            "waits for data, a checkpoint or a peer.",
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
    "What runs cost against their plan, what is lost and to what, and cards that do nothing.",
    (RUN,),
    (MONEY, GOODPUT, IDLE),
    since="now-24h",
)
