"""The sections `recover:` and `chaos:`: what a run does when something breaks, and what is broken on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, PlainValidator, ValidationInfo

from craton.job.document import KeyConflictError, Section, Size, Whole, parse_seconds
from craton.job.errors import FaultError
from craton.job.faults import FAULT_KINDS, RANDOM_KINDS, InjectedFault, check_fault, parse_fault, random_faults


def _parse_wait(value: object) -> float:
    """A duration that may be nothing at all."""
    return 0.0 if str(value).strip() in ("0", "0.0", "0s") else parse_seconds(value)


def _parse_kinds(value: object) -> object:
    kinds = (value,) if isinstance(value, str) else value
    if isinstance(kinds, list | tuple):
        for kind in kinds:
            if kind not in FAULT_KINDS:
                raise ValueError(f"{kind!r} is no fault; allowed: {', '.join(FAULT_KINDS)}")
    return kinds


Wait = Annotated[float, PlainValidator(_parse_wait)]


class RecoverSection(Section):
    """How a run goes on after a failure."""

    tries: Whole = 3  # how often a run goes on without a new step in between; 0: the first failure ends it
    spare_wait: Wait = 30.0  # for a lost node, before an elastic job goes on with fewer
    give_up: Wait = 600.0  # for a lost node, before a job that cannot shrink fails
    spares: Whole | None = None  # nodes started beside those that work; default: the cluster file's


class RandomChaos(Section):
    """Faults drawn from a seed instead of written down."""

    random: Size
    seed: Whole = 0
    kinds: Annotated[tuple[str, ...], BeforeValidator(_parse_kinds)] = RANDOM_KINDS


def parse_chaos(value: object, info: ValidationInfo) -> RandomChaos | tuple[str, ...]:
    """A list of faults, one fault, or `{random: 10, seed: 7}`."""
    if isinstance(value, RandomChaos):
        return value
    if isinstance(value, dict):
        return RandomChaos.parse(value, info)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(item, str) for item in texts):
        raise ValueError(
            f"{value!r} is no list of faults; write e.g. [kill rank=3@step=40], or {{random: 10, seed: 7}}"
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
) -> list[InjectedFault]:
    """The faults of a job on its nodes, each checked to be able to happen there; random ones leave the last `spares` of
    the nodes alone."""
    if isinstance(chaos, tuple):
        faults = [parse_fault(text) for text in chaos]
    elif steps is None:
        raise FaultError("chaos: random faults are spread over the steps of a job, and this one does not say how many")
    else:
        working = nodes[: len(nodes) - spares]
        faults = random_faults(chaos.random, chaos.seed, steps, world, working, tiers, chaos.kinds)
    for fault in faults:
        check_fault(fault, world=world, nodes=nodes, tiers=tiers, steps=steps, trains=trains)
    return faults
