"""Publish a node's status: heartbeat, metrics, markers, and the trackers (sinks) it feeds."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from craton.agent.generation import count_restarts, first_nodes
from craton.agent.launch import Launch
from craton.agent.processes import ChildProcess, end_sink, reap, start_sink
from craton.agent.records.records import NodeRecords
from craton.agent.records.state_writer import StateWriter
from craton.telemetry import RunDirectory, Summarizer, plan_checkpoint_intervals, plan_twins, read_json
from craton.telemetry.files import tail_lines
from craton.telemetry.node import (
    Heartbeat,
    MetricsEndpoint,
    NodeState,
    NodeStatus,
    RankStatus,
    process_start,
    write_status,
)
from craton.telemetry.progress import activities_of, stuck_after, usual_stays
from craton.telemetry.rank import monotonic_clock_id

SINK_GRACE_SECONDS = 30.0  # MLflow needs ten of them to create its first database
SEARCHED_BYTES = 1 << 20  # of a node's events, for the newest save of each tier


class NodePublisher:
    def __init__(
        self, run: RunDirectory, launch: Launch, node: str, endpoint: MetricsEndpoint, records: NodeRecords
    ) -> None:
        self._run, self._launch, self._node = run, launch, node
        self._endpoint, self._records = endpoint, records
        self.state = StateWriter(run, node, records)
        self._summarizer = Summarizer(run)
        self._metrics_port = 0
        self._saves: dict[str, float] = {}  # tier → time of its newest complete checkpoint
        self.address = ""  # where the other agents reach this one
        self.sinks: list[ChildProcess] = []

    def serve_metrics(self, host: str) -> None:
        try:
            try:
                self._metrics_port = self._endpoint.serve(self._launch.metrics_port, host)
            except OSError as error:
                self.warn(
                    "metrics_port_taken",
                    f"metrics port {self._launch.metrics_port}: {error.strerror}; using any free port",
                )
                self._metrics_port = self._endpoint.serve(0, host)
        except (ImportError, OSError) as error:
            self.warn("no_metrics_endpoint", f"no Prometheus endpoint: {error}")
            return
        self._show_plan()
        self._records.event("metrics_served", address=host, port=self._metrics_port)

    def _show_plan(self) -> None:
        plan = read_json(self._run.plan_path)
        interval = {name: plan.get(name) for name in ("step_seconds_low", "step_seconds_high")}
        predicted = {**plan_twins(plan), **{name: value for name, value in interval.items() if value is not None}}
        self._endpoint.update({f"plan_{name}": value for name, value in predicted.items()}, None)
        self._endpoint.set_labelled("plan_checkpoint_interval_seconds", plan_checkpoint_intervals(plan))

    def show_ranks(self, ranks: Sequence[RankStatus]) -> None:
        """Update the progress metrics of the node's ranks. The limit is never below the one after which `ps` and `why`
        call a rank stuck, so that no alert contradicts them."""
        now = time.time()
        activities = activities_of([NodeStatus(now, 0, self._node, tuple(ranks))], now)
        usual = usual_stays(activities)
        for rank, activity in zip(ranks, activities, strict=True):
            stuck_seconds = stuck_after(activity, usual) + rank.starved_seconds
            values = {
                "run_step": rank.step,
                "run_progress_age_seconds": rank.progress_age_seconds,
                "run_progress_limit_seconds": max(rank.progress_limit_seconds, stuck_seconds),
            }
            self._endpoint.update(values, rank.rank)

    def write_status(self, generation: int, ranks: Sequence[RankStatus], interface_down: str = "") -> None:
        if self.state.is_gone:
            return
        with contextlib.suppress(OSError):  # the next one follows soon; the heartbeat has the reason
            clock = (monotonic_clock_id(), time.monotonic())
            status = NodeStatus(time.time(), generation, self._node, tuple(ranks), *clock, interface_down)
            write_status(self._run, status)

    def entered(self, ranks: range) -> None:
        """Update metrics for a new generation, in which the node has these ranks."""
        self._endpoint.keep_only(ranks)
        if ranks and ranks.start == 0:
            self._endpoint.update({"run_restarts": count_restarts(self._run, self._launch.generation)}, None)
            with contextlib.suppress(OSError):  # the next save reports it again
                self._recall_saves()
        else:
            self._endpoint.forget("run_restarts")

    def saved(self, tier: str, moment: float) -> None:
        """Record a complete checkpoint."""
        self._saves[tier] = max(moment, self._saves.get(tier, moment))
        self._endpoint.set_labelled("run_checkpoint_moment_seconds", self._saves)

    def _recall_saves(self) -> None:
        """Restore the save times of this launch from the events of nodes that had rank 0: a tier that no longer saves
        must not look fresh or unused. Earlier launches do not count: the run was down in between."""
        for node in first_nodes(self._run, self._launch.generation):
            for line in tail_lines(self._run.events_path(node), SEARCHED_BYTES):
                moment, generation = line.get("time"), line.get("generation")
                if (
                    line.get("event") == "checkpoint_saved"
                    and isinstance(moment, int | float)
                    and isinstance(generation, int)
                    and generation >= self._launch.generation
                ):
                    self.saved(str(line.get("tier", "")), float(moment))

    def start_sinks(self) -> None:
        """Start the trackers, once."""
        for sink in self._launch.track if not self.sinks else ():
            try:
                self.sinks.append(start_sink(self._run, sink))
            except OSError as error:
                self.warn("sink_failed", f"cannot start sink {sink} ({error}); the run continues without it")

    def end_sinks(self) -> None:
        """End the trackers; they may still send the last lines within their grace period."""
        for sink in self.sinks:
            end_sink(sink)
        self.wait_for(self.sinks, SINK_GRACE_SECONDS)

    def wait_for(self, children: Sequence[ChildProcess], seconds: float) -> None:
        """Wait until these processes have ended; kill them after `seconds`."""
        deadline = time.monotonic() + seconds
        while any(child.is_running for child in children):
            reap(children)
            self.touch()
            if time.monotonic() > deadline:
                for child in children:
                    child.send(signal.SIGKILL)
            time.sleep(0.01)

    def record_summary(self) -> None:
        try:
            measured = self._summarizer.summary().measured
        except OSError:  # storage error; the next summary follows soon
            return
        self._summarizer.keep_books()
        values = {f"run_{name}": measured[name] for name in ("goodput", "cost_dollars") if name in measured}
        if values:
            self._records.metrics(values)

    def touch(self) -> None:
        self.state.touch()

    def beat(self, state: NodeState) -> None:
        beat = Heartbeat(
            self._launch.generation,
            state,
            os.getpid(),
            self._metrics_port,
            self.address,
            socket.gethostname(),
            process_start(os.getpid()),
        )
        self.state.beat(beat)

    def mark_fatal(self, text: str) -> None:
        print(f"craton agent: {text}", file=sys.stderr, flush=True)
        self.state.mark("FATAL", text)

    def warn(self, event: str, text: str) -> None:
        print(f"craton agent: {text}", file=sys.stderr, flush=True)
        self._records.event(event, message=text)

    def close(self) -> None:
        self._endpoint.close()
