"""What others see of a node: its heartbeat, its metrics, the markers it sets, and the trackers it feeds."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from craton.agent.launch import Launch
from craton.agent.process import ChildProcess, end_sink, reap, start_sink
from craton.agent.records import NodeRecords
from craton.telemetry import (
    Heartbeat,
    Marker,
    MetricsEndpoint,
    NodeState,
    RunDirectory,
    Summarizer,
    process_start,
    touch_heartbeat,
    write_heartbeat,
)

SINK_GRACE_SECONDS = 30.0  # MLflow takes ten of them to make its first database


class NodeFace:
    def __init__(
        self, run: RunDirectory, launch: Launch, node: str, endpoint: MetricsEndpoint, records: NodeRecords
    ) -> None:
        self._run, self._launch, self._node = run, launch, node
        self._endpoint, self._records = endpoint, records
        self._summarizer = Summarizer(run)
        self._metrics_port = 0
        self.address = ""  # where the other agents reach this one
        self.sinks: list[ChildProcess] = []

    def serve_metrics(self, host: str) -> None:
        try:
            try:
                self._metrics_port = self._endpoint.serve(self._launch.metrics_port, host)
            except OSError as error:
                self.warn(
                    "metrics_port_taken",
                    f"port {self._launch.metrics_port} for metrics: {error.strerror}; taking any free one",
                )
                self._metrics_port = self._endpoint.serve(0, host)
        except (ImportError, OSError) as error:
            self.warn("no_metrics_endpoint", f"no Prometheus endpoint: {error}")
            return
        plan = self._summarizer.summary().plan
        self._endpoint.update({f"plan_{name}": value for name, value in plan.items()}, None)
        self._records.event("metrics_served", address=host, port=self._metrics_port)

    def start_sinks(self) -> None:
        """Once."""
        for sink in self._launch.track if not self.sinks else ():
            try:
                self.sinks.append(start_sink(self._run, sink))
            except OSError as error:
                self.warn("sink_failed", f"sink {sink} cannot start ({error}); the run goes on without it")

    def end_sinks(self) -> None:
        """Sinks have seen every line by now, or write it in their grace."""
        for sink in self.sinks:
            end_sink(sink)
        self.wait_for(self.sinks, SINK_GRACE_SECONDS)

    def wait_for(self, children: Sequence[ChildProcess], seconds: float) -> None:
        """Until these have ended; after so many seconds they are killed."""
        deadline = time.monotonic() + seconds
        while any(child.is_running for child in children):
            reap(children)
            self.touch()
            if time.monotonic() > deadline:
                for child in children:
                    child.send(signal.SIGKILL)
            time.sleep(0.01)

    def record_summary(self) -> None:
        measured = self._summarizer.summary().measured
        values = {f"run_{name}": measured[name] for name in ("goodput", "cost_dollars") if name in measured}
        if values:
            self._records.metrics(values)

    def touch(self) -> None:
        with contextlib.suppress(OSError):  # a directory that is gone is seen elsewhere
            touch_heartbeat(self._run, self._node)

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
        try:
            write_heartbeat(self._run, self._node, beat)
        except OSError as error:
            print(f"craton agent: cannot write the heartbeat of {self._node}: {error}", file=sys.stderr, flush=True)

    def mark_fatal(self, text: str) -> None:
        print(f"craton agent: {text}", file=sys.stderr, flush=True)
        self.mark("FATAL", text)

    def mark(self, marker: Marker, text: str = "") -> None:
        try:
            self._run.mark(marker, text)
        except OSError as error:
            print(f"craton agent: cannot set {marker}: {error}", file=sys.stderr, flush=True)

    def warn(self, event: str, text: str) -> None:
        print(f"craton agent: {text}", file=sys.stderr, flush=True)
        self._records.event(event, message=text)

    def close(self) -> None:
        self._endpoint.close()
