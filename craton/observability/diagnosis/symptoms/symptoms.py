"""Symptoms of a run: waiting, dead, hung, wrong, slow, starting or healthy.

They are checked in this order, because a run without progress has no speed. Healthy and busy runs must raise no alarm:
the first steps, noisy steps, and steps that compile, save or evaluate are not symptoms.
"""

from __future__ import annotations

from collections.abc import Sequence

from craton.formatting import counted
from craton.observability.diagnosis.member_facts import SnapshotMember
from craton.observability.diagnosis.snapshot import Serving, Snapshot
from craton.observability.diagnosis.symptoms.ended import COMING_BACK, find_dead_ranks, symptom_by_state
from craton.observability.diagnosis.symptoms.hung import find_hang, find_silent, progress_of
from craton.observability.diagnosis.symptoms.slow import find_slow
from craton.observability.diagnosis.symptoms.wrong import find_wrong
from craton.observability.diagnosis.verdict import PAUSED, Symptom, Symptoms


def symptoms_of(snapshot: Snapshot) -> Symptoms:
    """Return all symptoms of the run, most severe first."""
    outside = symptom_by_state(snapshot)
    if outside is not None:
        learned = find_wrong(snapshot) if outside.condition in ("done", "stopped") and snapshot.training else ()
        return Symptoms((outside, *learned))
    died = find_dead_ranks(snapshot)
    hangs = find_hang(snapshot)
    wrong = find_wrong(snapshot)
    if died is not None:
        return Symptoms((died, *wrong))
    if snapshot.serving is not None and snapshot.serving.refusal:
        return Symptoms((Symptom("waiting", _resting(snapshot.serving), sign=PAUSED), *wrong))
    if hangs is not None:
        return Symptoms((hangs, *wrong))
    slow = find_slow(snapshot)
    if wrong or slow:
        return Symptoms((*wrong, *slow))
    silent = find_silent(snapshot)
    if silent is not None:
        return Symptoms((silent,))
    note = progress_of(snapshot).sentence
    noted = (note,) if note else ()
    if snapshot.serving is not None and snapshot.serving.is_loading:
        return Symptoms((Symptom("starting", "loads its model and is not ready for requests", noted),))
    awaited = [member for member in snapshot.members if member.is_awaited]
    if snapshot.run.state == "starting" and awaited:
        return Symptoms((Symptom("starting", _waits_for(awaited)),))
    if snapshot.run.state == "starting":
        return Symptoms((Symptom("starting", f"waits: {note}" if note else "", noted),))
    back = [rank for rank in snapshot.ranks if rank.kind in COMING_BACK]
    if back:
        text = f"is recovering from a failure (its ranks are in {back[0].kind})"
        return Symptoms((Symptom("starting", "; ".join((text, *noted)), noted),))
    return Symptoms((Symptom("healthy", note),))


def _waits_for(members: Sequence[SnapshotMember]) -> str:
    """Return `waits for member base (running, step 120 of 500) and 2 more`."""
    first = members[0]
    words = [first.state, first.progress, f"waits for {first.waits_for}" if first.waits_for else ""]
    more = f" and {len(members) - 1:,} more" if len(members) > 1 else ""
    return f"waits for member {first.short_name} ({', '.join(filter(None, words))}){more}"


def _resting(serving: Serving) -> str:
    waiting = f"{counted(serving.waiting, 'request')} {'waits' if serving.waiting == 1 else 'wait'}, and "
    return f"{waiting if serving.waiting else ''}{serving.refusal}"


def straggler_of(snapshot: Snapshot) -> Symptom | None:
    """Return the ranks that cost the others the most time, for `craton why` and the web page. None if there are none,
    or if the run hangs or is dead, where ranks are not compared."""
    return next((symptom for symptom in symptoms_of(snapshot).of("slow") if symptom.ranks), None)
