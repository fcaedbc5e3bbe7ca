"""Self-consistency: the most frequent answer of several samples (arXiv:2203.11171), with early stopping.

The rule (`craton.planning.strategies`) looks at samples in the order of their indices. Only samples without which it
cannot hold are started, so none is in vain, and timing does not decide which start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from craton.job.sections.strategy import VoteStrategy
from craton.ml.serving.clients import Answer
from craton.ml.serving.strategies.answers import find_answer
from craton.ml.serving.strategies.outcome import StrategyOutcome, StrategySample
from craton.ml.serving.strategies.task import StrategyTask, reached, sample_of
from craton.planning.strategies import leader_confidence, needed_samples


async def vote(task: StrategyTask, strategy: VoteStrategy) -> StrategyOutcome:
    """Sample until the leader is certain enough, `n` samples are counted, or a limit is reached."""
    answers: list[Answer] = []
    votes: Counter[str] = Counter()
    samples: list[StrategySample] = []

    async def count_in_order() -> int:
        """Count the samples that have ended without a gap, until the rule holds; return how many more it takes."""
        more = needed_samples(*_two_leaders(votes), strategy.n - len(samples), strategy.stop)
        while more and len(samples) < len(answers) and answers[len(samples)].finish not in (None, "abort"):
            sample = sample_of(answers[len(samples)], len(samples))
            sample.counted = await find_answer(sample.text, strategy.answer)
            samples.append(sample)
            votes.update([sample.counted] if sample.counted is not None else [])
            more = needed_samples(*_two_leaders(votes), strategy.n - len(samples), strategy.stop)
            task.tell(_leaders_note(votes))
        return more

    while more := await count_in_order():
        if (missing := len(samples) + more - len(answers)) > 0 and not task.running.limited_by:
            started = await task.running.start(replace(task.request, sampling=task.seeded(len(answers))), missing)
            answers += started
            if started:
                continue
        if not await task.running.wait():
            break
    task.running.abort_all()
    if task.running.limited_by == "seconds":  # samples behind one that still runs are votes, too
        for index in range(len(samples), len(answers)):
            sample = sample_of(answers[index], index)
            if sample.finish != "abort":
                sample.counted = await find_answer(sample.text, strategy.answer)
                votes.update([sample.counted] if sample.counted is not None else [])
            samples.append(sample)
    return _outcome(task, strategy, samples, votes)


def _outcome(
    task: StrategyTask, strategy: VoteStrategy, samples: list[StrategySample], votes: Counter[str]
) -> StrategyOutcome:
    winner = votes.most_common(1)[0][0] if votes else None
    chosen = next((sample for sample in samples if sample.counted == winner), None) if votes else reached(samples)
    leader, runner_up = _two_leaders(votes)
    report = {
        "answer": winner,
        "votes": dict(votes.most_common()),
        "without_answer": sum(sample.counted is None for sample in samples),
        "confidence": leader_confidence(leader, runner_up, strategy.n - len(samples)) if votes else 0.0,
        "stopped_early": not task.running.limited_by and len(samples) < strategy.n,
        "n": strategy.n,
    }
    return task.outcome(chosen or task.nothing(), samples, report)


def _two_leaders(votes: Counter[str]) -> tuple[int, int]:
    counts = [count for _, count in votes.most_common(2)]
    return (counts[0] if counts else 0, counts[1] if len(counts) > 1 else 0)


def _leaders_note(votes: Counter[str]) -> str:
    return ", ".join(f"{answer[:40]}: {count}" for answer, count in votes.most_common(3))
