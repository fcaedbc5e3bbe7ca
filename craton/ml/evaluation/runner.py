"""Evaluate problems on one client: bounded concurrency, verdicts from the pool, one result a problem as it ends.

Each sample has a seed that is a function of the suite's seed, its problem and its number. An answer that the endpoint
refuses, or that does not come in time, has no verdict and is counted; an endpoint that is gone ends the evaluation,
which continues later from the problems that are done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from craton.formatting import counted, percent
from craton.job.sections.strategy import Strategy
from craton.job.sections.suites import Suite, SuiteSampling
from craton.ml.evaluation.answers import answer_of
from craton.ml.evaluation.errors import EvaluationError
from craton.ml.evaluation.problems import SuiteProblem
from craton.ml.evaluation.records import ProblemResult, SampleResult, settings_digest
from craton.ml.serving import Sampling
from craton.ml.serving.clients import (
    Answer,
    AnswerTimeoutError,
    InferenceClient,
    InferenceRequest,
    MissingCapabilityError,
    RequestRefusedError,
    ServerFailedError,
    complete,
)
from craton.ml.serving.strategies import (
    Limits,
    NoScoreError,
    Prices,
    Scorer,
    completion_length,
    prepare_request,
    run_strategy,
)
from craton.ml.verifiers import Verdict, VerifierPool, VerifierSample

FATAL_SHARE = 0.5  # of the samples without a verdict: then the numbers say nothing
FIRST_SAMPLES = 32  # after which it is looked at

Result = TypeVar("Result")


@dataclass(frozen=True)
class EvaluationSetting:
    """How the problems are answered: plain samples, or a strategy; at which checkpoint."""

    model: str
    suite: Suite
    samples: int
    temperature: float
    max_tokens: int
    seed: int
    strategy: Strategy | None = None
    checkpoint: int | None = None

    @property
    def digest(self) -> str:
        """Name everything that a result depends on beside its problem."""
        sampling, answer = self.suite.sampling, self.suite.answer.model_dump()
        details: tuple[object, ...] = (sampling.top_p, sampling.top_k, sampling.stop, answer, self.suite.threshold)
        score = None if self.strategy is None else self.suite.score_of(self.strategy)
        if score is not None:
            details = (*details, score.model_dump(mode="json", exclude_none=True))
        plan = self.strategy_json
        return settings_digest(
            self.model, self.samples, self.temperature, self.max_tokens, self.seed, plan, self.checkpoint, details
        )

    @property
    def strategy_json(self) -> dict[str, Any]:
        if self.strategy is None:
            return {"kind": "sample", "temperature": self.temperature}
        return self.strategy.model_dump(mode="json", exclude_none=True)

    @property
    def n(self) -> int:
        """Samples of a problem."""
        return self.samples if self.strategy is None else int(getattr(self.strategy, "n", 1))

    @property
    def num_in_flight(self) -> int:
        """Maximum number of answers to one problem at a time."""
        return self.samples if self.strategy is None else self.strategy.num_samples

    @property
    def words(self) -> str:
        """`vote:16`, `4 samples`; with its checkpoint."""
        n = getattr(self.strategy, "n", None)
        plain = counted(self.samples, "sample")
        what = plain if self.strategy is None else self.strategy.kind + (f":{n}" if n else "")
        return what if self.checkpoint is None else f"step {self.checkpoint:,}, {what}"

    def request(self, problem: SuiteProblem) -> InferenceRequest:
        sampling = self.suite.sampling
        return InferenceRequest(
            problem.prompt,
            Sampling(
                self.max_tokens,
                self.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=problem.seed(self.seed),
            ),
            stop=sampling.stop,
        )


def plain_setting(
    model: str, suite: Suite, sampling: SuiteSampling, checkpoint: int | None = None
) -> EvaluationSetting:
    """Return the setting of plain samples."""
    return EvaluationSetting(
        model=model,
        suite=suite,
        samples=sampling.samples,
        temperature=sampling.temperature_for(sampling.samples),
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        checkpoint=checkpoint,
    )


async def _at_once() -> None:
    """Wait for nothing."""


@dataclass
class SuiteRunner:
    """What all problems of an evaluation share."""

    client: InferenceClient
    pool: VerifierPool
    concurrency: int
    scorer: Scorer | None = None  # of the strategy
    prices: Prices | None = None  # for its limit in dollars
    has_seeds: bool = True  # False: the endpoint has none, and samples cannot be repeated
    on_result: Callable[[ProblemResult], None] = lambda result: None
    on_beat: Callable[[], None] = lambda: None
    until_saved: Callable[[], Awaitable[None]] = _at_once  # before another problem is asked
    _num_samples: int = field(default=0, init=False)
    _failures: list[str] = field(default_factory=list, init=False)

    async def run(
        self, setting: EvaluationSetting, problems: Sequence[SuiteProblem], done: Sequence[ProblemResult] = ()
    ) -> None:
        """Evaluate these problems; `done`: results of others. The first error that is no verdict on one of them ends
        it."""
        self._num_samples = sum(len(result.samples) for result in done)
        at_once = max(1, self.concurrency // setting.num_in_flight)
        waiting = iter(problems)

        async def work() -> None:
            for problem in waiting:
                result = await self._evaluate(setting, problem)
                self._count(result)
                self.on_result(result)
                await self.until_saved()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(problems))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._check()

    async def require(self, setting: EvaluationSetting, problem: SuiteProblem) -> None:
        """Raise MissingCapabilityError if the endpoint cannot give what the strategy needs."""
        if setting.strategy is not None:
            await prepare_request(self.client, self._request(setting, problem), setting.strategy)

    async def _evaluate(self, setting: EvaluationSetting, problem: SuiteProblem) -> ProblemResult:
        began, clock = time.time(), time.monotonic()
        outcome = await self._outcome(setting, problem)
        return ProblemResult(
            settings=setting.digest,
            problem=problem.index,
            digest=problem.digest,
            group=problem.group,
            began=began,
            seconds=time.monotonic() - clock,
            seed=problem.seed(setting.seed),
            **outcome,
        )

    async def _outcome(self, setting: EvaluationSetting, problem: SuiteProblem) -> dict[str, Any]:
        """Return the outcome of a problem. What is wrong with this request alone is its error, not the end of all."""
        try:
            if setting.strategy is not None:
                return await self._chosen(setting, problem, setting.strategy)
            return await self._samples(setting, problem)
        except MissingCapabilityError:
            raise
        except (RequestRefusedError, AnswerTimeoutError, ServerFailedError, NoScoreError) as error:
            return {"samples": (SampleResult(error=str(error)),)}

    async def _chosen(self, setting: EvaluationSetting, problem: SuiteProblem, strategy: Strategy) -> dict[str, Any]:
        """Run the strategy; the answer that it chooses is the one sample of the result."""
        outcome = await run_strategy(
            self.client,
            self._request(setting, problem),
            strategy,
            self.scorer,
            Limits(prices=self.prices),
            lambda _: self.on_beat(),
            row=problem.row,
            shown_prompt=problem.content,
        )
        verdict = await self._verify(problem, outcome.text)
        usage = outcome.usage
        chosen = judge_sample(setting, verdict, outcome.text, usage.chosen_tokens, str(outcome.finish or ""))
        return {
            "samples": (chosen,),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "num_samples": usage.num_samples,
            "report": {**outcome.report, **({"limited_by": outcome.limited_by} if outcome.limited_by else {})},
        }

    async def _samples(self, setting: EvaluationSetting, problem: SuiteProblem) -> dict[str, Any]:
        """Sample every copy on its own, so that the error of one costs no other."""
        request = self._request(setting, problem)

        async def sample(number: int) -> tuple[SampleResult, Answer | None]:
            try:
                (answer,) = await complete(self.client, _copy(request, number))
            except MissingCapabilityError:
                raise
            except (RequestRefusedError, AnswerTimeoutError, ServerFailedError) as error:
                return SampleResult(error=str(error)), None
            self.on_beat()
            text = answer.text
            verdict = await self._verify(problem, text)
            return judge_sample(setting, verdict, text, completion_length(answer), str(answer.finish or "")), answer

        found = await _together([sample(number) for number in range(setting.samples)])
        answers = [answer for _, answer in found if answer is not None]
        prompts = [answer.prompt_tokens for answer in answers]
        return {
            "samples": tuple(result for result, _ in found),
            "prompt_tokens": None if not prompts or None in prompts else sum(filter(None, prompts)),
            "completion_tokens": sum(map(completion_length, answers)),
            "num_samples": setting.samples,
        }

    def _request(self, setting: EvaluationSetting, problem: SuiteProblem) -> InferenceRequest:
        request = setting.request(problem)
        return request if self.has_seeds else replace(request, sampling=replace(request.sampling, seed=None))

    async def _verify(self, problem: SuiteProblem, text: str) -> Verdict:
        return await asyncio.wrap_future(self.pool.submit(VerifierSample(problem.content, text, problem.row)))

    def _count(self, result: ProblemResult) -> None:
        self._num_samples += len(result.samples)
        self._failures += [sample.error for sample in result.samples if sample.is_right is None]
        if self._num_samples >= FIRST_SAMPLES:
            self._check()

    def _check(self) -> None:
        """Raise if more than half of the samples have no verdict."""
        if len(self._failures) > FATAL_SHARE * self._num_samples:
            shown = "; ".join(list(dict.fromkeys(self._failures))[:3])
            share = percent(len(self._failures) / self._num_samples)
            raise EvaluationError(
                f"{len(self._failures)} of {counted(self._num_samples, 'sample')} ({share}) got no verdict; first "
                f"errors: {shown}"
            )


def judge_sample(setting: EvaluationSetting, verdict: Verdict, text: str, tokens: int, finish: str) -> SampleResult:
    """Return the result of one answer."""
    is_right = None if verdict.reward is None else verdict.reward >= setting.suite.threshold
    answer = answer_of(text, setting.suite.answer)
    return SampleResult(text, answer, verdict.reward, is_right, tokens, finish, verdict.error)


def _copy(request: InferenceRequest, number: int) -> InferenceRequest:
    """Return the request of one sample, with its seed."""
    seed = request.sampling.seed
    return replace(request, sampling=replace(request.sampling, seed=None if seed is None else seed + number))


async def _together(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of all, or raise the first error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
