"""Choose the steady clock of a run's agents: ledger lines must stay in order over any number of agents."""

from __future__ import annotations

from craton.agent.launch import Launch
from craton.telemetry import RunDirectory
from craton.telemetry.node import read_heartbeat
from craton.telemetry.rank import STEADY, monotonic_clock_id

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def continue_clock(run: RunDirectory, launch: Launch, node: str, booked_until: float) -> None:
    """Take over the steady clock of an earlier agent of this run and boot, if there was one. Otherwise (a new boot, or
    another machine) start from the wall clock, but not before `booked_until`, the end of the node's ledger: a clock
    that was set back would book seconds twice."""
    is_one_machine = launch.master_address in LOOPBACK
    for other in [node, *(launch.nodes if is_one_machine else ())]:
        beat = read_heartbeat(run, other)
        if beat is not None and beat.clock and beat.clock == monotonic_clock_id() and beat.steady_offset:
            STEADY.offset = beat.steady_offset
            return
    STEADY.offset += max(0.0, booked_until - STEADY.now())
