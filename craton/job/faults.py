"""Injected faults: one line of text each, in the same notation in a job file and for `craton chaos`.

`parse_fault` parses a line into an `InjectedFault`. `check_fault` refuses a fault that cannot happen in a given run.
`random_faults` draws faults from a seed: the same arguments give the same faults, ordered by step.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from craton.job.document import parse_seconds
from craton.job.errors import FaultError
from craton.nearest import did_you_mean

# kind → possible targets; a node is named by a bare word, the others by key=value
TARGETS: Mapping[str, tuple[str, ...]] = {
    "kill": ("rank", "agent", "keeper", "coordinator", "member", "verifier"),
    "hang": ("rank",),
    "fail": ("rank",),
    "corrupt": ("tier", "journal", "weights"),
    "slow-disk": ("tier",),
    "lose-node": ("node",),
}
FAULT_KINDS = tuple(TARGETS)
RANDOM_KINDS = ("kill", "hang", "fail", "corrupt", "slow-disk")  # faults a run recovers from without new nodes
# fmt: off
DURING = (
    "staging", "checkpoint", "regroup", "restore", "evaluate", "data", "productive", "saving", "rollout", "reward",
    "sync", "transfer",
)
# fmt: on
HANGS = ("stop", "spin")
WHOSE = ("own", "copies", "all")
DAMAGES = ("flip", "cut")  # of a file of the journal
BARE_TARGETS = {"kill": ("coordinator",), "corrupt": ("journal", "weights")}
TIERS = ("peer", "nvme", "shared")
MAX_SHOWN_MEMBERS = 10
EXAMPLES: Mapping[str, str] = {
    "kill": "rank=3@step=40",
    "hang": "rank=3@step=40,how=stop",
    "fail": "rank=2@step=9",
    "corrupt": "tier=peer,rank=1,whose=copies@step=50",
    "slow-disk": "tier=shared,seconds=0.5,for=20s@step=10",
    "lose-node": "node-1@step=40",
}
# kind → options besides the target, `step` and `member`, the member run that the fault is for
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "kill": ("during",),
    "hang": ("during", "how"),
    "fail": ("during",),
    "corrupt": ("rank", "whose", "how"),
    "slow-disk": ("seconds", "for"),
    "lose-node": (),
}


@dataclass(frozen=True)
class InjectedFault:
    """A fault and when it happens: immediately without `step` and `during`; with both, in the first such phase from
    that step on."""

    kind: str  # one of FAULT_KINDS
    target: str  # rank, agent, keeper, coordinator, member, verifier, tier, journal, weights or node
    text: str  # as written by the user
    rank: int | None = None  # of a verifier: the rank whose workers they are
    node: str | None = None
    tier: str | None = None
    step: int | None = None
    during: str | None = None  # one of DURING
    seconds: float | None = None  # slow-disk: added duration of a write
    for_seconds: float | None = None  # slow-disk: how long the fault lasts; None: until the end
    how: str | None = None  # hang: one of HANGS; corrupt of peer memory: one of WHOSE, of the journal: one of DAMAGES
    member: str | None = None  # the member run in which it happens; None: the run itself

    @property
    def needs_training(self) -> bool:
        """Whether the fault requires Craton's own training loop."""
        if self.during == "transfer" and self.kind == "kill":  # a server receives weights
            return False
        is_inside = self.kind in ("fail", "corrupt", "slow-disk") or self.during is not None or self.how == "spin"
        return is_inside or self.target in ("keeper", "verifier")

    @property
    def part(self) -> str | None:
        """The part of post-training that the run needs for this fault to happen: see `Job.fault_parts`."""
        if self.during == "transfer":
            return "weights"
        return self.target if self.target in ("verifier", "journal", "weights") else None


def parse_fault(text: str) -> InjectedFault:
    """Parse a line such as `kill rank=3@step=40`; FaultError names the allowed words and the nearest match."""
    kind, _, rest = " ".join(str(text).split()).partition(" ")
    if kind not in TARGETS:
        raise FaultError(f"{text!r}: {_no_fault(kind)}")
    # Target before the @, time after it; but words are identified by key, so any order is accepted.
    words = [word.strip() for part in rest.split("@") for word in part.split(",")]
    if rest.count("@") > 1 or not all(words):
        raise FaultError(f"{text!r} is not a valid fault; write e.g. {kind} {EXAMPLES[kind]}")
    settings: dict[str, str] = {}
    for position, word in enumerate(words):
        key, is_pair, value = word.partition("=")
        if not is_pair:
            key, value = _bare_word(kind, word, position, text)
        if key in settings:
            raise FaultError(f"{text!r} gives {key} twice; keep one")
        settings[key] = value
    allowed = tuple(dict.fromkeys((*TARGETS[kind], "step", *_OPTIONS[kind], "member")))
    for key in settings:
        if key not in allowed:
            raise FaultError(
                f"{text!r}: {key!r} is not known here; allowed: {', '.join(allowed)}{did_you_mean(key, allowed)}; "
                f"e.g. {kind} {EXAMPLES[kind]}"
            )
    targets = [key for key in settings if key in TARGETS[kind]]
    if len(targets) > 1 and "member" in targets:
        targets.remove("member")  # a process of that member, not the member as a whole
    if len(targets) != 1:
        raise FaultError(
            f"{text!r} names {' and '.join(targets) or 'nothing'} to {kind}; name one of {', '.join(TARGETS[kind])}, "
            f"e.g. {kind} {EXAMPLES[kind]}"
        )
    return _fault(kind, targets[0], settings, str(text))


def check_fault(
    fault: InjectedFault,
    *,
    world: int,
    nodes: Sequence[str],
    tiers: Sequence[str],
    step: int = 0,
    steps: int | None = None,
    trains: bool = True,
    watched: int | None = None,
    parts: Collection[str] = (),
) -> None:
    """Raise FaultError for a fault that cannot happen in a run with these ranks, nodes, checkpoint tiers and parts of
    post-training, at `step` of `steps`. `watched` is the only rank whose steps are known, if not all are. For a fault
    with a member, the arguments are those of that member."""
    if fault.needs_training and not trains:
        raise FaultError(
            f"{fault.text!r} requires Craton's training loop, and this run is a command; use kill rank, agent or "
            "coordinator, hang with how=stop, or lose-node"
        )
    if fault.part is not None and fault.part not in parts:
        needed = {
            "verifier": "verifiers: it needs kind grpo with a reward",
            "journal": "journal: it needs kind grpo with rollout.mode overlap or separate",
            "weights": "weight transfer: it needs kind grpo with rollout.mode separate, or a server of such a run",
        }
        raise FaultError(f"{fault.text!r}: this run has no {needed[fault.part]}")
    if fault.rank is not None and fault.rank >= world:
        raise FaultError(f"{fault.text!r}: there is no rank {fault.rank}; the ranks are 0 to {world - 1}")
    if fault.step is not None and watched is not None and fault.rank not in (None, watched):
        raise FaultError(f"{fault.text!r}: steps are those of rank {watched} (progress.rank); name it, or omit @step")
    if fault.node is not None and fault.node not in nodes:
        near = did_you_mean(fault.node, nodes)
        raise FaultError(f"{fault.text!r}: there is no node {fault.node}; the nodes are {', '.join(nodes)}{near}")
    if fault.tier is not None and fault.tier not in tiers:
        there = ", ".join(tiers) or "none"
        raise FaultError(f"{fault.text!r}: the job has no tier {fault.tier}; it has {there}")
    if fault.step is not None and fault.step <= step and step:
        raise FaultError(f"{fault.text!r}: step {fault.step:,} is past, the run is at step {step:,}; give a later one")
    if fault.step is not None and steps is not None and fault.step > steps:
        raise FaultError(f"{fault.text!r}: the job ends after step {steps:,}; give an earlier one")


def check_member(fault: InjectedFault, members: Sequence[str]) -> None:
    """Raise FaultError for a fault in a member that the run does not have."""
    if fault.member is None or fault.member in members:
        return
    if not members:
        raise FaultError(f"{fault.text!r}: this run has no members; omit member=")
    shown = ", ".join(members[:MAX_SHOWN_MEMBERS]) + (", ..." if len(members) > MAX_SHOWN_MEMBERS else "")
    near = did_you_mean(fault.member, members)
    raise FaultError(f"{fault.text!r}: there is no member {fault.member}; the members are {shown}{near}")


def random_faults(
    count: int,
    seed: int,
    steps: int,
    world: int,
    nodes: Sequence[str],
    tiers: Sequence[str],
    kinds: Iterable[str] = RANDOM_KINDS,
    first: int = 1,
) -> list[InjectedFault]:
    """Draw `count` faults, one in each equal part of the steps from `first` on. Kinds that need a tier are omitted if
    there is none. A fault during recovery is followed by one that causes a recovery; else it would never happen."""
    wanted = tuple(kinds)
    for kind in wanted:
        if kind not in TARGETS:
            raise FaultError(_no_fault(kind))
    folders = [tier for tier in tiers if tier in ("nvme", "shared") or tier.startswith("/")]
    flipped = [tier for tier in tiers if tier == "peer" or tier in folders]
    possible = [
        kind
        for kind in wanted
        if (kind != "corrupt" or flipped)
        and (kind != "slow-disk" or folders)
        and (kind != "lose-node" or len(nodes) > 1)
    ]
    if count and not possible:
        raise FaultError(f"none of {', '.join(wanted)} can happen here; allowed: {', '.join(FAULT_KINDS)}")
    if steps - first + 1 < count:
        raise FaultError(f"{count} faults do not fit into steps {first:,} to {steps:,}; request fewer")
    draw = random.Random(f"craton {seed}")
    edges = [first + index * (steps - first + 1) // count for index in range(count)] + [steps + 1]
    faults: list[InjectedFault] = []
    for index in range(count):
        step = draw.randrange(edges[index], edges[index + 1])
        before = faults[-1] if faults else None
        if before is not None and before.during in ("regroup", "restore"):
            text = f"kill rank={draw.randrange(world)}@step={step}"
        else:
            text = _draw(draw, draw.choice(possible), step, world, nodes, flipped, index == count - 1)
        faults.append(parse_fault(text))
    return faults


def _draw(
    draw: random.Random,
    kind: str,
    step: int,
    world: int,
    nodes: Sequence[str],
    flipped: Sequence[str],
    is_last: bool,
) -> str:
    rank, node = draw.randrange(world), draw.choice(list(nodes))
    folders = [tier for tier in flipped if tier != "peer"]
    if kind == "lose-node":
        return f"lose-node {node}@step={step}"
    if kind == "corrupt":
        return f"corrupt tier={draw.choice(list(flipped))}@step={step}"
    if kind == "slow-disk":
        seconds, lasting = draw.choice((0.1, 0.5, 1.0)), draw.choice((5, 10))
        return f"slow-disk tier={draw.choice(folders)},seconds={seconds},for={lasting}s@step={step}"
    if kind == "hang":
        return f"hang rank={rank}@step={step},how={draw.choice(HANGS)}"
    if kind == "fail":
        return f"fail rank={rank}@step={step}"
    other = draw.choice(("rank", "rank", "rank", "phase", "phase", "agent", "keeper", "coordinator"))
    if other == "phase":
        possible = {"checkpoint": bool(folders), "staging": "peer" in flipped, "saving": bool(folders)}
        phases = ["productive", *(phase for phase, is_there in possible.items() if is_there)]
        phases += [] if is_last else ["regroup", "restore"]
        return f"kill rank={rank}@step={step},during={draw.choice(phases)}"
    if other == "coordinator":
        return f"kill coordinator@step={step}"
    return f"kill rank={rank}@step={step}" if other == "rank" else f"kill {other}={node}@step={step}"


def _no_fault(kind: str) -> str:
    return f"{kind!r} is not a fault kind; allowed: {', '.join(FAULT_KINDS)}{did_you_mean(kind, FAULT_KINDS)}"


def _bare_word(kind: str, word: str, position: int, text: str) -> tuple[str, str]:
    """Return (key, value) of a word without `=`: a target of which there is one, or the name of a node to lose."""
    if position == 0 and word in BARE_TARGETS.get(kind, ()):
        return word, ""
    if position == 0 and kind == "lose-node":
        return "node", word
    allowed = (*TARGETS[kind], "step", *_OPTIONS[kind])
    raise FaultError(
        f"{text!r}: {word!r} has no value; allowed: {', '.join(allowed)}; write e.g. {kind} {EXAMPLES[kind]}"
    )


def _fault(kind: str, target: str, settings: Mapping[str, str], text: str) -> InjectedFault:
    node = settings[target] if target in ("agent", "keeper", "node") else None
    if target not in BARE_TARGETS.get(kind, ()) and not settings[target]:
        raise FaultError(f"{text!r}: {target} has no value; write e.g. {kind} {EXAMPLES[kind]}")
    member = settings.get("member")
    if member == "":
        raise FaultError(f"{text!r}: member has no value; write e.g. {kind} {EXAMPLES[kind]},member=base")
    tier = settings.get("tier")
    if tier is not None and (tier == "object" or tier.startswith("s3://")):
        raise FaultError(f"{text!r}: objects in S3 can be neither corrupted nor slowed down; use peer, nvme or shared")
    if tier is not None and tier not in TIERS and not tier.startswith("/"):
        raise FaultError(
            f"{text!r}: {tier!r} is not a tier; allowed: {', '.join(TIERS)} or an absolute path"
            f"{did_you_mean(tier, TIERS)}"
        )
    if kind == "slow-disk" and tier == "peer":
        raise FaultError(f"{text!r}: {tier} is not on a disk; use nvme or shared")
    if kind == "slow-disk" and "seconds" not in settings:
        raise FaultError(f"{text!r} lacks seconds=, the delay per write; write e.g. {kind} {EXAMPLES[kind]}")
    if kind == "corrupt" and target != "journal" and "how" in settings:
        raise FaultError(f"{text!r}: how applies only to the journal")
    if tier != "peer" and ("whose" in settings or "rank" in settings) and kind == "corrupt":
        raise FaultError(f"{text!r}: rank and whose apply only to tier=peer, where every rank has its own memory")
    how = None
    if kind == "hang":
        how = _one_of(settings.get("how", "stop"), "how", HANGS, text)
    elif kind == "corrupt" and tier == "peer":
        how = _one_of(settings.get("whose", "all"), "whose", WHOSE, text)
    elif target == "journal":
        how = _one_of(settings.get("how", "flip"), "how", DAMAGES, text)
    return InjectedFault(
        kind=kind,
        target=target,
        text=text,
        rank=_number(settings, "verifier" if target == "verifier" else "rank", 0, text),
        node=node,
        tier=tier,
        step=_number(settings, "step", 1, text),
        during=_one_of(settings["during"], "during", DURING, text) if "during" in settings else None,
        seconds=_seconds(settings, "seconds", text),
        for_seconds=_seconds(settings, "for", text),
        how=how,
        member=member,
    )


def _number(settings: Mapping[str, str], key: str, at_least: int, text: str) -> int | None:
    if key not in settings:
        return None
    value = settings[key]
    if not value.isascii() or not value.isdecimal() or int(value) < at_least:
        raise FaultError(f"{text!r}: {key} is {value!r}, not a whole number from {at_least}")
    return int(value)


def _seconds(settings: Mapping[str, str], key: str, text: str) -> float | None:
    if key not in settings:
        return None
    try:
        return parse_seconds(settings[key])
    except ValueError as error:
        raise FaultError(f"{text!r}: {key}: {error}") from None


def _one_of(value: str, key: str, allowed: Sequence[str], text: str) -> str:
    if value not in allowed:
        raise FaultError(f"{text!r}: {key} is {value!r}; allowed: {', '.join(allowed)}{did_you_mean(value, allowed)}")
    return value
