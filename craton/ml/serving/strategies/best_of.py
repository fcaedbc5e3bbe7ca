"""Best-of-n: the sample with the highest score; of equal scores, the first.

Samples are scored as they end. One that its scorer cannot score (a judge that answers nonsense, a verifier that
crashes) is out of the choice and counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from craton.job.sections.strategy import BestOfStrategy
from craton.ml.serving.clients import Answer
from craton.ml.serving.strategies.outcome import StrategyOutcome
from craton.ml.serving.strategies.task import (
    StrategyTask,
    cancel_all,
    expect_scores,
    mean_logprob,
    reached,
    sample_of,
)


async def best_of(task: StrategyTask, strategy: BestOfStrategy) -> StrategyOutcome:
    answers: list[Answer] = []
    scoring: dict[Answer, asyncio.Task[float | None]] = {}

    def score_ended() -> None:
        for answer in answers:
            if answer.finish not in (None, "abort") and answer not in scoring:
                scoring[answer] = asyncio.create_task(_score(task, answer))

    try:
        while True:
            if len(answers) < strategy.n and not task.running.limited_by:
                request = replace(task.request, sampling=task.seeded(len(answers)))
                started = await task.running.start(request, strategy.n - len(answers))
                answers += started
                if started:
                    continue
            if not await task.running.wait():
                break
            score_ended()
            task.tell()
        task.running.abort_all()
        score_ended()
        scores = {answer: await work for answer, work in scoring.items()}
    finally:
        await cancel_all(list(scoring.values()))
    samples = [sample_of(answer, index) for index, answer in enumerate(answers)]
    for sample, answer in zip(samples, answers, strict=True):
        sample.score = scores.get(answer)
    scored = [sample for sample in samples if sample.score is not None]
    limited_by = task.running.limited_by
    expect_scores(task.scorer, len(scores), list(scores.values()), limited_by == "seconds")
    chosen = max(scored, key=lambda sample: sample.score or 0.0, default=reached(samples))
    report = {
        "score": strategy.score,
        "scores": [sample.score for sample in samples],
        "without_score": len(samples) - len(scored),
        "n": strategy.n,
    }
    return task.outcome(chosen or task.nothing(), samples, report)


async def _score(task: StrategyTask, answer: Answer) -> float | None:
    if task.scorer is None:
        return mean_logprob(answer.sampled_logprobs)
    return (await task.scores([answer.text]))[0]
