"""The slot of a rank on its node: its process, its page, and what is known of both."""

from __future__ import annotations

from dataclasses import dataclass, field

from craton.agent.processes import CpuWait, RankProcess, ResourceReader
from craton.agent.stacks import RankStack
from craton.telemetry.rank import RankPage


@dataclass
class RankSlot:
    """One slot; ranks of later generations take it over."""

    page: RankPage
    process: RankProcess | None = None
    enter_by: float = float("inf")  # monotonic: deadline to enter the current generation
    kill_at: float = float("inf")
    starts: int = 0  # in this generation
    is_done: bool = False  # ended well in this generation
    missing_since: float = float("inf")  # monotonic: since when it has no process
    mute_at: float = -1.0  # progress in the page when a job's own command began; it may never report any
    stopped_at: float = 0.0  # monotonic: when it was first seen stopped by a signal; 0: it is not
    cpu_wait: CpuWait = field(default_factory=CpuWait)
    stack: RankStack = field(default_factory=RankStack)
    resources: ResourceReader = field(default_factory=ResourceReader)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_running
