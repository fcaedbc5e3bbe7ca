"""The current time by the clock of a run. Heartbeats carry the clocks of the nodes and of the file system. The clock of
this machine may be off by more than the maximum age of a heartbeat, and would then show dead nodes in a healthy run.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

from craton.telemetry import RunDirectory
from craton.telemetry.node import LOST_SECONDS, Heartbeat, read_heartbeat

BEAT_SECONDS = 2.5  # agents beat every second
LOOK_SECONDS = 0.2
MAX_OFF_SECONDS = 3600.0  # an older heartbeat is old by any clock


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


def _beats(run: RunDirectory, nodes: Sequence[str]) -> list[Heartbeat]:
    return [beat for node in nodes if (beat := read_heartbeat(run, node)) is not None]
