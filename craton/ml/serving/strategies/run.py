"""`run_strategy`: one request, answered with test-time compute.

    outcome = await run_strategy(client, request, parse_strategy("vote:16"), None, Limits(seconds=30))

What the endpoint cannot give is found out before anything is sampled. Equal seeds give equal outcomes, in whatever
order samples end; only a limit in seconds depends on time. No answer is left open, whatever happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from craton.job.sections.strategy import (
    LOGPROBS,
    BeamStrategy,
    BestOfStrategy,
    BudgetStrategy,
    SearchStrategy,
    Strategy,
    TreeStrategy,
    VoteStrategy,
)
from craton.ml.serving.clients import InferenceClient, InferenceRequest, MissingCapabilityError
from craton.ml.serving.strategies.best_of import best_of
from craton.ml.serving.strategies.errors import StrategyRunError
from craton.ml.serving.strategies.forcing import force_budget
from craton.ml.serving.strategies.limits import Limits
from craton.ml.serving.strategies.outcome import StrategyOutcome, StrategyProgress
from craton.ml.serving.strategies.samples import RunningSamples
from craton.ml.serving.strategies.scorers import Scorer
from craton.ml.serving.strategies.search import beam_search, tree_search
from craton.ml.serving.strategies.task import StrategyTask
from craton.ml.serving.strategies.voting import vote


async def run_strategy(
    client: InferenceClient,
    request: InferenceRequest,
    strategy: Strategy,
    scorer: Scorer | None,
    limits: Limits,
    on_progress: Callable[[StrategyProgress], None] | None = None,
    *,
    row: Mapping[str, Any] | None = None,
    shown_prompt: Any = None,
) -> StrategyOutcome:
    """Return the answer that a strategy chooses. `limits` hold beside the strategy's own. `row`: the row of the data,
    which verifiers see. `shown_prompt`: what they see as prompt; default: the request's."""
    if request.copies != 1 or request.generated:
        raise StrategyRunError("a strategy answers one new request; set copies to 1 and leave generated empty")
    if strategy.verifier is not None and scorer is None:
        raise StrategyRunError(f"strategy.score: there is no verifier {strategy.verifier!r} to score with")
    own = Limits(strategy.max_tokens, strategy.max_seconds, strategy.max_dollars, parent=limits)
    began = asyncio.get_running_loop().time()
    asked = request if shown_prompt is None else replace(request, prompt=shown_prompt)
    async with RunningSamples(client, own) as running:
        sent = await running.before_deadline(prepare_request(client, request, strategy))
        uses_logprobs = getattr(strategy, "score", None) == LOGPROBS
        task = StrategyTask(
            strategy.kind,
            client,
            asked,
            sent or request,
            own,
            running,
            None if uses_logprobs else scorer,
            row or {},
            on_progress,
            strategy.num_samples if not isinstance(strategy, TreeStrategy) else strategy.n,
        )
        outcome = await _run(task, strategy) if sent is not None else task.outcome(task.nothing(), [], {})
    outcome.seconds = asyncio.get_running_loop().time() - began
    return outcome


async def _run(task: StrategyTask, strategy: Strategy) -> StrategyOutcome:
    match strategy:
        case VoteStrategy():
            return await vote(task, strategy)
        case BestOfStrategy():
            return await best_of(task, strategy)
        case BeamStrategy():
            return await beam_search(task, strategy)
        case TreeStrategy():
            return await tree_search(task, strategy)
        case BudgetStrategy():
            return await force_budget(task, strategy)


async def prepare_request(client: InferenceClient, request: InferenceRequest, strategy: Strategy) -> InferenceRequest:
    """Return the request as it is sent, with token ids where the endpoint gives them; MissingCapabilityError if it
    cannot give what the strategy needs."""
    if getattr(strategy, "score", None) == LOGPROBS:
        try:
            await client.require("logprobs")
        except MissingCapabilityError:
            raise MissingCapabilityError(
                f"{client.endpoint} does not give logprobs, which the score {LOGPROBS} needs; score with a verifier or "
                "use a Craton server"
            ) from None
        request = replace(request, sampling=replace(request.sampling, logprobs=request.sampling.logprobs or 0))
    kind = request.prompt_kind
    if (tokens := await client.prompt_tokens(request)) is not None:
        request = replace(request, prompt=tokens)
    if isinstance(strategy, BudgetStrategy):
        await client.require("token_prompts", "token_ids")
    if not isinstance(strategy, SearchStrategy):
        return request
    if request.prompt_kind == "token":
        await client.require("token_prompts", "token_ids")
    elif kind == "chat":
        await _require_continued_chats(client, strategy)
    else:
        await client.require("text_prompts")
    return request


async def _require_continued_chats(client: InferenceClient, strategy: SearchStrategy) -> None:
    """Raise MissingCapabilityError unless the steps of a search can continue the message of a chat."""
    capabilities = await client.capabilities()
    await client.require("chat_prompts")
    if not capabilities.continued_chats:
        raise MissingCapabilityError(
            f"{client.endpoint} cannot continue the message of a chat, as every step of a search does (its prompt "
            "tokens show that it has no continue_final_message); send the chat as a text prompt (think: --completion), "
            "or use vLLM, SGLang or a Craton server"
        )
    end = strategy.step.stop
    if end is not None and end != end.rstrip() and not capabilities.continued_whitespace:
        raise MissingCapabilityError(
            f"{client.endpoint} removes white space at the end of the message that it continues, and each step ends "
            f"with {end!r}; give steps a number of tokens, e.g. step: {{tokens: 64}}"
        )
