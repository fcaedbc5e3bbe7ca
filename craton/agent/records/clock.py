"""Which steady clock the agents of a run use: the ledger's lines must follow each other over any number of agents."""

from __future__ import annotations

from craton.agent.launch import Launch
from craton.telemetry import RunDirectory
from craton.telemetry.node import read_heartbeat
from craton.telemetry.rank import STEADY, monotonic_clock_id

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def continue_clock(run: RunDirectory, launch: Launch, node: str, booked_until: float) -> None:
    """Takes over the steady clock of an agent of this run and this boot, where there was one. Otherwise a new boot (or
    another machine) begins with its wall clock, but not before `booked_until`, the end of the node's ledger: a clock
    that was set back would have seconds booked twice."""
    is_one_machine = launch.master_address in LOOPBACK
    for other in [node, *(launch.nodes if is_one_machine else ())]:
        beat = read_heartbeat(run, other)
        if beat is not None and beat.clock and beat.clock == monotonic_clock_id() and beat.steady_offset:
            STEADY.offset = beat.steady_offset
            return
    STEADY.offset += max(0.0, booked_until - STEADY.now())
