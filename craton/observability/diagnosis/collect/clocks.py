"""The current time by the clock of a run, and nodes whose clocks are off.

Heartbeats carry the clocks of the nodes and of the file system. The clock of this machine may be off by more than the
maximum age of a heartbeat, and would then show dead nodes in a healthy run.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from craton.observability.diagnosis.snapshot import SnapshotNode
from craton.telemetry import RunDirectory
from craton.telemetry.node import LOST_SECONDS, Heartbeat, read_heartbeat

BEAT_SECONDS = 2.5  # agents beat every second
LOOK_SECONDS = 0.2
MAX_OFF_SECONDS = 3600.0  # an older heartbeat is old by any clock
MIN_REMOTE_CLOCKS = 3  # clocks of other machines are compared with each other
REMOTE_CLOCK_SECONDS = 60.0


def moment_for(run: RunDirectory, nodes: Sequence[str], now: float) -> float:
    """Return `now` by this machine's clock, or, if that is off, the time of the newest heartbeat."""
    beats = _beats(run, nodes)
    newest = max(beats, key=lambda beat: beat.moment, default=None)
    here = [beat for beat in beats if beat.is_of_this_boot]
    if here:  # the clock of most nodes, even if wall time has jumped; of two clocks the one closer to this machine's
        errors = sorted((beat.clock_error for beat in here), key=abs)
        usual = statistics.median_low(sorted(errors)) if len(errors) > 2 else errors[0]
        beat = min(here, key=lambda beat: abs(beat.clock_error - usual))
        return beat.moment + beat.age_seconds()
    if newest is None or newest.moment >= now:
        return now if newest is None else newest.moment
    age = now - newest.moment
    is_here = newest.host == socket.gethostname()  # one clock
    if age > MAX_OFF_SECONDS or is_here or newest.state not in ("running", "spare"):
        return now
    if age <= LOST_SECONDS:
        return newest.moment
    deadline = time.monotonic() + BEAT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        again = max(_beats(run, nodes), key=lambda beat: beat.moment, default=None)
        if again is not None and again.moment > newest.moment:  # it sends heartbeats: only our clock is off
            return again.moment
    return now + BEAT_SECONDS


def clock_offset(beat: Heartbeat) -> float | None:
    """Return how far the wall clock of a live agent on this machine is ahead of this process's."""
    is_fresh = beat.state in ("running", "spare") and beat.age_seconds() < LOST_SECONDS
    return beat.clock_error if is_fresh and beat.is_of_this_boot else None


def with_remote_clocks(nodes: Sequence[SnapshotNode], beats: Mapping[str, Heartbeat | None]) -> list[SnapshotNode]:
    """Return the nodes with the offsets of the clocks of live agents elsewhere: to the file server's, relative to what
    is usual among them. A stalled file server explains some seconds, so only large offsets count."""
    offsets = {
        node.name: beat.clock_error
        for node in nodes
        if (beat := beats.get(node.name)) is not None
        and beat.changed
        and not beat.is_of_this_boot
        and node.heartbeat_state == "running"
        and (node.heartbeat_age_seconds or 0.0) < LOST_SECONDS
    }
    if len(offsets) < MIN_REMOTE_CLOCKS:
        return list(nodes)
    usual = statistics.median(offsets.values())
    off = {name: offset - usual for name, offset in offsets.items() if abs(offset - usual) > REMOTE_CLOCK_SECONDS}
    return [
        replace(node, clock_offset_seconds=off.get(node.name, 0.0)) if node.name in offsets else node for node in nodes
    ]


def beat_age(beat: Heartbeat, moment: float, is_live: bool) -> float:
    """Return the age of a heartbeat: of a live run by its own clock, since the clocks of two nodes may differ."""
    age = moment - beat.moment
    if is_live and (beat.is_of_this_boot or age < -LOST_SECONDS):
        return max(0.0, beat.age_seconds())
    return max(0.0, min(age, beat.age_seconds()) if is_live else age)


def _beats(run: RunDirectory, nodes: Sequence[str]) -> list[Heartbeat]:
    return [beat for node in nodes if (beat := read_heartbeat(run, node)) is not None]
