"""One run: every phase against its plan, ranks, loss, checkpoints, and its GPUs and nodes.

Runs can be chosen together and compared. Ranks are shown by their median and their extremes, so that a run of ten
thousand has as many lines as one of two.
"""

from __future__ import annotations

from dataclasses import replace

from craton.observability.dashboards.boards.run_places import MACHINES, RANKS
from craton.observability.dashboards.boards.run_results import RESULTS
from craton.observability.dashboards.boards.twins import RUN_HERE, twin
from craton.observability.dashboards.model import RUN, Board, Panel, PanelQuery, PanelRow
from craton.telemetry import ROLLOUT_PHASES

OF_RUN = 'run=~"$run"'
PHASES = ("compute", "communication", "data", "optimizer", "checkpoint", *ROLLOUT_PHASES)

NOW = PanelRow(
    "Now",
    (
        Panel(
            "Current step",
            "The newest step of any rank.",
            (PanelQuery(f"max by (run) (craton_run_step{{{RUN_HERE}}})", "{{run}}"),),
            unit="short",
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Time since progress",
            "Of the rank without progress for the longest time. More than 20 steps is a hang: `craton why RUN`.",
            (PanelQuery(f"max by (run) (craton_run_progress_age_seconds{{{RUN_HERE}}})", "{{run}}"),),
            unit="s",
            kind="stat",
            width=4,
            height=4,
            warn=60,
            bad=300,
            alerts=("RunHung",),
        ),
        Panel(
            "Loss now",
            "Mean over all ranks. If NaN: stop the run; `craton why RUN` reports whether only one rank deviates.",
            (PanelQuery(f"max by (run) (craton_run_loss{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            kind="stat",
            width=4,
            height=4,
            alerts=("LossNotFinite",),
        ),
        Panel(
            "Goodput now",
            "Productive share of time since launch, and the plan.",
            (
                PanelQuery(f"max by (run) (craton_run_goodput{{{OF_RUN}}})", "{{run}}"),
                PanelQuery(f"max by (run) (craton_plan_goodput{{{OF_RUN}}})", "{{run}} planned", is_plan=True),
            ),
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            warn=0.9,
            bad=0.7,
            alerts=("GoodputLow",),
        ),
        Panel(
            "Restarts",
            "Generations that started because of a fault. More than three an hour is a restart loop: stop the run.",
            (PanelQuery(f"max by (run) (craton_run_restarts_total{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            kind="stat",
            width=4,
            height=4,
            warn=1,
            bad=4,
            alerts=("RestartLoop",),
        ),
        Panel(
            "Nodes",
            "Agents that answer, of all agents of the run. An agent silent for a minute is a lost node.",
            (
                PanelQuery(f'sum by (run) (up{{job="craton", {OF_RUN}}})', "{{run}} answer"),
                PanelQuery(f'count by (run) (up{{job="craton", {OF_RUN}}})', "{{run}} has", is_plan=True),
            ),
            unit="short",
            kind="stat",
            width=4,
            height=4,
            alerts=("NodeDown", "RunLost"),
        ),
    ),
)

STEP = PanelRow(
    "Step time, planned and measured",
    (
        Panel(
            "Step",
            "Wall time of a step; dashed are the plan and its interval. Above the interval, `craton why` names the "
            "phase. If it is off from the first step on: `craton calibrate`.",
            twin(
                "step_seconds",
                PanelQuery(f"max by (run) (craton_plan_step_seconds_low{{{RUN_HERE}}})", "{{run}} low", is_plan=True),
                PanelQuery(f"max by (run) (craton_plan_step_seconds_high{{{RUN_HERE}}})", "{{run}} high", is_plan=True),
            ),
            unit="s",
            alerts=("StepSlowerThanPlan",),
        ),
        Panel(
            "Step by phase, measured",
            "Medians of the phases, stacked; they add up to the step. The next panel has the plan.",
            tuple(
                PanelQuery(f"quantile by (run) (0.5, craton_run_{phase}_seconds{{{RUN_HERE}}})", f"{{{{run}}}} {phase}")
                for phase in PHASES
            ),
            unit="s",
            stacked=True,
        ),
        Panel(
            "Step by phase, planned",
            "The phase that differs most from the measured one causes the slowdown.",
            tuple(
                PanelQuery(f"max by (run) (craton_plan_{phase}_seconds{{{RUN_HERE}}})", f"{{{{run}}}} {phase}")
                for phase in PHASES
            ),
            unit="s",
            stacked=True,
        ),
        Panel(
            "Compute",
            "Forward, backward and activation recompute. Above the plan on all ranks: clocks, power or a wrong plan; "
            "on one rank: its GPU.",
            twin("compute_seconds"),
            unit="s",
            alerts=("StragglerRank", "GpuThrottled"),
        ),
        Panel(
            "Exposed communication",
            "Above the plan: see the network dashboard. All others wait for the rank that waits the shortest.",
            twin("communication_seconds"),
            unit="s",
            alerts=("TcpFallback", "NcclBandwidthDrop"),
        ),
        Panel(
            "Waiting for data",
            "Above the plan: storage, or too few data loader workers. The storage dashboard shows which.",
            twin("data_seconds"),
            unit="s",
            alerts=("DataStarved",),
        ),
        Panel("Optimizer", "Gradient clipping and optimizer update.", twin("optimizer_seconds"), unit="s"),
        Panel(
            "Checkpoint stall",
            "Averaged over the steps. Above the plan: the tier is slower than expected, or written too often.",
            twin("checkpoint_seconds"),
            unit="s",
            alerts=("CheckpointStale",),
        ),
        Panel(
            "Peak memory of a rank",
            "Above the plan: a longer batch may not fit. Below: there is room for a larger micro batch.",
            twin("memory_bytes"),
            unit="bytes",
        ),
        Panel("Tokens per second", "Of the whole job.", twin("tokens_per_second"), unit="short", width=12),
        Panel(
            "Model FLOPs utilization (MFU)",
            "The model's FLOPs over the hardware peak; recompute does not count.",
            twin("mfu"),
            unit="percentunit",
            width=12,
        ),
    ),
)

LEARNING = PanelRow(
    "Loss and gradients",
    (
        Panel(
            "Loss",
            "Training and validation. If a spike does not recover: roll back to the checkpoint before it.",
            (
                PanelQuery(f"max by (run) (craton_run_loss{{{OF_RUN}}})", "{{run}}"),
                PanelQuery(f"max by (run) (craton_run_evaluation_loss{{{OF_RUN}}})", "{{run}} validation"),
            ),
            unit="short",
            alerts=("LossSpike", "LossNotFinite"),
        ),
        Panel(
            "Gradient norm",
            "Before clipping; it rises before the loss does.",
            (PanelQuery(f"max by (run) (craton_run_gradient_norm{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            alerts=("GradientSpike",),
        ),
        Panel(
            "Learning rate",
            "From the schedule.",
            (PanelQuery(f"max by (run) (craton_run_learning_rate{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
        ),
        Panel(
            "Tokens",
            "Trained on since the start. It drops when a run resumes from a checkpoint.",
            (PanelQuery(f"max by (run) (craton_run_tokens_total{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            width=12,
        ),
        Panel(
            "Updates skipped in the last 30 minutes",
            "Because the loss or gradient was not finite or spiked. A few in a long run are normal.",
            (PanelQuery(f"sum by (run) (increase(craton_run_skipped_steps_total{{{OF_RUN}}}[30m]))", "{{run}}"),),
            unit="short",
            width=12,
            alerts=("StepsSkipped",),
        ),
    ),
)

LIFE = PanelRow(
    "Checkpoints and goodput",
    (
        Panel(
            "Age of the newest checkpoint",
            "By tier; dashed is the planned interval. Beyond twice that: the tier is not writable, or the run hangs.",
            (
                PanelQuery(f"craton:checkpoint_age_seconds{{{OF_RUN}}}", "{{run}} {{tier}}"),
                PanelQuery(
                    f"max by (run, tier) (craton_plan_checkpoint_interval_seconds{{{OF_RUN}}})",
                    "{{run}} {{tier}} planned",
                    is_plan=True,
                ),
            ),
            unit="s",
            alerts=("CheckpointStale", "CheckpointNever"),
        ),
        Panel(
            "Time by ledger kind",
            "Share of all ranks' time. Everything but productive, rollout, reward and sync lowers goodput.",
            (
                PanelQuery(
                    f"sum by (run, kind) (rate(craton_run_ledger_seconds_total{{{OF_RUN}}}[$__rate_interval]))"
                    " / on (run) group_left ()"
                    f" sum by (run) (rate(craton_run_ledger_seconds_total{{{OF_RUN}}}[$__rate_interval]))",
                    "{{run}} {{kind}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
            alerts=("GoodputLow",),
        ),
        Panel("Goodput", "Productive share of the time since launch.", twin("goodput"), unit="percentunit"),
        Panel(
            "Records lost",
            "A pipe or disk is full: the dashboards have gaps, the run continues.",
            (
                PanelQuery(
                    f"sum by (run, node) (increase(craton_run_dropped_records_total{{{OF_RUN}}}[30m]))",
                    "{{run}} {{node}}",
                ),
            ),
            unit="short",
            width=12,
            nothing="0",
            alerts=("RecordsLost",),
        ),
        Panel(
            "Recording overhead",
            "Maximum share of a rank's time inside recording calls.",
            (PanelQuery(f"max by (run) (craton_run_recording_share{{{OF_RUN}}})", "{{run}}"),),
            unit="percentunit",
            width=12,
        ),
    ),
)

RUN_BOARD = Board(
    "run",
    "Run",
    "One run, or several side by side: each phase against its plan, ranks, loss, checkpoints, GPUs and nodes.",
    (replace(RUN, has_all=False),),
    (NOW, STEP, RANKS, LEARNING, RESULTS, LIFE, MACHINES),
)
