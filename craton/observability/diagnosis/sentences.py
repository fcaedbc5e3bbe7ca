"""Format a verdict as one paragraph: symptom, most likely cause, victim, remedy and cost."""

from __future__ import annotations

from collections.abc import Collection

from craton.formatting import amount, counted, digits, dollars, duration, percent, whole_duration
from craton.observability.diagnosis.latencies import LATENCY_NAMES
from craton.observability.diagnosis.phases import is_on_processors
from craton.observability.diagnosis.snapshot import Serving, Snapshot
from craton.observability.diagnosis.tables import Cause, threshold
from craton.observability.diagnosis.traits import holds, traits_of
from craton.observability.diagnosis.verdict import IDLE, RESTARTS, Finding, Symptom, Symptoms, Verdict

MIN_DOLLARS = 1.0
PLAN_MARGIN = 1.15  # of the planned step, where the plan has no interval


def paragraph(snapshot: Snapshot, symptoms: Symptoms, verdict: Verdict) -> str:
    """Return the paragraph that `craton why` prints."""
    run = snapshot.run
    condition = verdict.condition
    if condition == "waiting":
        job = f" as job {snapshot.scheduler.job}" if snapshot.scheduler.job else ""
        message = f"{run.name} waits{job}: {symptoms.first.sentence}"
        return " ".join([f"{message.rstrip('.')}.", *([_sentence(verdict.action)] if verdict.action else [])])
    if condition == "unknown":
        missing = f". To find out: {'; '.join(verdict.would_tell)}." if symptoms.first.sign == IDLE else ""
        return f"{run.name}: {symptoms.first.sentence}{missing}{_also(verdict)}"
    if condition in ("done", "stopped"):
        reason = f": {run.message.splitlines()[0]}" if run.message else ""
        text = f"{run.name} is {condition}{reason}" + (f"; {run.rescued}" if run.rescued else "")
        text += _unverified(snapshot)
        if verdict.cause:
            return f"{text}. {_cause(verdict)} {_sentence(verdict.action)}"
        if not verdict.others:
            return text
        first = verdict.others[0]
        assert first.symptom is not None
        action = action_of(snapshot, symptoms.all[first.symptom], first, first.node, first.rank)
        return f"{text}.{_also(verdict)} {_sentence(action)}"
    parts = [_opening(snapshot, symptoms, verdict)]
    if verdict.cause == "cannot_tell":
        parts.append("Not enough evidence to name a layer. To narrow it down: " + "; ".join(verdict.would_tell) + ".")
    elif verdict.cause:
        parts.append(_cause(verdict))
        if verdict.action:
            parts.append(_sentence(verdict.action))
        if verdict.would_tell and verdict.confidence < 0.8:
            parts.append(f"To be more certain: {verdict.would_tell[0]}.")
    if verdict.cost_dollars_per_day is not None and verdict.cost_dollars_per_day >= MIN_DOLLARS:
        parts.append(f"It costs {dollars(verdict.cost_dollars_per_day)} a day.")
    return " ".join(parts) + _also(verdict)


def _unverified(snapshot: Snapshot) -> str:
    """Return how the verifiers failed in the worst step of a run that is over; "" if no step had a warning."""
    step, worst = max(
        snapshot.series.results.get("verifier_failure_share", ()), key=lambda point: point[1], default=(0, 0.0)
    )
    if worst < threshold("verifier_failure_share"):
        return ""
    return f"; its verifiers failed, in step {step} on {percent(worst)} of the samples"


def _also(verdict: Verdict) -> str:
    findings = "; ".join(f"{other.sentence} ({other.layer})" for other in verdict.others[:3])
    return f" Also found: {findings}." if findings else ""


def action_of(snapshot: Snapshot, symptom: Symptom, finding: Finding, node: str, rank: int | None) -> str:
    """Return the remedy with node, rank and run filled in; of several ranks, the first one on the faulty node."""
    if rank is None:
        there = (candidate for item in symptom.ranks if (candidate := snapshot.rank(item)) is not None)
        first = next((candidate for candidate in there if node in ("", candidate.node)), None)
        if first is not None and not finding.leaf:
            node, rank = first.node, first.rank
    run, traits, training = snapshot.run.name, traits_of(snapshot), snapshot.training
    place = node or ("the nodes of " + finding.leaf if finding.leaf else "its node")
    words = {
        "node": place,
        "drain": f"take {place} out of the run" if "local" in traits else f"drain {place}",
        "who": "its ranks" if rank is None else f"rank {rank}",
        "logs": f"craton logs {run}" + ("" if rank is None else f" --rank {rank}"),
        "run": run,
        "detail": finding.detail or "the program",
        "source": training.source if training else "data.source",
        "objective": training.objective if training else "objective",
    }
    return chosen_action(finding.about, traits).format(**words)


def chosen_action(cause: Cause, traits: Collection[str]) -> str:
    """Return the remedy for runs with these traits, before names are filled in."""
    return next((action for when, action in cause.variants if holds(when, traits)), cause.action)


