"""A verdict in words: one paragraph that names the layer, the victim, what to do and what it costs."""

from __future__ import annotations

from craton.formatting import counted, dollars, duration, percent
from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.verdict import RESTARTS, Finding, Symptom, Symptoms, Verdict

LAYER_WORDS = {
    "scheduler": "the scheduler",
    "device": "a device",
    "fabric": "the fabric",
    "collective": "a collective",
    "framework": "the framework",
    "storage": "storage",
    "host": "the host",
}
MIN_DOLLARS = 1.0


def paragraph(snapshot: Snapshot, symptoms: Symptoms, verdict: Verdict) -> str:
    run = snapshot.run
    condition = verdict.condition
    if condition == "waiting":
        job = f" as job {snapshot.scheduler.job}" if snapshot.scheduler.job else ""
        message = f"{run.name} waits{job}: {symptoms.first.sentence}"
        return " ".join([f"{message.rstrip('.')}.", *([_sentence(verdict.action)] if verdict.action else [])])
    if condition == "unknown":
        return f"{run.name}: {symptoms.first.sentence}"
    if condition in ("done", "stopped"):
        reason = f": {run.message.splitlines()[0]}" if run.message else ""
        return f"{run.name} is {condition}{reason}" + (f"; {run.rescued}" if run.rescued else "")
    parts = [_opening(snapshot, symptoms, verdict)]
    if verdict.cause == "cannot_tell":
        parts.append(
            "The layer cannot be told from what is known. What would tell: " + "; ".join(verdict.would_tell) + "."
        )
    elif verdict.cause:
        parts.append(_guilt(verdict))
        if verdict.action:
            parts.append(_sentence(verdict.action))
        if verdict.would_tell and verdict.confidence < 0.8:
            parts.append(f"What would tell more: {verdict.would_tell[0]}.")
    if verdict.cost_dollars_per_day is not None and verdict.cost_dollars_per_day >= MIN_DOLLARS:
        parts.append(f"It costs {dollars(verdict.cost_dollars_per_day)} a day.")
    if verdict.others:
        parts.append("Besides: " + "; ".join(f"{other.sentence} ({other.layer})" for other in verdict.others[:3]) + ".")
    return " ".join(parts)


def action_of(snapshot: Snapshot, symptom: Symptom, finding: Finding, node: str, rank: int | None) -> str:
    """What to do, with names where they are known: of several ranks the first that is where the fault is."""
    if rank is None:
        there = (candidate for item in symptom.ranks if (candidate := snapshot.rank(item)) is not None)
        first = next((candidate for candidate in there if node in ("", candidate.node)), None)
        if first is not None and not finding.leaf:
            node, rank = first.node, first.rank
    run = snapshot.run.name
    words = {
        "node": node or ("the nodes of " + finding.leaf if finding.leaf else "its node"),
        "who": "its ranks" if rank is None else f"rank {rank}",
        "logs": f"craton logs {run}" + ("" if rank is None else f" --rank {rank}"),
        "run": run,
    }
    return finding.about.action.format(**words)


def _opening(snapshot: Snapshot, symptoms: Symptoms, verdict: Verdict) -> str:
    run = snapshot.run
    sentence = symptoms.first.sentence
    if verdict.condition == "healthy":
        pace = next(
            (f", {duration(rank.recent['step'])} a step" for rank in snapshot.ranks if "step" in rank.recent), ""
        )
        served = snapshot.serving
        queue = f", computes {counted(served.running, 'request')} and lets {served.waiting} wait" if served else ""
        but = ", but something may cost it" if verdict.cause else ""
        return f"{run.name} runs well{pace}{queue}{but}.{_restarts(snapshot)}"
    if verdict.condition == "starting":
        reason = (
            f"it {sentence}" if sentence else run.message.rstrip(".")
        )  # of its scheduler: why a part has no node yet
        return f"{run.name} starts" + (f": {reason}." if reason else ".")
    if verdict.condition == "dead":
        reason = run.message.splitlines()[0].rstrip(".") if run.message else ""
        state = {"failed": "has failed", "lost": "is lost"}.get(run.state, "has lost a part of itself")
        return f"{run.name} {state}" + (f": {reason}." if reason else ".")
    if symptoms.first.sign == RESTARTS:
        return f"{run.name} breaks again and again: it {sentence}."
    word = {"slow": "is slow", "hung": "hangs", "wrong": "computes wrong"}[verdict.condition]
    return f"{run.name} {word}: it {sentence}."


def _restarts(snapshot: Snapshot) -> str:
    """What it came back from, which a run that does well does not show any more."""
    broke = [event for event in snapshot.events if event.name == "generation_started" and event.text]
    if not snapshot.run.restarts or not broke:
        return ""
    times = "once" if snapshot.run.restarts == 1 else f"{snapshot.run.restarts} times"
    return f" It came back {times}; the last time because {broke[-1].text.splitlines()[0].rstrip('.')}."


def _guilt(verdict: Verdict) -> str:
    layer = LAYER_WORDS.get(verdict.layer, verdict.layer)
    where = [f"rank {verdict.rank}"] if verdict.rank is not None else []
    where += [f"on {verdict.node}" if where else verdict.node] if verdict.node else []
    where += [verdict.leaf] if verdict.leaf and not verdict.node else []
    place = f" ({' '.join(where)})" if where else ""
    return f"Guilty is {layer}{place}: {verdict.because} (confidence {percent(verdict.confidence)})."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."
