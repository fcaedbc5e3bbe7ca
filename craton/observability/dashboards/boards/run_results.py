"""The row of post-training on the board of runs: rewards, samples, and the side that the other one waits for. Other
kinds of runs have none of these series."""

from __future__ import annotations

from craton.observability.dashboards.boards.twins import RUN_HERE, twin
from craton.observability.dashboards.model import Panel, PanelQuery, PanelRow, Unit

ONLY = "only runs of kind grpo and dpo have it"


def _panel(
    title: str,
    description: str,
    lines: dict[str, str],
    unit: Unit = "short",
    alerts: tuple[str, ...] = (),
    nothing: str = ONLY,
) -> Panel:
    """One line per run and metric; `lines`: metric → its name in the legend."""
    queries = tuple(
        PanelQuery(f"max by (run) (craton_run_{name}{{{RUN_HERE}}})", f"{{{{run}}}} {legend}".rstrip())
        for name, legend in lines.items()
    )
    return Panel(title, description, queries, unit=unit, alerts=alerts, nothing=nothing)


RESULTS = PanelRow(
    "Post-training",
    (
        _panel(
            "Reward",
            "Mean of the step's samples, and on data.validation. A fall after a rise: read the samples on the page.",
            {"reward": "", "validation_reward": "validation", "reward_std": "within a group"},
            alerts=("RewardsEqual",),
        ),
        Panel(
            "Reward by term",
            "Of a job with several: the mean value of each, without its weight, and the share of samples without one.",
            (
                PanelQuery(f"max by (run, term) (craton_run_term_reward{{{RUN_HERE}}})", "{{run}} {{term}}"),
                PanelQuery(
                    f"max by (run, term) (craton_run_term_failure_share{{{RUN_HERE}}})", "{{run}} {{term}} failed"
                ),
            ),
            unit="short",
            nothing="only runs of kind grpo with several rewards have it",
        ),
        _panel(
            "Accuracy and margin of pairs",
            "Of kind dpo: chosen answers with the higher reward, and by how much.",
            {
                "reward_accuracy": "accuracy",
                "validation_reward_accuracy": "validation accuracy",
                "reward_margin": "margin",
            },
        ),
        _panel(
            "Reward of the answers",
            "Of kind dpo: both may fall; their difference should grow.",
            {"chosen_reward": "chosen", "rejected_reward": "rejected"},
        ),
        _panel(
            "Accuracy on a suite",
            "Share of right answers: of `train.evaluate.suite`, with its 95% interval, or of kind eval.",
            {
                "evaluation_accuracy": "",
                "evaluation_accuracy_low": "interval, low",
                "evaluation_accuracy_high": "interval, high",
            },
            "percentunit",
            nothing="only runs that evaluate a suite have it",
        ),
        _panel(
            "Generated tokens per sample",
            "Growth without a better reward: penalize length, or lower rollout.max_tokens.",
            {"completion_tokens": "mean", "longest_completion_tokens": "longest"},
        ),
        _panel(
            "KL divergence and entropy",
            "Per token, in nats. A KL above 0.5 or an entropy near 0 comes before a fall of the reward.",
            {"kl": "KL", "entropy": "entropy"},
            alerts=("KlExplosion",),
        ),
        _panel(
            "Rollout against trainer",
            "Mean difference of log p per token, and its k3 divergence; both should be near 0.",
            {"logprob_gap": "difference", "logprob_k3": "k3"},
            alerts=("RolloutMismatch",),
        ),
        _panel(
            "Clipped and corrected tokens",
            "Share of the tokens. Much clipping: a lower learning rate. Much correction: a mismatch, or old samples.",
            {"clipped_share": "clipped", "corrected_share": "corrected"},
            "percentunit",
        ),
        _panel(
            "Samples without signal",
            "Cut off, without a verdict, or in a group of equal rewards.",
            {
                "truncated_share": "truncated",
                "verifier_failure_share": "no verdict",
                "advantage_zero_share": "advantage 0",
            },
            "percentunit",
            ("VerifierFailing", "RewardsEqual"),
        ),
        _panel(
            "Idle share of both sides",
            "The trainer waits for samples, verdicts or transfers; the rollouts wait for weights.",
            {"trainer_idle_share": "trainer", "rollout_idle_share": "rollouts", "rollout_tail_share": "long tail"},
            "percentunit",
            ("TrainerWaits", "RolloutsWait"),
        ),
        _panel(
            "Staleness",
            "Age of the weights that generated the samples, in steps, and its bound (rollout.staleness).",
            {"staleness": "mean", "max_staleness": "oldest", "staleness_bound": "bound"},
            alerts=("StalenessAtBound",),
        ),
        _panel(
            "Rollout tokens per second",
            "Generated, per second of generation.",
            {"rollout_tokens_per_second": ""},
        ),
        Panel(
            "Waiting for samples",
            "Above the plan: few rollout workers, long completions, or a long tail; `craton why` names which.",
            twin("rollout_seconds"),
            unit="s",
            nothing=ONLY,
            alerts=("TrainerWaits",),
        ),
        Panel(
            "Waiting for verdicts",
            "Above the plan: more verify.workers, or a faster verifier.",
            twin("reward_seconds"),
            unit="s",
            nothing=ONLY,
            alerts=("VerifierFailing",),
        ),
        Panel(
            "Waiting for weight transfers",
            "Above the plan: the network between trainer and rollouts.",
            twin("sync_seconds"),
            unit="s",
            nothing=ONLY,
        ),
    ),
)
