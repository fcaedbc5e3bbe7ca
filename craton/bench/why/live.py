"""Scenarios with live processes: runs of two nodes and four ranks on this machine, with real faults.

Agents, ranks, pipes and sockets are real; so are the signals, the full device, the exhausted address space, the crash
and the throttled file server. Each run is diagnosed from its start on, and an alarm before its fault is a false alarm.
Some runs are executed in parallel, because they mostly wait.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from craton.agent.processes import free_port
from craton.bench.why.benchmark import Progress, ScenarioOutcome
from craton.bench.why.live_rank import BATCH_BYTES, ONSET_FILE, SLOW_TIMES, WORK_SECONDS
from craton.bench.why.scenarios import Truth, Victim
from craton.job import parse_job
from craton.observability.diagnosis import Verdict, diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.observability.diagnosis.snapshot import Snapshot
from craton.orchestration import living_agents
from craton.orchestration.draft import draft_run
from craton.orchestration.start import kill_run, start_run
from craton.telemetry import RunDirectory
from craton.telemetry.node import read_heartbeat, read_status

NODES, RANKS_PER_NODE = 2, 2
SIDE_BY_SIDE = 4
LIMIT_SECONDS = 120.0
SETTLED_STEPS = 30
LOOK_SECONDS = 0.3
STOP_SECONDS = (0.15, 0.05)  # stopped, then continued, in turn
THROTTLED_BYTES_PER_SECOND = NODES * RANKS_PER_NODE * BATCH_BYTES / (SLOW_TIMES * WORK_SECONDS)


@dataclass(frozen=True)
class Live:
    """One fault: of the program itself (`fault`), or injected from outside (`act`)."""

    name: str
    layers: str = ""
    conditions: str = ""
    fault: str = ""
    act: Callable[[RunDirectory, int], None] | None = None
    has_victim: bool = True
    whole_node: bool = False
    steps: int = 0  # after which the run ends by itself
    needs: str = ""  # a package; without it the case is skipped
    is_blind: bool = False  # a fault of another layer would look the same: only "not enough evidence" is right


def _signal(number: signal.Signals) -> Callable[[RunDirectory, int], None]:
    return lambda run, rank: os.kill(_pid(run, rank), number)


def _lose_node(run: RunDirectory, rank: int) -> None:
    beat = read_heartbeat(run, f"node-{rank // RANKS_PER_NODE}")
    assert beat is not None
    os.kill(beat.pid, signal.SIGKILL)


def _throttle(run: RunDirectory, rank: int) -> None:
    """Throttle a process as `cpulimit` does: stop it three quarters of the time."""
    pid = _pid(run, rank)

    def stop_and_continue() -> None:
        with contextlib.suppress(ProcessLookupError):
            while True:
                for number, seconds in zip((signal.SIGSTOP, signal.SIGCONT), STOP_SECONDS, strict=True):
                    os.kill(pid, number)
                    time.sleep(seconds)

    threading.Thread(target=stop_and_continue, daemon=True).start()


LIVE = (
    Live("stopped (SIGSTOP)", "host", "hung dead", act=_signal(signal.SIGSTOP)),
    Live("killed (SIGKILL)", "host", "dead", act=_signal(signal.SIGKILL)),
    Live("node lost", "host", "dead", act=_lose_node, whole_node=True),
    Live("held back (SIGSTOP and SIGCONT)", "host framework", "slow", act=_throttle),
    Live("works longer", "framework", "slow", "slow"),
    Live("raises", "framework", "dead", "raise"),
    Live("cannot import", "framework", "dead", "import"),
    Live("crashes", "framework", "dead", "crash"),
    Live("writes to a full device", "storage", "dead", "disk"),
    Live("has no memory left", "host", "dead", "memory"),
    Live("spins", "framework", "hung", "spin"),
    Live("gets no data", "storage framework", "hung", "data"),
    Live("throttled input", "storage", "slow", "throttled", has_victim=False, is_blind=True),
    Live("peer lost", "collective fabric", "dead hung", "vanish"),
    Live("another collective", "collective", "dead hung", "mismatch", needs="torch"),
    Live("not a number", "framework", "wrong", "nan", has_victim=False),
    Live("trains"),
    Live("is done", steps=30),
)


def live_outcomes(
    seed: int, root: Path, cases: Sequence[Live] = LIVE, progress: Progress | None = None
) -> list[ScenarioOutcome]:
    """Run every case once, with a victim drawn from the seed."""
    cases = [case for case in cases if not case.needs or find_spec(case.needs) is not None]
    done: list[ScenarioOutcome] = []

    def measure(case: Live) -> ScenarioOutcome:
        outcome = _measure(case, random.Random(f"{seed} live {case.name}"), root)
        done.append(outcome)
        if progress is not None:
            progress(len(done), len(cases), case.name)
        return outcome

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(measure, cases))


def _measure(case: Live, chance: random.Random, root: Path) -> ScenarioOutcome:
    rank = chance.randrange(NODES * RANKS_PER_NODE)
    node = f"node-{rank // RANKS_PER_NODE}"
    with _running(case, rank, root) as watch:
        if case.act is not None:
            watch.wait(_is_settled)
            watch.onset.touch()
            case.act(watch.run, rank)
        if not case.layers:
            watch.wait(_has_ended if case.steps else _is_settled)
        else:
            watch.wait(lambda _, verdict: verdict.condition in case.conditions.split())
            time.sleep(2 * LOOK_SECONDS)  # other ranks may still fail because of it
        snapshot, verdict = watch.look()
    if not case.layers:
        return ScenarioOutcome(case.name, "quiet", (), verdict, True, snapshot, watch.early)
    ranks = [rank] if not case.whole_node else range(rank // 2 * 2, rank // 2 * 2 + RANKS_PER_NODE)
    victim = Victim(node, frozenset(ranks)) if case.has_victim else Victim()
    truth = Truth(case.name, tuple(case.layers.split()), tuple(case.conditions.split()), victim)
    group = "blind" if case.is_blind else "single"
    return ScenarioOutcome(case.name, group, (truth,), verdict, True, snapshot, watch.early)


@dataclass
class Watch:
    """Diagnose a run repeatedly, and keep the first alarm from before its fault."""

    run: RunDirectory
    onset: Path  # exists once the fault has begun
    early: Verdict | None = None

    def look(self) -> tuple[Snapshot, Verdict]:
        snapshot = take_snapshot(self.run)
        verdict = diagnose(snapshot)
        if verdict.is_alarm and self.early is None and not self.onset.exists():
            self.early = verdict
        return snapshot, verdict

    def wait(self, is_there: Callable[[Snapshot, Verdict], bool]) -> None:
        """Diagnose until the condition holds, at most LIMIT_SECONDS."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_there(*self.look()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)


