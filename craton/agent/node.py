"""A node's processes through the generations of a run: start ranks, send them generations, end them.

Every rank has a slot on its node. A slot keeps one shared-memory page over all processes that fill it in turn. Ranks
of the training loop (forked by the fork server) take orders and stay alive across generations. Ranks of a job's own
command are restarted.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from craton.agent.coordination import RankProgress
from craton.agent.generation import Generation, next_number
from craton.agent.launch import Launch
from craton.agent.processes import (
    ChildProcess,
    CommandOutput,
    ConnectionReader,
    ForkServer,
    ForkServerError,
    RankProcess,
    free_port,
    is_loopback,
    pipe,
    rank_environment,
    start_rank,
)
from craton.agent.records import NodeRecords
from craton.agent.slot import RankSlot
from craton.agent.stacks import START_SECONDS, StackTaker, StuckRank
from craton.telemetry import RunDirectory, plan_twins, read_json
from craton.telemetry.node import PeerTraffic, RankStatus
from craton.telemetry.progress import NOTED_SECONDS, RankActivity, stuck_after
from craton.telemetry.rank import FORGET_SHARE, STEADY, RankPage, monotonic_of

LOOKED_RANKS = 8  # at a time, for what they wait
PLANNED_SECONDS = 1000.0  # without progress, while entering a planned generation; the coordinator's limit is lower
FORK_SERVER_SECONDS = 120.0  # imports from a cold file system are slow
MAX_STARTS = 3  # of one slot in one generation, without entering it
DUE_SHARE = 0.75  # of the limit after which a rank is ended: its stack is taken then
LONG_KINDS = ("productive", "redo", "compile")  # no stack is wanted before they count as stuck


class NodeProcesses:
    """All processes that an agent starts for its ranks."""

    def __init__(
        self,
        run: RunDirectory,
        launch: Launch,
        node: str,
        host: str,
        records: NodeRecords,
        selector: selectors.BaseSelector,
    ) -> None:
        self._run, self._launch, self._node, self._host = run, launch, node, host
        self._records, self._selector = records, selector
        self.generation: Generation | None = None
        self.broke_at = 0.0  # monotonic: when the previous generation failed; 0: it did not
        self.places: list[RankSlot] = []
        self._outputs: list[CommandOutput] = []  # not yet written to their logs completely
        self._first_ranks = range(0)  # their ledger starts before the first generation
        self.fork_server: ForkServer | None = None
        self.keeper: ChildProcess | None = None
        self.keeper_name = ""  # abstract address of the keeper's socket for processes of this node
        self.keeper_address = self.store_address = ""
        self._fork_server_by = float("inf")
        self.keeps_standby = False  # a fork server for ranks of a command that die, once the first ones work
        self._plan_step_seconds = self._planned_step()
        self._stacks = StackTaker(run, records.event)
        self._connections = None if is_loopback(host) else ConnectionReader()
        self._looked = 0  # ranks, in turn
        self._noteworthy: list[tuple[int, bool, str]] = []  # of the last look at its ranks
        self._save_seconds = 0.0  # longest recent save, with its writes in the background
        if not launch.nursery and next_number(run) > launch.generation:  # an earlier agent was killed
            self._offer_store()

    def _planned_step(self) -> float:
        planned = plan_twins(read_json(self._run.plan_path)).get("step_seconds")
        return float(planned) if isinstance(planned, int | float) else 0.0

    @property
    def children(self) -> list[ChildProcess]:
        helpers = [self.fork_server.child if self.fork_server else None, self.keeper]
        return [*(place.process for place in self.places if place.process), *(helper for helper in helpers if helper)]

    @property
    def is_ready(self) -> bool:
        """Whether ranks can be started here."""
        return not self._launch.nursery or bool(self.store_address)

    @property
    def ranks(self) -> list[tuple[int, RankSlot]]:
        """(rank, slot) of the current generation, or of the first one before it begins."""
        ranks = self.generation.ranks_of(self._node) if self.generation else self._first_ranks
        return list(zip(ranks, self.places, strict=False))

    @property
    def is_done(self) -> bool:
        return self.generation is not None and bool(self.ranks) and all(place.is_done for _, place in self.ranks)

    def is_leaving(self, place: RankSlot) -> bool:
        """Whether a rank is still in the generation before a planned one; other ranks may wait for it there."""
        present = self.generation
        return present is not None and present.is_planned and place.page.generation == present.number - 1

    def open_books(self, ranks: range) -> None:
        """Start the ledger of these ranks, before the first generation. After a killed agent of this node, continue
        where its ledger ends."""
        self._first_ranks = ranks
        ended = self._records.last_booked(self._launch.generation)
        for rank in ranks:
            page = RankPage.make()
            if rank in ended:
                page.begin("detect", monotonic_of(ended[rank]))
            self.places.append(RankSlot(page))

    # -- fork server and keeper -----------------------------------------------------------------------------------

    def tend(self) -> None:
        """Start the fork server and the keeper where they are missing, and read their messages."""
        if not self._launch.nursery and not self.keeps_standby:
            return
        if self.fork_server is None:
            self.fork_server = ForkServer(
                self._run, self._launch, self._node, lambda pid: self._records.event("fork_server_ready", pid=pid)
            )
            self._selector.register(self.fork_server.connection, selectors.EVENT_READ, self.fork_server.hear)
            self._fork_server_by = time.monotonic() + FORK_SERVER_SECONDS
        if not self.fork_server.is_ready and time.monotonic() > self._fork_server_by:
            self.fork_server.child.send(signal.SIGKILL)
        if self.fork_server.is_ready and self.keeper is None and self._launch.nursery:
            self._start_keeper()

    def helper_ended(self, child: ChildProcess) -> str | None:
        """Return which helper has ended: fork server or keeper; None: the child is neither."""
        if self.fork_server is not None and child is self.fork_server.child:
            was_ready = self.fork_server.is_ready
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self.fork_server.connection)
            self.fork_server.close()
            self.fork_server = None
            return "fork server" if was_ready else "unready fork server"
        if child is self.keeper:
            self.keeper = None
            self.keeper_name = self.keeper_address = self.store_address = ""
            return "keeper"
        return None

    def _start_keeper(self) -> None:
        assert self.fork_server is not None
        reading, writing = pipe()
        environment = {"CRATON_HOST": self._host, "CRATON_NODE": self._node}
        log_path = self._run.path / "logs" / f"keeper-{self._node}.log"
        try:
            pid = self.fork_server.fork("keeper", environment, log_path, {"CRATON_REPORT": writing})
        except ForkServerError as error:
            os.close(reading)
            self._records.event("nursery_failed", message=str(error))
            return
        finally:
            os.close(writing)
        self.keeper = ChildProcess(f"keeper of {self._node}", pid, log_path, 0, STEADY.now())
        keeper = self.keeper
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._hear_keeper(keeper, reading))

    def _hear_keeper(self, keeper: ChildProcess, report_of_it: int) -> None:
        try:
            message = os.read(report_of_it, 4096)
        except BlockingIOError:
            return
        self._selector.unregister(report_of_it)
        os.close(report_of_it)
        if message and self.keeper is keeper:  # otherwise it is gone already
            report = json.loads(message)
            self.keeper_name = str(report["keeper"])
            self.keeper_address, self.store_address = str(report["peers"]), str(report["store"])
            self._records.event("keeper_ready", pid=keeper.pid)

    # -- ranks ----------------------------------------------------------------------------------------------------

    def enter(self, generation: Generation, end: tuple[int, ...]) -> None:
        """Bring the node's ranks into a new generation; those in `end` are killed first."""
        had, wanted = len(self.ranks), len(generation.ranks_of(self._node))
        if had and not wanted:
            if self.generation is not None:  # the coordinator already records the new number
                self._records.generation = self.generation.number
            self.book(ended="released")
        self.generation = generation
        self._plan_step_seconds = self._planned_step()
        # Both times are of one clock, so only their difference is used on this machine.
        ago = max(0.0, generation.time - generation.broke_at)
        self.broke_at = time.monotonic() - ago if generation.broke_at else 0.0
        self._records.generation = generation.number
        if not self._launch.nursery:
            self._offer_store()
        if not wanted:
            self._part(generation)
            return
        if not had:
            self._return(generation, wanted)
        for rank, place in self.ranks:
            place.starts, place.is_done, place.missing_since = 0, False, time.monotonic()
            if not place.is_running:
                if place.page.kind in ("detect", "waiting"):
                    place.page.switch("regroup")
                self._start_rank(rank, place)
            elif rank in end:
                assert place.process is not None
                self._stacks.take_now(self._stuck(place, place.process, time.monotonic()))
                place.process.send(signal.SIGKILL)
            elif self._launch.nursery:
                self._tell(rank, place, generation)
            else:
                self._end(place)

    def _part(self, generation: Generation) -> None:
        """Leave the run. In a planned change the ranks first finish the last step and its save."""
        for place in self.places:
            if place.process is None:
                continue
            if not generation.is_planned:
                place.process.send(signal.SIGKILL)
            elif self._launch.nursery:
                self._tell(place.process.rank, place, generation)
            else:
                self._end(place)

    def _return(self, generation: Generation, wanted: int) -> None:
        """Join the run (again). Until now the slots of this node were idle and are not in the ledger."""
        now = time.monotonic()
        for place in self.places:
            if not place.is_running:
                place.page.begin("start", now)
                place.page.generation = -1
            self._records.skip(id(place), place.page)
        self.places += [RankSlot(RankPage.make()) for _ in range(wanted - len(self.places))]
        if self.broke_at:  # it replaces a lost node
            for place in self.places:
                if not place.is_running:
                    place.page.begin("waiting", self.broke_at)

    def wait_for_members(self, is_held: bool) -> None:
        """Book time before the first generation as `waiting` while the run waits for runs that it owns."""
        for place in self.places:
            if place.page.kind == ("start" if is_held else "waiting"):
                place.page.switch("waiting" if is_held else "start")

    def wait_for_nodes(self) -> None:
        """Book time as `waiting`: the run cannot continue before another node joins."""
        for place in self.places:
            if place.page.kind == "detect":
                place.page.switch("waiting")

    def watch(self, now: float) -> None:
        """Kill ranks whose deadline has passed."""
        for place in self.places:
            if not place.is_running or self.generation is None:
                continue
            assert place.process is not None
            if place.page.generation == self.generation.number:
                place.enter_by = float("inf")
            elif self.is_leaving(place):
                place.enter_by = max(place.enter_by, place.page.progress + PLANNED_SECONDS)
                if place.page.kind == "checkpoint" or "unsaved" in place.page.beside:  # its state is not on disk yet
                    place.kill_at = max(place.kill_at, place.page.progress + PLANNED_SECONDS)
            if now > min(place.enter_by, place.kill_at):
                place.enter_by = place.kill_at = float("inf")
                self._records.event(
                    "rank_killed", place.process.rank, reason=f"did not enter generation {self.generation.number}"
                )
                place.process.send(signal.SIGKILL)

    def ended(self, rank: RankProcess) -> RankSlot:
        """Read the last records of a rank that ended, and return its slot."""
        place = next(place for place in self.places if place.process is rank)
        while self._records.read(rank) and rank.has_records:
            pass
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(rank.records)
        rank.close()
        return place

    def flush_output(self) -> bool:
        """Retry writing command output that the disk refused; False while some still waits."""
        self._outputs = [item for item in self._outputs if not item.flush()]
        return not any(output.waiting_bytes for output in self._outputs)

    def start_again(self, place: RankSlot) -> bool:
        """Start a new process for a rank that has left, or never entered, the current generation. False: it has
        been started too often."""
        for rank, item in self.ranks:
            if item is place:
                place.page.switch("regroup")
                return self._start_rank(rank, place)
        return True

    def _start_rank(self, rank: int, place: RankSlot) -> bool:
        assert self.generation is not None
        place.enter_by = place.kill_at = float("inf")
        place.page.beat()
        if place.starts >= MAX_STARTS:
            return False
        if not self._launch.nursery:
            place.page.generation = self.generation.number
            place.mute_at = place.page.progress
            # The agent cannot see what it does unless it reports its ledger or its steps.
            place.page.switch("start" if self._launch.progress.get("has_steps") else "productive")
            given = (self._run, self._launch, self.generation, self._node, rank, place.page.descriptor)
            forked = self.fork_server.fork_command(*given) if self.fork_server is not None else None
            place.process = forked or start_rank(*given)
        else:
            place.process = self._fork_rank(rank, place)
        if place.process is not None:
            place.process.page, place.process.traps_before = place.page, place.page.traps_sprung
            if place.process.output is not None:
                self._outputs.append(place.process.output)
            place.starts += 1
            self._selector.register(place.process.records, selectors.EVENT_READ, place.process)
            self._records.event("rank_started", rank, pid=place.process.pid)
        return True

    def _fork_rank(self, rank: int, place: RankSlot) -> RankProcess | None:
        """Fork a rank; None while the fork server restarts (`tend_ranks` tries again)."""
        assert self.generation is not None
        if self.fork_server is None or not self.fork_server.is_ready:
            return None
        records, records_of_rank = pipe()
        orders_of_rank, orders = pipe()
        log_path = self._run.log_path(rank)
        offset = 0
        with contextlib.suppress(OSError):
            offset = log_path.stat().st_size
        descriptors = {
            "CRATON_RECORDS": records_of_rank,
            "CRATON_PAGE": place.page.descriptor,
            "CRATON_ORDERS": orders_of_rank,
            "CRATON_STACKS": place.stack.descriptor,
        }
        environment = rank_environment(self._launch, self.generation, self._node, rank)
        try:
            pid = self.fork_server.fork("rank", environment, log_path, descriptors)
        except ForkServerError as error:
            os.close(records)
            os.close(orders)
            self._records.event("nursery_failed", rank, message=str(error))
            return None
        finally:
            os.close(records_of_rank)
            os.close(orders_of_rank)
        process = RankProcess(
            f"rank {rank}", pid, log_path, offset, STEADY.now(), rank=rank, records=records, orders=orders
        )
        place.process = process
        self._tell(rank, place, self.generation)
        return process

    def tend_ranks(self) -> list[int]:
        """Start ranks that had to wait for the fork server; return those that have waited too long."""
        given_up: list[int] = []
        if self.generation is None or not self._launch.nursery:
            return given_up
        now = time.monotonic()
        for rank, place in self.ranks:
            if place.process is not None:
                place.missing_since = now
            elif now - place.missing_since > FORK_SERVER_SECONDS:
                place.missing_since = now
                given_up.append(rank)
            elif self.fork_server is not None and self.fork_server.is_ready:
                self._start_rank(rank, place)
        return given_up

    def _tell(self, rank: int, place: RankSlot, generation: Generation) -> None:
        assert place.process is not None
        order = {
            "generation": generation.to_message(),
            "rank": rank,
            "node": self._node,
            "keeper": self.keeper_name,
            "broke_at": self.broke_at,
        }
        place.process.rank = rank
        grace = self._launch.failure_grace_seconds
        if place.page.generation < 0:  # it has just been forked
            grace = FORK_SERVER_SECONDS
        elif self.is_leaving(place):
            grace = PLANNED_SECONDS
        place.enter_by = time.monotonic() + grace
        with contextlib.suppress(OSError):  # it is dying; the reaper sees that soon
            os.write(place.process.orders, json.dumps(order).encode() + b"\n")

    def _offer_store(self) -> None:
        """Choose the next rendezvous address for ranks of a job's own command, in case this node is the first one: a
        port that no process of the previous generation still holds."""
        if self._host == "0.0.0.0":  # other nodes cannot dial that; the launch's address stays
            return
        self.store_address = f"{self._host}:{free_port(self._host)}"

    def _end(self, place: RankSlot) -> None:
        assert place.process is not None
        place.page.break_off("regroup")
        place.process.send(signal.SIGTERM)
        assert self.generation is not None
        is_planned = self.generation.is_planned  # time to checkpoint, as in a stop
        grace = self._launch.stop_grace_seconds if is_planned else self._launch.failure_grace_seconds
        place.kill_at = time.monotonic() + grace

    # -- status ---------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return this node's status for the coordinator."""
        now = time.monotonic()
        return {
            "ready": self.is_ready,
            "generation": self.generation.number if self.generation else -1,
            "keeper": self.keeper_address,
            "store": self.store_address,
            "done_with": self.generation.number if self.generation and self.is_done else -1,
            "ranks": {rank: astuple(self._progress(place, process, now)) for rank, place, process in self._running()},
            "leaving": {
                process.rank: astuple(self._progress(place, process, now)) for place, process in self._parted()
            },
            "done": [rank for rank, place in self.ranks if place.is_done],
        }

    def rank_status(self) -> list[RankStatus]:
        """Return the status of this node's ranks for users."""
        now = time.monotonic()
        peers = self._peers(now)
        result = []
        for rank, place, process in self._running():
            progress = self._progress(place, process, now)
            result.append(
                RankStatus(
                    rank=rank,
                    pid=process.pid,
                    kind=progress.kind,
                    beside=place.page.beside,
                    step=progress.step,
                    progress_age_seconds=round(progress.age, 3),
                    step_seconds=progress.step_seconds,
                    is_stopped=progress.is_stopped,
                    progress_limit_seconds=round(progress.limit + progress.starved_seconds, 3),
                    slowest_seconds=round(progress.slowest_seconds, 4),
                    starved_seconds=round(progress.starved_seconds, 3),
                    patience_seconds=progress.patience,
                    phase_seconds={kind: round(stay, 3) for kind, stay in self._phase_seconds(place).items()},
                    is_eager=progress.is_eager,
                    process_state=progress.process_state,
                    frame=progress.frame,
                    is_waiting=progress.is_waiting,
                    is_user_frame=bool(progress.frame) and place.stack.is_user_frame,
                    wait_channels=place.stack.wait_channels if place.stack.episode == place.page.progress else (),
                    resources=place.resources.read(process.pid, now, progress.step),
                    peers=peers.get(rank, ()),
                )
            )
        return result

    def _peers(self, now: float) -> Mapping[int, tuple[PeerTraffic, ...]]:
        """Return rank → its TCP traffic with other machines."""
        if self._connections is None:
            return {}
        return self._connections.read({rank: process.pid for rank, _, process in self._running()}, now)

    def take_stacks(self, now: float) -> bool:
        """Take the stacks of ranks that make no progress. Return whether readers should know at once: a signal has
        stopped or continued a rank, or a stack shows where one waits."""
        ranks = [self._stuck(place, process, now) for _, place, process in self._running()]
        running = self._running()
        for number in range(min(LOOKED_RANKS, len(running))):  # of many ranks some at a time
            _, place, process = running[(self._looked + number) % len(running)]
            place.resources.look(process.pid, now)
            process.oom.look(now, process.state)
        self._looked += LOOKED_RANKS
        self._stacks.look(ranks, now)
        noteworthy = [(rank.process.pid, rank.is_stopped, rank.stack.frame) for rank in ranks]
        is_new, self._noteworthy = noteworthy != self._noteworthy, noteworthy
        return is_new

    def _stuck(self, place: RankSlot, process: RankProcess, now: float) -> StuckRank:
        progress = self._progress(place, process, now)
        wanted = min(self._stuck_after(place, progress), DUE_SHARE * progress.limit)
        stuck_after = wanted
        if progress.kind == "start":
            wanted = min(wanted, START_SECONDS)
        elif progress.kind not in LONG_KINDS:
            wanted = min(wanted, max(NOTED_SECONDS, progress.slowest_seconds))
        return StuckRank(
            place.stack,
            process,
            place.page.progress,
            progress.kind,
            progress.step,
            progress.age,
            is_due=progress.age - progress.starved_seconds > wanted,
            is_stopped=progress.is_stopped,
            is_starting=progress.kind == "start" and progress.age - progress.starved_seconds <= stuck_after,
            unacknowledged=self._connections.unacknowledged(process.rank) if self._connections else (),
        )

    def _stuck_after(self, place: RankSlot, progress: RankProgress) -> float:
        activity = RankActivity(
            0,
            progress.kind,
            progress.step,
            progress.age,
            step_seconds=progress.step_seconds,
            slowest_seconds=progress.slowest_seconds,
            patience_seconds=progress.patience,
            is_stopped=progress.is_stopped,
            is_eager=progress.is_eager,
        )
        return stuck_after(activity, self._phase_seconds(place), self._plan_step_seconds)

    def saved(self, seconds: float) -> None:
        """Note how long a save took: the last one of a run is not written in the background."""
        self._save_seconds = max(seconds, FORGET_SHARE * self._save_seconds)

    def _phase_seconds(self, place: RankSlot) -> dict[str, float]:
        known = place.page.phase_seconds
        return {**known, "checkpoint": max(self._save_seconds, known["checkpoint"])} if "checkpoint" in known else known

    def _running(self) -> list[tuple[int, RankSlot, RankProcess]]:
        return [
            (rank, place, place.process)
            for rank, place in self.ranks
            if place.process is not None and place.process.is_running
        ]

    def _parted(self) -> list[tuple[RankSlot, RankProcess]]:
        """Ranks that are not in the current generation and finish their work in the previous one."""
        parted = self.places[len(self.ranks) :]
        return [(place, place.process) for place in parted if place.process is not None and place.process.is_running]

    def saves_state(self) -> bool:
        """Whether a rank saves its last state, or holds it because no disk accepts it."""
        now = time.monotonic()
        for _, place, process in self._running():
            progress = self._progress(place, process, now)
            if progress.kind == "checkpoint" and progress.age <= progress.limit:
                return True
        return self.holds_state()

    def holds_state(self) -> bool:
        """Whether a running rank holds its last state because no disk accepts it."""
        return any("unsaved" in place.page.beside for _, place, _ in self._running())

    def book(self, ended: str | None = None) -> None:
        """Write the ledger of every slot."""
        for rank, place in self.ranks:
            self._records.book(id(place), rank, place.page, ended)

    def _progress(self, place: RankSlot, process: RankProcess, now: float) -> RankProgress:
        """Return what the rank is doing; a rank that never reported progress counts as just having made some, until a
        signal stops it."""
        page, progress = place.page, place.page.progress  # read once: the rank may beat meanwhile
        kind, state = page.kind, process.state
        if state == "T" and place.stack.is_examined:
            state = "S"
        has_stack, is_silent = place.stack.episode == progress, progress == place.mute_at
        place.stopped_at = (place.stopped_at or now) if state == "T" else 0.0
        rank_progress = RankProgress(
            kind,
            page.step,
            now - ((place.stopped_at or now) if is_silent else progress),
            page.step_seconds,
            state == "T",
            page.generation,
            page.patience,
            page.slowest_seconds,
            stay_seconds=self._phase_seconds(place).get(kind, 0.0),
            plan_step_seconds=self._plan_step_seconds,
            is_eager=page.is_eager,
            process_state=state,
            is_waiting=has_stack and place.stack.is_waiting,
            frame=place.stack.frame if has_stack else "",
            sleeps_in=place.resources.sleeps_in,
        )
        if is_silent or not rank_progress.age:
            return rank_progress
        limit = min(rank_progress.limit, self._stuck_after(place, rank_progress))
        return replace(rank_progress, starved_seconds=place.cpu_wait.seconds(process.pid, progress, limit, now))

    def end_helpers(self) -> None:
        for child in (self.keeper, self.fork_server.child if self.fork_server else None):
            if child is not None:
                child.send(signal.SIGKILL)
