"""One run: every phase against its plan, its ranks, what it learns, its checkpoints, and the cards and nodes it has.

Runs can be chosen together and compared. Ranks are shown by their median and their extremes, so that a run of ten
thousand has as many lines as one of two.
"""

from __future__ import annotations

from dataclasses import replace

from craton.observability.dashboards.boards.run_places import MACHINES, RANKS
from craton.observability.dashboards.boards.twins import RUN_HERE, twin
from craton.observability.dashboards.model import RUN, Board, Panel, PanelQuery, PanelRow

OF_RUN = 'run=~"$run"'
PHASES = ("compute", "communication", "data", "optimizer", "checkpoint")

NOW = PanelRow(
    "Now",
    (
        Panel(
            "Step it is at",
            "The newest step that any rank is at.",
            (PanelQuery(f"max by (run) (craton_run_step{{{RUN_HERE}}})", "{{run}}"),),
            unit="short",
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Since the last progress",
            "Of the rank that has been still the longest. Beyond twenty steps the run hangs: `craton why RUN`.",
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
            "Mean over all ranks. Not a number: stop it, and ask `craton why RUN` whether one rank alone is off.",
            (PanelQuery(f"max by (run) (craton_run_loss{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            kind="stat",
            width=4,
            height=4,
            alerts=("LossNotFinite",),
        ),
        Panel(
            "Goodput now",
            "Productive share of all time since launch, and what was planned.",
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
            "Generations that began because something broke. More than three an hour is a loop: stop it.",
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
            "Agents that answer, of those the run has. An agent that is silent for a minute is a node that is lost.",
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
    "The step, predicted and measured",
    (
        Panel(
            "Step",
            "Wall time of a step; dashed are the plan and the ends of its interval. Above the upper end `craton why` "
            "says which phase owns the difference. Wrong from the first step on: `craton calibrate`.",
            twin(
                "step_seconds",
                PanelQuery(f"max by (run) (craton_plan_step_seconds_low{{{RUN_HERE}}})", "{{run}} low", is_plan=True),
                PanelQuery(f"max by (run) (craton_plan_step_seconds_high{{{RUN_HERE}}})", "{{run}} high", is_plan=True),
            ),
            unit="s",
            alerts=("StepSlowerThanPlan",),
        ),
        Panel(
            "Where the step goes",
            "Medians of the five phases, stacked; they add up to the step. Beside it is what was planned.",
            tuple(
                PanelQuery(f"quantile by (run) (0.5, craton_run_{phase}_seconds{{{RUN_HERE}}})", f"{{{{run}}}} {phase}")
                for phase in PHASES
            ),
            unit="s",
            stacked=True,
        ),
        Panel(
            "Where it was planned to go",
            "The phase whose band differs most from the one beside owns the loss.",
            tuple(
                PanelQuery(f"max by (run) (craton_plan_{phase}_seconds{{{RUN_HERE}}})", f"{{{{run}}}} {phase}")
                for phase in PHASES
            ),
            unit="s",
            stacked=True,
        ),
        Panel(
            "Compute",
            "Forward, backward and recompute. Above the plan on all ranks: clocks, power or a plan that is wrong; on "
            "one rank: its card.",
            twin("compute_seconds"),
            unit="s",
            alerts=("StragglerRank", "GpuThrottled"),
        ),
        Panel(
            "Communication that nothing hides",
            "Above the plan: look at the board of the network. A rank that waits least is the one all others wait for.",
            twin("communication_seconds"),
            unit="s",
            alerts=("TcpFallback", "NcclBandwidthDrop"),
        ),
        Panel(
            "Waiting for data",
            "Above the plan: storage, or too few workers that load. The board of storage tells which.",
            twin("data_seconds"),
            unit="s",
            alerts=("DataStarved",),
        ),
        Panel("Optimizer", "Clipping and update.", twin("optimizer_seconds"), unit="s"),
        Panel(
            "Standing still for checkpoints",
            "Spread over the steps. Above the plan: the tier is slower than it should be, or written too often.",
            twin("checkpoint_seconds"),
            unit="s",
            alerts=("CheckpointStale",),
        ),
        Panel(
            "Peak memory of a rank",
            "Above the plan: the next longer batch may not fit. Below: there is room for a larger micro batch.",
            twin("memory_bytes"),
            unit="bytes",
        ),
        Panel("Tokens a second", "Of the whole job.", twin("tokens_per_second"), unit="short", width=12),
        Panel(
            "Model FLOP utilisation",
            "The model's own work over the hardware's peak; recompute does not count.",
            twin("mfu"),
            unit="percentunit",
            width=12,
        ),
    ),
)

LEARNING = PanelRow(
    "Learning",
    (
        Panel(
            "Loss",
            "Of training and of validation. A jump that does not come back: go back to the checkpoint before it.",
            (
                PanelQuery(f"max by (run) (craton_run_loss{{{OF_RUN}}})", "{{run}}"),
                PanelQuery(f"max by (run) (craton_run_evaluation_loss{{{OF_RUN}}})", "{{run}} validation"),
            ),
            unit="short",
            alerts=("LossSpike", "LossNotFinite"),
        ),
        Panel(
            "Norm of the gradient",
            "Before clipping: it rises before the loss does.",
            (PanelQuery(f"max by (run) (craton_run_gradient_norm{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            alerts=("GradientSpike",),
        ),
        Panel(
            "Learning rate",
            "As the schedule has it.",
            (PanelQuery(f"max by (run) (craton_run_learning_rate{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
        ),
        Panel(
            "Tokens",
            "Trained on since the start. It falls back when a run goes on from a checkpoint.",
            (PanelQuery(f"max by (run) (craton_run_tokens_total{{{OF_RUN}}})", "{{run}}"),),
            unit="short",
            width=12,
        ),
        Panel(
            "Updates skipped within half an hour",
            "Because loss or gradient was not finite or jumped. A few in a long run are normal, more are not.",
            (PanelQuery(f"sum by (run) (increase(craton_run_skipped_steps_total{{{OF_RUN}}}[30m]))", "{{run}}"),),
            unit="short",
            width=12,
            alerts=("StepsSkipped",),
        ),
    ),
)

LIFE = PanelRow(
    "Checkpoints and time",
    (
        Panel(
            "Age of the newest checkpoint",
            "By tier; dashed is how often the plan writes one. Twice that: it cannot be written, or nothing moves.",
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
            "What time went to",
            "Share of all ranks' time by the ledger's kind. All but productive is what goodput loses.",
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
            "A pipe or a disk is full: what these boards show has holes, the run itself goes on.",
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
            "What recording costs",
            "Share of a rank's time inside recording calls, of the rank where it is most.",
            (PanelQuery(f"max by (run) (craton_run_recording_share{{{OF_RUN}}})", "{{run}}"),),
            unit="percentunit",
            width=12,
        ),
    ),
)

RUN_BOARD = Board(
    "run",
    "Run",
    "One run, or several side by side: each phase against its plan, its ranks, what it learns, and where it runs.",
    (replace(RUN, has_all=False),),
    (NOW, STEP, RANKS, LEARNING, LIFE, MACHINES),
)
