"""The owner of a member run, seen from the member's agent: a member whose owner is gone saves and stops itself.

An owner lives as long as one of its agents or its member manager does: each restarts the other. If neither lives for
`Launch.owner_seconds`, no process would ever stop this run. An owner that has ended in an orderly way has stopped its
members; what it left stops after a few seconds.
"""

from __future__ import annotations

from craton.agent.launch import Launch
from craton.formatting import setting
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import UnsafeFileError
from craton.telemetry.members import living_manager
from craton.telemetry.node import read_heartbeat

LOOK_SECONDS = 1.0
MAX_GAP_SECONDS = 5.0  # between two looks: a machine that was frozen has not seen its owner's agents either
ENDED_SECONDS = 5.0  # after the end of an owner, in which its manager may still be seen late
OWNER_STOP = "owner gone:"  # prefix of the STOP marker of such a run


class OwnerWatch:
    def __init__(self, launch: Launch) -> None:
        self._owner = RunDirectory(launch.owner) if launch.owner else None
        self._patience_seconds = launch.owner_seconds
        self._gone_seconds = 0.0
        self._looked: float | None = None

    def reason_to_stop(self, now: float) -> str:
        """Return why this run must stop; "" if its owner lives, or if it has none. `now` is monotonic."""
        if self._owner is None or (self._looked is not None and now - self._looked < LOOK_SECONDS):
            return ""
        gap = 0.0 if self._looked is None else min(now - self._looked, MAX_GAP_SECONDS)
        self._looked = now
        if lives(self._owner):
            self._gone_seconds = 0.0
            return ""
        self._gone_seconds += gap
        ended = next((marker for marker in ("DONE", "FATAL", "STOP") if self._owner.has(marker)), "")
        if self._gone_seconds < (min(ENDED_SECONDS, self._patience_seconds) if ended else self._patience_seconds):
            return ""
        name = self._owner.name
        if ended:
            state = {"DONE": "is done", "FATAL": "has failed", "STOP": "is stopped"}[ended]
            return f"{OWNER_STOP} {name} {state}; `craton resume {name}` resumes both"
        return (
            f"{OWNER_STOP} no agent and no member manager of {name} has lived for "
            f"{setting(self._patience_seconds)}; `craton resume {name}` resumes both"
        )


def lives(run: RunDirectory) -> bool:
    """Whether an agent or the member manager of a run lives."""
    return living_manager(run) is not None or has_agents(run)


def has_agents(run: RunDirectory) -> bool:
    """Whether an agent of a run lives: by its process on this machine, by its heartbeat on others."""
    nodes = read_json(run.launch_path).get("nodes")
    for node in nodes if isinstance(nodes, list) else ():
        try:
            beat = read_heartbeat(run, str(node))
        except UnsafeFileError:  # a name that leads out of the directory
            continue
        if beat is not None and beat.state in ("running", "spare") and not beat.is_gone_here and not beat.is_lost():
            return True
        if beat is not None and beat.is_alive_here:  # silent, or just ending
            return True
    return False
