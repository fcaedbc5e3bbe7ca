"""The summary of a run for `ps` and the live view, computed from its directory alone.

Reads only the tails of the metric files (the last steps) and the whole ledger; a `Summarizer` that is kept reads only
new ledger lines. Step time, tokens per second and MFU are medians over the last WINDOW_STEPS steps of rank 0, so that
one slow step does not change them much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from craton.formatting import counted, setting, whole_duration
from craton.telemetry.files import paths_in, storage_problem, tail_lines
from craton.telemetry.members import MembersSum, read_members_status
from craton.telemetry.node import Heartbeat, NodeStatus, read_heartbeat, read_status
from craton.telemetry.progress import UNKNOWN_PROGRESS, Progress, activities_of, assess_progress
from craton.telemetry.rank import PRODUCTIVE_KINDS, LedgerReader, monotonic_clock_id, spread
from craton.telemetry.rundirectory import RunDirectory, is_plain_name, read_json, reporting_node, reporting_rank
from craton.telemetry.vocabulary import METRICS, TWINS, plan_twins, split_label

# waiting: for its nodes, which only its scheduler knows
RunState = Literal["waiting", "starting", "running", "stopping", "stopped", "done", "failed", "lost"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
WINDOW_STEPS = 20
START_SECONDS = 30.0  # from launch.json to the first heartbeat; after that the agents count as lost
TAIL_BYTES = 64 << 10
MAX_TAIL_BYTES = 4 << 20
SECONDS_PER_DAY = 86400.0
_FAILURES = "run_verifier_failure_share"
_RESULTS = tuple(name for name, metric in METRICS.items() if metric.group and name.removeprefix("run_") not in TWINS)


@dataclass(frozen=True)
class RunSummary:
    """A snapshot of a run. None: not known (yet)."""

    name: str
    path: Path
    state: RunState
    message: str  # why it waits, failed, was lost or stopped; "" otherwise
    step: int  # steps done
    steps: int | None
    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    eta_seconds: float | None
    goodput: float | None
    cost_dollars: float | None  # until now
    dollars_per_day: float | None
    wall_seconds: float
    ledger: dict[str, float]  # wall seconds by kind
    plan: dict[str, float]  # X → predicted value, X of TWINS
    measured: dict[str, float]  # X → measured value
    nodes: int
    ranks: int
    generation: int
    updated_at: float | None  # epoch seconds of the newest metric
    metrics_ports: dict[str, int]  # node → port of its Prometheus endpoint
    unsaved: str = ""  # if its last state is on no disk yet: why, and what to do
    storage: str = ""  # what is or was wrong with the disk of its directory; "": nothing
    results: dict[str, float] = field(default_factory=dict)  # X → newest run_X of post-training; see `_Recent.results`
    movement: Progress = UNKNOWN_PROGRESS  # whether its ranks make progress; unknown for a run that has ended
    members: MembersSum | None = None  # of a run that owns runs; None: it has none, or they were not read

    @property
    def shown_state(self) -> str:
        """The state for users: a running run whose ranks make no progress is `stuck`."""
        return "stuck" if self.movement.is_stuck else self.state

    @property
    def node_seconds(self) -> float:
        """Wall seconds times nodes, without members."""
        return self.wall_seconds * self.nodes

    @property
    def total_node_seconds(self) -> float:
        """Its own and its members' node-seconds."""
        return self.node_seconds + (self.members.node_seconds if self.members else 0.0)

    @property
    def total_cost_dollars(self) -> float | None:
        """What it and its members have cost until now."""
        amounts = [self.cost_dollars, self.members.cost_dollars if self.members else None]
        known = [amount for amount in amounts if amount is not None]
        return sum(known) if known else None

    @property
    def progress(self) -> float | None:
        """The share of steps done."""
        return self.step / self.steps if self.steps else None

    @property
    def against_plan(self) -> float | None:
        """Measured speed relative to the plan: 0.9 is 10% slower than planned."""
        planned = self.plan.get("step_seconds")
        return planned / self.step_seconds if planned and self.step_seconds else None


