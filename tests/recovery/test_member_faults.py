"""Whatever breaks in an owner, its members and what looks after them: the owner goes on, members come back, nothing is
left. `make chaos` draws thirty faults; the tests of every day four."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import pytest
from member_runs import check_nothing_is_left, counting, member, owned, processes_of, status, wait_for_members_in
from waiting import wait_until

from craton.agent import newest_generation
from craton.api import Run, runs
from craton.orchestration import living_agents
from craton.orchestration.start import kill_run
from craton.orchestration.watching import living_members
from craton.telemetry import summarize
from craton.telemetry.members import MemberSpec, living_manager
from craton.telemetry.node import read_status

MEMBERS = ("worker", "pair")
PACE = {"STEPS": 1_000_000, "SAVE_EVERY": 5}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    yield tmp_path / "runs"
    for run in runs():
        if living_agents(run.directory) or living_manager(run.directory) or living_members(run.directory):
            kill_run(run.directory)


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_rank(run: Run) -> None:
    found = wait_until(lambda: (beat := read_status(run.directory, "node-0")) and beat.ranks)
    kill_process(found[0].pid)


def kill_an_agent(run: Run) -> None:
    kill_process(living_agents(run.directory)[0].pid)


def kill_manager(run: Run) -> None:
    manager = living_manager(run.directory)
    assert manager is not None
    kill_process(manager.pid)


def kill_both(run: Run) -> None:
    """Nothing looks after the owner any more; then its user resumes it, and the living members go on."""
    kill_manager(run)
    kill_an_agent(run)
    wait_until(lambda: not living_agents(run.directory))
    run.resume()


def kill_all_at_once(run: Run) -> None:
    """The machine is gone: every process of the run and its members; then its user resumes it."""
    for _ in range(3):  # what one process started while the others were killed
        for line in processes_of(run.path):
            with suppress(ProcessLookupError):
                kill_process(int(line.split()[0]))
    check_nothing_is_left(run.path)
    run.resume()


# fault → what it does to an owner and one of its members
FAULTS: dict[str, Callable[[Run, Run], object]] = {
    "kill member": lambda run, hit: run.inject(run.draft_faults([f"kill member={hit.path.name}"])),
    "kill manager": lambda run, hit: kill_manager(run),
    "kill agent of owner": lambda run, hit: kill_an_agent(run),
    "kill all": lambda run, hit: kill_all_at_once(run),
    "kill agent of member": lambda run, hit: kill_an_agent(hit),
    "kill rank of member": lambda run, hit: kill_rank(hit),
    "kill rank of owner": lambda run, hit: kill_rank(run),
    "kill rank by order": lambda run, hit: run.inject(run.draft_faults([f"kill rank=0,member={hit.path.name}"])),
    "kill agent and manager of owner": lambda run, hit: kill_both(run),
    "kill manager and member": lambda run, hit: (kill_manager(run), kill_an_agent(hit)),
    "kill agent of owner and member": lambda run, hit: (kill_an_agent(run), kill_an_agent(hit)),
}
# After these the owner itself starts a generation.
OF_OWNER = tuple(fault for fault in FAULTS if "of owner" in fault or fault == "kill all")


def drawn(seed: int, count: int) -> list[tuple[str, str]]:
    """(fault, member) of this seed; every kind comes before any comes again."""
    draw = random.Random(f"members {seed}")
    deck: list[str] = []
    while len(deck) < count:
        deck += draw.sample(list(FAULTS), len(FAULTS))
    return [(fault, draw.choice(MEMBERS)) for fault in deck[:count]]


def wait_for_steps(run: Run, since: float, what: Callable[[], object]) -> None:
    """Wait until a run has made a few steps since then."""

    def step() -> int:
        summary = summarize(run.directory)
        return summary.step if summary.state == "running" and (summary.updated_at or 0.0) > since else 0

    first = wait_until(step, what)
    wait_until(lambda: step() >= first + 5, what)


def check_faults(faults: list[tuple[str, str]]) -> None:
    run = owned(
        MemberSpec("worker", gate="ready"),
        MemberSpec("pair"),
        owner=counting("owner", **PACE),
        worker=counting("worker", **PACE),
        pair=counting("pair", nodes=2, **PACE),
    )
    wait_for_members_in(run, worker="running", pair="running")
    for hit in (run, *(member(run, item) for item in MEMBERS)):
        wait_for_steps(hit, 0.0, lambda: (run.summary(), status(run)))
    for fault, name in faults:
        check_fault(run, fault, name)
    check_secrecy(run.path, os.environ["PROBE_TOKEN"].encode())
    assert run.stop().state == "stopped"
    assert [member(run, name).state for name in MEMBERS] == ["stopped", "stopped"]
    check_nothing_is_left(run.path)


def check_fault(run: Run, fault: str, name: str) -> None:
    """Break something, and wait until the owner and all members make progress again."""
    before = newest_generation(run.directory)
    assert before is not None
    restarts = status(run).members[name].restarts
    FAULTS[fault](run, member(run, name))
    if fault == "kill member":
        wait_until(lambda: status(run).members[name].restarts > restarts, lambda: (fault, status(run)))
    moment = time.time()
    for hit in (run, *(member(run, item) for item in MEMBERS)):
        wait_for_steps(hit, moment, lambda: (fault, name, run.summary(), status(run)))
    wait_until(lambda: living_manager(run.directory), fault)
    wait_for_members_in(run, worker="running", pair="running")
    newest = newest_generation(run.directory)
    assert newest is not None
    assert fault in OF_OWNER or newest.number == before.number, "no fault of a member begins a generation"


def check_secrecy(folder: Path, secret: bytes) -> None:
    """No command line and no file that others can read holds the secret."""
    for line in processes_of(folder):
        assert secret.decode() not in line
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077:
            assert secret not in path.read_bytes(), path


def test_an_owner_and_its_members_survive_four_faults(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE_TOKEN", token_hex(16))
    check_faults([(fault, "worker") for fault in list(FAULTS)[:4]])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_owner_and_its_members_survive_ten_drawn_faults(
    root: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("PROBE_TOKEN", token_hex(16))
    check_faults(drawn(seed, 10))
