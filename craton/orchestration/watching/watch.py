"""Follow a run by its files: the data of the live view, read incrementally.

A look reads only what was written since the last one, for any length of the run.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from craton.orchestration.backend import Standing, read_submission
from craton.orchestration.local import AgentProcess, living_agents, read_agents
from craton.orchestration.watching.recoveries import Recoveries, Recovery, under_way
from craton.orchestration.watching.state import MOVING, SCHEDULER_LOOK_SECONDS, settled, standing_of
from craton.telemetry import PHASES, ROLLOUT_PHASES, RunDirectory, RunSummary, Summarizer
from craton.telemetry.files import open_regular, paths_in, read_lines, storage_problem

SCORES = ("run_reward", "run_reward_accuracy")  # what post-training improves, of kind grpo and dpo
SUITE = "run_evaluation_accuracy"
RECENT_LINES = 20  # a phase is the mean of this number of recent measurements
MAX_POINTS = 4096  # of the loss curve; a longer one keeps every second point
SHOWN_EVENTS = 6
LAST_LINES = 5
LAST_BYTES = 16 << 10
STORAGE_SECONDS = 15.0  # that a stop waits for a disk that refuses writes
WAITING_LOOK_SECONDS = 20.0  # between two queries about a run that has been pending for a while
# Events that every run has.
ROUTINE = ("agent_started", "metrics_served", "coordinates", "rank_started", "agent_ended", "predicted", "summary")


@dataclass(frozen=True)
class View:
    """The state of a run at one moment."""

    summary: RunSummary
    losses: list[float]  # over the steps, thinned
    evaluation_loss: float | None
    phases: dict[str, float]  # measured seconds per step, recent mean; only measured phases
    events: list[dict[str, Any]]  # the newest, oldest first
    recoveries: list[Recovery] = field(default_factory=list)  # oldest first
    recovering: Recovery | None = None  # the recovery in progress
    scores: list[float] = field(default_factory=list)  # rewards or accuracies over the steps, thinned

    @property
    def is_moving(self) -> bool:
        """Whether the run has not ended."""
        return self.summary.state in MOVING

    @property
    def planned_phases(self) -> dict[str, float]:
        plan = self.summary.plan
        return {phase: plan[key] for phase in (*ROLLOUT_PHASES, *PHASES) if (key := f"{phase}_seconds") in plan}


class Follower:
    """Read a run's metrics and events as they are written."""

    def __init__(self, run: RunDirectory, steps: int | None = None) -> None:
        self.run = run
        self._steps = steps  # of a run without a plan
        self._summarizer = Summarizer(run)
        self._recoveries = Recoveries(run)
        self._offsets: dict[Path, int] = {}
        self._losses: dict[int, float] = {}
        self._scores: dict[int, float] = {}
        self._accuracies: dict[int, float] = {}
        self._evaluation_loss: float | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_LINES)
        self._events: deque[dict[str, Any]] = deque(maxlen=SHOWN_EVENTS)
        self._is_local = read_submission(run).on == "local"
        self._agents: list[AgentProcess] = []
        self._standing = Standing("unknown")
        self._asked_at, self._pause = float("-inf"), SCHEDULER_LOOK_SECONDS
        self._has_news = False

    def look(self) -> View:
        """Return the current view, after reading everything written since the last look."""
        for line in self._new_lines("metrics"):
            self._take(line)
        events = sorted(self._new_lines("events"), key=lambda line: float(line.get("time", 0.0)))
        self._events.extend(line for line in events if _is_news(line))
        self._has_news = self._has_news or bool(events)
        curves = (self._losses, self._scores or self._accuracies)
        losses, scores = ([curve[step] for step in sorted(curve)] for curve in curves)
        summary = self._of_this_machine() if self._is_local else self._of_a_scheduler()
        if summary.steps is None:
            summary = replace(summary, steps=self._steps)
        recoveries = self._recoveries.all()
        recovering = under_way(recoveries) if summary.state in MOVING else None
        events = list(self._events)
        return View(summary, losses, self._evaluation_loss, self._phases(), events, recoveries, recovering, scores)

    def _of_this_machine(self) -> RunSummary:
        summary = self._summarizer.summary()
        if summary.state in MOVING and self._agents_are_gone():
            # They may have recorded the run's end since the summary.
            summary = self._summarizer.summary()
            if summary.state in MOVING:
                summary = replace(summary, state="lost", message=self._last_words())
        return summary

    def _of_a_scheduler(self) -> RunSummary:
        """Query the scheduler less often than the files, and before them, because a run may end in between. While the
        run is pending, query less and less often, unless its files show activity."""
        pause = SCHEDULER_LOOK_SECONDS if self._has_news else self._pause
        if time.monotonic() - self._asked_at >= pause:
            self._standing = standing_of(self.run)
            self._asked_at, self._has_news = time.monotonic(), False
            self._pause = next_pause(self._pause, self._standing)
        return settled(self._summarizer.summary(), self._standing)

    def _agents_are_gone(self) -> bool:
        self._agents = read_agents(self.run) or self._agents  # the directory itself may be gone
        return bool(self._agents) and not living_agents(self.run) and not any(agent.is_alive for agent in self._agents)

    def _last_words(self) -> str:
        if not self.run.path.is_dir():
            return (
                f"{storage_problem(self.run.path)}; its agents have ended the ranks, which saved to tiers outside the "
                "run directory, if the job has any"
            )
        words = ["all agents of the run are gone without recording how it ended"]
        for agent in read_agents(self.run):
            words += [f"{agent.node}: {line}" for line in self._last_lines(agent.log)]
        return "\n".join(words)

    def _last_lines(self, log: str) -> list[str]:
        try:
            with open_regular(self.run.path / log, below=self.run.path) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
                return file.read(LAST_BYTES).decode(errors="replace").splitlines()[-LAST_LINES:]
        except FileNotFoundError:
            return []
        except OSError as error:
            return [f"its log cannot be read: {error}"]

    def _new_lines(self, kind: str) -> list[dict[str, Any]]:
        result = []
        for path in paths_in(self.run.path / kind, "*.jsonl"):
            lines, self._offsets[path] = read_lines(path, self._offsets.get(path, 0))
            result += lines
        return result

    def _take(self, line: dict[str, Any]) -> None:
        if line.get("rank", 0) != 0:
            return
        scores = ((name, self._scores) for name in SCORES)
        for name, curve in (("run_loss", self._losses), *scores, (SUITE, self._accuracies)):
            if isinstance(value := line.get(name), int | float):
                curve[int(line.get("step", 0))] = float(value)
                if len(curve) > MAX_POINTS:
                    for step in sorted(curve)[1::2]:
                        del curve[step]
        if isinstance(loss := line.get("run_evaluation_loss"), int | float):
            self._evaluation_loss = float(loss)
        if "run_step_seconds" in line:
            if self._recent and self._recent[-1].get("generation") != line.get("generation"):
                self._recent.clear()
            self._recent.append(line)

    def _phases(self) -> dict[str, float]:
        result = {}
        for phase in (*ROLLOUT_PHASES, *PHASES):
            values = [
                line[key] for line in self._recent if isinstance(line.get(key := f"run_{phase}_seconds"), int | float)
            ]
            if values:
                result[phase] = sum(values) / len(values)
        return result


def next_pause(pause: float, standing: Standing) -> float:
    """Return the seconds until the next query: a wait may take days, and the scheduler has other clients."""
    return min(2 * pause, WAITING_LOOK_SECONDS) if standing.condition == "waiting" else SCHEDULER_LOOK_SECONDS


def _is_news(event: dict[str, Any]) -> bool:
    """Whether an event is news: not routine, and not repeated by every rank."""
    name = event.get("event")
    if name == "rank_ended":
        return event.get("code") != 0
    if name == "generation_started":
        return event.get("reason") != "start"
    return name not in ROUTINE and (event.get("rank", 0) == 0 or name == "failed")


def until_stopped(run: RunDirectory, look_seconds: float) -> Iterator[View]:
    """Yield views of a stopping run until it has ended, cannot save its state, or its disk has refused writes for a
    while."""
    follower, failing_since = Follower(run), float("inf")
    while True:
        yield (view := follower.look())
        failing_since = min(failing_since, time.monotonic()) if view.summary.storage else float("inf")
        if not view.is_moving or view.summary.unsaved or time.monotonic() - failing_since > STORAGE_SECONDS:
            return
        time.sleep(look_seconds)
