"""The agent of one node, through all generations of a run.

It starts the node's ranks, watches them, sends them new generations and writes their ledger. Together with the other
agents it agrees on the members of the run (see `coordinator` and `leader_election`). Guarantees, however a run ends:
every process it started has ended and is reaped, the node's heartbeat has the final state, and the ledger of every slot
sums to wall time.

- All ranks exit with 0: the run is done once all nodes report it (the coordinator writes DONE), or stopped if the STOP
  marker is set.
- STOP marker, or SIGTERM to the agent: the ranks get SIGTERM, save a checkpoint and exit; SIGKILL after the grace
  period, which is extended while they save, or hold their state because no disk accepts it. A rank or node that dies
  while ranks hold the state is a normal failure: the next generation restores the state and is then stopped.
- A rank exits otherwise, raises or hangs: the next generation starts. The survivors stay alive and enter it. A rank
  that does not leave the old generation within its grace period may be blocked forever: it is killed and restarted.
  The same holds for a planned generation, for which ranks first finish their step: a rank that dies before it has
  entered is a failure.
- A run that owns runs: its first generation waits until they are ready; their ends never end one of its generations.
  A member whose owner is gone saves and stops.
- FATAL: the ranks are terminated. If the run directory is gone: the same, after they have saved to other tiers.
- A full, read-only or failing disk under the run directory: the run continues, and writes wait (`state_writer`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from types import FrameType
from typing import Any

from craton.agent.chaos import Chaos
from craton.agent.coordination import LeaderElection, RankFailure, check_secret, own_address, run_secret
from craton.agent.errors import LaunchError
from craton.agent.generation import Generation, first_ranks, newest_generation
from craton.agent.launch import Launch
from craton.agent.lock import NodeLock
from craton.agent.member_manager import MemberManager
from craton.agent.membership import Membership
from craton.agent.node import NodeProcesses
from craton.agent.owner import OwnerWatch
from craton.agent.processes import (
    EXIT_FINAL,
    ChildProcess,
    RankProcess,
    adopt_orphans,
    down_interface,
    failure_text,
    how_ended,
    interface_of,
    is_loopback,
    pin_interfaces,
    reap,
)
from craton.agent.progress import CommandProgress
from craton.agent.records import NodePublisher, NodeRecords, continue_clock, directory_identity
from craton.agent.slot import RankSlot
from craton.formatting import setting
from craton.limits import explain, limit_hint, memory_text
from craton.telemetry import Marker, RunDirectory
from craton.telemetry.error_reports import ErrorReport
from craton.telemetry.files import STORAGE_ERRORS, storage_problem
from craton.telemetry.node import LogTimes, MetricsEndpoint, NodeState
from craton.telemetry.rank import BESIDE, STEADY, monotonic_of

TURN_SECONDS = 0.2  # loop interval when nothing happens
POLL_SECONDS = 0.5  # markers, chaos, resize
HEARTBEAT_SECONDS = 1.0
LEDGER_SECONDS = 1.0
STATUS_SECONDS = 2.0
STACK_SECONDS = 0.4
SUMMARY_SECONDS = 30.0  # goodput and cost, as metrics of the first node
GONE_SECONDS = 5.0  # a run directory that is missing for this long is gone
SETTLE_SECONDS = 600.0  # at the end of a run: how long to wait for a disk that refuses the last records
MAX_FORK_SERVERS = 3  # that may exit before they are ready
STOPPED_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One node's agent. `supervise()` returns the exit code: 0 done or stopped, 1 failed."""

    def __init__(
        self, run: RunDirectory, launch: Launch, node: int, lock: NodeLock, joins_held_stop: bool = False
    ) -> None:
        self._run, self._launch, self._lock = run, launch, lock
        self._directory = directory_identity(run)
        check_secret(run)  # refuse to start a run that a stranger could join
        self._node, self._index = launch.nodes[node], node
        self._host = os.environ.get("CRATON_ADDRESS") or own_address(launch.master_address, launch.master_port)
        self._interface = None if is_loopback(self._host) else interface_of(self._host)
        pin_interfaces(self._host, os.environ, launch.env)  # all processes of the node inherit them
        endpoint = MetricsEndpoint(run.name, self._node, launch.leaves.get(self._node, ""))
        present = newest_generation(run)  # if an earlier agent of this node was killed
        number = max(launch.generation, present.number if present else 0)
        self._records = NodeRecords(run, self._node, number, endpoint, self._on_rank_event)
        continue_clock(run, launch, self._node, self._records.last_moment())
        self._face = NodePublisher(run, launch, self._node, endpoint, self._records)
        self._log_times = LogTimes(run, self._node)
        self._selector = selectors.DefaultSelector()
        self._processes = NodeProcesses(run, launch, self._node, self._host, self._records, self._selector)
        self._progress = CommandProgress(launch.progress, self._processes, self._records, self.warn)
        self._first_ranks = first_ranks(launch, node, present)
        self._membership: Membership | None = None
        self._members, self._owner = MemberManager(run, launch, self._records), OwnerWatch(launch)
        self._chaos = Chaos(run, launch, self._node, self._records, self._processes, self._coordinates)
        self._ending: str | None = None  # why the ranks were terminated
        self._is_failure = self._is_done = False
        # The generation that failed while a stop held its state: the next one is stopped.
        self._left_generation = number if joins_held_stop else None
        self._kill_at = float("inf")
        self._stop_signal: signal.Signals | None = None
        self._started = self._seen_directory = time.monotonic()
        self._next = {"poll": 0.0, "heartbeat": 0.0, "ledger": 0.0, "status": 0.0, "summary": 0.0, "stacks": 0.0}
        self._failed_fork_servers = 0
        self._wakeup, self._wakeup_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)

    def supervise(self) -> int:
        self._catch_signals()
        adopt_orphans()
        self._face.beat("running")
        ours = {name: value for name, value in self._launch.env.items() if name.startswith("CRATON_")}
        self._records.event("agent_started", pid=os.getpid(), ranks=self._launch.ranks_per_node, environment=ours)
        self._processes.open_books(self._first_ranks)
        self._face.serve_metrics(self._host)
        try:
            election = LeaderElection(
                self._run, self._launch, self._index, run_secret(self._run), self._host, self._wake
            )
        except LaunchError as error:
            self.fail(str(error))
        except OSError as error:
            if error.errno in STORAGE_ERRORS:  # of the secret that agents authenticate with
                problem = storage_problem(self._run.path) or f"{self._run.secret_path} cannot be written: {error}"
                self.fail(f"{self._node} cannot join the other agents: {problem}")
            else:
                self.fail(f"{self._node} cannot listen for the other agents at {self._host}: {explain(error)}")
        else:
            self._face.address = election.address
            self._membership = Membership(self._run, self._launch, self._node, election, self._records, self)
            self._membership.is_held = self._members.is_wanted
            self._face.beat("running")
        while not self._is_over:
            try:
                self._turn()
            except OSError as error:
                self._survive(error)
        state = self._finish()
        return 1 if state == "failed" else 0

    def _survive(self, error: OSError) -> None:
        """Keep the run alive on a storage error that no other code handles: the next turn tries again."""
        is_gone = directory_identity(self._run) != self._directory
        if error.errno not in STORAGE_ERRORS and not is_gone:
            raise error
        print(f"craton agent: {error}; the run continues", file=sys.stderr, flush=True)
        time.sleep(TURN_SECONDS)

    @property
    def _is_over(self) -> bool:
        if any(place.is_running for place in self._processes.places):
            return False
        needed = self._membership is not None and not self._membership.is_released and not self._membership.is_finished
        return self._ending is not None or self._is_done or not needed

    # -- start ----------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to wake up
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_stop_signal)

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = signal.Signals(number)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wakeup_writer, b"\0")

    # -- while it runs --------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for events, at most until the next poll, and handle them."""
        for key, _ in self._selector.select(self._chaos.turn_seconds(TURN_SECONDS)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            elif isinstance(key.data, RankProcess):
                if not self._records.read(key.data):
                    self._selector.unregister(key.fileobj)
            else:
                key.data()
        self._progress.look()
        # Before reaping: a scheduler signals the ranks too, and a rank that dies of that has not failed.
        if self._stop_signal is not None and self._ending is None and self._can_stop():
            self._stop_all_nodes(self._stop_signal)
            self._stop_signal = None  # a second signal ends the final wait for a disk
        self._reap()
        now = time.monotonic()
        if self._ending is not None and not self._is_failure and self._processes.saves_state():
            self._kill_at = now + self._launch.stop_grace_seconds  # ranks need time after the save, too
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._kill_ranks()
        if self._ending is None:
            self._tend()
        if self._membership is not None:
            self._membership.confer(now, is_ending=self._ending is not None and not self._holds_state())
        self._processes.watch(now)
        self._chaos.turn()
        self._poll(now)

    def _tend(self) -> None:
        try:
            self._processes.tend()
            for rank in self._processes.tend_ranks():
                self._report(
                    RankFailure(f"cannot start rank {rank} on {self._node}: its fork server is not ready", STEADY.now())
                )
        except OSError as error:
            self.fail(f"{self._node} cannot start its processes: {explain(error)}")

    def _reap(self) -> None:
        managers = [self._members.child] if self._members.child else []
        for child in reap([*self._processes.children, *self._face.sinks, *managers]):
            if isinstance(child, RankProcess):
                self._on_rank_end(child)
            elif (reason := self._members.ended(child)) is not None:
                if reason:
                    self.warn("manager_ended", f"{reason}; starting a new one")
            elif (helper := self._processes.helper_ended(child)) is not None:
                self._on_helper_end(helper, child)
            elif child.code != 0:
                message = "; ".join(child.last_lines(3))
                text = f"{child.name} {how_ended(child.code)}: {message}; the run continues without it"
                self.warn("sink_failed", text)

    def _due(self, action: str, now: float, seconds: float) -> bool:
        if now < self._next[action]:
            return False
        self._next[action] = now + seconds
        return True

    def _poll(self, now: float) -> None:
        if self._due("heartbeat", now, HEARTBEAT_SECONDS):
            self._face.touch()
            self._processes.flush_output()
        if self._due("ledger", now, LEDGER_SECONDS):
            self._processes.book()
            ranks = self._processes.rank_status()
            self._face.show_ranks(ranks)
            self._log_times.note(rank.rank for rank in ranks)
        if self._due("stacks", now, STACK_SECONDS) and self._processes.take_stacks(now):
            self._next["status"] = now
        if self._due("status", now, STATUS_SECONDS):
            down = down_interface(self._interface)
            self._face.write_status(self._records.generation, self._processes.rank_status(), down)
        if self._coordinates() and self._due("summary", now, SUMMARY_SECONDS):
            self._face.record_summary()
        if not self._due("poll", now, POLL_SECONDS):
            return
        if not self._is_failure and self._run.has("FATAL"):
            self._end_ranks("FATAL of another node", is_failure=True)
        if self._ending is None and self.has("STOP") and self._can_stop():
            self._end_ranks("STOP", is_failure=False)
        if self._run.has("DONE"):
            self._is_done = True
        self._look_after_members(now)
        if directory_identity(self._run) == self._directory:
            self._seen_directory = now
        elif now - self._seen_directory > GONE_SECONDS and not self._is_failure:
            reason = f"the run directory {self._run.path} is gone; the ranks save to other tiers and exit"
            self._face.mark_fatal(reason)
            self._end_ranks(reason, is_failure=True, grace_seconds=self._launch.stop_grace_seconds)
        if self._membership is not None:
            self._membership.look_for_wishes()

    def _look_after_members(self, now: float) -> None:
        """Keep the member manager of this run alive and wait for it; stop this run if its owner is gone."""
        if self._membership is None or not self._coordinates():
            return
        try:
            self._members.tend(now)
        except OSError as error:
            self.warn("manager_ended", f"{self._node} cannot start the member manager: {explain(error)}")
        is_held = self._processes.generation is None and not self._members.is_open
        if self._ending is None and is_held and self._members.failure:
            self.fail(self._members.failure)
        if is_held or self._membership.is_held:
            self._processes.wait_for_members(is_held)
        self._membership.is_held = is_held
        if self._ending is None and (reason := self._owner.reason_to_stop(now)):
            self.mark("STOP", reason)
            self._end_ranks(reason, is_failure=False)

    # -- ranks ----------------------------------------------------------------------------------------------------

    def _on_rank_event(self, rank: RankProcess, line: dict[str, Any]) -> None:
        """Handle an event of a rank; one that cannot continue reports it and waits for the next generation."""
        if line["event"] == "checkpoint_saved":
            self._face.saved(str(line.get("tier", "")), float(line["time"]))
            if isinstance(line.get("seconds"), int | float):
                self._processes.saved(float(line["seconds"]))
        if line["event"] == "serving" and line.get("stage") == "ready":
            self._processes.keeps_standby = bool(self._launch.standby)
        if line["event"] == "stopped":  # it could not set the marker itself
            self.mark("STOP", str(line.get("reason", "")))
        if line["event"] == "failed":
            rank.error = ErrorReport.from_fields(line.get("error"))
        if line["event"] == "broken":
            self._report(
                RankFailure(
                    f"{rank.name} on {self._node} failed at step {line['step']}: {line.get('reason', '')}",
                    STEADY.now(),  # not the time of the event: a wall clock may have jumped since
                    generation=line.get("generation"),
                    is_echo=bool(line.get("echo")),
                )
            )

    def _on_rank_end(self, rank: RankProcess) -> None:
        if rank.output is not None:
            rank.output.end()
        self._progress.look()  # at its last output
        place = self._processes.ended(rank)
        died_in = "+".join((place.page.kind, *place.page.beside))
        self._record_end(rank, place, died_in)
        was_asked = self._ending is not None and signal.SIGTERM in rank.sent
        # A rank that had no time to install its handler dies of SIGTERM (143 in a shell). That is a stop, not a fault.
        # The same holds when other ranks leave and their connections break, on this node or another.
        ended_well = rank.code == 0 or (was_asked and rank.code in STOPPED_CODES)
        if self._launch.exits_together and not self._is_failure and self._run.has("STOP"):
            ended_well = rank.code != -signal.SIGKILL
        generation = self._processes.generation
        assert generation is not None
        entered = place.page.generation == generation.number
        if self._ending is None and entered and self._launch.nursery and not self.has("STOP"):
            # A rank of the training loop is idle once its work is done.
            ended_well &= died_in.partition("+")[0] == "idle"
        if ended_well:
            place.page.switch("idle")
        else:
            place.page.break_off("detect", monotonic_of(rank.ended or STEADY.now()))
            for flag in BESIDE:
                if flag != "unsaved":  # the process that replaces it must save that state
                    place.page.set_beside(flag, False)
            if any(item is place for _, item in self._processes.ranks):  # otherwise its ledger is closed
                self._records.book(id(place), rank.rank, place.page, died_in=died_in)
        if self._ending is not None and not ended_well and self._holds_state():
            self._put_off_stop(generation)
        if self._ending is not None:
            if not ended_well and not self._is_failure:
                self._face.mark_fatal(failure_text(rank, self._node, self._records.generation))
                self._is_failure = True
            return
        was_terminated = signal.SIGTERM in rank.sent  # ranks of a job's own command; their exit code means nothing then
        is_missed = self._processes.is_leaving(place) and not was_terminated  # other ranks may wait for it
        if not ended_well and (entered or is_missed):
            self._report(self._fault_of(rank, generation))
        elif entered:
            place.is_done = True
        else:  # it was entering the current generation, or was killed because it did not enter in time
            self._again(place, rank)

    def _record_end(self, rank: RankProcess, place: RankSlot, died_in: str) -> None:
        """Record how a rank ended: its code or signal, what it was doing, and why, in its own words."""
        fields: dict[str, Any] = {"code": rank.code, "during": died_in}
        if place.page.step:
            fields["step"] = place.page.step
        if rank.code < 0 and -rank.code in set(signal.Signals):
            fields["signal"] = signal.Signals(-rank.code).name
        if rank.sent:
            fields["sent"] = sorted(number.name for number in rank.sent)  # by this agent
        if (error := rank.read_end()) is not None:
            fields["error"] = error.to_fields()
        if rank.was_killed and rank.oom.has_killed:
            fields["out_of_memory"] = memory_text()
        self._records.event("rank_ended", rank.rank, **fields)

    def _again(self, place: RankSlot, rank: RankProcess) -> None:
        """Restart a rank that was entering the current generation."""
        place.process = None
        try:
            started = self._processes.start_again(place)
        except OSError as error:
            self.fail(f"{self._node} cannot start {rank.name}: {explain(error)}")
            return
        if not started:
            assert self._processes.generation is not None
            self._report(self._fault_of(rank, self._processes.generation))

    def _fault_of(self, rank: RankProcess, generation: Generation) -> RankFailure:
        text = failure_text(rank, self._node, self._records.generation)
        is_early = not self._launch.nursery and time.monotonic() - self._started < self._launch.early_seconds
        is_first = generation.number == self._launch.generation and generation.reached == 0
        is_final = rank.code in (126, 127) or (rank.code == EXIT_FINAL and not self._launch.is_own_command)
        return RankFailure(
            text,
            rank.ended or STEADY.now(),
            generation=generation.number,
            is_final=is_final,
            is_early=is_early and is_first,
        )

    def _on_helper_end(self, helper: str, child: ChildProcess) -> None:
        hint = limit_hint("\n".join(child.last_lines()))
        message = "; ".join([*child.last_lines(3), *([hint] if hint else [])])
        if helper == "unready fork server":
            self._failed_fork_servers += 1
            if self._failed_fork_servers >= MAX_FORK_SERVERS and self._launch.standby:
                self.warn("nursery_failed", f"{child.name} {how_ended(child.code)}: {message}; going on without it")
                self._processes.keeps_standby = False
                return
            if self._failed_fork_servers >= MAX_FORK_SERVERS and self._ending is None:
                self.fail(f"{child.name} {how_ended(child.code)} before it was ready: {message}")
                return
        if self._ending is None:
            event = "keeper_ended" if helper == "keeper" else "nursery_ended"
            self.warn(event, f"{child.name} {how_ended(child.code)}: {message}; starting a new one")
        is_missed = helper == "keeper" and self._processes.generation is not None and self._processes.ranks
        # Ranks that hold an unsaved state may have the only copy: they are not restarted for a new keeper.
        if is_missed and not self._processes.holds_state():
            self._report(RankFailure(f"{child.name} {how_ended(child.code)}", child.ended or STEADY.now()))

    # -- among agents ---------------------------------------------------------------------------------------------

    def enter(self, generation: Generation, end: tuple[int, ...]) -> None:
        present = self._processes.generation
        if present is not None and generation.number <= present.number:
            return
        if self._ending is not None and present is not None and self._holds_state():
            self._put_off_stop(present)
        if self._ending is not None:
            return
        if present is None and self._members.is_wanted:
            self._started = time.monotonic()  # a command that fails now fails early, however long its members took
        try:
            self._processes.enter(generation, end)
        except OSError as error:
            self.fail(f"{self._node} cannot start its ranks: {explain(error)}")
            return
        if self._membership is not None:
            self._membership.entered()
        self._face.entered(generation.ranks_of(self._node))
        has_ranks = bool(generation.ranks_of(self._node))
        self._face.beat("running" if has_ranks else "spare")
        if has_ranks and generation.ranks_of(self._node).start == 0:
            self._face.start_sinks()

    @property
    def generation(self) -> Generation | None:
        return self._processes.generation

    def wait_for_nodes(self) -> None:
        self._processes.wait_for_nodes()

    def status(self) -> dict[str, Any]:
        return self._processes.status()

    def _coordinates(self) -> bool:
        return self._membership is not None and self._membership.coordinates

    def _report(self, fault: RankFailure) -> None:
        if self._membership is not None:
            self._membership.report(fault)

    # -- the end --------------------------------------------------------------------------------------------------

    def _stop_all_nodes(self, number: signal.Signals) -> None:
        """Handle a signal of a scheduler or Ctrl-C: set the STOP marker, which the other nodes read."""
        reason = f"{number.name} to the agent of {self._node}"
        self.mark("STOP", reason)
        self._end_ranks(reason, is_failure=False)

    def _end_ranks(self, reason: str, is_failure: bool, grace_seconds: float | None = None) -> None:
        if grace_seconds is None:
            grace_seconds = self._launch.failure_grace_seconds if is_failure else self._launch.stop_grace_seconds
        self._ending = reason
        self._is_failure = is_failure
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)
        self._records.event("ranks_told_to_end", reason=reason, grace_seconds=grace_seconds)
        for place in self._processes.places:
            if place.process is not None:
                place.process.send(signal.SIGTERM)
                place.process.send(signal.SIGCONT)

    def _holds_state(self) -> bool:
        """Whether the run stops and a rank holds, or held, a state that no disk accepts; other nodes have copies."""
        is_held = any("unsaved" in place.page.beside for _, place in self._processes.ranks)
        return is_held and not self._is_failure and bool(self._launch.nursery)

    @property
    def holds_stop(self) -> bool:
        """Whether the run is stopping but still needs its nodes until a disk has the state."""
        return self._left_generation is not None or self._holds_state()

    def _put_off_stop(self, broken: Generation) -> None:
        """Postpone the stop: the generation failed while it held the state. The next one restores it and is stopped."""
        self._records.event("stop_put_off", reason=f"the state is only in memory; generation {broken.number} failed")
        self._ending, self._kill_at, self._left_generation = None, float("inf"), broken.number

    def _can_stop(self) -> bool:
        """Whether ranks can be stopped now. After a generation that failed with unsaved state, only once all ranks have
        entered the next one: before that, SIGTERM would kill a process that has just started."""
        present = self._processes.generation
        if self._left_generation is None:
            return True
        if present is None:
            return False
        entered = all(
            place.is_running and place.page.generation == present.number for _, place in self._processes.ranks
        )
        return present.number > self._left_generation and entered

    def _kill_ranks(self) -> None:
        """Kill the ranks that are left after the grace period."""
        slow = [place.process for place in self._processes.places if place.process and place.process.is_running]
        for rank in slow:
            self._records.event("rank_killed", rank.rank, reason=self._ending)
            rank.send(signal.SIGKILL)
        if slow and not self._is_failure:
            # Not by _end_ranks: they were signalled before, and their work since the last checkpoint is lost.
            self._is_failure = True
            self._face.mark_fatal(
                f"{', '.join(rank.name for rank in slow)} on {self._node} did not exit within "
                f"{setting(self._launch.stop_grace_seconds)} of SIGTERM ({self._ending}) and was killed; work since "
                "the last checkpoint is lost"
            )

    def mark(self, marker: Marker, text: str = "") -> None:
        self._face.state.mark(marker, text)

    def has(self, marker: Marker) -> bool:
        return self._face.state.has(marker)

    def warn(self, event: str, text: str) -> None:
        self._face.warn(event, text)

    def fail(self, reason: str) -> None:
        self._face.mark_fatal(reason)
        self._end_ranks(reason, is_failure=True)

    def _finish(self) -> NodeState:
        if self._is_failure:
            state: NodeState = "failed"
        elif self.has("STOP"):
            state = "stopped"
        else:
            is_released = self._membership is not None and self._membership.is_released
            state = "released" if is_released and not self.has("DONE") else "done"
        self._face.touch()  # first write what waits for disk space
        self._processes.book(ended=state)
        self._face.write_status(self._records.generation, self._processes.rank_status())
        if self._coordinates():
            self._face.record_summary()
        self._records.event(
            "agent_ended",
            state=state,
            garbage_lines=self._records.garbage_lines,
            lost_lines=self._records.lost_lines,
        )
        if self._membership is not None:
            self._membership.close()
        self._progress.close()
        self._face.end_sinks()
        self._end_helpers()
        self._log_times.close()
        self._face.close()
        self._settle(state)
        self._records.close()
        # Before the last heartbeat: a reader that sees the end may start the next generation at once.
        self._lock.release()
        self._face.beat(state)
        return state

    def _settle(self, state: NodeState) -> None:
        """Wait until the disk has everything; a second stop signal ends the wait."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and self._stop_signal is None and not self._face.state.is_gone:
            self._face.touch()
            if self._processes.flush_output() and not self._face.state.has_unwritten:
                return
            time.sleep(TURN_SECONDS)
        print(
            f"craton agent: {self._run.name} is {state} on {self._node}, but the last records could not be written to "
            f"{self._run.path}: {self._face.state.trouble or 'the directory is gone'}",
            file=sys.stderr,
            flush=True,
        )

    def _end_helpers(self) -> None:
        self._processes.end_helpers()
        helpers = [child for child in self._processes.children if not isinstance(child, RankProcess)]
        self._face.wait_for(helpers, 0.0)