@contextmanager
def _running(case: Live, rank: int, root: Path) -> Iterator[Watch]:
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name).strip("-")
    folder = root / f"{name}-files"
    folder.mkdir(parents=True)
    env = {"FAULT": case.fault, "VICTIM": str(rank), **({"STEPS": str(case.steps)} if case.steps else {})}
    program = f"{sys.executable}, -m, craton.bench.why.live_rank, {folder}"
    with file_server(folder / ONSET_FILE) as address:
        if case.fault == "throttled":
            env["FILE_SERVER"] = address
        message = ", ".join(f"{key}: '{value}'" for key, value in env.items())
        job = parse_job(
            f"name: {name}\nkind: command\ncommand: [{program}]\nprocesses: {RANKS_PER_NODE}\n"
            f"cluster: local x {NODES}\nrecover: {{tries: 0}}\nrun: {{env: {{{message}}}}}\n",
            folder=folder,
        )
        run = start_run(draft_run(job, root / job.name, port=free_port()), root)
        try:
            yield Watch(run, folder / ONSET_FILE)
        finally:
            if living_agents(run):
                kill_run(run)


@contextmanager
def file_server(onset: Path) -> Iterator[str]:
    """Serve batches: one byte requests one. After the onset, limit the total throughput to all readers to
    THROTTLED_BYTES_PER_SECOND."""
    turn = threading.Lock()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                while self.request.recv(1):
                    if onset.exists():
                        with turn:
                            time.sleep(BATCH_BYTES / THROTTLED_BYTES_PER_SECOND)
                    self.request.sendall(bytes(BATCH_BYTES))

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(LOOK_SECONDS,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _is_settled(snapshot: Snapshot, verdict: Verdict) -> bool:
    return all((rank.step or 0) >= SETTLED_STEPS and rank.pid for rank in snapshot.ranks)


def _has_ended(snapshot: Snapshot, verdict: Verdict) -> bool:
    return snapshot.run.has_ended


def _pid(run: RunDirectory, rank: int) -> int:
    status = read_status(run, f"node-{rank // RANKS_PER_NODE}")
    assert status is not None
    return next(item.pid for item in status.ranks if item.rank == rank)
