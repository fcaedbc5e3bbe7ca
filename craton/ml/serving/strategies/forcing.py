"""Budget forcing (arXiv:2501.19393): a chain of thought of at least and at most so many tokens, then the answer.

A chain of thought that ends too soon goes on with `wait` in place of its end. One that reaches `at_most` tokens is
closed with `close`. Tokens of `wait` count, those of `close` do not. So the number of tokens is exactly within the
budget. This needs an endpoint that takes and gives token ids. A grammar and stop strings apply to the answer only.
"""

from __future__ import annotations

from dataclasses import replace

from craton.job.sections.strategy import BudgetStrategy
from craton.ml.serving.clients import Answer, MissingCapabilityError
from craton.ml.serving.strategies.errors import StrategyRunError
from craton.ml.serving.strategies.outcome import StrategyOutcome, StrategySample
from craton.ml.serving.strategies.task import StrategyTask


async def force_budget(task: StrategyTask, strategy: BudgetStrategy) -> StrategyOutcome:
    whole = task.request.sampling.max_tokens  # of the chain of thought and the answer
    if whole < strategy.at_least:
        raise StrategyRunError(
            f"strategy.at_least: {strategy.at_least} is above the request's max_tokens ({whole}); raise max_tokens or "
            "lower at_least"
        )
    forcing = _Forcing(task, strategy, await _encode(task, strategy.wait), await _encode(task, strategy.close))
    await forcing.think(min(whole, strategy.at_most or whole))
    written = await forcing.write(whole - len(forcing.thoughts))
    report = {
        "thinking_tokens": len(forcing.thoughts),
        "answer_tokens": len(written.tokens) if written is not None else 0,
        "waits": forcing.num_waits,
        "closed": forcing.is_closed,
    }
    if not forcing.answers:
        return task.outcome(task.nothing(), [], report)
    tokens = task.limits.completion_tokens
    sample = StrategySample(0, "", num_tokens=tokens, finish="length", answer=forcing.answers[-1])
    if written is not None:
        sample = replace(sample, text=written.text, tokens=tuple(written.tokens), finish=written.finish)
    return task.outcome(sample, [sample], report, forcing.text)


class _Forcing:
    """The chain of thought of one request."""

    def __init__(
        self, task: StrategyTask, strategy: BudgetStrategy, wait: tuple[int, ...], close: tuple[int, ...]
    ) -> None:
        self.task, self.strategy, self.wait, self.close = task, strategy, wait, close
        self.thoughts: list[int] = []
        self.text = ""
        self.answers: list[Answer] = []
        self.num_waits = 0
        self.is_closed = False  # by us, at its maximum

    async def think(self, at_most: int) -> None:
        while len(self.thoughts) < at_most:
            answer = await self._sample(self.thoughts, at_most - len(self.thoughts), is_thought=True)
            if answer is None:
                return
            self.thoughts += self._without_close(answer)
            self.text += answer.text
            if self.task.running.limited_by:
                return
            if len(self.thoughts) >= at_most:
                break
            if len(self.thoughts) >= self.strategy.at_least:
                return
            left = at_most - len(self.thoughts)
            self.thoughts += self.wait[:left]
            self.text += self.strategy.wait if len(self.wait) <= left else ""
            self.num_waits += 1
            self.task.tell(f"{len(self.thoughts)} thinking tokens")
        self.is_closed = True

    async def write(self, max_tokens: int) -> Answer | None:
        """Sample the answer behind the chain of thought; None if nothing is left for it."""
        if max_tokens < 1 or self.task.running.limited_by:
            return None
        return await self._sample([*self.thoughts, *self.close], max_tokens, is_thought=False)

    async def _sample(self, behind: list[int], max_tokens: int, is_thought: bool) -> Answer | None:
        request, running = self.task.request, self.task.running
        seed = self.task.path_seed((len(self.answers),) if self.answers else ())
        sampling = replace(request.sampling, max_tokens=max_tokens, seed=seed)
        stop = request.stop
        if is_thought:
            stop_tokens = (*sampling.stop_tokens, *(self.close if len(self.close) == 1 else ()))
            sampling, stop = replace(sampling, grammar=None, stop_tokens=stop_tokens), (self.strategy.close,)
        asked = replace(request, prompt=(*request.prompt, *behind), stop=stop, sampling=sampling)
        answers = await running.start(asked)
        await running.wait_all()
        running.abort_all()
        self.answers += answers
        return answers[0] if answers else None

    def _without_close(self, answer: Answer) -> list[int]:
        """Return the tokens of a chain of thought, without those of the text that ended it."""
        is_closed = answer.finish == "stop" and answer.stop_reason == self.strategy.close
        return answer.tokens[: len(answer.tokens) - len(self.close)] if is_closed else list(answer.tokens)


async def _encode(task: StrategyTask, text: str) -> tuple[int, ...]:
    tokens = await task.client.tokenize(text)
    if task.request.prompt_kind != "token" or tokens is None:
        raise MissingCapabilityError(
            f"{task.client.endpoint} does not tokenize texts, which budget forcing needs to count tokens exactly; "
            "use a Craton server"
        )
    if not tokens:
        raise StrategyRunError(f"strategy: {text!r} has no tokens in this model's vocabulary; write another text")
    return tokens
