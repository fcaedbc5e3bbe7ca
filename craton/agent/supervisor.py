"""Supervises the processes of one node through one generation of a run: starts them, watches them, ends them.

Guarantees, however the generation ends: every rank has ended and is reaped, the node's heartbeat says what became of
it, and the ledger of every rank that keeps books sums to that rank's life.

- All ranks exit with 0: the run is done once all nodes say so (the first node's agent writes DONE), or stopped when the
  STOP marker is set.
- The STOP marker or SIGTERM to the agent: SIGTERM to the ranks, which checkpoint and exit; SIGKILL after the grace.
- A rank fails: the others get SIGTERM, then SIGKILL after the failure grace, for they may hang in a collective; FATAL
  says which rank, how it ended and what it printed last.
- FATAL from another node, a silent node, or a run directory that is gone: the ranks are ended the same way.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from types import FrameType

from craton.agent.launch import Launch
from craton.agent.lock import NodeLock
from craton.agent.peers import SILENT_SECONDS, Peers
from craton.agent.process import ChildProcess, RankProcess, adopt_orphans, end_sink, reap, start_rank, start_sink
from craton.agent.records import NodeRecords
from craton.telemetry import (
    Heartbeat,
    Marker,
    MetricsEndpoint,
    NodeState,
    RunDirectory,
    Summarizer,
    touch_heartbeat,
    write_heartbeat,
)

POLL_SECONDS = 0.5  # markers
HEARTBEAT_SECONDS = 1.0
SUMMARY_SECONDS = 30.0  # goodput and cost, as metrics of the first node
GONE_SECONDS = 3.0  # a run directory that stays away this long is gone
SINK_GRACE_SECONDS = 30.0  # MLflow takes ten of them to make its first database
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One node's agent. `supervise()` returns the exit code: 0 done or stopped, 1 failed."""

    def __init__(self, run: RunDirectory, launch: Launch, node: int, lock: NodeLock) -> None:
        self._run, self._launch, self._lock = run, launch, lock
        self._directory = _identity(run)
        self._node, self._index = launch.nodes[node], node
        self._endpoint = MetricsEndpoint(run.name, self._node, launch.leaves.get(self._node, ""))
        self._metrics_port = 0
        self._records = NodeRecords(run, self._node, launch.generation, self._endpoint)
        # The first node watches all others, the others watch the first.
        watched = launch.nodes[1:] if node == 0 else launch.nodes[:1]
        self._peers = Peers(run, watched, launch.generation)
        self._summarizer = Summarizer(run)
        self._ranks: list[RankProcess] = []
        self._sinks: list[ChildProcess] = []
        self._failed: list[RankProcess] = []  # in the order in which they ended
        self._ending: str | None = None  # why the ranks were told to end
        self._is_failure = False
        self._kill_at = float("inf")
        self._stop_signal: signal.Signals | None = None
        self._seen_directory = time.monotonic()
        self._next_poll = self._next_heartbeat = self._next_summary = 0.0
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)

    def supervise(self) -> int:
        self._catch_signals()
        adopt_orphans()
        self._beat("running")
        self._records.event("agent_started", pid=os.getpid(), ranks=self._launch.ranks_per_node)
        self._start()
        while any(rank.is_running for rank in self._ranks):
            self._turn()
        state = self._finish()
        return 1 if state == "failed" else 0

    # -- start ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            for local_rank in range(self._launch.ranks_per_node):
                rank = start_rank(self._run, self._launch, self._index, local_rank)
                self._ranks.append(rank)
                self._selector.register(rank.records, selectors.EVENT_READ, rank)
        except OSError as error:
            self._fail(f"{self._node} cannot start rank {len(self._ranks)}: {error}")
            return
        self._serve_metrics()
        if self._index == 0:
            for sink in self._launch.track:
                self._start_sink(sink)

    def _serve_metrics(self) -> None:
        # With all nodes on this machine nobody else has to reach the endpoint.
        is_local = self._launch.master_address in ("127.0.0.1", "localhost", "::1")
        address = "127.0.0.1" if is_local else "0.0.0.0"
        try:
            try:
                self._metrics_port = self._endpoint.serve(self._launch.metrics_port, address)
            except OSError as error:
                self._warn(
                    "metrics_port_taken",
                    f"port {self._launch.metrics_port} for metrics: {error.strerror}; taking any free one",
                )
                self._metrics_port = self._endpoint.serve(0, address)
        except (ImportError, OSError) as error:
            self._warn("no_metrics_endpoint", f"no Prometheus endpoint: {error}")
            return
        plan = self._summarizer.summary().plan
        self._endpoint.update({f"plan_{name}": value for name, value in plan.items()}, None)
        self._records.event("metrics_served", address=address, port=self._metrics_port)
        self._beat("running")

    def _start_sink(self, sink: str) -> None:
        try:
            self._sinks.append(start_sink(self._run, sink))
        except OSError as error:
            self._warn("sink_failed", f"sink {sink} cannot start ({error}); the run goes on without it")

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to be woken
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_stop_signal)

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = signal.Signals(number)

    # -- while it runs --------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Waits for something to happen, at most until the next poll, and deals with it."""
        deadline = min(self._next_poll, self._kill_at)
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            elif not self._records.read(key.data):
                self._selector.unregister(key.fileobj)
        # Before the reaping: a scheduler signals the ranks too, and one that dies of that has not failed.
        if self._stop_signal is not None and self._ending is None:
            self._stop_all_nodes(self._stop_signal)
        for child in reap([*self._ranks, *self._sinks]):
            if isinstance(child, RankProcess):
                self._on_rank_end(child)
            elif child.code != 0:
                told = "; ".join(child.last_lines(3))
                self._warn("sink_failed", f"{child.name} {_how_ended(child.code)}: {told}; the run goes on without it")
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._kill_ranks()
        if now >= self._next_poll:
            self._next_poll = now + POLL_SECONDS
            self._poll(now)

    def _poll(self, now: float) -> None:
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._touch()
            self._peers.look()
            silent = self._peers.silent()
            if silent and not self._is_failure:
                self._fail(f"{self._node} has had no sign of life from {', '.join(silent)} for {SILENT_SECONDS:.0f} s")
        if not self._is_failure and self._run.has("FATAL"):
            self._end_ranks("FATAL of another node", is_failure=True)
        if self._ending is None and self._run.has("STOP"):
            self._end_ranks("STOP", is_failure=False)
        if _identity(self._run) == self._directory:
            self._seen_directory = now
        elif now - self._seen_directory > GONE_SECONDS and not self._is_failure:
            self._fail(f"the run directory {self._run.path} is gone")
        if self._index == 0 and now >= self._next_summary:
            self._next_summary = now + SUMMARY_SECONDS
            self._record_summary()

    def _on_rank_end(self, rank: RankProcess) -> None:
        self._records.event("rank_ended", rank.rank, code=rank.code)
        was_asked = self._ending is not None and signal.SIGTERM in rank.sent
        # A rank that had no time to say how it wants to be stopped dies of SIGTERM; that is a stop, not a fault.
        if rank.code == 0 or (was_asked and rank.code == -signal.SIGTERM):
            return
        if was_asked and self._is_failure:
            return  # its peers are gone or it was killed: not why the run failed
        self._failed.append(rank)
        if not self._is_failure:
            self._end_ranks(f"{rank.name} {_how_ended(rank.code)}", is_failure=True)

    def _stop_all_nodes(self, number: signal.Signals) -> None:
        """Told by a scheduler or by Ctrl-C: the other nodes learn it from the marker."""
        reason = f"{number.name} to the agent of {self._node}"
        self._mark("STOP", reason)
        self._end_ranks(reason, is_failure=False)

    def _end_ranks(self, reason: str, is_failure: bool) -> None:
        grace_seconds = self._launch.failure_grace_seconds if is_failure else self._launch.stop_grace_seconds
        self._ending = reason
        self._is_failure = is_failure
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)
        self._records.event("ranks_told_to_end", reason=reason, grace_seconds=grace_seconds)
        for rank in self._ranks:
            rank.send(signal.SIGTERM)

    def _kill_ranks(self) -> None:
        """The grace is over."""
        for rank in self._ranks:
            if rank.is_running:
                self._records.event("rank_killed", rank.rank, reason=self._ending)
                rank.send(signal.SIGKILL)
        if not self._is_failure:
            # Not by _end_ranks: they have been told, and what they did since their last checkpoint is lost.
            slow = ", ".join(rank.name for rank in self._ranks if rank.is_running)
            self._is_failure = True
            self._mark_fatal(
                f"{slow} on {self._node} did not end within {self._launch.stop_grace_seconds:g} s of SIGTERM "
                f"({self._ending}) and had to be killed: the work since the last checkpoint is lost"
            )

    def _fail(self, reason: str) -> None:
        self._mark_fatal(reason)
        self._end_ranks(reason, is_failure=True)

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> NodeState:
        if self._failed:
            self._mark_fatal(self._failure_text())
        state: NodeState = "failed" if self._is_failure else "stopped" if self._run.has("STOP") else "done"
        for rank in self._ranks:
            while self._records.read(rank) and self._has_more(rank):
                pass
            os.close(rank.records)
            self._records.close_ledger(rank, state)
        if state == "done" and self._index == 0:
            state = self._wait_for_peers()
        if self._index == 0:
            self._record_summary()
        self._records.event(
            "agent_ended",
            state=state,
            garbage_lines=self._records.garbage_lines,
            lost_lines=self._records.lost_lines,
        )
        self._end_sinks()
        self._endpoint.close()
        self._records.close()
        # Whoever sees the run's end may start its next generation at once.
        self._lock.release()
        self._beat(state)
        if state == "done" and self._index == 0:
            self._mark("DONE")
        return state

    def _has_more(self, rank: RankProcess) -> bool:
        """Whether the pipe of a dead rank still holds something."""
        with selectors.DefaultSelector() as one:
            one.register(rank.records, selectors.EVENT_READ)
            return bool(one.select(0))

    def _wait_for_peers(self) -> NodeState:
        """The run is done when every node is; a node that fails meanwhile, or is never heard of, fails the run."""
        since = time.monotonic()
        while True:
            self._peers.look()
            missing = self._peers.unfinished()
            if not missing:
                return "stopped" if self._run.has("STOP") else "done"
            if self._run.has("FATAL"):
                return "failed"
            unheard = not self._peers.heard_of(missing) and time.monotonic() - since > SILENT_SECONDS
            if self._peers.silent() or unheard:
                self._mark_fatal(f"the ranks of {self._node} ended well, but {', '.join(missing)} did not report")
                return "failed"
            self._touch()
            time.sleep(POLL_SECONDS)

    def _end_sinks(self) -> None:
        """Sinks have seen every line by now, or write it in their grace."""
        for sink in self._sinks:
            end_sink(sink)
        deadline = time.monotonic() + SINK_GRACE_SECONDS
        while any(sink.is_running for sink in self._sinks):
            reap(self._sinks)
            self._touch()
            if time.monotonic() > deadline:
                for sink in self._sinks:
                    sink.send(signal.SIGKILL)
            time.sleep(0.02)

    def _failure_text(self) -> str:
        """Which rank broke the run: one that a signal ended rather than one that then saw its connection break."""
        guilty = next((rank for rank in self._failed if rank.code < 0), self._failed[0])
        last_lines = guilty.last_lines()
        headline = f"{guilty.name} on {self._node} {_how_ended(guilty.code)} (generation {self._launch.generation})"
        if guilty.code > 0 and last_lines:  # it ended by itself: what it said last is most likely why
            headline += f": {last_lines[-1].strip().removeprefix('craton: ')}"
        text = [headline]
        if guilty.code == -signal.SIGKILL:
            text.append("less memory is needed with a smaller layout.micro_batch, more layout.recompute or more ranks")
        others = [f"{rank.name} {_how_ended(rank.code)}" for rank in self._failed if rank is not guilty]
        if others:
            text.append("also " + ", ".join(others))
        if self._run.has("FATAL"):  # another node was first, and this one most likely only saw its connection break
            return "\n".join(text)
        text.append(f"the end of {guilty.log_path.name}:" if last_lines else f"{guilty.log_path.name} is empty")
        return "\n".join([*text, *(f"  {line}" for line in last_lines)])

    # -- what others see ------------------------------------------------------------------------------------------

    def _record_summary(self) -> None:
        measured = self._summarizer.summary().measured
        values = {f"run_{name}": measured[name] for name in ("goodput", "cost_dollars") if name in measured}
        if values:
            self._records.metrics(values)

    def _beat(self, state: NodeState) -> None:
        beat = Heartbeat(self._launch.generation, state, os.getpid(), self._metrics_port)
        try:
            write_heartbeat(self._run, self._node, beat)
        except OSError as error:
            print(f"craton agent: cannot write the heartbeat of {self._node}: {error}", file=sys.stderr, flush=True)

    def _touch(self) -> None:
        with contextlib.suppress(OSError):  # a directory that is gone is seen by _poll
            touch_heartbeat(self._run, self._node)

    def _mark_fatal(self, text: str) -> None:
        print(f"craton agent: {text}", file=sys.stderr, flush=True)
        self._mark("FATAL", text)

    def _mark(self, marker: Marker, text: str = "") -> None:
        try:
            self._run.mark(marker, text)
        except OSError as error:
            print(f"craton agent: cannot set {marker}: {error}", file=sys.stderr, flush=True)

    def _warn(self, event: str, text: str) -> None:
        print(f"craton agent: {text}", file=sys.stderr, flush=True)
        self._records.event(event, message=text)


def _identity(run: RunDirectory) -> tuple[int, int] | None:
    """Which directory this is: another one in its place is not our run."""
    try:
        status = run.path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _how_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