def _latencies(served: Serving) -> str:
    """Return `; TTFT 38 ms (planned 45 ms), TPOT 20 ms, 120 tokens/s`: means since the engine was started."""
    if served.latencies is None:
        return ""
    found, planned = served.latencies, served.latencies.planned
    values = {name: (duration(found.mean(name)), planned.get(name)) for name in ("ttft", "tpot") if found.mean(name)}
    parts = [
        f"{LATENCY_NAMES[name]} {text}" + (f" (planned {duration(plan)})" if plan is not None else "")
        for name, (text, plan) in values.items()
    ]
    if served.tokens_per_second is not None and served.running:
        plan = planned.get("tokens_per_second")
        parts.append(f"{amount(served.tokens_per_second)} tokens/s" + (f" (planned {amount(plan)})" if plan else ""))
    return f"; {', '.join(parts)}" if parts else ""


def _opening(snapshot: Snapshot, symptoms: Symptoms, verdict: Verdict) -> str:
    run = snapshot.run
    sentence = symptoms.first.sentence
    if verdict.condition == "healthy":
        pace = next(
            (f", {duration(rank.recent['step'])} per step" for rank in snapshot.ranks if "step" in rank.recent), ""
        )
        served = snapshot.serving
        queue = f", {counted(served.running, 'request')} running, {served.waiting} waiting" if served else ""
        queue += _latencies(served) if served else ""
        but = ", but is at risk" if verdict.cause else ""
        late = slower_than_planned(snapshot)
        runs = f"runs, {late}" if late else "runs" if sentence else "runs well"
        note = f" {sentence[:1].upper()}{sentence[1:]}." if sentence else ""
        return f"{run.name} {runs}{pace if not late else ''}{queue}{but}.{note}{_restarts(snapshot)}"
    if verdict.condition == "starting":
        reason = (
            f"it {sentence}" if sentence else run.message.rstrip(".")
        )  # from the scheduler: why some nodes are not there yet
        return f"{run.name} is starting" + (f": {reason}." if reason else ".")
    if verdict.condition == "dead":
        reason = run.message.splitlines()[0].rstrip(".") if run.message and not verdict.is_first_hand else ""
        state = {"failed": "has failed", "lost": "is lost"}.get(run.state, "has lost ranks or nodes")
        return f"{run.name} {state}" + (f": {reason}." if reason else ".")
    if symptoms.first.sign == RESTARTS:
        return f"{run.name} is in a restart loop: it {sentence}."
    word = {"slow": "is slow", "hung": "hangs", "wrong": "produces wrong results"}[verdict.condition]
    return f"{run.name} {word}: it {sentence}{_lasting(snapshot, verdict)}."


def slower_than_planned(snapshot: Snapshot) -> str:
    """Say by how much steps exceed the plan's interval, and why that is no alarm; "" if they do not."""
    run = snapshot.run
    planned = run.plan.get("step_seconds")
    now = next((rank.recent["step"] for rank in snapshot.ranks if "step" in rank.recent), None)
    if not planned or now is None or now <= (run.step_seconds_high or PLAN_MARGIN * planned):
        return ""
    text = f"{percent(1.0 - planned / now)} slower than planned ({duration(now)} per step, {duration(planned)} planned)"
    if not is_on_processors(snapshot):
        return text
    hosts = [node.host for node in snapshot.nodes if node.host is not None]
    busy = next(
        (
            f", and this one is busy (load {digits(host.load)} on {counted(host.processors, 'CPU')})"
            for host in hosts
            if host.load and host.processors and host.load > threshold("load_ratio") * host.processors
        ),
        "",
    )
    return f"{text}: the plan assumes an idle machine{busy}"


def _lasting(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return since when a run is slow; the sentence of a hang contains it."""
    if verdict.condition != "slow" or verdict.since is None or snapshot.moment - verdict.since < 1.0:
        return ""
    return f", for the last {whole_duration(snapshot.moment - verdict.since)}"


def _restarts(snapshot: Snapshot) -> str:
    """Return the restarts of a run that is healthy again, and the reason of the last one."""
    broke = [event for event in snapshot.events if event.name == "generation_started" and event.text]
    if not snapshot.run.restarts or not broke:
        return ""
    times = "once" if snapshot.run.restarts == 1 else f"{snapshot.run.restarts} times, most recently"
    last = broke[-1]
    back = [event for event in snapshot.events if event.name == "recovered" and event.generation == last.generation]
    parts = [last.text.splitlines()[0].rstrip("."), *(event.text for event in back if event.text)]
    return f" It restarted {times}: {'; '.join(parts)}."


def _cause(verdict: Verdict) -> str:
    label = "Risk" if verdict.condition == "healthy" else "Most likely cause"
    where = [f"rank {verdict.rank}"] if verdict.rank is not None else []
    where += [f"on {verdict.node}" if where else verdict.node] if verdict.node else []
    where += [verdict.leaf] if verdict.leaf and not verdict.node else []
    place = f" ({' '.join(where)})" if where else ""
    return f"{label}: {verdict.layer}{place}: {verdict.because} (confidence {percent(verdict.confidence)})."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."
