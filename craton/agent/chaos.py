"""Fault injection: agents of a run inject the faults that `craton chaos` and a job's `chaos:` request.

Each fault happens once, even across restarts: a file next to the request records that it fired. Every fault is recorded
as an event and in the agent's log. A fault at an exact moment inside a rank (at a step, in the middle of a restore) is
a trap in the rank's shared-memory page; the rank itself triggers it. For a command, the agent triggers a fault when it
reads the step in the command's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from craton.agent.errors import KeeperError
from craton.agent.launch import Launch
from craton.agent.memory import KeeperClient
from craton.agent.node import NodeProcesses
from craton.agent.records import NodeRecords
from craton.agent.slot import RankSlot
from craton.errors import CratonError
from craton.job import InjectedFault, load_job, parse_fault
from craton.job.sections import place_of
from craton.telemetry import RunDirectory
from craton.telemetry.files import paths_in, read_regular
from craton.telemetry.node import read_heartbeat
from craton.telemetry.rank import BESIDE

LOOK_SECONDS = 0.5
QUICK_SECONDS = 0.02  # polling interval while a fault waits for a step
TRAPS = {"kill": "kill", "fail": "fail"}
SUPERVISOR = b"craton.ml.verifiers.supervisor"  # in the command of the process that starts verifiers


@dataclass
class Armed:
    """A requested fault that has not happened yet."""

    name: str  # of its file
    fault: InjectedFault
    place: RankSlot | None = None  # where a trap was set
    sprung: int = 0  # traps that had fired there before


class Chaos:
    def __init__(
        self,
        run: RunDirectory,
        launch: Launch,
        node: str,
        records: NodeRecords,
        processes: NodeProcesses,
        coordinates: Callable[[], bool],
    ) -> None:
        self._run, self._node, self._records, self._processes = run, node, records, processes
        self._coordinates, self._nodes = coordinates, launch.nodes
        self._has_traps = bool(launch.nursery)
        self._waiting: list[Armed] = []
        self._known: set[str] = set()
        self._slow_until = float("inf")
        self._next_look = 0.0
        for index, text in enumerate(launch.chaos):
            self._add(f"launch-{launch.generation}-{index}", text)

    def turn_seconds(self, usual: float) -> float:
        """Return how long the agent may wait for the next event."""
        waits = any(
            (armed.fault.step is not None or armed.fault.during is not None)
            and (armed.fault.target != "rank" or not self._has_traps)
            for armed in self._waiting
        )
        return QUICK_SECONDS if waits else usual

    def turn(self) -> None:
        """Read new requests and inject the faults that are due."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look()
        if now > self._slow_until:
            self._slow_until = float("inf")
            self._slow(0.0)
        for armed in list(self._waiting):
            self._try(armed)

    def _look(self) -> None:
        for path in paths_in(self._run.chaos_folder, "*.json"):
            if path.stem in self._known:
                continue
            self._known.add(path.stem)
            try:
                faults = json.loads(read_regular(path))["faults"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                self._say("chaos_refused", f"{path.name} cannot be read: {error}")
                continue
            for index, text in enumerate(faults):
                self._add(f"{path.stem}-{index}", text)

    def _add(self, name: str, text: str) -> None:
        try:
            fault = parse_fault(text)
        except CratonError as error:
            self._say("chaos_refused", str(error))
            return
        if fault.target == "tier":  # every node that holds part of the tier does its own
            name = f"{name}-{self._node}"
        if not self._fired_path(name).exists():
            self._waiting.append(Armed(name, fault))

    def _try(self, armed: Armed) -> None:
        fault = armed.fault
        if fault.target == "rank":
            self._try_rank(armed)
        elif not self._is_due(fault):
            return
        elif fault.target == "coordinator":
            if self._coordinates() and self._fire(armed):
                os.kill(os.getpid(), signal.SIGKILL)
        elif fault.target == "member":
            if self._fire(armed):
                self._kill_agents()
        elif fault.target in ("agent", "node"):
            if fault.node == self._node and self._fire(armed):
                if fault.target == "node":
                    with contextlib.suppress(OSError):  # at worst the agent is restarted
                        (self._run.path / "heartbeat" / f".{self._node}.lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif fault.target == "keeper":
            if fault.node == self._node and self._processes.keeper is not None and self._fire(armed):
                self._processes.keeper.send(signal.SIGKILL)
        elif fault.target == "verifier":
            self._kill_verifiers(armed)
        elif fault.target == "weights":
            if (first := dict(self._processes.ranks).get(0)) is not None and self._fire(armed):
                first.page.corrupt_weights()
        elif fault.target == "journal":
            if self._coordinates() and (text := damage_journal(self._run.journal_folder, fault.how == "cut")):
                self._fire(armed, text)
        elif fault.kind == "slow-disk" and self._processes.places:
            if self._fire(armed):
                self._slow(fault.seconds or 0.0, fault.tier or "")
                self._slow_until = time.monotonic() + (fault.for_seconds or float("inf"))
        elif fault.kind == "corrupt" and self._processes.ranks:
            self._corrupt(armed)

    def _try_rank(self, armed: Armed) -> None:
        fault = armed.fault
        if armed.place is not None:
            if armed.place.page.traps_sprung > armed.sprung:
                self._fire(armed)
                if fault.kind != "kill" and armed.place.process is not None:  # a later end has another cause
                    armed.place.process.traps_before = armed.place.page.traps_sprung
            return
        place = dict(self._processes.ranks).get(fault.rank if fault.rank is not None else -1)
        if place is None or not place.is_running or place.page.has_trap:
            return
        assert place.process is not None
        action = TRAPS.get(fault.kind) or fault.how or "stop"
        has_traps = self._has_traps or fault.during == "transfer"  # a server's rank triggers that one
        if not has_traps and place.page.step < (fault.step or 0):
            return
        is_at_once = fault.step is None and fault.during is None and action in ("kill", "stop")
        if is_at_once or not has_traps:
            if self._fire(armed):
                place.process.send(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
                place.process.sent.clear()  # the fault must count as a failure, not as a signal of ours
                place.process.is_killed_by_chaos = action == "kill"
            return
        armed.place, armed.sprung = place, place.page.traps_sprung
        beside = fault.during if fault.during in BESIDE else None
        kind = "any" if beside else fault.during or "stepping"
        place.page.set_trap(action, kind, beside, fault.step or 0)
        self._say("chaos_armed", f"{fault.text} is armed", fault.text)

    def _kill_agents(self) -> None:
        """Kill all agents of the run on this machine, this one last; their ranks and keepers die with them."""
        beats = [read_heartbeat(self._run, node) for node in self._nodes]
        for pid in [beat.pid for beat in beats if beat and beat.is_alive_here and beat.pid != os.getpid()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_verifiers(self, armed: Armed) -> None:
        """Kill the workers of a rank's verifiers, and the process that forks them, but not their supervisor."""
        place = dict(self._processes.ranks).get(armed.fault.rank if armed.fault.rank is not None else -1)
        if place is None or place.process is None or not place.is_running:
            return
        pids = verifier_workers(place.process.pid)
        if pids and self._fire(armed, f"killed {', '.join(map(str, pids))}"):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _is_due(self, fault: InjectedFault) -> bool:
        """Whether a fault of something else than a rank happens now, by step and phase of this node's ranks."""
        if fault.step is not None and self._step() < fault.step:
            return False
        return fault.during is None or any(
            fault.during in (place.page.kind, *place.page.beside) for _, place in self._processes.ranks
        )

    def _step(self) -> int:
        return max((place.page.step for _, place in self._processes.ranks), default=0)

    def _slow(self, seconds: float, tier: str = "") -> None:
        for place in self._processes.places:
            place.page.slow_down(tier, seconds)

    def _corrupt(self, armed: Armed) -> None:
        fault = armed.fault
        try:
            if fault.tier == "peer":
                whose = fault.how or "all"
                done = KeeperClient(self._processes.keeper_name).corrupt(fault.rank, whose)
                text = "; ".join(str(item) for item in done) if done else ""
            else:
                text = self._corrupt_file(fault)
        except (KeeperError, OSError, CratonError) as error:
            self._say("chaos_refused", f"{fault.text}: {error}")
            self._waiting.remove(armed)
            return
        if text:
            self._fire(armed, text)
        elif fault.rank is not None:
            self._waiting.remove(armed)  # the rank is on another node

    def _corrupt_file(self, fault: InjectedFault) -> str:
        """Flip a bit in the middle of the largest file of the newest step; return "" while there is no step."""
        job = load_job(self._run.job_path)
        tier = next((tier for tier in job.checkpoint.places if tier.to == fault.tier), None)
        if tier is None:
            raise CratonError(f"the job has no checkpoint tier {fault.tier!r}")
        place = place_of(tier, job.cluster.file.storage if job.cluster.file else None, self._run.path)
        if place.is_url:
            raise CratonError("objects in S3 cannot be modified in place")
        if not place.is_node_local and not self._coordinates():
            return ""
        folder = Path(place.place) / self._node if place.is_node_local else Path(place.place)
        steps = sorted(path for path in folder.glob("step-*") if (path / "COMPLETE").exists())
        if not steps:
            return ""
        file = max(
            (path for path in steps[-1].iterdir() if path.suffix == ".distcp"), key=lambda path: path.stat().st_size
        )
        flip_bit(file)
        return f"flipped a bit of {file}"

    def _fire(self, armed: Armed, text: str = "") -> bool:
        """Record the fault before it happens; False if it has already happened."""
        if armed in self._waiting:
            self._waiting.remove(armed)
        path = self._fired_path(armed.name)
        try:
            path.parent.mkdir(exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        except OSError:
            pass  # at worst it happens twice
        self._say("chaos_fired", f"{armed.fault.text}{': ' + text if text else ''}", armed.fault.text)
        return True

    def _fired_path(self, name: str) -> Path:
        return self._run.chaos_folder / f"{name}.fired"

    def _say(self, event: str, text: str, fault: str = "") -> None:
        print(f"craton chaos: {event.removeprefix('chaos_')}: {text}", file=sys.stderr, flush=True)
        self._records.event(event, message=text, fault=fault or None)


def verifier_workers(rank: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes that verify for a rank with this PID: those that its verifiers' supervisor started."""
    result: list[int] = []
    for child in _children(rank, proc):
        with contextlib.suppress(OSError):  # it has ended
            if SUPERVISOR in (proc / str(child) / "cmdline").read_bytes():
                result += _children(child, proc)
    return result


def _children(pid: int, proc: Path) -> list[int]:
    """Return the processes that any thread of a process has started."""
    result: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(proc / f"{pid}/task"):
            result += [int(child) for child in (proc / f"{pid}/task/{thread}/children").read_text().split()]
    return result


def damage_journal(folder: Path, cuts: bool) -> str:
    """Flip a bit in the newest entry of a journal, or cut it off; return what was done, "" while there is none."""
    entries = {int(path.name[5:]): path for path in paths_in(folder, "step-*") if path.name[5:].isdecimal()}
    if not entries:
        return ""
    newest = entries[max(entries)]
    if cuts:
        os.truncate(newest, newest.stat().st_size * 2 // 3)
        return f"cut off {newest}"
    flip_bit(newest)
    return f"flipped a bit of {newest}"


def flip_bit(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    with open(file, "r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))