def summarize(run: RunDirectory, now: float | None = None) -> RunSummary:
    """Summarize a run once."""
    return Summarizer(run).summary(now)


class Summarizer:
    """Summarizes one run repeatedly, reading only new ledger lines. `most_nodes` limits the nodes whose ledger and peak
    memory are read, which bounds the cost for a large run."""

    def __init__(self, run: RunDirectory, most_nodes: int | None = None) -> None:
        self.run = run
        self._most_nodes = most_nodes
        self._ledger = LedgerReader(run, most_nodes)
        self._changes: dict[str, tuple[float, float | None]] = {}  # node → its heartbeat, and when it changed

    def keep_books(self) -> None:
        """Save the ledger totals for other readers."""
        self._ledger.keep()

    def summary(self, now: float | None = None) -> RunSummary:
        launch, plan = read_json(self.run.launch_path), read_json(self.run.plan_path)
        started = int(launch.get("generation") or 0) if launch else _last_started(self.run)
        newest = _newest_generation(self.run, started)
        named = newest.get("nodes") or (launch.get("nodes") or [])[: launch.get("num_nodes") or None]
        nodes = [node for node in map(str, named) if is_plain_name(node)]
        reporting = reporting_node({"nodes": nodes, "ranks_per_node": newest.get("ranks_per_node")}, launch)
        first = [reporting] if reporting is not None else nodes[:1]
        recent = _Recent(self.run, first, self._most_nodes, reporting_rank(launch))
        heartbeats = {node: read_heartbeat(self.run, node) for node in nodes}
        if now is None:
            heartbeats = {node: beat and self._by_change(node, beat) for node, beat in heartbeats.items()}
        state, message = _state(self.run, started, heartbeats, recent.generation, now)
        if state == "starting" and not message and launch.get("members"):
            members = read_members_status(self.run)
            message = members.waits_for if members.generation == started and not members.is_open else ""
        storage = _storage(self.run, state, started, heartbeats, now)
        ledger = self._ledger.totals()
        wall_seconds = sum(ledger.values())
        steps = int(plan["steps"]) if isinstance(plan.get("steps"), int | float) else recent.steps
        is_current = isinstance(recent.generation, int) and recent.generation >= started
        measured = recent.medians() if is_current or state != "starting" else {}
        dollars_per_day = _daily_price(launch, plan)
        if wall_seconds > 0 and dollars_per_day is not None:
            measured["cost_dollars"] = dollars_per_day / SECONDS_PER_DAY * wall_seconds
        if wall_seconds > 0 and (recent.step or not launch.get("workdir")):  # a command without steps may do nothing
            measured["goodput"] = sum(ledger.get(kind, 0.0) for kind in PRODUCTIVE_KINDS) / wall_seconds
        step_seconds = measured.get("step_seconds")
        is_moving = state in ("starting", "running", "stopping")
        will_go_on = is_moving and state != "stopping"
        present = [node for node in nodes if heartbeats[node]] if is_moving else []
        statuses = [status for node in present if (status := read_status(self.run, node))]
        unsaved = _unsaved(self.run, next((status for status in statuses if status.node == nodes[0]), None), started)
        movement = UNKNOWN_PROGRESS
        if will_go_on and not unsaved and not storage:  # agents cannot report on a failing disk
            generation = int(newest.get("number", started))
            movement = _movement(statuses, generation, generation > started, plan, now)
        if movement.is_stuck:
            will_go_on = False
        return RunSummary(
            name=self.run.name,
            path=self.run.path,
            state=state,
            message=unsaved or message,
            step=recent.step,
            steps=steps,
            loss=recent.loss,
            step_seconds=step_seconds,
            tokens_per_second=None if movement.is_stuck else measured.get("tokens_per_second"),
            mfu=measured.get("mfu"),
            eta_seconds=max(0, steps - recent.step) * step_seconds if steps and step_seconds and will_go_on else None,
            goodput=measured.get("goodput"),
            cost_dollars=measured.get("cost_dollars"),
            dollars_per_day=dollars_per_day,
            wall_seconds=wall_seconds,
            ledger=ledger,
            plan=plan_twins(plan),
            measured=measured,
            nodes=len(nodes),
            ranks=len(nodes) * int(launch.get("ranks_per_node") or 0),
            generation=int(newest.get("number", started)),
            updated_at=recent.updated_at,
            metrics_ports={node: beat.metrics_port for node, beat in heartbeats.items() if beat and beat.metrics_port},
            unsaved=unsaved,
            storage=storage,
            results=recent.results(),
            movement=movement,
        )

    def _by_change(self, node: str, beat: Heartbeat) -> Heartbeat:
        """Take the age of another machine's heartbeat from its last observed change, by this machine's clock: the wall
        clocks of the two need not agree."""
        if beat.clock and beat.clock == monotonic_clock_id():
            return beat
        now = time.monotonic()
        moment, changed = self._changes.setdefault(node, (beat.moment, None))
        if beat.moment != moment:
            changed = now
        self._changes[node] = (beat.moment, changed)
        return beat if changed is None else replace(beat, moment=time.time() - (now - changed), changed=0.0)


