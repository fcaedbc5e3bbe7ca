"""Find the ranks that the others wait for. Ranks that wait for another one are never named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from craton.telemetry.node import sleeps_for
from craton.telemetry.progress.limits import STEPPING, RankActivity

IN_A_STEP = (*STEPPING, "compile")  # `compile` is the whole first step, with its collectives
EARLY_SECONDS, EARLY_STEPS = 1.0, 0.25  # a rank that stopped this much before the others stopped first


def find_culprits(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return the ranks that the others wait for, the oldest first; empty if none stands out."""
    ranks = [rank for rank in ranks if not rank.is_silent]
    ranks = [rank for rank in ranks if rank.kind != "waiting"] or ranks  # for the next generation
    if len(ranks) < 2:
        return list(ranks)
    chosen = (
        _some([rank for rank in ranks if rank.is_stopped or rank.process_state in ("T", "Z")], ranks)
        or _some(_behind(ranks), ranks)
        or _some(_apart(ranks), ranks)
        or _some([rank for rank in ranks if rank.process_state == "D"], ranks)
        or _some([rank for rank in ranks if not rank.is_waiting], ranks)
        or _some(_asleep(ranks), ranks)
        or _some(_busy(ranks), ranks)
        or _early(ranks)
    )
    return oldest_first(chosen)


def find_sleepers(ranks: Sequence[RankActivity], named: Sequence[RankActivity]) -> list[RankActivity]:
    """Return ranks of a command that report no progress of their own and sleep for something that no other rank ends,
    as if they had stopped with the first of those that are `named`; empty if one of these sleeps like that itself or is
    stopped."""
    if not named or any(sleeps_for(rank.sleeps_in) or rank.is_waiting or rank.is_stopped for rank in named):
        return []
    first = named[0]
    return [
        replace(rank, age_seconds=first.age_seconds, step=first.step, limit_seconds=first.limit_seconds)
        for rank in ranks
        if rank.is_silent and sleeps_for(rank.sleeps_in)
    ]


def _some(chosen: list[RankActivity], ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return the chosen ranks, unless all are chosen: then none stands out."""
    return chosen if len(chosen) < len(ranks) else []


def _behind(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    steps = [rank.step for rank in ranks]
    behind = [rank for rank in ranks if rank.step == min(steps)] if min(steps) < max(steps) else []
    return _apart(behind) or behind


def _apart(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return ranks in another phase than a step; a first step that compiles counts if no other phase does."""
    return [rank for rank in ranks if rank.kind not in IN_A_STEP] or [
        rank for rank in ranks if rank.kind not in STEPPING
    ]


def _asleep(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return ranks that sleep for something that no other rank ends; stacks, where they are known, say more."""
    if any(rank.is_waiting for rank in ranks):
        return []
    return [rank for rank in ranks if sleeps_for(rank.sleeps_in)]


def _busy(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return ranks that use a CPU while most others sleep in a receive. Ranks that wait for a GPU use one too."""
    running = [rank for rank in ranks if rank.process_state == "R"]
    is_known = all(rank.process_state in ("R", "S") for rank in ranks)
    return running if 2 * len(running) <= len(ranks) and is_known else []


def _early(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    oldest = max(rank.age_seconds for rank in ranks)
    paces = sorted(rank.step_seconds for rank in ranks)
    margin = max(EARLY_SECONDS, EARLY_STEPS * paces[len(paces) // 2])
    early = [rank for rank in ranks if rank.age_seconds > oldest - margin]
    return early if 2 * len(early) <= len(ranks) else []


def oldest_first(ranks: Iterable[RankActivity]) -> list[RankActivity]:
    """Return the ranks in the order in which they stopped."""
    return sorted(ranks, key=lambda rank: (-rank.age_seconds, rank.rank))
