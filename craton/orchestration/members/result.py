"""The result of a sweep, from the directories of its members: a row for each, its curve, and the best one.

Pure functions over run directories, at any moment of a sweep. The first of METRICS that any member has decides: the
accuracy on a suite, for reinforcement learning a reward, for preferences the accuracy on validation data, else a loss.
Only members that are done compete, so that one that was stopped early cannot win; a number that is not finite never
wins, and of equal ones the first wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

from craton import formatting
from craton.errors import CratonError
from craton.job import load_job
from craton.schema import SCHEMA
from craton.telemetry import RunDirectory, read_json, reporting_rank, summarize
from craton.telemetry.files import paths_in, tail_lines
from craton.telemetry.members import MEMBERS_FOLDER, MemberSpec, MemberStatus, read_members, read_members_status

SWEEP_FILE = "sweep.json"
SWEEP_PAGE = "sweep.html"
LAST_STEPS = 10  # whose mean is the final loss or reward: single steps are noisy
READ_BYTES = 4 << 20  # of a node's metrics: thousands of steps
MAX_POINTS = 20_000  # of all curves together, about what a browser draws at once
MAX_CURVE_POINTS = 300  # of one curve
MIN_CURVE_POINTS = 8


@dataclass(frozen=True)
class SweepMetric:
    """A number by which members are compared."""

    name: str  # of a field of rows, and `compared_by` in the result
    title: str  # of its column
    words: str
    is_better_if_higher: bool = False

    def of(self, row: SweepRow) -> float | None:
        value: float | None = getattr(row, self.name)
        return value

    def order(self, row: SweepRow) -> float:
        """Return a number that is smaller for better members; infinite for one without a finite number."""
        value = self.of(row)
        if not _is_finite(value):
            return math.inf
        return -value if self.is_better_if_higher else value

    def text(self, row: SweepRow) -> str:
        return (formatting.score if self.is_better_if_higher else formatting.loss)(self.of(row))


METRICS = (
    SweepMetric("suite_accuracy", "SUITE ACC", "suite accuracy", is_better_if_higher=True),
    SweepMetric("validation_reward", "EVAL REWARD", "validation reward", is_better_if_higher=True),
    SweepMetric("reward", "REWARD", "reward", is_better_if_higher=True),
    SweepMetric("validation_accuracy", "EVAL ACC", "validation accuracy", is_better_if_higher=True),
    SweepMetric("evaluation_loss", "EVAL LOSS", "evaluation loss"),
    SweepMetric("loss", "LOSS", "loss"),
)
_MEANS = {"loss": "run_loss", "reward": "run_reward"}  # field of a row → metric, of whose last steps it is the mean
_NEWEST = {  # field of a row → metric, whose last value it is
    "suite_accuracy": "run_evaluation_accuracy",
    "evaluation_loss": "run_evaluation_loss",
    "validation_reward": "run_validation_reward",
    "validation_accuracy": "run_validation_reward_accuracy",
}


@dataclass(frozen=True)
class SweepRow:
    """One member of a sweep. Numbers that it does not have are None."""

    name: str
    values: dict[str, Any]
    state: str  # of the run; `waiting` before it starts
    step: int = 0
    steps: int | None = None
    loss: float | None = None  # mean of its last losses; NaN if one of them is no number
    evaluation_loss: float | None = None  # the last one
    tokens_per_second: float | None = None
    seconds: float | None = None
    dollars: float | None = None
    message: str = ""  # one line: why it failed, was stopped, or waits
    reward: float | None = None  # mean of its last rewards
    validation_reward: float | None = None  # the last one
    validation_accuracy: float | None = None  # the last one, of preferences
    suite_accuracy: float | None = None  # the last one


@dataclass(frozen=True)
class SweepCurve:
    """The losses or rewards of a member over the tokens that it had trained on."""

    tokens: tuple[float, ...] = ()
    values: tuple[float | None, ...] = ()  # None where it was no number


@dataclass(frozen=True)
class SweepResult:
    """All members of a sweep, in their order."""

    name: str
    keys: tuple[str, ...]
    rows: tuple[SweepRow, ...]
    curves: dict[str, SweepCurve] = field(default_factory=dict)  # by the name of the member

    @cached_property
    def best(self) -> SweepRow | None:
        return best_row(self.rows)

    @cached_property
    def metric(self) -> SweepMetric:
        """The number by which members are compared."""
        return metric_of(self.rows)

    @property
    def curve_words(self) -> str:
        """What the curves show."""
        return "reward" if any(row.reward is not None for row in self.rows) else "loss"

    @property
    def ranked(self) -> list[SweepRow]:
        """The rows by their result: members that are done from best to worst, then the others in their order."""

        def place(row: SweepRow) -> tuple[bool, float]:
            return row.state != "done", self.metric.order(row) if row.state == "done" else math.inf

        return sorted(self.rows, key=place)


def sweep_rows(run: RunDirectory) -> list[SweepRow]:
    """Return a row for each member of a sweep."""
    return list(read_sweep(run).rows)


def best_row(rows: Sequence[SweepRow]) -> SweepRow | None:
    """Return the best member; None if none is done with a finite number."""
    order = metric_of(rows).order
    return min((row for row in rows if row.state == "done" and order(row) < math.inf), key=order, default=None)


def metric_of(rows: Sequence[SweepRow]) -> SweepMetric:
    """Return the number by which these members are compared."""
    return next((metric for metric in METRICS if any(metric.of(row) is not None for row in rows)), METRICS[-1])


def read_sweep(run: RunDirectory) -> SweepResult:
    """Read the members of a sweep; one that cannot be read is a row that says why."""
    swept = [member for member in read_members(run).members if member.values]
    status = read_members_status(run).members
    num_points = max(MIN_CURVE_POINTS, min(MAX_CURVE_POINTS, MAX_POINTS // max(1, len(swept))))
    rows, curves = [], {}
    for member in swept:
        place = RunDirectory(run.path / MEMBERS_FOLDER / member.name)
        try:
            row, curves[member.name] = _read_member(place, member, status.get(member.name), num_points)
        except (CratonError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            row = SweepRow(member.name, member.values, "unreadable", message=_one_line(f"cannot be read: {error}"))
        rows.append(row)
    keys = tuple(dict.fromkeys(key for row in rows for key in row.values))
    return SweepResult(run.name, keys, tuple(rows), curves)


def sweep_json(sweep: SweepResult) -> dict[str, Any]:
    """Return the result as plain data, without curves; what is no finite number is None."""
    rows = [{key: _finite_or_none(value) for key, value in asdict(row).items()} for row in sweep.rows]
    best = sweep.best
    return {
        "schema": SCHEMA,
        "name": sweep.name,
        "keys": list(sweep.keys),
        "compared_by": sweep.metric.name,
        "best": best.name if best else None,
        "members": rows,
    }


def _read_member(
    run: RunDirectory, member: MemberSpec, status: MemberStatus | None, num_points: int
) -> tuple[SweepRow, SweepCurve]:
    if not run.looks_like_a_run():
        state = status.state if status else "waiting"
        message = (status.message or status.waits_for) if status else ""
        return SweepRow(member.name, member.values, state, message=_one_line(message)), SweepCurve()
    summary = summarize(run)
    found = _numbers(run)
    last = {name: [points[step] for step in sorted(points)[-LAST_STEPS:]] for name, points in found.items()}
    numbers = {name: sum(last[name]) / len(last[name]) for name in _MEANS if last[name]}
    numbers |= {name: last[name][-1] for name in _NEWEST if last[name]}
    row = SweepRow(
        member.name,
        member.values,
        summary.state,
        summary.step,
        summary.steps,
        tokens_per_second=summary.tokens_per_second,
        seconds=summary.wall_seconds or None,
        dollars=summary.cost_dollars,
        message=_one_line(summary.message or (status.message if status and summary.state != "done" else "")),
        **numbers,
    )
    return row, _curve(found["reward"] or found["loss"], _tokens_per_step(run), num_points)


def _numbers(run: RunDirectory) -> dict[str, dict[int, float]]:
    """Return field of a row → step → number; of a step that was repeated, the newest."""
    rank = reporting_rank(read_json(run.launch_path))
    paths = paths_in(run.path / "metrics", "*.jsonl")
    lines = [line for path in paths for line in tail_lines(path, READ_BYTES) if line.get("rank") == rank]
    lines.sort(key=lambda line: line["generation"] if isinstance(line.get("generation"), int) else -1)
    found: dict[str, dict[int, float]] = {name: {} for name in (*_MEANS, *_NEWEST)}
    for line in lines:
        step = line.get("step")
        if not isinstance(step, int):
            continue
        for name, metric in {**_MEANS, **_NEWEST}.items():
            if metric in line:
                found[name][step] = float(line[metric]) if isinstance(line[metric], int | float) else math.nan
    return found


def _tokens_per_step(run: RunDirectory) -> float:
    """Return the tokens of a step from the plan, which is read faster than the job; 1 for a command, which has steps
    only."""
    plan = read_json(run.plan_path)
    sequences, sequence = plan.get("global_batch_sequences"), plan.get("sequence")
    if isinstance(sequences, int | float) and isinstance(sequence, int | float):
        return float(sequences * sequence)
    job = load_job(run.job_path)
    return 1.0 if job.train is None else float(job.global_batch_tokens)


def _curve(values: dict[int, float], tokens_per_step: float, num_points: int) -> SweepCurve:
    """Return at most `num_points` of the values, evenly spread, with the first and the last."""
    steps = sorted(values)
    if len(steps) > num_points:
        steps = [steps[round(index * (len(steps) - 1) / (num_points - 1))] for index in range(num_points)]
    return SweepCurve(
        tuple(step * tokens_per_step for step in steps), tuple(_finite_or_none(values[step]) for step in steps)
    )


def _one_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
