"""What an examination finds, and what comes of all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from craton.observability.diagnosis.tables import Cause, causes

Condition = Literal["waiting", "starting", "healthy", "slow", "hung", "dead", "wrong", "done", "stopped", "unknown"]
UNNAMED_FIT, ELSEWHERE_FIT, OTHER_PHASE_FIT = (
    0.85,
    0.4,
    0.5,
)  # how well a fault fits a symptom that it may not belong to
TROUBLED: tuple[Condition, ...] = ("slow", "hung", "dead", "wrong")
# Signs of runs that are slow though their steps may be as quick as ever.
RESTARTS, OVERLOAD = "restarts", "overload"  # it breaks and comes back again and again; more is asked of it than it can
UNSAVED = "unsaved"  # the sign of a run that waits for a disk to take its last state


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be, and how well it explains what the run suffers from."""

    cause: str  # of causes.toml
    explains: tuple[Condition, ...]  # conditions that it can be the reason of; none: a risk
    strength: float  # 0 to 1: how good the evidence is, and how well its victim fits the symptom
    sentence: str  # "GPU 3 of node-1 is slowed down by heat"
    evidence: tuple[str, ...] = ()
    node: str = ""
    rank: int | None = None
    leaf: str = ""
    lost_share: float | None = None  # of the run's time
    is_risk: bool = False  # worth telling though the run does well
    symptom: int | None = None  # which of the run's symptoms it explains best
    evidence_strength: float = 0.0  # how good the evidence is, whatever it explains
    # What the evidence itself asks for (the driver, NVIDIA's table of XIDs): observe, restart, reset, reboot, replace;
    # "": nobody says, and what the cause usually needs holds.
    health: str = ""
    moment: float | None = None  # epoch seconds of the event it tells of; None: it is a state
    is_urgent: bool = False  # though the run does well: it broke it before, and a spare could take the node's place

    @property
    def about(self) -> Cause:
        return causes()[self.cause]

    @property
    def layer(self) -> str:
        return self.about.layer


@dataclass(frozen=True)
class Verdict:
    """The answer to "why": one condition, one guilty layer, or that it cannot be told and what would tell."""

    condition: Condition
    layer: str = ""  # scheduler, device, fabric, collective, framework, storage, host; "": none, or it cannot be told
    node: str = ""
    rank: int | None = None
    leaf: str = ""
    cause: str = ""  # a name of causes.toml; "cannot_tell"; "": there is nothing to explain
    sentence: str = ""  # the paragraph
    because: str = ""  # what the layer is guilty of
    evidence: tuple[str, ...] = ()
    confidence: float = 0.0  # the probability that the layer is right
    action: str = ""
    cost_dollars_per_day: float | None = None
    would_tell: tuple[str, ...] = ()
    others: tuple[Finding, ...] = ()  # further faults, the gravest first
    lost_share: float | None = None  # of the run's time
    health: str = ""  # of the finding that the verdict names
    moment: float | None = None  # the same
    is_urgent: bool = False  # the same

    @property
    def is_alarm(self) -> bool:
        """Whether somebody should act."""
        return self.condition in TROUBLED or bool(self.cause and self.condition == "healthy")

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        document["others"] = [{**asdict(other), "layer": other.layer} for other in self.others]
        return document


@dataclass(frozen=True)
class Symptom:
    """What the run suffers from, before anybody asks why."""

    condition: Condition
    sentence: str = ""
    evidence: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()  # whom everybody waits for, who died or computes wrong; none: nobody more than another
    nodes: tuple[str, ...] = ()  # where those ranks are
    leaf: str = ""  # all of whose nodes are among them, and no others
    phase: str = ""  # of a step that owns the loss; "queue": what comes before a server's step
    lost_share: float | None = None
    since_start: bool = False  # slow from its first step on
    moment: float | None = None  # of the first death
    # Of a wrong run: odd_rank, not_a_number, diverged, loss_spike. Of one that was ended: hung, stopped. Of a slow one:
    # restarts, overload.
    sign: str = ""

    def may_come_of(self, explains: tuple[Condition, ...]) -> bool:
        """Whether what explains these conditions may explain it. What ends ranks is why a run breaks again and again;
        what makes steps longer is not."""
        return ("dead" if self.sign == RESTARTS else self.condition) in explains

    def fits(self, node: str = "", rank: int | None = None, leaf: str = "") -> bool | None:
        """Whether a fault of this victim is where it hurts; None where one of the two names nobody."""
        if rank is not None and self.ranks:
            return rank in self.ranks
        if node and self.nodes:
            return node in self.nodes
        if leaf and self.leaf:
            return leaf == self.leaf
        return None


@dataclass(frozen=True)
class Symptoms:
    """All that a run suffers from, the gravest first; one condition at least."""

    all: tuple[Symptom, ...]

    @property
    def first(self) -> Symptom:
        return self.all[0]

    @property
    def condition(self) -> Condition:
        return self.first.condition

    def of(self, *conditions: Condition) -> list[Symptom]:
        """`slow` are those that are so in their steps."""
        beside = (RESTARTS, OVERLOAD)
        return [symptom for symptom in self.all if symptom.condition in conditions and symptom.sign not in beside]

    def signed(self, sign: str) -> list[Symptom]:
        return [symptom for symptom in self.all if symptom.sign == sign]

    def fit(
        self,
        explains: tuple[Condition, ...],
        node: str = "",
        rank: int | None = None,
        leaf: str = "",
        phases: tuple[str, ...] = (),
    ) -> tuple[float, int | None]:
        """How well a fault of this victim, which makes these phases longer, explains the symptom that it fits best, and
        which one that is."""
        best: tuple[float, int | None] = (0.0, None)
        for number, symptom in enumerate(self.all):
            if not symptom.may_come_of(explains):
                continue
            where = symptom.fits(node, rank, leaf)
            share = 1.0 if where else UNNAMED_FIT if where is None else ELSEWHERE_FIT
            if phases and symptom.phase and symptom.phase not in phases:
                share *= OTHER_PHASE_FIT
            if share > best[0]:
                best = (share, number)
        return best
