"""A member of a run, as the diagnosis of its owner sees it: its state, and the verdict on it where it may matter."""

from __future__ import annotations

from dataclasses import dataclass

BROKEN = ("failed", "lost", "stopped", "unreadable")  # states in which a member does nothing for its owner


@dataclass(frozen=True)
class SnapshotMember:
    name: str  # OWNER/NAME
    state: str  # as `craton ps` shows it
    gate: str = ""  # what it must be before the ranks of its owner start: done or ready; "": they do not wait for it
    is_awaited: bool = False  # the ranks of its owner wait for it now
    is_named: bool = False  # the owner's message says that it ended because of this member
    progress: str = ""  # "step 120 of 500"
    waits_for: str = ""
    message: str = ""
    condition: str = ""  # of the verdict on it; "": it was not examined
    layer: str = ""
    because: str = ""
    action: str = ""
    confidence: float = 0.0

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2]
