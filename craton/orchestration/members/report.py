"""The rank of a run that only reports on its members: its steps are the members that have ended.

It prints one line per change and ends when all members have ended: with success unless none of them is done.
"""

from __future__ import annotations

import signal
import threading

from craton.agent.processes import EXIT_FINAL
from craton.formatting import counted
from craton.orchestration.members.decision import ENDED
from craton.orchestration.members.result import SWEEP_PAGE
from craton.orchestration.members.sweep_report import sweep_table_text, write_sweep
from craton.telemetry import RunDirectory
from craton.telemetry.members import MemberStatus, read_members, read_members_status
from craton.telemetry.rank import LedgerClock, Recorder

LOOK_SECONDS = 0.5


def report(run: RunDirectory) -> int:
    """Follow the members until all have ended, or until SIGTERM; return the exit code."""
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: told_to_end.set())
    recorder, clock = Recorder.from_environment(), LedgerClock()
    clock.switch("productive")
    names = [member.name for member in read_members(run).members]
    states: dict[str, str] = {}
    num_ended = -1
    while not told_to_end.is_set():
        members = read_members_status(run).members
        for name in names:
            member = members.get(name, MemberStatus())
            if states.get(name) != member.state:
                states[name] = member.state
                print(f"{name}: {member.state}{f' ({member.message})' if member.message else ''}", flush=True)
        ended = [name for name in names if states[name] in ENDED]
        if len(ended) != num_ended:
            num_ended = len(ended)
            recorder.metrics(num_ended, run_steps=len(names))
        if num_ended == len(names):
            done = sum(state == "done" for state in states.values())
            print(f"{done} of {counted(len(names), 'member')} done", flush=True)
            _report_sweep(run)
            if not done:
                failed = next((name for name in names if states[name] == "failed"), None)
                reason = f": member {failed} failed: {members[failed].message}" if failed else ""
                print(f"error: no member is done{reason}", flush=True)
            return 0 if done else EXIT_FINAL
        clock.page.beat()  # it only waits: its agent must not take that for a hang
        told_to_end.wait(LOOK_SECONDS)
    return 0


def _report_sweep(run: RunDirectory) -> None:
    """Write and print the result; the members are done, so a full disk does not fail the run."""
    try:
        sweep = write_sweep(run)
    except OSError as error:
        print(f"the result is not written ({error}); `craton ps {run.name}` shows its members", flush=True)
        return
    print(f"\n{sweep_table_text(sweep)}\nplots: {run.path / SWEEP_PAGE}", flush=True)