class _Recent:
    """The last steps of a run: the lines of the rank that reports them, and the peak memory of all ranks."""

    def __init__(self, run: RunDirectory, first_node: list[str], most_nodes: int | None, rank: int) -> None:
        self._lines: list[dict[str, Any]] = []
        self._memory_bytes = 0.0
        paths = spread(paths_in(run.path / "metrics", "*.jsonl"), most_nodes)
        for path in dict.fromkeys([*map(run.metrics_path, first_node), *paths]):
            lines = tail_lines(path, TAIL_BYTES // 4)
            if any(line.get("rank") == rank for line in lines):  # of other nodes only the newest lines matter
                lines = _last_steps(path, rank)
            self._lines += [line for line in lines if line.get("rank") == rank]
            values = [line.get("run_memory_bytes") for line in lines]
            self._memory_bytes = max([self._memory_bytes, *(float(value) for value in values if _is_number(value))])
        # The rank may move to another node with a generation; within one its lines are in one file, in order.
        self._lines.sort(key=lambda line: line["generation"] if isinstance(line.get("generation"), int) else -1)
        last = self._lines[-1] if self._lines else {}
        self.step = int(last.get("step") or 0)
        self.generation = last.get("generation")
        self.updated_at: float | None = last.get("time")

    @property
    def steps(self) -> int | None:
        """The total number of steps, if a command without a plan reports it."""
        values = (line.get("run_steps") for line in reversed(self._lines))
        return next((int(value) for value in values if _is_number(value)), None)

    @property
    def loss(self) -> float | None:
        """The newest loss; NaN if it was not a number."""
        for line in reversed(self._lines):
            if "run_loss" in line:
                value = line["run_loss"]
                return float(value) if _is_number(value) else math.nan
        return None

    def results(self) -> dict[str, float]:
        """Return X → newest run_X, for the metrics of post-training. A failing verifier costs samples of some steps
        only: its share is the mean of the steps that are read, and `worst_verifier_failure_share` is their maximum."""
        newest: dict[str, float] = {}
        for line in self._lines:
            labelled = [name for name in line if split_label(name) is not None]
            newest |= {name: float(line[name]) for name in (*_RESULTS, *labelled) if _is_number(line.get(name))}
        order = [*_RESULTS, *(name for name in newest if name not in _RESULTS)]
        results = {name.removeprefix("run_"): newest[name] for name in order if name in newest}
        failures = [float(line[_FAILURES]) for line in self._lines if _is_number(line.get(_FAILURES))]
        if failures:
            results["verifier_failure_share"] = sum(failures) / len(failures)
            results["worst_verifier_failure_share"] = max(failures)
        return results

    def medians(self) -> dict[str, float]:
        """Return X → median of run_X over the last steps of the newest generation."""
        result = {}
        newest = [line for line in self._lines if line.get("generation") == self.generation]
        for name in TWINS:
            values = [value for line in newest if _is_number(value := line.get(f"run_{name}"))]
            if values:
                result[name] = _median([float(value) for value in values[-WINDOW_STEPS:]])
        if self._memory_bytes:
            result["memory_bytes"] = self._memory_bytes
        return result


def _median(values: list[float]) -> float:
    """Return the median; importing `statistics` would take as long as the rest of this package."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _last_steps(path: Path, rank: int) -> list[dict[str, Any]]:
    """Return enough lines from the end of a metric file for WINDOW_STEPS steps of a rank."""
    size = TAIL_BYTES
    while True:
        lines = tail_lines(path, size)
        timed = sum(1 for line in lines if line.get("rank") == rank and "run_step_seconds" in line)
        if timed >= WINDOW_STEPS or size >= MAX_TAIL_BYTES or size >= _file_bytes(path):
            return lines
        size *= 4


def _state(
    run: RunDirectory,
    generation: int,
    heartbeats: dict[str, Heartbeat | None],
    metrics_generation: int | None,
    now: float | None,
) -> tuple[RunState, str]:
    beats = {node: beat for node, beat in heartbeats.items() if beat and beat.generation == generation}
    if run.has("FATAL"):
        # Not failed before its last agent is gone: only then can it be resumed.
        running = {node: beat for node, beat in beats.items() if beat.state == "running"}
        if any(not beat.is_lost(now) for beat in running.values()):
            return "stopping", run.marker_text("FATAL").strip()
        text = run.marker_text("FATAL").strip()
        if running:  # other nodes only know that it no longer answers
            text = f"the agent of {', '.join(running)} exited without a report: killed, or its machine is gone\n{text}"
        return "failed", text
    if run.has("DONE"):
        return "done", ""
    wants_stop = run.has("STOP")
    lost = [node for node, beat in beats.items() if beat.is_lost(now)]
    if lost and storage_problem(run.path):  # may explain old heartbeats: check local processes instead
        lost = [node for node in lost if not beats[node].is_alive_here]
    killed = [node for node in lost if wants_stop and beats[node].is_gone_here]
    if lost and lost == killed:  # the run stops anyway: the agent's last state is known
        if any(beat.state == "running" for node, beat in beats.items() if node not in killed):
            return "stopping", ""
        text = f"the agent of {', '.join(killed)} exited without a report while the run stopped"
        return "stopped", "; ".join(filter(None, [run.marker_text("STOP").strip(), text]))
    if lost:
        return "lost", _why_lost({node: beats[node] for node in lost}, now)
    if any(beat.state == "running" for beat in beats.values()):
        if wants_stop:
            return "stopping", ""
        has_metrics = metrics_generation is not None and metrics_generation >= generation
        return ("running" if has_metrics or _is_productive(run, next(iter(heartbeats)), generation) else "starting"), ""
    if beats and all(beat.state in ("stopped", "done") for beat in beats.values()):
        if wants_stop:
            return "stopped", run.marker_text("STOP").strip()
        if len(beats) == len(heartbeats):
            return "done", ""
    launched_seconds_ago = (time.time() if now is None else now) - _modified_at(run.launch_path)
    if heartbeats and launched_seconds_ago > START_SECONDS:
        missing = [node for node, beat in heartbeats.items() if node not in beats]
        if wants_stop and not beats:
            return "stopped", run.marker_text("STOP").strip()
        return "lost", f"no agent has started on {', '.join(missing)}"
    return ("stopping" if wants_stop else "starting"), ""


def _why_lost(beats: dict[str, Heartbeat], now: float | None) -> str:
    """Return why these nodes are silent, as far as visible from here, and what to do."""
    stopped = {node: beat.pid for node, beat in beats.items() if beat.is_stopped_here}
    silent = [node for node in beats if node not in stopped]
    sentences = [
        f"the agent of {node} (process {pid}) is stopped by a signal; continue it with `kill -CONT {pid}`"
        for node, pid in stopped.items()
    ]
    if silent:
        seconds = max(beats[node].age_seconds(now) for node in silent)
        sentences.append(f"no heartbeat from {', '.join(silent)} for {whole_duration(seconds)}")
    return "; ".join(sentences)


def _unsaved(run: RunDirectory, status: NodeStatus | None, generation: int) -> str:
    """Return what to do about a state that the ranks hold because no disk accepts it (all ranks do, or none)."""
    if status is None or status.generation < generation:
        return ""
    step = next((rank.step for rank in status.ranks if "unsaved" in rank.beside), None)
    if step is None:
        return ""
    events = tail_lines(run.events_path(status.node), TAIL_BYTES)
    event: dict[str, Any] = next((line for line in reversed(events) if line.get("event") == "state_unsaved"), {})
    seconds = f" within {setting(event['retry_seconds'])}" if _is_number(event.get("retry_seconds")) else ""
    reason = f": {event['reason']}" if event.get("reason") else ""
    return (
        f"the state of step {step:,} is only in memory{reason}; it is saved{seconds} once there is space, or discard "
        f"it with `craton stop {run.name} --now`"
    )


def _movement(
    statuses: Iterable[NodeStatus], generation: int, is_restarted: bool, plan: dict[str, Any], now: float | None
) -> Progress:
    """Return whether the ranks of this generation make progress, by what their agents report."""
    current = [status for status in statuses if status.generation == generation]
    moment = time.time() if now is None else now
    step_seconds = plan_twins(plan).get("step_seconds") or 0.0
    return assess_progress(
        activities_of(current, moment), moment, plan_step_seconds=step_seconds, is_restarted=is_restarted
    )


def _storage(
    run: RunDirectory, state: RunState, generation: int, heartbeats: dict[str, Heartbeat | None], now: float | None
) -> str:
    """Return what is wrong with the disk under the run directory, or how many lines that has cost: as live agents
    report it, or checked from here if the run is not at its end or records are missing."""
    beats = [beat for beat in heartbeats.values() if beat and beat.generation == generation]
    troubled = [beat for beat in beats if beat.trouble]
    for beat in troubled:
        if beat.state in ("running", "spare") and not beat.is_gone_here and not beat.is_lost(now):
            return beat.trouble
    is_open = state in ("starting", "running", "stopping", "lost")
    has_no_reason = state == "failed" and not run.marker_text("FATAL")  # a full disk refused it
    problem = storage_problem(run.path) if is_open or has_no_reason or troubled else ""
    missing = sum(beat.missing_lines for beat in troubled)
    return problem or (
        f"{counted(missing, 'line')} of the run's records were dropped while its disk accepted none" if missing else ""
    )


def _is_productive(run: RunDirectory, first_node: str, generation: int) -> bool:
    """Whether a rank is productive: a command that reports no progress never records a step."""
    status = read_status(run, first_node)
    return bool(
        status and status.generation >= generation and any(rank.kind in PRODUCTIVE_KINDS for rank in status.ranks)
    )


def _daily_price(launch: dict[str, Any], plan: dict[str, Any]) -> float | None:
    """Return the price from the last start, or from the plan if an older Craton started it."""
    prices = (launch.get("dollars_per_day"), (plan.get("cost") or {}).get("dollars_per_day"))
    return next((float(item) for item in prices if _is_number(item)), None)


def _last_started(run: RunDirectory) -> int:
    """Return the generation of the last start from the heartbeats, if launch.json is torn or missing."""
    beats = [read_heartbeat(run, path.name) for path in (run.path / "heartbeat").glob("[!.]*")]
    return max((beat.generation for beat in beats if beat), default=0)


def _newest_generation(run: RunDirectory, started: int) -> dict[str, Any]:
    """Return the newest generation since the last start; {} before there is one."""
    try:
        numbers = [int(path.stem) for path in paths_in(run.path / "generations", "[0-9]*.json")]
    except ValueError:
        return {}
    newest = max(numbers, default=-1)
    return read_json(run.generation_path(newest)) if newest >= started else {}


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _file_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf
