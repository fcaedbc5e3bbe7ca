"""The sections `recover:` (fault tolerance) and `chaos:` (fault injection)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

from pydantic import BeforeValidator, PlainValidator, ValidationInfo

from craton.job.document import KeyConflictError, Section, Size, Whole, parse_seconds
from craton.job.errors import FaultError
from craton.job.faults import FAULT_KINDS, RANDOM_KINDS, InjectedFault, check_fault, parse_fault, random_faults


def _parse_wait(value: object) -> float:
    """Parse a duration that may be zero."""
    return 0.0 if str(value).strip() in ("0", "0.0", "0s") else parse_seconds(value)


def _parse_kinds(value: object) -> object:
    kinds = (value,) if isinstance(value, str) else value
    if isinstance(kinds, list | tuple):
        for kind in kinds:
            if kind not in FAULT_KINDS:
                raise ValueError(f"{kind!r} is not a fault kind; allowed: {', '.join(FAULT_KINDS)}")
    return kinds


Wait = Annotated[float, PlainValidator(_parse_wait)]


class RecoverSection(Section):
    """How a run recovers from a failure."""

    tries: Whole = 3  # consecutive recoveries without a new step; 0: the first failure ends the run
    spare_wait: Wait = 30.0  # wait for a lost node before an elastic job continues on fewer nodes
    give_up: Wait = 600.0  # wait for a lost node before a job that cannot shrink fails
    spares: Whole | None = None  # spare nodes; default: the cluster file's


class RandomChaos(Section):
    """Random faults, drawn from a seed."""

    random: Size
    seed: Whole = 0
    kinds: Annotated[tuple[str, ...], BeforeValidator(_parse_kinds)] = RANDOM_KINDS


def parse_chaos(value: object, info: ValidationInfo) -> RandomChaos | tuple[str, ...]:
    """Parse a list of faults, one fault, or `{random: 10, seed: 7}`."""
    if isinstance(value, RandomChaos):
        return value
    if isinstance(value, dict):
        return RandomChaos.parse(value, info)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(item, str) for item in texts):
        raise ValueError(
            f"{value!r} is not a list of faults; write e.g. [kill rank=3@step=40], or {{random: 10, seed: 7}}"
        )
    for index, text in enumerate(texts):
        try:
            parse_fault(text)
        except FaultError as error:
            raise KeyConflictError(f"chaos: {error}", (index,)) from None
    return tuple(texts)


ChaosSpec = Annotated[RandomChaos | tuple[str, ...], BeforeValidator(parse_chaos)]


def faults_of(
    chaos: RandomChaos | tuple[str, ...],
    *,
    world: int,
    nodes: Sequence[str],
    spares: int,
    tiers: Sequence[str],
    steps: int | None,
    trains: bool,
    watched: int | None = None,
    parts: Collection[str] = (),
) -> list[InjectedFault]:
    """Return the faults of a job, each checked to be possible; random faults do not hit the last `spares` nodes."""
    if isinstance(chaos, tuple):
        faults = [parse_fault(text) for text in chaos]
    elif steps is None:
        raise FaultError(
            "chaos: random faults are spread over the steps of a job, but this job has no number of steps; list the "
            "faults instead, e.g. [kill rank=3@step=40]"
        )
    else:
        working = nodes[: len(nodes) - spares]
        faults = random_faults(chaos.random, chaos.seed, steps, world, working, tiers, chaos.kinds)
    for fault in faults:
        check_fault(
            fault, world=world, nodes=nodes, tiers=tiers, steps=steps, trains=trains, watched=watched, parts=parts
        )
    return faults
