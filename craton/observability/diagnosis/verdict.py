"""Symptoms of a run, findings of the rules, and the verdict made from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from craton.observability.diagnosis.tables import Cause, causes

Condition = Literal["waiting", "starting", "healthy", "slow", "hung", "dead", "wrong", "done", "stopped", "unknown"]
UNNAMED_FIT, ELSEWHERE_FIT, OTHER_PHASE_FIT = (
    0.85,
    0.4,
    0.5,
)  # how well a fault fits a symptom when its victim is unknown, elsewhere, or its phase is another
TROUBLED: tuple[Condition, ...] = ("slow", "hung", "dead", "wrong")
# Signs of slow runs whose steps may still be fast.
RESTARTS, OVERLOAD = "restarts", "overload"  # a restart loop; more requests than the server can handle
IDLE = "idle"  # a command that has never reported a step
CANCELLED = "cancelled"  # in the scheduler, not with `craton stop`
SUSPENDED = "suspended"  # by the scheduler
FAILING = "failing"  # a server whose requests end with errors
LINGERS = "lingers"  # a command of which some ranks have ended, and others neither end nor work
SLO = "slo"  # a server that misses the latency limits of its job
ABANDONED = "abandoned"  # a server whose clients give up
SILENT = "silent"  # a server that does not answer
STALLED = "stalled"  # a server that computes nothing for its running requests
PAUSED = "paused"  # a server that an admin request has paused
UNSAVED = "unsaved"  # the run waits until a tier can store its last state


@dataclass(frozen=True)
class Finding:
    """One abnormal observation, and how well it explains a symptom of the run."""

    cause: str  # of causes.toml
    explains: tuple[Condition, ...]  # conditions that it can cause; none: a risk
    strength: float  # 0 to 1: quality of the evidence times how well its victim fits the symptom
    sentence: str  # "GPU 3 on node-1 is throttled"
    evidence: tuple[str, ...] = ()
    node: str = ""
    rank: int | None = None
    leaf: str = ""
    lost_share: float | None = None  # of the run's time
    is_risk: bool = False  # worth reporting even if the run is healthy
    symptom: int | None = None  # index of the symptom that it explains best
    evidence_strength: float = 0.0  # quality of the evidence alone
    # Action that the evidence itself requires (the driver, NVIDIA's XID table): observe, restart, reset, reboot,
    # replace; "": none, so the cause's usual action applies.
    health: str = ""
    moment: float | None = None  # epoch seconds of the event; None: it is a state
    is_urgent: bool = False  # the run is healthy, but this ended a generation and a spare could replace the node
    # Confidence in a report of the process itself, which outranks what is inferred; None: it is inferred.
    first_hand: float | None = None
    detail: str = ""  # what the remedy is about: a file and line, a package, a path

    @property
    def about(self) -> Cause:
        return causes()[self.cause]

    @property
    def layer(self) -> str:
        return self.about.layer


@dataclass(frozen=True)
class Verdict:
    """The diagnosis: one condition and its most likely cause, or not enough evidence and what would narrow it down."""

    condition: Condition
    layer: str = ""  # scheduler, device, fabric, collective, framework, storage, host; "": none, or not enough evidence
    node: str = ""
    rank: int | None = None
    leaf: str = ""
    cause: str = ""  # a name of causes.toml; "cannot_tell": not enough evidence; "": nothing to explain
    sentence: str = ""  # the paragraph
    because: str = ""  # the fault, in one sentence
    evidence: tuple[str, ...] = ()
    confidence: float = 0.0  # the probability that the layer is right
    action: str = ""
    cost_dollars_per_day: float | None = None
    would_tell: tuple[str, ...] = ()  # evidence that is missing, and how to get it
    others: tuple[Finding, ...] = ()  # further findings, most severe first
    lost_share: float | None = None  # of the run's time
    health: str = ""  # of the finding behind the verdict
    moment: float | None = None  # the same
    is_urgent: bool = False  # the same
    is_first_hand: bool = False  # the cause is what a rank or server reported about its own end
    since: float | None = None  # epoch seconds: since when the condition lasts; None: not known

    @property
    def is_alarm(self) -> bool:
        """Whether an operator should act."""
        return self.condition in TROUBLED or bool(self.cause and self.condition == "healthy")

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        document["others"] = [{**asdict(other), "layer": other.layer} for other in self.others]
        return document


@dataclass(frozen=True)
class Symptom:
    """An abnormal state of the run, before its cause is known."""

    condition: Condition
    sentence: str = ""
    evidence: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()  # the others wait for them, they failed or are wrong; empty: no rank stands out
    nodes: tuple[str, ...] = ()  # where those ranks are
    leaf: str = ""  # set when exactly the nodes of one leaf are affected
    phase: str = ""  # of a step, with the largest loss; "queue": waiting before a server's step
    lost_share: float | None = None
    since_start: bool = False  # slow since its first step
    moment: float | None = None  # of the first failure
    # wrong: odd_rank, not_a_number, diverged, loss_spike; dead: hung, stopped (ended by its agents); slow: restarts,
    # overload; waiting: unsaved.
    sign: str = ""
    since: float | None = None  # epoch seconds: since when it lasts; None: not known

    def may_come_of(self, explains: tuple[Condition, ...]) -> bool:
        """Return whether a fault that explains these conditions may explain this symptom. Faults that end ranks explain
        a restart loop; faults that slow steps do not."""
        return ("dead" if self.sign == RESTARTS else self.condition) in explains

    def fits(self, node: str = "", rank: int | None = None, leaf: str = "") -> bool | None:
        """Return whether the fault and the symptom have the same victim; None if either has none."""
        if rank is not None and self.ranks:
            return rank in self.ranks
        if node and self.nodes:
            return node in self.nodes
        if leaf and self.leaf:
            return leaf == self.leaf
        return None


@dataclass(frozen=True)
class Symptoms:
    """All symptoms of a run, most severe first; never empty."""

    all: tuple[Symptom, ...]

    @property
    def first(self) -> Symptom:
        return self.all[0]

    @property
    def condition(self) -> Condition:
        return self.first.condition

    def of(self, *conditions: Condition) -> list[Symptom]:
        """Return the symptoms with these conditions; restart loops and overload are not included in `slow`."""
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
        """Return how well a fault with this victim and these phases explains the symptom it fits best, and the index of
        that symptom."""
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
