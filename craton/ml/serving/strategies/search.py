"""Beam and tree search over the steps of a completion, guided by the score of what is written so far.

A branch continues its parent's tokens as one request with `width` copies, so that on our engines all share the KV
cache of the prompt and of the parent, also its last, partly filled block. An endpoint that takes no token ids gets the
parent's text, behind a text or as the last message of a chat. Seeds follow from the path of a branch,
and the nodes are chosen in a fixed order: equal seeds give an equal tree.

- Beam: the `n` best branches of each level are expanded by `width` steps each.
- Tree: the open branch with the highest score is expanded, until `n` branches were sampled.

A search ends when no branch is open, or (tree) when a finished branch has a higher score than every open one. If no
branch has finished by then, the best open one is continued to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from craton.job.sections.strategy import BeamStrategy, SearchStrategy, TreeStrategy
from craton.ml.serving.clients import Answer, InferenceRequest
from craton.ml.serving.messages import Finish, Sampling
from craton.ml.serving.strategies.outcome import StrategyOutcome, StrategySample
from craton.ml.serving.strategies.task import StrategyTask, expect_scores, mean_logprob

LOWEST = float("-inf")


@dataclass(eq=False)
class Branch:
    """A completion up to the end of one of its steps."""

    path: tuple[int, ...] = ()  # indices of its steps among their siblings
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: list[float] = field(default_factory=list)
    num_tokens: int = 0
    score: float | None = None
    finish: Finish | None = None  # None: it can be continued
    answer: Answer | None = None  # of its last step

    @property
    def rank(self) -> float:
        return LOWEST if self.score is None else self.score


class StepSearch:
    """The tree of one search."""

    def __init__(self, task: StrategyTask, strategy: SearchStrategy) -> None:
        self.task, self.strategy = task, strategy
        self.branches: list[Branch] = []
        self.num_scored = 0

    async def expand(self, parents: Sequence[tuple[Branch, int]]) -> list[Branch]:
        """Sample the next steps of branches, so many for each, and score them. Fewer come where a limit is reached."""
        running = self.task.running
        started: list[tuple[Branch, int, Answer]] = []
        for parent, width in parents:
            index = 0
            while index < width and not running.limited_by:
                answers = await running.start(self._request(parent, index), width - index)
                started += [(parent, index + place, answer) for place, answer in enumerate(answers)]
                index += len(answers)
                if not answers and not await running.wait():
                    break
        await running.wait_all()
        running.abort_all()
        children = [self._child(parent, index, answer) for parent, index, answer in started]
        await self._score(children)
        self.branches += children
        self.task.tell()
        return children

    async def finish_best(self, open_branches: Sequence[Branch]) -> None:
        """Continue the best open branch to its end, if there is none that has ended."""
        if any(branch.finish for branch in self.branches) or not open_branches or self.task.running.limited_by:
            return
        best = max(open_branches, key=lambda branch: branch.rank)
        answers = await self.task.running.start(self._request(best, 0, is_last=True))
        await self.task.running.wait_all()
        self.task.running.abort_all()
        ends = [self._child(best, 0, answer, is_last=True) for answer in answers]
        await self._score(ends)
        self.branches += ends

    def outcome(self) -> StrategyOutcome:
        task = self.task
        is_late = task.running.limited_by == "seconds"
        expect_scores(task.scorer, self.num_scored, [branch.score for branch in self.branches], is_late)
        ends = [branch for branch in self.branches if branch.finish not in (None, "abort")] or self.branches
        chosen = max(ends, key=lambda branch: (branch.rank, branch.num_tokens if is_late else 0), default=None)
        parents = {branch.path[:-1] for branch in self.branches}
        leaves = [branch for branch in self.branches if branch.path not in parents]
        samples = [_sample(index, branch) for index, branch in enumerate(leaves)]
        report: dict[str, Any] = {
            "score": self.strategy.score,
            "branches": len(self.branches),
            "depth": max((len(branch.path) for branch in self.branches), default=0),
            "finished": sum(branch.finish not in (None, "abort") for branch in self.branches),
            "without_score": sum(branch.score is None for branch in self.branches),
            "scores": [sample.score for sample in samples],
        }
        if chosen is None:
            return task.outcome(task.nothing(), samples, report)
        report["path"] = list(chosen.path)
        index = leaves.index(chosen) if chosen in leaves else len(samples)
        return task.outcome(_sample(index, chosen), samples, report, chosen_tokens=chosen.num_tokens)

    def _request(self, parent: Branch, first: int, is_last: bool = False) -> InferenceRequest:
        """Return the request for the steps behind a branch, from its child `first` on."""
        request, step = self.task.request, self.strategy.step
        sampling = self.task.request.sampling
        left = sampling.max_tokens - parent.num_tokens
        length = left if is_last or step.tokens is None else min(step.tokens, left)
        stop = request.stop if is_last or step.stop is None else (*request.stop, step.stop)
        seed = self.task.path_seed(parent.path)
        seed = None if seed is None else seed + first
        if request.prompt_kind == "token" and changes_by_position(sampling):
            sampling = replace(sampling, max_tokens=parent.num_tokens + length, seed=seed)
            return replace(request, sampling=sampling, stop=stop, generated=(*request.generated, *parent.tokens))
        request = replace(request, stop=stop, sampling=replace(sampling, max_tokens=length, seed=seed))
        prompt: Any = request.prompt
        if request.prompt_kind != "chat":
            longer = prompt + parent.text if isinstance(prompt, str) else (*prompt, *parent.tokens)
            return replace(request, prompt=longer)
        if not parent.text:
            return request
        message = {"role": "assistant", "content": parent.text}
        return replace(request, prompt=[*prompt, message], continues_message=True)

    def _child(self, parent: Branch, index: int, answer: Answer, is_last: bool = False) -> Branch:
        sampling, step = self.task.request.sampling, self.strategy.step
        sampled = len(answer.tokens) or answer.num_tokens
        text, num_tokens, finish = answer.text, parent.num_tokens + sampled, answer.finish
        if finish == "stop" and not is_last and step.stop is not None:
            # Without token ids, the endpoint may not say what ended it. An empty step then ends the branch.
            if answer.stop_reason == step.stop or (answer.stop_reason is None and not answer.tokens and text):
                text, finish = text + step.stop, None
        elif finish == "length" and not is_last and step.tokens is not None:
            is_cut = answer.request.sampling.max_tokens - len(answer.request.generated) < step.tokens
            finish = "length" if is_cut else None
        if num_tokens >= sampling.max_tokens:
            finish = finish or "length"
        return Branch(
            (*parent.path, index),
            parent.text + text,
            (*parent.tokens, *answer.tokens),
            [*parent.logprobs, *answer.sampled_logprobs],
            num_tokens,
            finish=finish,
            answer=answer,
        )

    async def _score(self, branches: list[Branch]) -> None:
        scored = [branch for branch in branches if branch.finish != "abort"]
        if self.task.scorer is None:
            for branch in scored:
                branch.score = mean_logprob(branch.logprobs)
        elif scored:
            scores = await self.task.scores([branch.text for branch in scored])
            for branch, score in zip(scored, scores, strict=True):
                branch.score = score
        self.num_scored += len(scored)


async def beam_search(task: StrategyTask, strategy: BeamStrategy) -> StrategyOutcome:
    search = StepSearch(task, strategy)
    beams = [(Branch(), strategy.n * strategy.width)]
    open_branches: list[Branch] = []
    for _ in range(strategy.depth):
        children = await search.expand(beams)
        best = sorted(children, key=lambda branch: branch.rank, reverse=True)[: strategy.n]
        open_branches = [branch for branch in best if branch.finish is None]
        beams = [(branch, strategy.width) for branch in open_branches]
        if not beams or task.running.limited_by:
            break
    await search.finish_best(open_branches)
    return search.outcome()


async def tree_search(task: StrategyTask, strategy: TreeStrategy) -> StrategyOutcome:
    search = StepSearch(task, strategy)
    open_branches = [Branch()]
    while open_branches and len(search.branches) < strategy.n and not task.running.limited_by:
        best = max(open_branches, key=lambda branch: branch.rank)  # the first of several
        finished = [branch.rank for branch in search.branches if branch.finish not in (None, "abort")]
        if finished and max(finished) > best.rank:
            break
        open_branches.remove(best)
        children = await search.expand([(best, min(strategy.width, strategy.n - len(search.branches)))])
        open_branches += [child for child in children if child.finish is None and len(child.path) < strategy.depth]
    await search.finish_best([branch for branch in search.branches if branch.finish is None])
    return search.outcome()


def _sample(index: int, branch: Branch) -> StrategySample:
    return StrategySample(
        index, branch.text, branch.tokens, branch.num_tokens, branch.finish, branch.score, answer=branch.answer
    )


def changes_by_position(sampling: Sampling) -> bool:
    """Whether the next token depends on which tokens count as generated, beside their text."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1)
    return any(penalties) or sampling.grammar is not None or sampling.min_tokens > 0
